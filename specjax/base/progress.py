"""Progress on standard error, shown where that is a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress


def progress_bars() -> Progress:
    """Bars of tasks, to be entered."""
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of one task; gives what is told how many parts of how many are done."""
    with progress_bars() as progress:
        task = progress.add_task(what, total=None)
        yield lambda count, of: progress.update(task, completed=count, total=of)
