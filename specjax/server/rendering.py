"""JSON of responses, in pieces where it is long."""

import json
from collections.abc import Iterator
from typing import Any

_PIECE = 64
"""Items of a list that are written at once."""


def dumps(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def rendered(value: Any) -> bytes:
    """The same, written in pieces: the event loop of another thread runs between them.

    One call of `json` holds Python's lock until it is done, which takes a second for the log
    probabilities of some thousand tokens.
    """
    return "".join(_pieces(value)).encode()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for place, (name, each) in enumerate(value.items()):
            yield f"{',' if place else '{'}{dumps(name)}:"
            yield from _pieces(each)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > _PIECE:
        for start in range(0, len(value), _PIECE):
            yield ("," if start else "[") + dumps(value[start : start + _PIECE])[1:-1]
        yield "]"
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield "," if place else "["
            yield from _pieces(each)
        yield "]" if value else "[]"
    else:
        yield dumps(value)
