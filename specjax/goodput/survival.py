"""How many drafted tokens are accepted: survival by depth, of all requests and of each."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_PRIOR = 12.0
"""Trials that a curve's beginning counts as."""
_KEPT = 400.0
"""Trials at depth 1 from which on earlier ones count half."""
_LATELY = 96.0
"""Trials at depth 1 after which the last ones are compared with all."""
_ALIKE = 3.0
"""Trials that count as one in that: those of a text follow each other."""
_SURPRISE = 3.5
"""Standard errors between them from which on drafts are held to have changed."""
_EFFECT = {True: ((1.5, 0.6), (6.0, 0.97)), False: ((8.0, 0.87), (20.0, 0.98))}
"""Of greedy requests and of others: for the passing and for the lasting part of an effect, the
information that it is pulled to 0 with, and what earlier steps count, a step later. A greedy text
is easy or hard for some steps: accepted tokens of the bundled pair's chains correlate by 0.49 one
step apart, by 0.18 eight apart. At temperature 0.8 it is 0.06 and 0.01. These predict the next
steps of 64 texts well (HumanEval and Spec-Bench, 2026-11-24)."""
_STEPS_A_UNIT = 5
"""Effects are rounded to a fifth of a logit, so that few curves are computed."""
_EDGE = 0.005


def logit(chance: float) -> float:
    """The logarithm of the odds, of a chance that is not quite 0 or 1."""
    chance = _within(chance, _EDGE, 1 - _EDGE)
    return math.log(chance / (1 - chance))


def logistic(x: float) -> float:
    """The chance of such a logit."""
    return 1 / (1 + math.exp(700.0 if x < -700.0 else -x))


class Expected(NamedTuple):
    """How often drafts survive to each depth, from 1, and the sums of that up to each, from 0."""

    survival: tuple[float, ...]
    tokens: tuple[float, ...]


def _gained(hazard: float, effect: float) -> float:
    """How much more often a request of an effect is accepted than one of none."""
    return logistic(logit(hazard) + effect) - hazard


