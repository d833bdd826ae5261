"""The compiled library: found beside this file, checked, and made known to XLA."""

import ctypes
import functools
import importlib.machinery
from pathlib import Path
from typing import NamedTuple

import jax

MATMUL, EXPERTS = "specjax_cpu_matmul", "specjax_cpu_experts"
ATTENTION, HOST_CALL = "specjax_cpu_attention", "specjax_host_call"
MOST_COLUMNS = 64
"""That it takes at a time; wider products are XLA's."""
_VERSION = 9
_PORTABLE = "portable"
_NAME = "_native"
_ANEW = "pip install --no-build-isolation specjax builds it for the jaxlib that is here"


class Status(NamedTuple):
    """Which product runs on this CPU: the form of ours, or why it is XLA's.

    Attributes:
      form: the instructions that it is made of ("avx512_bf16", "avx512_vnni", "avx512",
        "avx2", "neon_dotprod", "neon", "portable"); None if it is not there.
      reason: why XLA's product runs; None where ours does.
    """

    form: str | None
    reason: str | None

    @property
    def line(self) -> str:
        """It as a person reads it."""
        if self.reason is None:
            return f"cpu_matmul ({self.form}), up to {MOST_COLUMNS} columns"
        return f"XLA's: {self.reason}"


class _Library(NamedTuple):
    library: ctypes.CDLL | None
    reason: str | None


@functools.cache
def _library() -> _Library:
    """The library, registered with XLA; or why there is none."""
    folder = Path(__file__).parent
    files = [folder / f"{_NAME}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return _Library(None, "cpu_matmul was not built (pip install found no C++17 compiler)")
    try:
        library = ctypes.CDLL(str(file))
        library.specjax_cpu_matmul_selected.restype = ctypes.c_char_p
        library.specjax_cpu_matmul_select.argtypes = [ctypes.c_char_p]
        if (version := library.specjax_cpu_matmul_version()) != _VERSION:
            raise ValueError(f"it is of version {version}, and {_VERSION} is needed")
        # A handler that jax refuses once its CPUs are known is refused here; before, it would be
        # refused when they are asked for, and there would be no CPU at all.
        jax.local_devices(backend="cpu")
        for name in (MATMUL, EXPERTS, ATTENTION, HOST_CALL):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:  # whatever jax raises, XLA's product is there
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return _Library(None, f"cpu_matmul does not load ({reason}); {_ANEW}")
    return _Library(library, None)


def library() -> ctypes.CDLL:
    """The library, where `status` says that it is there."""
    found = _library().library
    assert found is not None
    return found


def status() -> Status:
    """Which product runs on this CPU, and why."""
    library, reason = _library()
    if library is None:
        return Status(None, reason)
    form = library.specjax_cpu_matmul_selected().decode()
    if form == _PORTABLE and not _selected:
        return Status(form, "this processor has neither AVX2 nor NEON")
    return Status(form, None)


_selected = False  # whether `select` named the form that runs


def select(form: str | None) -> None:
    """Selects a form for the whole process, for tests and measurements; None for the best again.

    Programs that were compiled before take it too.

    Raises:
      ValueError: this processor or installation does not have it.
    """
    global _selected
    library, reason = _library()
    if library is None:
        raise ValueError(f"no form {form!r} of cpu_matmul: {reason}.")
    if not library.specjax_cpu_matmul_select((form or "best").encode()):
        raise ValueError(f"this processor has no form {form!r} of cpu_matmul.")
    _selected = form is not None
