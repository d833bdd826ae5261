"""Layers read from disk in every pass, ahead of the computation."""

import atexit
import contextlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
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
_BUFFERS = 2
"""Layers as files have them: one is being read while the other becomes arrays."""
_AHEAD = 1
"""Layers that wait for a pass as arrays, beside the one being made and the two in use."""
_IN_MEMORY = _BUFFERS + _AHEAD + 3
"""Layers that streaming holds at most."""
_POLL_SECONDS = 0.2


class _Span(NamedTuple):
    """Tensors that lie side by side in a file, and where a layer's buffer holds them.

    The span begins and ends at pages, `start` and `size`, so it may hold some of what is beside
    them.
    """

    file: Path
    start: int
    size: int
    at: int
    tensors: tuple[Extent, ...]


class LayerReader:
    """Reads layers in turn, again and again, a few ahead of who takes them.

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
        size = max(_size_of(spans) for spans in self._spans.values())
        self._buffers = [mmap.mmap(-1, size) for _ in range(_BUFFERS)]
        self._opened: dict[Path, tuple[int, bool]] = {}
        self._looked: set[int] = set()
        self._lock, self._lock_of_files = threading.Lock(), threading.Lock()
        self._ready: _Ready = queue.Queue(_AHEAD)
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
        """Keeps other threads from taking layers meanwhile."""
        with self._lock:
            yield

    def take(self, layer: int) -> LayerWeights:
        """A layer's weights, the next one that was read; one that a pass left over is skipped.

        Raises:
          CheckpointError: it could not be read.
        """
        if self._stop.is_set():
            raise CheckpointError(f"{self._files.folder} is not read any more.")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_read_on, args=(weakref.proxy(self), self._ready, self._stop),
                daemon=True, name="specjax-layers",
            )  # fmt: skip
            _threads[self._thread] = self._stop
            self._thread.start()
        while True:
            try:
                number, found = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._stop.is_set():  # by another thread
                    return self.take(layer)
                continue
            if isinstance(found, Exception):
                self._thread = None  # the next pass begins anew
                raise found
            if number == layer:
                return found

    def close(self) -> None:
        """Stops to read, and lets go of files."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._finalizer()

    def begin(self, pool: ThreadPoolExecutor, place: int) -> "tuple[int, list[Future[None]]]":
        """Lets the pieces of the next layer be read; `place` counts those read so far."""
        layer, buffer = self._order[place % len(self._order)], self._buffers[place % _BUFFERS]
        pieces = [
            (span, start) for span in self._spans[layer] for start in range(0, span.size, _PIECE)
        ]
        return layer, [pool.submit(self._read, span, start, buffer) for span, start in pieces]

    def _read(self, span: _Span, start: int, buffer: mmap.mmap) -> None:
        """Reads a piece of a span into its place.

        Raises:
          CheckpointError: the file ends before, or the disk does not give it.
        """
        stop = min(start + _PIECE, span.size)
        needed = span.tensors[-1].start + span.tensors[-1].size - span.start
        view = memoryview(buffer)[span.at : span.at + span.size]
        try:
            number, direct = self._open(span.file)
            while start < min(stop, needed):
                held, got = os.fstat(number).st_size, 0
                if held >= span.start + min(stop, needed):
                    got = os.preadv(number, [view[start:stop]], span.start + start)
                if not got:
                    raise CheckpointError(
                        f"{span.file} has {held} bytes; its weights go on to byte "
                        f"{span.start + needed}."
                    )
                if not direct:
                    _forget(number, span.start + start, got)
                start += got
        except OSError as error:
            raise CheckpointError(f"{span.file} cannot be read: {error.strerror}.") from error

    def _open(self, file: Path) -> tuple[int, bool]:
        """A file that is opened, past the system's cache if it can be, and whether it is."""
        with self._lock_of_files:
            if file not in self._opened:
                try:
                    self._opened[file] = os.open(file, os.O_RDONLY | _DIRECT), bool(_DIRECT)
                except OSError:
                    self._opened[file] = os.open(file, os.O_RDONLY), False
            return self._opened[file]

    def arrays(self, place: int) -> LayerWeights:
        """The weights of a layer that was read, as arrays of their own.

        Raises:
          CheckpointError: they are not what they were when the model was loaded.
        """
        layer = self._order[place % len(self._order)]
        data = np.frombuffer(self._buffers[place % _BUFFERS], np.uint8)
        found = []
        for span in self._spans[layer]:
            for each in span.tensors:
                at = span.at + each.start - span.start
                own = data[at : at + each.size].view(each.dtype).reshape(each.shape)
                found.append((each.name, each.file, own))
        leaves: dict[str, Any] = {}
        looks = layer not in self._looked
        for name, file, tensor in quantized.read(found, self._layouts):
            stored = self._expected.get(self._family.name_of(name, self._expected))
            if stored is None:
                continue  # what the family ignores
            check_numbers(name, file, tensor, looks)
            leaves |= leaves_of(stored, tensor, self._placed, self._dtype, self._files.folder)
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


