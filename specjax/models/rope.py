"""Rotary frequencies, and how they are stretched to contexts longer than a model was trained on."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

KINDS = ("linear", "llama3", "yarn", "longrope")


def check_kind(kind: str) -> None:
    """Checks that frequencies can be stretched so.

    Raises:
      ValueError: they cannot.
    """
    if kind not in KINDS:
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}.")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """How rotary frequencies are stretched from `original` positions to more.

    "linear" divides them all by `factor` (arXiv 2306.15595). "llama3" divides those that turn no
    more than `low` times within `original` positions and leaves those that turn `high` times or
    more, with a line between. "yarn" (arXiv 2309.00071, section 3.2) does so by a line over the
    number of a frequency, from the one that turns `high` times to the one that turns `low` times,
    both taken to integers if `whole`. "longrope" (arXiv 2402.13753) divides each by its own of
    `factors`. `magnitude` multiplies cosines and sines.
    """

    kind: str
    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0
    magnitude: float = 1.0
    whole: bool = True
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"rope scaling has factor {self.factor}; it must be finite and at least 1."
            )
        for each in (self.magnitude, *self.factors):
            if not 0 < each < math.inf:
                raise ValueError(
                    f"rope scaling has {each} among its factors; all must be finite and above 0."
                )
        if self.original < 1 or not 0 < self.low < self.high:
            raise ValueError(
                f"rope scaling goes from {self.low} to {self.high} turns within {self.original} "
                "positions; all must be above 0, and in order."
            )


def frequencies(
    features: int, theta: float, stretch: Stretch | None = None
) -> Float[np.ndarray, " half"]:
    """Radians a position of each pair of `features`, float32 rounded from float64.

    Raises:
      ValueError: there is not one of the stretch's `factors` for each pair.
    """
    plain = theta ** -(np.arange(0, features, 2, dtype=np.float64) / max(features, 1))
    if stretch is None:
        return plain.astype(np.float32)
    if stretch.kind == "longrope":
        if len(stretch.factors) != plain.size:
            raise ValueError(
                f"rope scaling has {len(stretch.factors)} factors for {plain.size} frequencies."
            )
        return (plain / np.asarray(stretch.factors)).astype(np.float32)
    if stretch.kind == "linear":
        kept = np.zeros_like(plain)
    elif stretch.kind == "llama3":
        turns = stretch.original * plain / (2 * math.pi)
        kept = np.clip((turns - stretch.low) / (stretch.high - stretch.low), 0, 1)
    else:
        kept = 1 - _ramp(features, theta, stretch)
    return (kept * plain + (1 - kept) * plain / stretch.factor).astype(np.float32)


def _ramp(features: int, theta: float, stretch: Stretch) -> np.ndarray:
    """0 up to the frequency that turns `high` times, 1 from the one that turns `low` times on."""

    def number(turns: float) -> float:
        of_a_turn = stretch.original / (turns * 2 * math.pi)
        return features * math.log(of_a_turn) / (2 * math.log(theta))

    first, last = number(stretch.high), number(stretch.low)
    if stretch.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    width = last - first if last != first else 0.001
    return np.clip((np.arange(features // 2) - first) / width, 0, 1)
