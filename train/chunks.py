"""Arrays made a chunk at a time, each chunk a file, so that a kill costs one chunk."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from train.loop import Log, progress_bar

Arrays = Mapping[str, np.ndarray]


def make_chunks(
    stage: str, folder: Path, count: int, make: Callable[[int], Arrays], log: Log
) -> None:
    """Fills `folder` with the chunks that it lacks; `make(i)` gives the arrays of chunk i."""
    missing = [i for i in range(count) if not _file(folder, i).is_file()]
    began, entries = time.perf_counter(), 0
    with progress_bar(log.console) as progress:
        task = progress.add_task(stage, total=count, completed=count - len(missing), note="")
        for index in missing:
            arrays = make(index)
            _save(_file(folder, index), arrays)
            entries += arrays["tokens"].size
            rate = entries / (time.perf_counter() - began)
            progress.update(task, advance=1, note=f"{rate:.0f} tokens/s")
            if index == missing[-1]:
                log.write(stage, chunks=count, made=len(missing), tokens_per_second=rate)


def load_chunks(stage: str, folder: Path, count: int) -> dict[str, np.ndarray]:
    """The arrays of all chunks, joined along their first axis.

    Raises:
      ValueError: a chunk is missing.
    """
    files = [_file(folder, index) for index in range(count)]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing; run the stage {stage!r} first.")
    parts = [np.load(file) for file in files]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}


def claim(folder: Path, *settings: Any) -> None:
    """Notes in `folder` which settings its content is made with, and refuses other ones.

    Raises:
      ValueError: the folder was begun with other settings.
    """
    file = folder / "settings.json"
    text = json.dumps([dataclasses.asdict(s) for s in settings], indent=1, sort_keys=True) + "\n"
    if file.is_file() and file.read_text() != text:
        raise ValueError(f"{folder} was made with other settings; remove it or restore them.")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, text)


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
