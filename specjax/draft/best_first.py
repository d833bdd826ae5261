"""Best-first trees: the likeliest continuations under one draft (SpecExec, arXiv 2406.02532)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.arrays import Key
from specjax.cache import NewKV
from specjax.draft.drafter import Drafter, Step
from specjax.draft.expansion import ModelState, catch_up, prefill
from specjax.model import Model, trunk, unembed
from specjax.pytree import pytree, replace, static
from specjax.sampling import Sampling, is_greedy
from specjax.tree import NO_DRAFTER, NO_PARENT, TokenTree
from specjax.verify import TOP_K, Construction

_NEARLY_ONE = 0.9999


@dataclasses.dataclass(frozen=True)
class Growth:
    """How a best-first tree grows; the defaults are those of SpecExec's released code.

    The tree has at most `budget` nodes below the root. A round runs the `beams` likeliest nodes
    not yet expanded through the draft, and looks at the `width` likeliest children of each. A
    node's score is its parent's plus log(`decay`) plus the log probability of its token. At most
    `rounds` rounds, which is also the tree's depth.
    """

    budget: int
    beams: int = 128
    width: int = 32
    rounds: int = 32
    decay: float = 0.95

    def __post_init__(self) -> None:
        for name in ("budget", "beams", "width", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.decay <= _NEARLY_ONE:  # a child's score must be below its parent's
            raise ValueError(f"decay is {self.decay}; it must lie in (0, {_NEARLY_ONE}].")


@pytree
class Nodes:
    """The nodes of growing trees, each in a slot of its own for as long as it stays.

    `parents` are slots, or `NO_PARENT` below the root; `above` says which slots hold ancestors.
    """

    tokens: Int32[Array, "B K"]
    parents: Int32[Array, "B K"]
    depth: Int32[Array, "B K"]
    score: Float[Array, "B K"]
    chance: Float[Array, "B K"]
    valid: Bool[Array, "B K"]
    expanded: Bool[Array, "B K"]
    above: Bool[Array, "B K K"]


class Children(NamedTuple):
    """Children that may join a tree, with the slots of their parents; no score, no child."""

    tokens: Int32[Array, "B C"]
    parents: Int32[Array, "B C"]
    score: Float[Array, "B C"]
    chance: Float[Array, "B C"]


@pytree
class BestFirstState:
    """A draft caught up with the text, and the keys and values of its last tree by slot.

    `slots` are the slots of the tree's nodes, the root left out.
    """

    held: ModelState
    block: NewKV
    slots: Int32[Array, "B K"]


@pytree
class BestFirstDrafter(Drafter):
    """One draft's tree of the nodes with the largest product of probabilities.

    The law that scores nodes is sharpened by `temperatures`, for greedy rows and for sampled ones
    (1: as published); what is verified is the target's law, whatever they are.
    """

    model: Model
    temperatures: Float[Array, "2"]
    growth: Growth = static()

    @property
    def window(self) -> int:
        """Depth of the deepest tree plus 1."""
        return min(self.growth.rounds, self.growth.budget) + 1

    @property
    def vocab_size(self) -> int:
        """Tokens of the draft's vocabulary."""
        return self.model.config.vocab_size

    @property
    def num_slots(self) -> int:
        """Node slots, the root's included."""
        return self.growth.budget + 1

    @property
    def construction(self) -> Construction:
        """Chosen nodes."""
        return Construction(TOP_K, chain=self.growth.width == 1)

    def init(
        self, prompt: Int32[Array, "B T"], length: Int32[Array, " B"], slots: int
    ) -> BestFirstState:
        """The draft's state after the prompts, and room for a tree."""
        rows, budget, config = prompt.shape[0], self.growth.budget, self.model.config
        held = prefill(self.model, prompt, length, slots)
        dtype = held.cache.keys[0].dtype
        empty = jnp.zeros((rows, config.num_kv_heads, budget, config.head_dim), dtype)
        block = tuple((empty, empty) for _ in self.model.layers)
        return BestFirstState(held, block, jnp.zeros((rows, budget), jnp.int32))

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: BestFirstState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, BestFirstState]:
        """The tree of the likeliest nodes; nothing of it is random."""
        sharpness = jnp.where(is_greedy(sampling), self.temperatures[0], self.temperatures[1])
        nodes, block = grow(self.model, state.held, state.block, sharpness, self.growth)
        tree, slots = tree_of(nodes, last, self.vocab_size)
        return tree, BestFirstState(state.held, block, slots)

    def commit(self, state: BestFirstState, step: Step) -> BestFirstState:
        """The draft caught up: keys of expanded nodes are kept, the last two tokens run anew.

        A node with an accepted child was expanded, so that all but the last node of the path
        have keys and values of their own.
        """
        held, count = state.held, step.count
        kept = jnp.maximum(count - 2, 0)
        path = step.accepted.path[:, 1:] - 1
        slots = jnp.take_along_axis(state.slots, jnp.maximum(path, 0), axis=1)
        held = replace(held, cache=held.cache.keep(state.block, slots, kept))
        ahead = jnp.minimum(kept[:, None] + jnp.arange(2), step.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(step.tokens, ahead, axis=1)
        return replace(state, held=catch_up(self.model, held, tokens, count - kept))


def grow(
    model: Model,
    held: ModelState,
    block: NewKV,
    sharpness: Float[Array, " B"],
    growth: Growth,
) -> tuple[Nodes, NewKV]:
    """Trees below the roots, and the keys and values of their expanded nodes by slot.

    A round takes the likeliest nodes not yet expanded, adds their likeliest children, and keeps
    the best `budget` of all. Ends where no child is better than the nodes there are.
    """
    beams = min(growth.beams, growth.budget)

    def more(at: tuple[Nodes, NewKV, Array, Array]) -> Array:
        _, _, round_number, growing = at
        return (round_number < growth.rounds) & growing.any()

    def round_of(at: tuple[Nodes, NewKV, Array, Array]) -> tuple[Nodes, NewKV, Array, Array]:
        nodes, block, round_number, _ = at
        waiting = nodes.valid & ~nodes.expanded
        best, slots = lax.top_k(jnp.where(waiting, nodes.score, -jnp.inf), beams)
        taken = jnp.isfinite(best)
        logits, new = _pass(model, held, nodes, block, slots)
        block = _store(block, new, jnp.where(taken, slots, growth.budget))
        rows = jnp.arange(slots.shape[0])[:, None]
        expanded = nodes.expanded.at[rows, slots].max(taken)
        nodes = replace(nodes, expanded=expanded)
        children = _children(logits, slots, best, sharpness, growth)
        nodes, joined = _join(nodes, children)
        return nodes, block, round_number + 1, joined

    rows = held.logits.shape[0]
    root = jnp.full((rows, 1), NO_PARENT, jnp.int32)
    first = _children(held.logits[:, None], root, jnp.zeros((rows, 1)), sharpness, growth)
    nodes, joined = _join(_no_nodes(rows, growth.budget), first)
    nodes, block, _, _ = lax.while_loop(more, round_of, (nodes, block, jnp.int32(1), joined))
    return nodes, block


def _no_nodes(rows: int, budget: int) -> Nodes:
    none = jnp.zeros((rows, budget), jnp.int32)
    return Nodes(
        tokens=none,
        parents=none + NO_PARENT,
        depth=none,
        score=jnp.full((rows, budget), -jnp.inf),
        chance=jnp.zeros((rows, budget)),
        valid=none != 0,
        expanded=none != 0,
        above=jnp.zeros((rows, budget, budget), bool),
    )


def _pass(
    model: Model, held: ModelState, nodes: Nodes, block: NewKV, slots: Int32[Array, "B n"]
) -> tuple[Float[Array, "B n V"], NewKV]:
    """The draft's logits after some nodes, and their keys and values."""
    rows, count = slots.shape
    above = jnp.take_along_axis(nodes.above, slots[:, :, None], axis=1)
    own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (rows, count, count))
    tokens, depth = (jnp.take_along_axis(x, slots, axis=1) for x in (nodes.tokens, nodes.depth))
    positions = held.cache.length[:, None] + depth - 1
    visible = jnp.concatenate([above, own], axis=2)
    x, new = trunk(model, tokens, positions, held.cache, visible, block)
    return unembed(model, x).T.reshape(rows, count, -1), new


