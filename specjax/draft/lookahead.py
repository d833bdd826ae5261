"""Lookahead decoding (arXiv 2402.02057): the target's own guesses far ahead, kept as n-grams.

Beside the token that comes next the target is asked about a window of guesses of what comes later.
A step makes each of them one token longer and likelier (Jacobi iteration); what their last N tokens
were is an n-gram of the target's own making. Those that begin with the last token are drafted.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import Sampling
from specjax.draft.drafter import Drafter, Seen, Step, Wants
from specjax.draft.ngram import NO_TOKEN
from specjax.trees.construction import TOP_K, Construction
from specjax.trees.tree import NO_PARENT, TokenTree, chosen

_HOMES = 1024
"""Places of n-grams by their first token."""
_FEW = 64
"""N-grams among which those that are equal are looked for."""
_MIX = np.uint32(0x9E3779B1)


class Window(NamedTuple):
    """The sizes of lookahead decoding: W `columns` of guesses, n-grams of N `tokens`, and at most G
    `candidates` that are drafted.
    """

    columns: int
    tokens: int
    candidates: int

    @property
    def rows(self) -> int:
        """Tokens of each guess."""
        return self.tokens - 1

    @property
    def nodes(self) -> int:
        """Nodes below the root, of candidates and of guesses."""
        return self.rows * (self.candidates + self.columns)


@pytree
class LookaheadState:
    """A row's guesses, the oldest row of them first, and the n-grams of its text.

    `grams` holds for each home the last ones whose first token has it (`NO_TOKEN`: none), and
    `newest` how many it was given.
    """

    guesses: Int32[Array, "B R W"]
    grams: Int32[Array, "B H G N"]
    newest: Int32[Array, "B H"]


@pytree
class LookaheadDrafter(Drafter):
    """Trees of n-grams that begin with the last token, and, behind them, of the guesses.

    A guess is a path, too: it sees the first tokens of the guesses before it, and its own. So one
    pass over a token tree is the published one over both branches, whose mask this is. `chance` is
    how likely a candidate's token is to be right.
    """

    chance: Float[Array, ""]
    window_of: Window = static()
    vocabulary: int = static()

    @property
    def window(self) -> int:
        """Depth of the deepest guess plus 1."""
        return self.window_of.columns + self.window_of.rows

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.vocabulary

    @property
    def num_slots(self) -> int:
        """Node slots, the root's included."""
        return self.window_of.nodes + 1

    @property
    def wants(self) -> Wants:
        """The likeliest token after each guess."""
        return Wants(top_tokens=1)

    @property
    def construction(self) -> Construction:
        """Chosen nodes."""
        return Construction(TOP_K, chain=False)

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> LookaheadState:
        """Guesses of tokens from the prompts, and the n-grams of these."""
        del slots, seen
        size, rows = self.window_of, prompt.shape[0]
        number = np.arange(size.rows * size.columns).reshape(size.rows, size.columns)
        at = number[None] * 31 % length[:, None, None]  # any of them; the same at each start
        guesses = prompt[jnp.arange(rows)[:, None, None], at]
        empty = jnp.full((rows, _HOMES, size.candidates, size.tokens), NO_TOKEN, jnp.int32)
        state = LookaheadState(guesses, empty, jnp.zeros((rows, _HOMES), jnp.int32))
        count = prompt.shape[1] - size.tokens + 1
        if count < 1:
            return state
        grams = jnp.stack([prompt[:, at : at + count] for at in range(size.tokens)], axis=2)
        there = jnp.arange(count) + size.tokens <= length[:, None]
        return kept(state, grams, there)

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: LookaheadState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, LookaheadState]:
        """The tree; nothing of it is random."""
        del key, position, sampling
        size, rows = self.window_of, last.shape[0]
        tails, valid, parents = _candidates(state, last, size)
        first = 1 + size.rows * size.candidates
        number = np.arange(size.rows * size.columns)
        row, column = number // size.columns, number % size.columns
        # below the same column's guess of the row above, or below the column before
        above = np.where(row > 0, first + number - size.columns, first + column - 1)
        above = np.where((row == 0) & (column == 0), 0, above)

        def every(values: np.ndarray | Array) -> Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (rows, len(values)))

        def joined(root: Array, found: Array, guessed: Array) -> Array:
            return jnp.concatenate([root, found.reshape(rows, -1), guessed], axis=1)

        one = jnp.ones((rows, 1), jnp.int32)
        depth = np.tile(np.arange(1, size.rows + 1), size.candidates)
        chance = jnp.full((rows, depth.size), self.chance, jnp.float32)
        tree = chosen(
            tokens=joined(last[:, None], tails, state.guesses.reshape(rows, -1)),
            parents=joined(one * NO_PARENT, parents, every(above)),
            depth=joined(0 * one, every(depth), every(row + column + 1)),
            valid=joined(one > 0, valid, every(number) >= 0),
            drafter=joined(0 * one, every(0 * depth), every(0 * number)),
            chance=joined(jnp.ones((rows, 1)), chance, jnp.zeros((rows, number.size))),
            vocabulary=self.vocabulary,
        )
        return tree, state

    def commit(self, state: LookaheadState, step: Step) -> LookaheadState:
        """Each guess a token longer, without its first; its n-gram is kept.

        A guess is of a place in the text, so that the columns move by what was accepted.
        """
        size, rows = self.window_of, step.count.shape[0]
        longer = step.seen.top_tokens[:, -size.columns :, 0]
        guesses = jnp.concatenate([state.guesses, longer[:, None]], axis=1)
        alive = step.count > 0
        grams = guesses.transpose(0, 2, 1)
        there = jnp.broadcast_to(alive[:, None], (rows, size.columns))
        moved = jnp.arange(size.columns) + jnp.maximum(step.count - 1, 0)[:, None]
        after = jnp.take_along_axis(guesses[:, 1:], (moved % size.columns)[:, None], axis=2)
        after = jnp.where(alive[:, None, None], after, state.guesses)
        return replace(kept(state, grams, there), guesses=after)

    def follow(self, state: LookaheadState, step: Step) -> LookaheadState:
        """The state as it is: the target was not asked about its guesses."""
        del step
        return state

    def truncate(self, state: LookaheadState, length: Int32[Array, " B"]) -> LookaheadState:
        """The state as it is: what it learned of longer texts does no harm."""
        del length
        return state


