"""`specjax bench`: every method against plain decoding, over the same prompts, side by side."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from specjax import measure, methods, prompts, records
from specjax.draft import Drafter
from specjax.inflate import inflate
from specjax.measure import Phases, Timed
from specjax.model import Model
from specjax.options import (
    Bench,
    at_least,
    check_seed,
    check_target_file,
    count_of,
    dtypes_of,
    items,
)
from specjax.prompts import Prompt
from specjax.report import table
from specjax.request import Request, prepare
from specjax.sampling import Sampling
from specjax.widths import Widths, read

PLAIN_DTYPES = ("float32", "bfloat16")
MIXED = "mixed"
_PHASE_REQUESTS = 8
Temperature = float | str


class Candidate(NamedTuple):
    """A method with its widths, at one dtype of the target."""

    method: str
    widths: Widths | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be measured, checked."""

    options: Bench
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[str, Widths | None], ...]

    def candidates(self, batch: int) -> list[Candidate]:
        """Plain decoding in both dtypes, then the methods in the dtypes asked for."""
        shapes = [(m, w or methods.default_widths(m, batch)) for m, w in self.shapes]
        plain = [Candidate("none", None, dtype) for dtype in PLAIN_DTYPES]
        return plain + [Candidate(m, w, dtype) for dtype in self.dtypes for m, w in shapes]

    def settings(self, batch: int) -> tuple[Temperature, ...]:
        """The temperatures; for a batch above 1 also half greedy and half sampled."""
        mixed = batch > 1 and max(self.temperatures) > 0
        return (*self.temperatures, MIXED) if mixed else self.temperatures


def plan_of(options: Bench) -> Plan:
    """The plan that the options name.

    Raises:
      ValueError: an option is wrong.
    """
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    at_least("--limit", options.limit, 1)
    check_seed(options.seed)
    check_target_file("--json", options.json)
    methods.check_rule(options.verify)
    batches = items(options.batch, int, "--batch")
    temperatures = items(options.temperatures, float, "--temperatures")
    if not all(0 <= temperature < math.inf for temperature in temperatures):
        raise ValueError(f"--temperatures is {options.temperatures!r}; none may be below 0.")
    for batch in batches:
        at_least("--batch", batch, 1)
    if options.verify == "greedy" and max(temperatures) > 0:
        raise ValueError(f"the greedy rule needs --temperatures 0, not {options.temperatures}.")
    dtypes = dtypes_of(options.dtype) or (
        ("float32",) if jax.default_backend() == "cpu" else ("bfloat16",)
    )
    return Plan(options, batches, temperatures, dtypes, tuple(_shapes(options)))


def _shapes(options: Bench) -> Iterator[tuple[str, Widths | None]]:
    """Methods but the plain one, with the widths that --trees gives them."""
    named = options.methods.split(",") if options.trees is None else options.trees.split(";")
    for name in named:
        method, _, widths = name.strip().partition(":")
        methods.check_method(method)
        if method != "none":
            yield method, read(widths, "--trees") if widths else None


class Bucket(NamedTuple):
    """A compiled size: what the programs of a candidate have in common."""

    rows: int
    width: int
    outputs: int


@dataclasses.dataclass
class Tally:
    """What a candidate's runs add up to."""

    seconds: float = 0.0
    steps: int = 0
    nodes: int = 0
    passes: int = 0
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    phases: list[Phases] = dataclasses.field(default_factory=list)

    def add(self, run: Timed) -> None:
        """Counts one generation."""
        self.seconds += run.seconds
        self.steps += int(run.steps.sum())
        self.nodes += int(run.nodes.sum())
        self.passes += int(run.steps.max())
        self.outputs += [row[:n] for row, n in zip(run.tokens, run.lengths, strict=True)]

    @property
    def new_tokens(self) -> int:
        """All tokens emitted."""
        return sum(len(output) for output in self.outputs)


