"""Every method against plain decoding, over the same prompts, side by side."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from rich.progress import Progress

from pallas_kernels.machine import read_bandwidth
from specjax.base.sampling import Sampling, fold
from specjax.checkpoints.pair import Pair
from specjax.decoding.generate import Generation
from specjax.decoding.request import Request, prepare
from specjax.draft import Drafter
from specjax.measure import timing
from specjax.measure.profile import profile
from specjax.measure.prompts import Prompt
from specjax.measure.rows import BenchRow, PhaseSeconds
from specjax.measure.timing import Phases
from specjax.measure.workload import MIXED, Candidate, Temperature, Workload
from specjax.methods import records, registry
from specjax.methods.method import PLAIN, Setting
from specjax.models.quantized import in_dtype, quantized_as
from specjax.verify.rules import AUTO

_PHASE_REQUESTS = 8

Named: TypeAlias = tuple[Temperature, Candidate]
RowsSoFar: TypeAlias = Callable[[], list[BenchRow]]
Run: TypeAlias = tuple[Generation, float]


class Bucket(NamedTuple):
    """A compiled size: what the programs of a candidate have in common."""

    rows: int
    width: int
    outputs: int


@dataclasses.dataclass
class Tally:
    """What a candidate's runs add up to; `beside` are plain decoding's of the same rounds.

    `rates` are the tokens per second of each run; `parts` the seconds of a step by part, from one
    traced request.
    """

    seconds: float = 0.0
    steps: int = 0
    nodes: int = 0
    passes: int = 0
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    phases: list[Phases] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    beside: dict[Candidate, "Tally"] = dataclasses.field(default_factory=dict)

    def add(self, run: Generation, seconds: float) -> None:
        """Counts one generation and its wall time."""
        self.rates.append(int(run.lengths.sum()) / seconds)
        self.seconds += seconds
        self.steps += int(run.steps.sum())
        self.nodes += int(run.nodes.sum())
        self.passes += int(run.steps.max())
        self.outputs += [row[:n] for row, n in zip(run.tokens, run.lengths, strict=True)]

    @property
    def new_tokens(self) -> int:
        """All tokens emitted."""
        return sum(len(output) for output in self.outputs)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.new_tokens / self.seconds


class Bencher:
    """Models of one pair in the dtypes that a workload needs, and their drafters.

    With `phases` a step's phases are timed apart, with `traced` the loop is traced, too.
    """

    def __init__(
        self,
        workload: Workload,
        pair: Pair,
        progress: Progress | None = None,
        *,
        phases: bool = False,
        traced: bool = False,
    ) -> None:
        self.workload, self.pair = workload, pair
        self.progress = Progress(disable=True) if progress is None else progress
        self.phases, self.traced = phases, traced
        self.bandwidth = read_bandwidth() / 1e9  # before memory is needed for more targets
        self.targets = {str(pair.target.embedding.dtype): pair.target}
        if pair.target.is_whole:
            dtypes = sorted({*workload.plain_dtypes, *workload.dtypes})
            self.targets = {dtype: in_dtype(pair.target, dtype) for dtype in dtypes}
        self._drafters: dict[Setting, Drafter] = {}

    def drafter(self, candidate: Candidate) -> Drafter:
        """The drafter of a candidate."""
        named = candidate.setting
        if named not in self._drafters:
            self._drafters[named] = registry.build(named, self.pair, verify=self.workload.verify)
        return self._drafters[named]

    def request(
        self, candidate: Candidate, rows: Sequence[tuple[int, Prompt]], temperature: Temperature
    ) -> Request:
        """The request for a batch of numbered prompts."""
        workload = self.workload
        key = jax.random.key(workload.seed)
        number = np.asarray([index for index, _ in rows])
        return prepare(
            jax.vmap(lambda i: fold(key, i))(number),
            self.targets[candidate.dtype],
            self.drafter(candidate),
            [prompt.tokens for _, prompt in rows],
            max_new_tokens=workload.max_new_tokens,
            sampling=Sampling(temperatures_of(temperature, len(rows), workload.temperatures)),
            verify=AUTO if _is_plain(candidate) else workload.verify,
            stop_at_eos=workload.stop_at_eos,
        )

    def rows(
        self, batch: int, keep: Callable[[RowsSoFar], None] = lambda _: None
    ) -> list[BenchRow]:
        """A row of the report for every temperature and candidate.

        One compiled size after the other, and of each as many candidates at a time as a process
        can hold programs of, plain decoding always among them. After every round `keep` gets what
        makes the rows of what is measured so far.
        """
        batches = batches_of(self.workload.prompts, batch)
        candidates = self.workload.candidates(batch)
        temperatures = self.workload.temperatures_of(batch)
        requests = {
            (temperature, candidate): [
                self.request(candidate, rows, temperature) for rows in batches
            ]
            for temperature in temperatures
            for candidate in candidates
        }
        tallies = {named: Tally() for named in requests}
        made = partial(self._report, tallies, batch)
        sizes = [bucket_of(request) for request in requests[temperatures[0], candidates[0]]]
        task = self.progress.add_task(f"batch {batch}", total=len(batches) * len(requests))
        for size in sorted(set(sizes)):
            numbers = [number for number, other in enumerate(sizes) if other == size]
            first = {c: requests[temperatures[0], c][numbers[0]] for c in candidates}
            done: set[Candidate] = set()
            for group in self._groups(first):
                for number, temperature in itertools.product(numbers, temperatures):
                    turn = number % len(group)  # a drift of the machine hits all alike
                    runs = {
                        candidate: self._measure(
                            requests[temperature, candidate][number],
                            tallies[temperature, candidate],
                            size == statistics.mode(sizes) and candidate not in done,
                        )
                        for candidate in (*group[turn:], *group[:turn])
                    }
                    for candidate in set(group) - done:
                        _count(tallies[temperature, candidate], candidate, runs)
                        self.progress.advance(task)
                    keep(made)
                done.update(group)
        return made()

    def _report(self, tallies: dict[Named, Tally], batch: int) -> list[BenchRow]:
        """A row for every candidate that ran."""
        return [
            self._row(candidate, tally, batch, temperature)
            for (temperature, candidate), tally in tallies.items()
            if tally.rates
        ]

    def _groups(self, first: dict[Candidate, Request]) -> Iterator[list[Candidate]]:
        """Candidates whose programs fit into one process, warmed; plain ones are in every group.

        A loop is mapped in a thousand pieces or more, and Linux lets a process map 65,530.
        """
        plain = [candidate for candidate in first if _is_plain(candidate)]
        group: list[Candidate] = []
        for candidate in (*plain, *(c for c in first if not _is_plain(c))):
            if timing.mapped() > timing.MOST_MAPS and len(group) > len(plain):
                yield group
                jax.clear_caches()
                group = []
            for each in [candidate] if group or candidate in plain else [*plain, candidate]:
                timing.warm_up(first[each])
                group.append(each)
        yield group
        jax.clear_caches()

    def _measure(self, request: Request, tally: Tally, common: bool) -> Run:
        """Times one request, and its phases beside it if its size is the `common` one.

        That size stands for all: each costs several compilations, and the sizes of a set of prompts
        differ little.
        """
        run = timing.timed(request)
        if common and self.traced and not tally.parts:
            tally.parts = profile(request)
        # The phases are compiled for a single device.
        wanted = common and self.phases and request.layout is None
        if wanted and len(tally.phases) < _PHASE_REQUESTS:
            tally.phases.append(timing.phases(request))
        return run

    def _row(
        self, candidate: Candidate, tally: Tally, batch: int, temperature: Temperature
    ) -> BenchRow:
        """The report of one candidate.

        `speedup` is over the faster plain loop, `round_speedups` over that of the own dtype.
        """
        beside = max(plain.rate for plain in tally.beside.values())
        plain = tally.beside[Candidate(Setting(), candidate.dtype)]
        rounds = [rate / own for rate, own in zip(tally.rates, plain.rates, strict=True)]
        floor = timing.weight_bytes(self.targets[candidate.dtype]) / (self.bandwidth * 1e9)
        return BenchRow(
            setting=candidate.setting,
            nodes=self.drafter(candidate).num_slots - 1,
            temperature=temperature,
            batch=batch,
            dtype=candidate.dtype,
            quantization=quantized_as(self.pair.target),
            prompts=len(tally.outputs),
            new_tokens=tally.new_tokens,
            target_steps=tally.steps,
            tokens_per_step=tally.new_tokens / tally.steps,
            mean_nodes=tally.nodes / tally.steps,
            seconds=tally.seconds,
            tokens_per_second=tally.rate,
            plain_tokens_per_second=beside,
            speedup=tally.rate / beside,
            round_speedups=rounds,
            spread=records.spread(rounds),
            passes=tally.passes,
            repeated_8grams=timing.repeated(tally.outputs),
            profile=tally.parts or None,
            phases=_shares(tally, floor if _is_plain(candidate) else None)
            if tally.phases
            else None,
        )


def _shares(tally: Tally, floor: float | None) -> PhaseSeconds:
    """How the seconds of a candidate were spent.

    The phases, compiled apart and run in the same minutes, give the shares of a step; the
    seconds are these shares of the loop's wall time, which the prefill is no part of. What
    is left when phases are subtracted from the wall instead was between -11 and 14 % on a
    noisy machine; `phases_over_loop` says how far apart the two are. `floor` is what reading the
    weights once takes, for plain decoding.
    """
    phases = timing.typical(tally.phases)
    prefill = min(phases.prefill * len(tally.rates), tally.seconds)
    loop = tally.seconds - prefill
    share = loop / phases.step
    return PhaseSeconds(
        draft_seconds=phases.draft * share,
        target_seconds=phases.target * share,
        other_seconds=phases.rest * share,
        prefill_seconds=prefill,
        phases_over_loop=phases.step * tally.passes / loop if loop else None,
        step_over_bandwidth_floor=None if floor is None else loop / tally.passes / floor,
    )


def bucket_of(request: Request) -> Bucket:
    """The compiled size of a request."""
    rows, width = request.rows.prompt.shape
    return Bucket(rows, width, request.outputs)


def temperatures_of(
    temperature: Temperature, rows: int, all_of_them: Sequence[float]
) -> np.ndarray:
    """A temperature a row; mixed rows alternate between 0 and the highest."""
    if temperature == MIXED:
        return np.where(np.arange(rows) % 2, max(all_of_them), 0.0).astype(np.float32)
    return np.full(rows, temperature, np.float32)


def batches_of(chosen: Sequence[Prompt], batch: int) -> list[list[tuple[int, Prompt]]]:
    """Numbered prompts in full batches, similar lengths together.

    The shortest prompts that fill no batch are dropped (a row's `prompts` says how many ran);
    fewer prompts than one batch are repeated until they fill it, and counted as often.
    """
    order = sorted(enumerate(chosen), key=lambda pair: len(pair[1].tokens))
    if len(order) < batch:
        return [(order * batch)[:batch]]
    return [order[i : i + batch] for i in range(len(order) % batch, len(order), batch)]


def _is_plain(candidate: Candidate) -> bool:
    return candidate.setting.method == PLAIN


def _count(tally: Tally, candidate: Candidate, runs: dict[Candidate, Run]) -> None:
    """Counts the run of a candidate, and those of plain decoding beside it."""
    tally.add(*runs[candidate])
    for plain in filter(_is_plain, runs):
        tally.beside.setdefault(plain, Tally()).add(*runs[plain])