def kept(
    state: LookaheadState, grams: Int32[Array, "B M N"], there: Bool[Array, "B M"]
) -> LookaheadState:
    """The state with n-grams that are `there` and that it has not; of many the last ones stay."""
    rows, count = there.shape
    row, homes = jnp.arange(rows)[:, None], state.newest.shape[1]
    room = state.grams.shape[2]
    if not room:
        return state
    home = _home(grams[:, :, 0], homes)
    known = (state.grams[row, home] == grams[:, :, None]).all(axis=3).any(axis=2)
    there = there & ~known
    if count <= _FEW:
        same = (grams[:, :, None] == grams[:, None]).all(axis=3) & there[:, None]
        earlier = jnp.tril(same, -1).any(axis=2)
        there = there & ~earlier
    sorted_by = jnp.argsort(jnp.where(there, home, homes), axis=1, stable=True)
    ordered = jnp.take_along_axis(jnp.where(there, home, homes), sorted_by, axis=1)
    place = jnp.arange(count, dtype=jnp.int32)
    begins = jnp.where(ordered != jnp.roll(ordered, 1, axis=1), place, 0).at[:, 0].set(0)
    rank = place - lax.cummax(begins, axis=1)
    rank = jnp.zeros((rows, count), jnp.int32).at[row, sorted_by].set(rank)
    given = jnp.zeros((rows, homes), jnp.int32).at[row, home].add(there, mode="drop")
    stays = there & (rank >= given[row, home] - room)
    slot = (state.newest[row, home] + rank) % room
    at = jnp.where(stays, home, homes)
    return replace(
        state,
        grams=state.grams.at[row, at, slot].set(grams, mode="drop"),
        newest=state.newest + given,
    )


def _candidates(
    state: LookaheadState, last: Int32[Array, " B"], size: Window
) -> tuple[Int32[Array, "B G R"], Bool[Array, "B G R"], Int32[Array, "B G R"]]:
    """What followed the last token in n-grams, the newest first, which of it stands in the tree,
    and below which node: equal paths stand once.
    """
    row, count = jnp.arange(last.shape[0])[:, None], size.candidates
    if not count:
        none = jnp.zeros((last.shape[0], 0, size.rows), jnp.int32)
        return none, none > 0, none
    home = _home(last, state.newest.shape[1])[:, None]
    newest_first = (state.newest[row, home] - 1 - jnp.arange(count)) % count
    found = state.grams[row, home, newest_first]
    tails, there = found[:, :, 1:], found[:, :, 0] == last[:, None]
    alike = jnp.cumprod(tails[:, :, None] == tails[:, None], axis=3).astype(bool)
    alike &= there[:, :, None, None] & there[:, None, :, None]
    first = alike.argmax(axis=2)  # the earliest with the same path
    number = 1 + first * size.rows + np.arange(size.rows)
    parents = jnp.pad(number[:, :, :-1], ((0, 0), (0, 0), (1, 0))).astype(jnp.int32)
    valid = there[:, :, None] & (first == jnp.arange(count)[:, None])
    return tails, valid, parents


def _home(token: Int32[Array, "*S"], homes: int) -> Int32[Array, "*S"]:
    mixed = token.astype(jnp.uint32) * _MIX
    return ((mixed ^ (mixed >> np.uint32(15))) & np.uint32(homes - 1)).astype(jnp.int32)