def _read_on(reader: Any, ready: "_Ready", stop: threading.Event) -> None:
    """Reads layers until nobody takes them; an error ends it. `reader` is a weak proxy."""
    try:
        with ThreadPoolExecutor(_READERS, "specjax-read") as pool:
            place = 0
            layer, pieces = reader.begin(pool, place)
            while not stop.is_set():
                for piece in pieces:
                    piece.result()
                following = reader.begin(pool, place + 1)
                _put(ready, stop, (layer, reader.arrays(place)))
                place, (layer, pieces) = place + 1, following
    except ReferenceError:  # nobody has the reader any more
        return
    except Exception as error:
        _put(ready, stop, (-1, error))


def _put(ready: "_Ready", stop: threading.Event, found: "_Found") -> None:
    """Waits until there is room for a layer, or nobody wants it any more."""
    while not stop.is_set():
        try:
            ready.put(found, timeout=_POLL_SECONDS)
        except queue.Full:
            continue
        return


_Found: TypeAlias = tuple[int, LayerWeights | Exception]
_Ready: TypeAlias = "queue.Queue[_Found]"


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
    return {layer: _joined(own) for layer, own in found.items()}


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
            at = 0 if last is None else last.at + last.size
            spans.append(_Span(each.file, start, stop - start, at, (each,)))
    return spans


def _size_of(spans: Sequence[_Span]) -> int:
    return sum(span.size for span in spans)


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
    first = resident_layers(files, config, kind, memory_bytes)
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
        quantization=" and ".join(names) or None,
    )  # fmt: skip


def _dtype_in(files: Files) -> str:
    """bfloat16 where any weight of a layer is stored so."""
    found = {str(each.dtype) for each in extents(files)}
    return "bfloat16" if "bfloat16" in found else default_dtype()


def resident_layers(
    files: Files, config: ModelConfig, dtype: jnp.dtype, memory_bytes: int | None
) -> int:
    """How many layers fit into so many bytes beside what streaming the others takes.

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
        return config.num_layers
    held = _IN_MEMORY * layer
    if outer + held > spare:
        raise CheckpointError(
            f"{files.folder}: what lies outside the layers and {_IN_MEMORY} layers take "
            f"{memory.readable(outer + held)}; there are {memory.readable(spare)} for it."
        )
    return min((spare - outer - held) // layer, config.num_layers - 1)


def _unpacked_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    return sum(int(np.prod(shape)) for shape in config.layer_shapes.values()) * dtype.itemsize


def _layer_bytes(files: Files, config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of a layer in memory: as wide as it is computed, or packed."""
    if not quantized.layouts_in(files.folder):
        return _unpacked_bytes(config, dtype)
    _, family = read_config(files.folder)
    expected = {stored.name: stored for stored in families.stored(family, config)}
    return max(map(_size_of, _spans_of(files, family, expected, range(config.num_layers)).values()))
