"""Public names that have another one now, and keep working with a warning."""

import warnings
from typing import Any


def warn_renamed(old: str, new: str) -> None:
    """Says that a name is deprecated, at the line of the caller's caller."""
    warnings.warn(f"{old} is deprecated; it is {new} now.", DeprecationWarning, stacklevel=3)


def renamed(old: str, new: str) -> Any:
    """A property that gives the attribute `new`, and says that `old` is deprecated."""

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read, doc=f"Deprecated: it is `{new}` now.")
