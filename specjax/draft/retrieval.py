"""Trees of what followed in a corpus where it goes on as the text does (REST, arXiv 2311.08252).

A suffix array finds all places that match the end of the text, and lists them by what follows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, static, unchecked
from specjax.base.sampling import Sampling
from specjax.draft.growth import (
    Growth,
    Likely,
    Nodes,
    ScoredNodes,
    Source,
    grow,
    join,
    no_nodes,
    roots,
    tree_of,
)
from specjax.draft.ngram import NO_TOKEN
from specjax.draft.prompt_lookup import OfText, Text
from specjax.trees.tree import TokenTree

COMPARED = 32
"""Tokens by which suffixes are ordered; a match and the tree below it have no more together."""
_LOOKED_AT = 32
"""Places of a match, evenly spread over it, at which is looked what follows."""


@pytree
class Corpus:
    """Tokens of texts, `NO_TOKEN` behind each, and the places of their suffixes in order.

    Suffixes are ordered by their first `COMPARED` tokens. The tokens go on with `NO_TOKEN` for so
    many places.
    """

    tokens: Int32[Array, " M"]
    order: Int32[Array, " N"]


@pytree
class Matches:
    """Which places of a corpus match: those from `first` to before `end` in order, and how many
    `tokens` of each do.
    """

    first: Int32[Array, "*S"]
    end: Int32[Array, "*S"]
    tokens: Int32[Array, "*S"]


def corpus_of(texts: Sequence[Sequence[int] | np.ndarray]) -> Corpus:
    """The corpus of some texts.

    Raises:
      ValueError: they have no token.
    """
    if not any(map(len, texts)):
        raise ValueError("a corpus has at least one token; these texts have none.")
    return jax.tree.map(jnp.asarray, arrays_of(texts))


def arrays_of(texts: Sequence[Sequence[int] | np.ndarray], size: int = 0) -> Corpus:
    """The corpus of some texts as arrays of the host, of `size` tokens at least.

    What no text takes is `NO_TOKEN`.
    """
    parts = [np.asarray([*text, NO_TOKEN], np.int32) for text in texts if len(text)]
    spare = np.full(max(0, size - sum(map(len, parts))), NO_TOKEN, np.int32)
    tokens = np.concatenate([*parts, spare])
    padded = np.concatenate([tokens, np.full(COMPARED, NO_TOKEN, np.int32)])
    return unchecked(Corpus, tokens=padded, order=_ordered(tokens))


def _ordered(tokens: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """The places of suffixes by their first `COMPARED` tokens: ranks by twice as many each round.

    Manber and Myers 1993.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    reach = 1
    while reach < COMPARED:
        behind = np.concatenate([rank[reach:] + 1, np.zeros(min(reach, len(rank)), np.int64)])
        rank = np.unique(rank * (len(rank) + 1) + behind, return_inverse=True)[1].astype(np.int64)
        reach *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def all_of(corpus: Corpus, shape: tuple[int, ...]) -> Matches:
    """Every place of a corpus, of which no token matches yet."""
    none = jnp.zeros(shape, jnp.int32)
    return Matches(none, none + corpus.order.shape[0], none)


