"""Speculation is turned off where it gives less than plain decoding would, whatever is believed."""

import math
import statistics
from collections.abc import Sequence

_STEPS, _ROW_STEPS = 48, 128
"""Steps over which what speculation gave is compared, and steps of a row, at least. What is plain
after the first of these is not waited for longer."""
_BATCH = 8
"""Steps whose sum is one observation: those that follow each other are alike, as texts are easy or
hard for a while."""
_LEAST = 0.97
"""Share of plain decoding's predicted goodput below which it is turned off."""
_SHORTEST, _LONGEST = 64, 4096
"""Steps that it stays off, at first and at most."""
_RESET_AFTER = 8
"""Comparisons passed one after the other, after which it would be off for the shortest time."""


class Guard:
    """Compares what speculation gave with what plain decoding was predicted to give.

    Attributes:
      steps_left: for how many steps it is off.
      backoff_steps: for how many it would be off the next time; doubled each time.
      times: how often it was turned off.
    """

    def __init__(self) -> None:
        self.steps_left, self.backoff_steps, self.times = 0, _SHORTEST, 0
        self._passed = 0
        self._start()

    def _start(self) -> None:
        self._steps = self._row_steps = 0
        self._gains: list[float] = []

    @property
    def active(self) -> bool:
        """Whether speculation is off."""
        return self.steps_left > 0

    def observe_off(self) -> None:
        """Notes a step that drafted nothing."""
        self.steps_left = max(self.steps_left - 1, 0)

    def observe(self, rows: int, tokens: float, seconds: float, plain_goodput: float) -> None:
        """Notes a step that drafted.

        Args:
          rows: it had.
          tokens: it gave.
          seconds: it took.
          plain_goodput: tokens a second that plain decoding was predicted to give.
        """
        if self._steps % _BATCH == 0:
            self._gains.append(0.0)
        self._steps += 1
        self._row_steps += rows
        self._gains[-1] += tokens - _LEAST * plain_goodput * seconds
        if self._steps < _STEPS or self._steps % _BATCH:
            return
        whole = self._row_steps >= _ROW_STEPS
        if sum(self._gains) + (1 if whole else 2) * _error(self._gains) < 0:
            self.steps_left = self.backoff_steps
            self.backoff_steps = min(2 * self.backoff_steps, _LONGEST)
            self.times, self._passed = self.times + 1, 0
        elif not whole:
            return
        else:
            self._passed += 1
            if self._passed >= _RESET_AFTER:
                self.backoff_steps, self._passed = _SHORTEST, 0
        self._start()


def _error(values: Sequence[float]) -> float:
    """The standard error of a sum."""
    return statistics.stdev(values) * math.sqrt(len(values))
