"""Trees without a draft model: from the row's own text, and from a table of n-grams.

What followed the longest earlier match of a suffix is likely to follow again (prompt lookup;
Saxena 2023). Where the text says little, a back-off n-gram model may say more.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import Sampling
from specjax.draft.drafter import Drafter, Seen, Step
from specjax.draft.growth import (
    Growth,
    Likely,
    Nodes,
    ScoredNodes,
    Source,
    contexts,
    grow,
    join,
    no_nodes,
    tree_of,
    without_guesses,
)
from specjax.draft.ngram import NO_TOKEN, NGram, successors
from specjax.models.layers import write_window
from specjax.trees.construction import TOP_K, Construction
from specjax.trees.tree import NO_PARENT, TokenTree

_SHARPER = 8.0
"""How much more a match counts than one that is a token shorter."""


@pytree
class Text:
    """The tokens of each row, the root included, and how many they are."""

    tokens: Int32[Array, "B S"]
    length: Int32[Array, " B"]


def read(prompt: Int32[Array, "B T"], length: Int32[Array, " B"], slots: int) -> Text:
    """The text of prompts, with room for `slots` tokens."""
    return Text(jnp.pad(prompt, ((0, 0), (0, slots - prompt.shape[1]))), length)


def append(text: Text, step: Step) -> Text:
    """The text with a step's tokens."""
    tokens = write_window(text.tokens, step.tokens, text.length, axis=1)
    return Text(tokens, text.length + step.count)


def ends_of(text: Text) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """The last token but one, or `NO_TOKEN`, and the last one."""
    length = text.length[:, None]
    at = jnp.maximum(length - jnp.array([2, 1]), 0)
    both = jnp.take_along_axis(text.tokens, at, axis=1)
    return jnp.where(length[:, 0] > 1, both[:, 0], NO_TOKEN), both[:, 1]


@pytree
class TextSource(Source):
    """What followed earlier matches in the text, and what `table` says where there is one.

    `trust[m]` is how likely the most frequent successor of the longest matches, of `m` tokens, is
    to be right; matches count up to the last entry, and shorter ones than `least` not at all. It
    holds, for every expanded node, how many tokens up to each place of the text match its path.
    """

    text: Text
    trust: Float[Array, " M"]
    table: NGram | None
    least: int = static()
    width: int = static()

    def begin(self, nodes: Nodes) -> Int32[Array, "B K1 S"]:
        """The carry of trees that stand already; the root's place is before the slots."""
        rows, budget = nodes.tokens.shape
        root = self._at_root()
        carry = jnp.zeros((rows, budget + 1, root.shape[1]), jnp.int32).at[:, 0].set(root)
        every = jnp.broadcast_to(jnp.arange(budget, dtype=jnp.int32), (rows, budget))

        def deeper(_: Any, carry: Array) -> Array:
            return carry.at[:, 1:].set(self._matches(nodes, every, carry))

        deepest = jnp.where(nodes.valid, nodes.depth, 0).max()
        return lax.fori_loop(0, deepest, deeper, carry)

    def after(
        self, nodes: Nodes, scored: ScoredNodes, carry: Int32[Array, "B K1 S"]
    ) -> tuple[Likely, Int32[Array, "B n S"]]:
        """What is likely after nodes, and their matches."""
        match = self._matches(nodes, scored.slots, carry)
        return self.following(nodes, scored.slots, match), match

    def _at_root(self) -> Int32[Array, "B S"]:
        """How many tokens up to each place match the end of the text."""
        tokens, length = self.text.tokens, self.text.length[:, None]
        place = jnp.arange(tokens.shape[1])
        match = jnp.zeros(tokens.shape, jnp.int32)
        still = jnp.broadcast_to(place < length - 1, tokens.shape)
        for back in range(self.trust.shape[0] - 1):
            wanted = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0), axis=1)
            still = still & (jnp.roll(tokens, back, axis=1) == wanted)
            still = still & (place >= back) & (length > back)
            match += still
        return match

    def _matches(
        self, nodes: Nodes, slots: Int32[Array, "B n"], carry: Int32[Array, "B K1 S"]
    ) -> Int32[Array, "B n S"]:
        """How many tokens up to each place match the path to nodes whose parents are held."""
        last = jnp.take_along_axis(nodes.tokens, slots, axis=1)
        parent = jnp.take_along_axis(nodes.parents, slots, axis=1)
        of_parent = jnp.take_along_axis(carry, parent[:, :, None] + 1, axis=1)
        longer = jnp.pad(of_parent, ((0, 0), (0, 0), (1, 0)))[:, :, :-1] + 1
        same = self.text.tokens[:, None] == last[:, :, None]
        same &= jnp.arange(same.shape[2]) < self.text.length[:, None, None] - 1
        return jnp.where(same, jnp.minimum(longer, self.trust.shape[0] - 1), 0)

    def following(
        self, nodes: Nodes, slots: Int32[Array, "B n"], match: Int32[Array, "B n S"]
    ) -> Likely:
        """What is likely after nodes (slot -1: the root) whose matches are given.

        Successors of the matches, then those of the table that are not among them.
        """
        match = jnp.where(match >= self.least, match, 0)
        longest = match.max(axis=2)
        share, tokens = _followers(match, longest, self.text.tokens, self.width)
        sure = self.trust[longest][:, :, None]
        chance = share * sure
        if self.table is None:
            return Likely(tokens, jnp.log(chance))
        log_q, listed = successors(self.table, *contexts(nodes, slots, *ends_of(self.text)))
        of_table = jnp.exp(log_q) * jnp.where(share.sum(axis=2) > 0, 1 - sure[..., 0], 1)[..., None]
        same = (tokens[..., :, None] == listed[..., None, :]) & (share > 0)[..., :, None]
        chance += (same * of_table[..., None, :]).sum(axis=3)
        of_table = jnp.where(same.any(axis=2), 0, of_table)
        both = jnp.concatenate([chance, of_table], axis=2)
        return Likely(jnp.concatenate([tokens, listed], axis=2), jnp.log(both))

    def hold(
        self,
        carry: Int32[Array, "B K1 S"],
        made: Int32[Array, "B n S"],
        slots: Int32[Array, "B n"],
    ) -> Int32[Array, "B K1 S"]:
        """The carry with the matches of nodes that came to stand in `slots`."""
        return carry.at[jnp.arange(carry.shape[0])[:, None], slots + 1].set(made, mode="drop")


