"""Hidden states in tests: those along a text, and a drafter that drafts well only while those that
it was shown are the target's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import most_likely
from specjax.decoding.stepping import by_token
from specjax.draft import Drafter, Seen, Step, Wants
from specjax.models.layers import write_window
from specjax.models.transformer import Model, trunk, unembed
from specjax.trees.construction import TOP_K, Construction
from specjax.trees.tree import NO_PARENT, chosen

DEPTH = 2


@pytree
class Read:
    """A row's text, the root included, and the hidden states after each of its tokens but it."""

    tokens: Int32[Array, "B S"]
    length: Int32[Array, " B"]
    hidden: Float[Array, "B S H"]


@pytree
class HiddenDrafter(Drafter):
    """It knows the target whole: its drafts are the target's greedy tokens, if all hidden states
    that it was ever shown are those of a pass over the text, and wrong ones else.

    Before each of them stands a sibling that is wrong in any case.
    """

    model: Model
    layers: tuple[int, ...] = static(default=(0, 1, 2))

    @property
    def wants(self) -> Wants:
        return Wants(hidden_layers=self.layers)

    @property
    def window(self) -> int:
        return DEPTH + 1

    @property
    def num_slots(self) -> int:
        return 2 * DEPTH + 1

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def construction(self) -> Construction:
        return Construction(TOP_K)

    def init(self, prompt, length, slots: int, seen: Seen) -> Read:
        room = ((0, 0), (0, slots + self.window - prompt.shape[1]))
        hidden = jnp.pad(seen.hidden_states, (*room, (0, 0)))
        return Read(jnp.pad(prompt, room), length, hidden)

    def propose(self, key, position, state: Read, last, sampling) -> tuple[Any, Read]:
        del key, sampling
        tokens, length, right = state.tokens, state.length, None
        nodes, parents = [last], [NO_PARENT]
        for level in range(DEPTH):
            logits, hidden = self._after(tokens)
            if right is None:
                near = jnp.isclose(hidden, state.hidden, rtol=1e-4, atol=1e-4).all(axis=2)
                at = jnp.arange(tokens.shape[1])
                right = (near | (at >= position[:, None])).all(axis=1) & (length == position + 1)
            place = length[:, None] - 1 + level
            likely = most_likely(jnp.take_along_axis(logits, place[..., None], axis=1))[:, 0]
            other = (likely + 1) % self.vocab_size
            nodes += [(likely + 2) % self.vocab_size, jnp.where(right, likely, other)]
            parents += [2 * level] * 2
            tokens = write_window(tokens, nodes[-1][:, None], length + level, axis=1)

        def rows(values: Any) -> Array:
            return jnp.broadcast_to(jnp.asarray(values), (last.shape[0], self.num_slots))

        tree = chosen(
            tokens=jnp.stack(nodes, axis=1),
            parents=rows(parents),
            depth=rows([(number + 1) // 2 for number in range(self.num_slots)]),
            valid=rows(True),
            drafter=rows(0),
            chance=rows(1.0),
            vocabulary=self.vocab_size,
        )
        return tree, state

    def commit(self, state: Read, step: Step) -> Read:
        path = step.accepted.path[:, :, None]
        hidden = jnp.take_along_axis(step.seen.hidden_states, path, axis=1)
        return Read(
            write_window(state.tokens, step.tokens, state.length, axis=1),
            state.length + step.count,
            write_window(state.hidden, hidden, state.length - 1, axis=1),
        )

    def truncate(self, state: Read, length) -> Read:
        return replace(state, length=length)

    def _after(self, tokens: Int32[Array, "B S"]) -> tuple[Array, Array]:
        """The target's logits and hidden states along whole texts."""
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        made = trunk(self.model, tokens, at, None, None, hidden_layers=self.layers)
        logits = unembed(self.model, made.x).T.reshape(*tokens.shape, -1)
        return logits, by_token(made.hidden, tokens.shape)


def hidden_of(target: Model, tokens: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The target's hidden states along a text, those of each token behind one another."""
    at = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    made = trunk(target, jnp.asarray([tokens], jnp.int32), at, None, None, hidden_layers=layers)
    return np.concatenate([np.asarray(each).T for each in made.hidden], axis=1)


def log_softmax(logits) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))


def check_close(logits, expected: np.ndarray) -> None:
    """Log probabilities over tokens that a head knows; those of others are next to nothing."""
    found, known = log_softmax(logits), np.isfinite(expected)
    np.testing.assert_allclose(found[known], expected[known], rtol=1e-4, atol=1e-4)
    assert (found[~known] < -1e6).all()
