"""Collective boost-tuning of a pool of drafts (SpecInfer, arXiv 2305.09781, section 3)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from specjax.model import Model
from train.collect import Collected
from train.config import Boost
from train.heldout import View, rank, view
from train.labels import Labelled, law_at
from train.marking import BY_NOTHING, RESIDUAL, RULES, Seen, normalized, residual


class Material(NamedTuple):
    """What a pool learns from: collected rows, their labels, and corpus labels.

    `own` is the target's log probability of the collected rows' tokens (`View.log_law`), from
    products in `labels.dtype`.
    """

    rows: Collected
    collected: Labelled
    corpus: Labelled
    own: Float[np.ndarray, "N S"]


def gather(
    rows: Collected, collected: Labelled, own: Float[np.ndarray, "N T"], corpus: Labelled
) -> Material:
    """The material of a pool; steps after a row's end weigh nothing."""
    along = np.take_along_axis(own, rows.columns - 1, axis=1)
    return weighted(Material(rows, collected, corpus, along), rows.alive.astype(np.float32))


def weighted(material: Material, weights: Float[np.ndarray, "N S"]) -> Material:
    """`material` with `weights` on the steps of the continuations; prompts keep weight 1."""
    rows = material.rows
    weight = np.zeros(material.collected.tokens.shape, np.float32)
    weight[np.arange(weight.shape[1]) < rows.prompt[:, None] - 1] = 1.0
    np.put_along_axis(weight, rows.columns - 1, weights.astype(np.float32), axis=1)
    return material._replace(collected=material.collected._replace(weight=weight))


def seen(material: Material, own: View) -> Seen:
    """What the rules ask of a draft that has the view `own` of the collected rows."""
    rows = material.rows
    place = rank(own.top, rows.following)
    ratio = np.exp(np.minimum(own.log_law - material.own, 0.0))
    accepted = np.where(rows.temperature[:, None] == 0, place == 0, ratio)
    return Seen(place, accepted, rows.alive)


def lesson(material: Material, earlier: Sequence[Model], settings: Boost) -> tuple[Material, float]:
    """What the next draft learns from, given the earlier ones, and the share that was marked."""
    if settings.rule == BY_NOTHING:
        return material, 0.0
    if settings.rule == RESIDUAL:
        taught, marked = _residual(material, earlier, settings.keep)
    else:
        known = [seen(material, view(draft, material.rows)) for draft in earlier]
        steps, marked = RULES[settings.rule](known, settings)
        taught = weighted(material, steps)
    return _quieter(taught, settings.elsewhere), marked


def _quieter(material: Material, elsewhere: float) -> Material:
    """`material` with the weight of prompts and corpus rows scaled by `elsewhere`."""
    collected, corpus, rows = material.collected, material.corpus, material.rows
    prompt = np.arange(collected.weight.shape[1]) < rows.prompt[:, None] - 1
    weight = np.where(prompt, elsewhere * collected.weight, collected.weight)
    return material._replace(
        collected=collected._replace(weight=weight.astype(np.float32)),
        corpus=corpus._replace(weight=(elsewhere * corpus.weight).astype(np.float32)),
    )


def _residual(material: Material, earlier: Sequence[Model], keep: float) -> tuple[Material, float]:
    """Labels mixed from the target's law (`keep`) and from what verification has left of it.

    Both at temperature 1, as all labels are, and along the continuations only. Marked is the
    probability that one of the earlier drafts' draws was accepted.
    """
    rows, part = material.rows, material.collected
    before = (rows.columns - 1)[..., None]

    def along(
        log_p: Float[Array, "N T k"] | Float[np.ndarray, "N T k"],
    ) -> Float[np.ndarray, "N S k1"]:
        return _with_rest(
            np.exp(np.take_along_axis(np.asarray(log_p), before, 1), dtype=np.float32)
        )

    p = along(part.log_p)
    left, reached = residual(p, [along(law_at(draft, part)) for draft in earlier])
    rest = (1 - keep) * reached
    total = keep + rest
    law = p + (rest / np.where(total > 0, total, 1))[..., None] * (left - p)
    log_p = np.array(part.log_p)
    taught = np.log(np.maximum(law[..., :-1], 1e-7)).astype(log_p.dtype)
    np.put_along_axis(log_p, before, taught, axis=1)
    material = material._replace(collected=part._replace(log_p=log_p))
    marked = float(1 - reached[rows.alive].mean())
    return weighted(material, normalized(total, rows.alive)), marked


def _with_rest(law: Float[np.ndarray, "*B k"]) -> Float[np.ndarray, "*B k1"]:
    """`law` with what is missing to 1 as a last entry."""
    return np.concatenate([law, np.maximum(1 - law.sum(axis=-1, keepdims=True), 0)], axis=-1)
