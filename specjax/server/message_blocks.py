"""Content blocks of `/v1/messages`: what goes into a chat, and what comes out of its answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specjax.server import unsupported
from specjax.server.choices import Delta
from specjax.server.errors import ApiError, shown
from specjax.server.protocol import (
    Body,
    Count,
    Flag,
    NonEmpty,
    SampledRequest,
    Schema,
    Text,
    Unused,
)
from specjax.server.tools import CallStart


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: Unused = None
    citations: Unused = None


class ToolUseBlock(Body):
    """A tool that an answer called."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[Text, Any]
    cache_control: Unused = None
    caller: Unused = None


class ToolResultBlock(Body):
    """What came of a call; templates have no place for `is_error`."""

    nested = ("content",)

    type: Literal["tool_result"]
    tool_use_id: Text
    content: "Content | None" = None
    is_error: Unused = None
    cache_control: Unused = None


class ThinkingBlock(Body):
    """What an answer thought before its text."""

    type: Literal["thinking"]
    thinking: Text
    signature: Unused = None


class RedactedThinkingBlock(Body):
    """Thoughts that another model hid: there is no text in them."""

    type: Literal["redacted_thinking"]
    data: Unused = None


class OtherBlock(Body):
    """A block of a type that is refused, such as an image."""

    type: Text


_OTHER = "another block"


def _tag(value: Any) -> str:
    """Which of the blocks a value is meant to be; no field is called as a tag is."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"{kind} block" if isinstance(kind, str) and kind in _KINDS else _OTHER


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking block")]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(_tag),
]
Content = Text | Annotated[list[Block], Field(fail_fast=True)]
ToolResultBlock.model_rebuild()

_ROLES = {
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
}
"""The role that a block goes with; text goes with all."""


class InputMessage(Body):
    """A message of `/v1/messages`."""

    nested = ("content",)

    role: Literal["user", "assistant", "system"]
    content: Content


class InputTool(Body):
    """A tool that the client runs; those that a server would run are refused."""

    type: Text | None = None
    name: NonEmpty
    description: Text | None = None
    input_schema: dict[Text, Any] | None = None
    strict: Unused = None
    cache_control: Unused = None


class ToolChoice(Body):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag | None = None


class ThinkingOptions(Body):
    """Whether the model thinks first, for its chat template; how long nothing limits."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Unused = None
    display: Unused = None


class OutputFormat(Body):
    """What the text must be."""

    type: Literal["json_schema"]
    schema_: Schema | None = Field(None, alias="schema")


class OutputConfig(Body):
    """Of a message's text."""

    nested = ("format",)

    effort: Text | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """The body of `/v1/messages/count_tokens`."""

    unsupported = unsupported.MESSAGES
    nested = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")

    model: Text | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1)]
    system: Content | None = None
    tools: Annotated[list[InputTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    cache_control: Unused = None


class MessagesRequest(SampledRequest, CountTokensRequest):
    """The body of `/v1/messages`."""

    unsupported = unsupported.MESSAGES
    nested = CountTokensRequest.nested

    max_tokens: Count
    stop_sequences: Annotated[list[NonEmpty], Field(fail_fast=True)] | None = None
    inference_geo: Unused = None


def chat_of(body: CountTokensRequest) -> dict[str, Any]:
    """The chat that a request for a message is.

    Raises:
      ApiError: a block or a tool is of a type that is not supported, or a block goes with another
        role (400).
    """
    chat: dict[str, Any] = {"messages": _messages_of(body), "model": body.model}
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in SampledRequest.model_fields}
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.tools:
        chat["tools"] = [_tool(each, place) for place, each in enumerate(body.tools)]
    if (choice := body.tool_choice) is not None:
        chat["tool_choice"] = _choice(choice)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.type != "disabled"
    if (config := body.output_config) is not None:
        chat["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in chat.items() if value is not None}


def _tool(tool: InputTool, place: int) -> dict[str, Any]:
    path = f"tools[{place}]"
    if tool.type not in (None, "custom"):
        raise _unsupported(f"{path}.type", tool.type)
    if tool.input_schema is None:
        raise ApiError(400, f"{path}.input_schema is missing.", param=f"{path}.input_schema")
    told = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **told, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is missing.", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _messages_of(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages of the chat: those of one role that follow each other are one."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _texts(body.system, "system")})
    for place, message in enumerate(body.messages):
        path = f"messages[{place}].content"
        if message.content == []:
            raise ApiError(400, f"{path} is missing.", param=path)
        for name, block in _blocks(message.content, path):
            _add(found, message.role, block, name)
    if body.messages[-1].role == "assistant":
        message = (
            "messages: the last one should be of the user; an answer that has begun is not "
            "continued here."
        )
        raise ApiError(400, message, param="messages")
    return found


