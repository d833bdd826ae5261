"""Models that learn the corpus itself: the target, and what drafts start from."""

import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import ModelConfig
from specjax.models.transformer import Model, initialize
from train.config import Reading
from train.data import Mixture, Stream, Streams, evaluation_rows
from train.loop import Log, Metrics, fit
from train.step import Loss, evaluate, next_token_loss


def bits_per_byte(model: Model, stream: Stream, length: int, rows: int) -> float:
    """Held-out loss in bits a byte of text, over evenly spaced sequences of a stream."""
    sequences, bytes_per_token = evaluation_rows(stream, length, rows)
    loss = corpus_loss("float32")
    pieces = np.array_split(sequences, max(1, len(sequences) // 8))
    nats = sum(float(evaluate(model, p, loss)) * len(p) for p in pieces) / len(sequences)
    return nats / math.log(2) / bytes_per_token


@cache
def corpus_loss(dtype: str) -> Loss:
    """`next_token_loss` with matrix products in `dtype`; the same object for equal arguments."""
    return partial(next_token_loss, dtype=jnp.dtype(dtype))


def pretrain(
    stage: str,
    folder: Path,
    config: ModelConfig,
    schedule: Reading,
    streams: Streams,
    test_share: float,
    log: Log,
) -> Model:
    """A model trained on the corpus; float32 weights. Checkpoints go to `folder`."""
    batches = Batches(schedule, streams, test_share)
    loss = corpus_loss(schedule.dtype)

    def measure(model: Model) -> Metrics:
        return {"dev_bits_per_byte": bits_per_byte(model, streams.dev, schedule.length, 64)}

    first = initialize(jax.random.key(schedule.seed), config)
    return fit(stage, folder, first, schedule, batches.at, loss, measure, log)


class Batches:
    """Short sequences, then long ones for the last `long_steps` steps, equal tokens a step."""

    def __init__(self, schedule: Reading, streams: Streams, share: float) -> None:
        seed = schedule.seed
        self._short = Mixture(streams, share, schedule.length, schedule.batch, seed)
        self._switch = schedule.steps - schedule.long_steps
        if schedule.long_steps:
            rows = max(1, schedule.batch * schedule.length // schedule.long_length)
            self._long = Mixture(streams, share, schedule.long_length, rows, seed + 1)

    def at(self, step: int) -> np.ndarray:
        """The sequences of step `step`, int32 `[rows, length + 1]`."""
        if step < self._switch:
            return self._short.batch(step)
        return self._long.batch(step - self._switch)
