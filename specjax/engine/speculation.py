"""What the engine's steps draft with: the policy asked, the draft caught up, the outcome noted."""

import dataclasses
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.base.notices import notice
from specjax.draft.drafter import Drafter
from specjax.draft.switching import SwitchingDrafter
from specjax.engine.device import Device, RowResult
from specjax.engine.request import Request
from specjax.engine.scheduler import Chunk, Row, state_of
from specjax.goodput.controller import Controller, Options
from specjax.goodput.costs import Cost
from specjax.goodput.policy import (
    PLAIN,
    Decision,
    DraftSetting,
    FixedPolicy,
    Outcome,
    Policy,
    StepShape,
    Timed,
    step_rows,
)
from specjax.goodput.shapes import narrower, shapes_of
from specjax.trees.construction import TOP_K

_READ = (16, 64, 256)
"""Tokens of a row's text that a program lets the draft read."""
_READ_OF_ALL = 16
"""The same of several rows at once."""
_LOOKED = 8
"""Steps between looks for a text that the draft could read while it is not used."""
_SPAN_SECONDS, _SPANS = 0.5, 600
"""Steps are summed up over such spans, of which so many are kept."""


class _CaughtUp(NamedTuple):
    """What the draft has read of requests' texts, and how likely it would have been accepted."""

    requests: tuple[Hashable, ...]
    chances: jax.Array

    @property
    def is_ready(self) -> bool:
        """Whether the device has made it."""
        return self.chances.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass
class Span:
    """Some steps one after the other, most of them of one setting.

    `predicted_tokens` and `predicted_seconds` are those that were expected of its steps,
    `plain_tokens` and `plain_seconds` of steps that would have drafted nothing.
    """

    began: float
    seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    width: int = 0
    nodes: int = 0
    tokens: int = 0
    predicted_tokens: float = 0.0
    predicted_seconds: float = 0.0
    plain_tokens: float = 0.0
    plain_seconds: float = 0.0
    settings: dict[str, int] = dataclasses.field(default_factory=dict)


