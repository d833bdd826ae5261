"""A server against `generate` in the same run, its rows, a long prompt beside others, a departure.

`benchmarks.serving.engine` measures the same without HTTP.

    python -m benchmarks.serving.server --inflate 100M --dtype bfloat16 --method chain

The server is `specjax serve` in a process of its own; its clients are this one, whose share of the
CPU is printed. What is compared is measured in turns; figures are medians, and ratios of turns.
"""

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import tyro

from benchmarks.serving.engine import gaps_of, generated
from benchmarks.serving.process import serving
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.draft import Drafter
from specjax.measure import prompts
from specjax.methods import registry
from specjax.models.inflate import inflate

NEW = 128
_EVENT = b"data: {"


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    inflate: str | None = None
    """Grow the target to so many parameters."""
    dtype: str = "float32"
    """Of its weights."""
    method: str = "chain"
    """What drafts."""
    rows: int = 8
    """Of the server that drafts."""
    clients: tuple[int, ...] = (8, 16)
    """At once, each a row of the server that does not."""
    turns: int = 5
    """How often each side of a comparison runs."""


@contextlib.contextmanager
def server(folder: Path, bench: Bench, rows: int, *flags: str) -> Iterator[str]:
    """The address of a server that is ready."""
    own = "--model", str(folder), "--dtype", bench.dtype, "--rows", str(rows), *flags
    start = time.perf_counter()
    with serving(*own, "--served-model-name", "m", "--port", "0") as (url, _):
        print(f"  ready after {time.perf_counter() - start:.1f} s: {' '.join(flags)}", flush=True)
        yield url


def body_of(tokens: list[int], temperature: float, **more: object) -> dict[str, object]:
    """A request for `NEW` tokens after a prompt, as a stream."""
    asked = {"model": "m", "prompt": tokens, "max_tokens": NEW, "temperature": temperature}
    return asked | {"stream": True, "ignore_eos": True} | more


