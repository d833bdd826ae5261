"""A target streamed from disk: its steps against the disk's own rate, and speculation over it.

    specjax inflate bundled folder --parameters 2B
    python -m benchmarks.offload.disk folder humaneval.jsonl --memory 1GiB

In every round the layers are read with nothing computed, and the files past the system's cache by a
loop of its own, plain steps are timed, and steps of each budget; what is compared is of the same
round. Figures are medians over rounds.
"""

import contextlib
import dataclasses
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from benchmarks.system import Peak, anonymous_bytes
from specjax.base.output import write_json
from specjax.base.sampling import Sampling
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.huggingface import read_config
from specjax.checkpoints.offload.memory import division
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import bytes_of
from specjax.decoding import streamed
from specjax.decoding.generate import begin, steps
from specjax.decoding.request import Request, memory_plan, prepare, visits
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.methods.choice import no_deeper
from specjax.methods.method import Setting
from specjax.models.memory import readable
from specjax.models.transformer import Model

_READERS, _PIECE = 4, 8 * 2**20
_READS = 2
POLL_SECONDS = 0.02
"""Between two looks at the memory."""
_PAUSE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    model: tyro.conf.Positional[str]
    """A folder of safetensors files."""
    prompts: tyro.conf.Positional[str]
    """A file of prompts."""
    memory: str = "1GiB"
    """For the weights."""
    layers: int | None = None
    """So many layers in memory, whatever that takes, instead."""
    offload: str = "disk"
    """Or host."""
    dtype: str = "bfloat16"
    """Of the weights."""
    budgets: tuple[int, ...] = (15, 63, 255)
    """Of best-first trees at temperature 0; above it of static ones."""
    temperature: float = 0.0
    draft: str = "bundled/0,bundled/1,bundled/2"
    """Drafts."""
    levels: int | None = None
    """How deep drafts go at most; above temperature 0 it is a chain then, whatever the budget."""
    rounds: int = 3
    """Each of another prompt."""
    plain_steps: int = 4
    """Of plain decoding in a round."""
    new: int = 96
    """Tokens of a speculative continuation."""
    resident: bool = True
    """Also time the steps with all layers in memory."""
    json: str | None = None
    """Where the figures go."""


def read_seconds(target: Model) -> float:
    """Seconds of a pass that computes nothing: the mean of two, after one that fills the ring."""
    ends = []
    for _ in range(_READS + 1):
        with target.in_pass():
            for index in range(target.config.num_layers):
                target.layer(index)
        ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / _READS


def read_rate(folder: str) -> float:
    """Bytes a second at which a model's files are read past the system's cache, and dropped."""
    time.sleep(_PAUSE_SECONDS)  # until the target has read ahead
    files = [str(each) for each in sorted(Path(folder).glob("*.safetensors"))]
    pieces = [
        (file, at)
        for file in files
        for at in range(0, os.path.getsize(file) // _PIECE * _PIECE, _PIECE)
    ]
    opened = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}
    own = threading.local()

    def read(file: str, at: int) -> int:
        if not hasattr(own, "page"):
            own.page = mmap.mmap(-1, _PIECE)
        return os.preadv(opened[file], [own.page], at)

    start = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        size = sum(pool.map(read, *zip(*pieces, strict=True)))
    taken = time.perf_counter() - start
    for number in opened.values():
        os.close(number)
    return size / taken


class Steps(NamedTuple):
    """What steps of a continuation took.

    Attributes:
      seconds: of each after the first.
      tokens: that they gave.
      drafting: seconds in which each tree grew.
      planned: bytes of memory that the plan says.
    """

    seconds: list[float]
    tokens: int
    drafting: list[float]
    planned: int


def planned_bytes(request: Request) -> int:
    """The bytes of memory that a request takes by the plan, weights included."""
    target, drafter, rule = request.target, request.drafter, request.rule
    visiting = visits(target, drafter, rule, request.rows.counts is not None)
    rows, width = request.rows.prompt.shape
    return memory_plan(target, drafter, rule, rows, width, request.slots, visiting).total


@contextlib.contextmanager
def drafting_timed(into: list[float]) -> Iterator[None]:
    """Notes how long each tree of a streamed target takes to grow."""
    real = streamed._draft

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        made = jax.block_until_ready(real(*arguments))  # the first layer waits for it anyway
        into.append(time.perf_counter() - start)
        return made

    streamed._draft = timed
    try:
        yield
    finally:
        streamed._draft = real


def step_times(
    pair: Pair,
    setting: Setting,
    tokens: list[int],
    new: int,
    temperature: float,
    most: int | None = None,
    after_first: Callable[[], None] = lambda: None,
) -> Steps:
    """Times steps of a continuation of `new` tokens, `most` of them, after the first."""
    drafter = registry.build(setting, pair)
    request = prepare(
        jax.random.key(0), pair.target, drafter, [tokens], max_new_tokens=new,
        sampling=Sampling(temperature), stop_at_eos=False,
    )  # fmt: skip
    taken, made, drafting = [], 0, []
    start = None
    with drafting_timed(drafting):
        for state, gave in steps(request, begin(request)):
            count = int(jax.block_until_ready(gave.count)[0])
            jax.block_until_ready(state.last)
            now = time.perf_counter()
            if start is None:
                after_first()
            else:
                taken.append(now - start)
                made += count
            start = now
            if most is not None and len(taken) == most:
                break
    return Steps(taken, made, drafting[1:], planned_bytes(request))


