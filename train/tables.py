"""What a target and its pool of drafts are worth, measured with the shipped `generate`.

SpecInfer's tables 1 to 3 (arXiv 2305.09781), and what they leave open: pools at an equal number
of nodes, and at equal time on the machine.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.draft import ExpansionDrafter
from specjax.measure import timing
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K
from specjax.verify.rules import BLOCK, MULTI_STEP, NAIVE, RECURSIVE, TRAVERSAL
from train.collect import Collected
from train.heldout import TOP, cover, estimates, hold_out, view
from train.runs import Row, Shape, Task, continuations, measured, speeds

PLAIN, SINGLE, ALIKE, BOOSTED = "none", "single", "alike", "boosted"
SAMPLED = 0.8
TEMPERATURES = (0.0, SAMPLED)
WIDE = 5
"""The widest of table 2, and a width of table 3."""

BUDGETS = (8, 16, 24)
_ONE = "one"
_POOL = "pool"


def wide(width: int) -> Shape:
    """SpecInfer's tree for its tables: of depth 8, expanded at the third token."""
    return ((1, 1, width, 1, 1, 1, 1, 1),)


BUSHY: Shape = ((3, 2, 2, 1, 1, 1),)
FLAT: Shape = ((WIDE,),)
CHAIN: Shape = ((1,) * 7,)
_JUDGED = {
    DRAWN: (NAIVE.name, MULTI_STEP.name),
    DISTINCT: (NAIVE.name, RECURSIVE.name, TRAVERSAL.name),
    TOP_K: (NAIVE.name,),
}
"""What table 3 compares, by how children are made; on chains, block too."""


def _chains(*depths: int) -> Shape:
    return tuple((1,) * depth for depth in depths)


SHAPES: dict[str, tuple[Shape, ...]] = {
    _ONE: (
        *(_chains(8), _chains(16), _chains(24)),
        *(((2, 1, 1, 1),), ((1, 1, 2, 1, 1),), ((2, *(1,) * 7),), ((1, 2, *(1,) * 6),)),
        *(((3, *(1,) * 7),), ((2, *(1,) * 11),), ((2, 2, *(1,) * 4),)),
    ),
    _POOL: (
        *(_chains(3, 3, 2), _chains(4, 2, 2), _chains(6, 4, 4)),
        *(_chains(6, 5, 5), _chains(8, 4, 4), _chains(9, 9, 9), _chains(12, 6, 6)),
        *(_chains(16, 9, 9), _chains(8, 8, 8), ((2, *(1,) * 5), *_chains(6, 6))),
    ),
}
"""Trees tried for one draft and for a pool of three, within every budget that they fit."""

TIMED: dict[str, tuple[Shape, ...]] = {
    _ONE: (_chains(3), _chains(7), _chains(10)),
    _POOL: (_chains(3, 2, 2), _chains(7, 4, 4), _chains(10, 5, 5)),
}
"""Trees timed, for one row at a time."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and its pools of drafts; `single` is the best member of `boosted`, alone."""

    target: Model
    pools: Mapping[str, Sequence[Model]]


def coverage(pair: Pair, task: Task) -> list[Row]:
    """Table 1: P(the target's token is among the k most likely of a draft, or of the pool).

    Along the target's own continuations, greedy and at a temperature.
    """
    rows = []
    for temperature in TEMPERATURES:
        text = continuations(pair.target, task, temperature)
        for name, drafts in pair.pools.items():
            tops = [view(draft, text, pair.target).top for draft in drafts]
            members = [(f"draft {n}", [top]) for n, top in enumerate(tops)]
            for member, chosen in (*members, ("union", tops)):
                found = cover(text.following, text.alive, chosen)
                share = {f"top{k + 1}": found[k] for k in range(TOP)}
                rows.append({"pool": name, "of": member, "temperature": temperature, **share})
    return rows


def widths(pair: Pair, task: Task) -> list[Row]:
    """Table 2: tokens per step of trees ⟨1,1,k,1,1,1,1,1⟩ of the best draft, k = 1 to 5."""
    rows = []
    for width in range(1, WIDE + 1):
        for temperature in TEMPERATURES:
            found = measured(pair.target, pair.pools[SINGLE], wide(width), task, temperature)
            rows.append({"width": width, "temperature": temperature, **found})
    return rows


def rules(pair: Pair, task: Task) -> list[Row]:
    """Table 3: every rule on trees of one shape, temperature 0.8, and on chains.

    A rule gets each kind of children that it is lossless for: naive, multi-step, recursive and
    traversal are compared on drawn ones, naive on the most likely ones too. The flat tree tells
    what draws without replacement are worth where no subtrees merge with equal draws.
    """
    rows = []
    shapes = BUSHY, wide(WIDE), FLAT, CHAIN
    for shape, (children, names) in itertools.product(shapes, _JUDGED.items()):
        chain = max(shape[0]) == 1
        if chain and children == DISTINCT:  # a draw without replacement is a draw there
            continue
        tested = (*names, BLOCK.name) if chain and children == DRAWN else names
        for name in tested:
            found = measured(pair.target, pair.pools[SINGLE], shape, task, SAMPLED, name, children)
            rows.append(
                {"shape": shown(shape), "rule": name, "children": children,
                 "temperature": SAMPLED, **found}
            )  # fmt: skip
        timing.forget_programs()
    return rows


class Cell(NamedTuple):
    """A place in the table of equal nodes."""

    pool: str
    nodes: int
    temperature: float


class Trial(NamedTuple):
    """A pool with a shape, at a temperature."""

    pool: str
    temperature: float
    shape: Shape


