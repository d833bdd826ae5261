"""Distillation of one draft from the target's labels."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.models.transformer import Model
from train.config import Distil, Schedule
from train.labels import Labelled
from train.loop import Log, Metrics, fit
from train.loss import DIVERGENCES, HARD, cross_entropy, lumped, with_tail
from train.step import Loss, foreseen, sequence_logits
from train.vocabulary import Rows

Batch = tuple[Labelled, ...]


def distillation_loss(model: Model, batch: Batch, *, loss: str, dtype: str) -> Float[Array, ""]:
    """Mean weighted loss a position, over parts of several lengths, in nats a token.

    A position's loss is the divergence named `loss` from the target's distribution, or the
    cross-entropy of the row's own next token. Matrix products are in `dtype`.
    """
    total = sum(_weighted_sum(model, part, loss, dtype) for part in batch)
    return jnp.asarray(total / sum(part.weight.size for part in batch))


def _weighted_sum(model: Model, part: Labelled, loss: str, dtype: str) -> Float[Array, ""]:
    tokens, k = jnp.asarray(part.tokens), part.ids.shape[-1]
    logits = sequence_logits(model, tokens, jnp.dtype(dtype))
    if loss == HARD:
        following = jnp.roll(tokens, -1, axis=1)
        has_next = foreseen(model, following).at[:, -1].set(0)
        value = cross_entropy(logits, following.reshape(-1)) * has_next.reshape(-1)
    else:
        ids = jnp.asarray(part.ids, jnp.int32).reshape(-1, k).T
        log_p = with_tail(jnp.asarray(part.log_p, jnp.float32).reshape(-1, k).T)
        value = DIVERGENCES[loss](log_p, lumped(logits, ids))
    return jnp.sum(value * jnp.asarray(part.weight).reshape(-1))


@cache
def _loss(loss: str, dtype: str) -> Loss:
    return partial(distillation_loss, loss=loss, dtype=dtype)


class Shuffle:
    """`rows` indices a step out of `count`, every index once an epoch, in an order of its own."""

    def __init__(self, count: int, rows: int, seed: int) -> None:
        self._count, self._rows, self._seed = count, rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def at(self, step: int) -> np.ndarray:
        """The indices of step `step`; they depend on nothing but the arguments."""
        epochs, places = np.divmod(np.arange(self._rows) + step * self._rows, self._count)
        self._orders = {int(epoch): self._order(int(epoch)) for epoch in np.unique(epochs)}
        pairs = zip(epochs, places, strict=True)
        return np.array([self._orders[int(epoch)][place] for epoch, place in pairs])

    def _order(self, epoch: int) -> np.ndarray:
        kept = self._orders.get(epoch)
        if kept is not None:
            return kept
        return np.random.default_rng((self._seed, epoch)).permutation(self._count)


def batches(
    parts: Sequence[tuple[Labelled, int]], seed: int, rows: Rows | None = None
) -> Callable[[int], Batch]:
    """Batches of so many rows of each part, as a pure function of the step.

    With `rows` they are of a draft in training that knows some tokens alone.
    """
    chosen = [
        (part, Shuffle(len(part.tokens), count, seed + number))
        for number, (part, count) in enumerate(parts)
        if count
    ]

    def at(step: int) -> Batch:
        found = (Labelled(*(field[order.at(step)] for field in part)) for part, order in chosen)
        return tuple(found if rows is None else map(rows.labelled, found))

    return at


def distil(
    stage: str,
    folder: Path,
    first: Model,
    batch: Callable[[int], Batch],
    schedule: Schedule,
    settings: Distil,
    measure: Callable[[Model], Metrics],
    log: Log,
) -> Model:
    """The draft `first` after `schedule.steps` steps on the target's labels; float32 weights."""
    own = jax.tree.map(jnp.copy, first)  # training donates the buffers it starts from
    return fit(
        stage, folder, own, schedule, batch, _loss(settings.loss, schedule.dtype), measure, log
    )
