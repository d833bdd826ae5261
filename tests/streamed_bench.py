"""A target streamed from disk: its steps against the disk's own rate, and speculation over it.

    specjax inflate bundled folder --parameters 2B
    python -m tests.streamed_bench folder humaneval.jsonl --memory 1GiB

In every round the same bytes are read with nothing else going on, plain steps are timed, and steps
of each budget; what is compared is of the same round. Figures are medians over rounds.
"""

import dataclasses
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tyro

from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.streaming import LayerReader
from specjax.cli.values import bytes_of
from specjax.decoding.generate import begin, steps
from specjax.decoding.request import prepare
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.methods.method import Setting
from specjax.models.memory import readable
from specjax.models.streamed import StreamedModel

_READERS = 4
_POLL_SECONDS, _PAUSE_SECONDS = 0.02, 2.0


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    model: tyro.conf.Positional[str]
    """A folder of safetensors files."""
    prompts: tyro.conf.Positional[str]
    """A file of prompts."""
    memory: str = "1GiB"
    """For the weights."""
    budgets: tuple[int, ...] = (15, 63, 255)
    """Of best-first trees at temperature 0; above it of static ones."""
    temperature: float = 0.0
    draft: str = "bundled/0,bundled/1,bundled/2"
    """Drafts."""
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


def anonymous_bytes() -> int:
    """Memory of this process that is of no file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak(threading.Thread):
    """The most anonymous memory that this process has while it is entered."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._stop_it = 0, threading.Event()

    def run(self) -> None:
        """Looks again and again."""
        while not self._stop_it.wait(_POLL_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_it.set()
        self.join()


def read_seconds(reader: LayerReader, layers: range) -> float:
    """Seconds in which the layers are read, two at a time, and nothing is done with them."""
    time.sleep(_PAUSE_SECONDS)  # until others have read ahead
    start = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: list[Any] = []
        for place in range(len(layers)):
            following = reader.begin(pool, place)[1]
            for each in waiting:
                each.result()
            waiting = following
        for each in waiting:
            each.result()
    return time.perf_counter() - start


def step_times(
    pair: Pair, setting: Setting, tokens: list[int], bench: Bench, most: int | None
) -> tuple[list[float], int]:
    """Seconds of each step after the first, and the tokens that they gave."""
    drafter = registry.build(setting, pair)
    request = prepare(
        jax.random.key(0), pair.target, drafter, [tokens], max_new_tokens=bench.new,
        sampling=Sampling(bench.temperature), stop_at_eos=False,
    )  # fmt: skip
    taken, made = [], 0
    start = None
    for state, gave in steps(request, begin(request)):
        count = int(jax.block_until_ready(gave.count)[0])
        jax.block_until_ready(state.last)
        now = time.perf_counter()
        if start is not None:
            taken.append(now - start)
            made += count
        start = now
        if most is not None and len(taken) == most:
            break
    return taken, made


def settings_of(bench: Bench, pair: Pair) -> Iterator[tuple[str, Setting]]:
    """Plain decoding, and a tree of each budget."""
    yield "plain", Setting()
    for budget in bench.budgets:
        method = "specexec" if bench.temperature == 0 else "tree"
        yield (
            f"{method}:{budget}",
            registry.setting_of(method, budget=budget, drafts=len(pair.drafts)),
        )


def measured(bench: Bench) -> dict[str, Any]:
    """All figures."""
    pair = load_pair(
        bench.model, bench.draft, dtype="bfloat16", offload="disk",
        memory=bytes_of("--memory", bench.memory),
    )  # fmt: skip
    target = pair.target
    assert isinstance(target, StreamedModel)
    assert isinstance(target.source, LayerReader)
    layers = range(len(target.layers), target.config.num_layers)
    pairs = {"disk": pair}
    # A reader of its own: the target's reads ahead into its buffers.
    alone = load_pair(
        bench.model, dtype="bfloat16", offload="disk", memory=bytes_of("--memory", bench.memory)
    ).target
    assert isinstance(alone, StreamedModel)
    assert isinstance(alone.source, LayerReader)
    if bench.resident:
        pairs["memory"] = pair._replace(
            target=load_pair(bench.model, dtype="bfloat16", offload="disk", memory=1 << 50).target
        )
    chosen, _ = prompts.fitting(
        prompts.read(bench.prompts)[: bench.rounds + 1],
        pair.tokenizer, target.config.max_positions, bench.new,
    )  # fmt: skip
    rows: dict[str, list[tuple[float, float]]] = {}
    reads = []
    for number, prompt in enumerate(chosen):
        reads.append(read_seconds(alone.source, layers))
        for where, own in pairs.items():
            for name, setting in settings_of(bench, own):
                most = bench.plain_steps if name == "plain" else None
                taken, made = step_times(own, setting, prompt.tokens, bench, most)
                if number:  # the first compiles
                    found = statistics.median(taken), made / sum(taken)
                    rows.setdefault(f"{where} {name}", []).append(found)
                    print(number, where, name, *(f"{x:.3f}" for x in found), len(taken), flush=True)
    read = statistics.median(reads[1:])
    size = target.source.bytes_a_pass
    plain = statistics.median(rate for _, rate in rows["disk plain"])
    return {
        **timing.environment(),
        "config": dataclasses.asdict(bench),
        "parameters": target.config.num_parameters,
        "layers": target.config.num_layers,
        "layers_in_memory": len(target.layers),
        "bytes_a_pass": size,
        "read_seconds": reads[1:],
        "read_gb_per_second": size / read / 1e9,
        "rows": {
            name: {
                "step_seconds": statistics.median(seconds for seconds, _ in own),
                "tokens_per_second": statistics.median(rate for _, rate in own),
                "over_plain_from_disk": statistics.median(rate for _, rate in own) / plain,
                "step_over_read": statistics.median(
                    seconds / floor for (seconds, _), floor in zip(own, reads[1:], strict=True)
                ),
            }
            for name, own in rows.items()
        },
    }


def main() -> None:
    """Prints the figures, and writes them."""
    bench = tyro.cli(Bench)
    with Peak() as peak:
        found = measured(bench)
    found["peak_anonymous_bytes"] = peak.bytes
    if bench.json is not None:
        Path(bench.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(
        f"{found['parameters']:,} parameters, {found['layers_in_memory']} of {found['layers']} "
        f"layers in memory; a pass reads {readable(found['bytes_a_pass'])} at "
        f"{found['read_gb_per_second']:.2f} GB/s; at most {readable(peak.bytes)} of anonymous "
        "memory"
    )
    print("setting            step s  over reading  tokens/s  over plain from disk")
    for name, row in found["rows"].items():
        print(
            f"{name:18} {row['step_seconds']:6.3f} {row['step_over_read']:13.3f} "
            f"{row['tokens_per_second']:9.2f} {row['over_plain_from_disk']:21.2f}"
        )


if __name__ == "__main__":
    main()
