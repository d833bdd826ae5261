"""Single experts of a mixture's layers, read from disk when a token takes them."""

import dataclasses
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.files import CheckpointError, Extent, Files, extents
from specjax.checkpoints.offload.reading import SpanReader, format_of, pages
from specjax.checkpoints.offload.spans import (
    PIECE,
    Buffer,
    Span,
    buffer_bytes,
    in_spans,
    piece_bytes,
    size_of,
)
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.placement import placement

Spans: TypeAlias = dict[int, list[list[Span]]]
"""Where each expert of a layer is, by layer."""
_NUMBER = re.compile(r"\.(\d+)\.")


def of_experts(stored: Stored) -> bool:
    """Whether a tensor holds what is an expert's own."""
    return stored.leaves[0].startswith("expert_")


def expert_spans(
    files: Files, family: Family, config: ModelConfig, expected: Mapping[str, Stored]
) -> Spans:
    """Where the tensors of each expert are; names are those that the first one's would have.

    Raises:
      CheckpointError: a file is missing or damaged, or a tensor is not of as many experts.
    """
    assert config.experts is not None
    (single, stacks), count = _names(expected), config.experts.num_experts
    found: dict[int, list[list[Extent]]] = {
        layer: [[] for _ in range(count)]
        for layer in range(config.num_layers)
        if config.has_experts(layer)
    }
    for each in extents(files):
        name = family.name_of(each.name, expected)
        for own in (name, family.base + name):
            numbers = [(m.start() + 1, m.end() - 1) for m in _NUMBER.finditer(own)]
            whole = [(own[: end + 1], (start, end)) for start, end in numbers]
            one = next((at for at in whole if at[0] in single), None)
            if one is not None:
                layer, expert = single[one[0]]
                start, end = one[1]
                found[layer][expert].append(each._replace(name=f"{own[:start]}0{own[end:]}"))
                break
            stack = next((layer for base, layer in stacks if own.startswith(base)), None)
            if stack is not None:
                for expert, part in enumerate(_parts(each, count)):
                    found[stack][expert].append(part)
                break
    return {layer: [in_spans(each) for each in own] for layer, own in found.items()}


def _names(
    expected: Mapping[str, Stored],
) -> tuple[dict[str, tuple[int, int]], list[tuple[str, int]]]:
    """Beginnings of the names of single experts' tensors, and of those of all of a layer."""
    single: dict[str, tuple[int, int]] = {}
    stacks: list[tuple[str, int]] = []
    for name, stored in expected.items():
        if stored.layer is None or not of_experts(stored):
            continue
        if stored.expert is None:
            stacks.append((name.removesuffix(".weight"), stored.layer))
        else:
            mark = f".{stored.expert}."
            single[name[: name.rindex(mark) + len(mark)]] = stored.layer, stored.expert
    return single, stacks


def _parts(tensor: Extent, count: int) -> Iterator[Extent]:
    """The part of each expert of a tensor of all.

    Raises:
      CheckpointError: it is not of as many.
    """
    if not tensor.shape or tensor.shape[0] != count:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has shape {tensor.shape}; the layer has {count} "
            "experts."
        )
    size = tensor.size // count
    for expert in range(count):
        start = tensor.start + expert * size
        yield tensor._replace(shape=(1, *tensor.shape[1:]), start=start, size=size)


class DiskExperts:
    """Reads single experts, for several threads at a time.

    Args:
      files: of the model.
      config: of it.
      family: of its files.
      spans: where its experts are.
      dtype: what they are rounded to.

    Raises:
      CheckpointError: a file is missing or damaged.
    """

    def __init__(
        self, files: Files, config: ModelConfig, family: Family, spans: Spans, dtype: jnp.dtype
    ) -> None:
        assert config.experts is not None
        one = dataclasses.replace(
            config.experts, num_experts=1, experts_per_token=1, num_groups=1, topk_groups=1,
            group_best=1,
        )  # fmt: skip
        alone = dataclasses.replace(config, experts=one)
        self._format = format_of(files, family, placement(alone, None), dtype)
        self._spans, self._reader = spans, SpanReader()
        weakref.finalize(self, self._reader.close)  # no read goes on then, as each holds this
        every = [own for layer in spans.values() for own in layer]
        self._size, self._piece = max(map(buffer_bytes, every)), piece_bytes(every)
        self._looked: set[tuple[int, int]] = set()
        self._scratch = threading.local()

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes that are read of an expert, by layer."""
        return {layer: max(map(size_of, own)) for layer, own in self._spans.items()}

    def buffer(self) -> Buffer:
        """Bytes that an expert is read into."""
        return np.frombuffer(pages(self._size), np.uint8)

    def read(self, layer: int, expert: int, buffer: Buffer) -> dict[str, Any]:
        """The leaves of an expert, as arrays of the buffer where they can be.

        Raises:
          CheckpointError: it could not be read, or is not what it was when the model was loaded.
        """
        if not hasattr(self._scratch, "pages"):
            self._scratch.pages = pages(self._piece)
        spans = self._spans[layer][expert]
        for span in spans:
            for start in range(0, span.size, PIECE):
                self._reader.read(span, start, self._scratch.pages, buffer)
        looks = (layer, expert) not in self._looked
        leaves = self._format.leaves(spans, buffer, looks=looks)
        self._looked.add((layer, expert))
        return leaves

    def close(self) -> None:
        """Closes the files; a read opens them anew."""
        self._reader.close()
