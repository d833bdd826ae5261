"""The fastest method, shape and budget for a machine and a set of prompts.

Three steps for every temperature. Acceptance is estimated with the model as it is, on the prompts
themselves: for static trees by depth and rank, for others from a run. What a step takes is measured
on the model as it will run, phase by phase. The few settings with the best estimates are then run
against plain decoding, several times, and the fastest of them is written down.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
from rich.progress import Progress

from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair
from specjax.decoding.generate import Generation, completed
from specjax.decoding.request import Request, prepare
from specjax.draft import Drafter
from specjax.measure import timing
from specjax.measure.bench import Bencher
from specjax.measure.prompts import Prompt
from specjax.measure.rows import BenchRow
from specjax.measure.workload import PLAIN_DTYPES, Workload
from specjax.methods import registry
from specjax.methods.acceptance import measured
from specjax.methods.method import METHODS, PLAIN, Setting
from specjax.methods.sequoia import best_shape, expected_tokens
from specjax.methods.tuned import Entry
from specjax.trees.tree import TreeShape

# An estimate was off by 22 % (chain of 7 at 0.8, 8 prompts, other work beside, 2026-11-21), so
# those within 30 % of the best are run; 6 and 4 are bounds on the time, chosen and not measured.
_FINALISTS, _FAR_OFF = 6, 0.7
ROUNDS = 4
"""How often each prompt is drawn from, and each finalist run."""
_DEEPEST, _LONGEST_CHAIN = 16, 24  # deeper levels are hardly ever accepted, and each is compiled
_COST_NODES, _COST_LEVELS = (1, 3, 7, 15, 31), 7
_SHAPED = ("chain", "tree")
"""Methods whose shape is chosen from measured acceptance and costs, not from budgets."""


class Estimate(NamedTuple):
    """A setting with the tokens per step and seconds per step that are expected of it.

    `bound`: the seconds leave drafting out, which was not measured as the setting could not win.
    """

    setting: Setting
    tokens: float
    seconds: float
    bound: bool = False

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Choices:
    """What is chosen among, and for: `batch` rows whose continuations have `max_new_tokens`, or end
    at end tokens with `stop_at_eos`.
    """

    methods: str = "all"
    budgets: tuple[int, ...] = (7, 15, 31, 63)
    batch: int = 1
    max_new_tokens: int = 128
    seed: int = 0
    stop_at_eos: bool = False


@dataclasses.dataclass
class Tuner:
    """A pair as it is, for acceptance, and as it will run, for costs; and the prompts.

    `own` names the draft, where it is the model itself in fewer bits and nobody named it.
    """

    choices: Choices
    native: Pair
    grown: Pair
    chosen: list[Prompt]
    progress: Progress
    rounds: int = ROUNDS
    costs: dict[tuple[Setting, bool], timing.Phases] = dataclasses.field(default_factory=dict)
    own: str | None = None

    def estimates(
        self, temperature: float, keep: Callable[[Sequence[Estimate]], None] = lambda _: None
    ) -> list[Estimate]:
        """The estimate of every setting, the best first; `keep` gets the growing list."""
        names = [n for n in registry.names_of(self.choices.methods, self.grown) if n != "none"]
        drafts = len(self.grown.drafts)
        settings = [
            registry.setting_of(name, budget=budget, drafts=drafts)
            for budget in self.choices.budgets
            for name in names
            if name not in _SHAPED and METHODS[name].takes_budget
        ]
        settings += [registry.setting_of(n) for n in names if not METHODS[n].takes_budget]
        static = [name for name in _SHAPED if name in names]
        task = self.progress.add_task(f"T = {temperature:g}", total=len(settings) + len(static))
        found = []
        if static:
            found += self._static(static, temperature)
            self.progress.advance(task, len(static))
            keep(found)
        for _, alike in itertools.groupby(settings, key=lambda setting: setting.nodes):
            for setting in alike:
                found.append(self._estimate(setting, temperature, found))
                self.progress.advance(task)
                keep(found)
            timing.forget_programs()
        return sorted(found, key=lambda estimate: -estimate.rate)

    def _estimate(
        self, setting: Setting, temperature: float, others: Sequence[Estimate]
    ) -> Estimate:
        """A setting's estimate; drafting is measured unless it would lose to `others` anyway."""
        tokens = self.tokens_per_step(setting, temperature)
        pass_seconds = self.pass_seconds(_nodes(setting, self.grown))
        best = max((other.rate for other in others), default=0.0)
        if tokens / pass_seconds < _FAR_OFF * best:
            return Estimate(setting, tokens, pass_seconds, bound=True)
        return Estimate(setting, tokens, pass_seconds + self.draft_seconds(setting, temperature))

    def _static(self, names: Sequence[str], temperature: float) -> list[Estimate]:
        """The best chain and tree of every budget by acceptance at every depth and measured costs.

        Beside them each method's default.
        """
        rows = self.chosen * (self.rounds if temperature > 0 else 1)
        made = self._generation(self._writer(temperature), rows, temperature)
        starts = [len(prompt.tokens) for prompt in rows]
        texts = [
            [*prompt.tokens, *row[:count].tolist()]
            for prompt, row, count in zip(rows, made.tokens, made.lengths, strict=True)
        ]
        native = self.native
        accepted = measured(
            native.target, native.drafts[0], texts, starts, temperature, _LONGEST_CHAIN
        ).by_depth
        chain = registry.setting_of(f"chain:{_COST_LEVELS}")
        level = self.draft_seconds(chain, temperature) / _COST_LEVELS

        def estimate(name: str, shape: TreeShape) -> Estimate:
            setting = registry.setting_of(name, widths=shape.widths)
            setting = dataclasses.replace(setting, draft=self.own)
            seconds = self.pass_seconds(shape.num_nodes) + level * shape.depth
            return Estimate(setting, expected_tokens(shape, accepted), seconds)

        lengths = range(1, _LONGEST_CHAIN)
        found = []
        for name in names:
            own = registry.setting_of(name, batch=self.choices.batch).widths or (1,)
            found.append(estimate(name, TreeShape(own)))
            for budget in self.choices.budgets:
                if name == "chain":
                    chains = [estimate(name, TreeShape((1,) * n)) for n in lengths if n <= budget]
                    found.append(max(chains, key=lambda one: one.rate))
                else:
                    depths = range(2, _DEEPEST)
                    best = best_shape(accepted, self.pass_seconds, level, (budget,), depths)
                    found.append(estimate(name, best.shape))
        by_widths = {one.setting.widths: one for one in reversed(found)}  # one of the same
        return list(by_widths.values())

    def _request(
        self, pair: Pair, drafter: Drafter, rows: list[Prompt], temperature: float
    ) -> Request:
        return prepare(
            jax.random.key(self.choices.seed), pair.target, drafter, [p.tokens for p in rows],
            max_new_tokens=self.choices.max_new_tokens, sampling=Sampling(temperature),
            stop_at_eos=self.choices.stop_at_eos,
        )  # fmt: skip

    def _generation(self, setting: Setting, rows: list[Prompt], temperature: float) -> Generation:
        """The rows as one batch, the model as it is."""
        drafter = registry.build(setting, self.native)
        request = self._request(self.native, drafter, rows, temperature)
        return completed(request, self.choices.max_new_tokens)

    def tokens_per_step(self, setting: Setting, temperature: float) -> float:
        """Emitted tokens over target passes on all prompts."""
        made = self._generation(setting, self.chosen, temperature)
        return float(made.lengths.sum() / made.steps.sum())

    def _writer(self, temperature: float) -> Setting:
        """What writes the texts on which acceptance is measured; any gives the target's own."""
        del temperature
        return Setting()

    def draft_seconds(self, setting: Setting, temperature: float) -> float:
        """What drafting takes of a step."""
        return self.cost(setting, temperature).draft

    def pass_seconds(self, nodes: int) -> float:
        """What a pass of the target over so many nodes, and all that follows it, takes."""
        return float(np.interp(nodes, *self.passes))

    @cached_property
    def passes(self) -> tuple[list[int], list[float]]:
        """Numbers of nodes, and what the target's pass over them and the rest take.

        Measured with the drafter that is the cheapest to compile, and with flat trees: their steps
        commit two tokens at most, so that many of them fit a text.
        """
        nodes = sorted({*_COST_NODES, *self.choices.budgets})
        costs = [self.cost(registry.setting_of("recycle", widths=(n,)), 0.0) for n in nodes]
        return nodes, [cost.target + cost.rest for cost in costs]

    def cost(self, setting: Setting, temperature: float) -> timing.Phases:
        """The phases of a step with the model as it will run."""
        kind = setting, temperature > 0
        if kind not in self.costs:
            drafter = registry.build(setting, self.grown)
            rows = [self.chosen[len(self.chosen) // 2]] * self.choices.batch
            request = self._request(self.grown, drafter, rows, temperature)
            self.costs[kind] = timing.phases(request)
        return self.costs[kind]


def _nodes(setting: Setting, pair: Pair) -> int:
    """Nodes below the root of the whole tree."""
    return setting.nodes * (len(pair.drafts) if setting.method == "pool" else 1)


def fastest_of(
    choices: Choices,
    pair: Pair,
    dtype: str,
    chosen: list[Prompt],
    temperature: float,
    estimates: Sequence[Estimate],
    progress: Progress,
    rounds: int = ROUNDS,
) -> tuple[Entry, list[BenchRow]]:
    """The fastest of the settings with the best estimates and plain decoding, run side by side.

    Every prompt comes `rounds` times; a row's number seeds its draws, so that they differ.
    """
    finalists = [p for p in estimates[:_FINALISTS] if p.rate >= _FAR_OFF * estimates[0].rate]
    plain = PLAIN_DTYPES if pair.target.is_whole else (dtype,)
    workload = Workload(
        chosen * rounds,
        {choices.batch: tuple(estimate.setting for estimate in finalists)},
        (temperature,),
        (dtype,),
        choices.max_new_tokens,
        seed=choices.seed,
        plain_dtypes=plain,
        mixed=False,
        stop_at_eos=choices.stop_at_eos,
    )
    rows = Bencher(workload, pair, progress).rows(choices.batch)
    as_asked = [row for row in rows if row.dtype == dtype]
    rate = max(row.tokens_per_second for row in rows if row.setting.method == PLAIN)
    return entry_of(as_asked, rate, finalists, temperature, choices.batch), rows


def entry_of(
    rows: Sequence[BenchRow],
    plain: float,
    finalists: Sequence[Estimate],
    temperature: float,
    batch: int,
) -> Entry:
    """The fastest of the rows, with its estimate; `plain` are tokens per second."""
    best = max(rows, key=lambda row: row.tokens_per_second)
    estimated = {estimate.setting: estimate for estimate in finalists}.get(best.setting)
    expected = {} if estimated is None else _figures(estimated, batch, plain)
    figures = ("tokens_per_step", "tokens_per_second", "speedup")
    return Entry(
        temperature, batch, best.setting, expected, {name: getattr(best, name) for name in figures}
    )


def _figures(estimate: Estimate, batch: int, plain: float) -> dict[str, float]:
    """What is expected, in the names of a bench row; `plain` are tokens per second."""
    rate = estimate.rate * batch
    return {
        "tokens_per_step": estimate.tokens,
        "tokens_per_second": rate,
        "speedup": rate / plain,
    }