@contextlib.asynccontextmanager
async def posted(url: str, body: dict[str, object]) -> AsyncGenerator[asyncio.StreamReader]:
    """The answer to a request, from its status line on; the connection is closed in the end."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        kind = f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write((head + kind + text).encode())
        yield reader
    finally:
        writer.close()


async def opened(url: str, body: dict[str, object]) -> AsyncGenerator[int, None]:
    """How many events of a stream came at a time; closes the connection when it is left.

    Bytes are counted, not parsed: the load must not take the cores that it measures.
    """
    async with posted(url, body) as reader:
        assert b" 200 " in await reader.readline()
        left = b""
        while came := await reader.read(1 << 16):
            left += came
            yield left.count(_EVENT)
            left = left[1 - len(_EVENT) :]


async def stream_of(url: str, body: dict[str, object]) -> list[float]:
    """When each event of a stream came."""
    times = []
    async for count in opened(url, body):
        times += [time.perf_counter()] * count
    return times


async def clients_of(url: str, texts: list[list[int]], count: int, temperature: float) -> float:
    """Tokens a second of so many clients, each of which has its texts continued in turn."""

    async def one() -> None:
        for tokens in texts:
            await stream_of(url, body_of(tokens, temperature))

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count * len(texts) * NEW / (time.perf_counter() - start)


def one_client(url: str, pair: Pair, drafter: Drafter, texts: list[list[int]], turns: int) -> None:
    """One client of the server against `generate` with one row."""
    for temperature in (0.0, 0.8):
        ours, theirs, shares = [], [], []
        for turn in range(turns + 1):  # the first compiles
            cpu, wall = time.process_time(), time.perf_counter()
            speed = asyncio.run(clients_of(url, texts, 1, temperature))
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            other = generated(pair, drafter, [[own] for own in texts], NEW, temperature)
            if turn:
                ours.append(speed)
                theirs.append(other)
                shares.append(share)
        ratio = np.median(np.array(ours) / np.array(theirs))
        print(
            f"  T={temperature}: server {np.median(ours):.1f} tokens/s, generate "
            f"{np.median(theirs):.1f}, ratio {ratio:.3f}; client's share of a core "
            f"{np.median(shares):.3f}",
            flush=True,
        )


def rows_of(
    url: str, pair: Pair, texts: list[list[int]], clients: tuple[int, ...], turns: int
) -> None:
    """Several clients against one, without a draft, beside as many rows of `generate`."""
    counts = (1, *clients)
    for temperature in (0.0, 0.8):
        found, shares = [], []
        for turn in range(turns + 1):
            cpu, wall = time.process_time(), time.perf_counter()
            ours = [asyncio.run(clients_of(url, texts, n, temperature)) for n in counts]
            shares.append((time.process_time() - cpu) / (time.perf_counter() - wall))
            batches = [[[own] * n for own in texts] for n in counts]
            theirs = [generated(pair, None, own, NEW, temperature) for own in batches]
            if turn:
                found.append((ours, theirs))
        ours, theirs = np.median(np.array(found), axis=0)
        for at, count in enumerate(counts):
            print(
                f"  T={temperature}, {count} rows: server {ours[at]:.1f} tokens/s "
                f"({ours[at] / ours[0]:.2f} x), generate {theirs[at]:.1f} "
                f"({theirs[at] / theirs[0]:.2f} x), ratio {ours[at] / theirs[at]:.3f}",
                flush=True,
            )
        print(f"  clients' share of a core {np.median(shares):.3f}", flush=True)


def without_drafting(drafted: str, plain: str, texts: list[list[int]], turns: int) -> None:
    """A server that has drafts and uses none against one that has none."""
    for temperature in (0.0, 0.8):
        found = []
        for turn in range(turns + 1):
            both = [asyncio.run(clients_of(url, texts, 1, temperature)) for url in (drafted, plain)]
            if turn:
                found.append(both[0] / both[1])
        print(
            f"  T={temperature}: drafts loaded but --method none against no drafts, ratio "
            f"{np.median(found):.3f} of {', '.join(f'{ratio:.3f}' for ratio in found)}",
            flush=True,
        )


async def beside_a_long_prompt(url: str, texts: list[list[int]], vocabulary: int) -> None:
    """Gaps between the events of streams while a prompt of 1,500 tokens is read."""
    noise = np.random.default_rng(0)
    alone, beside, seconds = [], [], []
    for _ in range(5):
        came: list[list[float]] = [[] for _ in texts]

        async def mate(times: list[float], tokens: list[int]) -> None:
            body = body_of(tokens, 0.8, max_tokens=1800)
            async with contextlib.aclosing(opened(url, body)) as events:
                async for count in events:
                    times += [time.perf_counter()] * count

        mates = [asyncio.create_task(mate(*each)) for each in zip(came, texts, strict=True)]
        while min(map(len, came)) < 20:
            await asyncio.sleep(0.05)
        start = time.perf_counter()
        prompt = noise.integers(0, vocabulary, 1500).tolist()
        first = (await stream_of(url, body_of(prompt, 0.8, max_tokens=1)))[0]
        if any(each.done() for each in mates):
            raise SystemExit("a stream ended before the long prompt was read.")
        for each in mates:
            each.cancel()
        await asyncio.gather(*mates, return_exceptions=True)
        seconds.append(first - start)
        inside, outside = gaps_of(came, start, first)
        beside += inside
        alone += outside
    median, worst = np.median(alone), np.quantile(beside, 0.99)
    print(
        f"  gaps while a prompt of 1,500 tokens is read, in {np.median(seconds):.2f} s: p99 "
        f"{1e3 * worst:.1f} ms of {len(beside)}, median step {1e3 * median:.1f} ms: "
        f"{worst / median:.2f} x",
        flush=True,
    )


async def after_a_departure(url: str, tokens: list[int]) -> None:
    """Steps that a row takes beside one for each event that its client saw before it went."""

    def steps() -> float:
        text = httpx.get(f"{url}/metrics").text
        name = "specjax:spec_decode_num_drafts_total"
        return float(next(x for x in text.splitlines() if x.startswith(name)).split()[-1])

    await stream_of(url, body_of(tokens, 0.8))  # a server's first stream merges its first events
    found = []
    for _ in range(20):
        before, events = steps(), 0
        async with contextlib.aclosing(opened(url, body_of(tokens, 0.8, max_tokens=1000))) as came:
            async for count in came:
                events += count
                if events >= 5:
                    break
        await asyncio.sleep(0.5)
        found.append(steps() - before - events)
    print(f"  steps of a row after its client has gone: at most {max(found):g} of {found}")


def main() -> None:
    """Measures, and prints it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    pair = load_pair("bundled", dtype=bench.dtype)
    if bench.inflate:
        pair = pair._replace(target=inflate(pair.target, count_of(bench.inflate)))
    setting = registry.setting_of(bench.method, drafts=len(pair.drafts), batch=bench.rows)
    drafter = registry.build(setting, pair)
    texts = [pair.tokenizer(text).input_ids[:200] for _, text in prompts.read(None)][:3]
    print(json.dumps(dataclasses.asdict(bench)), jax.__version__, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "target"
        save_model(pair.target, folder, tokenizer=pair.tokenizer)  # of 16 bits, as ours are
        drafts = "--draft", "bundled"
        with server(folder, bench, bench.rows, *drafts, "--method", bench.method) as url:
            one_client(url, pair, drafter, texts, bench.turns)
            asyncio.run(beside_a_long_prompt(url, texts[:3], pair.target.config.vocab_size))
            asyncio.run(after_a_departure(url, texts[0]))
        plain = max(bench.clients), "--method", "none"
        with server(folder, bench, *plain) as alone:
            rows_of(alone, pair, texts, bench.clients, bench.turns)
            with server(folder, bench, *plain, *drafts) as drafted:
                without_drafting(drafted, alone, texts, bench.turns)


if __name__ == "__main__":
    main()
