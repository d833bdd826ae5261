"""Settings of methods as plain values that a file can hold, and read from them.

Beside the name, `METHOD` or `METHOD:SIZE`, stand all fields, which carry what the name does not.
"""

import dataclasses
import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.self_drafts import bits_of
from specjax.draft.growth import Growth
from specjax.draft.limits import check_growth
from specjax.draft.lookahead import Window
from specjax.methods.method import DRAFT, METHODS, PLAIN, TABLE, Setting
from specjax.methods.registry import setting_of
from specjax.trees.widths import canonical, check_count, is_number, of_json

_LEAST = 1e-37
_LONGEST_NAME = 40


def to_json(setting: Setting) -> dict[str, Any]:
    """The name, and the fields that the method takes."""
    found = {"name": setting.name} | dataclasses.asdict(setting)
    return {name: value for name, value in found.items() if value is not None}


def from_json(values: object, where: str) -> Setting:
    """The setting that a file holds: its fields, or its name alone, such as "chain:7".

    Raises:
      ValueError: a name is unknown, or a value is not what it should be, or fields are not those of
        the name beside them; `where` is in the sentence.
    """
    if isinstance(values, str):
        try:
            return setting_of(values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    changed = dict(_checked_names(values, Setting, where, "name"))
    named = changed.pop("name", None)
    if changed.get("method", PLAIN) not in [*METHODS]:  # any value, of any type
        raise ValueError(
            f"{where}: no method {reprlib.repr(changed['method'])}; there are {', '.join(METHODS)}."
        )
    if changed.get("stage") not in (None, TABLE, DRAFT):
        raise ValueError(
            f"{where}: no stage {reprlib.repr(changed['stage'])}; there are {TABLE} and {DRAFT}."
        )
    given = {name: value for name, value in changed.items() if value is not None}
    try:
        for name in ("widths", "guess"):
            if name in given:
                given[name] = canonical(of_json(given[name]))
        if "growth" in given:
            given["growth"] = _growth(given["growth"], f"{where}, growth")
        if "temperatures" in given:
            given["temperatures"] = _temperatures(given["temperatures"])
        if "draft" in given:
            bits_of(given["draft"])
        if "fan" in given:
            check_count("fan", given["fan"])
        if "window" in given:
            given["window"] = _window(given["window"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    found = Setting(**given)
    if named not in (None, found.name):
        raise ValueError(
            f"{where} has the name {reprlib.repr(named)}, and the fields of {found.name}."
        )
    return found


def _growth(values: object, where: str) -> Growth:
    given = _checked_names(values, Growth, where)
    if "budget" not in given:
        raise ValueError("growth has no budget.")
    held: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(Growth)}
    held |= given
    check_growth(held)
    floats: dict[str, Any] = {name: float(held[name]) for name in ("decay", "least_gain")}
    return Growth(**held | floats)


def _window(values: object) -> Window:
    if not isinstance(values, list | tuple) or len(values) != len(Window._fields):
        raise ValueError(
            f"window is {reprlib.repr(values)}; it must be the numbers of "
            f"{', '.join(Window._fields)}."
        )
    for name, value in zip(Window._fields, values, strict=True):
        if name != "candidates" or value != 0:
            check_count(f"window's {name}", value)
    if values[1] < 2:
        raise ValueError(f"window's tokens are {values[1]}; an n-gram has 2 at least.")
    return Window(*values)


def _temperatures(values: object) -> tuple[float, float]:
    if not isinstance(values, list | tuple) or len(values) != 2 or not all(map(_is_scale, values)):
        raise ValueError(
            f"temperatures are {reprlib.repr(values)}; they must be two positive numbers."
        )
    return float(values[0]), float(values[1])


def _is_scale(value: object) -> bool:
    """Whether a value is a number that float32 holds and one may divide by."""
    return is_number(value) and _LEAST < value < 1 / _LEAST


def _checked_names(values: object, kind: type, where: str, *others: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {reprlib.repr(values)}; it must be an object.")
    known = [*(field.name for field in dataclasses.fields(kind)), *others]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name[:_LONGEST_NAME], known, 1, 0)
            raise ValueError(
                f"{where} has {name[:_LONGEST_NAME]!r}; the nearest name there is is {near[0]!r}."
            )
    return values
