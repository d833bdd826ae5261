"""What a GGUF file begins with: metadata, and where each tensor is.

The format is stated in ggml's docs/gguf.md. The reader of the package `gguf` takes 15 s for the
262,144 tokens of Gemma 3 and believes every number of a file; this takes 0.2 s and none.
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints.errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of values by their numbers."""
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4
_MOST_PARTS = 1000
_ALIGNMENT = 32
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Tensor(NamedTuple):
    """Where a tensor is.

    Attributes:
      name: in the file.
      file: that holds it; of a model in several files each has its own.
      kind: the number of its ggml type.
      shape: outputs first, as numpy and torch count.
      start: its first byte.
    """

    name: str
    file: Path
    kind: int
    shape: tuple[int, ...]
    start: int


class Header(NamedTuple):
    """A file's metadata by key, and its tensors by name.

    Arrays of numbers are numpy arrays, those of strings lists.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key that is of such a type, or the default where there is none.

        Raises:
          CheckpointError: it is of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(
                f"{self.file}: {key} is {shown(value)}; it must be a {kind.__name__}."
            )
        return value

    @property
    def architecture(self) -> str:
        """What the file calls the family.

        Raises:
          CheckpointError: it does not say.
        """
        found = self.get("general.architecture", str)
        if found is None:
            raise CheckpointError(f"{self.file} has no general.architecture.")
        return found


def shown(value: Any) -> str:
    """A value as a sentence can hold it."""
    text = repr(value[:30].tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else f"{text[:60]} ..."


def is_gguf(path: Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return path.suffix.lower() == SUFFIX


def further_parts(name: str) -> list[str]:
    """The names of the files after the first of several; none where a name is not the first's."""
    named = _PART.search(name)
    if named is None or int(named[1]) != 1 or int(named[2]) > _MOST_PARTS:
        return []
    start, count = name[: named.start()], int(named[2])
    return [f"{start}-{n:05}-of-{count:05}.gguf" for n in range(2, count + 1)]


def header_of(file: Path) -> Header:
    """The header of a GGUF file, and of those that hold the rest of its tensors.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
    """
    made = _read(file)
    count = made.get("split.count", int, 1)
    if count <= 1:
        return made
    tensors: dict[str, Tensor] = {}
    for each in _parts(file, count):
        for name, tensor in _read(each).tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is there twice, in {tensors[name].file} and in {each}."
                )
            tensors[name] = tensor
    return made._replace(tensors=tensors)


def _parts(file: Path, count: int) -> list[Path]:
    """The files of a model in several, in order; the first has the metadata.

    Raises:
      CheckpointError: the file is not the first, or another is missing.
    """
    named = _PART.search(file.name)
    if named is None or int(named[2]) != count or int(named[1]) != 1 or count > _MOST_PARTS:
        raise CheckpointError(
            f"{file} is one of {count} files; name the first, which ends in "
            f"-00001-of-{count:05}.gguf."
        )
    parts = [file, *(file.with_name(name) for name in further_parts(file.name))]
    for each in parts:
        if not each.is_file():
            raise CheckpointError(f"{each} is missing; {file} says that there are {count} files.")
    return parts


def _read(file: Path) -> Header:
    try:
        status = file.stat()
        return _parsed(file, status.st_size, status.st_mtime_ns)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {file}.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error


@functools.lru_cache(maxsize=8)
def _parsed(file: Path, size: int, changed: int) -> Header:
    """The header of a file of so many bytes, read once as long as it does not change."""
    del changed
    if size < len(_MAGIC) + 4:
        raise CheckpointError(f"{file} has {size} bytes; it is no GGUF file.")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Cursor(file, data).header()
        except (UnicodeDecodeError, MemoryError) as error:
            raise CheckpointError(f"{file} is damaged: {error}.") from error


