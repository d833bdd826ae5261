"""Layers read from disk in every pass, ahead of the computation."""

import atexit
import collections
import contextlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.checkpoints import quantized
from specjax.checkpoints.files import CheckpointError, Extent, Files, extents
from specjax.checkpoints.huggingface import (
    check_numbers,
    checked,
    default_dtype,
    leaves_of,
    read_config,
)
from specjax.models import families, memory
from specjax.models.config import ModelConfig
from specjax.models.families import Family
from specjax.models.placement import Placement, placement
from specjax.models.quantized import PackedWeight
from specjax.models.streamed import StreamedModel
from specjax.models.transformer import LayerWeights, assemble, layer_of

PAGE = 4096
"""What direct reads begin and end at."""
_PIECE = 8 * 2**20
"""Bytes of a read; several run at a time."""
_READERS = 4
_IN_USE = 2
"""Layers that a pass has at a time: one is computed, the next is handed over."""
BUFFERS = _IN_USE + 2
"""Layers of the ring: those in use, one that is being read, and the one after it."""
_ALIGNED = 64
"""What tensors in a buffer begin at; XLA on a CPU takes those as they are, and copies others."""
_POLL_SECONDS = 0.2


class _Span(NamedTuple):
    """Tensors that lie side by side in a file, and where each is in a layer's buffer.

    The span begins and ends at pages, `start` and `size`, so it may hold some of what is beside
    them.
    """

    file: Path
    start: int
    size: int
    tensors: tuple[Extent, ...]
    at: tuple[int, ...] = ()


class LayerReader:
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
        self._files, self._config, self._placed, self._dtype = files, config, placed, dtype
        self._family = family
        self._expected = {stored.name: stored for stored in families.stored(family, config)}
        self._layouts = quantized.layouts_in(files.folder)
        self._order = range(first, config.num_layers)
        self._spans = _spans_of(files, family, self._expected, self._order)
        size = max(map(_held_bytes, self._spans.values()))
        self._ring = _Ring(size, _scratch_bytes(self._spans.values()))
        self._opened: dict[Path, tuple[int, bool]] = {}
        self._looked: set[int] = set()
        self._lock, self._lock_of_files = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Neither this nor the thread may hold the reader, which would never be let go then.
        self._finalizer = weakref.finalize(self, _ended, self._stop, self._opened)

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads."""
        return sum(_size_of(spans) for spans in self._spans.values())

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
            raise CheckpointError(f"{self._files.folder} is not read any more.")
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

    def begin(self, pool: ThreadPoolExecutor, place: int, buffer: "_Buffer") -> "_Reading":
        """Lets the pieces of the next layer be read; `place` counts those read so far."""
        layer = self._order[place % len(self._order)]
        pieces = [
            (span, start) for span in self._spans[layer] for start in range(0, span.size, _PIECE)
        ]
        reads = [pool.submit(self._read, span, start, buffer) for span, start in pieces]
        return _Reading(layer, buffer, reads)

    def _read(self, span: _Span, start: int, buffer: "_Buffer") -> None:
        """Reads a piece of a span, and puts what it has of tensors into their places.

        Raises:
          CheckpointError: the file ends before, or the disk does not give it.
        """
        stop = min(start + _PIECE, span.size)
        needed = span.tensors[-1].start + span.tensors[-1].size - span.start
        scratch = self._ring.scratch.get()
        try:
            number, direct = self._open(span.file)
            while start < min(stop, needed):
                held, got = os.fstat(number).st_size, 0
                if held >= span.start + min(stop, needed):
                    room = memoryview(scratch)[: stop - start]
                    got = os.preadv(number, [room], span.start + start)
                if not got:
                    raise CheckpointError(
                        f"{span.file} has {held} bytes; its weights go on to byte "
                        f"{span.start + needed}."
                    )
                _scatter(span, start, np.frombuffer(scratch, np.uint8)[:got], buffer)
                if not direct:
                    _forget(number, span.start + start, got)
                start += got
        except OSError as error:
            raise CheckpointError(f"{span.file} cannot be read: {error.strerror}.") from error
        finally:
            self._ring.scratch.put(scratch)

    def _open(self, file: Path) -> tuple[int, bool]:
        """A file that is opened, past the system's cache if it can be, and whether it is."""
        with self._lock_of_files:
            if file not in self._opened:
                try:
                    self._opened[file] = os.open(file, os.O_RDONLY | _DIRECT), bool(_DIRECT)
                except OSError:
                    self._opened[file] = os.open(file, os.O_RDONLY), False
            return self._opened[file]

    def arrays(self, layer: int, buffer: "_Buffer") -> LayerWeights:
        """The weights of a layer that was read, as arrays of the buffer where they can be.

        Raises:
          CheckpointError: they are not what they were when the model was loaded.
        """
        found = []
        for span in self._spans[layer]:
            for each, at in zip(span.tensors, span.at, strict=True):
                own = buffer[at : at + each.size].view(each.dtype).reshape(each.shape)
                found.append((each.name, each.file, own))
        leaves: dict[str, Any] = {}
        looks = layer not in self._looked
        for name, file, tensor in quantized.read(found, self._layouts):
            stored = self._expected.get(self._family.name_of(name, self._expected))
            if stored is None:
                continue  # what the family ignores
            check_numbers(name, file, tensor, looks)
            leaves |= leaves_of(
                stored, tensor, self._placed, self._dtype, self._files.folder, copy=False
            )
        self._looked.add(layer)
        return layer_of(leaves)