def _followers(
    match: Int32[Array, "B n S"],
    longest: Int32[Array, "B n"],
    tokens: Int32[Array, "B S"],
    width: int,
) -> tuple[Float[Array, "B n w"], Int32[Array, "B n w"]]:
    """Shares and tokens of the most weighty successors of the places that match."""
    follower = jnp.roll(tokens, -1, axis=1)[:, None]
    weight = jnp.where(match > 0, _SHARPER ** (match - longest[:, :, None]).astype(jnp.float32), 0)
    total = weight.sum(axis=2)
    recent = jnp.arange(tokens.shape[1]) / (4.0 * tokens.shape[1])
    shares, found = [], []
    for _ in range(width):
        best = jnp.argmax(jnp.where(weight > 0, weight * (1 + recent), 0), axis=2)
        token = jnp.take_along_axis(jnp.broadcast_to(follower, weight.shape), best[..., None], 2)
        same = follower == token
        shares.append(jnp.where(same, weight, 0).sum(axis=2) / jnp.where(total > 0, total, 1))
        found.append(token[..., 0])
        weight = jnp.where(same, 0, weight)
    return jnp.stack(shares, axis=2), jnp.stack(found, axis=2)


def grow_on(
    source: TextSource,
    growth: Growth,
    nodes: Nodes,
    slots: Int32[Array, "B n"],
    drafter: int = 0,
) -> Nodes:
    """Trees grown below the nodes in `slots` (-1: the roots) until no child is better.

    All nodes share the one budget; new ones are marked as `drafter`'s.
    """
    carry = source.begin(nodes)
    at = jnp.maximum(slots, 0)
    score, there = (jnp.take_along_axis(x, at, axis=1) for x in (nodes.score, nodes.valid))
    score = jnp.where(slots < 0, 0, jnp.where(there, score, -jnp.inf))
    match = jnp.take_along_axis(carry, slots[:, :, None] + 1, axis=1)
    likely = _unlike(nodes, slots, source.following(nodes, slots, match))
    nodes, _, growing = join(nodes, without_guesses(slots, score), likely, growth, drafter)
    return grow(source, growth, nodes, carry, growing, drafter)[0]


def grow_beside(source: TextSource, growth: Growth, nodes: Nodes) -> Nodes:
    """Trees in which branches of the text compete for the slots, below the roots and any node.

    What the text adds is marked as of drafter 1.
    """
    rows, budget = nodes.tokens.shape
    every = jnp.broadcast_to(jnp.arange(-1, budget, dtype=jnp.int32), (rows, budget + 1))
    return grow_on(source, replace(growth, least_gain=0.0, by_level=False), nodes, every, drafter=1)


def _unlike(nodes: Nodes, slots: Int32[Array, "B n"], likely: Likely) -> Likely:
    """Children that the nodes in `slots` do not have yet."""
    theirs = (nodes.parents[:, None] == slots[:, :, None]) & nodes.valid[:, None]
    same = likely.tokens[..., None] == nodes.tokens[:, None, None]
    there = (same & theirs[:, :, None]).any(axis=3)
    return Likely(likely.tokens, jnp.where(there, -jnp.inf, likely.log_q))


class OfText(Drafter):
    """A drafter whose state is a row's text, and whose trees grow best first."""

    growth: Growth
    vocabulary: int

    @property
    def window(self) -> int:
        """Depth of the deepest tree plus 1."""
        return self.growth.levels + 1

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.vocabulary

    @property
    def num_slots(self) -> int:
        """Node slots, the root's included."""
        return self.growth.budget + 1

    @property
    def construction(self) -> Construction:
        """Chosen nodes."""
        return Construction(TOP_K, chain=False)

    @property
    def takes_nodes(self) -> bool:
        """Its state is a text."""
        return True

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> Text:
        """The prompts."""
        del seen
        return read(prompt, length, slots)

    def commit(self, state: Text, step: Step) -> Text:
        """The text with the step's tokens."""
        return append(state, step)

    def truncate(self, state: Text, length: Int32[Array, " B"]) -> Text:
        """The text's first tokens."""
        return replace(state, length=length)


@pytree
class TextDrafter(OfText):
    """Best-first trees of a `TextSource`: prompt lookup, or a back-off n-gram model."""

    trust: Float[Array, " M"]
    table: NGram | None
    growth: Growth = static()
    vocabulary: int = static()
    least: int = static(default=1)
    followers: int = static(default=3)

    def source(self, text: Text) -> TextSource:
        """What is likely to follow."""
        return TextSource(text, self.trust, self.table, self.least, self.followers)

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
        root = jnp.full((last.shape[0], 1), NO_PARENT, jnp.int32)
        nodes = no_nodes(last.shape[0], self.growth.budget)
        nodes = grow_on(self.source(state), self.growth, nodes, root)
        return tree_of(nodes, last, self.vocab_size)[0], state
