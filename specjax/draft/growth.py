"""Trees of the likeliest nodes, grown best first (SpecExec, arXiv 2406.02532).

Growing knows no model: a source says which tokens are likely after some nodes.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree, replace
from specjax.draft.limits import check_growth
from specjax.trees.tree import NO_PARENT, TokenTree, chosen


@dataclasses.dataclass(frozen=True)
class Growth:
    """How a best-first tree grows; the defaults are those of SpecExec's released code.

    The tree has at most `budget` nodes below the root and `depth` levels. A round runs the `beams`
    likeliest nodes not yet expanded through the draft, and looks at the `width` likeliest children
    of each. A node's score is its parent's plus log(`decay`) plus the log probability of its token.
    At most `depth` rounds; if `least_gain` is not 0, a round that raises the sum of exp(score) over
    the tree by no more than that is the last one (OPT-Tree, arXiv 2406.17276). With `by_level`
    only the nodes of the last level are expanded (EAGLE-2, arXiv 2406.16858, section 4).
    """

    budget: int
    beams: int = 128
    width: int = 32
    depth: int = 32
    decay: float = 0.95
    least_gain: float = 0.0
    by_level: bool = False

    def __post_init__(self) -> None:
        check_growth(vars(self))

    @property
    def levels(self) -> int:
        """The most levels a tree can have."""
        return min(self.depth, self.budget)


@pytree
class Nodes:
    """The nodes of growing trees, each in a slot of its own for as long as it stays.

    `parents` are slots, or `NO_PARENT` below the root; `above` says which slots hold ancestors.
    `drafter` is who proposed a node.
    """

    tokens: Int32[Array, "B K"]
    parents: Int32[Array, "B K"]
    depth: Int32[Array, "B K"]
    score: Float[Array, "B K"]
    chance: Float[Array, "B K"]
    drafter: Int32[Array, "B K"]
    valid: Bool[Array, "B K"]
    expanded: Bool[Array, "B K"]
    above: Bool[Array, "B K K"]


@pytree
class Likely:
    """Likely tokens after some nodes, the likeliest first, and their log probabilities."""

    tokens: Int32[Array, "B n w"]
    log_q: Float[Array, "B n w"]


class ScoredNodes(NamedTuple):
    """The nodes scored in a round: some that stand in slots, or roots; then guesses.

    `slots` and `score` are those of the nodes that stand (`NO_PARENT` and 0 for roots); a score of
    minus infinity says that a node is none. Guesses are nodes scored before it is known whether
    they join the tree: `above` is the number, among all nodes scored, of the one a guess hangs
    below, which comes before it. No two guesses are the same token below the same node. `levels`
    is the static number of levels of guesses.
    """

    slots: Int32[Array, "B n"]
    score: Float[Array, "B n"]
    guesses: Int32[Array, "B G"]
    above: Int32[Array, "B G"]
    levels: int


class Source(abc.ABC):
    """What is likely after the nodes of a growing tree.

    It may hold something of every expanded node, by slot (a draft its keys and values): its carry.
    """

    @abc.abstractmethod
    def after(self, nodes: Nodes, scored: ScoredNodes, carry: Any) -> tuple[Likely, Any]:
        """What is likely after nodes that are not roots, and what is to be held of them."""

    @abc.abstractmethod
    def hold(self, carry: Any, made: Any, slots: Int32[Array, "B Q"]) -> Any:
        """The carry with what `after` made of nodes that came to stand in `slots`.

        Slots past the last one are of nodes that did not.
        """

    def guess(self, nodes: Nodes, scored: ScoredNodes) -> ScoredNodes:
        """The nodes to be scored in a round, with guesses if this source makes any."""
        del nodes
        return scored


def no_nodes(rows: int, budget: int) -> Nodes:
    """Trees of nothing but their roots."""
    none = jnp.zeros((rows, budget), jnp.int32)
    return Nodes(
        tokens=none,
        parents=none + NO_PARENT,
        depth=none,
        score=jnp.full((rows, budget), -jnp.inf),
        chance=jnp.zeros((rows, budget)),
        drafter=none,
        valid=none != 0,
        expanded=none != 0,
        above=jnp.zeros((rows, budget, budget), bool),
    )


def without_guesses(slots: Int32[Array, "B n"], score: Float[Array, "B n"]) -> ScoredNodes:
    """Nodes that stand, or roots, and no guess."""
    none = jnp.zeros((slots.shape[0], 0), jnp.int32)
    return ScoredNodes(slots, score, none, none, 0)


def roots(rows: int) -> ScoredNodes:
    """The roots alone."""
    return without_guesses(jnp.full((rows, 1), NO_PARENT, jnp.int32), jnp.zeros((rows, 1)))


def grow(
    source: Source,
    growth: Growth,
    nodes: Nodes,
    carry: Any,
    growing: Bool[Array, " B"],
    drafter: int = 0,
) -> tuple[Nodes, Any]:
    """Trees grown until a round adds nothing, and the source's carry.

    A round takes the likeliest nodes not yet expanded, adds their likeliest children, and keeps
    the best `budget` of all. A row of which a round adds none is done, whatever still waits in
    it. New nodes are marked as `drafter`'s.
    """

    def more(at: tuple[Nodes, Any, Array, Array]) -> Array:
        return (at[3] < growth.depth) & at[2].any()

    def round_of(at: tuple[Nodes, Any, Array, Array]) -> tuple[Nodes, Any, Array, Array]:
        nodes, carry, growing, number = at
        scored = source.guess(nodes, frontier(nodes, growing, growth))
        likely, made = source.after(nodes, scored, carry)
        nodes, slots, gained = join(nodes, scored, likely, growth, drafter)
        return nodes, source.hold(carry, made, slots), growing & gained, number + 1

    start = (nodes, carry, growing, jnp.int32(1))
    return lax.while_loop(more, round_of, start)[:2]


def still_waiting(nodes: Nodes, growth: Growth) -> Bool[Array, "B K"]:
    """Which nodes may yet be expanded."""
    waiting = nodes.valid & ~nodes.expanded & (nodes.depth < growth.depth)
    if growth.by_level:
        last = jnp.where(nodes.valid, nodes.depth, 0).max(axis=1, keepdims=True)
        waiting &= nodes.depth == last
    return waiting


def frontier(nodes: Nodes, growing: Bool[Array, " B"], growth: Growth) -> ScoredNodes:
    """The likeliest nodes that are still to be expanded."""
    waiting = still_waiting(nodes, growth) & growing[:, None]
    beams = min(growth.beams, growth.budget)
    score, slots = lax.top_k(jnp.where(waiting, nodes.score, -jnp.inf), beams)
    return without_guesses(slots, score)


def contexts(
    nodes: Nodes,
    slots: Int32[Array, "B n"],
    before: Int32[Array, " B"],
    last: Int32[Array, " B"],
) -> tuple[Int32[Array, "B n"], Int32[Array, "B n"]]:
    """The last two tokens up to each node; slot -1 is the root, after which the text ends."""
    at = jnp.maximum(slots, 0)
    token = jnp.where(slots < 0, last[:, None], jnp.take_along_axis(nodes.tokens, at, axis=1))
    parent = jnp.take_along_axis(nodes.parents, at, axis=1)
    above = jnp.take_along_axis(nodes.tokens, jnp.maximum(parent, 0), axis=1)
    above = jnp.where(parent < 0, last[:, None], above)
    return jnp.where(slots < 0, before[:, None], above), token


def standing(nodes: Nodes, scored: ScoredNodes) -> Bool[Array, "B n K"]:
    """The slots of the ancestors of the scored nodes that stand."""
    at = jnp.maximum(scored.slots, 0)[:, :, None]
    return jnp.take_along_axis(nodes.above, at, axis=1) & (scored.slots >= 0)[:, :, None]


def inherited(scored: ScoredNodes, own: Array, at_standing: Array) -> Array:
    """`at_standing` of the nodes that stand, and for guesses what is above them, `own` added.

    `own` is `[B, G, ...]` and boolean; so is what is inherited.
    """
    all_of_them = jnp.concatenate([at_standing, own], axis=1)
    count = at_standing.shape[1]
    for _ in range(scored.levels):
        above = scored.above.reshape(*scored.above.shape, *(1,) * (own.ndim - 2))
        upper = jnp.take_along_axis(all_of_them, above, axis=1)
        all_of_them = all_of_them.at[:, count:].set(own | upper)
    return all_of_them


class _Taken(NamedTuple):
    """Which nodes stay, which slots children come into, and which child into each of these."""

    stays: Bool[Array, "B K"]
    fresh: Bool[Array, "B K"]
    child: Int32[Array, "B K"]


def join(
    nodes: Nodes, scored: ScoredNodes, likely: Likely, growth: Growth, drafter: int = 0
) -> tuple[Nodes, Int32[Array, "B Q"], Bool[Array, " B"]]:
    """The best nodes of trees and of the children of scored nodes, as many as there are slots.

    Also the slots of the scored nodes (the last plus 1 for guesses that did not come true), and
    which rows gained. A node that stays keeps its slot; children take the slots of those that go.
    Removing a node removes its
    descendants, none of which scores higher.
    """
    rows, budget = nodes.score.shape
    width = likely.tokens.shape[2]
    score, named = _guessed(scored, likely, growth)
    depth = _depths(nodes, scored)
    score = jnp.where(depth < growth.depth, score, -jnp.inf)
    offered = _below(score[:, :, None], likely.log_q, growth).reshape(rows, -1)
    offered = jnp.where(jnp.isnan(offered), -jnp.inf, offered)
    held = jnp.where(nodes.valid, nodes.score, -jnp.inf)
    taken = _taken(held, offered)
    slots = _slots_of(scored, taken, named, offered.shape[1])
    own = slots[:, :, None] == jnp.arange(budget)
    parent = taken.child // width

    def put(values: Array, new: Array | int) -> Array:
        return jnp.where(taken.fresh, new, values)

    def of_child(values: Array) -> Array:
        return jnp.take_along_axis(values.reshape(rows, -1), taken.child, axis=1)

    count = scored.slots.shape[1]
    up = inherited(scored, own[:, count:], standing(nodes, scored) | own[:, :count])
    above = jnp.take_along_axis(up, parent[:, :, None], axis=1)
    joined = replace(
        nodes,
        tokens=put(nodes.tokens, of_child(likely.tokens)),
        parents=put(nodes.parents, jnp.take_along_axis(slots, parent, axis=1)),
        depth=put(nodes.depth, jnp.take_along_axis(depth, parent, axis=1) + 1),
        score=put(nodes.score, of_child(offered)),
        chance=put(nodes.chance, jnp.exp(of_child(likely.log_q))),
        drafter=put(nodes.drafter, drafter),
        valid=taken.stays | taken.fresh,
        expanded=(nodes.expanded & taken.stays) | own.any(axis=1),
        above=jnp.where(taken.fresh[:, :, None], above, nodes.above),
    )
    return joined, slots, _gained(nodes, joined, taken, growth)


def _gained(nodes: Nodes, joined: Nodes, taken: _Taken, growth: Growth) -> Bool[Array, " B"]:
    """Which rows have new nodes that are worth another round."""
    gained = taken.fresh.any(axis=1) & still_waiting(joined, growth).any(axis=1)
    if growth.least_gain:  # without it gains count that a sum of floats does not show
        before, now = (jnp.where(at.valid, jnp.exp(at.score), 0).sum(axis=1)
                       for at in (nodes, joined))  # fmt: skip
        gained &= now - before > growth.least_gain
    return gained


def _depths(nodes: Nodes, scored: ScoredNodes) -> Int32[Array, "B Q"]:
    """The depth of every scored node."""
    own = jnp.take_along_axis(nodes.depth, jnp.maximum(scored.slots, 0), axis=1)
    depth = jnp.where(scored.slots < 0, 0, own)
    guessed = jnp.zeros_like(scored.guesses)
    for _ in range(scored.levels):
        every = jnp.concatenate([depth, guessed], axis=1)
        guessed = jnp.take_along_axis(every, scored.above, axis=1) + 1
    return jnp.concatenate([depth, guessed], axis=1)


def _guessed(
    scored: ScoredNodes, likely: Likely, growth: Growth
) -> tuple[Float[Array, "B Q"], Int32[Array, "B G"]]:
    """The score of every scored node, and which child a guess is (the last plus 1: none)."""
    _, count, width = likely.tokens.shape
    at = scored.above[:, :, None]
    same = jnp.take_along_axis(likely.tokens, at, axis=1) == scored.guesses[:, :, None]
    log_q = jnp.take_along_axis(likely.log_q, at, axis=1)
    step = jnp.where(same, log_q, -jnp.inf).max(axis=2)
    score = jnp.concatenate([scored.score, jnp.full_like(step, -jnp.inf)], axis=1)
    for _ in range(scored.levels):
        guessed = _below(jnp.take_along_axis(score, scored.above, axis=1), step, growth)
        score = score.at[:, scored.score.shape[1] :].set(guessed)
    which = scored.above * width + jnp.argmax(same, axis=2).astype(jnp.int32)
    return score, jnp.where(same.any(axis=2), which, count * width)


def _below(score: Array, log_q: Array, growth: Growth) -> Array:
    """The scores of children, each below its parent's `score`, minus infinity where none is.

    Far from 0 a float32 has no room for log(decay) (from 16,384 on for a decay of 0.9995): the
    child takes the next lower number then, or of two equals the parent could go and the child stay.
    """
    child = score + jnp.log(growth.decay) + log_q
    return jnp.minimum(child, jnp.nextafter(score, -jnp.inf))


def _taken(held: Float[Array, "B K"], offered: Float[Array, "B C"]) -> _Taken:
    """The best of both, as many as there are slots; of equals nodes are before children.

    The best child comes into the first slot that is free, and so on.
    """
    budget = held.shape[1]
    best, index = lax.top_k(jnp.concatenate([held, offered], axis=1), budget)
    taken = (index[:, :, None] == jnp.arange(budget)).any(axis=1)
    stays = taken & jnp.isfinite(held)
    coming = ((index >= budget) & jnp.isfinite(best)).sum(axis=1, keepdims=True)
    child = lax.top_k(offered, min(budget, offered.shape[1]))[1].astype(jnp.int32)
    number = jnp.cumsum(~stays, axis=1) - 1
    at = jnp.clip(number, 0, child.shape[1] - 1)
    return _Taken(stays, ~stays & (number < coming), jnp.take_along_axis(child, at, axis=1))


def _slots_of(
    scored: ScoredNodes, taken: _Taken, named: Int32[Array, "B G"], children: int
) -> Int32[Array, "B Q"]:
    """Where the scored nodes stand now; the last slot plus 1 for those that do not."""
    rows, budget = taken.stays.shape
    row = jnp.arange(rows)[:, None]
    stays = jnp.take_along_axis(taken.stays, jnp.maximum(scored.slots, 0), axis=1)
    stays = jnp.where(jnp.isfinite(scored.score), stays | (scored.slots < 0), False)
    old = jnp.where(stays, scored.slots, budget)
    if not scored.levels:
        return old
    place = jnp.full((rows, children + 1), budget, jnp.int32)
    child = jnp.where(taken.fresh, taken.child, children + 1)
    place = place.at[row, child].set(jnp.arange(budget, dtype=jnp.int32), mode="drop")
    return jnp.concatenate([old, jnp.take_along_axis(place, named, axis=1)], axis=1)


def tree_of(
    nodes: Nodes, last: Int32[Array, " B"], vocabulary: int
) -> tuple[TokenTree, Int32[Array, "B K"]]:
    """The trees, their nodes ordered by depth, and the slots of the nodes below the root."""
    rows, budget = nodes.tokens.shape
    order = jnp.argsort(jnp.where(nodes.valid, nodes.depth, budget + 1), axis=1, stable=True)
    row = jnp.arange(rows)[:, None]
    number = jnp.zeros((rows, budget), jnp.int32)
    number = number.at[row, order].set(jnp.arange(1, budget + 1, dtype=jnp.int32))
    valid = jnp.take_along_axis(nodes.valid, order, axis=1)
    above = jnp.take_along_axis(nodes.parents, order, axis=1)
    parents = jnp.where(above < 0, 0, jnp.take_along_axis(number, jnp.maximum(above, 0), axis=1))

    def rooted(root: Array | int, values: Array) -> Array:
        first = jnp.broadcast_to(jnp.asarray(root, values.dtype), (rows,))[:, None]
        return jnp.concatenate([first, values], axis=1)

    def ordered(values: Array) -> Array:
        return rooted(0, jnp.take_along_axis(values, order, axis=1))

    tree = chosen(
        tokens=rooted(last, jnp.take_along_axis(nodes.tokens, order, axis=1)),
        parents=rooted(NO_PARENT, parents),
        depth=ordered(nodes.depth),
        valid=rooted(True, valid),
        drafter=ordered(nodes.drafter),
        chance=ordered(nodes.chance),
        vocabulary=vocabulary,
    )
    return tree, order.astype(jnp.int32)
