"""One optimisation step: flax's TrainState, Muon for matrices, AdamW for the rest."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jaxtyping import Array, Float, Int32
from optax import contrib

from specjax.models.config import ModelConfig
from specjax.models.transformer import Model, initialize, trunk, unembed
from train.config import Schedule
from train.loss import cross_entropy

Loss = Callable[[Model, Any], Float[Array, ""]]

_OUT_IN = contrib.MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0,))


def learning_rate(schedule: Schedule, peak: float) -> optax.Schedule:
    """Warm-up, plateau, and a linear fall to zero over the last `decay_steps`."""
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup, 1)),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, max(decay, 1)),
        ],
        [warmup, schedule.steps - decay],
    )


def _matrices_of_layers(model: Any) -> Any:
    """Muon's dimension numbers where it applies, None where AdamW does."""

    def numbers(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers | None:
        in_layer = getattr(path[0], "name", "") == "layers"
        return _OUT_IN if in_layer and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(numbers, model)


def create_state(model: Model, schedule: Schedule) -> TrainState:
    """A fresh optimiser state over float32 weights; `params` is `{"model": model}`."""
    alike = dataclasses.replace(schedule, seed=0)
    state = TrainState.create(
        apply_fn=trunk, params={"model": model}, tx=_optimiser(alike, model.config)
    )
    return state.replace(step=jnp.int32(0))  # of the type it is restored with: one compilation


@cache
def _optimiser(schedule: Schedule, config: ModelConfig) -> optax.GradientTransformation:
    """Muon (Jordan 2024), three Newton-Schulz iterations after AOL scaling (arXiv 2512.04632).

    Equal arguments give the same object: it is part of what `train_step` is compiled for.
    """
    shapes = jax.eval_shape(lambda: initialize(jax.random.key(0), config))
    muon = contrib.muon(
        learning_rate(schedule, schedule.matrix_rate),
        ns_steps=3,
        preconditioning="aol",
        weight_decay=schedule.weight_decay,
        adam_b2=0.95,
        adam_learning_rate=learning_rate(schedule, schedule.other_rate),
        muon_weight_dimension_numbers={"model": _matrices_of_layers(shapes)},
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def sequence_logits(
    model: Model, tokens: Int32[Array, "B T"], dtype: jnp.dtype
) -> Float[Array, "V C"]:
    """Logits after every token of whole sequences, feature-major."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    return unembed(model, trunk(model, tokens, positions, None, None, dtype=dtype).x, dtype)


def foreseen(model: Model, tokens: Int32[Array, "*S"]) -> Float[Array, "*S"]:
    """1 for each token that `model` can give a probability, 0 for the others."""
    known = model.config.num_known
    return jnp.ones(tokens.shape) if known is None else (tokens < known).astype(jnp.float32)


def log_probs_of(
    logits: Float[Array, "B S V"], tokens: Int32[Array, "B S"], temperature: Float[Array, " B"]
) -> Float[Array, "B S"]:
    """Log probabilities of `tokens` at each row's temperature, at 1 for greedy rows."""
    scale = jnp.where(temperature > 0, temperature, 1)[:, None, None]
    probs = jax.nn.log_softmax(logits / scale, axis=-1)
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def next_token_loss(
    model: Model, rows: Int32[Array, "B T"], *, dtype: jnp.dtype
) -> Float[Array, ""]:
    """Mean cross-entropy of every token but the first, in nats a token.

    Tokens that the model never foresees are left out.
    """
    logits = sequence_logits(model, rows[:, :-1], dtype)
    counted = foreseen(model, rows[:, 1:]).reshape(-1)
    value = cross_entropy(logits, rows[:, 1:].reshape(-1)) * counted
    return value.sum() / jnp.maximum(counted.sum(), 1)


@partial(jax.jit, static_argnames="loss", donate_argnames="state")
def train_step(state: TrainState, batch: Any, loss: Loss) -> tuple[TrainState, Float[Array, ""]]:
    """One step down `loss`; the state is donated."""
    value, gradient = jax.value_and_grad(lambda p: loss(p["model"], batch))(state.params)
    return state.apply_gradients(grads=gradient), value


@partial(jax.jit, static_argnames="loss")
def evaluate(model: Model, batch: Any, loss: Loss) -> Float[Array, ""]:
    """The loss of a batch."""
    return loss(model, batch)
