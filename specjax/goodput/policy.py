"""What a step may be made with, and who decides it. No jax, no clock, no threads."""

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from specjax.goodput.bursts import BURST

WIDTHS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    *(6144, 8192, 12288, 16384, 24576, 32768),
)
"""Columns that a step's pass of the target may have."""

PLAIN = "none"
"""The setting that drafts nothing: plain decoding."""


class DraftSetting(NamedTuple):
    """How a step drafts.

    Attributes:
      name: `METHOD` or `METHOD:SIZE`, such as `none`, `chain:7` or `specexec:15`.
      nodes: of a row's tree below the root, at most.
      depth: its levels below the root.
      drawn: whether nodes are drawn, not chosen: then rows are bounded by depth, before the draw.
      runs_draft: whether the draft that settings share must have read all of a row's text.
    """

    name: str
    nodes: int
    depth: int
    drawn: bool = False
    runs_draft: bool = False

    @property
    def kind(self) -> str:
        """Its method."""
        return self.name.partition(":")[0]

    @property
    def is_chain(self) -> bool:
        """Whether it is a drawn chain of the shared draft: all of them survive alike."""
        return self.drawn and self.runs_draft and self.nodes == self.depth


class StepShape(NamedTuple):
    """What a step's program is compiled for: a setting, its rows, the columns of its pass."""

    setting: str
    rows: int
    width: int


class RowState(NamedTuple):
    """What is known of a row before a step.

    Attributes:
      request: names the request in the row.
      temperature: at which it samples.
      held: tokens that the row holds.
      lag: of them, tokens that the draft has not read, at most.
      left: tokens that it may still give.
      max_tpot: seconds a token that the request asks for at most, or None.
    """

    request: Hashable
    temperature: float
    held: int = 0
    lag: int = 0
    left: int = 1 << 30
    max_tpot: float | None = None


class Forecast(NamedTuple):
    """What a step is expected to give all its rows, and how long it takes.

    Beside it, `reading` are seconds that prompts take for each token (see `chunks.PromptLoad`).
    """

    tokens: float
    seconds: float
    reading: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens a second, of steps and the prompts between them."""
        seconds = self.seconds + self.reading * self.tokens
        return self.tokens / seconds if seconds > 0 else 0.0


class Timed(NamedTuple):
    """How long a step took, by its `share` of the time in which it and chunks of prompts ran."""

    seconds: float
    share: float = 1.0


class Decision(NamedTuple):
    """What a step is made with.

    Attributes:
      shape: its program.
      depths: for each row how deep its tree may be.
      reason: best, hysteresis, guard, probe, latency or fixed.
      forecast: what it is expected to give, where that is known.
      plain: what a step that drafts nothing would.
      most_steps: steps that may be made with it before what they gave is known.
    """

    shape: StepShape
    depths: tuple[int, ...]
    reason: str = "fixed"
    forecast: Forecast | None = None
    plain: Forecast | None = None
    most_steps: int = BURST

    def timed(self, taken: float, chunks: float, steps: int = 1) -> Timed | None:
        """How long a step took, of the seconds `taken` by `steps` and by chunks of prompts before.

        The steps have the share of them that they were expected to have, beside the `chunks`
        seconds that those were to take. None if nothing was forecast.
        """
        if not chunks:
            return Timed(taken / steps)
        if self.forecast is None:
            return None
        expected = self.forecast.seconds * steps
        share = expected / (expected + chunks)
        return Timed(taken * share / steps, share)


class Outcome(NamedTuple):
    """What a step gave a row.

    Attributes:
      request: whose.
      tokens: how many it was given.
      nodes: that were drafted.
      accepted: of them.
      ended: whether the request ended in this step, so that more might have been accepted.
      chances: gives, of the nodes below accepted ones, the drafter's probability and whether they
        were accepted; of chosen trees.
    """

    request: Hashable
    tokens: int
    nodes: int
    accepted: int
    ended: bool = False
    chances: Callable[[], Sequence[tuple[float, bool]]] | None = None


class Policy(abc.ABC):
    """Decides what each step is made with."""

    @property
    @abc.abstractmethod
    def shapes(self) -> Sequence[StepShape]:
        """Every program that may be asked for."""

    @abc.abstractmethod
    def decide(self, rows: Sequence[RowState]) -> Decision:
        """What the next step of these rows, at least one, is made with."""

    def standing(self, requests: Sequence[Hashable]) -> Decision | None:
        """The last decision, if it stands for the next step of the rows of these requests."""
        del requests
        return None

    @property
    def calibration(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Intercept and slope of the nodes' chances, of greedy rows and of sampled ones."""
        return (0.0, 1.0), (0.0, 1.0)

    def may_admit(self, rows: Sequence[RowState]) -> bool:
        """Whether the last of these rows may join the others."""
        del rows
        return True

    def observe_step(
        self, decision: Decision, outcomes: Sequence[Outcome], timed: Timed | None, cached: int
    ) -> None:
        """Notes what a step gave, and how long it took where that is known.

        `cached` are the tokens that its rows held together.
        """
        del decision, outcomes, timed, cached

    def prompt_read(self, tokens: int, left: int) -> None:
        """Notes that so many tokens of a prompt, of those left, were read while rows decode."""
        del tokens, left

    def caught_up(self, request: Hashable, chances: Sequence[float]) -> None:
        """Notes how likely tokens of a request's text would have been accepted (-1: unknown)."""
        del request, chances

    def ended(self, request: Hashable) -> None:
        """Forgets a request."""
        del request

    def row_to_probe(self, rows: Sequence[RowState]) -> int | None:
        """Which of the rows the draft should catch up with though nothing is drafted; or None."""
        del rows
        return None


