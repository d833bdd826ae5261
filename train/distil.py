"""Distillation of one draft from the target's labels."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.transformer import Model
from train.config import Schedule
from train.labels import Labelled
from train.loop import Log, Metrics, fit
from train.loss import HARD, cross_entropy, divergence
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
    tokens = jnp.asarray(part.tokens)
    logits = sequence_logits(model, tokens, jnp.dtype(dtype))
    if loss == HARD:
        following = jnp.roll(tokens, -1, axis=1)
        has_next = foreseen(model, following).at[:, -1].set(0)
        value = cross_entropy(logits, following.reshape(-1)) * has_next.reshape(-1)
    else:
        value = divergence(loss, logits, part.ids, part.log_p)
    return jnp.sum(value * jnp.asarray(part.weight).reshape(-1))


@cache
def loss_of(loss: str, dtype: str) -> Loss:
    """`distillation_loss` of such a divergence; the same object for equal arguments."""
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
        picked = ((part, *order.at(step)) for part, order in chosen)
        found = (part.of(own, slice(width)) for part, own, width in picked)
        return tuple(found if rows is None else map(rows.labelled, found))

    return at


def _lengths(part: Labelled) -> Int[np.ndarray, " N"]:
    """How many tokens of each row count, up to the one after the last that weighs anything."""
    weighs = np.asarray(part.weight) > 0
    last = weighs.shape[1] - weighs[:, ::-1].argmax(axis=1)
    return np.where(weighs.any(axis=1), np.minimum(last + 1, weighs.shape[1]), 1)


def distil(
    stage: str,
    folder: Path,
    first: Model,
    batch: Callable[[int], Any],
    schedule: Schedule,
    loss: Loss,
    measure: Callable[[Model], Metrics],
    log: Log,
    passes: int = 1,
) -> Model:
    """The draft `first` after `schedule.steps` steps on the target's labels; float32 weights.

    `passes` is how many of the draft its loss has.
    """
    own = jax.tree.map(jnp.copy, first)  # training donates the buffers it starts from
    return fit(stage, folder, own, schedule, batch, loss, measure, log, passes)
