"""The memory of this process, and files that the system has in its cache, as Linux tells them."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path


def anonymous_bytes() -> int:
    """Memory of this process that is of no file, shared or its own.

    Raises:
      OSError: the system does not tell.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kinds = ("RssAnon:", "RssShmem:")
    found = [int(line.split()[1]) for line in lines if line.startswith(kinds)]
    if not found:
        raise OSError("this system does not tell RssAnon.")
    return 1024 * sum(found)


class Peak(threading.Thread):
    """The most anonymous memory that this process has while it is entered.

    Args:
      seconds: between two looks.

    Attributes:
      before: bytes as it was entered.
      bytes: the most since then.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.before = self.bytes = 0
        self._seconds, self._stop_it = seconds, threading.Event()

    def run(self) -> None:
        """Looks again and again."""
        while not self._stop_it.wait(self._seconds):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> "Peak":
        self.before = self.bytes = anonymous_bytes()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_it.set()
        self.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def forget(files: Iterable[Path]) -> None:
    """Asks the system to drop files from its cache, also those that were just written."""
    for file in files:
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
