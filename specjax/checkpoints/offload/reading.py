"""Spans of files read past the system's cache, and the leaves that their tensors become."""

import dataclasses
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import quantized
from specjax.checkpoints.experts import Tensor, gathered
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.huggingface import check_numbers, leaves_of
from specjax.checkpoints.layouts import Layout
from specjax.checkpoints.offload.spans import PIECE, Buffer, Span, expected_tensors, scatter
from specjax.models.families import Family, Stored
from specjax.models.placement import Placement

READERS = 4
"""Reads at a time."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class SpanReader:
    """Files that are opened once, past the system's cache where they can be."""

    def __init__(self) -> None:
        self._opened: dict[Path, tuple[int, bool]] = {}
        self._lock = threading.Lock()

    def read(self, span: Span, start: int, scratch: mmap.mmap, buffer: Buffer) -> None:
        """Reads a piece of a span, and puts what it has of tensors into their places.

        `scratch` are pages for a piece.

        Raises:
          CheckpointError: the file ends before, or the disk does not give it.
        """
        stop = min(start + PIECE, span.size)
        needed = span.tensors[-1].start + span.tensors[-1].size - span.start
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
                scatter(span, start, np.frombuffer(scratch, np.uint8)[:got], buffer)
                if not direct:
                    _forget(number, span.start + start, got)
                start += got
        except OSError as error:
            raise CheckpointError(f"{span.file} cannot be read: {error.strerror}.") from error

    def close(self) -> None:
        """Closes all files."""
        while self._opened:
            os.close(self._opened.popitem()[1][0])

    def _open(self, file: Path) -> tuple[int, bool]:
        """A file that is opened, past the system's cache if it can be, and whether it is."""
        with self._lock:
            if file not in self._opened:
                try:
                    self._opened[file] = os.open(file, os.O_RDONLY | _DIRECT), bool(_DIRECT)
                except OSError:
                    self._opened[file] = os.open(file, os.O_RDONLY), False
            return self._opened[file]


def _forget(number: int, start: int, size: int) -> None:
    """Lets the system drop what was read: it would push out what is read again sooner."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, start, size, os.POSIX_FADV_DONTNEED)


def pages(size: int) -> mmap.mmap:
    """Pages that are this process's own: by default they would count as shared memory."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def format_of(files: Files, family: Family, placed: Placement, dtype: jnp.dtype) -> "Format":
    """How files hold a model that is placed so.

    Raises:
      CheckpointError: the quantization is of a kind that is not supported.
    """
    expected, layouts = expected_tensors(placed.config, family), quantized.layouts_in(files.path)
    return Format(files.path, family, expected, layouts, placed, dtype)


@dataclasses.dataclass(frozen=True)
class Format:
    """How files hold a model's tensors, and what these become.

    Attributes:
      path: of the model.
      family: of its files.
      expected: the tensors by name.
      layouts: of quantized matrices.
      placed: where leaves lie.
      dtype: what they are rounded to.
    """

    path: Path
    family: Family
    expected: dict[str, Stored]
    layouts: list[Layout]
    placed: Placement
    dtype: jnp.dtype

    def leaves(self, spans: Sequence[Span], buffer: Buffer, *, looks: bool) -> dict[str, Any]:
        """The leaves in a buffer that spans were read into, as arrays of it where they can be.

        `looks` says whether numbers are looked at that might be none.

        Raises:
          CheckpointError: they are not what they were when the model was loaded.
        """
        found = [
            (each.name, each.file, buffer[at : at + each.size].view(each.dtype).reshape(each.shape))
            for span in spans
            for each, at in zip(span.tensors, span.at, strict=True)
        ]
        leaves: dict[str, Any] = {}
        own = self._checked(found, looks)
        for stored, tensor in gathered(own, self.placed.config, self.path):
            leaves |= leaves_of(stored, tensor, self.placed, self.dtype, self.path, copy=False)
        return leaves

    def _checked(
        self, found: Iterable[tuple[str, Path, np.ndarray]], looks: bool
    ) -> Iterator[tuple[Stored, Tensor]]:
        for name, file, tensor in quantized.read(found, self.layouts):
            stored = self.expected.get(self.family.name_of(name, self.expected))
            if stored is None:
                continue  # what the family ignores
            check_numbers(name, file, tensor, looks)
            yield stored, tensor
