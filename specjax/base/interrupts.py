"""Ctrl-C: a command ends with one sentence, also from within a long compilation."""

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

PATIENCE_SECONDS = 2.0
"""How long the main thread may take to notice Ctrl-C; inside XLA it notices nothing."""
_AGAIN_SECONDS = 0.02
"""After which the callback that lost an interrupt has ended."""
CODE = 130
"""The exit code."""
ANEW = "nothing is kept but compiled programs; the same command begins anew"
_how: list[Callable[[], str]] = [lambda: ANEW]
"""What is said, in a list that is changed in place."""


def if_interrupted(how: Callable[[], str]) -> None:
    """From now on `how` says, once Ctrl-C came, what is kept and how to go on."""
    _how[:] = [how]


@contextlib.contextmanager
def ending_at_interrupts(program: str = "specjax") -> Iterator[None]:
    """Says of Ctrl-C what is kept and how to go on, and raises it.

    Where the main thread does not notice it, the process ends with exit code 130.
    """
    if_interrupted(lambda: ANEW)
    try:
        with _kept(), _watched(program):
            yield
    except KeyboardInterrupt:
        _say(program)
        raise


def leave(code: int) -> NoReturn:
    """Ends the process; after Ctrl-C at once.

    A compilation that was interrupted goes on in a thread of XLA's: the interpreter's end waits for
    it, and then crashes (jax 0.10.2).
    """
    if code == CODE:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _say(program: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"{program}: interrupted; {_how[0]()}.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Raises Ctrl-C once more where it was lost.

    Python drops what is raised within a callback of its garbage collector, of which jax has one,
    or within `__del__`: 4 of 100 interrupts did nothing where it ran every 20 objects.
    """
    other = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            threading.Timer(_AGAIN_SECONDS, _interrupt).start()
        else:
            other(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = other


def _interrupt() -> None:
    """What Ctrl-C does."""
    main_thread = threading.main_thread().ident
    if main_thread is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main_thread, signal.SIGINT)  # which also ends waits of the system
    else:
        _thread.interrupt_main()


@contextlib.contextmanager
def _watched(program: str) -> Iterator[None]:
    """Has another thread wait for Ctrl-C, too, where nobody else handles it."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    noticed, ended = threading.Event(), threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        noticed.set()
        signal.default_int_handler(number, frame)

    ours, theirs = socket.socketpair()  # on Windows a pipe would not do
    theirs.setblocking(False)
    signal.signal(signal.SIGINT, handler)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(
        target=_watch, args=(ours, handler, [noticed, ended], program),
        name="specjax-interrupts", daemon=True,
    )  # fmt: skip
    watch.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        theirs.close()
        watch.join()
        ours.close()


def _watch(
    ours: socket.socket, handler: object, signs: list[threading.Event], program: str
) -> None:
    """Ends the process where one of `signs` does not follow Ctrl-C in time: at first that the main
    thread has noticed it, later that the command has ended.
    """
    while numbers := ours.recv(1):
        if numbers[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not handler:
            continue
        if signs[0].wait(PATIENCE_SECONDS):
            del signs[:-1]
            continue
        _say(program)
        leave(CODE)
