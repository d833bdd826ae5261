"""A server with a virtual clock: the policy and the scheduler of the engine over a cost model.

What is simplified: a step's tokens are read before the next one is decided (the engine hands over
one ahead); every row takes all its tokens (none ends sooner); nothing is copied from row to row;
the queue is without end; the draft reads the texts of several rows one after the other.
"""

import dataclasses
import random
from collections import Counter, abc, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.simulation.machines import Machine
from benchmarks.simulation.workload import Arrival, Truth
from specjax.engine.request import Request
from specjax.engine.scheduler import Chunk, Row, Scheduler, state_of
from specjax.engine.sequence import Sequence
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
)
from specjax.goodput.shapes import narrower, shapes_of

_LOOKED = 8
"""Steps between looks for a text that the draft could read, as in the engine."""
_MARKED = 50
"""Steps between the marks of a result."""
_PAUSE = 20.0
"""Times as long as usual that a step takes in which the machine pauses."""
_TOKENS = [0] * 65536

SETTINGS = (
    DraftSetting(PLAIN, 0, 0, True),
    *(DraftSetting(f"chain:{n}", n, n, True, True) for n in (1, 3, 7)),
    *(DraftSetting(f"specexec:{n}", n, min(n, 16), False, True) for n in (7, 15, 31)),
    DraftSetting("lookup:7", 7, 7),
)
"""What a server chooses from, as the bundled pair's does."""


@dataclasses.dataclass(frozen=True)
class World:
    """What is true, whatever the policy believes.

    Attributes:
      machine: that runs the steps.
      truth: how drafts fare.
      factors: times as long as on the machine that steps of a setting take.
      noise: standard deviation of the logarithm of a step's seconds.
      pauses: share of steps in which the machine pauses.
    """

    machine: Machine
    truth: Truth = Truth()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    noise: float = 0.1
    pauses: float = 0.0005


class Served(NamedTuple):
    """A request that has ended, when its first tokens came and when its last."""

    of: Arrival
    first: float
    end: float

    @property
    def latency(self) -> float:
        """Seconds from its arrival to its last token."""
        return self.end - self.of.at

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first - self.of.at

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.end - self.first) / max(self.of.tokens - 1, 1)


class Mark(NamedTuple):
    """Steps so far, the tokens that they gave, and the seconds in which the server was busy."""

    steps: int
    tokens: int
    busy: float


@dataclasses.dataclass
class Result:
    """What became of a load.

    Attributes:
      served: its requests, as they ended.
      seconds: from the first arrival to the last token.
      busy: of them, those in which a request ran; of all replicas together.
      steps: by their settings.
      tokens: that were made.
      row_steps: steps of rows: one step of eight rows is eight.
      marks: every fifty steps, of the first replica.
      probing: seconds of steps and readings that the policy made to learn.
    """

    served: list[Served] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    steps: Counter[str] = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    row_steps: int = 0
    marks: list[Mark] = dataclasses.field(default_factory=list)
    probing: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens a second while a request ran."""
        return self.tokens / self.busy if self.busy else 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second from the first arrival to the last token."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row is given in a step."""
        return self.tokens / max(self.row_steps, 1)

    @property
    def mean_latency(self) -> float:
        """Seconds of a request."""
        return sum(each.latency for each in self.served) / max(len(self.served), 1)

    @property
    def shares(self) -> dict[str, float]:
        """Of steps, by their settings, the most frequent first."""
        total = max(sum(self.steps.values()), 1)
        return {name: count / total for name, count in self.steps.most_common()}

    @property
    def targets_met(self) -> float:
        """The share of requests with a target of seconds a token that had them in time."""
        asked = [each for each in self.served if each.of.max_tpot_ms is not None]
        met = sum(1000 * each.tpot <= (each.of.max_tpot_ms or 0.0) for each in asked)
        return met / len(asked) if asked else 1.0

    def quantile(self, share: float, of: Callable[[Served], float]) -> float:
        """A quantile of what a function gives of each request."""
        found = sorted(map(of, self.served))
        return found[min(int(share * len(found)), len(found) - 1)] if found else 0.0

    def goodput_after(self, steps: int) -> float:
        """Goodput after so many steps."""
        first = next((mark for mark in self.marks if mark.steps >= steps), None)
        if first is None or self.marks[-1].busy <= first.busy:
            return self.goodput
        last = self.marks[-1]
        return (last.tokens - first.tokens) / (last.busy - first.busy)


