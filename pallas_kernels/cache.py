"""The user's cache folder: where it is, locks in it, and files that are replaced whole."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

_TURN_SECONDS = 0.2
"""How often a lock that another process holds is tried again."""


def cache_folder() -> Path | None:
    """`$SPECJAX_CACHE`, else `specjax` in `$XDG_CACHE_HOME` or `~/.cache`.

    None where there is no home folder, as for a user whom a container does not know.
    """
    try:
        if own := os.environ.get("SPECJAX_CACHE"):
            return Path(own).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "specjax"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that one process has at a time, where the system has such locks."""
    locks = _locks()
    if locks is None:
        yield
        return
    with path.open("a") as lock:
        with contextlib.suppress(OSError):  # some network file systems have none
            locks.flock(lock, locks.LOCK_EX)
        yield


class LockTimeoutError(TimeoutError):
    """Another process held a lock for too long."""


@contextlib.contextmanager
def locked_within(path: Path, seconds: float) -> Iterator[bool]:
    """Holds a lock like `locked`, for which it waits so long at most.

    It gives whether it really is held: False where the system has no locks, or not in this folder.
    The system takes it from a process that ends, however that ends.

    Raises:
      LockTimeoutError: another process still holds it.
    """
    locks = _locks()
    with contextlib.ExitStack() as held:
        try:
            lock = None if locks is None else held.enter_context(path.open("a"))
        except OSError:
            lock = None
        yield lock is not None and locks is not None and _taken(locks, lock, seconds)


def _taken(locks: ModuleType, lock: IO[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        try:
            locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise LockTimeoutError(f"{lock.name} is held by another process") from None
            time.sleep(_TURN_SECONDS)
        except OSError:
            return False
        else:
            return True


def _locks() -> ModuleType | None:
    """The module with the system's locks."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    return fcntl


def replace_file(file: Path, text: str) -> None:
    """Writes a file that is at any time the old one or the new one, whole.

    Raises:
      OSError: it cannot be written; the old one stays.
    """
    unfinished = file.with_name(f".{file.name}-{secrets.token_hex(6)}.part")
    try:
        unfinished.write_text(text, "utf-8")
        unfinished.replace(file)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
