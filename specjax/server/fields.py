"""Fields that are not honoured: refused where they would change the text, else ignored."""

import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from specjax.server.errors import ApiError, dotted, shown, unknown
from specjax.server.log import record_of
from specjax.server.protocol import Body
from specjax.server.service import service_of
from specjax.server.unsupported import Neutral

HEADER_NAMES = 16
"""The most names in a response's header."""
_NAME = 64
"""Characters of a name there and in the log."""
_KEPT = 64
"""The most names of a request that are looked at."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

Path = tuple[str | int, ...]


def check_fields(body: Body, request: Request) -> None:
    """Refuses fields that would change the text; names the others in the log and a header.

    Raises:
      ApiError: a field is not supported, or unknown where those are refused (400).
    """
    service, known = service_of(request), list(type(body).model_fields)
    ignored: dict[Path, str] = {}
    for path, value, neutral in _others(body, ()):
        if neutral is not None:
            _check_neutral(path, value, neutral)
        elif service.options.strict_fields:
            near = known if len(path) == 1 else ()
            raise ApiError(400, unknown(dotted(path), near), param=dotted(path))
        elif (
            value is not None
            and len(ignored) < _KEPT
            and (kind := tuple(filter(_is_name, path))) not in ignored
        ):
            ignored[kind] = _safe(path)
    if ignored:
        names = list(dict.fromkeys(ignored.values()))
        service.ignored.note(names, known)
        more = ["..."] if len(names) > HEADER_NAMES else []
        record_of(request).ignored = ", ".join([*names[:HEADER_NAMES], *more])


def _is_name(step: str | int) -> bool:
    return isinstance(step, str)


def _others(body: Body, path: Path) -> Iterator[tuple[Path, Any, Neutral | None]]:
    """Each field that the models do not have: its path, value and neutral values, if known."""
    for name, value in (body.model_extra or {}).items():
        yield (*path, name), value, body.unsupported.get(name)
    for name in body.nested:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _others(value, (*path, name))
        elif isinstance(value, list):
            for place, each in enumerate(value):
                if isinstance(each, Body):
                    yield from _others(each, (*path, name, place))


def _check_neutral(path: Path, value: Any, neutral: Neutral) -> None:
    bare = _bare(value, neutral.harmless)
    if any(_same(bare, each) for each in (None, *neutral.values)):
        return
    wanted = " or ".join(json.dumps(each) for each in (*neutral.values, None))
    message = f"{dotted(path)} is not supported here: should be {wanted}; it is {shown(value)}."
    instead = f" {neutral.instead}" if neutral.instead else ""
    raise ApiError(400, message + instead, param=dotted(path))


def _bare(value: Any, harmless: frozenset[str]) -> Any:
    """A value without the fields of an object that are null or harmless."""
    if not isinstance(value, dict):
        return value
    return {n: each for n, each in value.items() if each is not None and n not in harmless}


def _same(value: Any, other: Any) -> bool:
    """Whether two values are the same in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _safe(path: Path) -> str:
    """A name for headers and logs: bounded, of plain characters, the same in each message."""
    steps = ("[]" if isinstance(step, int) else f".{step[: _NAME + 1]}" for step in path)
    name = _UNSAFE.sub("?", "".join(steps).removeprefix("."))
    return name if len(name) <= _NAME else name[:_NAME] + "..."
