"""A server of scripted streams, in a thread, for tests of the client that measures servers."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator

from specjax.measure.served import Server


class ScriptedServer(Server):
    """Answers `/v1/completions` with a stream of `max_tokens` tokens, a few in an event.

    Attributes:
      bodies: of the requests so far.
      most: how many ran at once, at most.
      fixed: the settings that were fixed.
      gap_s: seconds between events.
      first_s: seconds before the first one.
      split: bytes of a write; as they are for 0.
      statuses: of the next requests, before 200 for all others.
      short: tokens that a stream lacks at its end.
    """

    def __init__(self) -> None:
        self.bodies, self.fixed, self.statuses = [], [], []
        self.gap_s = self.first_s = 0.0
        self.split = self.short = self.most = self.port = self._running = self._tokens = 0

    def fix(self, setting: str) -> None:
        self.fixed.append(setting)

    def counts(self) -> dict[str, float]:
        return {"steps": self._tokens / 2, "drafted": self._tokens, "accepted": self._tokens / 4,
                "generated": self._tokens}  # fmt: skip

    def chosen(self, since: float) -> dict[str, int]:
        assert since <= time.time()
        return {"none": 1, "chain:1": 3}

    def wait_until_idle(self) -> None:
        while self._running:
            time.sleep(0.001)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        with contextlib.suppress(ConnectionError, EOFError):  # the client may leave
            await self._answer(reader, writer)
        self._running -= 1
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
        body = json.loads(await reader.readexactly(int(length.split(":")[1])))
        self.bodies.append(body)
        if self.statuses:
            writer.write(b"HTTP/1.1 %d Nope\r\n\r\n{}" % self.statuses.pop(0))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first_s)
        left = body["max_tokens"] - self.short
        self._tokens += left
        for _ in range(0, left, 4):
            await self._write(writer, {"choices": [{"text": "a"}], "usage": None})
            await asyncio.sleep(self.gap_s)
        usage = {"prompt_tokens": 3, "completion_tokens": left, "prompt_tokens_details": {}}
        await self._write(writer, {"choices": [], "usage": usage, "metrics": {"usage": 1}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def _write(self, writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
        data = b"data: %s\n\n" % json.dumps(event, separators=(",", ":")).encode()
        text = b"%x\r\n%s\r\n" % (len(data), data)
        for start in range(0, len(text), self.split or len(text)):
            writer.write(text[start : start + (self.split or len(text))])
            if self.split:
                await writer.drain()
                await asyncio.sleep(0.001)


@contextlib.contextmanager
def scripted() -> Iterator[ScriptedServer]:
    """A server that listens until the context is left."""
    server, loop = ScriptedServer(), asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    server.port = listener.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
