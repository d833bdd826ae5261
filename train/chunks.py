"""Arrays made a chunk at a time, each chunk a file, so that a kill costs one chunk."""

import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from specjax.base.interrupts import if_interrupted
from train.loop import Log, progress_bar

Arrays = Mapping[str, np.ndarray]
_SAID = 300


def make_chunks(
    stage: str, folder: Path, count: int, make: Callable[[int], Arrays], log: Log
) -> None:
    """Fills `folder` with the chunks that it lacks; `make(i)` gives the arrays of chunk i."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i in range(count) if not _file(folder, i).is_file()]
    if_interrupted(lambda: f"the same command goes on from {_place(stage, folder, count)}")
    began, entries = time.perf_counter(), 0
    with progress_bar(log.console) as progress:
        made = count - len(missing)
        task = progress.add_task(stage, total=count, completed=made, began=made, note="")
        for index in missing:
            arrays = make(index)
            _save(_file(folder, index), arrays)
            entries += _tokens(arrays)
            rate = entries / (time.perf_counter() - began)
            progress.update(task, advance=1, note=f"{rate:.0f} tokens/s")
            if index == missing[-1]:
                seconds = time.perf_counter() - began
                log.write(stage, where=folder.name, chunks=count, made=len(missing),
                          tokens_per_second=rate, seconds=seconds)  # fmt: skip


def make_chunk(
    stage: str, folder: Path, index: int, make: Callable[[int], Arrays], log: Log
) -> None:
    """Makes one chunk of as many as will be needed, unless it is there."""
    if is_made(folder, index):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if_interrupted(lambda: f"the same command goes on from chunk {index:,} of the stage {stage!r}")
    began = time.perf_counter()
    arrays = make(index)
    _save(_file(folder, index), arrays)
    seconds = time.perf_counter() - began
    log.write(stage, where=folder.name, chunk=index, seconds=seconds,
              tokens_per_second=_tokens(arrays) / seconds)  # fmt: skip


def keep_chunk(folder: Path, index: int, arrays: Arrays) -> None:
    """Writes one chunk, or replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(_file(folder, index), arrays)


def is_made(folder: Path, index: int) -> bool:
    """Whether a chunk is there."""
    return _file(folder, index).is_file()


def _tokens(arrays: Arrays) -> int:
    """New tokens of a chunk: those of its rows' lengths, if it has them."""
    return int(arrays["length"].sum()) if "length" in arrays else arrays["tokens"].size


def _place(stage: str, folder: Path, count: int) -> str:
    made = sum(_file(folder, index).is_file() for index in range(count))
    return f"chunk {made:,} of {count:,} of the stage {stage!r}"


def load_chunks(stage: str, folder: Path, count: int) -> dict[str, np.ndarray]:
    """The arrays of all chunks, joined along their first axis.

    Raises:
      ValueError: a chunk is missing, or cannot be read.
    """
    parts = [_load(stage, file) for file in _files(stage, folder, count)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class MappedRows:
    """The rows of an array that lies in all chunks, read when they are asked for.

    So what a run holds in memory does not grow with them.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __getitem__(self, index: Any) -> np.ndarray:
        """Rows by their numbers or by a slice of these, and a part of each."""
        rows, *rest = index if isinstance(index, tuple) else (index,)
        numbers = np.arange(self._ends[-1])[rows]
        chunks = np.searchsorted(self._ends, numbers, side="right")
        found = [
            self._parts[chunk][(number - self._ends[chunk], *rest)]
            for chunk, number in zip(chunks.tolist(), numbers.tolist(), strict=True)
        ]
        return np.stack(found) if found else self._parts[0][(slice(0), *rest)]


def map_rows(stage: str, folder: Path, count: int, name: str) -> MappedRows:
    """The rows of one array of all chunks, where they lie.

    Raises:
      ValueError: a chunk is missing, or cannot be read.
    """
    return MappedRows([_mapped(stage, file, name) for file in _files(stage, folder, count)])


def _mapped(stage: str, file: Path, name: str) -> np.ndarray:
    """An array of a chunk as a view of the file, in which numpy does not compress it."""
    try:
        with zipfile.ZipFile(file) as held, held.open(f"{name}.npy") as member:
            assert held.getinfo(f"{name}.npy").compress_type == zipfile.ZIP_STORED
            shape, dtype = _header_of(member)
            begin = member.tell()
            place = held.getinfo(f"{name}.npy").header_offset
        with file.open("rb") as opened:
            opened.seek(place + _LENGTHS)
            names, more = np.frombuffer(opened.read(4), "<u2").tolist()
        start = place + _LENGTHS + 4 + names + more + begin
        return np.memmap(file, dtype, "r", start, shape)
    except Exception as error:
        raise _damaged(stage, file, error) from error


_LENGTHS = 26
"""Where the header of a member of a zip file says how long the rest of it is, its name and more."""


def _header_of(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array in a file, up to its first number."""
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0}[version]  # fmt: skip
    shape, _, dtype = read(member)
    return shape, dtype


def _files(stage: str, folder: Path, count: int) -> list[Path]:
    files = [_file(folder, index) for index in range(count)]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing; run the stage {stage!r} first.")
    return files


def load_chunk(stage: str, folder: Path, index: int) -> Arrays:
    """The arrays of one chunk.

    Raises:
      ValueError: it cannot be read.
    """
    return _load(stage, _file(folder, index))


def _load(stage: str, file: Path) -> dict[str, np.ndarray]:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
            return dict(held)
    except Exception as error:  # what numpy, zipfile and zlib raise has no type of its own
        raise _damaged(stage, file, error) from error


def _damaged(stage: str, file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file} is truncated or damaged ({str(error)[:_SAID]}); delete it and run the stage "
        f"{stage!r} again."
    )


def write_text(file: Path, text: str) -> None:
    """Replaces `file` at once: a kill leaves the old text or the new one."""
    partial = file.with_name(file.name + ".part")
    partial.write_text(text)
    os.replace(partial, file)


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npz"


def _save(file: Path, arrays: Arrays) -> None:
    partial = file.with_name(file.name + ".part")
    with partial.open("wb") as out:
        np.savez(out, **dict[str, Any](arrays))
    os.replace(partial, file)
