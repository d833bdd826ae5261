"""Worker processes: one loads the tokenizer and is copied for each worker, which takes jobs.

    python -m specjax.server.worker DESCRIPTOR SECONDS BYTES < tokenizer.pickle

`specjax.server.workers` runs it. Whatever it is sent over the socket of that descriptor is a socket
for a new worker. Copies (`fork`) share the tokenizer's memory and are there within milliseconds, so
that a worker which takes too long is simply killed. Processes end when the server's end of their
socket closes, also where the server was killed.
"""

import gc
import marshal
import os
import pickle
import signal
import socket
import struct
import sys
from io import BufferedRWPair
from typing import Any

from specjax.server.text_jobs import TextJobs

_SIZE = struct.Struct("!Q")
_GRACE = 2.0
"""Seconds after which a worker ends itself, beyond those after which the server kills it."""


def framed(value: Any) -> bytes:
    """A value as it is sent: its size, then `marshal`'s bytes."""
    content = marshal.dumps(value)
    return _SIZE.pack(len(content)) + content


def size_of(head: bytes) -> int:
    """How many bytes follow the first eight."""
    return _SIZE.unpack(head)[0]


HEAD = _SIZE.size


def main() -> None:
    """Loads the tokenizer, then makes a worker for each socket that comes, until the end."""
    descriptor, seconds, memory = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    for each in (signal.SIGINT, signal.SIGTERM):  # the server gets them too, and ends its workers
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers that have ended
    jobs = TextJobs(pickle.load(sys.stdin.buffer))
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as control:
        while (own := _received(control)) is not None:
            if os.fork():
                own.close()
                continue
            control.close()
            try:
                _work(own, jobs, seconds, memory)
            finally:
                os._exit(0)


def _received(control: socket.socket) -> socket.socket | None:
    """The next socket; None at the end."""
    content, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if content else None


def _work(own: socket.socket, jobs: TextJobs, seconds: float, memory: int) -> None:
    """Does jobs until the server's end closes."""
    _bound_memory(memory)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # panics of Rust write there; they are in the replies
    with own, own.makefile("rwb") as stream:
        _send(stream, os.getpid())
        while head := stream.read(HEAD):
            signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)  # ends this process
            reply = jobs.perform(*marshal.loads(stream.read(size_of(head))))
            _send(stream, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)


def _send(stream: BufferedRWPair, value: Any) -> None:
    stream.write(framed(value))
    stream.flush()


def _bound_memory(more: int) -> None:
    """Lets this process take so many bytes beyond what it has, where the system knows of that."""
    import resource

    held = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", "rb") as pages:
            held = int(pages.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + more
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    main()
