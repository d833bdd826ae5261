"""Worker processes of the server, from its side: which job runs where, and for how long."""

import asyncio
import contextlib
import marshal
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from specjax.server.text_jobs import TextJobs, result_of
from specjax.server.worker import HEAD, framed, size_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QUICK_SECONDS = 0.5
"""After which a job that others wait behind starts anew among those that take long."""
_PATIENT = 2
"""Jobs that take long and run at once."""
_MODULE = "specjax.server.worker"


class WorkerLostError(Exception):
    """A worker ended before it answered."""


class WorkersClosedError(Exception):
    """The workers have been ended."""


class Workers:
    """Processes that parse bodies, run chat templates and tokenize, each job within limits.

    A job that is not known to be long runs among the quick ones. If it is not done in half a
    second it is killed and begun anew among the long ones, so that no number of slow jobs keeps a
    quick one waiting for long.

    Args:
      tokenizer: the model's.
      count: quick jobs at once.
      seconds: after which a job is given up.
      memory_bytes: that a worker may take beyond what the tokenizer does.

    Raises:
      ValueError: the tokenizer cannot be sent to another process.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        count: int,
        seconds: float,
        memory_bytes: int,
    ) -> None:
        self._closed = False
        self._own = None if hasattr(os, "fork") else TextJobs(tokenizer)
        if self._own is None:
            self._source = _Source(tokenizer, seconds, memory_bytes)
            self._quick = _Pool(self._source, count, min(_QUICK_SECONDS, seconds), keep=True)
            self._long = _Pool(self._source, _PATIENT, seconds, keep=False)

    async def run(self, job: str, *arguments: Any, long: bool = False) -> Any:
        """The result of a job of `TextJobs`. Cancelled, it frees its worker at once.

        Args:
          job: its name.
          arguments: its arguments.
          long: whether it is known to take long.

        Raises:
          RefusedError: it refuses what a client sent.
          TimeoutError: it took too long.
          WorkerLostError: its process ended, most likely for want of memory.
          WorkersClosedError: the server ends.
        """
        if self._own is not None:  # a system without fork: in a thread, without these limits
            return result_of(await asyncio.to_thread(self._own.perform, job, *arguments))
        content = framed((job, *arguments))
        if not long:
            with contextlib.suppress(TimeoutError, WorkerLostError):
                return result_of(await self._quick.run(content))
        try:
            return result_of(await self._long.run(content))
        except (OSError, WorkerLostError) as error:
            if self._closed:
                raise WorkersClosedError from error
            raise

    def close(self) -> None:
        """Ends all workers; what still runs raises `WorkersClosedError`."""
        self._closed = True
        if self._own is None:
            self._quick.close()
            self._long.close()
            self._source.close()


class _Worker:
    """A worker's process and the socket to it."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own
        self._process: int | None = None

    async def begun(self) -> None:
        """Waits until it is there."""
        self._process = await self._reply()

    async def ask(self, content: bytes) -> Any:
        """Its reply to a job.

        Raises:
          WorkerLostError: it ended first.
        """
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, content)
        except ConnectionError as error:
            raise WorkerLostError from error
        return await self._reply()

    async def _reply(self) -> Any:
        size = size_of(bytes(await self._read(HEAD)))
        return marshal.loads(await self._read(size))

    async def _read(self, size: int) -> bytearray:
        loop, read = asyncio.get_running_loop(), bytearray(size)
        rest = memoryview(read)
        while rest:
            try:
                count = await loop.sock_recv_into(self._socket, rest)
            except ConnectionError as error:
                raise WorkerLostError from error
            if not count:
                raise WorkerLostError
            rest = rest[count:]
        return read

    def kill(self) -> None:
        """Ends it, whatever it does; who waits for its reply learns that."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it and gives its socket back; nobody waits."""
        self.kill()
        self._socket.close()


class _Pool:
    """So many workers at once, each with one job; those who come first are served first."""

    def __init__(self, source: "_Source", size: int, seconds: float, *, keep: bool) -> None:
        self._source, self._seconds, self._keep = source, seconds, keep
        self._room = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def run(self, content: bytes) -> Any:
        async with self._room:
            worker = self._idle.pop() if self._idle else await self._source.worker()
            self._busy.add(worker)
            done = False
            try:
                async with asyncio.timeout(self._seconds):
                    reply = await worker.ask(content)
                done = self._keep
                return reply
            finally:
                self._busy.discard(worker)
                if done:
                    self._idle.append(worker)
                else:
                    worker.close()

    def close(self) -> None:
        for worker in self._busy:
            worker.kill()
        while self._idle:
            self._idle.pop().close()


class _Source:
    """The process that has loaded the tokenizer and of which workers are copies."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", seconds: float, memory_bytes: int
    ) -> None:
        self._pickle = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            pickle.dump(tokenizer, self._pickle)
            self._pickle.flush()
        except Exception as error:
            self._pickle.close()
            raise ValueError(f"the tokenizer cannot be sent to a process: {error}.") from error
        self._limits = (str(seconds), str(memory_bytes))
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._control, other = socket.socketpair()
        with other:
            self._pickle.seek(0)
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TOKENIZERS_PARALLELISM": "false",
                "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(other.fileno()), *self._limits],
                stdin=self._pickle, stdout=subprocess.DEVNULL, env=environment,
                pass_fds=[other.fileno()],
            )  # fmt: skip

    async def worker(self) -> _Worker:
        """A new one, once the tokenizer is loaded.

        Raises:
          WorkerLostError: the process ended meanwhile.
        """
        if self._closed:
            raise WorkerLostError
        if self._process.poll() is not None:  # it was killed, or its system had no memory
            self._control.close()
            self._start()
        own, other = socket.socketpair()
        worker = _Worker(own)
        try:
            with other:
                socket.send_fds(self._control, [b"x"], [other.fileno()])
            await worker.begun()
        except ConnectionError as error:
            worker.close()
            raise WorkerLostError from error
        except BaseException:
            worker.close()
            raise
        return worker

    def close(self) -> None:
        self._closed = True
        self._control.close()
        self._pickle.close()
        self._process.kill()
        self._process.wait()
