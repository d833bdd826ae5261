"""What the controller would do, simulated: `python -m benchmarks.simulation [PART ...]`.

Parts: regret, ablations, reconvergence, h100, grown, replicas, all of them by default; and checks,
which the tests run.
Minutes on one core. Every number is of a cost model and of synthetic acceptance (see
`benchmarks.simulation.machines` and `benchmarks.simulation.workload`).
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from statistics import fmean

from benchmarks.simulation.cases import (
    EIGHT,
    MACHINE,
    NAMES,
    RATE,
    ROWS,
    WRONG,
    Case,
    Compared,
    capacity,
    compare,
    eight_rows,
    random_case,
    shapes,
)
from benchmarks.simulation.machines import (
    grown_8b_on_h100,
    llama_8b_on_h100,
    llama_8b_on_v5e,
)
from benchmarks.simulation.simulator import (
    SETTINGS,
    Result,
    World,
    controller_of,
    fixed,
    simulate,
    simulate_replicas,
)
from benchmarks.simulation.workload import Kinds, Truth, arrivals, at_once, constant
from specjax.goodput.controller import Options
from specjax.goodput.policy import PLAIN, FixedPolicy

ABLATIONS = {
    "no packing": Options(packing=False),
    "geometric α": Options(survival=False),
    "no censoring": Options(censoring=False),
    "no probing": Options(probing=False),
    "no hysteresis": Options(hysteresis=False),
}
SEEDS = 4
"""Runs of a load whose drafts fare differently."""


def regret(count: int = 50) -> None:
    """Prints what the controller loses against the best fixed setting, over random load shapes."""
    lost: list[Compared] = []
    for seed in range(count):
        case = random_case(seed)
        auto = case.auto()
        lost.append(found := compare(case, auto))
        shares = ", ".join(f"{name} {share:.2f}" for name, share in list(auto.shares.items())[:3])
        print(
            f"{seed:3} {found.goodput:+7.1%} {found.latency:+7.1%}  best {found.best:8} "
            f"{found.soonest:8} auto {shares}; {case.name}",
            flush=True,
        )
    for name, own in (
        ("goodput", [e.goodput for e in lost]),
        ("latency", [e.latency for e in lost]),
    ):
        mean = sum(own) / len(own)
        kept = sum(max(each, 0.0) for each in own) / len(own)
        print(f"regret in {name}: mean {mean:+.1%} (gains as 0: {kept:.1%}), worst {max(own):.1%}")


def ablations(count: int = 20) -> None:
    """Prints the goodput without a part of the controller, relative to all of it."""
    cases = [random_case(seed) for seed in range(count)]
    whole = [case.auto() for case in cases]
    for name, options in ABLATIONS.items():
        found = [case.auto(options) for case in cases]
        goodput = [own.goodput / all.goodput for own, all in zip(found, whole, strict=True)]
        latency = [
            own.mean_latency / all.mean_latency for own, all in zip(found, whole, strict=True)
        ]
        print(
            f"{name:14} goodput {sum(goodput) / count:.3f} (least {min(goodput):.3f}), "
            f"mean latency {sum(latency) / count:.3f} (most {max(latency):.3f})",
            flush=True,
        )


def reconvergence(seeds: int = 16, at: float = 10.0, most: int = 600) -> None:
    """Prints how many steps after drafts become worse or better the controller is as good as the
    best fixed setting is in the same steps, within a twentieth, on the average of some runs.
    """
    for name, before, after in (
        ("worse by 1 logit (code, then prose)", 0.0, -1.0),
        ("worse by 2.5", 0.0, -2.5),
        ("useless", 0.0, -8.0),
        ("better by 1", -1.0, 0.0),
        ("better by 2.5", -2.5, 0.0),
        ("good, from useless", -8.0, 0.0),
    ):
        world = World(MACHINE, Truth(changes=((0.0, before), (at, after))))
        case = Case(name, at_once(700, 3), world, 8, 64, 0)
        found = {each: _goodput_from(case.fixed(each), at) for each in NAMES}
        best = max(found, key=lambda each: found[each])
        cases = [case._replace(seed=seed) for seed in range(seeds)]
        own, fixed_ones = (
            [_windows(run, at, most) for run in runs]
            for runs in ([each.auto() for each in cases], [each.fixed(best) for each in cases])
        )
        mean = {steps: fmean([each[steps] for each in own])
                / fmean([each[steps] for each in fixed_ones]) for steps in own[0]}  # fmt: skip
        places = list(mean)
        back = next(  # by three windows, as one is uncertain by a tenth
            (at for number, at in enumerate(places[:-2])
             if fmean([mean[each] for each in places[number : number + 3]]) >= 0.95), None
        )  # fmt: skip
        shown = ", ".join(f"{steps} {mean[steps]:.2f}" for steps in (0, 50, 100, 200, 400))
        print(
            f"{name}: within 5 % of {best} after {back} steps; share by steps: {shown}", flush=True
        )


def _goodput_from(run: Result, at: float) -> float:
    first = next(mark for mark in run.marks if mark.busy >= at)
    last = run.marks[-1]
    return (last.tokens - first.tokens) / (last.busy - first.busy)


def _windows(run: Result, at: float, most: int, steps: int = 50) -> dict[int, float]:
    """Tokens a second of fifty steps, by how many steps after a time they begin."""
    first = next(place for place, mark in enumerate(run.marks) if mark.busy >= at)
    found = {}
    for number in range(most // steps):
        one, other = run.marks[first + number : first + number + 2]
        found[number * steps] = (other.tokens - one.tokens) / (other.busy - one.busy)
    return found


def h100(rows: int = 64) -> None:
    """Prints what is chosen for Llama-3.1-8B at rising load, on H100 and on v5e."""
    for make, columns in ((llama_8b_on_h100, 512), (llama_8b_on_v5e, 512)):
        machine = make(SETTINGS)
        print(machine.name, f"{rows} rows")
        world, kinds = World(machine), Kinds((128, 1024), (64, 512), (0.0, 0.8))
        most = capacity(world, rows, kinds)
        for share in (0.05, 0.25, 0.5, 0.75, 1.0, 1.2):
            load = arrivals(constant(share * most), share * most, 600 / most, 1, kinds)
            auto = Case("", load, world, rows, columns, 0).auto()
            plain = simulate(fixed(PLAIN, rows), load, world, rows)
            shares = ", ".join(f"{n} {part:.2f}" for n, part in list(auto.shares.items())[:4])
            print(
                f"  {share:4.2f} of plain decoding's capacity ({share * most:.1f} requests/s): "
                f"goodput {auto.goodput:.0f} ({PLAIN} {plain.goodput:.0f}) tokens/s, mean latency "
                f"{auto.mean_latency:.2f} ({PLAIN} {plain.mean_latency:.2f}) s; {shares}",
                flush=True,
            )


def grown(every: tuple[int, ...] = (1, 8, 32, 64, 256)) -> None:
    """Prints what is chosen for a pair of 8B on an H100, by what its engine measured there, where
    requests always wait.
    """
    settings = [each for each in SETTINGS if each.name == PLAIN or each.is_chain]
    world = World(grown_8b_on_h100(settings))
    print(world.machine.name)
    for temperature, rows in itertools.product((0.0, 0.8), every):
        load = at_once(max(800, 24 * rows), 1, Kinds((32, 200), (32, 128), (temperature,)))
        auto = controller_of(world.machine, rows, settings, columns=8 * rows, row_factor=8)
        found = simulate(auto, load, world, rows, settings)
        ones = {
            each.name: simulate(
                FixedPolicy(each, rows, row_factor=None), load, world, rows, settings
            )
            for each in settings
        }
        shares = ", ".join(f"{name} {part:.2f}" for name, part in list(found.shares.items())[:3])
        fixed_ones = ", ".join(f"{name} {one.throughput:.0f}" for name, one in ones.items())
        print(
            f"  T = {temperature}, {rows} rows: auto {found.throughput:.0f} tokens/s ({shares}); "
            f"{fixed_ones}",
            flush=True,
        )


def replicas(count: int = 48, rate: float = 1000.0, requests: int = 100_000) -> None:
    """Prints what a thousand requests a second over replicas of H100 would see."""
    world, rows = World(llama_8b_on_h100(SETTINGS)), 64
    kinds = Kinds((64, 256), (32, 192), (0.0, 0.8))
    load = arrivals(constant(rate), rate, requests / rate, 1, kinds)
    for name in (PLAIN, "chain:3", "auto"):
        began = time.perf_counter()
        made = [
            controller_of(world.machine, rows, columns=512) if name == "auto" else fixed(name, rows)
            for _ in range(count)
        ]
        found = simulate_replicas(made, load, world, rows)
        taken = time.perf_counter() - began
        shares = ", ".join(f"{n} {part:.2f}" for n, part in list(found.shares.items())[:4])
        print(
            f"{name}: {rate:.0f} requests/s over {count} replicas of H100: mean latency "
            f"{found.mean_latency:.2f} s, p99 {found.quantile(0.99, lambda e: e.latency):.2f} s, "
            f"TTFT p50 {found.quantile(0.5, lambda e: e.ttft):.3f} s; {shares} "
            f"({len(load)} requests and {sum(found.steps.values())} steps in {taken:.0f} s)",
            flush=True,
        )


FEW = ("middle, mixed", "bursts", "high, sampled", "eight rows, high")
FEW_WRONG = ("it becomes bad", "another machine 0")
"""Loads and mistaken beliefs that stand for the others where time is short."""


def checks() -> None:
    """Prints `checked` as JSON."""
    print(json.dumps(checked(), indent=1))


def checked(few: bool = False) -> dict[str, float]:
    """What `tests/test_simulator.py` holds to a bound, of all loads or of a few."""
    world, found = World(MACHINE), dict[str, float]()
    for name, load in (shapes() | eight_rows()).items():
        if few and name not in FEW:
            continue
        case = Case(name, load, world, 8 if name in EIGHT else ROWS, 64, 0)
        best = max(case.fixed(each).goodput for each in NAMES)
        ratios = [case._replace(seed=seed).auto().goodput / best for seed in range(SEEDS)]
        found[name], found[f"{name}, least"] = fmean(ratios), min(ratios)
    for name, world in WRONG.items():
        for temperature in (0.0, 0.8) if name in FEW_WRONG or not few else ():
            load = at_once(200, 5, Kinds(temperatures=(temperature,)))
            case = Case(name, load, world, 8, 64, 0)
            runs = [case._replace(seed=seed).auto() for seed in range(SEEDS)]
            auto = min(run.goodput_after(200) for run in runs)
            found[f"{name}, T = {temperature}"] = auto / case.fixed(PLAIN).goodput_after(200)
    found["targets met"], found["met without"] = _targets()
    return found


def _targets(most_ms: float = 2.8) -> tuple[float, float]:
    """The share of requests that have a token in so many milliseconds, asked for and not."""
    load = arrivals(constant(1.2 * RATE), 1.2 * RATE, 100.0, 4)
    asked = [each._replace(max_tpot_ms=most_ms) for each in load]
    results = [Case("", own, World(MACHINE), ROWS, 64, 0).auto() for own in (asked, load)]
    shares = [sum(1000 * e.tpot <= most_ms for e in r.served) / len(load) for r in results]
    return shares[0], shares[1]


PARTS: dict[str, Callable[[], None]] = {
    "regret": regret, "ablations": ablations, "reconvergence": reconvergence, "h100": h100,
    "grown": grown, "replicas": replicas, "checks": checks,
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:] or [name for name in PARTS if name != "checks"]:
        PARTS[part]()
