"""Continuous batching over the compiled step: requests come and go, rows stay."""

import asyncio
import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
from rich.progress import Progress

from pallas_kernels.tree_attention.xla import reads_rows_in_place
from specjax.base.progress import progress_bars
from specjax.base.pytree import replace
from specjax.decoding.extending import can_truncate
from specjax.decoding.request import check_drafter, check_memory, memory_plan, rule_of
from specjax.draft.drafter import Drafter
from specjax.draft.plain import PlainDrafter
from specjax.engine import measured, measuring
from specjax.engine.checks import check_request, check_requests, key_of
from specjax.engine.device import COMPILED_AT_ONCE, Device, Measured, Pending, Plan, RowResult
from specjax.engine.joining import Joining, Part
from specjax.engine.programs import Setup
from specjax.engine.report import report
from specjax.engine.request import (
    MAX_LOGPROBS,
    EngineClosedError,
    Request,
    Statistics,
    Tokens,
)
from specjax.engine.scheduler import Admission, Chunk, Row, Scheduler
from specjax.engine.sequence import Sequence, hand_over
from specjax.engine.speculation import Speculation
from specjax.engine.watch import Watched
from specjax.goodput.controller import Options
from specjax.goodput.costs import Cost, StepCosts
from specjax.goodput.policy import Decision, Timed
from specjax.models import memory
from specjax.models.transformer import Model
from specjax.parallel.mesh import DATA, layout_of, size_of
from specjax.verify.rules import AUTO

_logger = logging.getLogger(__name__)

CHUNKS = (8, 32, 128)
"""Tokens of a prompt that a program reads at a time."""

_LARGEST_CHUNK = 512
"""On an accelerator also so many, which is where most of them compute at full rate."""

_SCORED = 16
"""The same where log probabilities of the prompt are asked for."""

_SLOT_MULTIPLE = 128
_LEAST_CONTEXT, _SHARE_FOR_TEXTS = 2048, 0.8
"""Of the context that is taken where none is named: tokens at least, unless the model has fewer;
and the share of free memory that texts may have then. Programs and compiling them need the rest."""


class _InFlight(NamedTuple):
    """A step whose output is not processed yet, what was decided for it, and who was in its rows.

    `cached` are the tokens that they held. `alone` says whether the device did nothing else since
    the step before but chunks of prompts, which were to take `chunk_seconds`.
    """

    pending: Pending
    scheduled: list[tuple[Row, Sequence]]
    decision: Decision
    cached: int
    alone: bool
    chunk_seconds: float

    def timed(self, taken: float) -> Timed | None:
        """How long the step took, of the time since the one before; None if that cannot be said."""
        return self.decision.timed(taken, self.chunk_seconds) if self.alone else None


