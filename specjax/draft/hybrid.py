"""A draft's tree and branches of the text in one tree, under one budget of nodes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.grammars import Grammars
from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import Sampling
from specjax.draft.best_first import BestFirstDrafter, BestFirstState
from specjax.draft.drafter import Drafter, Seen, Step, Wants
from specjax.draft.growth import tree_of
from specjax.draft.ngram import NGram
from specjax.draft.prompt_lookup import Text, TextSource, append, grow_beside, read
from specjax.trees.construction import Construction
from specjax.trees.tree import TokenTree


@pytree
class HybridState:
    """The draft's state and the text; which of the tree's nodes have keys and values."""

    draft: BestFirstState
    text: Text
    keyed: Bool[Array, "B K"]


@pytree
class HybridDrafter(Drafter):
    """The draft grows its best-first tree; then the text's branches compete for the same slots.

    A node of the text joins where the product of probabilities above it and its own `trust` beat
    the draft's worst nodes, below any node of the tree. The draft never runs over such nodes.
    """

    draft: BestFirstDrafter
    trust: Float[Array, " M"]
    table: NGram | None
    least: int = static(default=2)
    width: int = static(default=2)

    def under(self, grammars: Grammars) -> "HybridDrafter":
        """The same, whose draft drafts within rows' grammars."""
        return replace(self, draft=self.draft.under(grammars))

    @property
    def wants(self) -> Wants:
        """What the draft wants to see."""
        return self.draft.wants

    @property
    def window(self) -> int:
        """Depth of the deepest tree plus 1."""
        return self.draft.window

    @property
    def vocab_size(self) -> int:
        """Tokens of the draft's vocabulary."""
        return self.draft.vocab_size

    @property
    def num_slots(self) -> int:
        """Node slots, the root's included."""
        return self.draft.num_slots

    @property
    def construction(self) -> Construction:
        """Chosen nodes."""
        return replace(self.draft.construction, chain=False)

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> HybridState:
        """Both states after the prompts."""
        draft = self.draft.init(prompt, length, slots + self.window, seen)  # see `commit`
        return HybridState(draft, read(prompt, length, slots), draft.slots > 0)

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: HybridState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, HybridState]:
        """The tree of the likeliest nodes of both; nothing of it is random."""
        nodes, draft = self.draft.grown(key, position, state.draft, last, sampling)
        keyed = nodes.expanded
        source = TextSource(state.text, self.trust, self.table, self.least, self.width)
        nodes = grow_beside(source, self.draft.growth, nodes)
        tree, slots = tree_of(nodes, last, self.vocab_size)
        keyed = jnp.take_along_axis(keyed & (nodes.drafter == 0), slots, axis=1)
        return tree, HybridState(replace(draft, slots=slots), state.text, keyed)

    def commit(self, state: HybridState, step: Step) -> HybridState:
        """Both states after the step's tokens; nodes of the path without keys are run anew."""
        if self.draft.reads_anew:
            return self.follow(state, step)
        path = jnp.maximum(step.accepted.path[:, 1:] - 1, 0)
        has = jnp.take_along_axis(state.keyed, path, axis=1)
        place = jnp.arange(has.shape[1])
        has &= place < step.count[:, None] - 1
        kept = jnp.cumprod(has, axis=1).sum(axis=1, dtype=jnp.int32)
        draft = self.draft.caught_up(state.draft, step, kept, self.window)
        return HybridState(draft, append(state.text, step), state.keyed)

    def follow(self, state: HybridState, step: Step) -> HybridState:
        """Both states after a step along another drafter's tree."""
        draft = self.draft.follow(state.draft, step)
        return HybridState(draft, append(state.text, step), state.keyed)

    def truncate(self, state: HybridState, length: Int32[Array, " B"]) -> HybridState | None:
        """Both states after fewer tokens."""
        draft = self.draft.truncate(state.draft, length)
        if draft is None:
            return None
        return replace(state, draft=draft, text=replace(state.text, length=length))
