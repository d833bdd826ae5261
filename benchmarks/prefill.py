"""Time to the first token after long prompts, against transformers: in one process, in turns.

    python -m benchmarks.prefill --model DIR --sizes 500 2000 8000

Each prompt of random ids is read by transformers (torch, `sdpa`, a pass with `use_cache`), by
`generate` and by an engine without drafts, in its chunks, after all programs were compiled. Figures
are medians of the wall seconds and of the seconds of processors. `--split` prints how long a chunk
takes in an empty row, and how much of that each held token adds.
"""

import asyncio
import dataclasses
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from specjax.checkpoints.load import load
from specjax.decoding.request import prepare
from specjax.draft.plain import PlainDrafter
from specjax.engine.engine import Engine
from specjax.engine.request import Request
from specjax.measure import timing
from specjax.models.transformer import Model

Read = Callable[[list[int]], object]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    model: Path
    """A Hugging Face folder."""
    sizes: tuple[int, ...] = (500, 1000, 2000, 4000, 8000)
    """Tokens of prompts."""
    repeats: int = 3
    """Runs of each, of which the median is taken."""
    rows: int = 1
    """Rows of the engine."""
    dtype: str = "float32"
    """Of all weights."""
    peer: bool = True
    """Whether transformers is measured beside."""
    split: Annotated[bool, tyro.conf.arg(help="Print what chunks take.")] = False


def reads_of_transformers(at: Bench) -> Read:
    """A pass of transformers' model over a prompt."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        at.model, dtype=getattr(torch, at.dtype), attn_implementation="sdpa"
    ).eval()

    def read(prompt: list[int]) -> object:
        with torch.inference_mode():
            made = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            return made.logits[0, -1].argmax().item()

    return read


def reads_of_generate(target: Model) -> Read:
    """`generate` of one token, whose program must have been compiled."""
    drafter = PlainDrafter(target.config.vocab_size)

    def read(prompt: list[int]) -> object:
        request = prepare(jax.random.key(0), target, drafter, [prompt], max_new_tokens=1)
        return timing.timed(request)[0].tokens[0, 0]

    return read


def reads_of_engine(engine: Engine) -> Read:
    """A request for one token, whose prompt no row holds yet."""

    async def first(prompt: list[int]) -> int:
        events = [each async for each in engine.submit(Request(prompt=prompt, max_new_tokens=1))]
        return next(token for event in events for token in event.ids)

    return lambda prompt: asyncio.run(first(prompt))


def measure(at: Bench, reads: dict[str, Read], vocabulary: int) -> None:
    """Prints the seconds of every reader for every size."""
    noise = np.random.default_rng(0)
    for size in at.sizes:
        wall: dict[str, list[float]] = {name: [] for name in reads}
        busy: dict[str, list[float]] = {name: [] for name in reads}
        for turn in range(at.repeats + 1):  # the first compiles
            prompt = noise.integers(3, vocabulary, size).tolist()
            given = {}
            for name, read in reads.items():
                start, used = time.perf_counter(), time.process_time()
                given[name] = read(prompt)
                if turn:
                    wall[name].append(time.perf_counter() - start)
                    busy[name].append(time.process_time() - used)
            same = len(set(map(int, given.values()))) == 1
            if not same:
                print(f"{size} tokens: first tokens differ: {given}", flush=True)
        parts = [
            f"{name} {np.median(wall[name]):.2f} s ({np.median(busy[name]):.2f} s of processors)"
            for name in reads
        ]
        print(f"{size} tokens: {'; '.join(parts)}", flush=True)


def main() -> None:
    """Measures and prints."""
    at = tyro.cli(Bench)
    target = load(at.model, dtype=at.dtype)[0]
    print(jax.devices()[0].device_kind, jax.__version__, at, flush=True)
    engine = Engine(target, rows=at.rows)
    engine.start()
    try:
        if at.split:
            assert engine._device is not None
            for size, (seconds, more) in engine._device.chunk_seconds.items():
                print(f"chunk of {size}: {1e3 * seconds:.1f} ms, {1e6 * more:.2f} us more a token")
        reads = {"transformers": reads_of_transformers(at)} if at.peer else {}
        reads |= {"generate": reads_of_generate(target), "engine": reads_of_engine(engine)}
        measure(at, reads, target.config.vocab_size)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