class Curve:
    """How likely a token at each depth is accepted if those before it were.

    Trials at a depth are steps that had a token there below an accepted one; a step whose tokens
    were all accepted says nothing of what would have come next (it is censored). This is the
    product-limit estimate (Kaplan and Meier 1958); a single rate for all depths is biased low and
    settles too shallow.

    Args:
      hazards: the chance of acceptance at each depth, from 1, before anything is known.
    """

    def __init__(self, hazards: Sequence[float]) -> None:
        self._before = list(hazards)
        self._hits = [0.0] * len(hazards)
        self._trials = [0.0] * len(hazards)
        self._last_hits = self._last_trials = 0.0
        self.steps = self.changes = 0
        self._made: dict[int, Expected] = {}
        self._chances: list[float] = []
        self._fresh = 0

    @property
    def depth(self) -> int:
        """Depths there are."""
        return len(self._before)

    @property
    def trials(self) -> float:
        """How much is known of depth 1."""
        return self._trials[0]

    def hazards(self) -> list[float]:
        """The chances by depth; where little is known, as much better or worse than before as the
        depth above.
        """
        if self._chances:
            return self._chances
        found, shift = [], 0.0
        for before, hits, trials in zip(self._before, self._hits, self._trials, strict=True):
            start = logistic(logit(before) + shift)
            chance = min(max((hits + _PRIOR * start) / (trials + _PRIOR), _EDGE), 1 - _EDGE)
            shift = logit(chance) - logit(before)
            found.append(chance)
        self._chances = found
        return found

    def expected(self, effect: float) -> Expected:
        """Survival of a request that is `effect` logits better than the curve."""
        rounded = round(effect * _STEPS_A_UNIT)
        if rounded not in self._made:
            survival, alive = [], 1.0
            for chance in self.hazards():
                alive *= logistic(logit(chance) + rounded / _STEPS_A_UNIT)
                survival.append(alive)
            self._made[rounded] = Expected(tuple(survival), tuple(_sums(survival)))
        return self._made[rounded]

    def observe(self, accepted: int, drafted: int, effect: float = 0.0) -> None:
        """Notes a step that accepted so many levels of the `drafted` that its tree had.

        What a request of another effect gives is taken for what one of none would have: those that
        a setting is chosen for are better, or worse, than others.
        """
        self.steps += 1
        hazards = self.hazards()
        for depth in range(min(accepted + 1, drafted, self.depth)):
            self._add(depth, float(depth < accepted) - _gained(hazards[depth], effect), 1.0)
        self._noted()

    def observe_chances(self, chances: Sequence[float]) -> None:
        """Notes how likely each of the tokens that follow each other was to be accepted."""
        alive = 1.0
        for depth, chance in enumerate(chances[: self.depth]):
            self._add(depth, alive * chance, alive)
            alive *= chance
        self._noted()

    def _add(self, depth: int, hits: float, trials: float) -> None:
        self._hits[depth] += hits
        self._trials[depth] += trials
        if depth == 0:
            self._last_hits += hits
            self._last_trials += trials

    def _look_for_a_change(self) -> None:
        """Forgets most of what was, where the last trials are quite other ones."""
        hits, trials = self._last_hits, self._last_trials
        self._last_hits, self._last_trials = hits / 2, trials / 2
        before = self._trials[0] - trials
        if before < trials:
            return
        was = min(max((self._hits[0] - hits) / before, _EDGE), 1 - _EDGE)
        error = math.sqrt(was * (1 - was) * _ALIKE * (1 / trials + 1 / before))
        if abs(hits / trials - was) < _SURPRISE * error:
            return
        kept = trials / self._trials[0]
        self._hits = [hits, *(kept * each for each in self._hits[1:])]
        self._trials = [trials, *(kept * each for each in self._trials[1:])]
        self.changes += 1

    def _noted(self) -> None:
        if self._last_trials >= _LATELY:
            self._look_for_a_change()
        if self._trials[0] >= _KEPT:
            self._hits = [each / 2 for each in self._hits]
            self._trials = [each / 2 for each in self._trials]
        self._fresh += 1
        if self._fresh * 16 >= min(self._trials[0], 128):  # the more is known, the less it changes
            self._made, self._chances, self._fresh = {}, [], 0


class Rate:
    """A single chance of acceptance, whatever the depth: accepted over drafted, moving.

    As published servers have it; biased low, as what comes behind a rejection counts as rejected.
    It is kept to measure what a `Curve` is worth.

    Args:
      hazards: the chance of acceptance at each depth before anything is known.
    """

    def __init__(self, hazards: Sequence[float]) -> None:
        self.depth, self.trials, self.steps = len(hazards), 0.0, 0
        self._rate = hazards[0]

    def hazards(self) -> list[float]:
        """The same at each depth."""
        return [self._rate] * self.depth

    def expected(self, effect: float) -> Expected:
        """Survival is geometric."""
        chance = logistic(logit(self._rate) + effect)
        survival = [chance**depth for depth in range(1, self.depth + 1)]
        return Expected(tuple(survival), tuple(_sums(survival)))

    def observe(self, accepted: int, drafted: int, effect: float = 0.0) -> None:
        """Notes a step that accepted so many of `drafted`."""
        del effect
        self.steps += 1
        if drafted:
            self.trials += 1
            self._rate += _RATE * (min(accepted / drafted, 1.0) - self._rate)

    def observe_chances(self, chances: Sequence[float]) -> None:
        """Notes how likely tokens were to be accepted."""
        self.trials += 1
        self._rate += _RATE * (chances[0] - self._rate)


_RATE = 0.05


