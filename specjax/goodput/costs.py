"""How long a step takes: measured at start, corrected by the steps that are run."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from specjax.goodput.policy import StepShape

_WINDOW, _FASTER = 32, 8
"""Steps of a program whose fastest counts, but for one of every eight: a step that lands behind a
pause of the host looks as if it had taken no time."""
_MOVING = 0.1
"""Weight of a new step in a moving average."""
_SURE = 3
"""Steps after which a program's own correction counts."""
_LEAST, _MOST = 0.25, 2.0
"""Times the moving average that a step counts as in it: what is longer was a pause of the machine,
what is shorter was done before anybody waited for it."""


_MOSTLY = 0.75
"""Share of the time in which a step ran from which on it may be a program's fastest."""
_PAUSED = 1.2
"""Times as long as expected that a step counts as in how slow all steps are."""


class Cost(NamedTuple):
    """Seconds of a step whose rows hold nothing, and seconds that each token they hold adds."""

    seconds: float
    per_token: float = 0.0

    def at(self, cached: int) -> float:
        """Seconds of a step whose rows hold `cached` tokens together."""
        return self.seconds + self.per_token * cached


class _Correction:
    """How many times as long as measured at start a program takes."""

    def __init__(self) -> None:
        self.steps, self.weight = 0, 0.0
        self.average = 1.0
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, ratio: float, share: float = 1.0) -> None:
        """Notes a step that counts as `share` of one."""
        self.steps += 1
        self.weight += share
        ratio = max(ratio, _LEAST * self.average)
        weight = share * max(_MOVING, 1 / self.weight)
        self.average += weight * (min(ratio, _MOST * self.average) - self.average)
        if share >= _MOSTLY:
            self._last.append(ratio)

    @property
    def factor(self) -> float:
        """Between the fastest of the last steps and their moving average.

        The average alone would make a program look slow that ran when the machine was busy; the
        fastest alone leaves out what is always there, such as sending the tokens.
        """
        if not self._last:
            return self.average
        fastest = sorted(self._last)[len(self._last) // _FASTER]
        return 0.5 * (fastest + self.average)


class StepCosts:
    """The seconds of steps, by their programs.

    A program that was not run yet is corrected as those of its setting are, or as all are: a table
    of another machine is wrong by a factor first of all.

    Args:
      measured: of the programs that there are.
    """

    def __init__(self, measured: Mapping[StepShape, Cost]) -> None:
        self.measured = dict(measured)
        self._own = {shape: _Correction() for shape in self.measured}
        self._of_setting: dict[str, _Correction] = {}
        self._of_all = _Correction()
        self._slower = _Correction()

    def join(self, measured: Mapping[StepShape, Cost]) -> None:
        """Takes the seconds of further programs, or of known ones that were measured since."""
        self.measured.update(measured)
        self._own.update({shape: _Correction() for shape in measured})
        for name in {shape.setting for shape in measured}:
            self._of_setting.pop(name, None)

    def seconds(self, shape: StepShape, cached: int) -> float:
        """How long a step takes whose rows hold `cached` tokens together, on average.

        Programs compare by the fastest of their steps and their average, as some ran when the
        machine was busy; all together are then as slow as steps were on average.
        """
        return self.measured[shape].at(cached) * self._factor(shape)

    def _factor(self, shape: StepShape) -> float:
        slower = self._slower.average
        own = self._own[shape]
        if own.weight >= _SURE:
            return own.factor * slower
        alike = self._of_setting.get(shape.setting)
        return (self._of_all if alike is None else alike).factor * slower

    def observe(self, shape: StepShape, cached: int, seconds: float, share: float = 1.0) -> None:
        """Notes how long a step took, by its `share` of the time in which more than it ran.

        It counts as so much of a step: the less of the time was its own, the less is known of it.
        """
        ratio = seconds / self.measured[shape].at(cached)
        slower = self._slower.average
        self._slower.observe(min(ratio / self._factor(shape), _PAUSED) * slower, share)
        alike = self._of_setting.setdefault(shape.setting, _Correction())
        for each in (self._own[shape], alike, self._of_all):
            each.observe(ratio, share)

    def steps(self, shape: StepShape) -> int:
        """How many steps of a program were noted."""
        return self._own[shape].steps

    def table(self) -> Iterator[tuple[StepShape, Cost, float, int]]:
        """Every program, its measured cost, its correction and its steps."""
        for shape, cost in self.measured.items():
            yield shape, cost, self._factor(shape), self.steps(shape)