_DIRECT = getattr(os, "O_DIRECT", 0)


_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event]
_threads = weakref.WeakKeyDictionary()
"""Those that read, and what stops each."""


@atexit.register
def _wait_for_threads() -> None:
    """Waits for what reads: a thread that is within XLA as the interpreter ends would abort it."""
    for thread, stop in list(_threads.items()):
        stop.set()
        thread.join()


def _ended(stop: threading.Event, opened: dict[Path, tuple[int, bool]]) -> None:
    stop.set()
    while opened:
        os.close(opened.popitem()[1][0])


def _forget(number: int, start: int, size: int) -> None:
    """Lets the system drop what was read: it would push out what is read again sooner."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, start, size, os.POSIX_FADV_DONTNEED)


_Buffer: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_Found: TypeAlias = "tuple[int, LayerWeights, _Buffer] | Exception"


class _Reading(NamedTuple):
    """A layer that is being read into a buffer, and its pieces."""

    layer: int
    buffer: _Buffer
    pieces: "list[Future[None]]"


class _Ring:
    """Buffers of `size` bytes: empty ones, ready ones with their layers, and those a pass uses.

    `scratch` are the pages, `piece` bytes each, that single reads go to.
    """

    def __init__(self, size: int, piece: int) -> None:
        self._size, self._piece = size, piece
        self.empty: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self.scratch: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self.used: collections.deque[_Buffer] = collections.deque()
        for _ in range(BUFFERS):
            self.empty.put(np.frombuffer(mmap.mmap(-1, size), np.uint8))
        for _ in range(_READERS):
            self.scratch.put(mmap.mmap(-1, piece))

    def anew(self) -> "_Ring":
        """Another one; what still goes on in this harms nobody."""
        return _Ring(self._size, self._piece)

    def free(self, but: int) -> None:
        """Lets go of the layers that a pass has taken, but for the last ones."""
        while len(self.used) > but:
            self.empty.put(self.used.popleft())

    def next(self, stop: threading.Event, *, wait: bool) -> _Buffer | None:
        """An empty buffer; None if there is none, or nobody wants it any more."""
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                return self.empty.get(wait, _POLL_SECONDS)
            if not wait:
                break
        return None


def _read_on(reader: Any, ring: _Ring, stop: threading.Event) -> None:
    """Reads layers until nobody takes them; an error ends it. `reader` is a weak proxy."""
    try:
        with ThreadPoolExecutor(_READERS, "specjax-read") as pool:
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
        return
    except Exception as error:
        ring.ready.put(error)


def _scatter(span: _Span, start: int, data: _Buffer, buffer: _Buffer) -> None:
    """Puts bytes of a span that begin at `start` into their tensors' places."""
    first = span.start + start
    for each, at in zip(span.tensors, span.at, strict=True):
        begin, end = max(each.start, first), min(each.start + each.size, first + len(data))
        if begin < end:
            into = at + begin - each.start
            buffer[into : into + end - begin] = data[begin - first : end - first]


