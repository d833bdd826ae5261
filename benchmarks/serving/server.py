"""A server against `generate` in the same run, its rows, a long prompt beside others, a departure.

    python -m benchmarks.serving.server --inflate 100M --dtype bfloat16 --method chain

The server is `specjax serve` in a process of its own; its clients are this one, whose share of the
CPU is printed. What is compared is measured in turns; figures are medians, and ratios of turns.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import tyro

import specjax
from benchmarks.serving.process import serving
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.draft import Drafter
from specjax.engine import programs
from specjax.engine.checks import check_request
from specjax.engine.device import Device
from specjax.goodput.policy import StepShape
from specjax.measure import prompts
from specjax.methods import registry
from specjax.models.inflate import inflate

NEW, STEPS = 128, 50
_DEPTH = 1 << 20
"""Of a row's tree: any."""
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


def generated(
    pair: Pair, drafter: Drafter | None, texts: list[list[int]], count: int, temperature: float
) -> float:
    """Tokens a second of `generate`, with each text in `count` rows."""
    start = time.perf_counter()
    for tokens in texts:
        specjax.generate(
            jax.random.key(0), pair.target, drafter, [tokens] * count, max_new_tokens=NEW,
            sampling=specjax.Sampling(temperature), stop_at_eos=False,
        )  # fmt: skip
    return count * len(texts) * NEW / (time.perf_counter() - start)


def one_client(url: str, pair: Pair, drafter: Drafter, texts: list[list[int]], turns: int) -> None:
    """One client of the server against `generate` with one row."""
    for temperature in (0.0, 0.8):
        ours, theirs, shares = [], [], []
        for turn in range(turns + 1):  # the first compiles
            cpu, wall = time.process_time(), time.perf_counter()
            speed = asyncio.run(clients_of(url, texts, 1, temperature))
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            other = generated(pair, drafter, texts, 1, temperature)
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


def without_http(
    pair: Pair, drafter: Drafter, texts: list[list[int]], rows: int, turns: int
) -> None:
    """One row of an engine in this process against `generate`, and how long its programs take."""
    engine = specjax.Engine(pair.target, drafter, rows=rows)
    engine.start()

    async def served(temperature: float) -> None:
        for tokens in texts:
            asked = {"prompt": tokens, "max_new_tokens": NEW, "ignore_eos": True}
            async for _ in engine.submit(specjax.Request(temperature=temperature, **asked)):
                pass

    device = engine._device
    assert device is not None
    chunks = [
        f"{size}: {1e3 * alone:.1f} + {1e6 * more:.1f}"
        for size, (alone, more) in device.chunk_seconds.items()
    ]
    steps = [f"{s.rows}: {1e3 * own.seconds:.1f}" for s, own in device.step_costs.items()]
    print(f"  ms of a chunk by its tokens, and of 1,000 tokens that the row holds: "
          f"{', '.join(chunks)}; of a step by its rows "
          f"{', '.join(steps)}", flush=True)  # fmt: skip
    for temperature in (0.0, 0.8):
        found = []
        for turn in range(turns + 1):
            start = time.perf_counter()
            asyncio.run(served(temperature))
            speed = len(texts) * NEW / (time.perf_counter() - start)
            if turn:
                found.append(speed / generated(pair, drafter, texts, 1, temperature))
        print(f"  T={temperature}: engine without HTTP against generate, ratio "
              f"{np.median(found):.3f}", flush=True)  # fmt: skip
    looped, handed = np.median([of_a_step(device, texts[0]) for _ in range(2 * turns)], axis=0)
    print(f"  ms of a step of one row: {1e3 * looped:.2f} within one loop, {1e3 * handed:.2f} as a "
          "program handed over behind another", flush=True)  # fmt: skip
    engine.close()


def of_a_step(device: Device, tokens: list[int]) -> tuple[float, float]:
    """Seconds of a step of one row: in one program's loop, and in programs behind each other."""
    shape = min(device.step_costs, key=lambda shape: shape.rows)
    request = specjax.Request(prompt=tokens, max_new_tokens=2**20, ignore_eos=True)

    def begun() -> float:
        device.begin(0, tokens[0])
        device.extend(0, tokens[1:], max(device.chunk_seconds))
        device.assign(0, request, check_request(request, device._config, 2**30))
        device.wait()
        return time.perf_counter()

    loop, given = _loop_of(device, shape), _given_of(device)
    start = begun()
    device._state = loop(device._models, device._state, *given)
    device.wait()
    looped, start = time.perf_counter() - start, begun()
    for _ in range(STEPS):
        device.advance(shape, [0], (), [_DEPTH], [False])
    device.wait()
    return looped / STEPS, (time.perf_counter() - start) / STEPS


def _given_of(device: Device) -> tuple[jax.Array, ...]:
    """A row, its depth, no log probabilities, chances as they are."""
    return device._control_of(((0, 0, _DEPTH),)), device._wanted[False], device._calibration


@functools.cache
def _loop_of(device: Device, shape: StepShape) -> Callable[..., list[jax.Array]]:
    """As many steps of a row as one program."""

    def steps(
        models: list[jax.Array], state: list[jax.Array], *given: jax.Array
    ) -> list[jax.Array]:
        target, drafter = jax.tree.unflatten(device._models_tree, models)
        control, wanted, calibration = given

        def one(_: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
            rows = jax.tree.unflatten(device._state_tree, leaves)
            made = programs.advance(
                target, drafter, rows, device._setup, control, wanted, calibration,
                width=shape.width, setting=shape.setting,
            )[0]  # fmt: skip
            return jax.tree.leaves(made)

        return jax.lax.fori_loop(0, STEPS, one, state)

    given = _given_of(device)
    return jax.jit(steps, donate_argnums=1).lower(device._models, device._state, *given).compile()


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
            theirs = [generated(pair, None, texts, n, temperature) for n in counts]
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
        for times in came:
            at, gaps = np.array(times[1:]), np.diff(times)
            within = at > start
            beside += gaps[within & (at < first)].tolist()
            alone += gaps[~within].tolist()
    median, worst = np.median(alone), np.quantile(beside, 0.99)
    print(
        f"  gaps while a prompt of 1,500 tokens is read, in {np.median(seconds):.2f} s: p99 "
        f"{1e3 * worst:.1f} ms of {len(beside)}, median step {1e3 * median:.1f} ms: "
        f"{worst / median:.2f} x",
        flush=True,
    )


async def after_a_departure(url: str, tokens: list[int]) -> None:
    """Steps that a row takes after its client has gone."""

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
        save_model(pair.target, folder, tokenizer=pair.tokenizer, dtype=bench.dtype)
        without_http(pair, drafter, texts, bench.rows, bench.turns)
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