class Engine:
    """Requests in the rows of one compiled step, each distributed as the target alone would write.

    A thread of its own runs the device. The next step is handed to the device before the last
    one's tokens are read; prompts are read in chunks between steps. That thread compiles nothing.

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
      columns: of a `SwitchingDrafter`'s steps, at most.
      options: what the choice of its settings leaves out.

    Raises:
      ValueError: the drafter or the rule does not go with the target, or the mesh spreads rows.
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
        columns: int = 64,
        options: Options = Options(),
    ) -> None:
        config = target.config
        drafter = PlainDrafter(config.vocab_size) if drafter is None else drafter
        check_drafter(target, drafter)
        if rows < 1:
            raise ValueError(f"rows is {rows}; it must be at least 1.")
        most = config.max_positions
        if max_model_len is not None and not 2 <= max_model_len <= most:
            raise ValueError(
                f"max_model_len is {max_model_len}; it must lie in [2, {most}], the model's "
                "context."
            )
        self.vocab_size = config.vocab_size
        layout = layout_of(target, drafter)
        if layout is not None and size_of(layout.mesh, DATA) > 1:
            raise ValueError(
                f"mesh axis data={size_of(layout.mesh, DATA)} spreads rows over devices; those of "
                "an engine come and go one by one, so use the axes model and draft."
            )
        if layout is not None and layout.mesh.is_multi_process:
            raise ValueError("the mesh spans several processes; an engine runs in one of its own.")
        accelerator = jax.default_backend() != "cpu"
        self._chunks = (*CHUNKS, _LARGEST_CHUNK) if accelerator else CHUNKS
        rule = rule_of(verify, drafter)

        def planned(tokens: int) -> memory.Plan:
            return memory_plan(target, drafter, rule, rows, max(self._chunks), slots_for(tokens))

        def slots_for(tokens: int) -> int:
            room = tokens + max(*self._chunks, drafter.window)
            return -(-room // _SLOT_MULTIPLE) * _SLOT_MULTIPLE

        self.max_model_len = max_model_len or _most_that_fits(most, planned)
        slots = slots_for(self.max_model_len)
        try:
            check_memory(target, drafter, rule, rows, max(self._chunks), slots)
        except ValueError as error:
            raise ValueError(f"{error} Use fewer rows or a smaller max_model_len.") from None
        rules = {name: rule_of(verify, drafter.of_setting(name)) for name in drafter.settings}
        parameters = check_request(Request(prompt=[0], max_new_tokens=1), config, most)
        setup = Setup(rules, slots, parameters, MAX_LOGPROBS, layout)
        self.rule = rule
        self._config, self._rows = config, rows
        self._make_device = partial(Device, target, drafter, setup, rows)
        self._costs_of = partial(measured.name_of, (target, drafter), slots=slots)
        self._device: Device | None = None
        self._reuses = can_truncate(target, drafter)
        self._scheduler = Scheduler(
            rows, reuses=self._reuses, max_requests=max_waiting, max_tokens=max_waiting_tokens
        )
        # Where rows are not read in place, fewer rows than all would be copied out.
        subsets = reads_rows_in_place()
        self.speculation = Speculation(drafter, rows, subsets, columns, options)
        self._window = drafter.window
        self._aborted: deque[Sequence] = deque()
        self._in_flight: _InFlight | None = None
        self._alone, self._last_output, self._step_seconds = False, 0.0, 0.0
        self._chunk_seconds = 0.0
        self._costs: StepCosts | None = None
        self._joining: Joining | None = None
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
        """The share of the caches' tokens that running requests hold."""
        held = sum(len(row.tokens) for row in self._scheduler.rows if row.sequence is not None)
        return held / (self._rows * self.max_model_len)

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
        """Drafts with one setting from the next step on; None lets the engine choose again.

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
            own.shapes, self._chunks, _SCORED, own.catch_ups, self.max_model_len, self._reuses
        )
        first = plan._replace(steps=own.first_shapes, catch_ups=())
        counted = plan if wait else first
        total = len(counted.steps) + len(counted.chunks) + len(counted.catch_ups)
        task = progress.add_task("compile", total=total + 3 + self._reuses)

        def done(what: str) -> None:
            progress.update(task, description=f"compile {what}", advance=1)

        for what in device.compile(first):
            done(what)
        known = self._known(plan)
        _measure_first(device, first, known)
        own.begin(device)
        self._costs = StepCosts(device.step_costs)
        self._step_seconds = min(cost.seconds for cost in device.step_costs.values())
        parts = [Part(name, self._part_of(plan, name)) for name in own.later]
        joining = self._joining = Joining(
            device, plan, parts, known, self._join, partial(self._keep, plan, known),
            self._forget_rows, self._wake, say,
        )  # fmt: skip
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
        return plan._replace(steps=own.later[name], catch_ups=reads)

    def _join(self, costs: Measured) -> None:
        assert self._device is not None
        assert self._costs is not None
        self._costs.join(costs.step_costs)
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
                request, parameters, loop=loop, queue=asyncio.Queue(), abort=self._abort
            )
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
            self._scheduler.add(*(each for each in sequences if not each.finished))
            self._lock.notify()

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
                    self._scheduler.free(row)
            self._scheduler.waiting.clear()
        hand_over((sequence, Tokens((), finish_reason=reason)) for sequence in left)

    def _turn(self) -> bool:
        """New requests into rows, a chunk of a prompt, a step, and what the last step gave."""
        assert self._device is not None
        assert self._joining is not None
        with self._lock:
            while not (self._stops or self._has_work() or self._joining.has_work):
                self._lock.wait()
            if self._stops:
                return False
            idle = not self._has_work()
        if idle or self._joining.has_work:
            self._joining.turn(idle)
        if idle:
            return True
        with self._lock:
            while self._aborted:
                sequence = self._aborted.popleft()
                self._scheduler.abort(sequence)
                self.speculation.ended(sequence)
            admitted = list(iter(partial(self._scheduler.admit, self._may_join), None))
        for each in admitted:
            self._admit(each)
        if self._in_flight is None:  # chunks alone: no more of them is handed over than one
            self._device.wait()
        self._read_chunk()
        step = self._step()
        last, self._in_flight = self._in_flight, step
        if last is not None:
            self._process(last)
        return True

    def _has_work(self) -> bool:
        at = self._scheduler
        return bool(at.waiting or at.running or self._aborted or self._in_flight)

    def _may_join(self, request: Request) -> bool:
        return self.speculation.may_join(self._scheduler.rows, request)

    def _admit(self, admission: Admission) -> None:
        assert self._device is not None
        row, source, common = admission
        assert row.sequence is not None
        row.sequence.admitted = time.monotonic()
        with self._lock:
            self._totals.prompt_tokens += len(row.sequence.request.prompt)
        self._alone = False
        if source is None:
            self._device.begin(row.number, row.tokens[0])
        else:
            self._copy(row, row.sequence, source, common)
        if not row.sequence.prefilling:
            self._begin_decoding(row, row.sequence)

    def _copy(self, row: Row, sequence: Sequence, source: int, common: int) -> None:
        """A row takes over what another holds of its prompt."""
        assert self._device is not None
        with self._lock:
            self._totals.cached_tokens += common - sequence.statistics.cached_tokens
            sequence.statistics.cached_tokens = common
        self._device.copy(source, row.number, common, row.tokens[-1])

    def _read_chunk(self) -> None:
        assert self._device is not None
        with self._lock:
            taken = self._scheduler.prefix()
            chunk = self._scheduler.chunk(self._device.chunk_seconds, self._step_seconds)
        if chunk is None:
            return
        row, sequence = chunk.row, chunk.row.sequence
        assert sequence is not None
        own, more = self._device.chunk_seconds[chunk.size]
        self._chunk_seconds += own + more * chunk.start
        if taken is not None and taken.source is not None:
            self._copy(row, sequence, taken.source, taken.common)
        if sequence.request.prompt_logprobs is not None:
            self._alone = False
            tokens = sequence.request.prompt[chunk.start : chunk.start + _SCORED]
            chunk = chunk._replace(tokens=list(tokens), size=_SCORED)
        self._extend(chunk, sequence)
        if self._scheduler.decoding:
            self.speculation.prompt_read(chunk)
        if self._scheduler.read(chunk):
            self._begin_decoding(row, sequence)

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
        self._device.assign(row.number, sequence.request, sequence.parameters)

    def _step(self) -> _InFlight | None:
        assert self._device is not None
        rows, own = self._scheduler.decoding, self.speculation
        if not rows:
            return None
        with self._lock:
            decision = own.decide(rows)
        cached = sum(len(row.tokens) for row in rows)
        self._step_seconds = self._expected_seconds(decision, cached)
        read = own.prepare(self._device, decision, rows)
        own.calibrate(self._device)
        with self._lock:
            plan = self._scheduler.step(decision.shape.rows)
        scheduled = [(row, row.sequence) for row in rows if row.sequence is not None]
        scored = [sequence.request.logprobs is not None for _, sequence in scheduled]
        numbers = [row.number for row in rows]
        pending = self._device.advance(
            decision.shape, numbers, plan.filling, decision.depths, scored
        )
        alone = self._alone and not read and self._in_flight is not None
        self._alone = not own.probe(self._device, decision, rows)
        chunks, self._chunk_seconds = self._chunk_seconds, 0.0
        return _InFlight(pending, scheduled, decision, cached, alone, chunks)

    def _expected_seconds(self, decision: Decision, cached: int) -> float:
        """How long a step takes, as it is forecast or else as its program's steps took."""
        assert self._costs is not None
        if decision.forecast is not None:
            return decision.forecast.seconds
        return self._costs.seconds(decision.shape, cached)

    def _process(self, step: _InFlight) -> None:
        """Hands on what a step gave; what it gave those who have left is dropped."""
        assert self._device is not None
        results = self._device.results(step.pending)
        now = time.perf_counter()
        timed = step.timed(now - self._last_output)
        self._last_output = now
        outputs, gave = [], []
        with self._lock:
            for (row, sequence), result in zip(step.scheduled, results, strict=True):
                if row.sequence is sequence:
                    gave.append((sequence, result))
                    self._scheduler.postprocess(row, result.tokens)
                    if result.tokens and not sequence.finished:
                        setting = step.decision.shape.setting
                        outputs.append((sequence, self._output(row, sequence, result, setting)))
        hand_over(outputs)
        self._learn(step, gave, timed)

    def _learn(
        self, step: _InFlight, gave: list[tuple[Sequence, RowResult]], timed: Timed | None
    ) -> None:
        if timed is not None and step.decision.forecast is None:
            assert self._costs is not None
            self._costs.observe(step.decision.shape, step.cached, timed.seconds, timed.share)
        with self._lock:
            self.speculation.observe_step(step.decision, gave, timed, step.cached)
            for sequence, result in gave:
                if result.done:
                    self.speculation.ended(sequence)

    def _output(self, row: Row, sequence: Sequence, result: RowResult, setting: str) -> Tokens:
        """What a sequence got, counted; its row is free if that was all."""
        request, parameters = sequence.request, sequence.parameters
        assert parameters is not None
        sequence.recent.note(result.tokens, result.accepted, setting, result.tree)
        sequence.first_token = sequence.first_token or self._last_output
        for each in (sequence.statistics, self._totals):
            each.count_step(
                len(result.tokens), result.nodes, min(result.accepted, len(result.tokens))
            )
        logprobs = ()
        if request.logprobs is not None:
            logprobs = tuple(each.of_likeliest(request.logprobs) for each in result.logprobs)
        reason = None
        if result.done:
            reason = "stop" if result.tokens[-1] in parameters.end_ids else "length"
            self._totals.count_target(sequence.tpot_ms(self._last_output), request.max_tpot_ms)
            self._finish(row, sequence)
        return Tokens(tuple(result.tokens), logprobs, reason)

    def _finish(self, row: Row, sequence: Sequence) -> None:
        sequence.finished = True
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
        empty = measuring.whole(measuring.steps(device, plan))
        device.step_costs = {shape: Cost(seconds) for shape, seconds in empty.items()}
        device.begin_all(0)
    else:
        device.chunk_seconds = known.chunk_seconds
        device.step_costs = {shape: known.step_costs[shape] for shape in plan.steps}


def _most_that_fits(positions: int, plan: Callable[[int], memory.Plan]) -> int:
    """The longest context, of `positions` at most, whose texts there is memory for.

    Below the least that is taken there may be none: then it is that.
    """
    least, spare = min(_LEAST_CONTEXT, positions), plan(positions).available

    def fits(tokens: int) -> bool:
        return spare is None or plan(tokens).beside_weights <= _SHARE_FOR_TEXTS * spare

    if fits(positions):
        return positions
    low, high = least // _SLOT_MULTIPLE, positions // _SLOT_MULTIPLE
    while low < high:
        half = (low + high + 1) // 2
        low, high = (half, high) if fits(half * _SLOT_MULTIPLE) else (low, half - 1)
    return max(least, low * _SLOT_MULTIPLE)
