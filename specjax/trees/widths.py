"""Children per level of a tree: their counts, their check, and how they are spelled."""

import math
import reprlib
from numbers import Integral, Real
from typing import TypeAlias, TypeGuard

Widths: TypeAlias = tuple[int | tuple[int, ...], ...]
"""An entry a level: a number for every node above it, or a tuple of numbers, one a node."""

MOST_NODES = 8192
"""The most nodes of a tree: a mask of which nodes are above which has the square of that."""

_BETWEEN_LEVELS = "/"
_SHOWN = 32


def counts(widths: Widths) -> tuple[tuple[int, ...], ...]:
    """For each level how many children every node of the level above has.

    Raises:
      ValueError: there is no level, a level has no node, its numbers are not one a node, or the
        nodes are more than `MOST_NODES`.
    """
    if not widths or min((each for each in widths if isinstance(each, int)), default=1) < 1:
        raise ValueError(f"a tree needs widths of at least 1, not {widths}.")
    found, nodes, total = [], 1, 0
    for level, width in enumerate(widths, 1):
        total += sum(width) if isinstance(width, tuple) else width * nodes
        if total > MOST_NODES:  # before they are made
            raise ValueError(
                f"its first {level} levels have {total} nodes; a tree has {MOST_NODES} at most."
            )
        own = width if isinstance(width, tuple) else (width,) * nodes
        _check(level, own, nodes)
        found.append(own)
        nodes = sum(own)
    return tuple(found)


def _check(level: int, own: tuple[int, ...], nodes: int) -> None:
    shown = ",".join(map(str, own[:_SHOWN])) + ("..." if len(own) > _SHOWN else "")
    has = f"level {level} has widths {shown}"
    if len(own) != nodes:
        raise ValueError(f"{has}, which are {len(own)}; it needs {nodes}, one a node above it.")
    if min(own) < 0:
        raise ValueError(f"{has}; none may be below 0.")
    if not any(own):
        raise ValueError(f"{has}, and so not one node; leave it out.")


def canonical(widths: Widths) -> Widths:
    """The same tree with one number for every level that has as many children everywhere.

    Raises:
      ValueError: they are no tree's.
    """
    return tuple(own[0] if min(own) == max(own) else own for own in counts(widths))


def widest(widths: Widths) -> int:
    """The most children of a node."""
    return max(width if isinstance(width, int) else max(width) for width in widths)


def spelled(widths: Widths | None) -> str:
    """Widths as text that `read` takes: `2,2,1`, or `3/2,1,0/1` if a level has a number a node."""
    levels = [(width,) if isinstance(width, int) else width for width in widths or ()]
    between = "," if all(isinstance(width, int) for width in widths or ()) else _BETWEEN_LEVELS
    return between.join(",".join(map(str, level)) for level in levels)


def read(text: str, what: str) -> Widths:
    """The widths that a text spells: levels between commas, or between slashes.

    Between slashes a level is one number for every node above it, or a number for each.

    Raises:
      ValueError: they cannot be read, or are no tree's; `what` names the option in the sentence.
    """
    slashes = _BETWEEN_LEVELS in text
    try:
        levels = [
            tuple(int(number) for number in level.split(","))
            for level in text.split(_BETWEEN_LEVELS if slashes else ",")
        ]
    except ValueError as error:
        raise ValueError(
            f"{what} is {text!r}; it must be numbers separated by commas, such as 2,2,1, or a "
            "number a node and slashes between levels, such as 3/2,1,0."
        ) from error
    try:
        return canonical(tuple(level[0] if len(level) == 1 else level for level in levels))
    except ValueError as error:
        raise ValueError(f"{what} is {text!r}: {error}") from error


def of_json(widths: object) -> Widths:
    """Widths whose tuples JSON has made lists.

    Raises:
      ValueError: a level is neither an integer nor a list of them.
    """
    if not isinstance(widths, list | tuple):
        raise ValueError(f"widths are {reprlib.repr(widths)}; they must be a list of levels.")
    return tuple(_level(level, width) for level, width in enumerate(widths, 1))


def _level(level: int, width: object) -> int | tuple[int, ...]:
    if _is_whole(width):
        return width
    if isinstance(width, list | tuple) and all(map(_is_whole, width)):
        return tuple(width)
    raise ValueError(
        f"level {level} is {reprlib.repr(width)}; it must be an integer or a list of them."
    )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def check_count(name: str, value: object) -> None:
    """Checks a number of nodes, or of levels.

    Raises:
      ValueError: it is not an integer from 1 to `MOST_NODES`.
    """
    if not _is_whole(value):
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be an integer.")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1.")
    if value > MOST_NODES:
        raise ValueError(f"{name} is {value}; it must be at most {MOST_NODES}.")