def _spans_of(
    files: Files, family: Family, expected: dict[str, Any], layers: Sequence[int]
) -> dict[int, list[_Span]]:
    """Where the tensors of each layer are, in as few spans as there can be."""
    found: dict[int, list[Extent]] = {layer: [] for layer in layers}
    prefixes = {family.layer_prefix.format(index=layer): layer for layer in layers}
    for extent in extents(files):
        name = family.name_of(extent.name, expected)
        for prefix, layer in prefixes.items():
            if name.startswith(prefix) or (family.base + name).startswith(prefix):
                found[layer].append(extent)
    return {layer: _in_buffer(_joined(own)) for layer, own in found.items()}


def _joined(tensors: list[Extent]) -> list[_Span]:
    """Spans of tensors that are less than a page apart."""
    spans: list[_Span] = []
    for each in sorted(tensors, key=lambda each: (each.file, each.start)):
        start, stop = each.start // PAGE * PAGE, -(-(each.start + each.size) // PAGE) * PAGE
        last = spans[-1] if spans else None
        if last is not None and last.file == each.file and start <= last.start + last.size:
            size = max(last.size, stop - last.start)
            spans[-1] = last._replace(size=size, tensors=(*last.tensors, each))
        else:
            spans.append(_Span(each.file, start, stop - start, (each,)))
    return spans


def _in_buffer(spans: list[_Span]) -> list[_Span]:
    """The spans with places for their tensors, one after the other."""
    placed, end = [], 0
    for span in spans:
        at = []
        for each in span.tensors:
            at.append(end)
            end += -(-each.size // _ALIGNED) * _ALIGNED
        placed.append(span._replace(at=tuple(at)))
    return placed


def _size_of(spans: Sequence[_Span]) -> int:
    """Bytes that are read."""
    return sum(span.size for span in spans)


def _held_bytes(spans: Sequence[_Span]) -> int:
    """Bytes that a buffer holds of them."""
    last = max(((at, each.size) for span in spans
                for each, at in zip(span.tensors, span.at, strict=True)))  # fmt: skip
    return sum(last)


def load_offloaded(
    files: Files,
    offload: str | None,
    memory_bytes: int | None,
    *,
    dtype: str | None,
    mesh: Mesh | None,
    positions: int | None,
) -> StreamedModel:
    """The model that `load` gives with `offload` or `memory`.

    Raises:
      CheckpointError: see `load_streamed`.
      ValueError: there is no such way, or it does not go with the other arguments.
    """
    if offload != "disk":
        raise ValueError(f"offload is {offload!r}; it must be 'disk', which memory goes with.")
    if mesh is not None or positions is not None:
        raise ValueError("an offloaded model is on one device, with all its positions.")
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"memory is {memory_bytes}; it must be at least 1 byte.")
    return load_streamed(files, dtype=dtype, memory_bytes=memory_bytes)


