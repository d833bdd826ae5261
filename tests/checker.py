"""The checks of types and shapes that tests run under: beartype's, made when they are needed."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments checked by beartype, which prepares that at the first call.

    A process imports 5,000 functions and calls few of them; to prepare all took it 5 s.
    """
    made: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(beartype(function))
        return made[0](*args, **kwargs)

    return call