def narrowed(corpus: Corpus, matches: Matches, token: Int32[Array, "*S"]) -> Matches:
    """Those of the matches that go on with a token."""
    count = corpus.order.shape[0]
    at = jnp.stack([token, token + 1])  # the first that is not below it, and not below the next
    low, high = (jnp.broadcast_to(each, at.shape) for each in (matches.first, matches.end))

    def halved(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        own = corpus.order[jnp.minimum(middle, count - 1)] + matches.tokens
        below = (corpus.tokens[own] < at) & (low < high)
        return jnp.where(below, middle + 1, low), jnp.where(below | (low >= high), high, middle)

    first, end = lax.fori_loop(0, count.bit_length(), halved, (low, high))[0]
    return Matches(first, end, matches.tokens + 1)


@pytree
class CorpusSource(Source):
    """What followed in a corpus where it matches the text, and a node's path below that.

    `trust[m]` is how likely the most frequent follower of a match of `m` tokens is to be right. It
    holds the matches of every expanded node, the root's before the slots.
    """

    corpus: Corpus
    trust: Float[Array, " L"]
    width: int = static()

    def after(self, nodes: Nodes, scored: ScoredNodes, carry: Matches) -> tuple[Likely, Matches]:
        """What is likely after nodes, and their matches."""
        parent = jnp.take_along_axis(nodes.parents, scored.slots, axis=1) + 1
        above = Matches(
            *(jnp.take_along_axis(each, parent, axis=1)
              for each in (carry.first, carry.end, carry.tokens))
        )  # fmt: skip
        token = jnp.take_along_axis(nodes.tokens, scored.slots, axis=1)
        matches = narrowed(self.corpus, above, token)
        return self.following(matches), matches

    def following(self, matches: Matches) -> Likely:
        """The most frequent followers of matches."""
        count = matches.end - matches.first
        part = jnp.arange(_LOOKED_AT, dtype=jnp.int32)
        # n * i / 32 without a product that would overflow
        place = count[..., None] // _LOOKED_AT * part + count[..., None] % _LOOKED_AT * part // (
            _LOOKED_AT
        )
        at = jnp.minimum(matches.first[..., None] + place, self.corpus.order.shape[0] - 1)
        length = jnp.minimum(matches.tokens, COMPARED - 1)
        tokens = self.corpus.tokens[self.corpus.order[at] + length[..., None]]
        able = (tokens != NO_TOKEN) & ((count > 0) & (matches.tokens < COMPARED))[..., None]
        same = tokens[..., :, None] == tokens[..., None, :]
        is_first = ~jnp.tril(same, -1).any(axis=-1) & able
        shares = jnp.where(is_first, same.sum(axis=-1) / _LOOKED_AT, 0.0)
        best, which = lax.top_k(shares, min(self.width, _LOOKED_AT))
        sure = self.trust[jnp.minimum(matches.tokens, self.trust.shape[0] - 1)]
        found = jnp.maximum(jnp.take_along_axis(tokens, which, axis=-1), 0)
        return Likely(found, jnp.log(best * sure[..., None]))

    def hold(self, carry: Matches, made: Matches, slots: Int32[Array, "B n"]) -> Matches:
        """The carry with the matches of nodes that came to stand in `slots`."""
        row = jnp.arange(slots.shape[0])[:, None]

        def put(held: Array, new: Array) -> Array:
            return held.at[row, slots + 1].set(new, mode="drop")

        return Matches(
            put(carry.first, made.first), put(carry.end, made.end), put(carry.tokens, made.tokens)
        )


@pytree
class RetrievalDrafter(OfText):
    """Best-first trees of a `CorpusSource`, below the longest end of the text that is in it."""

    corpus: Corpus
    trust: Float[Array, " L"]
    growth: Growth = static()
    vocabulary: int = static()
    least: int = static(default=2)
    followers: int = static(default=3)

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: Text,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, Text]:
        """The tree of the likeliest nodes; nothing of it is random."""
        del key, position, sampling
        return self.tree(self.grown(state), last), state

    def tree(self, nodes: Nodes, last: Int32[Array, " B"]) -> TokenTree:
        """The tree of nodes below the root tokens `last`."""
        return tree_of(nodes, last, self.vocabulary)[0]

    def grown(self, text: Text) -> Nodes:
        """The likeliest nodes below the end of each text."""
        rows, budget = text.length.shape[0], self.growth.budget
        source = CorpusSource(self.corpus, self.trust, min(self.followers, budget))
        root = self.longest(text)
        none = jnp.zeros((rows, budget + 1), jnp.int32)
        carry = source.hold(Matches(none, none, none), root, jnp.full((rows, 1), -1, jnp.int32))
        likely, nodes = source.following(root), no_nodes(rows, budget)
        nodes, _, growing = join(nodes, roots(rows), likely, self.growth)
        return grow(source, self.growth, nodes, carry, growing)[0]

    def longest(self, text: Text) -> Matches:
        """The places that match the longest end of each text, of `least` tokens at least: `[B, 1]`.

        All lengths up to that of `trust` are looked for together, a token after the other.
        """
        lengths = np.arange(1, self.trust.shape[0])
        shape = (text.length.shape[0], lengths.size)
        matches = all_of(self.corpus, shape)
        for step in range(lengths.size):
            at = text.length[:, None] - lengths + step
            token = jnp.take_along_axis(text.tokens, jnp.maximum(at, 0), axis=1)
            longer = narrowed(self.corpus, matches, token)
            goes_on = step < lengths
            fields = ((longer.first, matches.first), (longer.end, matches.end),
                      (longer.tokens, matches.tokens))  # fmt: skip
            matches = Matches(*(jnp.where(goes_on, new, old) for new, old in fields))
        there = (matches.end > matches.first) & (lengths <= text.length[:, None])
        there &= lengths >= self.least
        best = jnp.where(there, lengths, 0).argmax(axis=1, keepdims=True)

        def of_best(values: Array) -> Array:
            return jnp.take_along_axis(values, best, axis=1)

        first = of_best(matches.first)
        end = jnp.where(of_best(there), of_best(matches.end), first)
        return Matches(first, end, of_best(matches.tokens))
