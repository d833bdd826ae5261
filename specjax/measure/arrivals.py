"""When the requests of an open-loop client are due, whatever becomes of those before them."""

from collections.abc import Callable, Mapping

import numpy as np

_STEPS = (0.4, 1.0, 1.6, 1.0)
_BURSTS, _BURST, _CALM = 6, 2.6, 0.6
_GRID = 4096


def _steps(x: np.ndarray) -> np.ndarray:
    return np.asarray(_STEPS)[(x * len(_STEPS)).astype(int)]


def _bursts(x: np.ndarray) -> np.ndarray:
    """Each period is calm for four fifths and busy for the last one."""
    return np.where(x * _BURSTS % 1 >= 0.8, _BURST, _CALM)


SHAPES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "poisson": np.ones_like,
    "steps": _steps,
    "ramp": lambda x: 0.2 + 1.6 * x,
    "bursts": _bursts,
}
"""The rate at each moment of a run, from 0 to 1, as a share of the mean rate."""


def check_shape(name: str) -> None:
    """Checks the name of a load's shape.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}.")


def expected(shape: str, x: np.ndarray) -> np.ndarray:
    """The share of a run's requests that is expected by each moment from 0 on.

    A run that takes longer than expected begins its shape again.
    """
    middles = (np.arange(_GRID) + 0.5) / _GRID
    shares = np.cumsum(SHAPES[shape](middles))
    whole = np.floor(x)
    return whole + np.interp(x - whole, np.arange(_GRID + 1) / _GRID, [0, *(shares / shares[-1])])


def arrivals(shape: str, count: int, drawn: np.random.Generator) -> np.ndarray:
    """Times of `count` requests of a Poisson process, ascending, at a mean rate of one a second.

    At another rate they are divided by it. An inhomogeneous process is a homogeneous one whose
    time runs as its expected count (time rescaling).

    Args:
      shape: a name of `SHAPES`; the run's expected length is that of `count` requests.
      count: how many.
      drawn: where the times come from.
    """
    counts = np.cumsum(drawn.exponential(size=count)) / count
    grid = np.arange(_GRID + 1) / _GRID
    whole = np.floor(counts)
    return count * (whole + np.interp(counts - whole, expected(shape, grid), grid))
