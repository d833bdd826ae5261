"""How many steps a device runs before the host reads what they gave. No jax, no clock."""

import math

BURST = 16
"""The most steps of a burst."""

_SECONDS = 0.02
"""How long a burst may take: what comes meanwhile waits for it, and its tokens come at once."""
_READING = 0.75
"""Share of that in which chunks of prompts and a step are to be done, as some take longer."""


def reading_seconds(step_seconds: float) -> float:
    """How long chunks of prompts may take between two steps: with one, no longer than a burst."""
    return _READING * min(BURST * step_seconds, _SECONDS) - step_seconds


def steps_of(step_seconds: float, steps_left: float, most: int = BURST) -> int:
    """Steps of a burst in which no prompt waits: as many as there is time for.

    A row that ends inside a burst is of no use in what is left of it.

    Args:
      step_seconds: how long a step takes.
      steps_left: after which the first of its rows is expected to end.
      most: how many there may be.
    """
    in_time = _SECONDS / step_seconds if step_seconds > 0 else math.inf
    return max(1, int(min(in_time, math.ceil(steps_left), most, BURST)))