class Speculation:
    """Between an engine's rows, its device and the policy.

    Args:
      drafter: what drafts; the policy chooses among the settings of a `SwitchingDrafter`.
      rows: how many there are.
      row_factor: see `step_rows`.
      columns: the most of a step that the policy chooses.
      options: what the policy leaves out.

    Attributes:
      settings: what a step may draft with, by name.
      mixed_shapes: of each setting the widest step of all rows, if any: it may read prompts, too.
    """

    def __init__(
        self,
        drafter: Drafter,
        rows: int,
        row_factor: int | None,
        columns: int,
        options: Options = Options(),
    ) -> None:
        self._switch = drafter if isinstance(drafter, SwitchingDrafter) else None
        self._keeps_up = self._switch is not None and self._switch.keeps_up
        self._rows, self._row_factor, self._columns = rows, row_factor, columns
        self._options = options
        self.settings = {name: setting_of(drafter, name) for name in drafter.settings}
        self.policy: Policy | None = None
        if self._switch is None:
            (own,) = self.settings.values()
            self.policy = FixedPolicy(own, rows, row_factor=row_factor)
        elif unused := self.settings_without_columns:
            notice(
                f"no step of {rows} rows has columns for the trees of {', '.join(unused)} "
                f"({columns} columns are the most): never chosen."
            )
        every = [shape for shape in self.shapes if shape.rows == rows > 1]
        self.mixed_shapes = {shape.setting: shape for shape in sorted(every)}
        self._pending: deque[_CaughtUp] = deque()
        self._calibration = None
        self.spans: deque[Span] = deque(maxlen=_SPANS)
        self.deciding_seconds = self.seconds = 0.0
        self.steps = self._looked = 0
        self.steps_by_setting: dict[str, int] = {}

    @property
    def settings_without_columns(self) -> list[str]:
        """Settings to choose from of which no step has columns for enough of their trees."""
        return [] if self._switch is None else sorted(self.settings.keys() - self.later.keys())

    @property
    def shapes(self) -> Sequence[StepShape]:
        """Every step's program that is there before it is known what steps take."""
        if self._switch is None:
            assert self.policy is not None
            return self.policy.shapes
        settings = list(self.settings.values())
        return shapes_of(settings, self._rows, self._row_factor, self._columns)

    def narrower(self, name: str, costs: Mapping[StepShape, Cost]) -> StepShape | None:
        """The next program of fewer columns of a setting, if those there cost so much."""
        if self._switch is None or not self._options.packing:
            return None
        seconds = {shape: cost.seconds for shape, cost in costs.items()}
        return next(iter(narrower([self.settings[name]], seconds)), None)

    @property
    def first_shapes(self) -> list[StepShape]:
        """Of them, those with which an engine can serve.

        A fixed setting needs all of its own. Of those to choose from `none` is enough: for one row,
        and for all, in which fewer run as well.
        """
        if self._switch is None:
            return list(self.shapes)
        own = sorted((each for each in self.shapes if each.setting == PLAIN), key=_rows)
        return list(dict.fromkeys((own[0], own[-1])))

    def mixed_shape(self, decision: Decision) -> StepShape | None:
        """The program with which a decision's steps read prompts: its setting's widest of all rows.

        None if there is no such, or if another is to be probed.
        """
        shape = self.mixed_shapes.get(decision.shape.setting)
        return None if decision.reason == "probe" and shape != decision.shape else shape

    @property
    def later(self) -> dict[str, list[StepShape]]:
        """By settings to choose from their programs, in the order in which they are to be compiled.

        First all of `none`, then of each kind of drafts the middle one.
        """
        if self._switch is None:
            return {}
        names = (PLAIN, *_middle_first(list(self.settings.values())))
        own = {name: [each for each in self.shapes if each.setting == name] for name in names}
        return {name: shapes for name, shapes in own.items() if shapes}

    @property
    def catch_ups(self) -> list[tuple[int, int]]:
        """Rows, and tokens that the draft reads of each, of every program for it."""
        if self._keeps_up or not any(each.runs_draft for each in self.settings.values()):
            return []
        counts = range(1, self._rows + 1)
        several = {step_rows(count, self._rows, self._row_factor) for count in counts} - {1}
        return [*((1, size) for size in _READ), *((rows, _READ_OF_ALL) for rows in sorted(several))]

    @property
    def controller(self) -> Controller | None:
        """The policy, where it chooses."""
        return self.policy if isinstance(self.policy, Controller) else None

    def begin(self, device: Device) -> None:
        """Lets the policy know what steps cost."""
        if self.policy is None:
            self.policy = Controller(
                list(self.settings.values()), device.step_costs, device.catch_up_seconds,
                self._rows, chunks=device.chunk_seconds, options=self._options,
            )  # fmt: skip

    def join(self, costs: Mapping[StepShape, Cost], device: Device) -> None:
        """Lets the policy use further programs, or know better what they cost."""
        if self.controller is not None:
            self.controller.join(costs, device.catch_up_seconds, device.chunk_seconds)

    def fix(self, setting: str | None) -> None:
        """Uses one setting from now on; None lets the policy choose.

        Raises:
          ValueError: there is no such setting, or nothing to choose from.
        """
        if self.controller is None:
            raise ValueError("this engine has a single setting; there is nothing to choose.")
        self.controller.fix(setting)

    def decide(self, rows: Sequence[Row]) -> Decision:
        """What the next step of these rows is made with."""
        assert self.policy is not None
        start = time.perf_counter()
        decision = self.policy.standing([row.sequence for row in rows])
        if decision is None:
            decision = self.policy.decide([row.state() for row in rows])
        self.deciding_seconds += time.perf_counter() - start
        return decision

    def window_of(self, decision: Decision) -> int:
        """Tokens that a step gives a row at most."""
        return self.settings[decision.shape.setting].depth + 1

    def may_join(self, rows: Sequence[Row], request: Request) -> bool:
        """Whether a request may run beside these rows' (see `Policy.may_admit`)."""
        assert self.policy is not None
        running = [row for row in rows if row.sequence is not None]
        asked = [row.sequence.request for row in running if row.sequence is not None]
        if all(each.max_tpot_ms is None for each in (*asked, request)):
            return True
        states = [row.state() for row in running]
        return self.policy.may_admit([*states, state_of(request)])

    def prepare(self, device: Device, decision: Decision, rows: Sequence[Row]) -> bool:
        """Lets the draft catch up with the rows of a step that runs it; whether it had to."""
        setting = self.settings[decision.shape.setting]
        if self._keeps_up:
            for row in rows:
                row.current = True
            return False
        if not setting.runs_draft:
            for row in rows:
                row.leave_draft()
            return False
        behind = [row for row in rows if row.lag]
        self._catch_up(device, behind)
        for row in rows:
            row.current = True
        return bool(behind)

    def probe(self, device: Device, decision: Decision, rows: Sequence[Row]) -> bool:
        """Lets the draft read a row's text though nothing is drafted, to see how it would fare."""
        assert self.policy is not None
        if self._switch is None or self._keeps_up:
            return False
        if self.settings[decision.shape.setting].runs_draft:
            return False
        if self.steps - self._looked < _LOOKED:
            return False
        self._looked = self.steps
        place = self.policy.row_to_probe([row.state() for row in rows])
        if place is None:
            return False
        self._catch_up(device, [rows[place]])
        rows[place].drafted = len(rows[place].tokens)
        return True

    def _catch_up(self, device: Device, rows: Sequence[Row]) -> None:
        """The draft reads what it lacks: little of several rows at once, else row by row."""
        small = [row for row in rows if row.lag <= _READ_OF_ALL]
        if len(small) > 1:
            size = step_rows(len(small), self._rows, self._row_factor)
            others = [n for n in range(self._rows) if n not in {row.number for row in small}]
            numbers = [row.number for row in small] + others[: size - len(small)]
            self._read(device, numbers, _READ_OF_ALL, small)
            rows = [row for row in rows if row not in small]
        for row in rows:
            left = row.lag
            while left > 0:
                size = next((size for size in _READ if size >= left), _READ[-1])
                self._read(device, [row.number], size, [row])
                left -= size

    def _read(self, device: Device, numbers: Sequence[int], size: int, rows: Sequence[Row]) -> None:
        chances = device.catch_up(numbers, size)
        self._pending.append(_CaughtUp(tuple(row.sequence for row in rows), chances))

    def calibrate(self, device: Device) -> None:
        """Hands the calibration of chances on to the device if it is another."""
        assert self.policy is not None
        if self._switch is not None and self.policy.calibration != self._calibration:
            self._calibration = self.policy.calibration
            device.calibrate(self._calibration)

    def observe_step(
        self,
        decision: Decision,
        results: Sequence[tuple[Hashable, RowResult]],
        timed: Timed | None,
        cached: int,
    ) -> None:
        """Notes what a step gave its rows, and how long it took where that is known."""
        assert self.policy is not None
        self._note_caught_up()
        self.steps += 1
        if not isinstance(self.policy, FixedPolicy):
            setting = self.settings[decision.shape.setting]
            chosen = bool(setting.nodes) and not setting.drawn
            outcomes = [
                Outcome(
                    request, len(found.tokens), found.nodes, min(found.accepted, len(found.tokens)),
                    found.done, found.seen if chosen else None,
                )
                for request, found in results
            ]  # fmt: skip
            self.policy.observe_step(decision, outcomes, timed, cached)
        self._sum_up(decision, results, None if timed is None else timed.seconds)

    def _note_caught_up(self) -> None:
        """Tells the policy what the draft has read by now."""
        assert self.policy is not None
        while self._pending and self._pending[0].is_ready:
            requests, chances = self._pending.popleft()
            for request, own in zip(requests, np.asarray(chances), strict=False):
                if own.max() >= 0:
                    self.policy.caught_up(request, own.tolist())

    def prompt_read(self, chunk: Chunk) -> None:
        """Notes a chunk that is read between steps, or in one."""
        assert self.policy is not None
        self.policy.prompt_read(len(chunk.tokens), chunk.left)

    def ended(self, request: Hashable) -> None:
        """Forgets a request."""
        if self.policy is not None:
            self.policy.ended(request)

    def _sum_up(
        self,
        decision: Decision,
        results: Sequence[tuple[Hashable, RowResult]],
        seconds: float | None,
    ) -> None:
        now = time.time()
        if not self.spans or now - self.spans[-1].began > _SPAN_SECONDS:
            self.spans.append(Span(now))
        span, taken = self.spans[-1], 0.0 if seconds is None else seconds
        self.seconds += taken
        span.seconds += taken
        span.steps += 1
        span.rows, span.width = len(results), decision.shape.width
        span.nodes += sum([found.nodes for _, found in results])
        if seconds is not None:
            span.tokens += sum([len(found.tokens) for _, found in results])
        for name, forecast in (("predicted", decision.forecast), ("plain", decision.plain)):
            if forecast is not None and seconds is not None:
                for field in ("tokens", "seconds"):
                    place = f"{name}_{field}"
                    setattr(span, place, getattr(span, place) + getattr(forecast, field))
        name = decision.shape.setting
        for counts in (span.settings, self.steps_by_setting):
            counts[name] = counts.get(name, 0) + 1


def _middle_first(settings: Sequence[DraftSetting]) -> list[str]:
    """Names of the settings that draft: the middle one of each kind, then the others."""
    kinds: dict[str, list[str]] = {}
    for setting in settings:
        if setting.name != PLAIN:
            kinds.setdefault(setting.kind, []).append(setting.name)
    middle = [names[len(names) // 2] for names in kinds.values()]
    others = [name for names in kinds.values() for name in names if name not in middle]
    return [*middle, *others]


def _rows(shape: StepShape) -> int:
    return shape.rows


def setting_of(drafter: Drafter, name: str = "") -> DraftSetting:
    """What the policy must know of a drafter's setting."""
    own = drafter.of_setting(name)
    runs = isinstance(own, SwitchingDrafter) and own.runs_draft
    drawn = own.construction.children != TOP_K
    return DraftSetting(name, own.num_slots - 1, own.window - 1, drawn, runs)
