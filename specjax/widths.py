"""Children per level of a tree: their counts, their check, and how they are spelled."""

from collections.abc import Sequence
from typing import TypeAlias

Widths: TypeAlias = tuple[int | tuple[int, ...], ...]
"""An entry a level: a number for every node above it, or a tuple of numbers, one a node."""

_BETWEEN_LEVELS = "/"


def counts(widths: Widths) -> tuple[tuple[int, ...], ...]:
    """For each level how many children every node of the level above has.

    Raises:
      ValueError: there is no level, a level has no node, or its numbers are not one a node.
    """
    if not widths or min((each for each in widths if isinstance(each, int)), default=1) < 1:
        raise ValueError(f"a tree needs widths of at least 1, not {widths}.")
    found, nodes = [], 1
    for level, width in enumerate(widths, 1):
        own = width if isinstance(width, tuple) else (width,) * nodes
        _check(level, own, nodes)
        found.append(own)
        nodes = sum(own)
    return tuple(found)


def _check(level: int, own: tuple[int, ...], nodes: int) -> None:
    has = f"level {level} has widths {','.join(map(str, own))}"
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


def of_json(widths: Sequence[int | Sequence[int]]) -> Widths:
    """Widths whose tuples JSON has made lists."""
    return tuple(each if isinstance(each, int) else tuple(each) for each in widths)