def room_of(bench: Bench) -> int | None:
    """Bytes for the weights."""
    if bench.layers is None:
        return bytes_of("--memory", bench.memory)
    files = find(bench.model)
    config, _ = read_config(files.path)
    split = partial(division, files, config, jnp.dtype(bench.dtype), offload=bench.offload)
    whole = split(1 << 50)
    least = whole.outer + max(whole.layers)
    while True:  # the ring takes some layers more
        with contextlib.suppress(CheckpointError):
            if split(least).resident >= bench.layers:
                return least
        least += max(whole.layers) // 2


def settings_of(bench: Bench, pair: Pair) -> Iterator[tuple[str, Setting]]:
    """Plain decoding, and a tree of each budget."""
    yield "plain", Setting()
    for budget in bench.budgets:
        method = "specexec" if bench.temperature == 0 else "tree"
        setting = registry.setting_of(method, budget=budget, drafts=len(pair.drafts))
        if bench.levels is not None:
            setting = no_deeper(setting, bench.levels)
        yield f"{method}:{budget}", setting


def measured(bench: Bench) -> dict[str, Any]:
    """All figures."""
    pair = load_pair(
        bench.model, bench.draft, dtype=bench.dtype, offload=bench.offload, memory=room_of(bench)
    )
    target = pair.target
    if not target.is_offloaded or target.expert_cache is not None:
        raise ValueError(
            f"{bench.model} has no layers that are read whole; of a mixture whose experts are read "
            "one by one, run benchmarks.offload.experts."
        )
    size = target.bytes_a_pass
    pairs = {"disk": pair}
    if bench.resident:
        pairs["memory"] = pair._replace(
            target=load_pair(bench.model, dtype=bench.dtype, offload="disk", memory=1 << 50).target
        )
    chosen, _ = prompts.fitting(
        prompts.read(bench.prompts)[: bench.rounds + 1],
        pair.tokenizer, target.config.max_positions, bench.new,
    )  # fmt: skip
    rows: dict[str, list[dict[str, float]]] = {}
    reads, rates, planned = [], [], 0
    for number, prompt in enumerate(chosen):
        rates.append(read_rate(bench.model))
        reads.append(read_seconds(target))
        for where, own in pairs.items():
            for name, setting in settings_of(bench, own):
                most = bench.plain_steps if name == "plain" else None
                found = step_times(own, setting, prompt.tokens, bench.new, bench.temperature, most)
                planned = max(planned, found.planned if where == "disk" else 0)
                if number:  # the first compiles
                    step = statistics.median(found.seconds)
                    row = {
                        "step_seconds": step,
                        "drafting_seconds": statistics.median(found.drafting or [0.0]),
                        "tokens_per_step": found.tokens / len(found.seconds),
                        "tokens_per_second": found.tokens / sum(found.seconds),
                        "step_over_read": step / reads[-1],
                    }
                    rows.setdefault(f"{where} {name}", []).append(row)
                    print(number, where, name, *(f"{x:.3f}" for x in row.values()), flush=True)
    rows_of = {name: medians(own) for name, own in rows.items()}
    plain = rows_of["disk plain"]["tokens_per_second"]
    for own in rows_of.values():
        own["over_plain_from_disk"] = own["tokens_per_second"] / plain
    read = statistics.median(reads[1:])
    print("reading alone, s:", *(f"{each:.3f}" for each in reads), flush=True)
    return {
        **timing.environment(),
        "config": dataclasses.asdict(bench),
        "parameters": target.config.num_parameters,
        "layers": target.config.num_layers,
        "layers_in_memory": len(target.layers),
        "held_bytes": target.held_bytes,
        "planned_bytes": planned,
        "bytes_a_pass": size,
        "read_seconds": reads[1:],
        "read_gb_per_second": size / read / 1e9,
        "files_gb_per_second": statistics.median(rates[1:]) / 1e9,
        "rows": rows_of,
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def with_peak(measure: Callable[[], dict[str, Any]], json: str | None) -> dict[str, Any]:
    """All figures, with the most memory that measuring them took; written to a file if it is named.

    `memory` is a sentence about it.
    """
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    before = anonymous_bytes()
    with Peak(POLL_SECONDS) as peak:
        found = measure()
    found |= {"anonymous_bytes_before": before, "peak_anonymous_bytes": peak.bytes}
    if json is not None:
        write_json(json, found)
    return found | {
        "memory": f"at most {readable(peak.bytes)} of anonymous memory, {readable(before)} of it "
        f"before loading; planned: {readable(found['planned_bytes'])}, "
        f"{readable(found['held_bytes'])} of it for weights"
    }


def main() -> None:
    """Prints the figures, and writes them."""
    bench = tyro.cli(Bench)
    found = with_peak(partial(measured, bench), bench.json)
    print(
        f"{found['parameters']:,} parameters, {found['layers_in_memory']} of {found['layers']} "
        f"layers in memory; a pass reads {readable(found['bytes_a_pass'])} at "
        f"{found['read_gb_per_second']:.2f} GB/s (files by "
        f"themselves: {found['files_gb_per_second']:.2f}); {found['memory']}"
    )
    print("setting            step s  drafting  over reading  tokens/step  tokens/s  over plain")
    for name, row in found["rows"].items():
        print(
            f"{name:18} {row['step_seconds']:6.3f} {row['drafting_seconds']:9.3f} "
            f"{row['step_over_read']:13.3f} {row['tokens_per_step']:12.2f} "
            f"{row['tokens_per_second']:9.2f} {row['over_plain_from_disk']:11.2f}"
        )


if __name__ == "__main__":
    main()
