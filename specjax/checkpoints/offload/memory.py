"""How many layers of an offloaded model stay in so much memory."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import gguf, quantized
from specjax.checkpoints.files import CheckpointError, Files, extents, tensors
from specjax.checkpoints.huggingface import default_dtype, read_config
from specjax.checkpoints.offload.disk import BUFFERS
from specjax.checkpoints.offload.experts import DiskExperts, Spans, expert_spans
from specjax.checkpoints.offload.reading import READERS
from specjax.checkpoints.offload.spans import (
    Span,
    buffer_bytes,
    expected_tensors,
    piece_bytes,
    size_of,
    spans_of,
)
from specjax.models import memory
from specjax.models.config import ModelConfig
from specjax.models.expert_cache import buffers
from specjax.models.families import Family
from specjax.models.placement import placement
from specjax.models.quantized import TABLES, PackedWeight

DISK, HOST = "disk", "host"
"""Where layers are that are not in memory."""
_WHOLE = tuple(map(jnp.dtype, ("float32", "float16", "bfloat16")))
"""What tables that are not packed are in."""


def dtype_of_layers(files: Files, dtype: str | None) -> jnp.dtype:
    """The dtype of an offloaded model: if none is named bfloat16 where its embedding is stored so.

    Of a packed embedding the last norm says it: scales may be bfloat16 whatever the weights were.
    """
    if dtype is not None:
        return jnp.dtype(dtype)
    config, family = read_config(files.path)
    expected = expected_tensors(config, family)
    found = {family.name_of(each.name, expected): each.dtype for each in extents(files)}
    own = found.get(family.outer["embedding"])
    if own not in _WHOLE:
        own = found.get(family.outer["final_norm"])
    return jnp.dtype("bfloat16" if own == jnp.dtype("bfloat16") else default_dtype())


class Division(NamedTuple):
    """What an offloaded model's weights take of memory.

    Attributes:
      outer: bytes of what lies outside the layers.
      layers: bytes of each layer, where it stays; without its experts where these are by
        themselves.
      resident: how many of them do.
      ring: bytes that streaming the others takes, 0 if there are none.
      bytes_a_pass: that are read of the others; of experts at most.
      slots: how many experts of a layer are in memory, by layer, where they are by themselves.
      experts: bytes of one of them there.
    """

    outer: int
    layers: tuple[int, ...]
    resident: int
    ring: int
    bytes_a_pass: int
    slots: Mapping[int, int] = MappingProxyType({})
    experts: Mapping[int, int] = MappingProxyType({})

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        held = sum(count * self.experts[layer] for layer, count in self.slots.items())
        return self.outer + sum(self.layers[: self.resident]) + self.ring + held


def division(
    files: Files,
    config: ModelConfig,
    dtype: jnp.dtype,
    memory_bytes: int | None,
    offload: str | None = DISK,
) -> Division:
    """How an offloaded model's weights share so many bytes; None is half of what there is.

    What waits in the host's memory is not counted.

    Raises:
      CheckpointError: there is no room for what lies outside the layers and for streaming.
    """
    whole = memory.Load(placement(config, None), dtype)
    _, family = read_config(files.path)
    expected = expected_tensors(config, family)
    spans = spans_of(files, family, expected, range(config.num_layers))
    unpacked = [_unpacked_bytes(config, layer, dtype) for layer in range(config.num_layers)]
    layers = unpacked
    if gguf.is_gguf(files.path):
        layers = [_bytes_of_blocks(own, dtype) for own in spans.values()]
    elif quantized.is_quantized(files.path):
        layers = [buffer_bytes(own) for own in spans.values()]
    outer = whole.weights - sum(unpacked)
    outer -= _saved_outside(files, config, family, spans.values(), dtype)
    spare = memory_bytes
    if spare is None:
        found = memory.available(None)
        spare = whole.weights if found is None else found // 2
    if outer + sum(layers) <= spare:
        return Division(outer, tuple(layers), config.num_layers, 0, 0)
    parts = None
    own = {} if config.experts is None else expert_spans(files, family, config, expected)
    if own and all(all(layer) for layer in own.values()):  # loading says what is missing
        parts = _with_experts(files, config, dtype, own, outer, layers, spare, offload == HOST)
        if parts.total <= spare:
            return parts
    largest = max(layers)
    if offload == HOST:
        ring = BUFFERS * largest
    else:
        stacks = any(each.expert is not None for each in expected.values())
        ring = _ring_bytes(spans.values(), dtype, largest, stacks)
    if outer + ring > spare:
        ring = ring if parts is None else min(ring, parts.total - outer)
        raise CheckpointError(
            f"{files.path}: what lies outside the layers takes {memory.readable(outer)}, and "
            f"streaming {memory.readable(ring)}; there are {memory.readable(spare)} for both."
        )
    held = itertools.accumulate(layers[:-1])
    resident = sum(each <= spare - outer - ring for each in held)
    read = sum(size_of(own) for at, own in spans.items() if at >= resident)
    return Division(outer, tuple(layers), resident, ring, read)


def _with_experts(
    files: Files, config: ModelConfig, dtype: jnp.dtype, spans: Spans, outer: int,
    layers: Sequence[int], spare: int, host: bool,
) -> Division:  # fmt: skip
    """All layers without their experts, and of each as many experts as fit, of the first layers one
    more; one where not even that does.
    """
    assert config.experts is not None
    count, left = config.experts.num_experts, list(layers)
    for layer, own in spans.items():
        if gguf.is_gguf(files.path):
            left[layer] -= sum(_bytes_of_blocks(one, dtype) for one in own)
        elif quantized.is_quantized(files.path):
            left[layer] -= sum(map(buffer_bytes, own))
        else:
            shapes = config.layer_shapes(layer).items()
            own = (shape for name, shape in shapes if name.startswith("expert_"))
            left[layer] -= sum(map(math.prod, own)) * dtype.itemsize
    each = _bytes_of_experts(files, config, spans, dtype)
    every = [own for layer in spans.values() for own in layer]
    ring, sizes = max(each.values()), each
    if not host:  # what is read, and what it becomes where it cannot be used as it is
        kinds = {one.dtype for own in every for span in own for one in span.tensors}
        ring = max(map(buffer_bytes, every)) + (0 if kinds == {dtype} else ring)
        sizes = {layer: max(map(size_of, own)) for layer, own in spans.items()}
    ring = buffers(READERS) * ring + (0 if host else READERS * piece_bytes(every))
    room = spare - outer - sum(left) - ring
    whole = min(count, max(1, room // sum(each.values())))
    room, slots = room - whole * sum(each.values()), dict.fromkeys(spans, whole)
    for layer, size in each.items():
        if whole < count and size <= room:
            room, slots[layer] = room - size, whole + 1
    at_most = sum((count - slots[layer]) * size for layer, size in sizes.items())
    return Division(outer, tuple(left), config.num_layers, ring, at_most, slots, each)


def _bytes_of_experts(
    files: Files, config: ModelConfig, spans: Spans, dtype: jnp.dtype
) -> dict[int, int]:
    """Bytes in memory of an expert of each layer: the first of those that are stored alike is read.

    Raises:
      CheckpointError: it cannot be read.
    """
    _, family = read_config(files.path)
    reader, known = DiskExperts(files, config, family, spans, dtype), {}
    found: dict[int, int] = {}
    for layer, own in spans.items():
        kind = tuple((one.dtype, one.shape) for span in own[0] for one in span.tensors)
        if kind not in known:
            leaves = reader.read(layer, 0, reader.buffer())
            known[kind] = sum(leaf.nbytes for leaf in leaves.values())
        found[layer] = known[kind]
    reader.close()
    return found


def _ring_bytes(
    spans: Collection[Sequence[Span]], dtype: jnp.dtype, layer: int, stacks: bool = False
) -> int:
    """Bytes of the ring, and of what its layers become where they cannot be used as they are.

    Single experts are stacked, if `stacks`.
    """
    each = max(map(buffer_bytes, spans))
    kinds = {one.dtype for own in spans for span in own for one in span.tensors}
    made = 0 if kinds == {np.dtype(dtype)} and not stacks else layer
    return BUFFERS * (each + made) + READERS * piece_bytes(spans)


def _saved_outside(
    files: Files, config: ModelConfig, family: Family, spans: Iterable[Sequence[Span]],
    dtype: jnp.dtype,
) -> int:  # fmt: skip
    """Bytes that packed tables take less than they would in `dtype`."""
    expected = expected_tensors(config, family)
    inside = {each.name for own in spans for span in own for each in span.tensors}
    outside = (each for each in tensors(files) if each[0] not in inside)
    first, second = (family.outer[leaf] for leaf in TABLES)
    saved: dict[str, int] = {}
    for name, _, tensor in quantized.read(outside, quantized.layouts_in(files.path)):
        own = family.name_of(name, expected)
        own = first if config.tie_embeddings and own == second else own
        if isinstance(tensor, PackedWeight) and own in expected:
            saved[own] = int(np.prod(tensor.shape)) * dtype.itemsize - tensor.nbytes
    return sum(saved.values())


def _bytes_of_blocks(spans: Sequence[Span], dtype: jnp.dtype) -> int:
    """Bytes of a layer of a GGUF file in memory."""
    tensors = [each for span in spans for each in span.tensors]
    return sum(quantized.bytes_of_blocks(each, dtype.itemsize) for each in tensors)


def _unpacked_bytes(config: ModelConfig, layer: int, dtype: jnp.dtype) -> int:
    """Bytes of a layer that is not packed."""
    return sum(map(math.prod, config.layer_shapes(layer).values())) * dtype.itemsize
