"""Reads layers from disk in every pass, ahead of the computation."""

import atexit
import collections
import contextlib
import mmap
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.offload.reading import READERS, SpanReader, format_of, pages
from specjax.checkpoints.offload.spans import (
    PIECE,
    Buffer,
    Span,
    buffer_bytes,
    piece_bytes,
    size_of,
    spans_of,
)
from specjax.models.config import ModelConfig
from specjax.models.families import Family
from specjax.models.layer_weights import LayerWeights, layer_of
from specjax.models.placement import Placement

_IN_USE = 2
"""Layers that a pass has at a time: one is computed, the next is handed over."""
BUFFERS = _IN_USE + 2
"""Layers of the ring: those in use, one that is being read, and the one after it."""
_POLL_SECONDS = 0.2


class DiskLayers:
    """Reads layers in turn, again and again, a few ahead of who takes them.

    They are read past the system's cache into a ring of buffers, which arrays are made of without
    a copy where they can be. So a layer is only to be used until the take after the next, or the
    end of the pass.

    Args:
      files: of the model.
      config: of it.
      family: of its files.
      first: the first layer that is read; those before are in memory.
      placed: where weights lie.
      dtype: what they are rounded to.

    Raises:
      CheckpointError: a file is missing, damaged or cannot be streamed.
    """

    def __init__(
        self,
        files: Files,
        config: ModelConfig,
        family: Family,
        first: int,
        placed: Placement,
        dtype: jnp.dtype,
    ) -> None:
        self._files = files
        self._format = format_of(files, family, placed, dtype)
        self._order = range(first, config.num_layers)
        self._spans = spans_of(files, family, self._format.expected, self._order)
        size = max(map(buffer_bytes, self._spans.values()))
        self._ring = _Ring(size, piece_bytes(self._spans.values()))
        self._reader, self._looked, self._lock = SpanReader(), set[int](), threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Neither this nor the thread may hold the reader, which would never be let go then.
        self._finalizer = weakref.finalize(self, _ended, self._stop, self._reader)

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads."""
        return sum(size_of(spans) for spans in self._spans.values())

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Keeps other threads from taking layers meanwhile; layers taken are let go of after it."""
        with self._lock:
            try:
                yield
            finally:
                self._ring.free(0)

    def take(self, layer: int) -> LayerWeights:
        """A layer's weights, the next one that was read; one that a pass left over is skipped.

        They are valid until the take after the next, or until the pass ends.

        Raises:
          CheckpointError: it could not be read.
        """
        if self._stop.is_set():
            raise CheckpointError(f"{self._files.path} is not read any more.")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_read_on, args=(weakref.proxy(self), self._ring, self._stop),
                daemon=True, name="specjax-layers",
            )  # fmt: skip
            _threads[self._thread] = self._stop
            self._thread.start()
        while True:
            self._ring.free(_IN_USE - 1)
            try:
                found = self._ring.ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._stop.is_set():  # by another thread
                    return self.take(layer)
                continue
            if isinstance(found, Exception):
                self._thread, self._ring = None, self._ring.anew()  # to begin anew
                raise found
            number, weights, buffer = found
            if number == layer:
                self._ring.used.append(buffer)
                return weights
            self._ring.empty.put(buffer)

    def close(self) -> None:
        """Stops to read, and lets go of files."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._finalizer()

    def begin(self, pool: ThreadPoolExecutor, place: int, buffer: Buffer) -> "_Reading":
        """Lets the pieces of the next layer be read; `place` counts those read so far."""
        layer = self._order[place % len(self._order)]
        pieces = [
            (span, start) for span in self._spans[layer] for start in range(0, span.size, PIECE)
        ]
        reads = [pool.submit(self._read, span, start, buffer) for span, start in pieces]
        return _Reading(layer, buffer, reads)

    def _read(self, span: Span, start: int, buffer: Buffer) -> None:
        scratch = self._ring.scratch
        own = scratch.get()
        try:
            self._reader.read(span, start, own, buffer)
        finally:
            scratch.put(own)

    def arrays(self, layer: int, buffer: Buffer) -> LayerWeights:
        """The weights of a layer that was read, as arrays of the buffer where they can be.

        Raises:
          CheckpointError: they are not what they were when the model was loaded.
        """
        looks = layer not in self._looked
        leaves = self._format.leaves(self._spans[layer], buffer, looks=looks)
        self._looked.add(layer)
        return layer_of(leaves)


_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event]
_threads = weakref.WeakKeyDictionary()
"""Those that read, and what stops each."""


@atexit.register
def _wait_for_threads() -> None:
    """Waits for what reads: a thread that is within XLA as the interpreter ends would abort it."""
    for thread, stop in list(_threads.items()):
        stop.set()
        thread.join()


def _ended(stop: threading.Event, reader: SpanReader) -> None:
    stop.set()
    reader.close()


_Found: TypeAlias = "tuple[int, LayerWeights, Buffer] | Exception"


class _Reading(NamedTuple):
    """A layer that is being read into a buffer, and its pieces."""

    layer: int
    buffer: Buffer
    pieces: "list[Future[None]]"


class _Ring:
    """Buffers of `size` bytes: empty ones, ready ones with their layers, and those a pass uses.

    `scratch` are the pages, `piece` bytes each, that single reads go to.
    """

    def __init__(self, size: int, piece: int) -> None:
        self._size, self._piece = size, piece
        self.empty: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self.scratch: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self.used: collections.deque[Buffer] = collections.deque()
        for _ in range(BUFFERS):
            self.empty.put(np.frombuffer(pages(size), np.uint8))
        for _ in range(READERS):
            self.scratch.put(pages(piece))

    def anew(self) -> "_Ring":
        """Another one; what still goes on in this harms nobody."""
        return _Ring(self._size, self._piece)

    def free(self, but: int) -> None:
        """Lets go of the layers that a pass has taken, but for the last ones."""
        while len(self.used) > but:
            self.empty.put(self.used.popleft())

    def next(self, stop: threading.Event, *, wait: bool) -> Buffer | None:
        """An empty buffer; None if there is none, or nobody wants it any more."""
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                return self.empty.get(wait, _POLL_SECONDS)
            if not wait:
                break
        return None


def _read_on(reader: Any, ring: _Ring, stop: threading.Event) -> None:
    """Reads layers until nobody takes them; an error ends it. `reader` is a weak proxy."""
    pool = ThreadPoolExecutor(READERS, "specjax-read")
    try:
        place = 0
        waiting: collections.deque[_Reading] = collections.deque()
        while not stop.is_set():
            # The next layer is begun before the last one is waited for, if there is room.
            while (buffer := ring.next(stop, wait=not waiting)) is not None:
                waiting.append(reader.begin(pool, place, buffer))
                place += 1
            if waiting:
                layer, buffer, pieces = waiting.popleft()
                for piece in pieces:
                    piece.result()
                ring.ready.put((layer, reader.arrays(layer, buffer), buffer))
    except ReferenceError:  # nobody has the reader any more
        pass
    except Exception as error:
        ring.ready.put(error)  # at once: reads that are under way may take long
    finally:
        pool.shutdown(cancel_futures=True)
