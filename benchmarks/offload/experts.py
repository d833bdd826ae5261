"""A mixture whose experts are read from disk as they are taken: plain decoding, chains and trees.

    specjax inflate bundled folder --parameters 4B --experts 32 --experts-per-token 4
    python -m benchmarks.offload.experts folder humaneval.jsonl --memory 1GiB

Beside seconds and tokens of steps: how many of a layer's experts a pass takes and how many of these
it reads, its bytes, how long the disk needs for as many by itself, and what reading all weights for
every token would take. A step with drafts is compared with plain decoding of the same prompt.
Medians of the prompts, the first of which compiles and does not count.
"""

import dataclasses
import statistics
from functools import partial
from typing import Any

import tyro

from benchmarks.offload.disk import medians, read_rate, step_times, with_peak
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import bytes_of
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.models.expert_cache import Reads


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    model: tyro.conf.Positional[str]
    """A folder of safetensors files."""
    prompts: tyro.conf.Positional[str]
    """A file of prompts."""
    memory: str = "1GiB"
    """For the weights."""
    dtype: str = "bfloat16"
    """Of the weights."""
    methods: tuple[str, ...] = ("none", "chain:1", "chain:3", "chain:7", "specexec:15")
    """The first is what the others are compared with."""
    temperature: float = 0.0
    """Of all."""
    draft: str = "bundled/0"
    """Drafts."""
    rounds: int = 3
    """Each of another prompt."""
    new: int = 48
    """Tokens of a continuation."""
    json: str | None = None
    """Where the figures go."""


def measured(bench: Bench) -> dict[str, Any]:
    """All figures.

    Raises:
      ValueError: the experts of the model are all in memory.
    """
    pair = load_pair(
        bench.model,
        bench.draft,
        dtype=bench.dtype,
        offload="disk",
        memory=bytes_of("", bench.memory),
    )
    target = pair.target
    if target.expert_cache is None:
        raise ValueError(f"{bench.model} has no experts that are not in memory.")
    chosen, _ = prompts.fitting(
        prompts.read(bench.prompts)[: bench.rounds + 1],
        pair.tokenizer, target.config.max_positions, bench.new,
    )  # fmt: skip
    rows: dict[str, list[dict[str, float]]] = {}
    rates = []
    for number, prompt in enumerate(chosen):
        rates.append(read_rate(bench.model))
        first = None
        for method in bench.methods:
            row = _steps(pair, method, prompt.tokens, bench)
            first = first or row["tokens_per_second"]
            row["over_first"] = row["tokens_per_second"] / first
            row["over_reading"] = row["step_seconds"] * rates[-1] / row["bytes_read"]
            if number:
                rows.setdefault(method, []).append(row)
                print(number, method, {name: round(value, 3) for name, value in row.items()})
    rate, size = statistics.median(rates[1:]), timing.weight_bytes(target, 10**6)
    return {
        **timing.environment(),
        "config": dataclasses.asdict(bench),
        "parameters": target.config.num_parameters,
        "experts_in_memory": target.expert_cache.num_slots,
        "held_bytes": target.held_bytes,
        "files_gb_per_second": rate / 1e9,
        "seconds_to_read_all": size / rate,
        "guessed": target.expert_cache.reads.guessed,
        "guessed_right": target.expert_cache.reads.right,
        "planned_bytes": max(row["planned_bytes"] for own in rows.values() for row in own),
        "rows": {method: medians(own) for method, own in rows.items()},
    }


def _steps(pair: Pair, method: str, tokens: list[int], bench: Bench) -> dict[str, float]:
    """What steps of a continuation take and read."""
    cache = pair.target.expert_cache
    assert cache is not None
    setting = registry.setting_of(method, drafts=len(pair.drafts))
    before: list[Reads] = []

    def after_first() -> None:
        before.append(dataclasses.replace(cache.reads))

    found = step_times(pair, setting, tokens, bench.new, bench.temperature, after_first=after_first)
    reads, layers = cache.reads.since(before[0]), len(cache.layers)
    return {
        "step_seconds": statistics.median(found.seconds),
        "tokens_per_step": found.tokens / len(found.seconds),
        "tokens_per_second": found.tokens / sum(found.seconds),
        "experts_taken": reads.taken / reads.passes / layers,
        "experts_read": reads.read / reads.passes / layers,
        "bytes_read": reads.bytes / reads.passes,
        "planned_bytes": found.planned,
    }


def main() -> None:
    """Prints the figures, and writes them."""
    bench = tyro.cli(Bench)
    found = with_peak(partial(measured, bench), bench.json)
    print(
        f"{found['parameters']:,} parameters, {found['experts_in_memory']} experts in memory; "
        f"files by themselves {found['files_gb_per_second']:.2f} GB/s, all weights in "
        f"{found['seconds_to_read_all']:.1f} s; {found['guessed_right']:,} of "
        f"{found['guessed']:,} guesses right; {found['memory']}"
    )
    print(
        "method       step s  over reading  GB read  taken  read  tokens/step  tokens/s  over first"
    )
    for name, row in found["rows"].items():
        print(
            f"{name:12} {row['step_seconds']:6.3f} {row['over_reading']:13.2f} "
            f"{row['bytes_read'] / 1e9:8.2f} {row['experts_taken']:6.1f} "
            f"{row['experts_read']:5.1f} {row['tokens_per_step']:12.2f} "
            f"{row['tokens_per_second']:9.2f} {row['over_first']:11.2f}"
        )


if __name__ == "__main__":
    main()
