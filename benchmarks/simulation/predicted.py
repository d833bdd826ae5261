"""What the simulator foretells of a server on this machine, and what the server then does.

    python -m benchmarks.simulation.predicted humaneval.jsonl --rates 0.4,0.8,1.2

A server runs each setting at each rate once; with the costs that it then believes in (its report),
and acceptance such that fixed settings give as many tokens a step as they gave, the simulator
serves the requests that the server is sent next.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from benchmarks.simulation.machines import measured
from benchmarks.simulation.simulator import Result, World, controller_of, simulate
from benchmarks.simulation.workload import CODE, Arrival, Ends, Truth, usual
from specjax.cli import bench_serve
from specjax.cli.options import BenchServe
from specjax.goodput.acceptance import band
from specjax.goodput.policy import DraftSetting
from specjax.goodput.survival import logit
from specjax.measure import load
from specjax.measure.load import Asked, Mix
from specjax.measure.load_rows import AUTO, LoadRun, numbers_of
from specjax.measure.served import Server, serving

_BANDS = {"0": 0.0, "0.6": 0.6, "1": 0.8, "above 1": 2.0}
"""A temperature of each band that a report names."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is foretold."""

    file: tyro.conf.Positional[str]
    """Of prompts."""
    rates: str = "0.4,0.8,1.2"
    """Of requests, as shares of what the server completes without drafting."""
    settings: str = "none,chain:3,chain:7,specexec:15,auto"
    """Of the server."""
    temperature: str = "0"
    """Of all requests; or mixed."""
    requests: int = 48
    """At each rate."""
    rows: int = 8
    """Of the server."""


def truth_of(report: Mapping[str, Any]) -> Truth:
    """How drafts fare by the survival curves of a server's report."""
    hazards = {
        (curve["method"], band(_BANDS[curve["temperature"]])): _hazards(curve["survival"])
        for curve in report["acceptance"]
        if curve["steps"]
    }
    ends: dict[tuple[str, str, int], Ends] = usual()
    for (name, number), found in hazards.items():
        kind = name.partition(":")[0]
        if kind in ("chain", "lookup"):
            later = fmean(found[1:]) if len(found) > 1 else found[0]
            ends[kind, CODE, number] = logit(found[0]), logit(later)
    gains = [  # a tree of 15 nodes has three of them at depth 1
        (logit(found[0]) - ends["chain", CODE, number][0]) / 3
        for (name, number), found in hazards.items()
        if name == "specexec:15"
    ]
    return Truth(ends, gain=max(fmean(gains), 0.0)) if gains else Truth(ends)


def fitted(
    truth: Truth, tokens_per_step: Mapping[str, float], temperatures: Sequence[float]
) -> Truth:
    """A truth whose settings give as many tokens a step as they gave.

    The curves of a report are of a request as good as others at a place as easy as others; that of
    places and requests of all kinds, as a simulation draws them, is another one. The longest chain
    moves the ends of all, the largest tree what trees gain.
    """

    def shifted(by: float) -> Truth:
        ends = {key: (first + by, later + by) if key[0] == "chain" else (first, later)
                for key, (first, later) in truth.ends.items()}  # fmt: skip
        return dataclasses.replace(truth, ends=ends, _made={})

    chains = [name for name in tokens_per_step if name.startswith("chain:")]
    if not chains:
        return truth
    longest = max(chains, key=_nodes_of)
    truth = shifted(_solve(lambda by: _given(shifted(by), longest, temperatures),
                           tokens_per_step[longest], -4.0, 4.0))  # fmt: skip
    trees = [name for name in tokens_per_step if name.startswith("specexec:")]
    if not trees:
        return truth
    largest = max(trees, key=_nodes_of)

    def gaining(gain: float) -> Truth:
        return dataclasses.replace(truth, gain=gain, _made={})

    return gaining(_solve(lambda gain: _given(gaining(gain), largest, temperatures),
                          tokens_per_step[largest], -1.0, 2.0))  # fmt: skip


def _nodes_of(name: str) -> int:
    return int(name.partition(":")[2])


