"""Choice of an implementation: `None` always works, a named one fails with its reason."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.platform import platform


class ImplementationError(ValueError):
    """A named implementation does not exist or cannot run here."""


class Implementation(NamedTuple):
    """A way to compute an op: `run`, and `unable`, which says why it cannot on such operands.

    `platforms` are those it runs on, all where None; elsewhere `interpreted` stands in for `run`
    in tests.
    """

    run: Callable[..., Any]
    unable: Callable[..., str | None] = lambda *_: None
    platforms: tuple[str, ...] | None = None
    interpreted: Callable[..., Any] | None = None


class _Process:
    """The implementation that `pallas_kernels.use` names for all calls of this process."""

    named: str | None = None


_process = _Process()


def named() -> str | None:
    """The implementation that `pallas_kernels.use` names for all calls, None for the fastest."""
    return _process.named


def use(name: str | None) -> bool:
    """Names the implementation for all calls of this process; gives whether that is another."""
    changes, _process.named = name != _process.named, name
    return changes


def pick(
    op: str,
    name: str,
    forced: bool,
    available: Mapping[str, Implementation],
    operands: Any,
    interpret: bool = False,
) -> Callable[..., Any]:
    """The implementation `name` of `op`; "xla" where it was not `forced` and cannot run.

    Raises:
      ImplementationError: `name` is forced and there is no such implementation, or it cannot run
        on this platform or on such operands.
    """
    check_known(op, name, available)
    found = available[name]
    reason = unable(found, operands, interpret)
    if reason is None:
        return found.interpreted if interpret and found.interpreted else found.run
    if not forced:
        return available["xla"].run
    raise ImplementationError(f"{op} cannot run as {name!r} here: {reason}.")


def check_known(op: str, name: str, available: Mapping[str, Implementation]) -> None:
    """Checks that there is an implementation of this name.

    Raises:
      ImplementationError: there is none.
    """
    if name not in available:
        raise ImplementationError(
            f"{op} has no implementation {name!r}; there are {', '.join(sorted(available))}."
        )


def unable(found: Implementation, operands: Any, interpret: bool = False) -> str | None:
    """Why an implementation cannot run on such operands here, or None."""
    return unable_here(found, interpret) or found.unable(operands)


def unable_here(found: Implementation, interpret: bool = False) -> str | None:
    """Why an implementation cannot run on this platform, or None."""
    if found.platforms is None or interpret or platform() in found.platforms:
        return None
    return f"it needs {' or '.join(found.platforms)}, and this is {platform()}"


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """The precision of a dot: float32 operands are multiplied as such on every platform.

    The default there is 19 (GPU) or 8 (TPU) bits of them, by the number of columns: enough for a
    tree pass to disagree with plain decoding.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
