"""Chunks of prompts beside steps: which sizes are allowed, and what they take of a token's time."""

from collections.abc import Mapping
from typing import NamedTuple

from specjax.goodput.bursts import reading_seconds

ChunkCosts = Mapping[int, tuple[float, float]]
"""By the tokens of a chunk, its seconds in an empty row, and those that each token adds which the
row holds."""


class PrefillBatch(NamedTuple):
    """A pass over prompts of several rows: so many `tokens` of each at most, and of all together
    as many as it has `columns`.
    """

    rows: int
    tokens: int
    columns: int

    @property
    def packed_columns(self) -> int | None:
        """Its columns if they are packed, as those of several rows are; else None."""
        return None if self.rows == 1 else self.columns


_STEPS = 1.4
"""How many steps' time a chunk of a prompt may always take while other rows decode. At 1, where a
pass is bound by its weights, prompts would be read in the smallest chunks, as any larger one takes
a little longer than a step."""

_CLEARLY, _NEARLY = 0.9, 0.75
"""Times what a token takes in chunks for which steps must read one, and times their speed."""

_MEMORY = 512
"""Steps over which prompts are held against tokens."""
_NEW = 0.05
"""Weight of a chunk in how many tokens are left of a prompt on average."""
_BEFORE = 256.0
"""Tokens without any prompt that are believed in at first."""


def longest(step_seconds: float, in_time: bool = False) -> float:
    """How long a pass over prompts may take while other rows decode.

    1.4 steps, or as long as chunks between two steps may together, which is more where steps are
    short; not where a row wants its tokens `in_time`.
    """
    always = _STEPS * step_seconds
    return always if in_time else max(always, reading_seconds(step_seconds))


def allowed(costs: ChunkCosts, filled: int, most: float) -> dict[int, float]:
    """The sizes of chunks that take `most` seconds at most, or the smallest, and their seconds.

    Args:
      costs: of chunks.
      filled: tokens that the row holds.
      most: how long a pass over prompts may take.
    """
    seconds = {size: own + filled * more for size, (own, more) in costs.items()}
    least = min(seconds)
    return {size: own for size, own in seconds.items() if own <= most or size == least}


def mixing_pays(mixed: tuple[int, float], chunk: tuple[int, float], step_seconds: float) -> bool:
    """Whether steps should read prompts in their own passes, not in chunks between them.

    It must take clearly less time for each token, no longer than a chunk may, and prompts must be
    read nearly as fast: until its prompt is read a row gives nothing.

    Args:
      mixed: tokens of prompts that a step reads, and seconds that they add to it.
      chunk: tokens of a chunk that is allowed beside such steps, and its seconds.
      step_seconds: how long a step takes that reads none.
    """
    (tokens, more), (size, seconds) = mixed, chunk
    chunks = max(1, int(reading_seconds(step_seconds) / seconds))
    fast = tokens / (step_seconds + more)
    cheap = more / tokens < _CLEARLY * seconds / size and more <= _STEPS * step_seconds
    return cheap and (fast > _NEARLY * chunks * size / (step_seconds + chunks * seconds))


def fastest(tokens: int, seconds: Mapping[int, float]) -> tuple[float, int]:
    """The seconds of the chunks that read so many tokens soonest, and the size of the first.

    Chunks of a size are followed by smaller ones; the last may be larger than what is left.

    Args:
      tokens: how many are left, at least one.
      seconds: how long a chunk takes, by its size.
    """
    return _fastest(tokens, tuple(sorted(seconds.items())))


def _fastest(tokens: int, sizes: tuple[tuple[int, float], ...]) -> tuple[float, int]:
    found = []
    for place, (size, seconds) in enumerate(sizes):
        chunks, left = divmod(tokens, size)
        found.append(((chunks + (left > 0)) * seconds, -size))
        if chunks and left and place:
            found.append((chunks * seconds + _fastest(left, sizes[:place])[0], -size))
    total, first = min(found)  # of equals the largest size
    return total, -first


class PromptLoad:
    """Tokens of prompts that are read between steps, for each token that the steps give.

    Long steps allow large chunks, in which a prompt takes less time. Reading `P` tokens of prompts
    beside `D` of texts takes `D · T / E + P · c` seconds, if a step takes `T`, gives `E` tokens and
    allows chunks of `c` seconds a token: so a token takes `T / E + (P / D) · c`.

    Args:
      costs: of chunks.
    """

    def __init__(self, costs: ChunkCosts) -> None:
        self._read, self._given, self._left = 0.0, _BEFORE, 0.0
        self.use(costs)

    def use(self, costs: ChunkCosts) -> None:
        """Takes other costs of chunks."""
        self._costs = costs
        self._known: dict[tuple[int, ...], float] = {}

    def observe_prompt(self, tokens: int, left: int) -> None:
        """Notes that so many tokens of a prompt were read between steps, of those that were left of
        it.
        """
        self._left += (left - self._left) * (_NEW if self._read else 1.0)
        self._read += tokens
        self._known = {}

    def observe_step(self, tokens: float) -> None:
        """Notes a step that gave so many."""
        kept = 1 - 1 / _MEMORY
        self._read, self._given = kept * self._read, kept * self._given + tokens

    @property
    def share(self) -> float:
        """Tokens of prompts for each token."""
        return self._read / self._given

    def seconds_a_token(self, step_seconds: float) -> float:
        """Seconds of reading prompts for each token, beside steps that take so long."""
        if not self._costs or not self._read:
            return 0.0
        seconds = allowed(self._costs, 0, longest(step_seconds))
        if (sizes := (*seconds,)) not in self._known:
            left = max(round(self._left), 1)
            self._known[sizes] = fastest(left, seconds)[0] / left
        return self.share * self._known[sizes]
