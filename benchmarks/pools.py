"""Pools of drafts and single ones at equal nodes: tokens per step, paired over prompts.

    python -m benchmarks.pools --drafts boosted=DIR alike=DIR one=DIR first=DIR/drafts/0 \
        --prompts FILE... --folder runs/pools

Every tree is static, its children are drawn and verified by multi-step sampling; a pool's are
merged. Trees come from acceptance along the target's own texts (Sequoia's programme); a pool's are
as large as on the development prompts their merged nodes allow. All pools of as many drafts have
the same trees, those of the first that is named. Of the first single draft the trees that are best
for one are measured too: grown best first at temperature 0, verified from the leaves above it.
Differences are of tokens per step over all prompts, with 95 % intervals from a bootstrap over
prompts, for these drafts as they were trained.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import tyro

from benchmarks.cells import Cells, Json
from specjax.base.output import write_json
from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.load import load
from specjax.checkpoints.pair import Pair
from specjax.draft import Drafter, ExpansionDrafter
from specjax.measure import prompts, timing
from specjax.methods import records, registry
from specjax.methods.acceptance import Measured, measured
from specjax.methods.sequoia import most_tokens
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT
from specjax.trees.widths import Widths, spelled
from specjax.verify.rules import MULTI_STEP, NAIVE, TRAVERSAL
from train.collect import Collected
from train.evaluate import digest, drafts_in
from train.export import DEVELOPMENT
from train.heldout import hold_out, view
from train.runs import Counts, Task, continuations, counted, speeds

MERGED, OWN = "multi-step", "best for one"
"""How trees are made and judged: drawn, perhaps merged; or as is best for a single draft."""
_LEVELS, _RANKS = 8, 4
_REFILLED = (1.45, 1.3, 1.15, 1.0)
"""A pool tries trees of so many times the nodes, as equal ones merge."""
_RESAMPLES = 10_000

Trees = tuple[Widths, ...]
"""A tree of each draft."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure pools of drafts and single ones at equal nodes."""

    drafts: tuple[str, ...]
    """NAME=FOLDER: a pair or a pool that `train.run` made, or one draft of it."""
    prompts: tuple[str, ...] = (str(BUNDLED / "heldout.jsonl"),)
    """Files of {"id", "prompt"} lines to measure on; each is a group."""
    development: str = str(BUNDLED / DEVELOPMENT)
    """A file of prompts to choose trees on."""
    model: str = "bundled"
    """The target."""
    folder: Path = Path("runs/pools")
    """Where what is measured is kept; a killed run goes on. Its figures: pools.json."""
    nodes: tuple[int, ...] = (7, 15)
    """The most nodes of a tree, merged and without its root, in the mean over steps."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 64
    """Tokens of a continuation."""
    longest: int = 128
    """Prompts of more tokens are left out."""
    limit: int = 32
    """Prompts of each file."""
    few: int = 24
    """Prompts to choose trees on."""
    draws: int = 2
    """Continuations of a prompt above temperature 0."""
    rows: int = 25
    """Rows of a pass."""
    timed: int = 4
    """Prompts that are timed with the first number of nodes, one row at a time (0: none)."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A place in the table: which drafts, how, with how many nodes, at which temperature."""

    temperature: float
    nodes: int
    drafts: str
    way: str = MERGED


