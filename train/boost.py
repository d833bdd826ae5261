"""Collective boost-tuning of a pool of drafts (SpecInfer, arXiv 2305.09781, section 3)."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from specjax.model import Model
from train.chunks import write_text
from train.collect import Collected
from train.config import Recipe
from train.distil import batches, distil
from train.heldout import HeldOut, View, estimates, following, view
from train.labels import Labelled
from train.loop import Log, Metrics

TOO_FEW, TOO_MANY = 0.05, 0.95
"""Outside these marked shares the next draft learns from nearly all samples, or from too few."""


class Material(NamedTuple):
    """What a pool learns from: collected rows, their labels, corpus labels; and held-out rows."""

    rows: Collected
    collected: Labelled
    corpus: Labelled
    heldout: HeldOut

    def weighted(self, weights: Float[np.ndarray, "N S"]) -> "Material":
        """The same with `weights` on the steps of the continuations; prompts keep weight 1."""
        weight = np.ones(self.collected.tokens.shape, np.float32)
        weight[:, self.rows.prompt_tokens - 1 : -1] = weights
        return self._replace(collected=self.collected._replace(weight=weight))


def mark(match: Bool[np.ndarray, "N S"], window: int) -> Bool[np.ndarray, "N W"]:
    """The samples on which a draft gives the target's next `window` tokens, `W = S - window + 1`.

    `match[n, s]` says that the draft's most likely token at step s of row n, all earlier ones
    being the target's, is the target's. That is what the draft itself would have produced from
    step s on as long as it keeps matching, so a sample is marked exactly where all match.
    """
    windows = np.lib.stride_tricks.sliding_window_view(match, window, axis=1)
    return np.all(windows, axis=-1)


def step_weights(
    marked: Bool[np.ndarray, "N W"], window: int, keep: float
) -> Float[np.ndarray, "N S"]:
    """How much each step counts: the share of the samples containing it that are unmarked.

    A marked sample counts as `keep` of one. The mean is 1; with nothing left, all are 1.
    """
    ones, value = np.ones(window), np.where(marked, keep, 1.0)
    spread = np.stack([np.convolve(row, ones) for row in value])
    share = spread / np.convolve(np.ones(marked.shape[1]), ones)
    mean = share.mean()
    return (share / mean if mean > 0 else np.ones_like(share)).astype(np.float32)


def verdict(share: float) -> str:
    """What a marked share means for the next draft, as a sentence."""
    if TOO_FEW <= share <= TOO_MANY:
        return "the next draft learns from the other samples."
    few = "under" if share < TOO_FEW else "over"
    limit = TOO_FEW if share < TOO_FEW else TOO_MANY
    return f"no boost: {few} {100 * limit:.0f} % of the samples are marked."


def boost(recipe: Recipe, folder: Path, warm: Model, material: Material, log: Log) -> list[Model]:
    """The pool: each draft distilled from `warm` on the samples that no earlier draft masters.

    Marked shares, after each draft but the last, go to `folder/boost.json` and to the log.
    """
    settings, pool, views, shares = recipe.boost, list[Model](), list[View](), list[float]()
    marked = np.zeros((0,), bool)
    for number in range(settings.drafts):
        if number:
            found = mark(matches(pool[-1], material.rows), settings.window)
            marked = found | marked if marked.size else found
            shares.append(float(marked.mean()))
            log.write("boost", draft=number, marked=shares[-1], verdict=verdict(shares[-1]))
            weights = step_weights(marked, settings.window, settings.keep)
            material = material.weighted(weights)
        pool.append(_member(number, recipe, folder, warm, material, views, log))
        views.append(view(pool[-1], material.heldout.rows))
    write_text(folder / "boost.json", json.dumps({"marked": shares}) + "\n")
    return pool


def _member(
    number: int,
    recipe: Recipe,
    folder: Path,
    warm: Model,
    material: Material,
    earlier: list[View],
    log: Log,
) -> Model:
    """Draft `number` of the pool, resumed from its own folder."""
    seed, heldout = recipe.schedule.seed + 10 * number, material.heldout
    schedule = dataclasses.replace(recipe.schedule, seed=seed)
    parts = [(material.collected, schedule.batch), (material.corpus, recipe.distil.corpus_rows)]

    def measure(model: Model) -> Metrics:
        return estimates(heldout, view(model, heldout.rows), earlier, recipe.evaluation.depth)

    stage, own, at = f"draft {number}", folder / "drafts" / str(number), batches(parts, seed)
    return distil(stage, own, warm, at, schedule, recipe.distil, measure, log)


def matches(draft: Model, collected: Collected) -> Bool[np.ndarray, "N S"]:
    """Where the draft's most likely next token is the target's, on every continuation step."""
    return following(collected) == view(draft, collected).top[..., 0]