class Bencher:
    """Models of one pair in the dtypes needed, and their drafters."""

    def __init__(self, plan: Plan, target: Model, drafts: list[Model], progress: Progress) -> None:
        self.plan, self.drafts, self.progress = plan, drafts, progress
        dtypes = {*PLAIN_DTYPES, *plan.dtypes}
        self.targets = {
            dtype: jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), target)
            for dtype in sorted(dtypes)
        }
        self.bandwidth = measure.read_bandwidth()
        self._drafters: dict[tuple[str, Widths | None], Drafter | None] = {}

    def drafter(self, candidate: Candidate) -> Drafter | None:
        """The drafter of a candidate."""
        named = candidate.method, candidate.widths
        if named not in self._drafters:
            method, widths = named
            self._drafters[named] = methods.build(
                method, self.drafts, widths, self.plan.options.verify
            )
        return self._drafters[named]

    def request(
        self, candidate: Candidate, rows: Sequence[tuple[int, Prompt]], temperature: Temperature
    ) -> Request:
        """The request for a batch of numbered prompts."""
        options = self.plan.options
        key = jax.random.key(options.seed)
        number = np.asarray([index for index, _ in rows])
        return prepare(
            jax.vmap(lambda i: jax.random.fold_in(key, i))(number),
            self.targets[candidate.dtype],
            self.drafter(candidate),
            [prompt.tokens for _, prompt in rows],
            options.max_new_tokens,
            Sampling(temperatures_of(temperature, len(rows), self.plan.temperatures)),
            options.verify if candidate.method != "none" else "auto",
            False,
        )

    def rows(self, chosen: Sequence[Prompt], batch: int) -> list[dict[str, Any]]:
        """A row of the report for every temperature and candidate.

        One compiled size after the other, whose programs are then forgotten: a few dozen of them
        at once, each mapped in thousands of pieces, are more than Linux lets a process map.
        """
        batches = batches_of(chosen, batch)
        candidates, temperatures = self.plan.candidates(batch), self.plan.settings(batch)
        requests = {
            (temperature, candidate): [
                self.request(candidate, rows, temperature) for rows in batches
            ]
            for temperature in temperatures
            for candidate in candidates
        }
        tallies = {named: Tally() for named in requests}
        sizes = [bucket_of(request) for request in requests[temperatures[0], candidates[0]]]
        task = self.progress.add_task(f"batch {batch}", total=len(batches) * len(requests))
        for size in sorted(set(sizes)):
            numbers = [number for number, other in enumerate(sizes) if other == size]
            self._warm(candidates, [requests[temperatures[0], c][numbers[0]] for c in candidates])
            for number, temperature in itertools.product(numbers, temperatures):
                for turn in range(len(candidates)):  # a drift of the machine hits all alike
                    named = temperature, candidates[(turn + number) % len(candidates)]
                    request, tally = requests[named][number], tallies[named]
                    self._measure(named[1], request, tally, size == statistics.mode(sizes))
                    self.progress.advance(task)
            jax.clear_caches()
        rows = {
            named: self._row(named[1], tally, requests[named], batch, named[0])
            for named, tally in tallies.items()
        }
        return [
            row for t in temperatures for row in with_speedups([rows[t, c] for c in candidates])
        ]

    def _warm(self, candidates: list[Candidate], requests: list[Request]) -> None:
        for candidate, request in zip(candidates, requests, strict=True):
            measure.warm(self.targets[candidate.dtype], self.drafter(candidate), request)

    def _measure(self, candidate: Candidate, request: Request, tally: Tally, common: bool) -> None:
        """Times one request, and its phases beside it if its size is the most common one.

        That size stands for all: each costs five compilations, and the sizes of a set of prompts
        differ little.
        """
        target, drafter = self.targets[candidate.dtype], self.drafter(candidate)
        tally.add(measure.timed(target, drafter, request))
        if common and len(tally.phases) < _PHASE_REQUESTS:
            tally.phases.append(measure.phases(target, drafter, request))

    def _row(
        self,
        candidate: Candidate,
        tally: Tally,
        requests: list[Request],
        batch: int,
        temperature: Temperature,
    ) -> dict[str, Any]:
        """The report of one candidate.

        The phases, compiled apart and run in the same minutes, give the shares of a step; the
        seconds are these shares of the loop's wall time, which the prefill is no part of. What
        is left when phases are subtracted from the wall instead was between -11 and 14 % on a
        noisy machine; `phases_over_loop` says how far apart the two are.
        """
        phases, passes = measure.typical(tally.phases), tally.passes
        prefill = min(phases.prefill * len(requests), tally.seconds)
        loop = tally.seconds - prefill
        share = loop / phases.step
        row = {
            "method": candidate.method,
            "widths": candidate.widths,
            "temperature": temperature,
            "batch": batch,
            "dtype": candidate.dtype,
            "prompts": len(tally.outputs),
            "new_tokens": tally.new_tokens,
            "target_steps": tally.steps,
            "tokens_per_step": tally.new_tokens / tally.steps,
            "mean_nodes": tally.nodes / tally.steps,
            "seconds": tally.seconds,
            "tokens_per_second": tally.new_tokens / tally.seconds,
            "passes": passes,
            "draft_seconds": phases.draft * share,
            "target_seconds": phases.target * share,
            "other_seconds": phases.rest * share,
            "prefill_seconds": prefill,
            "phases_over_loop": phases.step * passes / loop if loop else None,
            "repeated_8grams": measure.repeated(tally.outputs),
        }
        if candidate.method == "none":
            floor = measure.weight_bytes(self.targets[candidate.dtype]) / (self.bandwidth * 1e9)
            row["step_over_bandwidth_floor"] = loop / passes / floor
        return row