def load_streamed(
    files: Files, *, dtype: str | None = None, memory_bytes: int | None = None
) -> StreamedModel:
    """A model of which the first layers that fit into so much memory stay there.

    Args:
      files: the model, in safetensors files.
      dtype: "float32" or "bfloat16"; None takes bfloat16 where the files have that, else as `load`.
      memory_bytes: for its weights, what streaming takes included; None is half of what there is.

    Raises:
      CheckpointError: a file or a tensor is missing or not supported, or not even what lies outside
        the layers fits beside a few of them.
    """
    config, family = read_config(files.folder)
    kind = jnp.dtype(dtype or _dtype_in(files))
    placed = placement(config, None)
    shared = division(files, config, kind, memory_bytes)
    first = shared.resident
    outer: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{} for _ in range(first)]
    names: dict[str, None] = {}
    for stored, tensor in checked(
        files, config, family, lambda stored: stored.layer is None or stored.layer < first
    ):
        if isinstance(tensor, PackedWeight):
            names[tensor.name] = None
        if stored.layer is not None and stored.layer >= first:
            continue
        into = outer if stored.layer is None else layers[stored.layer]
        into |= leaves_of(stored, tensor, placed, kind, files.folder)
    made = assemble(placed.config, outer, layers)
    source = None
    if first < config.num_layers:
        source = LayerReader(files, config, family, first, placed, kind)
    return StreamedModel(
        made.embedding, made.layers, made.final_norm, made.unembedding, made.config,
        made.final_norm_bias, made.position_embedding, source=source,
        quantization=" and ".join(names) or None, held_bytes=shared.total,
    )  # fmt: skip


def _dtype_in(files: Files) -> str:
    """bfloat16 where any weight of a layer is stored so."""
    found = {str(each.dtype) for each in extents(files)}
    return "bfloat16" if "bfloat16" in found else default_dtype()


class Division(NamedTuple):
    """What an offloaded model's weights take of memory.

    Attributes:
      outer: bytes of what lies outside the layers.
      layer: bytes of a layer that stays.
      resident: how many of them do.
      ring: bytes that streaming the others takes, 0 if there are none.
    """

    outer: int
    layer: int
    resident: int
    ring: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.outer + self.resident * self.layer + self.ring


def division(
    files: Files, config: ModelConfig, dtype: jnp.dtype, memory_bytes: int | None
) -> Division:
    """How an offloaded model's weights share so many bytes; None is half of what there is.

    Raises:
      CheckpointError: there is no room for what lies outside the layers and for streaming.
    """
    whole = memory.Load(placement(config, None), dtype)
    layer = max(_layer_bytes(files, config, dtype), 1)
    outer = whole.weights - config.num_layers * _unpacked_bytes(config, dtype)
    spare = memory_bytes
    if spare is None:
        found = memory.available(None)
        spare = whole.weights if found is None else found // 2
    if outer + config.num_layers * layer <= spare:
        return Division(outer, layer, config.num_layers, 0)
    ring = _ring_bytes(files, config, dtype, layer)
    if outer + ring > spare:
        raise CheckpointError(
            f"{files.folder}: what lies outside the layers takes {memory.readable(outer)}, and "
            f"streaming {memory.readable(ring)}; there are {memory.readable(spare)} for both."
        )
    return Division(outer, layer, min((spare - outer - ring) // layer, config.num_layers - 1), ring)


def _ring_bytes(files: Files, config: ModelConfig, dtype: jnp.dtype, layer: int) -> int:
    """Bytes of the ring, and of what its layers become where they cannot be used as they are."""
    _, family = read_config(files.folder)
    expected = {stored.name: stored for stored in families.stored(family, config)}
    spans = _spans_of(files, family, expected, range(config.num_layers))
    each = max(map(_held_bytes, spans.values()))
    kinds = {one.dtype for own in spans.values() for span in own for one in span.tensors}
    made = 0 if kinds == {np.dtype(dtype)} else layer
    return BUFFERS * (each + made) + _READERS * _scratch_bytes(spans.values())


def _scratch_bytes(spans: Iterable[Sequence[_Span]]) -> int:
    """Bytes of the largest piece."""
    return min(_PIECE, max(span.size for own in spans for span in own))


def _unpacked_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    return sum(int(np.prod(shape)) for shape in config.layer_shapes.values()) * dtype.itemsize


def _layer_bytes(files: Files, config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of a layer in memory: as wide as it is computed, or packed."""
    if not quantized.layouts_in(files.folder):
        return _unpacked_bytes(config, dtype)
    _, family = read_config(files.folder)
    expected = {stored.name: stored for stored in families.stored(family, config)}
    return max(map(_size_of, _spans_of(files, family, expected, range(config.num_layers)).values()))