def _store(block: NewKV, new: NewKV, slots: Int32[Array, "B n"]) -> NewKV:
    """`block` with the keys and values of a pass in their slots; those past its end are dropped."""
    rows = jnp.arange(slots.shape[0])[:, None]

    def put(old: Array, made: Array) -> Array:
        turned = made.swapaxes(1, 2).astype(old.dtype)
        return old.at[rows, :, slots].set(turned, mode="drop")

    return jax.tree.map(put, block, new)


def _children(
    logits: Float[Array, "B n V"],
    slots: Int32[Array, "B n"],
    score: Float[Array, "B n"],
    sharpness: Float[Array, " B"],
    growth: Growth,
) -> Children:
    """The likeliest children of the nodes in `slots`, whose scores are given."""
    rows, count, vocabulary = logits.shape
    width = min(growth.width, growth.budget, vocabulary)
    log_q = jax.nn.log_softmax(logits / sharpness[:, None, None], axis=-1)
    best, tokens = lax.top_k(log_q, width)
    total = score[:, :, None] + jnp.log(growth.decay) + best
    total = jnp.where(jnp.isnan(total), -jnp.inf, total)

    def flat(x: Array) -> Array:
        return x.reshape(rows, count * width)

    return Children(
        tokens=flat(tokens.astype(jnp.int32)),
        parents=flat(jnp.broadcast_to(slots[:, :, None], tokens.shape)),
        score=flat(total),
        chance=flat(jnp.exp(best)),
    )


