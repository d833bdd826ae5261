"""Collective boost-tuning of a pool of drafts (SpecInfer, arXiv 2305.09781, section 3)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from specjax.models.transformer import Model
from train.collect import Collected
from train.config import Boost
from train.heldout import View, probs_at, rank, view
from train.labels import Labelled
from train.marking import BY_NOTHING, RESIDUAL, RULES, Seen, normalized, residual


class BoostData(NamedTuple):
    """What a pool learns from: collected rows, their labels, and corpus labels.

    `own` is the target's log probability of the collected rows' tokens (`View.log_probs`), from
    products in `labels.dtype`; `target` itself is there for drafts that read its hidden states.
    """

    rows: Collected
    collected: Labelled
    corpus: Labelled
    own: Float[np.ndarray, "N S"]
    target: Model | None = None


def gather(
    rows: Collected,
    collected: Labelled,
    own: Float[np.ndarray, "N T"],
    corpus: Labelled,
    target: Model | None = None,
) -> BoostData:
    """The data of a pool; steps after a row's end weigh nothing."""
    along = np.take_along_axis(own, rows.columns - 1, axis=1)
    data = BoostData(rows, collected, corpus, along, target)
    return weighted(data, rows.alive.astype(np.float32))


def weighted(data: BoostData, weights: Float[np.ndarray, "N S"]) -> BoostData:
    """`data` with `weights` on the steps of the continuations; prompts keep weight 1, where they
    are labelled.
    """
    rows = data.rows
    weight = np.zeros(data.collected.tokens.shape, np.float32)
    prompts = np.arange(weight.shape[1]) < rows.prompt[:, None] - 1
    weight[prompts] = data.collected.weight[prompts] > 0
    np.put_along_axis(weight, rows.columns - 1, weights.astype(np.float32), axis=1)
    return data._replace(collected=data.collected._replace(weight=weight))


def seen(data: BoostData, own: View) -> Seen:
    """What the rules ask of a draft that has the view `own` of the collected rows."""
    rows = data.rows
    place = rank(own.top, rows.following)
    ratio = np.exp(np.minimum(own.log_probs - data.own, 0.0))
    accepted = np.where(rows.temperature[:, None] == 0, place == 0, ratio)
    return Seen(place, accepted, rows.alive)


def boost_filter(
    data: BoostData, earlier: Sequence[Model], settings: Boost
) -> tuple[BoostData, float]:
    """Boost-tuning's filter: what the next draft learns from, given the earlier ones.

    SpecInfer (arXiv 2305.09781, section 3) marks the samples that an earlier draft already gives
    (`train.marking.by_samples`) and leaves them out (`keep` 0); other rules weigh steps. Beside it
    the share that was marked.
    """
    if settings.rule == BY_NOTHING:
        return data, 0.0
    if settings.rule == RESIDUAL:
        taught, marked = _residual(data, earlier, settings.keep)
    else:
        known = [seen(data, view(draft, data.rows, data.target)) for draft in earlier]
        steps, marked = RULES[settings.rule](known, settings)
        taught = weighted(data, steps)
    return _quieter(taught, settings.elsewhere), marked


def _quieter(data: BoostData, elsewhere: float) -> BoostData:
    """`data` with the weight of prompts and corpus rows scaled by `elsewhere`."""
    collected, corpus, rows = data.collected, data.corpus, data.rows
    prompt = np.arange(collected.weight.shape[1]) < rows.prompt[:, None] - 1
    weight = np.where(prompt, elsewhere * collected.weight, collected.weight)
    return data._replace(
        collected=collected._replace(weight=weight.astype(np.float32)),
        corpus=corpus._replace(weight=(elsewhere * corpus.weight).astype(np.float32)),
    )


def _residual(data: BoostData, earlier: Sequence[Model], keep: float) -> tuple[BoostData, float]:
    """Labels mixed from the target's distribution (`keep`) and from what verification has left of
    it.

    Both at temperature 1, as all labels are, and along the continuations only. Marked is the
    probability that one of the earlier drafts' draws was accepted.
    """
    rows, part = data.rows, data.collected
    before = (rows.columns - 1)[..., None]

    def along(
        log_p: Float[Array, "N T k"] | Float[np.ndarray, "N T k"],
    ) -> Float[np.ndarray, "N S k1"]:
        return _with_rest(
            np.exp(np.take_along_axis(np.asarray(log_p), before, 1), dtype=np.float32)
        )

    p = along(part.log_p)
    left, reached = residual(p, [along(probs_at(draft, part, data.target)) for draft in earlier])
    rest = (1 - keep) * reached
    total = keep + rest
    probs = p + (rest / np.where(total > 0, total, 1))[..., None] * (left - p)
    log_p = np.array(part.log_p)
    taught = np.log(np.maximum(probs[..., :-1], 1e-7)).astype(log_p.dtype)
    np.put_along_axis(log_p, before, taught, axis=1)
    data = data._replace(collected=part._replace(log_p=log_p))
    marked = float(1 - reached[rows.alive].mean())
    return weighted(data, normalized(total, rows.alive)), marked


def _with_rest(probs: Float[np.ndarray, "*B k"]) -> Float[np.ndarray, "*B k1"]:
    """`probs` with what is missing to 1 as a last entry."""
    return np.concatenate([probs, np.maximum(1 - probs.sum(axis=-1, keepdims=True), 0)], axis=-1)
