"""The target's distribution after every token of a row, as its most likely tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt16

from specjax.base.sampling import largest
from specjax.engine.request import MAX_LOGPROBS, Logprob
from specjax.models.transformer import Model
from train.chunks import (
    Arrays,
    MappedRows,
    keep_chunk,
    load_chunk,
    load_chunks,
    make_chunks,
)
from train.collect import Collected, Keep
from train.config import Labels
from train.data import Mixture, Streams
from train.loop import Log
from train.parallel import Spread
from train.step import log_probs_of, sequence_logits

NEVER = -1e4
"""The log probability of what cannot be; half precision holds it."""

_WIDTH = 64


class Labelled(NamedTuple):
    """Rows with the target's `k` most likely tokens after each token and their log probabilities.

    `weight` says how much a position counts in the loss. `hidden` are hidden states of the target
    after each token, where drafts read them (see `train.heads`).
    """

    tokens: Int[Array, "N T"] | Int[np.ndarray, "N T"]
    ids: Int[Array, "N T k"] | Int[np.ndarray, "N T k"]
    log_p: Float[Array, "N T k"] | Float[np.ndarray, "N T k"]
    weight: Float[Array, "N T"] | Float[np.ndarray, "N T"]
    hidden: UInt16[Array, "N T F"] | UInt16[np.ndarray, "N T F"] | MappedRows | None = None

    def of(self, *index: slice | Int[np.ndarray, " n"]) -> "Labelled":
        """Some of the rows, and of their positions."""
        hidden = None if self.hidden is None else self.hidden[index]
        return Labelled(
            self.tokens[index], self.ids[index], self.log_p[index], self.weight[index], hidden
        )


class Texts(NamedTuple):
    """Rows of tokens, of which `length` are some text's, drawn at a `temperature`."""

    tokens: Int[np.ndarray, "N T"]
    length: Int[np.ndarray, " N"]
    temperature: Float[np.ndarray, " N"]


def collected_texts(collected: Path, chunk: int) -> Texts:
    """A chunk of what was collected."""
    found = load_chunk("collect", collected, chunk)
    return Texts(found["tokens"], found["prompt"] + found["length"], found["temperature"])


def corpus_texts(streams: Streams, test_share: float, settings: Labels) -> Callable[[int], Texts]:
    """Rows cut from the training corpus, by chunks."""
    rows, length, pieces = settings.corpus_rows, settings.corpus_length, corpus_pieces(settings)
    # a Mixture's rows are one token longer than what it is asked for
    corpus = Mixture(streams, test_share, length - 1, rows, settings.seed).batch(0)

    def texts(chunk: int) -> Texts:
        own = corpus[pieces[chunk]]
        return Texts(own, np.full(len(own), length), np.ones(len(own), np.float32))

    return texts


def label(
    folder: Path,
    target: Model,
    texts: Callable[[int], Texts],
    count: int,
    settings: Labels,
    log: Log,
) -> None:
    """Fills `folder` with the target's distributions along the first `count` chunks of texts, a
    chunk for each: more texts later go on from them.
    """
    spread = Spread()
    placed = spread.everywhere(target)

    def make(chunk: int) -> Arrays:
        rows = texts(chunk)
        labels = _blank(rows.tokens, settings.top_k, target.config.vocab_size)
        for chosen, size, width in passes(rows.length, rows.tokens.shape[1], settings.tokens):
            tokens = np.zeros((size, width), np.int32)
            tokens[: len(chosen)] = rows.tokens[chosen, :width]
            temperature = np.resize(rows.temperature[chosen], size)
            made = _top_of_probs(
                placed, *spread.rows((tokens, temperature)), settings.top_k, settings.dtype
            )
            for name, part in zip(("ids", "log_p", "own"), made, strict=True):
                labels[name][chosen, :width] = np.asarray(part)[: len(chosen)]
        return labels

    make_chunks("label", folder, count, make, log)


