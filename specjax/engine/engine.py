"""Continuous batching over the compiled step: requests come and go, rows stay."""

import asyncio
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from pallas_kernels.platform import platform
from specjax.base.grammars import num_rows
from specjax.base.progress import progress_bars
from specjax.base.pytree import replace
from specjax.decoding.extending import can_truncate
from specjax.decoding.request import check_drafter, rule_of
from specjax.draft.drafter import Drafter
from specjax.draft.plain import PlainDrafter
from specjax.engine import measured, measuring
from specjax.engine.checks import check_request, check_requests, key_of
from specjax.engine.device import COMPILED_AT_ONCE, Device, Measured, Pending, Plan, RowResult
from specjax.engine.earlier import EarlierTexts
from specjax.engine.grammars import GrammarPrograms, follow, forget
from specjax.engine.joining import Joining, Part
from specjax.engine.pages import PageCounts, Pages
from specjax.engine.programs import Setup
from specjax.engine.report import report
from specjax.engine.request import (
    MAX_LOGPROBS,
    EngineClosedError,
    Logprob,
    Request,
    Statistics,
    Tokens,
)
from specjax.engine.scheduler import Admission, Chunk, Row, Scheduler
from specjax.engine.sequence import Sequence, hand_over
from specjax.engine.sizes import Sizes, default_page_size, paging_of, sizes_of, slots_of, texts_of
from specjax.engine.speculation import Speculation
from specjax.engine.watch import Watched
from specjax.goodput.chunks import PrefillBatch
from specjax.goodput.controller import PAUSE, Options
from specjax.goodput.costs import Cost, StepCosts
from specjax.goodput.policy import WIDTHS, Decision, StepShape, Timed
from specjax.models.transformer import Model
from specjax.parallel.mesh import check_rows, layout_of, shards_of
from specjax.verify.rules import AUTO

_logger = logging.getLogger(__name__)

CHUNKS = (8, 32, 128)
"""Tokens of a prompt that a program reads at a time."""

_LARGEST_CHUNK = 512
"""On an accelerator also so many, which is where most of them compute at full rate."""

_SCORED = 16
"""The same where log probabilities of the prompt are asked for."""

_CPU_BATCH, _BATCH = PrefillBatch(8, 64, 256), PrefillBatch(4, 128, 512)
"""The pass over prompts of several rows, on a CPU and elsewhere."""
_CPU_MIXED, _MIXED = PrefillBatch(1, 16, 16), PrefillBatch(4, 256, 256)
"""What a step reads of prompts while rows decode, on a CPU and elsewhere."""
_ROWS_A_PROMPT = 8
"""Rows of an engine there for each whose prompt is read beside others'."""
_READING = 0.25
"""Share of the burst in flight for which the next one waits for who looks for stop strings: the
device is busy meanwhile."""
_NEW_MIXED = 0.1
"""Weight of a burst in what prompts add to its steps."""

_CPU_COLUMNS = 64
"""Where each costs. On an H100 (bfloat16, jax 0.11.2) a pass of an 8B model takes 7.4 ms with 8
columns and 8.3 with 256."""

_CPU_ROW_FACTOR, _ROW_FACTOR = 2, 8
"""Programs of steps are so many times as many rows apart: where a pass waits for its weights, rows
that are idle cost it what they hold, and a program takes long to compile."""


class _MixedStep(NamedTuple):
    """A program whose steps read prompts: how long they take without, what prompts add to that, and
    how much longer that is than a step of what was decided.
    """

    shape: StepShape
    seconds: float
    added: float
    more: float


class _InFlight(NamedTuple):
    """A burst whose output is not processed yet, what was decided for it, and who was in its rows.

    It has so many `steps` unless all of its rows end before; `cached` are the tokens that they
    held. `alone` says whether the device did nothing else since the burst before but chunks of
    prompts, which were to take `chunk_seconds`, with the `mixed_seconds` that tokens of prompts
    were to add to each step; None where steps read none. All steps are made where they do.
    """

    pending: Pending
    scheduled: list[tuple[Row, Sequence]]
    decision: Decision
    steps: int
    cached: int
    alone: bool
    chunk_seconds: float
    mixed_seconds: float | None

    def timed(self, taken: float, gave: int) -> Timed | None:
        """How long each step took, of the time since the burst before, if so many gave anything;
        None if that cannot be said.
        """
        steps = gave if self.mixed_seconds is None else self.steps
        known = self.alone and steps > 0
        return self.decision.timed(taken, self.chunk_seconds, steps) if known else None