def _solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a growing function has a value, between two numbers."""
    for _ in range(14):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return 0.5 * (low + high)


def _given(truth: Truth, name: str, temperatures: Sequence[float]) -> float:
    """Tokens that a step of a setting gives of many texts of 128 tokens."""
    setting, rng, tokens, steps = setting_of(name), random.Random(0), 0, 0
    for text in range(200):
        of = Arrival(0.0, temperature=temperatures[text % len(temperatures)])
        effect, text_effect, left = truth.draw_effect(rng), truth.draw_text_effect(rng, of), 128
        while left > 0:
            accepted = 0
            for chance in truth.hazards(setting, setting.nodes, of, effect + text_effect, 0.0):
                if rng.random() >= chance:
                    break
                accepted += 1
            own = min(accepted + 1, left)
            tokens, steps, left = tokens + own, steps + 1, left - own
            text_effect = truth.next_text_effect(rng, of, text_effect, own)
    return tokens / steps


def _hazards(survival: Sequence[float]) -> list[float]:
    return [own / above for above, own in zip([1.0, *survival], survival, strict=False) if above]


def setting_of(name: str) -> DraftSetting:
    """What the policy knows of a setting of the bundled pair: its trees have at most 16 levels."""
    kind, _, count = name.partition(":")
    nodes = int(count or 0)
    chosen = kind in ("specexec", "lookup")
    return DraftSetting(name, nodes, min(nodes, 16), not chosen, kind in ("chain", "specexec"))


def foretell(
    report: Mapping[str, Any],
    truth: Truth,
    requests: Sequence[Asked],
    name: str,
    rows: int,
    seeds: int = 5,
) -> list[Result]:
    """What simulated servers make of requests."""
    machine, settings = measured(report), [setting_of(each) for each in report["settings"]]
    arrivals = [
        Arrival(each.due_s, len(each.prompt), each.max_tokens, each.temperature)
        for each in requests
    ]
    world = World(machine, truth)
    found = []
    for seed in range(seeds):
        policy = controller_of(machine, rows, settings)
        policy.fix(None if name == AUTO else name)
        found.append(simulate(policy, arrivals, world, rows, settings, seed))
    return found


def _compare(server: Server, measurement: bench_serve.Measurement, mix: Mix) -> None:
    options = measurement.options
    bench_serve.warm_up(server, measurement, mix)
    capacity, tokens = bench_serve.capacity_of(server, measurement, mix)
    before: dict[str, list[LoadRun]] = {}
    temperatures: set[float] = set()
    for _, rate, name in measurement.order():
        asked = load.at_rate(measurement.plan(mix, 0), rate * capacity)
        temperatures |= {each.temperature for each in asked}
        before.setdefault(name, []).append(bench_serve.run(server, name, asked))
    report = server.report()
    # The most of any rate: where many rows run, large trees have no program.
    gave = {name: max(numbers_of([run]).tokens_per_step for run in runs)
            for name, runs in before.items() if name != AUTO}  # fmt: skip
    truth = fitted(truth_of(report), gave, sorted(temperatures))
    print(f"plain decoding completes {capacity:.3g} requests/s, {tokens:.1f} tokens/s.", flush=True)
    print(
        "rate setting   tokens/s: foretold, measured, ratio   mean latency, s: the same   "
        "tokens per step: the same"
    )
    for rate in measurement.rates:
        requests = load.at_rate(measurement.plan(mix, 1), rate * capacity)
        for name in measurement.settings:
            foretold = foretell(report, truth, requests, name, options.rows)
            run = bench_serve.run(server, name, requests)
            was = numbers_of([run])
            expected = [
                fmean([each.throughput for each in foretold]),
                fmean([each.mean_latency for each in foretold]),
                fmean([each.tokens_per_step for each in foretold]),
            ]
            real = [was.goodput_tokens_per_s, was.mean_latency_s, was.tokens_per_step]
            shown = [f"{a:8.3f} {b:8.3f} {a / b:6.3f}" for a, b in zip(expected, real, strict=True)]
            print(f"{rate:4.2f} {name:9} {'   '.join(shown)}", flush=True)


def main() -> None:
    """Prints tokens a second and mean latencies, foretold and measured, and their ratios."""
    asked = tyro.cli(Prediction)
    options = BenchServe(
        prompts=asked.file, rates=asked.rates, settings=asked.settings, requests=asked.requests,
        temperature=asked.temperature, rows=asked.rows, turns=1,
    )  # fmt: skip
    measurement = bench_serve.measurement_of(options)
    with tempfile.TemporaryDirectory(prefix="specjax-") as name:
        folder = Path(name)
        prepared = bench_serve.prepare(options, folder / "target")
        mix = measurement.mix(prepared)
        flags = bench_serve.flags_of(measurement, folder / "target")
        with serving(flags, folder / "log") as server:
            _compare(server, measurement, mix)


if __name__ == "__main__":
    main()
