"""The checks of types and shapes that tests run under, as often as they prove something.

jaxtyping's hook decorates the 5,000 functions and records that a process imports, and checks each
call: a third of a trace's time. Here what says nothing of arrays is left to pyright; the rest is
prepared when it is first called, and its first call in each test is checked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jaxtyping
from jaxtyping import _decorator

_every_call = jaxtyping.jaxtyped
_test = [""]


def begin(test: str) -> None:
    """Checks the next call of every function again, if this is another test than the last."""
    _test[0] = test


def _says_shapes(function: Callable[..., Any]) -> bool:
    own = getattr(function, "__annotations__", {}).values()
    return any(isinstance(each, str) or "jaxtyping." in str(each) for each in own)


def jaxtyped(of: Any = None, *, typechecker: Callable[..., Any] | None = None) -> Any:
    """As jaxtyping's, of what says shapes, and of its first call in each test."""
    if of is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(of, (type, classmethod, staticmethod, property)):
        return _every_call(of, typechecker=typechecker)  # which comes back with their functions
    if not _says_shapes(of):
        return of
    checked: list[Callable[..., Any]] = []
    last: list[str | None] = [None]

    @functools.wraps(of)
    def call(*args: Any, **kwargs: Any) -> Any:
        if last[0] == _test[0]:
            return of(*args, **kwargs)
        last[0] = _test[0]
        if not checked:
            checked.append(_every_call(of, typechecker=typechecker))
        return checked[0](*args, **kwargs)

    return call


jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped  # where the hook and jaxtyping look it up
