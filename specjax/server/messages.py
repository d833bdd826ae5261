"""Messages of a chat as chat templates take them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.server.errors import ApiError
from specjax.server.protocol import (
    CalledFunction,
    Message,
    RefusalPart,
    TextPart,
    ThoughtPart,
    ToolCall,
)

_WRITES_ARGUMENTS = re.compile(r"\barguments['\"]?\]?\s*(?:[+~]|-?\}\})")
_TELLS_KINDS = re.compile(r"\barguments['\"]?\]?\s+is\s+(?:not\s+)?(?:string|mapping)")
_NEEDS_CONTENT = ("system", "developer", "user")
_Arguments = Callable[[str | dict[str, Any]], str | dict[str, Any]]
_AS_THEY_ARE = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def source_of(template: str | Mapping[str, str] | None) -> str:
    """The source of a chat template, or of all by their names as one; empty if there is none."""
    if isinstance(template, Mapping):
        return "\n".join(template.values())
    return template or ""


def talk_of(messages: Sequence[Message], template: str | Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages as a template takes them: parts of a content become lines.

    Arguments of calls become objects, as most templates expect them; texts for a template that
    writes them as they are. No content becomes an empty text: many templates add it to others.

    Args:
      messages: of the chat.
      template: the chat template's source, or those of several by their names.

    Raises:
      ApiError: a message of a user or a system has no content (400).
    """
    source = source_of(template)
    as_text = bool(_WRITES_ARGUMENTS.search(source)) and not _TELLS_KINDS.search(source)
    arguments = _text if as_text else _object
    return [_as_given(each, place, arguments) for place, each in enumerate(messages)]


def _as_given(message: Message, place: int, arguments: _Arguments) -> dict[str, Any]:
    if message.content in (None, []) and message.role in _NEEDS_CONTENT:
        param = f"messages[{place}].content"
        raise ApiError(400, f"{param} is missing.", param=param)
    given: dict[str, Any] = {"role": message.role, "content": _text_of(message)}
    if thoughts := _thoughts_of(message):
        given["reasoning_content"] = thoughts
    for name in _AS_THEY_ARE:
        if isinstance(value := getattr(message, name), str):
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [_call(each, arguments) for each in message.tool_calls]
    if message.function_call is not None:
        given["function_call"] = _function(message.function_call, arguments)
    return given


def _text_of(message: Message) -> str:
    content = message.content or message.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(_text_of_part(part) for part in content if not isinstance(part, ThoughtPart))


def _text_of_part(part: str | TextPart | RefusalPart) -> str:
    if isinstance(part, str):
        return part
    return part.text if isinstance(part, TextPart) else part.refusal


def _thoughts_of(message: Message) -> str:
    """What the parts of a content say that an answer thought; they are no part of its text."""
    parts = message.content if isinstance(message.content, list) else []
    thoughts = [part.thinking or part.text for part in parts if isinstance(part, ThoughtPart)]
    return "\n".join(each for each in thoughts if each)


def _call(call: ToolCall, arguments: _Arguments) -> dict[str, Any]:
    name = {} if call.id is None else {"id": call.id}
    return name | {"type": "function", "function": _function(call.function, arguments)}


def _function(called: CalledFunction, arguments: _Arguments) -> dict[str, Any]:
    return {"name": called.name, "arguments": arguments(called.arguments or {})}


def _object(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """The object that a text of JSON stands for; one that is no object stays as it is."""
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _text(given: str | dict[str, Any]) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
