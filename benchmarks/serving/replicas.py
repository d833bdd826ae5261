"""Two replicas behind Ray Serve against one and against `specjax serve`, and what a failure costs.

    python -m benchmarks.serving.replicas --inflate 100M --dtype bfloat16

Clients stream in a closed loop, each a request at a time, in this process. One replica is the same
cluster, of which one gets all requests; both are measured in turns, `specjax serve` before them.
Then one of two replicas is killed under load, and a log says what clients saw. `--autoscale` waits
for a second replica under a load that is too much for one.
"""

import asyncio
import dataclasses
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import tyro

from benchmarks.serving.process import serving
from benchmarks.serving.ray_process import RayServer, serving_with_ray
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import load_pair
from specjax.cli.values import count_of
from specjax.measure import prompts
from specjax.models.inflate import inflate

_PROBE_SECONDS = 0.25
_ERROR = b'data: {"error":'
_LONG = 400
"""Tokens of the streams that run when a replica is killed."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    inflate: str | None = None
    """Grow the target to so many parameters."""
    dtype: str = "float32"
    """Of its weights."""
    method: str = "none"
    """What drafts."""
    rows: int = 8
    """Of each replica."""
    clients: tuple[int, ...] = (8, 16)
    """At once."""
    tokens: int = 128
    """Of each answer."""
    turns: int = 3
    """How often each is measured, after one that is not counted."""
    autoscale: bool = False
    """Wait for a second replica, too, which takes a minute or two."""


def _body(prompt: Sequence[int], tokens: int, replica: str = "") -> dict[str, Any]:
    """A stream, of one replica if it is named: as if it went on from a response that it keeps."""
    named = {"previous_response_id": f"resp_{replica}-0"} if replica else {}
    own = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    return own | named | {"stream": True}


async def _stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> tuple[int, str, float | None]:
    """A stream's HTTP status, the code of the error that ended it, seconds to its first event."""
    start, first, tail = time.perf_counter(), None, b""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for piece in response.aiter_raw():
            first = first or time.perf_counter() - start
            tail = (tail + piece)[-2000:]
    code = ""
    if _ERROR in tail:
        event = _ERROR + tail.rpartition(_ERROR)[2].splitlines()[0]
        code = json.loads(event.removeprefix(b"data: "))["error"]["code"]
    return response.status_code, code, first


async def _speed(
    url: str, bench: Bench, texts: Sequence[Sequence[int]], clients: int, replica: str = ""
) -> tuple[float, float]:
    """Tokens a second of so many clients together, and the median of seconds to a first event."""
    firsts: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(2):
            text = texts[(number + turn * clients) % len(texts)]
            status, code, first = await _stream(client, url, _body(text, bench.tokens, replica))
            if status != 200 or code or first is None:
                raise SystemExit(f"a stream failed: {status} {code}")
            firsts.append(first)

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits()) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(clients)))
        seconds = time.perf_counter() - start
    return 2 * clients * bench.tokens / seconds, float(np.median(firsts))


def _said(name: str, clients: int, found: Sequence[tuple[float, float]]) -> float:
    speeds, firsts = zip(*found, strict=True)
    shown = ", ".join(f"{speed:.0f}" for speed in speeds)
    print(
        f"  {clients} clients, {name}: {np.median(speeds):.0f} tokens/s of {shown}; first event "
        f"after {1e3 * np.median(firsts):.0f} ms",
        flush=True,
    )
    return float(np.median(speeds))


def _throughput(server: RayServer, bench: Bench, texts: Sequence[Sequence[int]]) -> None:
    """Both replicas and one of them, in turns."""
    one = server.replicas()[0]
    for clients in bench.clients:
        found: dict[str, list[tuple[float, float]]] = {"one replica": [], "two replicas": []}
        for turn in range(bench.turns + 1):
            for name, replica in (("one replica", one), ("two replicas", "")):
                own = asyncio.run(_speed(server.url, bench, texts, clients, replica))
                if turn:
                    found[name].append(own)
        speeds = [_said(f"Ray, {name}", clients, own) for name, own in found.items()]
        print(f"  {clients} clients, two replicas / one: {speeds[1] / speeds[0]:.2f}", flush=True)