class _Cursor:
    """Reads a header from its beginning to its end, and nothing past the file's."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at, self._size = file, data, 0, len(data)

    def header(self) -> Header:
        """All of it.

        Raises:
          CheckpointError: it is damaged or not supported.
        """
        if self._taken(4) != _MAGIC:
            raise CheckpointError(f"{self._file} does not begin as a GGUF file does.")
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "big-endian" if swapped else f"of version {version}"
            raise CheckpointError(
                f"{self._file} is {what}; GGUF files of version 2 and 3 are read, little-endian."
            )
        tensors, keys = self._count("tensors", 24), self._count("keys", 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise CheckpointError(f"{self._file} has the key {key!r} twice.")
            metadata[key] = self._value(self._number("<I"))
        return self._with_tensors(tensors, metadata)

    def _with_tensors(self, count: int, metadata: dict[str, Any]) -> Header:
        places = [self._place() for _ in range(count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self._file}: general.alignment is {shown(alignment)}; it must be a power of 2."
            )
        first = -(-self._at // alignment) * alignment
        found: dict[str, Tensor] = {}
        for name, kind, shape, offset in places:
            if name in found:
                raise CheckpointError(f"{name} in {self._file} is there twice.")
            found[name] = Tensor(name, self._file, kind, shape, first + offset)
        return Header(self._file, metadata, found)

    def _place(self) -> tuple[str, int, tuple[int, ...], int]:
        """A tensor's name, type, shape and offset."""
        name, axes = self._string(), self._number("<I")
        if not 1 <= axes <= _MOST_AXES:
            raise CheckpointError(
                f"{name} in {self._file} has {axes} axes; tensors have 1 to {_MOST_AXES}."
            )
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        if not name.isprintable():
            raise CheckpointError(f"{self._file} has a tensor of the name {shown(name)}.")
        if not 0 < math.prod(shape) < 2**48:
            raise CheckpointError(f"{name} in {self._file} has the shape {shape}.")
        return name, self._number("<I"), shape, self._number("<Q")

    def _taken(self, size: int) -> bytes:
        """The next bytes.

        Raises:
          CheckpointError: the file ends before.
        """
        start, self._at = self._at, self._at + size
        if self._at > self._size:
            raise CheckpointError(
                f"{self._file} is truncated or damaged: its header goes on to byte {self._at}, and "
                f"it has {self._size}."
            )
        return self._data[start : self._at]

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._taken(struct.calcsize(form)))[0]

    def _count(self, what: str, least: int) -> int:
        """How many of something follow that have at least so many bytes each.

        Raises:
          CheckpointError: the file has no room for them.
        """
        count = self._number("<Q")
        if count * least > self._size - self._at:
            raise CheckpointError(
                f"{self._file} is truncated or damaged: it says that {count} {what} follow byte "
                f"{self._at}, and it has {self._size}."
            )
        return count

    def _string(self) -> str:
        return self._taken(self._number("<Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            (number,) = self._numbers(kind, 1)
            # The shortest decimal number that is this float: what was written, such as 1e-05.
            return float(str(number)) if number.dtype == np.float32 else number.item()
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self._file} has a value of type {kind}, which is not known.")
        inner = self._number("<I")
        if inner in _SCALARS:
            each = np.dtype(_SCALARS[inner]).itemsize
            return self._numbers(inner, self._count("numbers", each))
        if inner == _STRING:
            return self._strings(self._count("strings", 8))
        raise CheckpointError(
            f"{self._file} has an array of values of type {inner}, which is not supported."
        )

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        form = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._taken(count * form.itemsize), form)

    def _strings(self, count: int) -> list[str]:
        """Many strings, without a call for each: vocabularies have 262,144."""
        data, at, size, found = self._data, self._at, self._size, []
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            stop = at + 8 + length(data, at)[0] if at + 8 <= size else size + 1
            if stop > size:
                break
            found.append(data[at + 8 : stop].decode("utf-8"))
            at = stop
        self._at = at
        if len(found) < count:
            self._taken(self._size - at + 8)  # which says how far the file goes
        return found
