"""How the settings of an engine that serves already come into use, one after the other."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from specjax.engine import measuring
from specjax.engine.device import Device, Measured, Plan
from specjax.goodput.policy import PLAIN

_logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""How long compiled programs wait to be measured while requests run, before they are used all the
same."""


class Part(NamedTuple):
    """A setting, and programs that it still lacks."""

    setting: str
    plan: Plan


class _Arrived(NamedTuple):
    """A part that is compiled, and since when; of a setting, or chunks of prompts."""

    part: Part
    since: float = 0.0


Join = Callable[[Measured], None]
"""Takes what programs that are there cost."""


class Joining:
    """Compiles settings in a thread of its own; measures and joins them in the engine's.

    Nothing is measured while a request is there, as rows are written over. Programs that were not
    measured for some seconds join with the costs that may be hoped for, which their own steps
    correct, and are measured when there is time. What was measured beside a compilation, which
    takes a CPU's cores, is measured again after the last one: with two cores a step of 1.3 ms was
    taken for one of 46 (AMD EPYC, 2026-11-30).

    Args:
      device: of the engine; plain decoding's programs are there and measured.
      chunks: of which the chunks are measured, too.
      parts: what is to join, in this order.
      known: what all programs cost, where that is known.
      join: is called in the engine's thread as programs join.
      more: is asked in it what else a setting is to have, now that its programs are measured.
      keep: is called in it when all programs are there and measured.
      forget: is called in it before rows are written over.
      wake: lets the engine's thread take a turn; called from any thread.
      say: is told in a sentence what has joined and what is left out.
    """

    def __init__(
        self,
        device: Device,
        chunks: Plan,
        parts: list[Part],
        known: Measured | None,
        join: Join,
        more: Callable[[str], Plan | None],
        keep: Callable[[], None],
        forget: Callable[[], None],
        wake: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._device, self._known = device, known
        self._join, self._more, self._keep = join, more, keep
        self._forget, self._wake, self._say = forget, wake, say
        self._chunks = Part("", chunks)
        self._to_compile: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        for part in parts:
            self._to_compile.put(part)
        self._asked, self._compiled = len(parts), 0
        self._arrived: deque[_Arrived] = deque()
        self._unmeasured: deque[_Arrived] = deque([_Arrived(self._chunks)])
        self._running: measuring.Measuring[Any] | None = None
        self._beside = False  # whether something was compiled as it ran
        self._again: list[Part] = []
        self.compiling = [part.setting for part in parts]
        self._there: set[str] = set()
        self.failed: dict[str, str] = {}
        self.settled = threading.Event()
        self._stops = self._said_all = False
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self, at_once: int, done: Callable[[str], None]) -> None:
        """Begins to compile, so many programs at once; `done` is told of each."""
        run = partial(self._compile, at_once, done)
        self._thread = threading.Thread(target=run, name="specjax-joining", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Compiles nothing more; waits for what is being compiled, which cannot be ended."""
        self._stops = True
        self._to_compile.put(None)
        self.settled.set()
        if self._thread is not None:
            self._thread.join()

    def _compile(self, at_once: int, done: Callable[[str], None]) -> None:
        while (part := self._to_compile.get()) is not None:
            try:
                for what in self._device.compile(part.plan, at_once):
                    if self._stops:
                        return
                    done(what)
            except Exception as error:  # the engine serves without it
                if self._stops:
                    return
                _logger.exception("a setting could not be compiled")
                self._leave_out(part, error)
            else:
                self._arrived.append(_Arrived(part, time.monotonic()))
            self._compiled += 1
            self._wake()

    @property
    def _compiles(self) -> bool:
        """Whether something is compiled now, or will be."""
        return self._compiled < self._asked

    def _leave_out(self, part: Part, error: Exception) -> None:
        self.compiling.remove(part.setting)
        reason = str(error).partition("\n")[0][:300].rstrip(".")
        if part.setting in self._there:
            widths = ", ".join(str(shape.width) for shape in part.plan.steps)
            left_out = f"the setting {part.setting} has no step of {widths} columns, which"
        else:
            self.failed[part.setting] = f"{type(error).__name__}: {error}"
            left_out = f"the setting {part.setting} is left out, as it"
        self._say(f"{left_out} could not be compiled: {reason}")
        self._say_if_all()
        self._settle(idle=True)

    @property
    def has_work(self) -> bool:
        """Whether a turn without requests would do anything."""
        waits = self._again and not self._compiles
        return bool(self._arrived or self._unmeasured or waits)

    def turn(self, idle: bool) -> None:
        """Joins what may join; where no request is there (`idle`), measures a run of a program."""
        if not idle and self._running is not None:
            self._running.close()
            self._running = None
            self._clear()
        while self._arrived:
            self._take(self._arrived.popleft())
        if not self._compiles:
            self._unmeasured.extend(map(_Arrived, self._again))
            self._again.clear()
        if idle and self._unmeasured:
            self._measure(self._unmeasured[0].part)
        if not idle:
            self._join_what_waits()
        self._settle(idle)

    def _take(self, arrived: _Arrived) -> None:
        """Lets a part join if its costs are known, or else wait to be measured."""
        costs = None if self._known is None else _of_plan(self._known, arrived.part.plan)
        if costs is not None:
            self._joined(arrived.part, costs)
        else:
            self._unmeasured.append(arrived)

    def _join_what_waits(self) -> None:
        """Lets parts join that requests left no time to measure, at what may be hoped for."""
        latest = time.monotonic() - PATIENCE_SECONDS
        for part, since in list(self._unmeasured):
            if part.setting in self.compiling and since <= latest:
                costs = measuring.assumed(part.plan, self._device.measured)
                self._joined(part, costs, measured=False)

    def _joined(self, part: Part, costs: Measured, measured: bool = True) -> None:
        device = self._device
        device.step_costs = device.step_costs | costs.step_costs
        device.catch_up_seconds = device.catch_up_seconds | costs.catch_up_seconds
        device.mixed_seconds = {**device.mixed_seconds, **costs.mixed_seconds}
        self._join(costs)
        if part.setting in self.compiling:
            self.compiling.remove(part.setting)
            if part.setting not in {PLAIN, *self._there}:
                self._say(f"the setting {part.setting} has joined")
        self._there.add(part.setting)
        more = self._more(part.setting) if measured else None
        if more is not None:
            self.compiling.append(part.setting)
            self._asked += 1
            self._to_compile.put(Part(part.setting, more))
        self._say_if_all()
        self._keep_if_measured()

    def _say_if_all(self) -> None:
        if not (self.compiling or self._said_all):
            self._said_all = True
            but = f" but {', '.join(self.failed)}" if self.failed else ""
            taken = time.monotonic() - self._began
            self._say(f"every setting{but} has joined, after {taken:.0f} s")

    def _measure(self, part: Part) -> None:
        """A run of the measurement of a part; joins it after the last one."""
        if self._running is None:
            self._forget()
            measure = measuring.part if part.setting else measuring.chunks
            self._running, self._beside = measure(self._device, part.plan), False
        try:
            self._beside |= self._compiles
            next(self._running)
        except StopIteration as end:
            self._running = None
            self._unmeasured.popleft()
            if self._beside:
                self._again.append(part)
            self._clear()
            if part.setting:
                self._joined(part, end.value)
            else:
                self._use_chunks(end.value)

    def _use_chunks(self, found: dict[int, tuple[float, float]]) -> None:
        if self._beside:
            before = self._device.chunk_seconds
        else:
            before = {} if self._known is None else self._known.chunk_seconds
        self._device.chunk_seconds = measuring.least(found, before)
        self._join(Measured({}, {}, {}))
        self._keep_if_measured()

    def _keep_if_measured(self) -> None:
        if not (self.compiling or self.failed or self._unmeasured or self._again):
            self._keep()

    def _clear(self) -> None:
        """Nothing decodes in any row."""
        self._device.begin_all(0)

    def _settle(self, idle: bool) -> None:
        """Notes that all have joined, and are measured unless requests leave no time for it."""
        if not self.compiling and not (idle and (self._unmeasured or self._again)):
            self.settled.set()


def _of_plan(known: Measured, plan: Plan) -> Measured | None:
    """Of what is known, that of a plan's programs; None if one of its steps is not."""
    if not known.step_costs.keys() >= set(plan.steps):
        return None
    return Measured(
        {},
        {shape: known.step_costs[shape] for shape in plan.steps},
        {size: known.catch_up_seconds[size] for rows, size in plan.catch_ups if rows == 1},
        mixed_seconds={shape: known.mixed_seconds[shape] for shape in plan.mixed_steps},
    )