def bucket_of(request: Request) -> Bucket:
    """The compiled size of a request."""
    rows, width = request.prompt.shape
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


def with_speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one setting with their speed-up over its faster plain loop."""
    plain = max(row["tokens_per_second"] for row in rows if row["method"] == "none")
    return [row | {"speedup": row["tokens_per_second"] / plain} for row in rows]


def bench(options: Bench) -> int:
    """Runs `specjax bench`; gives the exit code.

    Raises:
      ValueError: an option or a prompt file is wrong, or no prompt fits.
    """
    plan = plan_of(options)
    listed = prompts.read(options.prompts)[: options.limit]
    parameters = count_of(options.inflate) if options.inflate else None
    pair = methods.load_pair(options.model, options.draft, "float32")
    if any(method != "none" for method, _ in plan.shapes) and not pair.drafts:
        raise ValueError("the methods need a draft model; name one with --draft.")
    target = inflate(pair.target, parameters) if parameters else pair.target
    chosen, left_out = prompts.fitting(
        listed, pair.tokenizer, target.config.max_positions, options.max_new_tokens
    )
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bencher = Bencher(plan, target, pair.drafts, progress)
        rows = [row for batch in plan.batches for row in bencher.rows(chosen, batch)]
    report = {"env": environment(bencher, left_out), "rows": rows}
    table(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    _remember(bencher, rows)
    return 0


def environment(bencher: Bencher, left_out: list[str]) -> dict[str, Any]:
    """Where and on what the rows were measured."""
    target = next(iter(bencher.targets.values()))
    return measure.environment() | {
        "config": dataclasses.asdict(bencher.plan.options),
        "model": dataclasses.asdict(target.config),
        "parameters": target.config.num_parameters,
        "drafts": [dataclasses.asdict(draft.config) for draft in bencher.drafts],
        "read_gb_per_second": bencher.bandwidth,
        "weight_bytes": {d: measure.weight_bytes(m) for d, m in bencher.targets.items()},
        "prompts_left_out": left_out,
    }


def _remember(bencher: Bencher, rows: list[dict[str, Any]]) -> None:
    """Keeps what `--method auto` chooses by; the rule must be its own, and no row is mixed."""
    known: dict[str, list[dict[str, Any]]] = {}
    kept = ("method", "widths", "temperature", "tokens_per_second", "prompts")
    for row in rows:
        if row["temperature"] != MIXED and bencher.plan.options.verify == methods.AUTO:
            target = bencher.targets[row["dtype"]]
            name = records.setting(target, bencher.drafts, row["batch"], row["temperature"] > 0)
            known.setdefault(name, []).append({field: row[field] for field in kept})
    for name, measured in known.items():
        if len(measured) > 1:  # plain decoding alone says nothing about the methods
            records.remember(name, measured)
