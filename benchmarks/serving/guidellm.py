"""What guidellm sees of a server, beside what the client of `specjax bench-serve` sees.

    python -m benchmarks.serving.guidellm humaneval.jsonl --guidellm PATH

Both send Poisson requests of the same mean rate, prompts and lengths to the same server, in turns.
guidellm (`pip install guidellm`, in an environment of its own) draws its own times and order, so
figures agree only within what other draws would give; each client's turns show how much that is.
"""

import dataclasses
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from specjax.checkpoints.pair import named
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.cli import bench_serve
from specjax.cli.options import BenchServe
from specjax.measure import load
from specjax.measure.load import Mix
from specjax.measure.load_rows import numbers_of
from specjax.measure.served import Server, serving

_FIELDS = ("mean latency s", "TTFT p50 ms", "TPOT p50 ms", "tokens/s")


@dataclasses.dataclass(frozen=True)
class Check:
    """What is compared."""

    file: tyro.conf.Positional[str]
    """Of prompts."""
    guidellm: str = "guidellm"
    """The command."""
    rate: float = 0.6
    """Of requests, as a share of what the server completes without drafting."""
    setting: str = "auto"
    """Of the server."""
    requests: int = 60
    """Of each client in a turn."""
    tokens: int = 128
    """Of every continuation."""
    turns: int = 3
    """How often."""


def _by_guidellm(
    check: Check, server: Server, rows: Path, rate: float, turn: int, out: Path
) -> list[float]:
    """What guidellm reports."""
    backend = {
        "kind": "openai_http", "target": f"http://127.0.0.1:{server.port}", "model": load.MODEL,
        "request_format": "/v1/completions", "extras": {"body": {"temperature": 0.0}},
    }  # fmt: skip
    file = out / f"{turn}.json"
    subprocess.run(
        [
            check.guidellm, "run", "--disable-console",
            "--backend", json.dumps(backend),
            "--profile", json.dumps({"kind": "poisson", "rate": [rate]}),
            "--constraint", json.dumps({"kind": "max_requests", "count": check.requests}),
            "--data", json.dumps({"kind": "json_file", "path": str(rows)}),
            "--seed", json.dumps({"kind": "static", "value": turn}),
            "--output", json.dumps({"kind": "json", "path": str(file)}),
        ],
        check=True,
    )  # fmt: skip
    metrics = json.loads(file.read_text("utf-8"))["benchmarks"][0]["metrics"]

    def of(name: str, statistic: str) -> float:
        return metrics[name]["successful"][statistic]

    return [
        of("request_latency", "mean"),
        of("time_to_first_token_ms", "median"),
        of("inter_token_latency_ms", "median"),
        of("output_tokens_per_second", "mean"),
    ]


def _by_bench_serve(
    check: Check, server: Server, measurement: bench_serve.Measurement, mix: Mix, rate: float,
    turn: int,
) -> list[float]:  # fmt: skip
    """What our client reports."""
    plan = [
        each._replace(max_tokens=check.tokens)
        for each in load.at_rate(measurement.plan(mix, turn), rate)
    ]
    found = numbers_of([bench_serve.run(server, check.setting, plan)])
    return [
        found.mean_latency_s,
        1e3 * found.ttft_s_p50,
        1e3 * found.tpot_s_p50,
        found.goodput_tokens_per_s,
    ]


def _compare(
    check: Check, server: Server, measurement: bench_serve.Measurement, mix: Mix, rows: Path
) -> None:
    bench_serve.warm_up(server, measurement, mix)
    rate = check.rate * bench_serve.capacity_of(server, measurement, mix)[0]
    print(f"{rate:.3g} requests/s; {', '.join(_FIELDS)}", flush=True)
    taken: dict[str, list[Sequence[float]]] = {"bench-serve": [], "guidellm": []}
    for turn in range(check.turns):
        own = _by_bench_serve(check, server, measurement, mix, rate, turn)
        server.fix(check.setting)
        other = _by_guidellm(check, server, rows, rate, turn, rows.parent)
        server.wait_until_idle()
        for name, found in zip(taken, (own, other), strict=True):
            taken[name].append(found)
            print(turn, f"{name:12}", *(f"{value:8.3f}" for value in found), flush=True)
    for name, found in taken.items():
        print("median", f"{name:12}", *map(_shown, zip(*found, strict=True)))


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.3f}"


def main() -> None:
    """Prints what each client saw in each turn, and the medians."""
    check = tyro.cli(Check)
    options = BenchServe(
        prompts=check.file, settings=f"none,chain:3,chain:7,specexec:15,{check.setting}",
        requests=check.requests, max_new_tokens=check.tokens, turns=check.turns,
    )  # fmt: skip
    measurement = bench_serve.measurement_of(options)
    with tempfile.TemporaryDirectory(prefix="specjax-") as name:
        folder = Path(name)
        prepared = bench_serve.prepare(options, folder / "target")
        rows = folder / "prompts.jsonl"
        rows.write_text("".join(map(_line, _texts(check, prepared.prompts))), encoding="utf-8")
        flags = bench_serve.flags_of(measurement, folder / "target")
        with serving(flags, folder / "log") as server:
            _compare(check, server, measurement, measurement.mix(prepared), rows)


def _texts(check: Check, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Prompts as guidellm reads them, as text: none has special tokens."""
    tokenizer = tokenizer_of(named().target.path)
    return [
        {"prompt": tokenizer.decode(list(each)), "output_tokens_count": check.tokens}
        for each in prompts
    ]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


if __name__ == "__main__":
    main()
