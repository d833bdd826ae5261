"""A client that sends requests at their times whatever the server does, and notes when each came.

It speaks HTTP over streams of its own and does not parse events: the load must not take the cores
that it measures.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.measure.arrivals import arrivals

MODEL = "bench"
"""What requests call the model."""
_EVENT, _USAGE, _DONE = b"data: {", b'"usage":{', b"data: [DONE]"
_TAIL = 1 << 13
"""Bytes of a stream's end that are kept: its last event holds the usage."""
_READ = 1 << 16


class Asked(NamedTuple):
    """A request: when it is due, in seconds after the run's start, and what it asks for.

    `max_tpot_ms` is its latency target, milliseconds a token, if it has one.
    """

    due_s: float
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    max_tpot_ms: float | None = None


class Answered(NamedTuple):
    """What became of a request; times are in seconds after the run's start.

    Attributes:
      due_s: when it was due.
      sent_s: when it was sent; later only if the client is.
      first_s: when its first event came; NaN if none did.
      last_s: when its last event came.
      tokens: generated tokens, by the server's count.
      error: why it did not complete, or None.
      max_tpot_ms: its latency target, if it had one.
    """

    due_s: float
    sent_s: float
    first_s: float
    last_s: float
    tokens: int
    error: str | None = None
    max_tpot_ms: float | None = None

    @property
    def latency_s(self) -> float:
        """Seconds from when it was due to its last token."""
        return self.last_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Seconds of a token after the first; NaN where there is none."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else math.nan


class Mix(NamedTuple):
    """What requests are drawn from.

    Attributes:
      prompts: token ids.
      then: those that take over for the second half of a run, if any do.
      max_new_tokens: the mean; each request asks for half to one and a half times as many.
      temperatures: each request has one of them, at random.
      max_tpot_ms: the latency target of one request in two, at random; None for none.
    """

    prompts: Sequence[Sequence[int]]
    then: Sequence[Sequence[int]]
    max_new_tokens: int
    temperatures: Sequence[float]
    max_tpot_ms: float | None = None


def most_tokens(max_new_tokens: int) -> int:
    """The most that a request of such a mean asks for."""
    return max_new_tokens * 3 // 2


def plan(mix: Mix, shape: str, count: int, drawn: np.random.Generator) -> list[Asked]:
    """Requests of a run at a mean rate of one a second; see `at_rate`.

    Args:
      mix: what they are drawn from.
      shape: of the load, a name of `arrivals.SHAPES`.
      count: how many.
      drawn: where all of it comes from.
    """
    due = arrivals(shape, count, drawn)
    first = count - count // 2 if mix.then else count
    prompts = _dealt(mix.prompts, first, drawn) + _dealt(mix.then, count - first, drawn)
    least, most = -(-mix.max_new_tokens // 2), most_tokens(mix.max_new_tokens)
    lengths = drawn.integers(least, max(least, most) + 1, size=count)
    temperatures = drawn.choice(np.asarray(mix.temperatures, float), size=count)
    targets = [mix.max_tpot_ms if each else None for each in drawn.random(count) < 0.5]
    listed = zip(
        due.tolist(), prompts, lengths.tolist(), temperatures.tolist(), targets, strict=True
    )
    return [Asked(*each) for each in listed]


def _dealt(
    prompts: Sequence[Sequence[int]], count: int, drawn: np.random.Generator
) -> list[Sequence[int]]:
    """So many of them in random order, none again before all were taken."""
    order: list[int] = []
    while len(order) < count:
        order += drawn.permutation(len(prompts)).tolist()
    return [prompts[place] for place in order[:count]]


def at_rate(requests: Sequence[Asked], rate: float) -> list[Asked]:
    """The same requests at so many a second."""
    return [each._replace(due_s=each.due_s / rate) for each in requests]


async def open_loop(port: int, requests: Sequence[Asked]) -> list[Answered]:
    """Sends requests when they are due, and waits until all have ended."""
    begun = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for asked in requests:
            await asyncio.sleep(begun + asked.due_s - time.perf_counter())
            tasks.append(group.create_task(_answered(port, asked, begun)))
    return [task.result() for task in tasks]


async def closed_loop(
    port: int, requests: Sequence[Asked], clients: int, count: int, seconds: float = 0.0
) -> list[Answered]:
    """So many clients that each send the next request when theirs has ended.

    They stop when `count` requests have ended, or more in so many seconds; what still runs then is
    left.

    Raises:
      ConnectionError: a request did not complete.
    """
    begun, ended, waiting = time.perf_counter(), [], itertools.cycle(requests)
    enough = asyncio.Event()

    async def client() -> None:
        while not enough.is_set():
            asked = next(waiting)._replace(due_s=time.perf_counter() - begun)
            ended.append(await _answered(port, asked, begun))
            done = len(ended) >= count and time.perf_counter() - begun >= seconds
            if done or ended[-1].error:
                enough.set()

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await enough.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in ended:
        if each.error:
            raise ConnectionError(f"the server did not answer: {each.error}")
    return ended


def completion_rate(answered: Sequence[Answered], skipped: int) -> tuple[float, float]:
    """Requests and tokens a second of a closed loop, between the end of one request and of another.

    Args:
      answered: in the order of their ends.
      skipped: how many the first interval begins after: until the clients have drifted apart.
    """
    counted = answered[skipped:]
    seconds = counted[-1].last_s - answered[skipped - 1].last_s
    return len(counted) / seconds, sum(each.tokens for each in counted) / seconds


async def _answered(port: int, asked: Asked, begun: float) -> Answered:
    """Sends a request and follows its stream to the end."""
    sent = time.perf_counter() - begun
    found = Answered(asked.due_s, sent, math.nan, math.nan, 0, max_tpot_ms=asked.max_tpot_ms)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_message(asked))
            return await _followed(reader, found, asked.max_tokens, begun)
        finally:
            writer.close()
    except (OSError, ValueError) as error:
        return found._replace(error=str(error) or type(error).__name__)


async def _followed(
    reader: asyncio.StreamReader, found: Answered, wanted: int, begun: float
) -> Answered:
    """Reads a response, and notes when its first and its last event came."""
    status = (await reader.readline()).split()[1:2]
    tail = b""
    while came := await reader.read(_READ):
        tail = tail[-_TAIL:] + came
        if _EVENT in tail[-len(came) - len(_EVENT) :]:
            now = time.perf_counter() - begun
            first = now if math.isnan(found.first_s) else found.first_s
            found = found._replace(first_s=first, last_s=now)
    tokens = _tokens_of(tail)
    if status != [b"200"] or _DONE not in tail or tokens != wanted:
        return found._replace(tokens=tokens, error=_reason(status, tokens, wanted))
    return found._replace(tokens=tokens)


def _reason(status: list[bytes], tokens: int, wanted: int) -> str:
    if status != [b"200"]:
        return f"status {b''.join(status).decode('latin-1') or 'of nothing'}"
    return f"{tokens} tokens of {wanted}"


def _tokens_of(tail: bytes) -> int:
    """Generated tokens by the usage at a stream's end; 0 where there is none."""
    place = tail.rfind(_USAGE)
    if place < 0:
        return 0
    usage: dict[str, Any]
    usage, _ = json.JSONDecoder().raw_decode(tail[place + len(_USAGE) - 1 :].decode("latin-1"))
    return usage["completion_tokens"]


def _message(asked: Asked) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": list(asked.prompt),
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tpot_ms": asked.max_tpot_ms,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    kind = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + kind + body).encode()
