"""What the values of options mean, and the sentences for those that mean nothing."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specjax.base import output
from specjax.trees.widths import MOST_NODES, Widths, read

_T = TypeVar("_T")
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}
_MOST_PARAMETERS = 10**15


def items(text: str, convert: Callable[[str], _T], what: str) -> tuple[_T, ...]:
    """The values of a list separated by commas.

    Raises:
      ValueError: one cannot be read; `what` names the option in the sentence.
    """
    try:
        return tuple(convert(item.strip()) for item in text.split(","))
    except ValueError as error:
        raise ValueError(f"{what} is {text!r}; it must be numbers separated by commas.") from error


def widths_of(text: str | None) -> Widths | None:
    """The widths that `--tree` names, or None.

    Raises:
      ValueError: they are no tree's.
    """
    return None if text is None else read(text, "--tree")


def dtypes_of(text: str | None) -> tuple[str, ...]:
    """The dtypes that `--dtype` names; none by default.

    Raises:
      ValueError: one is neither float32 nor bfloat16.
    """
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ("float32", "bfloat16"):
            raise ValueError(f"no dtype {name!r}; there are float32 and bfloat16.")
    return names


def dtype_of(text: str | None) -> str | None:
    """The one dtype that `--dtype` names, or None.

    Raises:
      ValueError: it is neither float32 nor bfloat16, or there are several.
    """
    names = dtypes_of(text)
    if len(names) > 1:
        raise ValueError(f"--dtype is {text!r}; it must be one of float32 and bfloat16.")
    return names[0] if names else None


def temperatures_in(text: str) -> tuple[float, ...]:
    """The temperatures that `--temperatures` names.

    Raises:
      ValueError: one is no number, or below 0.
    """
    found = items(text, float, "--temperatures")
    if not all(0 <= temperature < math.inf for temperature in found):
        raise ValueError(f"--temperatures is {text!r}; none may be below 0.")
    return found


def count_of(text: str) -> int:
    """The number of parameters that a text such as 100M names.

    Raises:
      ValueError: it is not a positive number with an optional K, M or B.
    """
    scale = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    try:
        count = float(digits) * scale
    except ValueError:
        count = 0.0
    if not 1 <= count <= _MOST_PARAMETERS:
        raise ValueError(
            f"--inflate is {text!r}; it must be a number such as 100M, and {_MOST_PARAMETERS:,} "
            "at most."
        )
    return round(count)


_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(flag: str, text: str | None) -> int | None:
    """The bytes that a text such as 2GiB names; None for None.

    Raises:
      ValueError: it names none.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[2].upper() or "B") if found else None
    if found is None or unit is None or not (size := round(float(found[1]) * unit)):
        raise ValueError(f"{flag} is {text!r}; it must be a size such as 2GiB or 500MB.")
    return size


def check_seed(seed: int) -> None:
    """Checks that `--seed` names a key of its own.

    Raises:
      ValueError: it is below 0, or of more than 32 bits, which keys would cut off.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}; it must lie between 0 and {2**32 - 1}.")


def check_target_file(name: str, file: str | None) -> None:
    """Checks by opening that option `name`, if it is given, names a file that can be written.

    A file that is there stays as it is.

    Raises:
      ValueError: its folder does not exist, it is a folder itself, or it cannot be written.
    """
    if not file:
        return
    if not Path(file).absolute().parent.is_dir():
        raise ValueError(f"{name} is {file}, in a folder that does not exist.")
    try:
        if Path(file).is_dir():
            raise ValueError(f"{name} is {file}, which is a folder.")
        output.check_writable(file)
    except OSError as error:
        raise ValueError(
            f"{name} is {file}, which cannot be written: {output.reason(error)}."
        ) from error


def at_least(name: str, value: int | None, lowest: int) -> None:
    """Checks that an option is not below `lowest`.

    Raises:
      ValueError: it is.
    """
    if value is not None and value < lowest:
        raise ValueError(f"{name} is {value}; it must be at least {lowest}.")


def budgets_of(text: str, what: str = "--budgets") -> tuple[int, ...]:
    """The budgets of nodes, or numbers of nodes, of a list separated by commas.

    Raises:
      ValueError: one is no number of nodes that a tree can have; `what` names the option.
    """
    found = items(text, int, what)
    for budget in found:
        at_least(what, budget, 1)
        if budget > MOST_NODES:
            raise ValueError(f"{what} is {budget}; a tree has {MOST_NODES} nodes at most.")
    return found