class Engine:
    """Requests in the rows of one compiled step, each distributed as the target alone would write.

    A thread of its own runs the device, in bursts of steps. The next burst is handed to the device
    before the last one's tokens are read; prompts are read in chunks between them, or in the passes
    of their steps. That thread compiles nothing.

    Args:
      target: the model whose distribution the texts follow.
      drafter: what proposes trees; None is plain decoding. Of a `SwitchingDrafter` the setting of
        each step is the one of the largest goodput (see `specjax.goodput`).
      rows: requests that run at a time.
      max_model_len: the most tokens of a prompt and its continuation together; by default the
        model's context, or as much of it as there is memory for, 2,048 at least.
      verify: the verification rule of requests without a seed; those with one are decided by the
        naive rule.
      max_waiting: requests that may wait for a row.
      max_waiting_tokens: tokens of their prompts.
      columns: of a `SwitchingDrafter`'s steps, at most; by default 64 on a CPU, where each of them
        costs, and elsewhere as many as all rows' trees have nodes.
      page_size: slots of a page of the caches, which rows share where their texts begin alike; by
        default 64 on a CPU, 128 on a GPU and 512 on a TPU. 0 is room for a whole context in each
        row, the default where rows are spread over a mesh and where XLA's attention is named.
      kv_cache_tokens: tokens that all pages have room for; by default as many as there is memory
        for, or all rows need. A request waits until there are pages for its prompt and all of its
        `max_new_tokens`, so that none that runs ever gives up its own.
      options: what the choice of its settings leaves out.

    Raises:
      ValueError: the drafter or the rule does not go with the target, the mesh's data axis does not
        divide the rows, or sizes are out of range or there is no memory for them.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        *,
        rows: int = 8,
        max_model_len: int | None = None,
        verify: str = AUTO,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1 << 20,
        columns: int | None = None,
        page_size: int | None = None,
        kv_cache_tokens: int | None = None,
        options: Options = Options(),
    ) -> None:
        config = target.config
        drafter = PlainDrafter(config.vocab_size) if drafter is None else drafter
        check_drafter(target, drafter)
        if rows < 1:
            raise ValueError(f"rows is {rows}; it must be at least 1.")
        self.vocab_size, self.eos_ids = config.vocab_size, config.eos_ids
        layout = layout_of(target, drafter)
        check_rows(layout, rows, "rows")
        shards = shards_of(layout)
        if layout is not None and layout.mesh.is_multi_process:
            raise ValueError("the mesh spans several processes; an engine runs in one of its own.")
        self._chunks, self._mixed = _chunks(), _mixed_of(rows, shards)
        self._batch = _batch_of(rows) if shards == 1 else None
        rule = rule_of(verify, drafter)
        sizes = sizes_of(
            target, drafter, rule, rows, max(self._chunks), max_model_len=max_model_len,
            page_size=page_size, kv_cache_tokens=kv_cache_tokens, shards=shards,
        )  # fmt: skip
        self.max_model_len = sizes.max_model_len
        setup = setup_of(target, drafter, sizes, verify)
        self.rule = rule
        self._config, self._rows = config, rows
        self._make_device = partial(Device, target, drafter, setup, sizes.texts, rows)
        self._costs_of = partial(measured.name_of, (target, drafter), sizes=sizes)
        self._device: Device | None = None
        self._reuses = shards == 1 and can_truncate(target, drafter)
        pages, self.kv_cache_tokens = None, rows * self.max_model_len
        if sizes.paging is not None:
            self.kv_cache_tokens = sizes.paging.size * (sizes.paging.target_pages - 1)
            pages = Pages(sizes.texts, sizes.slots, drafter.window, sizes.paging)
        self._scheduler = Scheduler(
            rows, texts=sizes.texts, reuses=self._reuses, max_requests=max_waiting,
            max_tokens=max_waiting_tokens, pages=pages,
        )  # fmt: skip
        self.speculation = _speculation(drafter, rows, columns, options, shards)
        self._window = drafter.window
        self._earlier = EarlierTexts(drafter.remembers) if drafter.remembers else None
        self._aborted: deque[Sequence] = deque()
        self._in_flight: _InFlight | None = None
        self._alone, self._last_output, self._step_seconds = False, 0.0, 0.0
        self._chunk_seconds = 0.0
        self._costs: StepCosts | None = None
        self._joining: Joining | None = None
        self._grammars: GrammarPrograms | None = None
        self._lock = threading.Condition()
        self._totals = Statistics(accepted_at=[0] * (drafter.window - 1))
        self._thread: threading.Thread | None = None
        self._accepts, self._stops = True, False
        self.ready = False
        self.failure: str | None = None

    @property
    def num_requests_running(self) -> int:
        """Requests in rows."""
        return len(self._scheduler.running)

    @property
    def num_requests_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._scheduler.waiting)

    @property
    def kv_cache_usage(self) -> float:
        """The share of the caches' tokens, or of their pages, that running requests hold."""
        if (counts := self.page_counts) is not None:
            return counts.running / counts.total
        held = sum(len(row.tokens) for row in self._scheduler.rows if row.sequence is not None)
        return held / self.kv_cache_tokens

    @property
    def num_grammar_matchers(self) -> int:
        """Rows of this process whose texts are followed through a grammar."""
        return num_rows()

    @property
    def page_counts(self) -> PageCounts | None:
        """How many pages the caches have, and whose; None where rows have none."""
        if self._scheduler.pages is None:
            return None
        with self._lock:
            running = [row.number for row in self._scheduler.rows if row.sequence is not None]
            return self._scheduler.pages.counts(running)

    def statistics(self) -> Statistics:
        """Counts of all requests since the start."""
        with self._lock:
            return dataclasses.replace(self._totals, accepted_at=list(self._totals.accepted_at))

    @property
    def settings_compiling(self) -> list[str]:
        """Settings of which programs are still being compiled, in this order."""
        if self._joining is None:
            return [] if self._thread is not None else list(self.speculation.later)
        return list(self._joining.compiling)

    @property
    def settings_failed(self) -> dict[str, str]:
        """Settings that are left out as they could not be compiled, and why."""
        return {} if self._joining is None else dict(self._joining.failed)

    def report(self) -> dict[str, Any]:
        """What the choice of settings believes and does (see `specjax.engine.report`)."""
        states = {
            "settings_compiling": self.settings_compiling, "settings_failed": self.settings_failed,
        }  # fmt: skip
        with self._lock:
            measured = None if self._device is None else self._device.measured
            return report(self.speculation, measured) | states

    def fix(self, setting: str | None) -> None:
        """Drafts with one setting from the next burst on; None lets the engine choose again.

        Raises:
          ValueError: there is no such setting, or nothing to choose from.
        """
        with self._lock:
            self.speculation.fix(setting)

    def watched(self) -> list[Watched]:
        """What may be shown of the requests that run."""
        with self._lock:
            running = [(row.number, row.sequence) for row in self._scheduler.rows]
        return [own.watched(number) for number, own in running if own is not None]

    def start(self, *, wait: bool = True, say: Callable[[str], None] | None = None) -> None:
        """Compiles programs, behind a progress bar on a terminal, and begins to serve.

        With settings to choose from it serves as soon as plain decoding's programs are there; the
        others are compiled in a thread of their own, and each setting joins when all of its are
        (see `settings_compiling`). A setting that cannot be compiled is left out.

        Args:
          wait: until all settings have joined. Nothing compiles afterwards.
          say: is told in a sentence of each that has joined or is left out.

        Raises:
          RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("the engine was started before.")
        with progress_bars() as progress:
            try:
                joining = self._begin(progress, wait, say or _logger.info)
            except BaseException as error:
                self.failure = f"the engine did not start: {type(error).__name__}: {error}"
                self._end_all("error")
                raise
            if wait:
                joining.settled.wait()

    def _begin(self, progress: Progress, wait: bool, say: Callable[[str], None]) -> Joining:
        """Serves with the programs of plain decoding, or of the only setting; lets others join."""
        own, device = self.speculation, self._make_device()
        plan = Plan(
            own.shapes, self._chunks, _SCORED, own.catch_ups, self.max_model_len, self._reuses,
            self._batch, self._mixed, _mixed_steps(own),
        )  # fmt: skip
        first = plan._replace(
            steps=own.first_shapes, catch_ups=(),
            mixed_steps=[shape for shape in plan.mixed_steps if shape in own.first_shapes],
        )  # fmt: skip
        counted = plan if wait else first
        total = len(counted.steps) + len(counted.chunks) + len(counted.catch_ups)
        total += 3 + self._reuses + (self._batch is not None) + len(counted.mixed_steps)
        task = progress.add_task("compile", total=total)

        made = itertools.count(1)

        def done(what: str) -> None:
            count = next(made)
            progress.update(
                task, description=f"compile {what}", completed=count, total=max(count, total)
            )

        for what in device.compile(first):
            done(what)
        known = self._known(plan)
        _measure_first(device, first, known)
        own.begin(device)
        self._costs = StepCosts(device.step_costs)
        self._step_seconds = min(cost.seconds for cost in device.step_costs.values())
        parts = [Part(name, self._part_of(plan, name)) for name in own.later]
        joining = self._joining = Joining(
            device, plan, parts, known, self._join, partial(self._narrower, plan),
            partial(self._keep, plan, known), self._forget_rows, self._wake, say,
        )  # fmt: skip
        with self._lock:
            self._grammars = GrammarPrograms(device, plan, self._wake)
            if any(each.request.grammar is not None for each in self._scheduler.waiting):
                self._grammars.want()
        self._device = device
        self._thread = threading.Thread(target=self._run, name="specjax-engine", daemon=True)
        self.ready = True
        self._thread.start()
        joining.start(COMPILED_AT_ONCE if wait else 1, done if wait else lambda _: None)
        return joining

    def _known(self, plan: Plan) -> Measured | None:
        """What programs cost when such an engine was measured before."""
        chooses = len(self.speculation.settings) > 1
        return measured.recall(self._costs_of(plan), plan) if chooses else None

    def _part_of(self, plan: Plan, name: str) -> Plan:
        """The programs that a setting lacks, with those that its draft reads texts with."""
        own = self.speculation
        reads = plan.catch_ups if own.settings[name].runs_draft else ()
        mixed = [shape for shape in plan.mixed_steps if shape.setting == name]
        return plan._replace(steps=own.later[name], catch_ups=reads, mixed_steps=mixed)

    def _narrower(self, plan: Plan, name: str) -> Plan | None:
        """A program of fewer columns of a setting, if it could gain from that."""
        assert self._device is not None
        shape = self.speculation.narrower(name, self._device.step_costs)
        return None if shape is None else plan._replace(
            steps=(shape,), catch_ups=(), mixed_steps=()
        )  # fmt: skip

    def _join(self, costs: Measured) -> None:
        assert self._device is not None
        assert self._costs is not None
        self._costs.join(costs.step_costs)
        if self._grammars is not None:
            self._grammars.add(costs.step_costs)
        with self._lock:
            self.speculation.join(costs.step_costs, self._device)

    def _keep(self, plan: Plan, known: Measured | None) -> None:
        """Keeps what all programs cost for the next start."""
        assert self._device is not None
        if len(self.speculation.settings) > 1 and self._device.measured != known:
            measured.remember(self._costs_of(plan), self._device.measured)

    def _forget_rows(self) -> None:
        with self._lock:
            self._scheduler.forget()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def submit(self, request: Request) -> Sequence:
        """Puts a request in the queue; its tokens come to the running event loop.

        Raises:
          EngineClosedError: the engine takes no more requests.
          QueueFullError: too many requests or tokens wait.
          RequestError: a field, which it names, is out of its range (see `Request`).
          RuntimeError: no event loop runs in this thread.
          TypeError: a field is of another type than it must be.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request]) -> list[Sequence]:
        """Puts requests in the queue, all of them or none.

        Raises:
          EngineClosedError, QueueFullError, RuntimeError, TypeError: as `submit`.
          RequestError: as `submit`, or so many at once can never wait.
        """
        sequences = self.prepare(requests)
        self.enqueue(sequences)
        return sequences

    def prepare(self, requests: Iterable[Request]) -> list[Sequence]:
        """Checked requests for `enqueue`; whoever has very many prepares some at a time.

        Raises:
          RequestError, RuntimeError, TypeError: as `submit`.
        """
        checked = check_requests(requests, self._config, self.max_model_len, self.rule)
        loop, found = asyncio.get_running_loop(), []
        for request, parameters in checked:
            if request.seed is None:
                parameters = replace(parameters, key=key_of(secrets.randbits(64))[None])
            sequence = Sequence(
                request, parameters, loop=loop, queue=asyncio.Queue(), abort=self._abort,
                all_read=threading.Event() if request.has_stop_strings else None,
            )  # fmt: skip
            sequence.statistics.accepted_at = [0] * (self._window - 1)
            found.append(sequence)
        return found

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Puts what `prepare` gave in the queue, all of it or nothing.

        Raises:
          EngineClosedError, QueueFullError: as `submit`.
          RequestError: so many at once can never wait.
        """
        with self._lock:
            if not self._accepts:
                raise EngineClosedError(self.failure or "the engine takes no more requests.")
            own = [each for each in sequences if not each.finished]
            if any(each.request.grammar is not None for each in own):
                self._want_grammars()
            self._scheduler.add(*own)
            self._lock.notify()

    def _want_grammars(self) -> None:
        """Has programs compiled that hold rows to grammars, once the engine has begun.

        Raises:
          EngineClosedError: there will be none.
        """
        if self._grammars is not None:
            if self._grammars.failure is not None:
                raise EngineClosedError(self._grammars.failure)
            self._grammars.want()

    def _may_begin(self, request: Request) -> bool:
        """Whether there is a program for a request."""
        return request.grammar is None or (self._grammars is not None and self._grammars.is_ready)

    def _refuse_grammars(self) -> None:
        """Ends requests for which there will be no program; under the lock."""
        if self._grammars is None or self._grammars.failure is None:
            return
        for sequence in [each for each in self._scheduler.waiting if each.request.grammar]:
            self._scheduler.waiting.remove(sequence)
            sequence.finished = True
            hand_over([(sequence, Tokens((), finish_reason="error"))])

    def stop_accepting(self) -> None:
        """Refuses what is submitted from now on; what was goes on."""
        with self._lock:
            self._accepts = False

    async def drain(self, seconds: float) -> None:
        """Waits until every request has ended, at most `seconds`; then ends the rest ("abort")."""
        self.stop_accepting()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := self._unfinished()) and loop.time() < end:
            await asyncio.sleep(0.02)
        for sequence in left:
            sequence.abort()

    def _unfinished(self) -> list[Sequence]:
        """The sequences that wait or run, but for those that were aborted."""
        with self._lock:
            every = (*self._scheduler.waiting, *self._scheduler.running)
            return [sequence for sequence in every if not sequence.finished]

    def close(self) -> None:
        """Ends every request and the thread."""
        with self._lock:
            self._accepts, self._stops = False, True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        if self._joining is not None:
            self._joining.stop()
        if self._grammars is not None:
            self._grammars.stop()
        self._end_all("abort")

    def _abort(self, sequence: Sequence) -> None:
        with self._lock:
            if sequence.finished:
                return
            sequence.finished = True
            self._aborted.append(sequence)
            self._lock.notify()
        hand_over([(sequence, Tokens((), finish_reason="abort"))])

    def _run(self) -> None:
        """The engine's thread: until it is closed, or fails."""
        try:
            while self._turn():
                pass
            reason = "abort"
        except BaseException as error:  # whatever it is, nobody may wait for ever
            _logger.exception("the engine failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}"
            reason = "error"
        self._end_all(reason)

    def _end_all(self, reason: str) -> None:
        """Ends every request, in a row or not."""
        with self._lock:
            self._accepts = self.ready = False
            if self._joining is not None:
                self._joining.settled.set()
            left = self._unfinished()
            for sequence in left:
                sequence.finished = True
            for row in self._scheduler.rows:
                if row.sequence is not None:
                    forget(row.sequence)
                    self._scheduler.free(row)
            self._scheduler.waiting.clear()
        hand_over((sequence, Tokens((), finish_reason=reason)) for sequence in left)

    def _turn(self) -> bool:
        """New requests into rows, chunks of prompts, a burst, and what the last burst gave."""
        assert self._device is not None
        assert self._joining is not None
        with self._lock:
            while not (self._stops or self._has_work() or self._joining.has_work):
                self._lock.wait()
            if self._stops:
                return False
            self._refuse_grammars()
            idle = not self._has_work()
        if idle or self._joining.has_work:
            self._joining.turn(idle)
        if idle:
            return True
        self._wait_for_readers()
        if self._earlier is not None and (corpus := self._earlier.made()) is not None:
            self._device.remember(corpus)
        with self._lock:
            while self._aborted:
                sequence = self._aborted.popleft()
                self._scheduler.abort(sequence)
                self.speculation.ended(sequence)
                forget(sequence)
        while (admission := self._next_admission()) is not None:
            self._admit(admission)
        if self._in_flight is None:  # chunks alone: no more of them is handed over than one
            self._device.wait()
        reads = self._reads_beside()
        behind = self._scheduler.falls_behind(self._mixed) and not self._scheduler.is_in_time
        if not reads or behind:
            self._read_chunks()
        step = self._step(reads)
        last, self._in_flight = self._in_flight, step
        if last is not None:
            self._process(last)
        return True

    def _wait_for_readers(self) -> None:
        """Lets those who look for stop strings read what the last burst gave, and abort."""
        burst = self._in_flight
        if burst is None:
            return
        end = time.monotonic() + _READING * burst.steps * self._step_seconds
        for _, sequence in burst.scheduled:
            if sequence.all_read is not None and not sequence.finished:
                sequence.all_read.wait(max(end - time.monotonic(), 0.0))

    def _has_work(self) -> bool:
        at, own = self._scheduler, self._grammars
        waits = at.next_waiting(self._may_begin) is not None
        waits |= own is not None and own.failure is not None and bool(at.waiting)
        return bool(waits or at.running or self._aborted or self._in_flight)

    def _may_join(self, request: Request) -> bool:
        return self.speculation.may_join(self._scheduler.rows, request)

    def _next_admission(self) -> Admission | None:
        with self._lock:
            return self._scheduler.admit(self._may_join, self._may_begin)

    def _place(self) -> None:
        """Rows lie on the device in the pages that they have, before one begins."""
        assert self._device is not None
        if self._scheduler.pages is not None:
            with self._lock:
                changes = self._scheduler.pages.changes()
            self._device.place(changes)

    def _admit(self, admission: Admission) -> None:
        assert self._device is not None
        row, source, common = admission
        assert row.sequence is not None
        row.sequence.admitted = time.monotonic()
        with self._lock:
            self._totals.prompt_tokens += len(row.sequence.request.prompt)
        self._alone = False
        if source is None:
            self._place()
            self._device.begin(row.number, row.tokens[0])
        else:
            self._copy(row, row.sequence, source, common)
        if not row.sequence.prefilling:
            self._begin_decoding(row, row.sequence)

    def _copy(self, row: Row, sequence: Sequence, source: int, common: int) -> None:
        """A row takes over what another holds of its prompt."""
        assert self._device is not None
        self._alone = False
        with self._lock:
            self._totals.cached_tokens += common - sequence.statistics.cached_tokens
            sequence.statistics.cached_tokens = common
        self._place()
        self._device.copy(source, row.number, common, row.tokens[-1])

    def _reads_beside(self) -> bool:
        """Whether the next step is to read prompts, if it has the last one's setting."""
        assert self._device is not None
        if self._in_flight is None or self._scheduler.next_to_read is None:
            return False
        found = self._mixed_step(self._in_flight.decision)
        if found is None:
            return False
        costs = self._device.chunk_seconds
        with self._lock:
            return self._scheduler.mixes(costs, self._mixed, found.more, self._step_seconds)

    def _mixed_step(self, decision: Decision) -> _MixedStep | None:
        """The program whose steps draft as was decided and read prompts; None if there is none."""
        assert self._device is not None
        assert self._costs is not None
        shape, row = self.speculation.mixed_shape(decision), self._scheduler.next_to_read
        if shape is None or row is None or shape not in self._device.mixed_seconds:
            return None
        assert self._mixed is not None
        chunks = self._device.chunk_seconds
        size = min((n for n in chunks if n >= self._mixed.tokens), default=max(chunks))
        own = self._costs.seconds(shape, self._cached())
        added = self._device.mixed_seconds[shape] + chunks[size][1] * len(row.tokens)
        return _MixedStep(shape, own, added, max(own + added - self._step_seconds, 0.0))

    def _cached(self) -> int:
        """Tokens that the rows which decode hold."""
        return sum(len(row.tokens) for row in self._scheduler.decoding)

    def _read_chunks(self) -> None:
        """Reads a chunk of prompts; more of them where rows decode that a burst would keep waiting.

        Those that want their tokens in time wait for one.
        """
        while (taken := self._read_chunk()) and self._scheduler.decoding:
            most = self._scheduler.reading_seconds(self._step_seconds)
            if self._chunk_seconds + taken > most or self._scheduler.is_in_time:
                return

    def _read_chunk(self) -> float:
        """Reads a chunk of prompts, if any waits; how long that is to take."""
        assert self._device is not None
        costs, batch_seconds = self._device.chunk_seconds, self._device.batch_seconds
        self._take_prefix()
        with self._lock:
            chunk = self._scheduler.chunk(costs, self._step_seconds)
            together = self._scheduler.together(
                costs, self._batch, batch_seconds, self._step_seconds
            )
        if chunk is None:
            return 0.0
        sequence = chunk.row.sequence
        assert sequence is not None
        if together:
            self._read_together(together)
            return self._device.batch_seconds
        own, more = self._device.chunk_seconds[chunk.size]
        seconds = own + more * chunk.start
        self._chunk_seconds += seconds
        if sequence.request.prompt_logprobs is not None:
            self._alone = False
            tokens = sequence.request.prompt[chunk.start : chunk.start + _SCORED]
            chunk = chunk._replace(tokens=list(tokens), size=_SCORED)
        self._extend(chunk, sequence)
        self._read(chunk)
        return seconds

    def _take_prefix(self) -> None:
        """The next row to be read takes over what another has read of its prompt meanwhile."""
        with self._lock:
            taken = self._scheduler.prefix()
        if taken is not None and taken.source is not None and taken.row.sequence is not None:
            self._copy(taken.row, taken.row.sequence, taken.source, taken.common)

    def _read_together(self, chunks: list[Chunk]) -> None:
        """Reads tokens of several prompts in one pass."""
        assert self._device is not None
        assert self._batch is not None
        self._chunk_seconds += self._device.batch_seconds
        tokens = {chunk.row.number: chunk.tokens for chunk in chunks}
        self._device.extend_together(tokens, self._batch)
        self._read(*chunks)

    def _read(self, *chunks: Chunk) -> None:
        """Notes that chunks are read; a row decodes if its was the rest of its prompt."""
        beside = bool(self._scheduler.decoding)
        for chunk in chunks:
            sequence = chunk.row.sequence
            assert sequence is not None
            if beside:
                self.speculation.prompt_read(chunk)
            if self._scheduler.read(chunk):
                self._begin_decoding(chunk.row, sequence)

    def _extend(self, chunk: Chunk, sequence: Sequence) -> None:
        assert self._device is not None
        count = sequence.request.prompt_logprobs
        found = self._device.extend(
            chunk.row.number, chunk.tokens, chunk.size, scored=count is not None
        )
        if found is not None and not sequence.finished:
            made = self._device.scores(found, len(chunk.tokens))
            sequence.add_prompt_logprobs(each.of_likeliest(count) for each in made)

    def _begin_decoding(self, row: Row, sequence: Sequence) -> None:
        assert self._device is not None
        assert sequence.parameters is not None
        if sequence.finished:  # it was aborted meanwhile
            return
        if sequence.request.max_new_tokens == 0:
            self._end(row, sequence)
            return
        self._alone = False
        parameters = sequence.parameters
        if number := follow(sequence):
            parameters = replace(parameters, grammar=np.asarray([number], np.int32))
        self._device.assign(row.number, sequence.request, parameters)

    def _step(self, reads: bool) -> _InFlight | None:
        """Hands over a burst, in which tokens of prompts are read if it `reads` them."""
        assert self._device is not None
        rows, own = self._scheduler.decoding, self.speculation
        if not rows:
            return None
        if reads:
            self._take_prefix()
        masked = any(row.sequence is not None and row.sequence.grammar_number for row in rows)
        with self._lock:
            decision = own.decide(rows)
            if masked:
                assert self._grammars is not None
                decision = self._grammars.instead(decision)
        cached = self._cached()
        self._step_seconds = self._expected_seconds(decision, cached)
        read = own.prepare(self._device, decision, rows)
        own.calibrate(self._device)
        prompts, seconds = [], 0.0
        with self._lock:
            if reads and not masked:
                decision, prompts, seconds = self._beside(decision)
            steps = len(prompts) or self._scheduler.burst(self._step_seconds, decision.most_steps)
            window = own.window_of(decision)
            plan = self._scheduler.step(decision.shape.rows, steps, window)
        scheduled = [(row, row.sequence) for row in rows if row.sequence is not None]
        scored = [sequence.request.logprobs is not None for _, sequence in scheduled]
        numbers = [row.number for row in rows]
        tokens = [{chunk.row.number: chunk.tokens for chunk in step} for step in prompts]
        pending = self._device.advance(
            decision.shape, numbers, plan.filling, decision.depths, scored, steps,
            prompts=tokens, mixed=self._mixed if prompts else None, masked=masked,
        )  # fmt: skip
        alone = self._alone and not read and self._in_flight is not None
        self._alone = not own.probe(self._device, decision, rows)
        chunks, self._chunk_seconds = self._chunk_seconds + steps * seconds, 0.0
        for step in prompts:
            self._read(*step)
        if reads and not prompts:
            self._read_chunks()
        return _InFlight(
            pending, scheduled, decision, steps, cached, alone, chunks,
            seconds if prompts else None,
        )  # fmt: skip

    def _beside(self, decision: Decision) -> tuple[Decision, list[list[Chunk]], float]:
        """A decision for a program whose steps read prompts, what each of them reads, and how much
        longer it takes for that; the same and nothing to read where there is none.
        """
        step, at = self._mixed_step(decision), self._scheduler
        if step is None or self._mixed is None:
            return decision, [], 0.0
        steps = at.burst(self._step_seconds + step.more, decision.most_steps, mixed=True)
        found = at.beside(self._mixed, steps)
        if not found:
            return decision, [], 0.0
        forecast = decision.forecast
        if forecast is not None and step.shape != decision.shape:
            forecast = forecast._replace(seconds=step.seconds)
        return decision._replace(shape=step.shape, forecast=forecast), found, step.added

    def _expected_seconds(self, decision: Decision, cached: int) -> float:
        """How long a step takes, as it is forecast or else as its program's steps took."""
        assert self._costs is not None
        if decision.forecast is not None:
            return decision.forecast.seconds
        return self._costs.seconds(decision.shape, cached)

    def _process(self, burst: _InFlight) -> None:
        """Hands on what a burst gave; what it gave those who have left is dropped."""
        assert self._device is not None
        results = self._device.results(burst.pending)
        now = time.perf_counter()
        timed = burst.timed(now - self._last_output, len(results))
        self._correct_mixed(burst, now - self._last_output)
        self._last_output = now
        window = self.speculation.window_of(burst.decision)
        outputs: list[tuple[Sequence, Tokens]] = []
        gave: list[list[tuple[Sequence, RowResult]]] = [[] for _ in results]
        with self._lock:
            for place, (row, sequence) in enumerate(burst.scheduled):
                if row.sequence is not sequence:
                    continue
                own = [step[place] for step in results if step[place].tokens]
                for step, result in zip(gave, own, strict=False):
                    step.append((sequence, result))
                tokens = [token for result in own for token in result.tokens]
                self._scheduler.postprocess(row, tokens, burst.steps, window, len(own))
                if own and not sequence.finished:
                    setting = burst.decision.shape.setting
                    outputs.append((sequence, self._output(row, sequence, own, setting)))
                    if sequence.all_read is not None:
                        sequence.all_read.clear()
        hand_over(outputs)
        self._learn(burst, gave, timed)

    def _correct_mixed(self, burst: _InFlight, taken: float) -> None:
        """Learns what prompts add to a step from a burst that nothing else was done beside."""
        assert self._device is not None
        assert self._costs is not None
        expected, shape = burst.mixed_seconds, burst.decision.shape
        if expected is None or not burst.alone or burst.chunk_seconds > burst.steps * expected:
            return
        forecast = burst.decision.forecast
        own = self._costs.seconds(shape, burst.cached) if forecast is None else forecast.seconds
        found = min(taken / burst.steps - own, PAUSE * (own + expected))
        known = self._device.mixed_seconds
        new = max(known[shape] + _NEW_MIXED * (found - expected), 0.0)
        self._device.mixed_seconds = {**known, shape: new}

    def _learn(
        self, burst: _InFlight, gave: list[list[tuple[Sequence, RowResult]]], timed: Timed | None
    ) -> None:
        """Learns from the steps of a burst."""
        if timed is not None and burst.decision.forecast is None:
            assert self._costs is not None
            self._costs.observe(burst.decision.shape, burst.cached, timed.seconds, timed.share)
        with self._lock:
            for step in gave:
                self.speculation.observe_step(burst.decision, step, timed, burst.cached)
                for sequence, result in step:
                    if result.done:
                        self.speculation.ended(sequence)

    def _output(
        self, row: Row, sequence: Sequence, results: list[RowResult], setting: str
    ) -> Tokens:
        """What steps gave a sequence, counted; its row is free if that was all."""
        request, parameters = sequence.request, sequence.parameters
        assert parameters is not None
        sequence.first_token = sequence.first_token or self._last_output
        ids: list[int] = []
        logprobs: list[Logprob] = []
        counts = [len(result.tokens) for result in results]
        drafted = [result.nodes for result in results]
        accepted = [min(each.accepted, own) for each, own in zip(results, counts, strict=True)]
        for each in (sequence.statistics, self._totals):
            each.count_steps(counts, drafted, accepted)
        for result in results:
            sequence.recent.note(result.tokens, result.accepted, setting, result.tree)
            ids += result.tokens
            if request.logprobs is not None:
                logprobs += (each.of_likeliest(request.logprobs) for each in result.logprobs)
        reason = None
        if results[-1].done:
            reason = "stop" if ids[-1] in parameters.end_ids else "length"
            reason = "error" if sequence.grammar_error else reason
            self._totals.count_target(sequence.tpot_ms(self._last_output), request.max_tpot_ms)
            if self._earlier is not None:
                self._earlier.add(row.tokens[len(request.prompt) :])
            self._finish(row, sequence)
        return Tokens(tuple(ids), tuple(logprobs), reason)

    def _finish(self, row: Row, sequence: Sequence) -> None:
        sequence.finished = True
        forget(sequence)
        self._scheduler.free(row)

    def _end(self, row: Row, sequence: Sequence) -> None:
        """The end of one that wants no tokens."""
        with self._lock:
            self._finish(row, sequence)
        hand_over([(sequence, Tokens((), finish_reason="length"))])


def _measure_first(device: Device, plan: Plan, known: Measured | None) -> None:
    """What the first programs cost, as far as it must be known to serve."""
    if known is None:
        alone = measuring.whole(measuring.chunks_alone(device, plan))
        device.chunk_seconds = {size: (seconds, 0.0) for size, seconds in alone.items()}
        device.batch_seconds = measuring.whole(measuring.batch(device, plan))
        empty = measuring.whole(measuring.steps(device, plan))
        device.step_costs = {shape: Cost(seconds) for shape, seconds in empty.items()}
        device.mixed_seconds = measuring.whole(measuring.mixed(device, plan, empty))
        device.begin_all(0)
    else:
        device.chunk_seconds, device.batch_seconds = known.chunk_seconds, known.batch_seconds
        device.mixed_seconds = {s: known.mixed_seconds[s] for s in plan.mixed_steps}
        device.step_costs = {shape: known.step_costs[shape] for shape in plan.steps}


def setup_of(target: Model, drafter: Drafter, sizes: Sizes, verify: str = AUTO) -> Setup:
    """What is static in the programs of an engine whose caches have such sizes."""
    config = target.config
    rules = {name: rule_of(verify, drafter.of_setting(name)) for name in drafter.settings}
    parameters = check_request(Request(prompt=[0], max_new_tokens=1), config, config.max_positions)
    layout = layout_of(target, drafter)
    return Setup(rules, sizes.slots, parameters, MAX_LOGPROBS, layout, sizes.paging)


def sizes_for(drafter: Drafter, rows: int, tokens: int, shards: int) -> Sizes:
    """The sizes of an engine's caches where rows hold so many tokens, all at the same time."""
    size = default_page_size(shards)
    slots = slots_of(tokens, drafter, max(_chunks()), size)
    paging = paging_of(drafter, rows, slots, rows * slots, size)
    return Sizes(tokens, slots, texts_of(drafter, rows, size), paging)


def steps_of(
    drafter: Drafter, rows: int, shards: int = 1
) -> list[tuple[StepShape, PrefillBatch | None]]:
    """The steps of an engine of so many rows on `shards` devices, each a program, and what it reads
    of prompts.
    """
    own, mixed = _speculation(drafter, rows, None, Options(), shards), _mixed_of(rows, shards)
    steps: list[tuple[StepShape, PrefillBatch | None]] = [(shape, None) for shape in own.shapes]
    return steps + [(shape, mixed) for shape in _mixed_steps(own) if mixed is not None]


def _speculation(
    drafter: Drafter, rows: int, columns: int | None, options: Options, shards: int = 1
) -> Speculation:
    on_cpu = platform() == "cpu"
    if columns is None:
        columns = _CPU_COLUMNS if on_cpu else WIDTHS[-1]
    row_factor = _CPU_ROW_FACTOR if on_cpu else _ROW_FACTOR
    if shards > 1:
        row_factor = None  # which rows decode says how many of them a device has
    return Speculation(drafter, rows, row_factor, columns, options)


def _chunks() -> tuple[int, ...]:
    """Numbers of a prompt's tokens that are read at once."""
    return CHUNKS if platform() == "cpu" else (*CHUNKS, _LARGEST_CHUNK)


def _batch_of(rows: int) -> PrefillBatch | None:
    """The pass over prompts of several of so many rows."""
    own, most = (_CPU_BATCH, rows) if platform() == "cpu" else (_BATCH, rows // _ROWS_A_PROMPT)
    return own._replace(rows=min(most, own.rows)) if most > 1 else None


def _mixed_steps(speculation: Speculation) -> list[StepShape]:
    """The steps that have programs which read prompts, too.

    On a CPU trees compute so much that prompts cost as much beside them as in chunks: with a chain
    of 7 the bundled pair was 0.94, grown to 100M 0.96 times as fast so. Plain decoding there waits
    for weights: 1.00 and 1.09 times (8 clients, two cores of an AMD EPYC, jax 0.10.2, 2026-11-28;
    `python -m benchmarks.serving.engine`).
    """
    every = platform() != "cpu"
    own = speculation.mixed_shapes.items()
    return [shape for name, shape in own if every or not speculation.settings[name].nodes]


def _mixed_of(rows: int, shards: int) -> PrefillBatch | None:
    """What steps of so many rows, on so many devices, read of prompts."""
    if rows == 1:
        return None
    own = _CPU_MIXED if platform() == "cpu" else _MIXED
    most = own.rows if shards == 1 else 1  # each device has some of the rows
    return own._replace(rows=max(1, min(rows // _ROWS_A_PROMPT, most)))