def _join(nodes: Nodes, children: Children) -> tuple[Nodes, Bool[Array, " B"]]:
    """The best nodes and children together, as many as there are slots; whether a child is new.

    A node that stays keeps its slot; children take the slots of those that go. With a node go
    all below it, for none of them has a better score.
    """
    rows, budget = nodes.score.shape
    held = jnp.where(nodes.valid, nodes.score, -jnp.inf)
    best, index = lax.top_k(jnp.concatenate([held, children.score], axis=1), budget)
    row = jnp.arange(rows)[:, None]
    stays = jnp.zeros((rows, budget), bool).at[row, index].set(jnp.isfinite(best), mode="drop")
    joins = (index >= budget) & jnp.isfinite(best)
    free = jnp.argsort(stays, axis=1, stable=True)
    number = jnp.cumsum(joins, axis=1) - 1
    slot = jnp.take_along_axis(free, jnp.maximum(number, 0), axis=1)
    slot = jnp.where(joins, slot, budget)
    chosen = jnp.where(joins, index - budget, 0)

    def taken(values: Array) -> Array:
        return jnp.take_along_axis(values, chosen, axis=1)

    def put(values: Array, new: Array | bool) -> Array:
        return values.at[row, slot].set(new, mode="drop")

    parents = taken(children.parents)
    at_root, parent = parents == NO_PARENT, jnp.maximum(parents, 0)
    above = jnp.take_along_axis(nodes.above, parent[:, :, None], axis=1)
    above = (above | (jnp.arange(budget) == parent[:, :, None])) & ~at_root[:, :, None]
    depth = jnp.where(at_root, 0, jnp.take_along_axis(nodes.depth, parent, axis=1)) + 1
    return Nodes(
        tokens=put(nodes.tokens, taken(children.tokens)),
        parents=put(nodes.parents, parents),
        depth=put(nodes.depth, depth),
        score=put(nodes.score, taken(children.score)),
        chance=put(nodes.chance, taken(children.chance)),
        valid=put(stays, True),
        expanded=put(nodes.expanded & stays, False),
        above=put(nodes.above, above),
    ), joins.any(axis=1)


def tree_of(
    nodes: Nodes, last: Int32[Array, " B"], vocabulary: int
) -> tuple[TokenTree, Int32[Array, "B K"]]:
    """The trees, their nodes ordered by depth, and the slots of the nodes below the root."""
    rows, budget = nodes.tokens.shape
    order = jnp.argsort(jnp.where(nodes.valid, nodes.depth, budget + 1), axis=1, stable=True)
    row = jnp.arange(rows)[:, None]
    number = (
        jnp.zeros((rows, budget), jnp.int32)
        .at[row, order]
        .set(jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), (rows, budget)))
    )
    valid = jnp.take_along_axis(nodes.valid, order, axis=1)
    above = jnp.take_along_axis(nodes.parents, order, axis=1)
    parents = jnp.where(above < 0, 0, jnp.take_along_axis(number, jnp.maximum(above, 0), axis=1))

    def rooted(root: Array | int, values: Array) -> Array:
        first = jnp.broadcast_to(jnp.asarray(root, values.dtype), (rows,))[:, None]
        return jnp.concatenate([first, jnp.where(valid, values, 0)], axis=1)

    def ordered(values: Array) -> Array:
        return jnp.take_along_axis(values, order, axis=1)

    none = jnp.zeros((rows, budget), jnp.int32)
    numbers = jnp.broadcast_to(jnp.arange(1, budget + 1, dtype=jnp.int32), none.shape)
    tree = TokenTree(
        tokens=rooted(last, ordered(nodes.tokens)),
        parents=rooted(NO_PARENT, parents),
        depth=rooted(0, ordered(nodes.depth)),
        valid=jnp.concatenate([jnp.ones((rows, 1), bool), valid], axis=1),
        drafter=rooted(NO_DRAFTER, none),
        chance=rooted(1, ordered(nodes.chance)),
        trial_node=jnp.where(valid, numbers, 0),
        trial_law=none,
        q=jnp.zeros((rows, 0, vocabulary)),
        certain=jnp.ones(rows, bool),
    )
    return tree, order.astype(jnp.int32)