def label_as_collected(folder: Path, vocab_size: int, settings: Labels) -> Keep | None:
    """Fills `folder` while rows are collected, with what an engine says of the tokens it takes.

    So no pass labels them again. There are labels along the continuations, not along prompts, and
    `own` at another temperature than 1 takes what is not among the likeliest tokens as one. None
    where an engine says less than `settings` asks for.
    """
    if settings.top_k > MAX_LOGPROBS:
        return None

    def keep(chunk: int, rows: Collected, logprobs: list[list[Logprob]]) -> None:
        made = _blank(rows.tokens, settings.top_k, vocab_size)
        for row, said in enumerate(logprobs):
            where = slice(int(rows.prompt[row]) - 1, int(rows.prompt[row]) - 1 + len(said))
            top = np.array([each.top for each in said], np.float64)  # [S, k, 2]
            made["ids"][row, where], made["log_p"][row, where] = top[..., 0], top[..., 1]
            token = np.array([each.logprob for each in said])
            made["own"][row, where] = _tempered(token, top[..., 1], float(rows.temperature[row]))
        made["first"] = rows.prompt - 1
        keep_chunk(folder, chunk, made)

    return Keep(settings.top_k, keep)


def _tempered(
    token: Float[np.ndarray, " S"], top: Float[np.ndarray, "S k"], temperature: float
) -> Float[np.ndarray, " S"]:
    """Log probabilities at a temperature of tokens that have `token` at 1; at 1 for greedy rows."""
    scale = 1 / temperature if temperature > 0 else 1.0
    tail = np.log(np.maximum(1 - np.exp(top).sum(axis=-1, keepdims=True), np.exp(NEVER / 100)))
    cells = scale * np.concatenate([top, tail], axis=-1)
    return scale * token - np.logaddexp.reduce(cells, axis=-1)


def _blank(tokens: Int[np.ndarray, "N T"], top_k: int, vocab_size: int) -> dict[str, np.ndarray]:
    """A chunk of rows of which nothing is labelled: every position says token 0."""
    shape, small = (*tokens.shape, top_k), np.min_scalar_type(vocab_size - 1)
    log_p = np.full(shape, NEVER, np.float16)
    log_p[..., 0] = 0
    return {
        "tokens": tokens,
        "ids": np.zeros(shape, small),
        "log_p": log_p,
        "own": np.zeros(tokens.shape, np.float32),
        "first": np.zeros(len(tokens), np.int32),
    }


def corpus_pieces(settings: Labels) -> list[slice]:
    """The rows of each chunk of the corpus' labels."""
    rows, size = settings.corpus_rows, max(1, settings.tokens // settings.corpus_length)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def passes(
    length: Int[np.ndarray, " N"], longest: int, tokens: int
) -> Iterator[tuple[Int[np.ndarray, " n"], int, int]]:
    """Rows of like length, their number with what fills up, and the width of each forward pass.

    A pass has about `tokens` tokens; widths are multiples of `_WIDTH`, or `longest`, so that few
    programs are compiled.
    """
    order, at = np.argsort(-length, kind="stable"), 0
    while at < len(order):
        width = min(-(-int(length[order[at]]) // _WIDTH) * _WIDTH, longest)
        size = max(1, tokens // width)
        yield order[at : at + size], size, width
        at += size


def load_labels(folder: Path, count: int) -> tuple[Labelled, Float[np.ndarray, "N T"]]:
    """The `count` chunks that one of the above left in `folder`, every labelled position of
    weight 1.

    And the target's log probability of every token's successor at the row's temperature (at 1
    for greedy rows, as in `View.log_probs`); 0 for the last token.

    Raises:
      ValueError: it has not finished.
    """
    found = load_chunks("label", folder, count)
    weight = np.arange(found["tokens"].shape[1]) >= found["first"][:, None]
    labelled = Labelled(found["tokens"], found["ids"], found["log_p"], weight.astype(np.float32))
    return labelled, found["own"]


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
    log_p, ids = largest(logits, k)
    log_p = log_p - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    following = jnp.roll(jnp.asarray(rows), -1, axis=1)
    own = log_probs_of(logits, following, jnp.asarray(temperature))
    return ids, log_p, own.at[:, -1].set(0)