def _blocks(content: str | Sequence[Body], path: str) -> Iterator[tuple[str, Body]]:
    """The blocks of a content with their names in sentences."""
    if isinstance(content, str):
        yield path, TextBlock(type="text", text=content)
        return
    for place, block in enumerate(content):
        yield f"{path}[{place}]", block


def _texts(content: str | Sequence[Body], path: str) -> list[dict[str, Any]]:
    """The parts that a content of text alone is."""
    parts = []
    for name, block in _blocks(content, path):
        if not isinstance(block, TextBlock):
            raise _unsupported(f"{name}.type", getattr(block, "type", None))
        parts.append({"type": "text", "text": block.text})
    return parts


def _add(found: list[dict[str, Any]], role: str, block: Body, path: str) -> None:
    """Adds a block to a chat.

    Raises:
      ApiError: it is not supported, or of another role (400).
    """
    wanted = _ROLES.get(type(block), role)
    if wanted != role:
        message = f'{path}.type: it goes with the role "{wanted}"; the message has "{role}".'
        raise ApiError(400, message, param=f"{path}.type")
    if isinstance(block, ToolResultBlock):
        parts = _texts(block.content or "", f"{path}.content")
        found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})
        return
    if not (found and found[-1]["role"] == role):
        found.append({"role": role, "content": []})
    own = found[-1]
    match block:
        case TextBlock():
            own["content"].append({"type": "text", "text": block.text})
        case ToolUseBlock():
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            own.setdefault("tool_calls", []).append(call)
        case ThinkingBlock():
            own["content"].append({"type": "thinking", "thinking": block.thinking})
        case OtherBlock():
            raise _unsupported(f"{path}.type", block.type)


def _unsupported(path: str, kind: Any) -> ApiError:
    return ApiError(400, f"{path} is not supported here; it is {shown(kind)}.", param=path)


class Output:
    """The blocks of an answer, as they come; each event has the place of the block it is about."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        self._input = ""

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events of what came of an answer."""
        for kind, text in (("thinking", delta.thought), ("text", delta.text)):
            if text:
                yield from self._more(kind, text)
        for piece in delta.calls:
            if isinstance(piece, CallStart):
                yield from self._begin("tool_use", id=piece.id, name=piece.name, input={})
            else:
                self._input += piece.text
                yield self._delta(type="input_json_delta", partial_json=piece.text)
        if delta.finish_reason is not None:
            yield from self._end()

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(kind, **{kind: ""}, **more)
        self.blocks[-1][kind] += text
        yield self._delta(**{"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._open, self._input = kind, ""
        self.blocks.append({"type": kind, **fields})
        yield self._event("content_block_start", content_block={**self.blocks[-1]})

    def _end(self) -> Iterator[dict[str, Any]]:
        """The events that end the block that is open."""
        if self._open is None:
            return
        if self._open == "thinking":  # whose end some clients know by its signature
            yield self._delta(type="signature_delta", signature="")
        if self._open == "tool_use":
            self.blocks[-1]["input"] = _object(self._input)
        yield self._event("content_block_stop")
        self._open = None

    def _delta(self, **fields: Any) -> dict[str, Any]:
        return self._event("content_block_delta", delta=fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.blocks) - 1, **fields}


def _object(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; an empty one for those that were cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
