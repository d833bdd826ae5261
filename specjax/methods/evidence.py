"""Whether measurements say that a setting is faster than the shipped default.

A setting replaces the default only by runs of `specjax bench` in which the default ran beside it.
In a round (a batch of prompts) either is so many times as fast as plain decoding beside it; the
logarithm of the one over the other is the round's gain. A run's gain is the mean over its rounds.
Its variance is s²/(n - 2) of n rounds that differ by s (not s²/n: of few rounds s itself is hardly
known), and added to it the variance between runs, by which the same run differs when it is done
again. Gains of several runs are averaged by these variances; where runs differ by more than these
allow, the variance grows as much (Birge's ratio), and it is never below that of the best run's own
rounds, for the same prompts again say nothing of others.

The gain must be above three standard deviations: a tie within the noise keeps the default, and so
do runs that contradict each other. A run of few or of restless rounds says little, and so it
changes little, whatever was measured before it or is measured after it.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from specjax.methods.method import Setting
from specjax.methods.records import Run

LEAST_ROUNDS = 3
_DEVIATIONS = 3.0
# Five runs of chain, specexec and plain decoding, 8 bundled prompts x 48 tokens, bundled pair,
# float32, 2 cores of an Intel Xeon with other work beside, jax 0.10.2, 2026-11-23: a run's gain
# differed by 0.016 and 0.024 at T = 0, by 0.009 and 0.031 at 0.8 (standard deviations).
_BETWEEN_RUNS = 0.03


class Gain(NamedTuple):
    """A logarithm of times as fast, its standard deviation, and the runs that say so."""

    setting: Setting
    mean: float
    deviation: float
    runs: tuple[Run, ...]

    @property
    def noise(self) -> float:
        """What the mean must exceed, as a logarithm."""
        return _DEVIATIONS * self.deviation

    @property
    def last(self) -> Run:
        """The newest run."""
        return max(self.runs, key=lambda run: run.date)


def evidence(runs: Sequence[Run], default: Setting) -> list[Run]:
    """The runs that may speak against the default: it ran, for enough rounds, and others too."""
    return [
        run
        for run in runs
        if any(_gain(run, each.setting, default) for each in run.measured
               if each.setting != default)
    ]  # fmt: skip


def gains(runs: Sequence[Run], default: Setting) -> list[Gain]:
    """The gain over the default of every setting that ran beside it, plain decoding included."""
    settings = dict.fromkeys(each.setting for run in runs for each in run.measured)
    found = []
    for setting in settings:
        compared = [(run, gain) for run in runs if (gain := _gain(run, setting, default))]
        if compared and setting != default:
            found.append(
                Gain(
                    setting,
                    *_pooled([gain for _, gain in compared]),
                    tuple(run for run, _ in compared),
                )
            )
    return found


def fastest(found: Sequence[Gain]) -> Gain | None:
    """The setting that replaces the default, if one does.

    Of several that are faster by more than the noise the one that surely gains most, and if plain
    decoding is among them none that was slower than it.
    """
    sure = [gain for gain in found if gain.mean > gain.noise]
    plain = max((gain.mean for gain in sure if gain.setting == Setting()), default=-math.inf)
    able = [gain for gain in sure if gain.mean >= plain]
    return max(able, key=lambda gain: gain.mean - gain.noise, default=None)


def _gain(run: Run, setting: Setting, default: Setting) -> tuple[float, float] | None:
    """The mean of a run's gain and the variance by its rounds, or None if it has none."""
    one, beside = run.of(setting), run.of(default)
    if one is None or beside is None or len(one.ratios) != len(beside.ratios):
        return None
    gains = [math.log(a) - math.log(b) for a, b in zip(one.ratios, beside.ratios, strict=True)]
    if len(gains) < LEAST_ROUNDS:
        return None
    return statistics.fmean(gains), statistics.variance(gains) / (len(gains) - 2)


def _pooled(compared: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean and the standard deviation of several runs."""
    weights = [1 / (own + _BETWEEN_RUNS**2) for _, own in compared]
    mean = sum(w * m for w, (m, _) in zip(weights, compared, strict=True)) / sum(weights)
    apart = sum(w * (m - mean) ** 2 for w, (m, _) in zip(weights, compared, strict=True))
    birge = apart / (len(compared) - 1) if len(compared) > 1 else 1.0
    variance = max(max(1.0, birge) / sum(weights), min(own for _, own in compared))
    return mean, math.sqrt(variance)
