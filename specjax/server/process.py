"""The process of a server: it listens at once, becomes ready, and drains when told to end."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from specjax.server.log import log_to_stderr
from specjax.server.service import Service
from specjax.server.transport import BoundedProtocol

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SEND_BUFFER = 1 << 17
"""Bytes that the system keeps for a client that does not read; by itself it takes megabytes."""

_OPEN_FILES = 1 << 16
"""That the process asks for; systems often give 1,024."""

_TICK = 0.02
"""Seconds after which the event loop is asked whether it is held."""

_FLUSH_SECONDS = 5
"""How long the last events may take to their clients after the drain."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
      ValueError: none can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port < 2**16:
        raise ValueError(f"cannot listen at port {port}; ports are 0 to {2**16 - 1}.")
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error}.") from error
    # Connections inherit both. asyncio itself sets no TCP_NODELAY on those of a socket that it did
    # not make, and an event would wait 40 ms for the acknowledgement of the one before it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return listener


def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serves an application of `create_app` until a signal, or its engine's failure, ends it.

    Gives the exit code: 1 after a failure, which is said on standard error.
    """
    service: Service = app.state.service
    log_to_stderr()
    raise_file_limit()
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    _say(f"{service.options.served_model_name} at http://{address}:{port}")
    server = Server(app)
    server.run(sockets=[listener])
    service.close()
    return _end(server, service.engine)


def raise_file_limit() -> None:
    """Raises the limit of open files, of which each connection is one, as far as it may be."""
    if sys.platform == "win32":  # which has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(sentence: str) -> None:
    print(f"specjax: {sentence}.", file=sys.stderr, flush=True)


def start(engine: "Engine") -> None:
    """Starts an engine until it takes requests, and says so on standard error.

    Raises:
      RuntimeError: it was started before.
    """
    engine.start(wait=False, say=_say)
    gc.collect()
    gc.freeze()  # what there is now stays: no collection looks at it again
    _say("ready")


def _end(server: "Server", engine: "Engine") -> int:
    """Ends the engine and says why the server ended, if it failed; gives the exit code."""
    failure = server.failure or engine.failure
    if failure is not None:
        _say(failure.rstrip("."))
    if server.engine_is_starting() or engine.settings_compiling:  # which nothing else can end
        sys.stderr.flush()
        os._exit(1 if failure else 0)
    engine.close()
    return 1 if failure else 0


class Server(uvicorn.Server):
    """uvicorn's server with an engine that starts beside it, and a drain before its shutdown.

    Args:
      app: of `create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, loop="auto", http=BoundedProtocol, ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self.failure: str | None = None
        self._service: Service = app.state.service
        self._starter = threading.Thread(target=self._start, name="specjax-start", daemon=True)
        self._drain: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _start(self) -> None:
        try:
            start(self._service.engine)
        except BaseException as error:
            self.failure = f"the engine did not start: {error}"

    def engine_is_starting(self) -> bool:
        """Whether the engine still compiles."""
        return self._starter.is_alive()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, then to start the engine."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._watchdog = asyncio.create_task(self._watch())
        self._starter.start()

    async def _watch(self) -> None:
        """Measures how long the event loop is held at most, once the engine has started."""
        while True:
            clock, processor = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TICK)
            if not self.engine_is_starting():
                self._service.metrics.event_loop_held(
                    clock=time.perf_counter() - clock - _TICK,
                    processor=time.thread_time() - processor,
                )

    async def on_tick(self, counter: int) -> bool:
        """Whether to shut down: after a drain, or because the engine failed."""
        self.failure = self.failure or self._service.engine.failure
        return await super().on_tick(counter) or self.failure is not None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handles the signals; unlike uvicorn's own, ends without raising them again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain; the second time ends the process."""
        if self._service.draining:
            os._exit(128 + sig)
        self._service.draining = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        """Lets requests finish while the server still answers, then lets it shut down."""
        engine, seconds = self._service.engine, self._service.options.drain_seconds
        try:
            engine.stop_accepting()
            if engine.ready:
                await engine.drain(seconds)
        finally:
            self._service.end_workers()
            self.should_exit = True
