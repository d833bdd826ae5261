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
import time
from typing import Any

import jax
import tyro

from benchmarks.offload.disk import POLL_SECONDS, planned_bytes, read_rate
from benchmarks.system import Peak, anonymous_bytes
from specjax.base.output import write_json
from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import bytes_of
from specjax.decoding.generate import begin, steps
from specjax.decoding.request import prepare
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.models.memory import readable


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
        "rows": {
            method: {name: statistics.median(row[name] for row in own) for name in own[0]}
            for method, own in rows.items()
        },
    }


def _steps(pair: Pair, method: str, tokens: list[int], bench: Bench) -> dict[str, float]:
    """What steps of a continuation take and read, after the first."""
    cache = pair.target.expert_cache
    assert cache is not None
    setting = registry.setting_of(method, drafts=len(pair.drafts))
    request = prepare(
        jax.random.key(0), pair.target, registry.build(setting, pair), [tokens],
        max_new_tokens=bench.new, sampling=Sampling(bench.temperature), stop_at_eos=False,
    )  # fmt: skip
    start = time.perf_counter()
    begun = jax.block_until_ready(begin(request))
    prompt, taken, made, before = time.perf_counter() - start, [], 0, cache.reads
    for state, gave in steps(request, begun):
        jax.block_until_ready(state.last)
        now = time.perf_counter()
        if taken:
            made += int(gave.count[0])
        else:
            before = dataclasses.replace(cache.reads)
        taken.append(now - start)
        start = now
    reads, layers = cache.reads.since(before), len(cache.layers)
    return {
        "prompt_seconds": prompt,
        "step_seconds": statistics.median(taken[1:]),
        "tokens_per_step": made / len(taken[1:]),
        "tokens_per_second": made / sum(taken[1:]),
        "experts_taken": reads.taken / reads.passes / layers,
        "experts_read": reads.read / reads.passes / layers,
        "bytes_read": reads.bytes / reads.passes,
        "planned_bytes": planned_bytes(request),
    }


def main() -> None:
    """Prints the figures, and writes them."""
    bench = tyro.cli(Bench)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    before = anonymous_bytes()
    with Peak(POLL_SECONDS) as peak:
        found = measured(bench)
    found |= {"anonymous_bytes_before": before, "peak_anonymous_bytes": peak.bytes}
    if bench.json is not None:
        write_json(bench.json, found)
    planned = round(max(row["planned_bytes"] for row in found["rows"].values()))
    print(
        f"{found['parameters']:,} parameters, {found['experts_in_memory']} experts in memory; "
        f"files by themselves {found['files_gb_per_second']:.2f} GB/s, all weights in "
        f"{found['seconds_to_read_all']:.1f} s; {found['guessed_right']:,} of "
        f"{found['guessed']:,} guesses right; at most {readable(peak.bytes)} of anonymous memory, "
        f"{readable(before)} of it before loading; planned: {readable(planned)}, "
        f"{readable(found['held_bytes'])} of it for weights"
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
