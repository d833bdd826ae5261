"""Items of `/v1/responses`: what goes into a chat, and what comes out of its answer."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from specjax.server import unsupported
from specjax.server.choices import Delta
from specjax.server.errors import ApiError, shown
from specjax.server.protocol import (
    Body,
    Count,
    Flag,
    JsonSchema,
    Objects,
    SampledRequest,
    Text,
    Unused,
)
from specjax.server.tools import CallStart

ROLES = ("user", "system", "developer", "assistant")


class TextFormat(JsonSchema):
    """What the text of a response must be."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    """Of a response's text."""

    nested = ("format",)

    format: TextFormat | None = None
    verbosity: Unused = None


class Reasoning(Body):
    """Of a response's thoughts."""

    effort: Text | None = None
    summary: Unused = None


class ResponsesRequest(SampledRequest):
    """The body of `/v1/responses`."""

    unsupported = unsupported.RESPONSE
    nested = ("text", "reasoning")

    input: Text | Objects
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    previous_response_id: Text | None = None
    store: Flag | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Objects | None = None
    tool_choice: Text | dict[Text, Any] | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    include: Unused = None
    max_tool_calls: Unused = None
    stream_options: Unused = None


_SAME = (*SampledRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs")


def chat_of(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The chat that a request for a response is, with its messages.

    Raises:
      ApiError: a tool is not a function (400).
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and (own := body.text.format) is not None:
        schema = {"name": own.name, "schema": own.schema_}
        chat["response_format"] = {"type": own.type} | (
            {"json_schema": schema} if own.type == "json_schema" else {}
        )
    if body.tools:
        chat["tools"] = [_tool(each, place) for place, each in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    chat["tool_choice"] = choice
    return {name: value for name, value in chat.items() if value is not None}


def _tool(given: Mapping[str, Any], place: int) -> dict[str, Any]:
    if given.get("type") != "function":
        path = f"tools[{place}].type"
        message = f'{path}: should be "function"; it is {shown(given.get("type"))}.'
        raise ApiError(400, message, param=path)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: given[n] for n in names if n in given}}


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that the items of an input are.

    Raises:
      ApiError: an item is of a type that is not supported (400).
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for place, item in enumerate(given):
        path = f"input[{place}]"
        match item.get("type", "message" if "role" in item else None):
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    message = f"{path}.role: should be one of {', '.join(ROLES)}; it is "
                    raise ApiError(400, f"{message}{shown(role)}.", param=f"{path}.role")
                found.append({"role": role, "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not (found and found[-1]["role"] == "assistant"):
                    found.append({"role": "assistant", "content": None})
                found[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                found.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
                )
            case "reasoning":
                thought = {"reasoning_content": _thought_of(item)}
                continue
            case other:
                message = f"{path}.type is not supported here; it is {shown(other)}."
                raise ApiError(400, message, param=f"{path}.type")
        if thought and found[-1]["role"] == "assistant":
            found[-1] |= thought
        thought = {}
    return found


def _thought_of(item: Mapping[str, Any]) -> str:
    parts = [*(item.get("content") or []), *(item.get("summary") or [])]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


class Output:
    """The items of a response, as they come; each event names the item that it is about."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events of what came of an answer."""
        if delta.thought:
            yield from self._text("reasoning", delta.thought)
        if delta.text:
            yield from self._text("message", delta.text)
        for piece in delta.calls:
            if isinstance(piece, CallStart):
                yield from self._begin("function_call", call_id=piece.id, name=piece.name)
            else:
                item = self.items[-1]
                item["arguments"] += piece.text
                yield self._event("response.function_call_arguments.delta", delta=piece.text)
        if delta.finish_reason is not None:
            yield from self._end("incomplete" if delta.finish_reason == "length" else "completed")

    def messages(self) -> list[dict[str, Any]]:
        """The items as messages of a chat."""
        return messages_of(self.items)

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._begin(kind)
            part = self._part()
            self.items[-1]["content"].append(part)
            if kind == "message":
                yield self._event("response.content_part.added", content_index=0, part={**part})
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_NAMES[kind]}.delta", content_index=0, delta=text, **more)

    def _part(self) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _begin(self, kind: str, **more: Any) -> Iterator[dict[str, Any]]:
        yield from self._end("completed")
        identity = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        fields: dict[str, Any] = {"id": identity, "type": kind, "status": "in_progress"}
        match kind:
            case "message":
                fields |= {"role": "assistant", "content": []}
            case "reasoning":
                fields |= {"summary": [], "content": []}
            case _:
                fields |= {"arguments": "", **more}
        self._open = kind
        self.items.append(fields)
        yield self._event("response.output_item.added", item={**fields}, named=False)

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        """The events that end the item that is open."""
        if self._open is None:
            return
        kind, item = self._open, self.items[-1]
        if kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done", arguments=item["arguments"],
                name=item["name"],
            )  # fmt: skip
        else:
            text = item["content"][0]["text"]
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"{_NAMES[kind]}.done", content_index=0, text=text, **more)
            if kind == "message":
                part = {**item["content"][0]}
                yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._event("response.output_item.done", item={**item}, named=False)
        self._open = None

    def _event(self, kind: str, *, named: bool = True, **fields: Any) -> dict[str, Any]:
        name = {"item_id": self.items[-1]["id"]} if named else {}
        return {"type": kind, **name, "output_index": len(self.items) - 1, **fields}


_NAMES = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
