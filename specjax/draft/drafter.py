"""What a drafter is."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.grammars import Grammars
from specjax.base.pytree import pytree
from specjax.base.sampling import Sampling
from specjax.parallel.mesh import DATA
from specjax.trees.accepted import Accepted
from specjax.trees.construction import Construction
from specjax.trees.tree import TokenTree

if TYPE_CHECKING:
    from specjax.draft.retrieval import Corpus

DraftState = Any
"""A pytree with rows first; the caller threads it and knows nothing of it."""


@dataclasses.dataclass(frozen=True)
class Wants:
    """What a drafter asks to see of the target, after each token of a prompt and node of a tree.

    `top_tokens` is how many of the target's likeliest tokens; `hidden_layers` are the hidden states
    by the number of layers before them, as transformers counts them: 0 are the embeddings, i is
    what leaves the i-th layer. Unlike there, the last one is not normed: the number of the target's
    layers is what its last norm reads. All settings of a drafter want the same.
    """

    top_tokens: int = 0
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_layers", (*self.hidden_layers,))  # a list has no hash

    def zeros(self, shape: tuple[int, ...], hidden_size: int) -> "Seen":
        """What it has room for, of a target of that hidden size."""
        features = len(self.hidden_layers) * hidden_size
        top_tokens = jnp.zeros((*shape, self.top_tokens), jnp.int32)
        return Seen(top_tokens, jnp.zeros((*shape, features), jnp.float32))


@pytree
class Seen:
    """What `Wants` asked for, after each token of prompts or node of trees.

    What stands at nodes that are not valid, and past the end of a prompt, may be anything. Hidden
    states are float32, one behind the other: `H` is their number times the target's hidden size.
    Nothing that was not asked for is made; then `k` or `H` is 0.
    """

    top_tokens: Int32[Array, "B N k"]
    hidden_states: Float[Array, "B N H"]


@pytree
class Step:
    """What a step gave: the first `count` of `tokens`, and the tree and path they came from.

    `count` can be below that of `accepted`, where a row ended inside the path; such a row, and one
    that ended before, is `done`. `seen` is what the drafter `wants` of the target after each node;
    hidden states do not leave the step. `logprobs` are those of the tokens, where they were asked
    for. `probs` are the tokens' probabilities as the target drew them, for drafters that need them.
    """

    tokens: Int32[Array, "B W"]
    count: Int32[Array, " B"]
    done: Bool[Array, " B"]
    tree: TokenTree
    accepted: Accepted
    seen: Seen
    logprobs: "TokenLogprobs | None" = None
    probs: Float[Array, "B W"] | None = None

    @property
    def hidden_states(self) -> Float[Array, "B W H"]:
        """What was seen of the target's hidden states before each of the tokens."""
        path = self.accepted.path[:, :, None]
        return jnp.take_along_axis(self.seen.hidden_states, path, axis=1)


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
    says how they are made, which decides the legal rules. `wants` says what it is to be shown of
    the target.
    """

    @property
    def wants(self) -> Wants:
        """What it asks to see of the target; most want nothing."""
        return Wants()

    @property
    def state_specs(self) -> Any:
        """How its state is spread over a mesh: rows first by default."""
        return P(DATA)

    @property
    def needs_probs(self) -> bool:
        """Whether a step is to hold its tokens' probabilities."""
        return False

    @property
    def remembers(self) -> int:
        """Tokens of texts that have ended from which it drafts (see `with_earlier`)."""
        return 0

    def with_earlier(self, corpus: "Corpus") -> "Drafter":
        """The same with other earlier texts, of as many tokens as it `remembers`."""
        del corpus
        return self

    def under(self, grammars: Grammars) -> "Drafter":
        """The same, drafting within rows' grammars as far as it can.

        What it drafts outside of them is never accepted.
        """
        del grammars
        return self

    @property
    def takes_nodes(self) -> bool:
        """Whether its chosen trees may be given other nodes before the target scores them: its
        state holds nothing of nodes by their number.
        """
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
        seen: Seen,
    ) -> DraftState:
        """The state after each row's first `length` tokens, the last of which is the root.

        `slots` is how many tokens a row may come to hold, head-room included; `seen` is what
        it `wants` of the target after each token of the prompt but the last one, the root: that
        comes with the next step, at the first node of its path.
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