class Measuring:
    """A target, pools of drafts by name, prompts, and what was measured of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.target, self.tokenizer = load(options.model)
        places = dict(each.split("=", 1) for each in options.drafts)
        self.pools = {name: _drafts(Path(place), self.target) for name, place in places.items()}
        self.groups = {Path(file).stem: self._read(file, options.limit) for file in options.prompts}
        whole = [prompt for group in self.groups.values() for prompt in group]
        self.task = self._task(whole)
        self.development = self._task(self._read(options.development, options.few))
        self._digests = {name: digest(drafts) for name, drafts in self.pools.items()}
        common = {
            "target": digest([self.target]), "longest": options.longest,
            "machine": {k: v for k, v in timing.environment().items() if k != "date"},
        }  # fmt: skip
        self.cells = Cells(options.folder, common)

    def _read(self, file: str, limit: int) -> list[list[int]]:
        longest = self.options.longest
        found, _ = prompts.fitting(prompts.read(file), self.tokenizer, longest, 0)
        return [prompt.tokens for prompt in found][:limit]

    def _task(self, texts: list[list[int]]) -> Task:
        own = self.options
        return Task(texts, own.max_new_tokens, own.rows, own.seed, own.draws)

    def acceptance(self, name: str, temperature: float) -> list[dict[str, list[float]]]:
        """How each draft of a pool is accepted along what the target says."""
        found = []
        for draft in self.pools[name]:
            key = self._key(self.development, temperature, draft=digest([draft]))

            def work(draft: Model = draft) -> dict[str, list[float]]:
                made = continuations(self.target, self.development, temperature)
                return accepted(self.target, draft, made, temperature)

            found.append(self.cells.get("acceptance", key, work))
        return found

    def trees(self, cell: Cell) -> Trees:
        """The trees of a cell: a single draft's own, else those of the first pool of that size."""
        size = len(self.pools[cell.drafts])
        alike = (name for name, drafts in self.pools.items() if len(drafts) == size)
        first = cell.drafts if size == 1 else next(alike)
        survival = "survival" if cell.way == MERGED else "survival_as_a_whole"
        by_depth = [
            Measured(np.array(own["by_rank"]), np.array(own[survival])).by_depth
            for own in self.acceptance(first, cell.temperature)
        ]
        if size == 1:
            return (most_tokens(by_depth[0], cell.nodes, cell.nodes).shape.widths,)
        for tried in _tried(by_depth, cell.nodes)[:-1]:
            found = self.counts(first, tried, cell.temperature, self.development)
            if found.nodes.sum() <= cell.nodes * found.steps.sum():
                return tried
        return _tried(by_depth, cell.nodes)[-1]

    def counts(self, name: str, trees: Trees, temperature: float, task: Task) -> Counts:
        """What prompts take with drawn trees of a pool."""
        key = self._key(task, temperature, pool=self._digests[name], trees=trees)

        def work() -> list[list[int]]:
            drafter = ExpansionDrafter.of(self.pools[name], trees)
            made = counted(self.target, drafter, task, temperature, MULTI_STEP.name)
            timing.forget_programs()
            return [each.tolist() for each in made]

        return Counts(*map(np.array, self.cells.get("counts", key, work)))

    def best_for_one(self, cell: Cell, trees: Trees) -> Counts:
        """What prompts take with the trees that are best for a single draft."""
        key = self._key(
            self.task, cell.temperature, pool=self._digests[cell.drafts], nodes=cell.nodes,
            trees=trees,
        )  # fmt: skip

        def work() -> list[list[int]]:
            drafter, rule = self._best(cell, trees)
            made = counted(self.target, drafter, self.task, cell.temperature, rule)
            timing.forget_programs()
            return [each.tolist() for each in made]

        return Counts(*map(np.array, self.cells.get("best for one", key, work)))

    def _best(self, cell: Cell, trees: Trees) -> tuple[Drafter, str]:
        drafts = self.pools[cell.drafts]
        if cell.temperature:
            return ExpansionDrafter.of(drafts, trees, DISTINCT), TRAVERSAL.name
        pair = Pair(self.target, self.tokenizer, list(drafts))
        return registry.build(registry.setting_of(f"specexec:{cell.nodes}"), pair), NAIVE.name

    def speeds(self, nodes: int, temperature: float) -> dict[str, float]:
        """Tokens a second of each shape of pool, and without drafts, one row at a time."""
        few = sorted(self.task.prompts, key=len)[:: max(1, len(self.task.prompts) // 8)]
        task = self.task._replace(prompts=few[: self.options.timed])
        trees = {name: self.trees(Cell(temperature, nodes, name)) for name in self._unlike()}
        key = self._key(task, temperature, pools=self._digests, trees=trees)

        def work() -> dict[str, float]:
            drafters: dict[str, ExpansionDrafter | None] = {"none": None}
            for name, own in trees.items():
                drafters[name] = ExpansionDrafter.of(self.pools[name], own)
            return speeds(self.target, drafters, task, temperature)

        return self.cells.get("speeds", key, work)

    def _unlike(self) -> list[str]:
        """The pools whose drafts have shapes that none before them has."""
        shapes = {name: [each.config for each in drafts] for name, drafts in self.pools.items()}
        listed = list(shapes)
        return [
            name
            for place, name in enumerate(listed)
            if shapes[name] not in [shapes[earlier] for earlier in listed[:place]]
        ]

    def _key(self, task: Task, temperature: float, **more: object) -> Json:
        return {"task": digest([task.prompts]), "temperature": temperature} | {
            name: getattr(task, name) for name in ("new_tokens", "rows", "seed", "draws")
        } | more  # fmt: skip


def _drafts(place: Path, target: Model) -> list[Model]:
    """A pool, or the one draft of a folder."""
    if (place / "config.json").is_file():
        return [drafts_in(place.parent, target)[int(place.name)]]
    return drafts_in(place, target)


def accepted(
    target: Model, draft: Model, made: Collected, temperature: float
) -> dict[str, list[float]]:
    """Acceptance by rank, and how likely a first path survives to each depth.

    Where tokens are tried one after the other, and where a path is verified as a whole.
    """
    ends = made.prompt + made.length
    texts = [text[:end].tolist() for text, end in zip(made.tokens, ends, strict=True)]
    whole = measured(target, draft, texts, made.prompt.tolist(), temperature, _LEVELS, _RANKS)
    survival = whole.survival
    if temperature:
        log_p = hold_out(target, made).log_p
        own, starts = view(draft, made, target, _LEVELS), made.steps - _LEVELS + 1
        levels = [own.at(level).log_probs - log_p for level in range(_LEVELS)]
        ratio = [np.exp(np.minimum(each, 0))[:, at : at + starts] for at, each in enumerate(levels)]
        alive = np.arange(starts) + _LEVELS <= made.length[:, None]
        survival = np.cumprod(np.stack(ratio, axis=-1)[alive], axis=-1).mean(axis=0)
    found = {
        "by_rank": whole.by_rank, "survival": survival, "survival_as_a_whole": whole.survival
    }  # fmt: skip
    return {name: each.tolist() for name, each in found.items()}


def _tried(by_depth: Sequence[np.ndarray], nodes: int) -> list[Trees]:
    """Trees of a pool, each draft's the best of its share alone, the largest first.

    The last have so many nodes in all, and no more however few are merged.
    """
    size, found = len(by_depth), list[Trees]()
    for more in _REFILLED:
        total = round(nodes * more)
        shares = [total // size + (number < total % size) for number in range(size)]
        alone = zip(by_depth, shares, strict=True)
        found.append(tuple(most_tokens(own, n, n).shape.widths for own, n in alone))
    return found


def difference(one: Counts, other: Counts, seed: int = 0) -> tuple[float, float, float]:
    """By how much tokens per step of one exceed the other's, in percent, with its 95 % interval.

    Prompts are resampled, those of both together.
    """
    rng = np.random.default_rng(seed)
    count = len(one.tokens)
    weight = rng.multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    weight = np.concatenate([np.ones((1, count), int), weight])
    rates = [weight @ each.tokens / (weight @ each.steps) for each in (one, other)]
    percent = 100 * (rates[0] / rates[1] - 1)
    low, high = np.quantile(percent[1:], (0.025, 0.975))
    return float(percent[0]), float(low), float(high)


def found(measuring: Measuring) -> Iterator[tuple[Cell, Counts, str]]:
    """The counts of every cell, and how its trees are spelled."""
    options = measuring.options
    single = next((name for name, some in measuring.pools.items() if len(some) == 1), None)
    for temperature, nodes in itertools.product(options.temperatures, options.nodes):
        for name in measuring.pools:
            cell = Cell(temperature, nodes, name)
            trees = measuring.trees(cell)
            shown = " + ".join(map(spelled, trees))
            yield cell, measuring.counts(name, trees, temperature, measuring.task), shown
            if name == single:
                cell = dataclasses.replace(cell, way=OWN)
                trees = measuring.trees(cell)
                shown = f"{spelled(trees[0])}, from the leaves" if temperature else "best first"
                yield cell, measuring.best_for_one(cell, trees), shown


def main() -> None:
    """Measures, prints it and writes it."""
    options = tyro.cli(Options)
    records.use_compilation_cache()
    measuring = Measuring(options)
    ends = np.cumsum([len(group) for group in measuring.groups.values()])
    groups = dict(zip(measuring.groups, itertools.pairwise((0, *ends.tolist())), strict=True))
    rows, counts = [], dict[Cell, Counts]()
    for cell, own, shown in found(measuring):
        counts[cell] = own
        rates = {name: own.tokens[slice(*at)].sum() / own.steps[slice(*at)].sum()
                 for name, at in groups.items()}  # fmt: skip
        row = dataclasses.asdict(cell) | {
            "trees": shown,
            "tokens_per_step": own.tokens.sum() / own.steps.sum(),
            "mean_nodes": own.nodes.sum() / own.steps.sum(),
            "groups": rates,
        }
        rows.append(json.loads(json.dumps(row, default=float)))
        print(json.dumps(rows[-1]), flush=True)
    pairs, merged = [], [cell for cell in counts if cell.way == MERGED]
    for cell, other in itertools.product(merged, counts):
        if (cell.temperature, cell.nodes) == (other.temperature, other.nodes) and cell != other:
            percent, low, high = difference(counts[cell], counts[other], options.seed)
            pairs.append(dataclasses.asdict(cell) | {
                "over": other.drafts, "over_way": other.way,
                "percent": percent, "low": low, "high": high,
            })  # fmt: skip
            print(json.dumps(pairs[-1]), flush=True)
    rates = []
    if options.timed:
        nodes = options.nodes[0]
        for temperature in options.temperatures:
            own = measuring.speeds(nodes, temperature)
            rates.append({"temperature": temperature, "nodes": nodes, "tokens_per_second": own})
            print(json.dumps(rates[-1]), flush=True)
    whole = {
        "env": timing.environment(),
        "config": json.loads(json.dumps(dataclasses.asdict(options), default=str)),
        "prompts": {name: len(group) for name, group in measuring.groups.items()},
        "parameters": {
            name: [draft.config.num_parameters for draft in drafts]
            for name, drafts in measuring.pools.items()
        },
        "acceptance": {
            f"{name}, T = {temperature}": measuring.acceptance(name, temperature)
            for name in measuring.pools for temperature in options.temperatures
        },
        "rows": rows, "differences": pairs, "speeds": rates,
    }  # fmt: skip
    write_json(options.folder / "pools.json", whole)
    jax.clear_caches()


if __name__ == "__main__":
    main()