def columns_for(nodes: int) -> int:
    """The least columns of a pass that so many nodes, roots included, fit in.

    Raises:
      ValueError: there are none.
    """
    width = next((width for width in WIDTHS if width >= nodes), None)
    if width is None:
        raise ValueError(f"{nodes} nodes need {nodes} columns; a step has at most {WIDTHS[-1]}.")
    return width


def step_rows(rows: int, every: int, row_factor: int | None) -> int:
    """The rows of the program in which so many of all rows decode.

    There are programs of one row, of `row_factor` times as many and so on, and of all `every` rows;
    of these alone where it is None.
    """
    size = 1 if row_factor is not None else every
    while row_factor is not None and size < rows:
        size *= row_factor
    return min(size, every)


class FixedPolicy(Policy):
    """The same setting in every step, with room for all nodes.

    Args:
      setting: what to draft with.
      rows: how many there are.
      row_factor: see `step_rows`.

    Raises:
      ValueError: a step cannot have so many columns.
    """

    def __init__(self, setting: DraftSetting, rows: int, *, row_factor: int | None = 2) -> None:
        self._setting, self._rows, self._row_factor = setting, rows, row_factor
        try:
            self._by_rows = [self._shape(count) for count in range(1, rows + 1)]
        except ValueError:
            raise ValueError(
                f"{rows} rows of trees of {setting.nodes + 1} nodes need "
                f"{rows * (setting.nodes + 1)} columns; a step has at most {WIDTHS[-1]}. Use fewer "
                "rows or a smaller budget."
            ) from None

    def _shape(self, count: int) -> StepShape:
        rows = step_rows(count, self._rows, self._row_factor)
        return StepShape(self._setting.name, rows, columns_for(count * (self._setting.nodes + 1)))

    @property
    def shapes(self) -> Sequence[StepShape]:
        """Of every number of rows."""
        return sorted(set(self._by_rows))

    def decide(self, rows: Sequence[RowState]) -> Decision:
        """The setting."""
        return self._decision(len(rows))

    def standing(self, requests: Sequence[Hashable]) -> Decision:
        """The setting."""
        return self._decision(len(requests))

    def _decision(self, count: int) -> Decision:
        return Decision(self._by_rows[count - 1], (self._setting.depth,) * count)