def known_shapes(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[Cell, Shape]:
    """The shapes that `rows` of another table name, for those pools of `sizes` that they have.

    Raises:
      ValueError: a shape is none of those tried for a pool of so many drafts.
    """
    found = {}
    for row in rows:
        pool, shape = row["pool"], row["shape"]
        if pool in sizes:
            named = {shown(known): known for known in _shapes(SHAPES, pool, sizes[pool])}
            if shape not in named:
                raise ValueError(
                    f"pool {pool!r} has {sizes[pool]} drafts, for which no tree {shape!r} is tried."
                )
            found[Cell(pool, row["nodes"], row["temperature"])] = named[shape]
    return found


def equal_nodes(
    pair: Pair, development: Task, task: Task, earlier: Mapping[Cell, Shape] | None = None
) -> list[Row]:
    """Every pool at every budget of nodes, each with its own best shape on `development`.

    Pools that are in `earlier` have the shapes named there: so runs that differ in their seed
    alone are compared with the same trees.

    `nodes` is the budget: the mean number of nodes a step, merged and without the root, that a
    shape may have on the development prompts; `mean_nodes` what it had on the prompts of `task`.
    A budget that none of a pool's shapes fits has no row.
    """
    earlier = earlier or {}
    chosen = {cell: Trial(cell.pool, cell.temperature, shape) for cell, shape in earlier.items()}
    fresh = [pool for pool in pair.pools if all(cell.pool != pool for cell in earlier)]
    tried = _found(
        pair,
        (
            Trial(pool, temperature, shape)
            for pool in fresh
            for shape in _shapes(SHAPES, pool, len(pair.pools[pool]))
            for temperature in TEMPERATURES
        ),
        development,
    )
    for cell in (Cell(*c) for c in itertools.product(fresh, BUDGETS, TEMPERATURES)):
        if best := _best(tried, cell):
            chosen[cell] = best
    found = _found(pair, chosen.values(), task)
    order = list(pair.pools)
    return [
        {**cell._asdict(), "shape": shown(chosen[cell].shape), **found[chosen[cell]]}
        for cell in sorted(chosen, key=lambda cell: (order.index(cell.pool), *cell[1:]))
    ]


def _shapes(tried: Mapping[str, Sequence[Shape]], pool: str, drafts: int) -> list[Shape]:
    """What is tried (`SHAPES` or `TIMED`) for a pool of so many drafts."""
    shapes = tried[_ONE if pool == SINGLE else _POOL]
    return list(dict.fromkeys(fitted(shape, drafts) for shape in shapes))


def _found(pair: Pair, trials: Iterable[Trial], task: Task) -> dict[Trial, Row]:
    """What every trial gives; those of one shape follow each other and share a compiled loop."""
    found = {}
    ordered = sorted(set(trials), key=lambda trial: trial.shape)
    for shape, alike in itertools.groupby(ordered, key=lambda trial: trial.shape):
        for trial in alike:
            drafts = pair.pools[trial.pool]
            found[trial] = measured(pair.target, drafts, shape, task, trial.temperature)
        timing.forget_programs()
    return found


def _best(tried: Mapping[Trial, Row], cell: Cell) -> Trial | None:
    """The trial of most tokens per step among those of a cell's pool within its budget."""
    fitting = [
        trial
        for trial, found in tried.items()
        if trial[:2] == (cell.pool, cell.temperature) and found["mean_nodes"] <= cell.nodes
    ]
    return max(fitting, key=lambda trial: tried[trial]["tokens_per_step"], default=None)


def fitted(shape: Shape, drafts: int) -> Shape:
    """`shape` for another number of drafts: cut, or its last tree repeated."""
    return (*shape[:drafts], *[shape[-1]] * (drafts - len(shape)))


def equal_time(pair: Pair, development: Task, task: Task) -> list[Row]:
    """Tokens a second of one row at a time, every pool with its fastest shape on `development`.

    `speedup` is over plain decoding; each prompt is decoded by all of them before the next.
    """
    tried = {
        name: {
            shown(shape): ExpansionDrafter.of(drafts, shape)
            for shape in _shapes(TIMED, name, len(drafts))
        }
        for name, drafts in pair.pools.items()
    }
    rows = []
    for temperature in TEMPERATURES:
        shapes: dict[str, str] = {}
        chosen: dict[str, ExpansionDrafter | None] = {PLAIN: None}
        for name, drafters in tried.items():
            rates = speeds(pair.target, drafters, development, temperature)
            shapes[name] = max(rates, key=lambda shape: rates[shape])
            chosen[name] = drafters[shapes[name]]
        rates = speeds(pair.target, chosen, task, temperature)
        rows += [
            {"pool": name, "temperature": temperature, "shape": shapes.get(name, ""),
             "speedup": rates[name] / rates[PLAIN], "tokens_per_second": rates[name]}
            for name in chosen
        ]  # fmt: skip
    return rows


def best_member(target: Model, drafts: Sequence[Model], task: Task) -> int:
    """The member whose chain of 8 gives most tokens per step, both temperatures counted alike.

    As `heldout` estimates it along the target's own continuations.
    """
    texts = [continuations(target, task, temperature) for temperature in TEMPERATURES]
    fields = (np.concatenate(field) for field in zip(*(t[:-1] for t in texts), strict=True))
    rows, depth = Collected(*fields, steps=task.new_tokens), min(8, task.new_tokens)
    held = hold_out(target, rows)

    def worth(draft: Model) -> float:
        found = estimates(held, view(draft, rows, target, depth), [], depth)
        return float(found["tokens_per_step"]) + float(found["sampled_tokens_per_step"])

    return max(range(len(drafts)), key=lambda number: worth(drafts[number]))


def shown(shape: Shape) -> str:
    """A shape as text: widths with commas, a member's tree from the next by a slash."""
    return "/".join(",".join(map(str, tree)) for tree in shape)