class RequestEffect:
    """A random effect: how many logits better than the curves a request's drafts are accepted.

    The sum of a part that lasts and of one that passes. One step of Newton's method on the logistic
    likelihood a step, for each with a normal prior.

    Args:
      greedy: whether the request takes the likeliest token always.
    """

    def __init__(self, greedy: bool = True) -> None:
        self.logits = 0.0
        self._priors = _EFFECT[greedy]
        self._parts = [(0.0, 0.0)] * len(self._priors)

    def observe(self, hazards: Sequence[float], accepted: int, drafted: int) -> None:
        """Notes a step against the curve that was expected of all requests."""
        slope = information = 0.0
        for depth in range(min(accepted + 1, drafted, len(hazards))):
            chance = logistic(logit(hazards[depth]) + self.logits)
            slope += float(depth < accepted) - chance
            information += chance * (1 - chance)
        self._note(slope, information)

    def observe_chance(self, hazard: float, chance: float) -> None:
        """Notes how likely a token was to be accepted."""
        expected = logistic(logit(hazard) + self.logits)
        self._note(chance - expected, expected * (1 - expected))

    def _note(self, slope: float, information: float) -> None:
        # The slope is that of this step alone: what earlier ones said is in where the effect is.
        parts = []
        for (logits, known), (prior, memory) in zip(self._parts, self._priors, strict=True):
            known = memory * known + information
            pulled = slope - prior * logits * (1 - memory)
            parts.append((_within(logits + pulled / (known + prior), -4.0, 4.0), known))
        self._parts = parts
        self.logits = _within(sum(logits for logits, _ in parts), -4.0, 4.0)


def _sums(values: Sequence[float]) -> list[float]:
    found = [0.0]
    for value in values:
        found.append(found[-1] + value)
    return found


def _within(value: float, least: float, most: float) -> float:
    # Twice as fast as `min` and `max`, which a step asks dozens of times.
    return least if value < least else most if value > most else value


class Calibration:
    """How likely a chosen node is accepted below an accepted parent, by its drafter's probability.

    A logistic function of the probability's logit, refitted as it goes by steps of Newton's method
    on what was seen lately; it begins as the probability itself.
    """

    def __init__(self) -> None:
        self.intercept, self.slope = 0.0, 1.0
        self._seen: list[tuple[float, float]] = []
        self._fits = 0

    @property
    def fits(self) -> int:
        """How often it was fitted."""
        return self._fits

    def observe(self, chances: Sequence[tuple[float, bool]]) -> bool:
        """Notes nodes, with their probabilities and whether they were accepted; whether that led
        to another fit.
        """
        known = ((chance, hit) for chance, hit in chances if not math.isnan(chance))
        self._seen.extend((logit(chance), float(hit)) for chance, hit in known)
        if len(self._seen) < _FITTED * (1 + (self._fits > 0)):
            return False
        self._fit()
        self._seen = self._seen[-_FITTED:]
        return True

    def _fit(self) -> None:
        self._fits += 1
        intercept, slope = self.intercept, self.slope
        for _ in range(_NEWTON):
            g0, g1 = -intercept * _RIDGE, (1 - slope) * _RIDGE
            h00, h01, h11 = _RIDGE, 0.0, _RIDGE
            for x, hit in self._seen:
                chance = logistic(intercept + slope * x)
                error, weight = hit - chance, chance * (1 - chance)
                g0, g1 = g0 + error, g1 + error * x
                h00, h01, h11 = h00 + weight, h01 + weight * x, h11 + weight * x * x
            scale = h00 * h11 - h01 * h01
            # Where nearly all chances are 0 or 1, a whole step would lead far past the best fit.
            intercept += _within((h11 * g0 - h01 * g1) / scale, -_STEP, _STEP)
            slope += _within((h00 * g1 - h01 * g0) / scale, -_STEP, _STEP)
            intercept, slope = _within(intercept, -6.0, 6.0), _within(slope, 0.05, 5.0)
        self.intercept, self.slope = intercept, slope


_FITTED = 400
"""Nodes that a fit is made of, at first; later it is twice as many, half of them new."""
_NEWTON = 3
_STEP = 1.0
"""The most that a step of Newton's method changes either."""
_RIDGE = 4.0
"""Information that the fit is pulled to the probability itself with."""
