"""Asks Python in the middle of a program, in less time than a callback of jax takes.

A program names no function but asks by a text, so that it is kept in the compilation cache, as one
with a callback is not. There is one who answers in a process.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.cpu.api import unable_here
from pallas_kernels.cpu.library import HOST_CALL, library

_logger = logging.getLogger(__name__)
_Answer = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64,
)  # fmt: skip
Answer = Callable[[str, Any, tuple[int, int], Any], None]
"""Is told a question, a buffer of int32 with what it is about and its rows and columns, and writes
to another, while it is asked alone."""


def host_call_unable() -> str | None:
    """Why no program that is traced here can ask so, or None."""
    return unable_here(1)


def answer_host_calls(answer: Answer) -> None:
    """Has a function answer from now on, where the library is there. It may be called by several
    threads at once.
    """

    def respond(question, count, given, rows, columns, found, size, message, room) -> int:
        try:
            own = (ctypes.c_int32 * (rows * columns)).from_address(given)
            to = (ctypes.c_int32 * size).from_address(found)
            answer(ctypes.string_at(question, count).decode(), own, (rows, columns), to)
        except BaseException as error:
            _logger.exception("a program had no answer")
            text = f"{type(error).__name__}: {error}".encode()[: room - 1]
            ctypes.memmove(message, text, len(text))
            return 1
        return 0

    _kept.append(_Answer(respond))
    library().specjax_answer_host_calls(_kept[-1])


_kept: list[Any] = []
"""What was handed over to the library, which keeps nothing alive."""


def host_call(
    question: str, given: Int32[Array, "B n"], shape: tuple[int, ...]
) -> Int32[Array, "..."]:
    """What is answered to a question about `given`: an array of `shape`.

    Raises:
      ValueError: it cannot run here (`host_call_unable`).
      jax.errors.JaxRuntimeError: where it runs, if whoever answers raises.
    """
    if (reason := host_call_unable()) is not None:
        raise ValueError(f"host_call cannot run here: {reason}.")
    made = jax.ShapeDtypeStruct(shape, jnp.int32)
    call = jax.ffi.ffi_call(HOST_CALL, made, vmap_method="sequential")
    return call(given, question=question)
