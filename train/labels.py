"""The target's law after every token of a row, as its most likely tokens."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from specjax.model import Model
from train.chunks import Arrays, load_chunks, make_chunks
from train.collect import Collected
from train.config import Labels
from train.data import Mixture, Streams
from train.loop import Log
from train.step import sequence_logits


class Labelled(NamedTuple):
    """Rows with the target's `k` most likely tokens after each token and their log probabilities.

    `weight` says how much a position counts in the loss.
    """

    tokens: Int[Array, "N T"] | Int[np.ndarray, "N T"]
    ids: Int[Array, "N T k"] | Int[np.ndarray, "N T k"]
    log_p: Float[Array, "N T k"] | Float[np.ndarray, "N T k"]
    weight: Float[Array, "N T"] | Float[np.ndarray, "N T"]


def label_collected(
    folder: Path, target: Model, collected: Collected, settings: Labels, log: Log
) -> None:
    """Fills `folder` with the target's laws along the collected rows."""
    pieces = _pieces(len(collected.tokens), collected.tokens.shape[1], settings)

    def make(chunk: int) -> Arrays:
        return _labels(target, collected.tokens[pieces[chunk]], settings)

    make_chunks("label", folder, len(pieces), make, log)


def label_corpus(
    folder: Path, target: Model, streams: Streams, test_share: float, settings: Labels, log: Log
) -> None:
    """Fills `folder` with the target's laws along rows cut from the training corpus."""
    rows, length = settings.corpus_rows, settings.corpus_length
    # a Mixture's rows are one token longer than what it is asked for
    corpus = Mixture(streams, test_share, length - 1, rows, settings.seed).batch(0)
    pieces = _pieces(rows, length, settings)

    def make(chunk: int) -> Arrays:
        return _labels(target, corpus[pieces[chunk]], settings)

    make_chunks("label", folder, len(pieces), make, log)


def load_labels(folder: Path, rows: int, length: int, settings: Labels) -> Labelled:
    """What one of the above left in `folder` for `rows` rows, every position of weight 1.

    Raises:
      ValueError: it has not finished.
    """
    found = load_chunks("label", folder, len(_pieces(rows, length, settings)))
    weight = np.ones(found["tokens"].shape, np.float32)
    return Labelled(found["tokens"], found["ids"], found["log_p"], weight)


def _pieces(rows: int, length: int, settings: Labels) -> list[slice]:
    """The rows of each forward pass."""
    size = max(1, settings.tokens // length)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def _labels(target: Model, rows: np.ndarray, settings: Labels) -> Arrays:
    ids, log_p = _top_of_law(target, rows, settings.top_k, settings.dtype)
    small = np.min_scalar_type(target.config.vocab_size - 1)
    return {
        "tokens": rows,
        "ids": np.asarray(ids).astype(small),
        "log_p": np.asarray(log_p).astype(np.float16),
    }


@partial(jax.jit, static_argnames=("k", "dtype"))
def _top_of_law(
    target: Model, rows: Int32[Array, "B T"] | Int32[np.ndarray, "B T"], k: int, dtype: str
) -> tuple[Int32[Array, "B T k"], Float[Array, "B T k"]]:
    logits = sequence_logits(target, jnp.asarray(rows), jnp.dtype(dtype)).T
    log_p, ids = lax.top_k(logits, k)
    log_p = log_p - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return ids.reshape(*rows.shape, k), log_p.reshape(*rows.shape, k)
