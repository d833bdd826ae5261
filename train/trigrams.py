"""The stage that makes a trigram model of what a target says, and what such a model is worth."""

import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from specjax.checkpoints.ngram_files import load_ngram, save_ngram
from specjax.draft.ngram import NO_TOKEN, NGram, successors
from specjax.models.transformer import Model
from train.collect import Collected
from train.config import Trigrams
from train.heldout import cover, view
from train.labels import Labelled
from train.loop import Log, Metrics
from train.ngram import Katz, Occurrences, joined, materialize, occurrences_after

STAGE = "trigrams"

_MADE = "model"
_CHOICES = (1, 2, 4)


def target_occurrences(rows: Collected, collected: Labelled, corpus: Labelled) -> Occurrences:
    """Its own text, and its most likely token after each one of that text, its prompts and corpus.

    The latter is what it would have written there, for one pass.
    """
    column = np.arange(rows.tokens.shape[1])
    has_next = column < (rows.prompt + rows.length)[:, None] - 1
    is_own = has_next & (column >= rows.prompt[:, None] - 1)
    return joined(
        [
            occurrences_after(rows.tokens, np.where(is_own, np.roll(rows.tokens, -1, axis=1), -1)),
            occurrences_after(rows.tokens, np.where(has_next, _likeliest(collected), -1)),
            occurrences_after(np.asarray(corpus.tokens), _likeliest(corpus)),
        ]
    )


def _likeliest(labelled: Labelled) -> Int[np.ndarray, "N T"]:
    return np.asarray(labelled.ids[..., 0]).astype(np.int32)


def is_made(folder: Path) -> bool:
    """Whether `make_trigrams` has finished in `folder`."""
    return (folder / _MADE).is_dir()


def make_trigrams(
    folder: Path, occurrences: Occurrences, size: int, settings: Trigrams, recipe: str, log: Log
) -> NGram:
    """The model of `occurrences` in texts of the recipe's target, of `size` tokens; in `folder`."""
    began = time.perf_counter()
    katz = Katz(occurrences, size)
    table = materialize(katz, settings.width, settings.contexts)
    part = folder / f"{_MADE}.part"
    shutil.rmtree(part, ignore_errors=True)
    origin = f"{len(occurrences.token)} tokens written by the target of the recipe {recipe}"
    save_ngram(table, part, trained_on=origin)
    part.rename(folder / _MADE)
    log.write(
        STAGE, where=folder.name, tokens=len(occurrences.token), pairs=len(katz.pairs.contexts),
        kept=table.num_contexts, probes=table.probes, seconds=time.perf_counter() - began,
    )  # fmt: skip
    return load_ngram(made_in(folder))


def made_in(folder: Path) -> Path:
    """The folder that `make_trigrams` left in `folder`.

    Raises:
      ValueError: it has not finished.
    """
    if not is_made(folder):
        raise ValueError(f"{folder / _MADE} is missing; run the stage {STAGE!r} first.")
    return folder / _MADE


def agreement(table: NGram, target: Model, rows: Collected) -> Metrics:
    """How often the target's token is among the table's k likeliest, along the target's text.

    `top` on greedy rows; `drawn_top` on the others; `likeliest_top` is for the target's most
    likely token on those others.
    """
    before, last = (_tokens_at(rows, rows.columns - back) for back in (2, 1))
    guesses = np.asarray(jax.jit(successors)(table, before, last)[1])
    likeliest = view(target, rows).top[..., 0]
    greedy = (rows.temperature == 0)[:, None] & rows.alive
    drawn = rows.alive & ~greedy
    figures = {
        "top": cover(rows.following, greedy, [guesses]),
        "drawn_top": cover(rows.following, drawn, [guesses]),
        "likeliest_top": cover(likeliest, drawn, [guesses]),
    }
    return {
        f"{name}{k}": shares[k - 1]
        for name, shares in figures.items()
        for k in _CHOICES
        if k <= table.width
    }


def _tokens_at(rows: Collected, columns: Int[np.ndarray, "N S"]) -> Int32[Array, "N S"]:
    found = np.take_along_axis(rows.tokens, np.maximum(columns, 0), axis=1)
    return jnp.asarray(np.where(columns >= 0, found, NO_TOKEN), jnp.int32)