async def _failover(server: RayServer, bench: Bench, texts: Sequence[Sequence[int]]) -> None:
    """A replica is killed while both have streams, and requests go on coming."""
    killed, other = server.replicas()
    start = 0.0

    def log(line: str) -> None:
        print(f"  {time.perf_counter() - start:7.2f} s  {line}", flush=True)

    async with httpx.AsyncClient(timeout=None) as client:

        async def watched(name: str, replica: str, text: Sequence[int]) -> None:
            status, code, _ = await _stream(client, server.url, _body(text, _LONG, replica))
            log(f"a stream of {name}: {status}, {code or 'whole'}")

        half = bench.rows // 2
        streams = [
            asyncio.create_task(watched(name, replica, texts[number % len(texts)]))
            for name, replica in (("the killed replica", killed), ("the other", other))
            for number in range(half)
        ]
        await asyncio.sleep(0.5)
        start = time.perf_counter()
        await asyncio.to_thread(server.kill, killed)
        log(f"{killed} of {killed} and {other} is killed; each has {half} streams")
        await asyncio.gather(*streams, _probed(client, server, texts[0], [killed, other], log))


async def _probed(
    client: httpx.AsyncClient,
    server: RayServer,
    text: Sequence[int],
    before: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Short requests, until a new replica has answered one."""
    statuses: dict[int, int] = {}
    slowest = 0.0
    while True:
        began = time.perf_counter()
        body = _body(text, 4) | {"stream": False}
        answer = await client.post(f"{server.url}/v1/completions", json=body)
        slowest = max(slowest, time.perf_counter() - began)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        metrics = (await client.get(f"{server.url}/metrics")).text
        lines = [x for x in metrics.splitlines() if x.startswith("vllm:num_requests_running{")]
        names = [line.partition('replica="')[2].partition('"')[0] for line in lines]
        if new := set(names) - set(before):
            break
        await asyncio.sleep(_PROBE_SECONDS)
    log(f"{new.pop()} is there")
    counted = ", ".join(f"{count} times {status}" for status, count in statuses.items())
    log(f"short requests meanwhile: {counted}; the slowest took {slowest:.2f} s")


def _autoscale(model: dict[str, Any], bench: Bench, texts: Sequence[Sequence[int]]) -> None:
    """Seconds until a second replica takes requests, under three times the rows of one."""
    with serving_with_ray(**model, num_replicas=1, max_replicas=2) as server:

        async def loaded() -> None:
            start = time.perf_counter()
            loads = asyncio.create_task(_load(server.url, bench, texts))
            async with httpx.AsyncClient(timeout=None) as client:
                while True:
                    text = (await client.get(f"{server.url}/metrics")).text
                    if text.count("\nvllm:num_requests_waiting{") > 1:
                        break
                    await asyncio.sleep(1)
            print(
                f"  a second replica answers after {time.perf_counter() - start:.1f} s", flush=True
            )
            loads.cancel()
            await asyncio.gather(loads, return_exceptions=True)

        asyncio.run(loaded())


async def _load(url: str, bench: Bench, texts: Sequence[Sequence[int]]) -> None:
    while True:
        await _speed(url, bench, texts, 3 * bench.rows)


def main() -> None:
    """Measures, and prints it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    pair = load_pair("bundled", dtype=bench.dtype)
    if bench.inflate:
        pair = pair._replace(target=inflate(pair.target, count_of(bench.inflate)))
    texts = [pair.tokenizer(text).input_ids[:200] for _, text in prompts.read(None)][:40]
    versions = f"jax {jax.__version__}, ray {version('ray')}, Python {platform.python_version()}"
    print(json.dumps(dataclasses.asdict(bench)), versions, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "target"
        save_model(pair.target, folder, tokenizer=pair.tokenizer)
        model: dict[str, Any] = {
            "model": str(folder), "draft": "bundled", "dtype": bench.dtype, "rows": bench.rows,
            "method": bench.method,
        }  # fmt: skip
        flags = [part for key, value in model.items() for part in (f"--{key}", str(value))]
        with serving(*flags, "--port", "0") as (url, _):
            for clients in bench.clients:
                turns = range(bench.turns + 1)
                found = [asyncio.run(_speed(url, bench, texts, clients)) for _ in turns]
                _said("specjax serve", clients, found[1:])
        start = time.perf_counter()
        with serving_with_ray(**model, num_replicas=2) as server:
            print(f"  Ray is ready after {time.perf_counter() - start:.1f} s", flush=True)
            _throughput(server, bench, texts)
            asyncio.run(_failover(server, bench, texts))
        if bench.autoscale:
            _autoscale(model, bench, texts)


if __name__ == "__main__":
    main()
