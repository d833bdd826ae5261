"""Loads on simulated machines: those drawn at random, and those that the tests hold to a bound."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.simulation.machines import llama_8b_on_h100, llama_8b_on_v5e, processor
from benchmarks.simulation.simulator import (
    SETTINGS,
    Result,
    World,
    controller_of,
    fixed,
    simulate,
)
from benchmarks.simulation.workload import (
    CODE,
    PROSE,
    Arrival,
    Kinds,
    Rate,
    Truth,
    arrivals,
    at_once,
    bursts,
    constant,
    ramp,
    random_weights,
    steps,
    switching,
    usual,
)
from specjax.goodput.controller import Options
from specjax.goodput.policy import PLAIN

NAMES = tuple(setting.name for setting in SETTINGS)


class Case(NamedTuple):
    """A load on a machine, of which the controller knows the costs nearly."""

    name: str
    load: list[Arrival]
    world: World
    rows: int
    columns: int
    seed: int

    def auto(self, options: Options = Options()) -> Result:
        """What the controller makes of it."""
        machine = self.world.machine
        policy = controller_of(machine, self.rows, columns=self.columns, options=options)
        return simulate(policy, self.load, self.world, self.rows, seed=self.seed)

    def fixed(self, name: str) -> Result:
        """What one setting makes of it."""
        return simulate(fixed(name, self.rows), self.load, self.world, self.rows, seed=self.seed)


def capacity(world: World, rows: int, kinds: Kinds) -> float:
    """Requests a second of a server that drafts nothing and never waits."""
    result = simulate(fixed(PLAIN, rows), at_once(12 * rows, 0, kinds), world, rows)
    return len(result.served) / result.seconds


def random_case(seed: int, requests: int = 400) -> Case:
    """A load shape, machine and acceptance drawn from many."""
    rng = random.Random(seed)
    make, rows, columns = rng.choice(
        [(processor, 4, 64), (processor, 8, 64), (llama_8b_on_h100, 16, 512),
         (llama_8b_on_h100, 48, 1536), (llama_8b_on_v5e, 16, 512)]
    )  # fmt: skip
    machine = make(SETTINGS)
    truth = Truth(
        usual(rng.gauss(0.0, 0.5)), effect=rng.uniform(0.1, 0.5), gain=rng.uniform(0.2, 0.4)
    )
    factors = {name: rng.lognormvariate(0.0, 0.1) for name in NAMES}
    world = World(machine, truth, factors)
    kinds = Kinds(temperatures=rng.choice([(0.0,), (0.8,), (0.0, 0.8)]))
    most = capacity(world, rows, kinds)
    seconds = requests / (0.6 * most)
    text, what = _text(rng, seconds)
    shape, highest, how = _shape(rng, most, seconds)
    load = arrivals(shape, highest, seconds, seed, kinds._replace(text=text))
    name = f"{make.__name__} {rows} rows, T {kinds.temperatures}, {what}, {how}"
    return Case(name, load, world, rows, columns, seed)


def _text(rng: random.Random, seconds: float) -> tuple[Callable[[float], str], str]:
    mixed = random.Random(rng.random())
    return rng.choice(
        [
            (lambda now: CODE, "code"),
            (lambda now: PROSE, "prose"),
            (switching(CODE, PROSE, seconds / 2), "code, then prose"),
            (lambda now: mixed.choice((CODE, PROSE)), "both"),
        ]
    )


def _shape(rng: random.Random, most: float, seconds: float) -> tuple[Rate, float, str]:
    low, high = rng.uniform(0.15, 0.6), rng.uniform(0.6, 1.3)
    first, last = rng.sample((low, high), 2)
    between = f"{low:.2f} to {high:.2f}"
    rate, how = rng.choice(
        [
            (constant(low * most), f"constant {low:.2f}"),
            (constant(high * most), f"constant {high:.2f}"),
            (steps([low * most, high * most] * 2, seconds), f"steps {between}"),
            (ramp(first * most, last * most, seconds), f"ramp {first:.2f} to {last:.2f}"),
            (bursts(low * most, high * most, seconds / 10), f"bursts {between}"),
        ]
    )
    return rate, high * most, how


class Compared(NamedTuple):
    """The controller against the best fixed setting in hindsight, of goodput and of latency.

    Both are 0 where it is as good; negative where it is better.
    """

    goodput: float
    latency: float
    best: str
    soonest: str


def compare(case: Case, auto: Result, names: Sequence[str] = NAMES) -> Compared:
    """What the controller loses in a case."""
    found = {name: case.fixed(name) for name in names}
    best = max(found, key=lambda name: found[name].goodput)
    soonest = min(found, key=lambda name: found[name].mean_latency)
    return Compared(
        1 - auto.goodput / found[best].goodput,
        auto.mean_latency / found[soonest].mean_latency - 1,
        best, soonest,
    )  # fmt: skip


ROWS = 4
RATE = 1.7
"""Requests a second that four rows of `processor` serve without drafts, nearly."""
MACHINE = processor(SETTINGS)


def shapes(seconds: float = 150.0) -> dict[str, list[Arrival]]:
    """Loads of four rows, by their names."""
    mixed = Kinds(temperatures=(0.0, 0.8))
    turned = Kinds(text=switching(CODE, PROSE, seconds / 2))
    made = {
        "low": (constant(0.3 * RATE), Kinds()),
        "middle": (constant(0.8 * RATE), Kinds()),
        "low, sampled": (constant(0.3 * RATE), Kinds(temperatures=(0.8,))),
        "middle, mixed": (constant(0.8 * RATE), mixed),
        "code, then prose": (constant(0.7 * RATE), turned),
        "steps": (steps((0.3 * RATE, 1.2 * RATE), seconds), mixed),
        "ramp": (ramp(0.2 * RATE, 1.2 * RATE, seconds), mixed),
        "bursts": (bursts(0.3 * RATE, 1.2 * RATE, 15.0), mixed),
    }
    load = {
        name: arrivals(rate, 1.2 * RATE, seconds, place, kinds)
        for place, (name, (rate, kinds)) in enumerate(made.items())
    }
    return load | {
        "high": at_once(140, 1, Kinds()),
        "high, sampled": at_once(140, 2, Kinds(temperatures=(0.8,))),
    }


EIGHT = {"eight rows, high": (0.0,), "eight rows, high, sampled": (0.8,)}
"""Loads of eight rows, and their temperatures."""


def eight_rows() -> dict[str, list[Arrival]]:
    """Loads of eight rows: prompts and steps share the time, and long steps let prompts be read in
    large chunks.
    """
    return {name: at_once(200, 3, Kinds(temperatures=own)) for name, own in EIGHT.items()}


def other_machine(seed: int) -> dict[str, float]:
    """Each setting's seconds are off by another factor, up to three times."""
    rng = random.Random(seed)
    return {name: 3 ** rng.uniform(-1, 1) for name in NAMES}


WRONG = {
    "random weights": World(MACHINE, Truth(random_weights())),
    "it becomes bad": World(MACHINE, Truth(changes=((10.0, -5.0),))),
    **{f"another machine {n}": World(MACHINE, factors=other_machine(n)) for n in range(4)},
}
