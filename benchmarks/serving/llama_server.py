"""`specjax serve` against llama.cpp's `llama-server`: the same weights, prompts and clients.

    python -m benchmarks.serving.llama_server --server build/bin/llama-server --inflate 100M

Both servers run, and are measured in turns, while the other takes no time of a core; figures are
medians of the turns, and of a turn's requests. No prompt is sent to a server twice, so that none is
in its cache. The cores must be free: llama-server's threads spin while they wait for each other,
and beside another process it can be ten times slower.

llama-server has the flags that were its fastest of those tried, which are printed: the cores there
are as threads, a key/value cache of float16 (its default), and for its speculation, which a draft
alone does not turn on, `draft-simple`. Requests name the one sampler that they need.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import jax
import numpy as np
import tyro

import specjax
from benchmarks.export import write_gguf
from benchmarks.serving.process import serving
from benchmarks.serving.server import NEW, body_of, posted
from specjax.base.prefix import common_prefix
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.measure import prompts
from specjax.models.inflate import inflate

TEXTS = 3
"""That a client has continued, one after the other."""
COMPARED, ENOUGH = 64, 16
"""Greedy tokens that are compared, and how many must agree at least."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    server: Path
    """A llama-server."""
    inflate: str | None = None
    """Grow the target to so many parameters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of its weights; drafts have the package's."""
    method: str = "chain"
    """What drafts here; with chain, the draft is the one that llama-server has."""
    drafted: int = 3
    """Tokens that llama-server drafts at a time."""
    sure: float = 0.0
    """The probability below which it stops drafting."""
    clients: tuple[int, ...] = (1, 4, 8)
    """At once; both servers have as many rows as the most."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Of the requests."""
    turns: int = 3
    """How often each side of a comparison runs."""


class Side(NamedTuple):
    """A server, and whether it is llama.cpp's."""

    url: str
    theirs: bool


class Load(NamedTuple):
    """Tokens a second, the median seconds to a first token, and the tokens of a step."""

    speed: float
    first: float
    step: float


@contextlib.contextmanager
def llama_server(binary: Path, log: Path, *flags: str) -> Iterator[str]:
    """The address of a llama-server that is ready; it is killed in the end."""
    command = [str(binary), *flags, "--port", "0", "--no-webui", "--metrics"]
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while not (found := re.search(rb"listening on (http\S+)", text := log.read_bytes())):
                if process.poll() is not None:
                    end = text[-2000:].decode(errors="replace")
                    raise SystemExit(f"llama-server ended before it was ready:\n{end}")
                time.sleep(0.1)
            url = found[1].decode()
            while httpx.get(f"{url}/health").status_code != 200:
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def asked_of(side: Side, tokens: list[int], temperature: float) -> dict[str, object]:
    """A request for exactly `NEW` tokens of the model's own distribution."""
    more: dict[str, object] = {"stream_options": {"include_usage": True}}
    if side.theirs:
        sampler = "temperature" if temperature else "top_k"
        more |= {"cache_prompt": False, "samplers": [sampler], "top_k": 1}
    return body_of(tokens, temperature, **more)


async def first_of(side: Side, body: dict[str, object]) -> float:
    """Seconds to the first event of a stream, which is read to its end and checked.

    Events are not counted, as one may hold several tokens; the last one says how many there were.
    """
    start = time.perf_counter()
    came, first = bytearray(), 0.0
    async with posted(side.url, body) as reader:
        while more := await reader.read(1 << 16):
            came += more
            if not first and b"data: {" in came:
                first = time.perf_counter() - start
    made, cached = (
        [int(number) for number in re.findall(rb'"%s": ?(\d+)' % name, came)]
        for name in (b"completion_tokens", b"cached_tokens")
    )
    if not first or made[-1:] != [NEW] or any(cached):
        raise SystemExit(f"{side.url} gave not {NEW} new tokens: {bytes(came[-1000:])!r}")
    return first


def steps_of(side: Side) -> tuple[float, float]:
    """Steps that verified drafts, and the drafted tokens that they accepted, until now."""
    text = httpx.get(f"{side.url}/metrics").text
    names = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total"
    steps, accepted = (
        sum(float(number) for number in re.findall(rf"^\w+:{name}(?:{{.*}})? (\S+)$", text, re.M))
        for name in names
    )
    return steps, accepted


async def load_of(side: Side, texts: list[list[list[int]]], temperature: float) -> Load:
    """Clients at once, each of which has its texts continued in turn."""

    async def one(own: list[list[int]]) -> list[float]:
        return [await first_of(side, asked_of(side, tokens, temperature)) for tokens in own]

    before, start = steps_of(side), time.perf_counter()
    firsts = await asyncio.gather(*map(one, texts))
    seconds = time.perf_counter() - start
    steps, accepted = np.subtract(steps_of(side), before)
    tokens = sum(map(len, texts)) * NEW
    step = 1 + accepted / steps if steps else 1.0
    return Load(tokens / seconds, float(np.median(np.concatenate(firsts))), float(step))


