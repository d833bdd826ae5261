"""Public names that have another one now, and keep working with a warning."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Cls = TypeVar("_Cls", bound=type)


def warn_renamed(old: str, new: str) -> None:
    """Says that a name is deprecated, at the line of the caller's caller."""
    warnings.warn(f"{old} is deprecated; it is {new} now.", DeprecationWarning, stacklevel=3)


def renamed(old: str, new: str) -> Any:
    """A property that gives the attribute `new`, and says that `old` is deprecated."""

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read, doc=f"Deprecated: it is `{new}` now.")


def renamed_fields(**new_of: str) -> Callable[[_Cls], _Cls]:
    """A decorator of a dataclass some of whose fields have another name now: old=new.

    The old name is still read and still names an argument, with a deprecation warning.
    """

    def decorate(cls: _Cls) -> _Cls:
        init: Any = cls.__init__

        @functools.wraps(init)
        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            for old in [name for name in named if name in new_of]:
                warn_renamed(f"{cls.__name__}({old}=...)", new_of[old])
                named[new_of[old]] = named.pop(old)
            init(self, *arguments, **named)

        cls.__init__ = __init__
        for old, new in new_of.items():
            setattr(cls, old, renamed(old, new))
        return cls

    return decorate


def keywords_after(count: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator of a function whose arguments after the first `count` are keyword-only now.

    Without their names they still work, with a deprecation warning.
    """

    def decorate(function: Any) -> Any:
        parameters = inspect.signature(function).parameters.values()
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            extra = arguments[count:]
            if not extra or len(extra) > len(names):
                return function(*arguments, **named)
            given = names[: len(extra)]
            warn_unnamed(function.__name__, given)
            return function(*arguments[:count], **dict(zip(given, extra, strict=True)), **named)

        return call

    return decorate


def warn_unnamed(function: str, names: list[str]) -> None:
    """Says that arguments want their names, at the line of the caller's caller."""
    listed = ", ".join(f"{name}=..." for name in names)
    warnings.warn(
        f"arguments of {function} without a name are deprecated; give it {listed}.",
        DeprecationWarning,
        stacklevel=3,
    )
