"""What a drafter is."""

import abc
from typing import Any

from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.deprecated import renamed_fields, warn_renamed
from specjax.base.pytree import pytree
from specjax.base.sampling import Sampling
from specjax.parallel.mesh import DATA
from specjax.trees.accepted import Accepted
from specjax.trees.construction import Construction
from specjax.trees.tree import TokenTree

DraftState = Any
"""A pytree with rows first; the caller threads it and knows nothing of it."""


@renamed_fields(seen="top_tokens")
@pytree
class Step:
    """What a step gave: the first `count` of `tokens`, and the tree and path they came from.

    `count` can be below that of `accepted`, where a row ended inside the path; such a row, and one
    that ended before, is `done`. `top_tokens` are the target's likeliest tokens after each node, as
    many as the drafter asked for. `logprobs` are those of the tokens, where they were asked for.
    `probs` are the tokens' probabilities as the target drew them, for drafters that need them.
    """

    tokens: Int32[Array, "B W"]
    count: Int32[Array, " B"]
    done: Bool[Array, " B"]
    tree: TokenTree
    accepted: Accepted
    top_tokens: Int32[Array, "B N k"]
    logprobs: "TokenLogprobs | None" = None
    probs: Float[Array, "B W"] | None = None


@pytree
class TokenLogprobs:
    """The target's log probabilities of a step's tokens, and of the likeliest ones at their places.

    They are those of its logits before bias, penalties and temperature; zeros where no row asked.
    """

    of_token: Float[Array, "B W"]
    top: Float[Array, "B W k"]
    top_tokens: Int32[Array, "B W k"]


class Drafter(abc.ABC):
    """Proposes a tree below each row's root; its parameters are leaves, its state is threaded.

    `window` is the depth of its trees plus 1: the most tokens a step can commit. `construction`
    says how they are made, which decides the legal rules. `target_top_k` is how many of the
    target's likeliest tokens after each token and node it asks to be shown.
    """

    @property
    def target_top_k(self) -> int:
        """How many of the target's likeliest tokens it wants to see; most want none."""
        return 0 if type(self).num_seen is Drafter.num_seen else self.num_seen

    @property
    def num_seen(self) -> int:
        """Deprecated: it is `target_top_k` now; a drafter of before may still say it here."""
        if type(self).num_seen is not Drafter.num_seen:  # called by it
            return 0
        warn_renamed(f"{type(self).__name__}.num_seen", "target_top_k")
        return self.target_top_k

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "num_seen" in cls.__dict__:
            warn_renamed(f"{cls.__name__}.num_seen", "target_top_k")

    @property
    def state_specs(self) -> Any:
        """How its state is spread over a mesh: rows first by default."""
        return P(DATA)

    @property
    def needs_probs(self) -> bool:
        """Whether a step is to hold its tokens' probabilities."""
        return False

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that a step may be made with; most drafters have one."""
        return ("",)

    def of_setting(self, name: str) -> "Drafter":
        """The drafter of a setting, over the same state."""
        del name
        return self

    @property
    @abc.abstractmethod
    def window(self) -> int:
        """Depth of the trees plus 1."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, which must be the target's."""

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """Static number of node slots of the trees, the root's included."""

    @property
    @abc.abstractmethod
    def construction(self) -> Construction:
        """How trees are made."""

    @abc.abstractmethod
    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        top_tokens: Int32[Array, "B T k"],
    ) -> DraftState:
        """The state after each row's first `length` tokens, the last of which is the root.

        `slots` is how many tokens a row may come to hold, head-room included; `top_tokens` are the
        target's likeliest tokens after each token of the prompt.
        """

    @abc.abstractmethod
    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: DraftState,
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, DraftState]:
        """Trees below the root tokens `last`, which stand at `position`.

        The state may hold what was made on the way, for `commit`.
        """

    @abc.abstractmethod
    def commit(self, state: DraftState, step: Step) -> DraftState:
        """The state after the step's tokens, of which the last is the next root."""

    def follow(self, state: DraftState, step: Step) -> DraftState:
        """The state after a step's tokens whose tree was another drafter's.

        The same as `commit` unless the state holds something of a tree's nodes by their number.
        """
        return self.commit(state, step)

    def truncate(self, state: DraftState, length: Int32[Array, " B"]) -> DraftState | None:
        """The state when a row held but the first `length` of its tokens; None if it cannot tell.

        More tokens follow before anything is proposed.
        """
        del state, length
        return None
