"""Best-first trees of one draft (SpecExec, arXiv 2406.02532)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.grammars import NO_NODE, ROOT, Grammars, masked
from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import Sampling, is_greedy, largest
from specjax.draft.block import LevelSource
from specjax.draft.drafter import Drafter, DraftState, Seen, Step, Wants
from specjax.draft.growth import (
    Growth,
    Likely,
    Nodes,
    ScoredNodes,
    Source,
    grow,
    inherited,
    join,
    no_nodes,
    roots,
    standing,
    tree_of,
)
from specjax.draft.limits import check_depth
from specjax.draft.reading import ModelState, catch_up, prefill, read_by, ready, run, shorter
from specjax.draft.staged import TableStage, below_roots
from specjax.models.kv_cache import NewKV
from specjax.models.transformer import Model, unembed
from specjax.trees.construction import TOP_K, Construction
from specjax.trees.tree import TokenTree


def likely_of(logits: Float[Array, "B n V"], sharpness: Float[Array, " B"], width: int) -> Likely:
    """The likeliest tokens under a distribution sharpened by a temperature a row."""
    best, tokens = largest(logits, min(width, logits.shape[-1]))
    wide = sharpness[:, None, None]
    total = jax.nn.logsumexp(logits / wide, axis=-1, keepdims=True)
    # above 0 by rounding, a child would outscore its parent
    return Likely(tokens, jnp.minimum(best / wide - total, 0))


def visible_to(nodes: Nodes, scored: ScoredNodes) -> Bool[Array, "B Q M"]:
    """Which slots, then which scored nodes, each scored node sees: its ancestors and itself."""
    count, budget = scored.slots.shape[1], nodes.tokens.shape[1]
    every = count + scored.guesses.shape[1]
    own = jnp.broadcast_to(
        jnp.eye(every, budget + every, budget, bool),
        (*scored.slots.shape[:1], every, budget + every),
    )
    above = own[:, :count].at[:, :, :budget].set(standing(nodes, scored))
    return inherited(scored, own[:, count:], above)


class Made(NamedTuple):
    """What a draft made of nodes: keys and values, and features for their children if it reads some
    (`[B, 1, T, E]`).
    """

    new: NewKV
    features: Float[Array, "B 1 T E"] | None


@pytree
class ModelSource(Source):
    """A draft that has read the text; it holds what it made of expanded nodes, by slot."""

    model: Model
    held: ModelState
    sharpness: Float[Array, " B"]
    last: Int32[Array, " B"]
    table: TableStage | None
    grammars: Grammars | None
    width: int = static()

    def after(self, nodes: Nodes, scored: ScoredNodes, carry: Made) -> tuple[Likely, Made]:
        """One pass over the scored nodes and guesses."""
        at = jnp.maximum(scored.slots, 0)
        tokens = jnp.take_along_axis(nodes.tokens, at, axis=1)
        tokens = jnp.concatenate([tokens, scored.guesses], axis=1)
        above = self._above(nodes, at, carry)
        words = self._words(nodes, scored)
        return self._run(tokens, visible_to(nodes, scored), carry, above, words)

    def _words(self, nodes: Nodes, scored: ScoredNodes) -> Int32[Array, "B n w"] | None:
        """The masks after scored nodes, where rows have grammars; after guesses anything may be."""
        if self.grammars is None:
            return None
        wanted = jnp.where(jnp.isfinite(scored.score), scored.slots, NO_NODE)
        wanted = jnp.pad(wanted, ((0, 0), (0, scored.guesses.shape[1])), constant_values=NO_NODE)
        vocabulary = self.model.config.vocab_size
        return self.grammars.masks(nodes.tokens, nodes.parents, wanted, vocabulary)

    def _above(
        self, nodes: Nodes, slots: Int32[Array, "B n"], carry: Made
    ) -> Float[Array, "B n E"] | None:
        """What nodes read of their parents, if this draft reads features."""
        if carry.features is None or self.held.features is None:
            return None
        parents = jnp.take_along_axis(nodes.parents, slots, axis=1)[:, :, None]
        own = jnp.take_along_axis(carry.features[:, 0], jnp.maximum(parents, 0), axis=1)
        return jnp.where(parents < 0, self.held.features[:, None], own)

    def after_guesses(self, nodes: Nodes, scored: ScoredNodes, carry: Made) -> tuple[Likely, Made]:
        """One pass over guesses below the roots, which are all that stands."""
        tree_mask, budget = visible_to(nodes, scored), nodes.tokens.shape[1]
        tree_mask = jnp.concatenate(
            [tree_mask[:, 1:, :budget], tree_mask[:, 1:, budget + 1 :]], axis=2
        )
        return self._run(jnp.maximum(scored.guesses, 0), tree_mask, carry)

    def _run(
        self,
        tokens: Int32[Array, "B n"],
        tree_mask: Bool[Array, "B n M"],
        carry: Made,
        above: Float[Array, "B n E"] | None = None,
        words: Int32[Array, "B n w"] | None = None,
    ) -> tuple[Likely, Made]:
        """A pass over nodes, each of which sees its ancestors and itself."""
        depth = tree_mask.sum(axis=2, dtype=jnp.int32)
        held, positions = self.held.cache, self.held.cache.length[:, None] + depth - 1
        x, new, own = run(self.model, tokens, positions, held, tree_mask, carry.new, above)
        logits = unembed(self.model, x).T.reshape(*tokens.shape, -1)
        logits = logits if words is None else masked(logits, words)
        made = Made(new, None if own is None else own[:, None])
        return likely_of(logits, self.sharpness, self.width), made

    def guess(self, nodes: Nodes, scored: ScoredNodes) -> ScoredNodes:
        """The nodes of a round, with what the table expects below them."""
        return scored if self.table is None else self.table.guess(nodes, scored, self.last)

    def hold(self, carry: Made, made: Made, slots: Int32[Array, "B Q"]) -> Made:
        """What was made, by slot."""
        own = slots[:, :, None] == jnp.arange(carry.new[0][0].shape[2])
        came, which = own.any(axis=1)[:, None, :, None], own.argmax(axis=1)[:, None, :, None]

        def put(old: Array, new: Array) -> Array:
            return jnp.where(came, jnp.take_along_axis(new, which, axis=2).astype(old.dtype), old)

        return jax.tree.map(put, carry, made)


@pytree
class BestFirstState:
    """A draft caught up with the text, and what it made of its last tree, by slot.

    `slots` are the slots of the tree's nodes, the root left out; `second` is the second stage's.
    """

    held: ModelState
    block: Made
    slots: Int32[Array, "B K"]
    second: DraftState


@pytree
class BestFirstDrafter(Drafter):
    """One draft's tree of the nodes with the largest product of probabilities.

    The distribution that scores nodes is sharpened by `temperatures`, for greedy rows and for
    sampled ones (1: as published); what is verified is the target's distribution, whatever they
    are.

    Staged speculative decoding (arXiv 2308.04623) drafts for the draft: `table` guesses in every
    round what the draft will find likely, `second` proposes a tree for its first pass. Neither
    changes the tree, only the number of passes that it takes.
    """

    model: Model
    temperatures: Float[Array, "2"]
    growth: Growth = static()
    table: TableStage | None = None
    second: Drafter | None = None
    grammars: Grammars | None = None

    def __post_init__(self) -> None:
        if self.growth.by_level and not (self.table is None and self.second is None):
            raise ValueError("growth by level takes no second stage, whose nodes span levels.")
        if isinstance(self.model, Model):  # a setting that shares a draft stands without it
            check_depth(self.model.config, self.growth.levels)
            staged = self.table is not None or self.second is not None
            if staged and self.model.config.features is not None:
                raise ValueError(
                    "a draft that reads hidden states takes no second stage: what it reads of a "
                    "node's parent is not there in the pass that scores both."
                )

    def under(self, grammars: Grammars) -> "BestFirstDrafter":
        """The same, whose nodes are those that are likeliest among the allowed ones."""
        return replace(self, grammars=grammars)

    @property
    def wants(self) -> Wants:
        """What the draft and the second stage want to see."""
        own = Wants(hidden_layers=read_by([self.model]))
        return own if self.second is None else self.second.wants

    @property
    def reads_anew(self) -> bool:
        """Whether nothing that it made of nodes stays."""
        return self.model.config.features is not None

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
        seen: Seen,
    ) -> BestFirstState:
        """The draft's state after the prompts, and room for a tree."""
        layers = self.wants.hidden_layers
        begun = self.begun(prefill(self.model, prompt, length, slots, seen.hidden_states, layers))
        second = () if self.second is None else self.second.init(prompt, length, slots, seen)
        return replace(begun, second=second)

    def begun(self, held: ModelState) -> BestFirstState:
        """The state of a draft that has read the text, with room for a tree; no second stage."""
        rows, budget, config = held.cache.length.shape[0], self.growth.budget, self.model.config
        dtype = held.cache.keys[0].dtype
        empty = jnp.zeros((rows, config.num_kv_heads, budget, config.head_dim), dtype)
        run = self.model.layers if config.block_levels is None else ()  # else no node is run
        new, features = tuple((empty, empty) for _ in run), None
        if held.features is not None:
            features = jnp.zeros((rows, 1, budget, config.hidden_size))
        block = Made(new, features)
        return BestFirstState(held, block, jnp.zeros((rows, budget), jnp.int32), ())

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: BestFirstState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, BestFirstState]:
        """The tree of the likeliest nodes; nothing of it is random."""
        nodes, state = self.grown(key, position, state, last, sampling)
        tree, slots = tree_of(nodes, last, self.vocab_size)
        return tree, replace(state, slots=slots)

    def grown(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: BestFirstState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[Nodes, BestFirstState]:
        """The nodes of the tree, and the state with the keys of those that were expanded."""
        growth = self.growth
        sharpness = jnp.where(is_greedy(sampling), self.temperatures[0], self.temperatures[1])
        width = min(growth.width, growth.budget)
        nodes, scored = no_nodes(last.shape[0], growth.budget), roots(last.shape[0])
        held = ready(self.model, state.held, last)
        assert held.logits is not None
        below_root = held.logits[:, None]
        if self.grammars is not None:
            root = jnp.full((last.shape[0], 1), ROOT, jnp.int32)
            words = self.grammars.masks(nodes.tokens, nodes.parents, root, self.vocab_size)
            below_root = masked(below_root, words)
        first = likely_of(below_root, sharpness, width)
        if held.ahead is not None:
            below = likely_of(held.ahead, sharpness, width)
            every = jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), first, below)
            nodes, _, growing = join(nodes, scored, first, growth)
            return grow(LevelSource(every), growth, nodes, (), growing)[0], state
        source = ModelSource(self.model, held, sharpness, last, self.table, self.grammars, width)
        if self.second is None:
            nodes, _, growing = join(nodes, scored, first, growth)
        else:
            tree, second = self.second.propose(key, position, state.second, last, sampling)
            scored = below_roots(tree, self.second.window - 1)
            likely, made = source.after_guesses(nodes, scored, state.block)
            likely = jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), first, likely)
            nodes, slots, growing = join(nodes, scored, likely, growth)
            block = source.hold(state.block, made, slots[:, 1:])
            state = replace(state, block=block, second=second)
        nodes, block = grow(source, growth, nodes, state.block, growing)
        return nodes, replace(state, block=block)

    def commit(self, state: BestFirstState, step: Step) -> BestFirstState:
        """The draft caught up: keys of expanded nodes are kept, the last two tokens run anew.

        A node with an accepted child was expanded, so that all but the last node of the path
        have keys and values of their own. A draft that reads hidden states reads all tokens: what
        it had were its own.
        """
        if self.reads_anew:
            return self.follow(state, step)
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
        held = replace(held, cache=held.cache.keep(state.block.new, slots, kept))
        ahead = jnp.minimum(kept[:, None] + jnp.arange(anew), step.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(step.tokens, ahead, axis=1)
        none = step.seen.hidden_states[:, :anew]
        held = catch_up(self.model, held, tokens, step.count - kept, none, ())
        return replace(state, held=held, second=self._second_after(state, step))

    def follow(self, state: BestFirstState, step: Step) -> BestFirstState:
        """The draft caught up: the path is not one of its own tree, so all tokens are run."""
        held = catch_up(
            self.model, state.held, step.tokens, step.count, step.hidden_states,
            self.wants.hidden_layers,
        )  # fmt: skip
        return replace(state, held=held, second=self._second_after(state, step))

    def truncate(self, state: BestFirstState, length: Int32[Array, " B"]) -> BestFirstState | None:
        """The draft's state, and the second stage's, after fewer tokens."""
        second = () if self.second is None else self.second.truncate(state.second, length)
        if second is None:
            return None
        return replace(state, held=shorter(self.model, state.held, length), second=second)

    def _second_after(self, state: BestFirstState, step: Step) -> DraftState:
        """The second stage's state; what it proposed is not what the target scored."""
        return () if self.second is None else self.second.follow(state.second, step)
