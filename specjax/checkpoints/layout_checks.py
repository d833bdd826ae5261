"""What configurations and tensors of quantized matrices must be, checked one by one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Parts = Mapping[str, np.ndarray]
Json = Mapping[str, Any]


class Unfit(ValueError):
    """A configuration or tensors that do not fit their layout."""


def object_of(config: Json, key: str) -> Json:
    """An object within a configuration; an empty one where there is none.

    Raises:
      Unfit: it is something else.
    """
    found = config.get(key)
    if not isinstance(found, dict | None):
        raise Unfit(f"{key} is {found!r}; it must be an object.")
    return found or {}


def whole_of(config: Json, key: str, least: int = 1, *, but: int | None = None) -> int | None:
    """A whole number of a configuration; None where there is none.

    Raises:
      Unfit: it is none, or below `least` and not `but`.
    """
    found = config.get(key)
    if found is None or (type(found) is int and (found >= least or found == but)):
        return found
    special = "" if but is None else f"{but} or "
    raise Unfit(f"{key} is {found!r}; it must be {special}a whole number from {least} on.")


def said_of(config: Json, key: str, default: Any) -> Any:
    """A value of a configuration, or what its absence stands for."""
    return default if config.get(key) is None else config[key]


def truth_of(config: Json, key: str) -> bool | None:
    """A truth value of a configuration; None where there is none.

    Raises:
      Unfit: it is something else.
    """
    found = config.get(key)
    if found is None or type(found) is bool:
        return found
    raise Unfit(f"{key} is {found!r}; it must be true or false.")


def must_be(parts: Parts, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A part of a shape.

    Raises:
      Unfit: it has another.
    """
    found = parts[name]
    if found.shape != shape:
        raise Unfit(f"{name} has shape {found.shape}; the others ask for {shape}.")
    return found


def matrix_of(parts: Parts, name: str) -> np.ndarray:
    """A part of two dimensions, none of them 0.

    Raises:
      Unfit: it has others.
    """
    found = parts[name]
    if found.ndim != 2 or not found.size:
        raise Unfit(f"{name} has shape {found.shape}; it must be a matrix.")
    return found


def block_of(about: Json, key: str) -> tuple[int, int]:
    """Rows and inputs of blocks.

    Raises:
      Unfit: it names none.
    """
    found = about.get(key)
    if (
        not isinstance(found, list)
        or len(found) != 2
        or any(type(each) is not int or each < 1 for each in found)
    ):
        raise Unfit(f"{key} is {found!r}; it must be two whole numbers above 0.")
    return found[0], found[1]
