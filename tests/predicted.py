"""What the simulator foretells of a server on this machine, and what the server then does.

    python -m tests.predicted humaneval.jsonl --rates 0.4,0.8,1.2

A server runs each setting at each rate once; with what it then believes (its report) as costs and
as acceptance, the simulator serves the requests that the server is sent next.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from specjax.cli import bench_serve
from specjax.cli.options import BenchServe
from specjax.engine.simulator import Result, World, controller_of, simulate
from specjax.engine.workload import CODE, Arrival, Ends, Truth, usual
from specjax.goodput.acceptance import band
from specjax.goodput.machines import measured
from specjax.goodput.policy import DraftSetting
from specjax.goodput.survival import logit
from specjax.measure import load
from specjax.measure.load import Asked, Mix
from specjax.measure.load_rows import AUTO, numbers_of
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
    settings: str = "off,chain:3,chain:7,tree:15,auto"
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
        if name == "tree:15"
    ]
    return Truth(ends, gain=max(fmean(gains), 0.0)) if gains else Truth(ends)


def _hazards(survival: Sequence[float]) -> list[float]:
    return [own / above for above, own in zip([1.0, *survival], survival, strict=False) if above]


def setting_of(name: str) -> DraftSetting:
    """What the policy knows of a setting of the bundled pair: its trees have at most 16 levels."""
    kind, _, count = name.partition(":")
    nodes = int(count or 0)
    chosen = kind in ("tree", "lookup")
    return DraftSetting(name, nodes, min(nodes, 16), not chosen, kind in ("chain", "tree"))


def foretell(
    report: Mapping[str, Any], requests: Sequence[Asked], name: str, rows: int, seeds: int = 5
) -> list[Result]:
    """What simulated servers make of requests."""
    machine, settings = measured(report), [setting_of(each) for each in report["settings"]]
    arrivals = [
        Arrival(each.due_s, len(each.prompt), each.max_tokens, each.temperature)
        for each in requests
    ]
    world = World(machine, truth_of(report))
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
    for _, rate, name in measurement.order():
        bench_serve.run(server, name, load.at_rate(measurement.plan(mix, 0), rate * capacity))
    report = server.report()
    print(f"off completes {capacity:.3g} requests/s, {tokens:.1f} tokens/s.", flush=True)
    print("rate setting   tokens/s: foretold, measured, ratio   mean latency, s: the same")
    for rate in measurement.rates:
        requests = load.at_rate(measurement.plan(mix, 1), rate * capacity)
        for name in measurement.settings:
            foretold = foretell(report, requests, name, options.rows)
            run = bench_serve.run(server, name, requests)
            was = numbers_of([run])
            expected = [
                fmean([each.throughput for each in foretold]),
                fmean([each.mean_latency for each in foretold]),
            ]
            real = [was.goodput_tokens_per_s, was.mean_latency_s]
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
