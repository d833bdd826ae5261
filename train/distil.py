"""Distillation of one draft from the target's labels."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.transformer import Model
from train.config import Distil, Schedule
from train.labels import Labelled
from train.loop import Log, Metrics, fit
from train.loss import DIVERGENCES, HARD, cross_entropy, lumped, with_tail
from train.step import Loss, foreseen, sequence_logits
from train.vocabulary import Rows

Batch = tuple[Labelled, ...]

_WIDTH = 64
"""Rows are cut to multiples of so many tokens: each width is a program of its own."""


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
    """Batches of rows of like length, with as many tokens as `rows` of the longest have.

    `length` is that of every row. Every row is in an epoch's batches once, but for the few that
    fill up the last one; epochs have orders of their own.
    """

    def __init__(self, length: Int[np.ndarray, " N"], longest: int, rows: int, seed: int) -> None:
        self._length, self._longest, self._rows, self._seed = length, longest, rows, seed
        self._epoch, self._batches = -1, self._cut(0)

    def at(self, step: int) -> tuple[Int[np.ndarray, " n"], int]:
        """The rows of step `step` and the tokens of each that count; no other step matters."""
        epoch, place = divmod(step, len(self._batches))
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._cut(epoch)
        return self._batches[place]

    def _cut(self, epoch: int) -> list[tuple[Int[np.ndarray, " n"], int]]:
        """An epoch's batches. What fills no whole batch of its width goes into the next wider."""
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._length))
        width = np.minimum(-(-self._length // _WIDTH) * _WIDTH, self._longest)[order]
        found: list[tuple[Int[np.ndarray, " n"], int]] = []
        rest = order[:0]
        for each in np.unique(np.append(width, self._longest)).tolist():
            size = self._size(each)
            members = np.concatenate([rest, order[width == each]])
            if each == self._longest and len(members) % size:
                members = np.resize(members, -(-len(members) // size) * size)
            whole = len(members) // size * size
            found += [(part, each) for part in members[:whole].reshape(-1, size)]
            rest = members[whole:]
        return [found[place] for place in rng.permutation(len(found))]

    def _size(self, width: int) -> int:
        """Rows of a batch; whole shares of the devices, where there are so many."""
        size, devices = self._rows * self._longest // width, jax.device_count()
        return size - size % devices if size > devices > 1 and width < self._longest else size


def batches(
    parts: Sequence[tuple[Labelled, int]], seed: int, rows: Rows | None = None
) -> Callable[[int], Batch]:
    """Batches of so many long rows of each part, or more shorter ones (see `Shuffle`), as a pure
    function of the step.

    With `rows` they are of a draft in training that knows some tokens alone.
    """
    chosen = [
        (part, Shuffle(_lengths(part), part.tokens.shape[1], count, seed + number))
        for number, (part, count) in enumerate(parts)
        if count
    ]

    def at(step: int) -> Batch:
        found = (_taken(part, *order.at(step)) for part, order in chosen)
        return tuple(found if rows is None else map(rows.labelled, found))

    return at


def _lengths(part: Labelled) -> Int[np.ndarray, " N"]:
    """How many tokens of each row count, up to the one after the last that weighs anything."""
    weighs = np.asarray(part.weight) > 0
    last = weighs.shape[1] - weighs[:, ::-1].argmax(axis=1)
    return np.where(weighs.any(axis=1), np.minimum(last + 1, weighs.shape[1]), 1)


def _taken(part: Labelled, rows: Int[np.ndarray, " n"], width: int) -> Labelled:
    return Labelled(*(field[rows, :width] for field in part))


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