def controller_of(
    machine: Machine,
    rows: int,
    settings: abc.Sequence[DraftSetting] = SETTINGS,
    *,
    columns: int = 64,
    row_factor: int | None = 2,
    options: Options = Options(),
) -> Controller:
    """A controller that was given a machine's costs."""
    shapes = shapes_of(settings, rows, row_factor, columns)
    costs = all_costs(machine.step, settings, shapes, options.packing)
    return Controller(
        settings, costs, machine.catch_up, rows, chunks=machine.chunks, options=options
    )


def all_costs(
    step: Callable[[StepShape], Cost],
    settings: abc.Sequence[DraftSetting],
    shapes: abc.Sequence[StepShape],
    packing: bool = True,
) -> dict[StepShape, Cost]:
    """What steps cost of programs, and of those of fewer columns that an engine adds for that."""
    costs, more = {}, shapes
    while more:
        costs |= {shape: step(shape) for shape in more}
        seconds = {shape: cost.seconds for shape, cost in costs.items()}
        more = narrower(settings, seconds) if packing else []
    return costs


def fixed(name: str, rows: int, settings: abc.Sequence[DraftSetting] = SETTINGS) -> FixedPolicy:
    """The policy of always the same setting."""
    return FixedPolicy(next(each for each in settings if each.name == name), rows)


def simulate(
    policy: Policy,
    load: abc.Sequence[Arrival],
    world: World,
    rows: int,
    settings: abc.Sequence[DraftSetting] = SETTINGS,
    seed: int = 0,
) -> Result:
    """Serves a load; the same arguments give the same result.

    Args:
      policy: a new one, as it learns.
      load: requests, in the order of their arrival.
      world: what is true.
      rows: of the server.
      settings: that the policy uses.
      seed: of the random numbers.
    """
    return _Server(policy, world, rows, settings, seed).serve(load)


def simulate_replicas(
    policies: abc.Sequence[Policy],
    load: abc.Sequence[Arrival],
    world: World,
    rows: int,
    settings: abc.Sequence[DraftSetting] = SETTINGS,
    seed: int = 0,
) -> Result:
    """Serves a load with a server for each policy; requests go to one after the other."""
    count = len(policies)
    found = [
        simulate(policy, load[place::count], world, rows, settings, seed * count + place)
        for place, policy in enumerate(policies)
    ]
    total = Result(marks=found[0].marks)
    for each in found:
        total.served += each.served
        total.busy += each.busy
        total.steps += each.steps
        total.tokens += each.tokens
        total.row_steps += each.row_steps
        total.probing += each.probing
    total.seconds = max(each.end for each in total.served) - load[0].at if load else 0.0
    return total


@dataclasses.dataclass(eq=False)
class _Guest:
    """A request in the server."""

    of: Arrival
    effect: float
    text_effect: float
    first: float | None = None


