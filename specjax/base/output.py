"""Files that are written: checked before there is anything to lose, and replaced whole."""

import errno
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NOT_HERE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""What a folder says that takes no new file, or a file that is mounted alone."""


def check_writable(file: str | Path) -> None:
    """Checks by opening that a file can be written; one that is there stays as it is.

    Raises:
      OSError: it cannot, or nothing can be written to it (as to /dev/full).
    """
    if is_stream(file):
        if not stat.S_ISFIFO(Path(file).stat().st_mode):  # to open one waits for its reader
            _open_for_nothing(Path(file))
        return
    path = _real(file)
    there = path.exists()
    _open_for_nothing(path, 0 if there else os.O_CREAT | os.O_EXCL)
    if not there:
        path.unlink()


def _open_for_nothing(path: Path, flags: int = 0) -> None:
    """Opens a file and writes no byte, which a device that is full refuses all the same."""
    held = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o666)
    try:
        os.write(held, b"")
    finally:
        os.close(held)


def _real(file: str | Path) -> Path:
    """The file that a name leads to; links that run in a circle are left as they are."""
    return Path(os.path.realpath(file))


def is_stream(file: str | Path) -> bool:
    """Whether a file is a pipe or a device, which takes a text once and cannot be replaced."""
    path = Path(file)
    return path.exists() and not path.is_file()


def mixed() -> bool:
    """Whether standard output and standard error go to one file or pipe that is no terminal."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError):
        return False
    return os.path.samestat(out, err) and not sys.stdout.isatty()


def write_text(file: str | Path, text: str) -> None:
    """Writes a file that is at any time the old one or the new one, whole.

    A link stays a link. Where the folder takes no new file the old one is overwritten in place.

    Raises:
      OSError: it cannot be written; the old file stays as it was if the folder takes new ones.
    """
    write_bytes(file, text.encode())


def write_bytes(file: str | Path, content: bytes) -> None:
    """Like `write_text`.

    Raises:
      OSError: it cannot be written.
    """
    if is_stream(file):
        Path(file).write_bytes(content)
        return
    path = _real(file)
    unfinished = _beside(path)
    try:
        with unfinished.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())  # or after a power cut the name may stand before what it names
        if path.exists():
            unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
        unfinished.replace(path)
    except OSError as error:
        if error.errno not in _NOT_HERE or not path.is_file():
            raise
        path.write_bytes(content)
    finally:
        _remove(unfinished)


def _beside(path: Path) -> Path:
    """A name of its own in the folder of `path`."""
    return path.with_name(f".specjax-{secrets.token_hex(6)}.part")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # it was never made


def write_json(file: str | Path, value: Any) -> None:
    """Writes a value as JSON, with null for numbers that JSON has not (infinite ones and NaN).

    Raises:
      OSError: it cannot be written.
    """
    write_text(file, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(file: str | Path, most_bytes: int = 1 << 26) -> Any:
    """What a JSON file holds.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no JSON, too large or too deeply nested.
    """
    with Path(file).open("rb") as held:
        content = held.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


def tried(what: str, work: Callable[[], Any]) -> bool:
    """Whether `work` could be done; if a file refuses, one line on standard error says so."""
    try:
        work()
    except OSError as error:
        print(f"specjax: {what}: {reason(error)}.", file=sys.stderr, flush=True)
        return False
    return True


def reason(error: OSError) -> str:
    """Why, without the number and the name of the file."""
    return error.strerror or str(error)
