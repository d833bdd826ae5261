"""Where the tensors of layers are in files, and in the buffers that they are read into."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from specjax.checkpoints.files import Extent, Files, extents
from specjax.models import families
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Stored

PAGE = 4096
"""What direct reads begin and end at."""
PIECE = 8 * 2**20
"""Bytes of a read; several run at a time."""
_ALIGNED = 64
"""What tensors in a buffer begin at; XLA on a CPU takes those as they are, and copies others."""
Buffer: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""A layer's bytes, or a part of them."""


class Span(NamedTuple):
    """Tensors that lie side by side in a file, and where each is in a layer's buffer.

    The span begins and ends at pages, `start` and `size`, so it may hold some of what is beside
    them.
    """

    file: Path
    start: int
    size: int
    tensors: tuple[Extent, ...]
    at: tuple[int, ...] = ()


def expected_tensors(config: ModelConfig, family: Family) -> dict[str, Stored]:
    """The tensors of a model by name."""
    return {stored.name: stored for stored in families.stored(family, config)}


def spans_of(
    files: Files, family: Family, expected: dict[str, Stored], layers: Sequence[int]
) -> dict[int, list[Span]]:
    """Where the tensors of each layer are, in as few spans as there can be."""
    found: dict[int, list[Extent]] = {layer: [] for layer in layers}
    prefixes = {family.layer_prefix.format(index=layer): layer for layer in layers}
    for extent in extents(files):
        name = family.name_of(extent.name, expected)
        for prefix, layer in prefixes.items():
            if name.startswith(prefix) or (family.base + name).startswith(prefix):
                found[layer].append(extent)
    return {layer: in_spans(own) for layer, own in found.items()}


def in_spans(tensors: list[Extent]) -> list[Span]:
    """Tensors in as few spans as there can be, one after the other in a buffer."""
    return _in_buffer(_joined(tensors))


def _joined(tensors: list[Extent]) -> list[Span]:
    """Spans of tensors that are less than a page apart."""
    spans: list[Span] = []
    for each in sorted(tensors, key=lambda each: (each.file, each.start)):
        start, stop = each.start // PAGE * PAGE, -(-(each.start + each.size) // PAGE) * PAGE
        last = spans[-1] if spans else None
        if last is not None and last.file == each.file and start <= last.start + last.size:
            size = max(last.size, stop - last.start)
            spans[-1] = last._replace(size=size, tensors=(*last.tensors, each))
        else:
            spans.append(Span(each.file, start, stop - start, (each,)))
    return spans


def _in_buffer(spans: list[Span]) -> list[Span]:
    """The spans with places for their tensors, one after the other."""
    placed, end = [], 0
    for span in spans:
        at = []
        for each in span.tensors:
            at.append(end)
            end += -(-each.size // _ALIGNED) * _ALIGNED
        placed.append(span._replace(at=tuple(at)))
    return placed


def size_of(spans: Sequence[Span]) -> int:
    """Bytes that are read."""
    return sum(span.size for span in spans)


def buffer_bytes(spans: Sequence[Span]) -> int:
    """Bytes that a buffer holds of them."""
    last = max(((at, each.size) for span in spans
                for each, at in zip(span.tensors, span.at, strict=True)))  # fmt: skip
    return sum(last)


def piece_bytes(spans: Iterable[Sequence[Span]]) -> int:
    """Bytes of the largest piece."""
    return min(PIECE, max(span.size for own in spans for span in own))


def scatter(span: Span, start: int, data: Buffer, buffer: Buffer) -> None:
    """Puts bytes of a span that begin at `start` into their tensors' places."""
    first = span.start + start
    for each, at in zip(span.tensors, span.at, strict=True):
        begin, end = max(each.start, first), min(each.start + each.size, first + len(data))
        if begin < end:
            into = at + begin - each.start
            buffer[into : into + end - begin] = data[begin - first : end - first]
