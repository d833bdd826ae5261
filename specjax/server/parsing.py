"""JSON that means one thing, and how much of it a request may have; no other module is needed."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

_MOST_FIELDS = 1024
"""Of one object. Each field that is wrong makes an error of about a kilobyte."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_IDS = ("prompt", "tokens")
"""Fields that may hold long lists of token ids."""


class RefusedError(ValueError):
    """A sentence about what a client sent, the field that it is about, and OpenAI's name for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Most(NamedTuple):
    """How much a body may have: messages, token ids of a prompt or of `tokens`, other values."""

    messages: int
    prompt_ids: int
    ids: int
    values: int


def parsed(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
      RefusedError: it is no JSON in UTF-8, has NaN, a field twice, an infinite number, a lone
        surrogate or very many fields or levels.
    """
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RefusedError(f"The body is not UTF-8: byte {error.start} is not.") from error
    except UnicodeEncodeError as error:
        raise RefusedError("The body has half of a surrogate pair in a string.") from error
    except json.JSONDecodeError as error:
        raise RefusedError(f"The body is no JSON: {error}.") from error
    except RecursionError as error:
        raise RefusedError("The body has too many levels of lists and objects.") from error
    except ValueError as error:
        raise RefusedError(f"The body cannot be read: {error}.") from error
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(pairs) > _MOST_FIELDS:
        raise ValueError(f"an object has {len(pairs):,} fields; it may have {_MOST_FIELDS:,}")
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {json.dumps(twice[:80])} is there twice")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is too large")
    return value


def check_amount(body: Any, most: Most) -> None:
    """Refuses a body with more messages, token ids or other values than a request may have.

    What follows, validation above all, takes time for each of them.

    Raises:
      RefusedError: 400.
    """
    if not isinstance(body, dict):
        return
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > most.messages:
        raise RefusedError(
            f"messages has {len(messages):,} items; it may have at most {most.messages:,}.",
            "messages",
        )
    for name in _IDS:
        _check_ids(name, body.get(name), most)
    count = _values(value for name, value in body.items() if not _holds_ids(name, value))
    if count > most.values:
        message = f"The body has more than {most.values:,} values, token ids of prompts aside."
        raise RefusedError(message)


def _holds_ids(name: str, value: Any) -> bool:
    if name not in _IDS or not isinstance(value, list) or not value:
        return False
    return _integers(value) or all(isinstance(each, list) and _integers(each) for each in value)


def _integers(value: Sequence[Any]) -> bool:
    return set(map(type, value)) == {int}


def _check_ids(name: str, value: Any, most: Most) -> None:
    if not isinstance(value, list) or not _holds_ids(name, value):
        return
    longest = len(value) if isinstance(value[0], int) else max(map(len, value))
    if name == "prompt" and longest > most.prompt_ids:
        raise RefusedError(
            f"This model's maximum context length is {most.prompt_ids} tokens, but {longest} were "
            f"given in prompt.",
            "prompt",
            "context_length_exceeded",
        )
    if longest > most.ids:
        raise RefusedError(f"{name} has {longest:,} tokens; it may have {most.ids:,}.", name)


def _values(values: Iterable[Any]) -> int:
    """Values of JSON, those within others included."""
    count, within = 0, [*values]
    while within:
        value = within.pop()
        count += 1
        if isinstance(value, dict):
            within += value.values()
        elif isinstance(value, list):
            within += value
    return count
