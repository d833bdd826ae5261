"""What work is at: bars on standard error where that is a terminal, else a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID

EVERY_SECONDS = 10.0
"""How often a line says what work is at, where standard error is no terminal."""
_COMPILATION = "/jax/core/compile/backend_compile_duration"
"""What jax records when it begins to compile a program, and when it has."""


class Shown(Progress):
    """Tasks as rich's bars; where standard error is no terminal, as a line every ten seconds.

    A line names every task that is not done: `specjax: verify: draws: 3,000 of 65,536, about 2 min
    left`. A field `note` of a task stands behind its figures. Work that is done within ten seconds
    prints nothing.
    """

    def __init__(
        self,
        *columns: str | ProgressColumn,
        console: Console | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(
            *columns, console=console or Console(stderr=True), transient=transient,
            redirect_stdout=sys.stdout.isatty(),  # what is printed beside bars stays where it goes
            disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def start(self) -> None:
        """Begins to show."""
        _reporter.open(self)
        super().start()

    def stop(self) -> None:
        """Ends to show; no line follows."""
        _reporter.close(self)
        super().stop()


def progress_bars() -> Shown:
    """Bars of tasks, to be entered."""
    return Shown()


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A task; gives what is told how many parts of how many are done."""
    with _task(what) as (progress, task):
        yield lambda count, of: progress.update(task, completed=count, total=of)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A task whose length is unknown; gives what is told what it is at."""
    with _task(what) as (progress, task):
        yield lambda now: progress.update(task, description=now)


@contextlib.contextmanager
def reporting(verb: str | None, program: str = "specjax") -> Iterator[None]:
    """A whole command: where no task says more, a line has its `verb`, if it has one.

    `program` begins every line. Where standard error is a terminal, only tasks inside are shown.
    """
    if sys.stderr.isatty():
        yield
        return
    before, _reporter.program = _reporter.program, program
    try:
        with Shown() as progress:
            if verb is not None:
                progress.add_task(verb, total=None, whole=True)
            yield
    finally:
        _reporter.program = before


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """No line is printed within: something else shows that work goes on."""
    before, _reporter.quiet = _reporter.quiet, True
    try:
        yield
    finally:
        _reporter.quiet = before


@contextlib.contextmanager
def _task(what: str) -> Iterator[tuple[Progress, TaskID]]:
    """A task among those that are shown, or by itself, until it ends."""
    among = _reporter.shown()
    with contextlib.nullcontext(among) if among else Shown(transient=True) as progress:
        task = progress.add_task(what, total=None)
        try:
            yield progress, task
        finally:
            progress.remove_task(task)


class _Reporter:
    """Prints what is shown, from a thread that runs while something is."""

    def __init__(self) -> None:
        self.program, self.quiet = "specjax", False
        self._shown: list[Shown] = []
        self._compiling: dict[int, tuple[str, float]] = {}
        self._watches = False
        self._lock = threading.Lock()
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def shown(self) -> Shown | None:
        """What was opened last, and is open."""
        return self._shown[-1] if self._shown else None

    def open(self, progress: Shown) -> None:
        """Begins to report."""
        with self._lock:
            if progress in self._shown:
                return
            self._shown.append(progress)
            if progress.disable and self._thread is None:
                ended = self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._report, args=(ended,), name="specjax-progress", daemon=True
                )
                self._thread.start()
        if progress.disable:
            self._watch_compilations()

    def close(self, progress: Shown) -> None:
        """Ends to report, with the last."""
        thread = None
        with self._lock:
            if progress in self._shown:
                self._shown.remove(progress)
            if not self._shown and self._ended is not None:
                self._ended.set()
                thread, self._thread, self._ended = self._thread, None, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _report(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_SECONDS):
            line = self.line()
            try:
                if line and not self.quiet and not ended.is_set():
                    print(line, file=sys.stderr, flush=True)
            except (OSError, ValueError):  # nobody reads it
                return

    def line(self) -> str:
        """What is not done, in a line; nothing where nothing is at work."""
        tasks = [task for progress in list(self._shown) for task in progress.tasks
                 if not task.finished]  # fmt: skip
        whole = [task for task in tasks if task.fields.get("whole")]
        parts = [self._text(task) for task in tasks if task not in whole]
        now = time.monotonic()
        parts += [f"compiling {name}, {duration(now - began)}"
                  for name, began in list(self._compiling.values()) if tasks]  # fmt: skip
        if whole:
            name, taken = whole[0].description, duration(whole[0].elapsed or 0)
            return f"{self.program}: {name}: {'; '.join(parts)}" if parts else (
                f"{self.program}: {name}, {taken}")  # fmt: skip
        return f"{self.program}: {'; '.join(parts)}" if parts else ""

    def _text(self, task: Task) -> str:
        taken, note = task.elapsed or 0.0, task.fields.get("note")
        if task.total is None:
            return f"{task.description}, {duration(taken)}"
        left = self._left(task, taken)
        text = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"
        text += f", {note}" if note else ""
        return text + (f", {duration(taken)}" if left is None else f", about {duration(left)} left")

    def _left(self, task: Task, taken: float) -> float | None:
        """Seconds that are left of a task, by its pace since it first had done something.

        What came before that is mostly compilation.
        """
        assert task.total is not None
        done = task.completed - task.fields.get("began", 0)
        if done <= 0:
            return None
        since, before = task.fields.setdefault("first", (taken, task.completed))
        later = task.completed - before
        pace = later / (taken - since) if later > 0 else done / taken
        return (task.total - task.completed) / pace

    def _watch_compilations(self) -> None:
        """Notes what jax compiles: a compilation may take minutes, in which nothing returns."""
        if self._watches:
            return
        from jax import monitoring  # a second, which commands need anyway

        self._watches = True
        monitoring.register_scalar_listener(self._compiles)
        monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiles(self, event: str, value: float | int, **kwargs: str | int) -> None:
        if event == _COMPILATION:
            name = str(kwargs.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
            self._compiling[threading.get_ident()] = name, time.monotonic()

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILATION:
            self._compiling.pop(threading.get_ident(), None)


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "12 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 10 and rest else f"{round(minutes / 60)} h"


_reporter = _Reporter()
