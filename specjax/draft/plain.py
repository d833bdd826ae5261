"""Plain decoding as a drafter: trees of nothing but their roots."""

from typing import Any

from jaxtyping import Array, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, static
from specjax.base.sampling import Sampling
from specjax.draft.drafter import Drafter, Seen, Step
from specjax.trees.construction import DRAWN, Construction
from specjax.trees.tree import TokenTree, root_only


@pytree
class PlainDrafter(Drafter):
    """Drafts nothing: every step scores the last token and gives the next one."""

    vocabulary: int = static()

    @property
    def state_specs(self) -> Any:
        """Of no state."""
        return ()

    @property
    def window(self) -> int:
        """One token a step."""
        return 1

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.vocabulary

    @property
    def num_slots(self) -> int:
        """The root's slot."""
        return 1

    @property
    def construction(self) -> Construction:
        """A chain of no tokens, for which every rule is lossless."""
        return Construction(DRAWN, chain=True)

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> tuple[()]:
        """No state."""
        del prompt, length, slots, seen
        return ()

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: tuple[()],
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, tuple[()]]:
        """The roots."""
        del key, position, sampling
        return root_only(last, self.vocabulary), state

    def commit(self, state: tuple[()], step: Step) -> tuple[()]:
        """No state."""
        del step
        return state

    def truncate(self, state: tuple[()], length: Int32[Array, " B"]) -> tuple[()]:
        """No state."""
        del length
        return state
