"""Best-first trees of one draft (SpecExec, arXiv 2406.02532)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.arrays import Key
from specjax.cache import NewKV
from specjax.draft.drafter import Drafter, Step
from specjax.draft.expansion import ModelState, catch_up, prefill
from specjax.draft.growth import (
    Growth,
    Likely,
    Nodes,
    Scored,
    Source,
    contexts,
    grow,
    inherited,
    join,
    likely_of,
    no_nodes,
    roots,
    standing,
    tree_of,
)
from specjax.draft.ngram import NGram, successors
from specjax.model import Model, trunk, unembed
from specjax.pytree import pytree, replace, static
from specjax.sampling import Sampling, is_greedy
from specjax.tree import TokenTree, TreeShape
from specjax.verify import TOP_K, Construction


@dataclasses.dataclass(frozen=True)
class Guess:
    """Which guesses a table makes in every round: a tree of this shape below the best nodes."""

    shape: TreeShape
    fan: int = 1


@pytree
class ModelSource(Source):
    """A draft that has read the text; it holds the keys and values of expanded nodes."""

    model: Model
    held: ModelState
    sharpness: Float[Array, " B"]
    last: Int32[Array, " B"]
    table: NGram | None
    width: int = static()
    guesses: Guess | None = static()

    def after(self, nodes: Nodes, scored: Scored, carry: NewKV) -> tuple[Likely, NewKV]:
        """One pass over the scored nodes and guesses."""
        at = jnp.maximum(scored.slots, 0)
        tokens = jnp.take_along_axis(nodes.tokens, at, axis=1)
        tokens = jnp.concatenate([tokens, scored.guesses], axis=1)
        rows, count = tokens.shape
        own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (rows, count, count))
        own = jnp.concatenate([jnp.zeros((rows, count, carry[0][0].shape[2]), bool), own], axis=2)
        own = own.at[:, : at.shape[1], :-count].set(standing(nodes, scored))
        visible = inherited(scored, own[:, at.shape[1] :], own[:, : at.shape[1]])
        depth = visible.sum(axis=2, dtype=jnp.int32)
        positions = self.held.cache.length[:, None] + depth - 1
        x, made = trunk(self.model, tokens, positions, self.held.cache, visible, carry)
        logits = unembed(self.model, x).T.reshape(rows, count, -1)
        return likely_of(logits, self.sharpness, self.width), made

    def guess(self, nodes: Nodes, scored: Scored) -> Scored:
        """What the table expects below the likeliest of the nodes, to be scored beside them.

        Staged speculative decoding (arXiv 2308.04623): the draft's own tree is drafted for.
        """
        if self.table is None or self.guesses is None:
            return scored
        rows, fan = scored.slots.shape[0], min(self.guesses.fan, scored.slots.shape[1])
        at = contexts(nodes, scored.slots[:, :fan], self.last, self.last)
        before, last = at[0][..., None], at[1][..., None]
        above = jnp.arange(fan)[:, None]
        made, hung, count = [], [], scored.slots.shape[1]
        shape = self.guesses.shape
        for level in range(shape.depth):
            places, counts = shape.expanded(level)
            parents, ranks = np.repeat(places, counts), np.concatenate([*map(np.arange, counts)])
            tokens = successors(self.table, before, last)[1][:, :, parents, ranks]
            hung.append(jnp.broadcast_to(above[:, parents], tokens.shape).reshape(rows, -1))
            made.append(tokens.reshape(rows, -1))
            above = count + jnp.arange(tokens[0].size).reshape(tokens.shape[1:])
            count += tokens[0].size
            before, last = last[:, :, parents], tokens
        return scored._replace(
            guesses=jnp.concatenate(made, axis=1),
            above=jnp.concatenate(hung, axis=1).astype(jnp.int32),
            levels=shape.depth,
        )

    def hold(self, carry: NewKV, made: NewKV, slots: Int32[Array, "B Q"]) -> NewKV:
        """Keys and values by slot."""
        rows = jnp.arange(slots.shape[0])[:, None]

        def put(old: Array, new: Array) -> Array:
            turned = new.swapaxes(1, 2).astype(old.dtype)
            return old.at[rows, :, slots].set(turned, mode="drop")

        return jax.tree.map(put, carry, made)


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
    table: NGram | None = None
    guesses: Guess | None = static(default=None)

    @property
    def window(self) -> int:
        """Depth of the deepest tree plus 1."""
        return self.growth.levels + 1

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
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Int32[Array, "B T k"],
    ) -> BestFirstState:
        """The draft's state after the prompts, and room for a tree."""
        del seen
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
        del key, position
        nodes, block = self.grown(state, sampling, last)
        tree, slots = tree_of(nodes, last, self.vocab_size)
        return tree, BestFirstState(state.held, block, slots)

    def grown(
        self, state: BestFirstState, sampling: Sampling, last: Int32[Array, " B"]
    ) -> tuple[Nodes, NewKV]:
        """The nodes of the tree below the root tokens `last`, and the keys of expanded ones."""
        growth, rows = self.growth, last.shape[0]
        sharpness = jnp.where(is_greedy(sampling), self.temperatures[0], self.temperatures[1])
        width = min(growth.width, growth.budget)
        source = ModelSource(
            self.model, state.held, sharpness, last, self.table, width, self.guesses
        )
        first = likely_of(state.held.logits[:, None], sharpness, width)
        nodes, _, growing = join(no_nodes(rows, growth.budget), roots(rows), first, growth)
        return grow(source, growth, nodes, state.block, growing)

    def commit(self, state: BestFirstState, step: Step) -> BestFirstState:
        """The draft caught up: keys of expanded nodes are kept, the last two tokens run anew.

        A node with an accepted child was expanded, so that all but the last node of the path
        have keys and values of their own.
        """
        return self.caught_up(state, step, jnp.maximum(step.count - 2, 0), 2)

    def caught_up(
        self, state: BestFirstState, step: Step, kept: Int32[Array, " B"], anew: int
    ) -> BestFirstState:
        """The draft after a step, of whose tokens the first `kept` have keys of their own.

        The others, at most `anew`, are run.
        """
        held = state.held
        path = jnp.maximum(step.accepted.path[:, 1:] - 1, 0)
        slots = jnp.take_along_axis(state.slots, path, axis=1)
        held = replace(held, cache=held.cache.keep(state.block, slots, kept))
        ahead = jnp.minimum(kept[:, None] + jnp.arange(anew), step.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(step.tokens, ahead, axis=1)
        return replace(state, held=catch_up(self.model, held, tokens, step.count - kept))