class _Server:
    """A server's turns, as in `specjax.engine.engine`, with the time that they take added up."""

    def __init__(
        self,
        policy: Policy,
        world: World,
        rows: int,
        settings: abc.Sequence[DraftSetting],
        seed: int,
    ) -> None:
        self._policy, self._world = policy, world
        self._settings = {setting.name: setting for setting in settings}
        self._costs = {
            shape: (cost.seconds * world.factors.get(shape.setting, 1.0),
                    cost.per_token * world.factors.get(shape.setting, 1.0))
            for shape, cost in world.machine.costs(policy.shapes).items()
        }  # fmt: skip
        self._scheduler = Scheduler(rows, reuses=False)
        self._rng = random.Random(seed)
        self._coming: deque[Arrival] = deque()
        self._guests: dict[Sequence, _Guest] = {}
        self._now = self._step_seconds = 0.0
        self._alone, self._targets, self._count = False, False, 0
        self._result = Result()
        self._chunk_seconds = 0.0

    def serve(self, load: abc.Sequence[Arrival]) -> Result:
        """What becomes of a load."""
        result, at = self._result, self._scheduler
        self._coming.extend(load)
        self._targets = any(each.max_tpot_ms is not None for each in load)
        self._now = load[0].at if load else 0.0
        began = self._now
        while self._coming or at.running or at.waiting:
            if not (at.running or at.waiting):
                self._now, self._alone = max(self._now, self._coming[0].at), False
            before = self._now
            self._turn()
            result.busy += self._now - before
            if self._count % _MARKED == 0:
                self._mark()
        result.seconds = self._now - began
        self._mark()
        if isinstance(self._policy, Controller):
            result.probing = self._policy.probing_seconds
        return result

    def _mark(self) -> None:
        marks, result = self._result.marks, self._result
        if not marks or marks[-1].steps < self._count:
            marks.append(Mark(self._count, result.tokens, result.busy))

    def _turn(self) -> None:
        """New requests into rows, tokens of prompts before a step or in its pass, a step."""
        self._admit()
        at, machine = self._scheduler, self._world.machine
        costs, batch = machine.chunks, machine.mixed
        mixes = at.mixes(costs, batch, machine.mixed_seconds, self._step_seconds)
        if not mixes or at.falls_behind(batch):
            self._read_chunk()
        beside = at.beside(batch, 1) if mixes and batch is not None else []
        if rows := at.decoding:
            self._step(rows, *beside)

    def _admit(self) -> None:
        at, coming = self._scheduler, self._coming
        while coming and coming[0].at <= self._now and len(at.waiting) < len(at.rows):
            of = coming.popleft()
            asked = Request(
                prompt=_TOKENS[: of.prompt], max_new_tokens=of.tokens, temperature=of.temperature,
                max_tpot_ms=of.max_tpot_ms,
            )  # fmt: skip
            truth = self._world.truth
            guest = _Guest(of, truth.draw_effect(self._rng), truth.draw_text_effect(self._rng, of))
            sequence = Sequence(asked)
            self._guests[sequence] = guest
            at.add(sequence)
        while at.waiting and at.admit(self._may_join) is not None:
            self._alone = False

    def _may_join(self, request: Request) -> bool:
        if not self._targets:
            return True
        states = [row.state() for row in self._scheduler.rows if row.sequence]
        return self._policy.may_admit([*states, state_of(request)])

    def _read_chunk(self) -> None:
        chunk = self._scheduler.chunk(self._world.machine.chunks, self._step_seconds)
        if chunk is None:
            return
        machine = self._world.machine
        together = self._scheduler.together(
            machine.chunks, machine.batch, machine.batch_seconds, self._step_seconds
        )
        own, more = machine.chunks[chunk.size]
        seconds = machine.batch_seconds if together else own + more * chunk.start
        self._read(seconds, together or [chunk])

    def _read(self, seconds: float, chunks: abc.Sequence[Chunk]) -> None:
        """Prompts are read in so many seconds."""
        self._chunk_seconds += seconds
        self._now += seconds
        for each in chunks:
            if self._scheduler.decoding:
                self._policy.prompt_read(len(each.tokens), each.left)
            self._scheduler.read(each)

    def _step(self, rows: abc.Sequence[Row], beside: abc.Sequence[Chunk] = ()) -> None:
        policy, alone = self._policy, self._alone
        decision = policy.standing([row.sequence for row in rows])
        if decision is None:
            decision = policy.decide([row.state() for row in rows])
        setting = self._settings[decision.shape.setting]
        alone = not self._prepare(setting, rows) and alone
        cached = sum([len(row.tokens) for row in rows])
        self._scheduler.step(decision.shape.rows)
        seconds = self._seconds(decision.shape, cached)
        self._now += seconds
        if beside:
            self._read(self._world.machine.mixed_seconds, beside)
        self._alone = not self._probe(setting, rows)
        chunks, self._chunk_seconds = self._chunk_seconds, 0.0
        known = decision.timed(seconds + chunks, chunks) if alone else None
        self._process(decision, setting, rows, known, cached)

    def _seconds(self, shape: StepShape, cached: int) -> float:
        """How long a step truly takes."""
        own, more = self._costs[shape]
        seconds = (own + more * cached) * self._rng.lognormvariate(0.0, self._world.noise)
        return seconds * (_PAUSE if self._rng.random() < self._world.pauses else 1.0)

    def _prepare(self, setting: DraftSetting, rows: abc.Sequence[Row]) -> bool:
        """Lets the draft read what it lacks before a step that runs it; whether it had to."""
        if not setting.runs_draft:
            for row in rows:
                row.leave_draft()
            return False
        behind = [row for row in rows if not row.current and row.lag]
        for row in behind:
            self._read_text(row)
        for row in rows:
            row.current = True
        return bool(behind)

    def _read_text(self, row: Row) -> None:
        """The draft reads what it lacks of a row's text, and is seen to fare so and so."""
        assert row.sequence is not None
        guest = self._guests[row.sequence]
        drawn = [each for each in self._settings.values() if each.drawn and each.nodes]
        deepest = max(drawn, key=lambda each: each.depth, default=None)
        lag, known = row.lag, sorted(self._world.machine.catch_up.items())
        while lag > 0:
            size, seconds = next((each for each in known if each[0] >= lag), known[-1])
            self._now += seconds
            if deepest is not None:
                chances = self._chances(guest, deepest, min(size, lag))
                self._policy.caught_up(row.sequence, chances)
            lag -= size
        row.drafted = len(row.tokens)

    def _chances(self, guest: _Guest, deepest: DraftSetting, count: int) -> list[float]:
        """How likely tokens of a text would have been accepted: it was or was not, if greedy."""
        truth = self._world.truth
        chance = truth.hazards(
            deepest,
            deepest.nodes,
            guest.of,
            guest.effect + guest.text_effect,
            truth.change(self._now),
        )[0]
        hits = [float(self._rng.random() < chance) for _ in range(count)]
        return hits if guest.of.temperature == 0 else [0.5 * (hit + chance) for hit in hits]

    def _probe(self, setting: DraftSetting, rows: abc.Sequence[Row]) -> bool:
        """Lets the draft read a row's text though nothing is drafted; whether it did."""
        if setting.runs_draft or self._count % _LOOKED:
            return False
        place = self._policy.row_to_probe([row.state() for row in rows])
        if place is None:
            return False
        self._read_text(rows[place])
        return True

    def _process(
        self,
        decision: Decision,
        setting: DraftSetting,
        rows: abc.Sequence[Row],
        timed: Timed | None,
        cached: int,
    ) -> None:
        """Gives the rows their tokens, and tells the policy."""
        self._count += 1
        self._result.steps[setting.name] += 1
        self._result.row_steps += len(rows)
        own, more = self._costs[decision.shape]
        forecast = decision.forecast
        self._step_seconds = own + more * cached if forecast is None else forecast.seconds
        change = self._world.truth.change(self._now) if setting.nodes else 0.0
        room = min(setting.nodes, decision.shape.width // len(rows) - 1)
        nodes = decision.depths if setting.drawn else (room,) * len(rows)
        outcomes = [
            self._outcome(row, setting, own, change) for row, own in zip(rows, nodes, strict=True)
        ]
        self._policy.observe_step(decision, outcomes, timed, cached)
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.ended:
                self._end(row)

    def _outcome(self, row: Row, setting: DraftSetting, nodes: int, change: float) -> Outcome:
        """What a row is given of a tree of so many nodes."""
        assert row.sequence is not None
        guest = self._guests[row.sequence]
        truth, accepted = self._world.truth, 0
        if nodes > 0:
            draw, effect = self._rng.random, guest.effect + guest.text_effect
            for chance in truth.hazards(setting, nodes, guest.of, effect, change):
                if draw() >= chance:
                    break
                accepted += 1
        tokens = min(accepted + 1, row.sequence.left)
        self._scheduler.postprocess(row, _TOKENS[:tokens])
        self._result.tokens += tokens
        guest.text_effect = truth.next_text_effect(self._rng, guest.of, guest.text_effect, tokens)
        if guest.first is None:
            guest.first = self._now
        ended = row.sequence.left == 0
        return Outcome(row.sequence, tokens, nodes, min(accepted, tokens), ended)

    def _end(self, row: Row) -> None:
        assert row.sequence is not None
        guest = self._guests.pop(row.sequence)
        assert guest.first is not None
        self._result.served.append(Served(guest.of, guest.first, self._now))
        self._policy.ended(row.sequence)
        self._scheduler.free(row)
