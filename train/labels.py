"""The target's distribution after every token of a row, as its most likely tokens."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from specjax.models.transformer import Model
from train.chunks import Arrays, load_chunks, make_chunks
from train.collect import Collected
from train.config import Labels
from train.data import Mixture, Streams
from train.loop import Log
from train.parallel import Spread
from train.step import log_probs_of, sequence_logits

_ROWS = 16


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
    """Fills `folder` with the target's distributions along the collected rows."""
    _label(folder, target, collected.tokens, collected.temperature, settings, log)


def label_corpus(
    folder: Path, target: Model, streams: Streams, test_share: float, settings: Labels, log: Log
) -> None:
    """Fills `folder` with the target's distributions along rows cut from the training corpus."""
    rows, length = settings.corpus_rows, settings.corpus_length
    # a Mixture's rows are one token longer than what it is asked for
    corpus = Mixture(streams, test_share, length - 1, rows, settings.seed).batch(0)
    _label(folder, target, corpus, np.ones(rows, np.float32), settings, log)


def _label(
    folder: Path,
    target: Model,
    tokens: Int[np.ndarray, "N T"],
    temperature: Float[np.ndarray, " N"],
    settings: Labels,
    log: Log,
) -> None:
    pieces, spread = _pieces(len(tokens), tokens.shape[1], settings), Spread()
    placed, small = spread.everywhere(target), np.min_scalar_type(target.config.vocab_size - 1)

    def make(chunk: int) -> Arrays:
        rows = tokens[pieces[chunk]]
        ids, log_p, own = _top_of_probs(
            placed, *spread.rows((rows, temperature[pieces[chunk]])), settings.top_k,
            settings.dtype,
        )  # fmt: skip
        return {
            "tokens": rows,
            "ids": np.asarray(ids).astype(small),
            "log_p": np.asarray(log_p).astype(np.float16),
            "own": np.asarray(own),
        }

    make_chunks("label", folder, len(pieces), make, log)


def load_labels(
    folder: Path, rows: int, length: int, settings: Labels
) -> tuple[Labelled, Float[np.ndarray, "N T"]]:
    """What one of the above left in `folder` for `rows` rows, every position of weight 1.

    And the target's log probability of every token's successor at the row's temperature (at 1
    for greedy rows, as in `View.log_probs`); 0 for the last token.

    Raises:
      ValueError: it has not finished.
    """
    found = load_chunks("label", folder, len(_pieces(rows, length, settings)))
    weight = np.ones(found["tokens"].shape, np.float32)
    return Labelled(found["tokens"], found["ids"], found["log_p"], weight), found["own"]


def _pieces(rows: int, length: int, settings: Labels) -> list[slice]:
    """The rows of each forward pass."""
    size = max(1, settings.tokens // length)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


@partial(jax.jit, static_argnames=("k", "dtype"))
def _top_of_probs(
    target: Model,
    rows: Int32[Array, "B T"] | Int32[np.ndarray, "B T"],
    temperature: Float[Array, " B"] | Float[np.ndarray, " B"],
    k: int,
    dtype: str,
) -> tuple[Int32[Array, "B T k"], Float[Array, "B T k"], Float[Array, "B T"]]:
    logits = sequence_logits(target, jnp.asarray(rows), jnp.dtype(dtype)).T
    logits = logits.reshape(*rows.shape, -1)
    log_p, ids = lax.top_k(logits, k)
    log_p = log_p - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    following = jnp.roll(jnp.asarray(rows), -1, axis=1)
    own = log_probs_of(logits, following, jnp.asarray(temperature))
    return ids.astype(jnp.int32), log_p, own.at[:, -1].set(0)


def probs_at(model: Model, labelled: Labelled) -> Float[np.ndarray, "N T k"]:
    """`model`'s log probabilities of the labelled tokens, in float32."""
    pieces = range(0, len(labelled.tokens), _ROWS)
    found = [
        _probs_at(model, labelled.tokens[at : at + _ROWS], labelled.ids[at : at + _ROWS])
        for at in pieces
    ]
    return np.concatenate([np.asarray(part) for part in found])


@jax.jit
def _probs_at(
    model: Model, tokens: Int32[np.ndarray, "B T"] | Int32[Array, "B T"], ids: Array | np.ndarray
) -> Float[Array, "B T k"]:
    logits = sequence_logits(model, jnp.asarray(tokens), jnp.dtype("float32")).T
    logits = logits.reshape(*tokens.shape, -1)
    chosen = jnp.take_along_axis(logits, jnp.asarray(ids, jnp.int32), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