def fresh(pair: Pair, numbers: Iterator[int], clients: int) -> list[list[list[int]]]:
    """Prompts for each client; a number makes every one of them new from its first tokens on."""
    listed = itertools.cycle(text for _, text in prompts.read(None))
    return [
        [pair.tokenizer(f"# {next(numbers)}\n{next(listed)}").input_ids[:200] for _ in range(TEXTS)]
        for _ in range(clients)
    ]


def check(pair: Pair, url: str, texts: list[list[int]]) -> None:
    """Compares greedy tokens of llama-server with those of `generate`, up to an end token.

    From there on they differ, as `ignore_eos` means here that a text goes on after its end, and
    there that it has none.
    """
    found = []
    for tokens in texts:
        made = specjax.generate(
            jax.random.key(0), pair.target, None, [tokens], max_new_tokens=COMPARED,
            stop_at_eos=False,
        ).tokens[0].tolist()  # fmt: skip
        ends = [at for at, token in enumerate(made) if token in pair.target.config.eos_ids]
        made = made[: min(ends, default=len(made))]
        asked = asked_of(Side(url, True), tokens, 0.0)
        asked |= {"stream": False, "max_tokens": COMPARED, "return_tokens": True}
        theirs = httpx.post(f"{url}/completion", json=asked, timeout=600).json()["tokens"]
        found.append((common_prefix(made, theirs), len(made)))
    said = ", ".join(f"{same} of {made}" for same, made in found)
    print(f"  greedy tokens of llama-server that are those of generate: {said}", flush=True)
    if any(same < min(ENOUGH, made) for same, made in found):
        raise SystemExit("llama-server has not the model that specjax has: their texts differ.")


def compare(bench: Bench, pair: Pair, sides: tuple[Side, Side], numbers: Iterator[int]) -> None:
    """The servers in turns, at every temperature with every number of clients."""
    for temperature, count in itertools.product(bench.temperatures, bench.clients):
        found = []
        for turn in range(bench.turns + 1):  # the first warms up
            texts = fresh(pair, numbers, count)
            both = [asyncio.run(load_of(side, texts, temperature)) for side in sides]
            if turn:
                found.append(both)
        runs = np.array(found)  # by turn, side and figure
        (ours, first, step), (theirs, their_first, their_step) = np.median(runs, axis=0)
        ratio = np.median(runs[:, 0, 0] / runs[:, 1, 0])
        line = (
            f"  T={temperature}, {count} client{'s' * (count > 1)}: specjax {ours:.1f} tokens/s, "
            f"llama-server {theirs:.1f}, ratio {ratio:.3f}; first token after "
            f"{1e3 * first:.1f} ms, {1e3 * their_first:.1f} ms"
        )
        if max(step, their_step) > 1:
            line += f"; tokens of a step {step:.2f}, {their_step:.2f}"
        print(line, flush=True)


def main() -> None:
    """Measures, and prints it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    pair = load_pair("bundled", dtype=bench.dtype)
    if bench.inflate:
        pair = pair._replace(target=inflate(pair.target, count_of(bench.inflate)))
    rows, numbers = max(bench.clients), itertools.count(100)
    asked: dict[str, Any] = dataclasses.asdict(bench) | {"server": bench.server.name}
    version = subprocess.run([bench.server, "--version"], capture_output=True, text=True)
    said = " ".join((version.stdout + version.stderr).split())
    print(f"{json.dumps(asked)} jax {jax.__version__}, llama-server {said}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder, target, draft = (Path(name) / each for each in ("target", "t.gguf", "d.gguf"))
        save_model(pair.target, folder, tokenizer=pair.tokenizer, dtype=bench.dtype)
        write_gguf(pair.target, pair.tokenizer, target)
        write_gguf(pair.drafts[0], pair.tokenizer, draft)
        slots = str(rows * pair.target.config.max_positions)
        plain = "-np", str(rows), "-c", slots, "-t", str(os.cpu_count()), "--cache-ram", "0"
        drafts = "--spec-type", "draft-simple", "--spec-draft-n-max", str(bench.drafted)
        drafts = *drafts, "--spec-draft-p-min", str(bench.sure)
        for method in ("none", bench.method):
            own = "--method", method, "--rows", str(rows), "--dtype", bench.dtype
            flags = plain
            if method != "none":
                own, flags = (*own, "--draft", "bundled"), (*plain, *drafts)
            print(f"specjax serve {' '.join(own)}; llama-server {' '.join(flags)}", flush=True)
            files = "-m", str(target), *(["-md", str(draft)] if method != "none" else [])
            with (
                serving(
                    *own, "--model", str(folder), "--served-model-name", "m", "--port", "0"
                ) as (here, _),
                llama_server(bench.server, Path(name) / "log", *files, *flags) as there,
            ):
                check(pair, there, fresh(pair, numbers, 1)[0])
                compare(bench, pair, (Side(here, False), Side(there, True)), numbers)


if __name__ == "__main__":
    main()
