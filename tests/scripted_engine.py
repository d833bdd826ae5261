"""An engine that gives what it is told to, and a server in a thread around it.

  python -m tests.scripted_engine '{"delay": 0.01}' --drain-seconds 1

serves one of one-letter tokens until a signal; `start` names what its start does.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from types import SimpleNamespace

from specjax.engine.checks import check_requests
from specjax.engine.pages import PageCounts
from specjax.engine.request import (
    EngineClosedError,
    Logprob,
    QueueFullError,
    Request,
    Statistics,
    Tokens,
)
from specjax.models.config import ModelConfig
from specjax.server.app import create_app, run
from specjax.server.options import ServerOptions
from specjax.server.process import Server, listen
from specjax.verify.rules import NAIVE
from tests.letters import Letters

CONFIG = ModelConfig(
    vocab_size=4096, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, eos_ids=(0,),
)  # fmt: skip
"""Of a model that there is not: what requests are checked by."""


class ScriptedSequence:
    """Gives a reply in events of the engine's sizes, each after the engine's delay."""

    def __init__(self, engine: "ScriptedEngine", request: Request) -> None:
        self.request = request
        self.statistics = Statistics(prompt_tokens=len(request.prompt), accepted_at=[0] * 8)
        self.prompt_logprobs, self.grammar_error = None, ""
        self.admitted = time.monotonic()
        self._engine = engine
        self._queue: asyncio.Queue[Tokens | Exception] = asyncio.Queue()
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._play())

    def __aiter__(self):
        return self

    async def __anext__(self) -> Tokens:
        if self._ended and self._queue.empty():
            raise StopAsyncIteration
        tokens = await self._queue.get()
        if isinstance(tokens, Exception):
            raise tokens
        return tokens

    def abort(self) -> None:
        if self._task is not None and not self._ended:
            self._engine.aborted += 1
            self._end(Tokens((), finish_reason="abort"))

    def _end(self, tokens: "Tokens | Exception") -> None:
        if not self._ended:
            self._ended = True
            self._engine.running.discard(self)
            self._queue.put_nowait(tokens)
            self._task.cancel()

    async def _play(self) -> None:
        engine, request = self._engine, self.request
        try:
            await self._begin()
            left, made = request.max_new_tokens, 0
            reply = engine.replies[request.choice % len(engine.replies)]
            while left:
                size = min(left, engine.sizes[self.statistics.steps % len(engine.sizes)])
                ids = tuple(reply[(made + i) % len(reply)] for i in range(size))
                if not engine.endless and made + size >= len(reply):
                    ids = reply[made:][:size]
                left, made = left - len(ids), made + len(ids)
                ends = not engine.endless and made >= len(reply)
                self._give(ids, "stop" if ends else None if left else "length")
                await asyncio.sleep(engine.delay)
                if ends:
                    return
            self._end(Tokens((), finish_reason="length"))
        except Exception as error:
            self._end(error)

    async def _begin(self) -> None:
        engine, request = self._engine, self.request
        await asyncio.sleep(engine.first_delay)
        if request.prompt_logprobs is not None:
            own = [self._logprob(token, request.prompt_logprobs) for token in request.prompt[1:]]
            self.prompt_logprobs = [None, *own]
        if engine.trouble == "error":
            self._give(engine.replies[0][:1], None)
            self._end(Tokens((), finish_reason="error"))
        elif engine.trouble == "exception":
            raise RuntimeError("scripted")

    def _logprob(self, token: int, count: int) -> Logprob:
        top = tuple((other, -1.0 - place) for place, other in enumerate((token, 3, 4, 5)))
        return Logprob(-1.0 if token else float("-inf"), top[:count])

    def _give(self, ids, reason) -> None:
        if self._ended:
            return
        counts, known = self.statistics, ()
        counts.steps += 1
        counts.draft_tokens += 2
        counts.generated_tokens += len(ids)
        counts.accepted_tokens += len(ids) - 1
        for depth in range(len(ids) - 1):
            counts.accepted_at[depth] += 1
        if self.request.logprobs is not None:
            known = tuple(self._logprob(token, self.request.logprobs) for token in ids)
        tokens = Tokens(tuple(ids), known, reason)
        if reason is None:
            self._queue.put_nowait(tokens)
        else:
            self._end(tokens)


class ScriptedEngine:
    """The engine's interface; its attributes are its script.

    A reply's last token is its end token. `endless` repeats the reply up to max_new_tokens.
    """

    def __init__(self, replies=((1, 2, 0),), **script) -> None:
        self.max_model_len, self.vocab_size, self.eos_ids = 512, 4096, (0,)
        self.replies = [tuple(reply) for reply in replies]
        self.sizes, self.delay, self.first_delay = (1, 3, 2), 0.0, 0.0
        self.endless, self.trouble, self.room = False, None, 64
        self.requests, self.running, self.aborted = [], set(), 0
        self.ready, self.failure, self.closed = False, None, False
        self.settings_compiling, self.close_seconds = [], 0.0
        self.start_error, self.start_seconds, self.dies_after = None, 0.0, None
        self._accepts = True
        vars(self).update(script)

    num_requests_running = property(lambda self: len(self.running))
    num_requests_waiting = 3
    kv_cache_usage, num_grammar_matchers = 0.25, 2
    page_counts = PageCounts(total=12, free=4, running=3, cached=5, leaked=0)

    def start(self, *, wait: bool = True, say=None) -> None:
        del wait, say
        time.sleep(self.start_seconds)
        if self.start_error is not None:
            raise ValueError(self.start_error)
        self.ready = True
        if self.dies_after is not None:
            threading.Timer(self.dies_after, self._die).start()

    def _die(self) -> None:
        self.ready, self.failure = False, "the engine failed: scripted trouble."

    def prepare(self, requests) -> list[ScriptedSequence]:
        config = dataclasses.replace(CONFIG, vocab_size=self.vocab_size)
        check_requests(requests, config, self.max_model_len, NAIVE)
        return [ScriptedSequence(self, each) for each in requests]

    def enqueue(self, sequences) -> None:
        if not self._accepts:
            raise EngineClosedError("the engine takes no more requests.")
        if len(self.running) + len(sequences) > self.room:
            raise QueueFullError(f"the queue holds {self.room} requests.", 7)
        self.requests += [each.request for each in sequences]
        self.running.update(sequences)
        for each in sequences:
            each.start()

    def statistics(self) -> Statistics:
        return Statistics(100, 40, 50, 20, 40, 30, [18, 12])

    def report(self) -> dict:
        """That of an engine with one setting which has made no step."""
        shares = {"deciding": 0.0, "probing": 0.0}
        return {
            "mode": "", "settings": [""], "now": time.time(), "steps": 0, "steps_by_setting": {},
            "decision": None, "predicted": {}, "history": [], "shares": shares,
        }  # fmt: skip

    def fix(self, setting) -> None:
        raise ValueError("this engine has a single setting; there is nothing to choose.")

    def watched(self) -> list:
        return []

    def stop_accepting(self) -> None:
        self._accepts = False

    async def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for sequence in list(self.running):
            sequence.abort()

    def close(self) -> None:
        time.sleep(self.close_seconds)
        self.closed = True


def until(holds, seconds=5.0) -> float:
    """Seconds until something holds; fails if that takes too long."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.002)
    return time.monotonic() - start


@contextlib.contextmanager
def serving(engine: ScriptedEngine, tokenizer, **options):
    """A server on a socket of its own, in a thread: its address, application and engine."""
    options = ServerOptions(**({"served_model_name": "scripted"} | options))
    app = create_app(engine, tokenizer, options)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = Server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not (server.started and (engine.ready or server.failure)):
                time.sleep(0.005)
            yield SimpleNamespace(
                url=f"http://127.0.0.1:{port}", port=port, app=app, engine=engine, server=server
            )
        finally:
            server.should_exit = True
            thread.join()
            app.state.service.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=json.loads)
    parser.add_argument("--drain-seconds", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    return run(
        ScriptedEngine(**options.script),
        Letters(),
        ServerOptions(
            served_model_name="scripted", port=options.port, drain_seconds=options.drain_seconds
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
