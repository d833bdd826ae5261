"""What a chat asks of tools: which may be called, which must, and what becomes of its messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.grammar.sources import GrammarSource
from specjax.server.errors import ApiError, shown
from specjax.server.messages import source_of
from specjax.server.protocol import ChatCompletionRequest
from specjax.server.service import Service
from specjax.server.tools import (
    HERMES,
    JsonCalls,
    PythonCalls,
    Style,
    Tool,
    call_grammar,
    described,
    style_of,
    takes_tools,
)

_MOST_TOOLS = 128
_CHOICES = ("none", "auto", "required")


class ToolUse(NamedTuple):
    """Tools that the model may call.

    Attributes:
      style: in which it writes calls.
      grammar: of calls, where it must make some.
      told: the tools as its template takes them, where it has no place for them; else none.
    """

    style: Style
    grammar: GrammarSource | None
    told: Sequence[Mapping[str, Any]]


def tool_use_of(service: Service, body: ChatCompletionRequest) -> ToolUse | None:
    """What a chat asks of tools; None if its model may call none.

    Raises:
      ApiError: a tool has no name, or the choice names none of them (400).
    """
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if not body.tools:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice needs tools.", param="tool_choice")
        return None
    tools = [_tool(each, place) for place, each in enumerate(body.tools)]
    if len(tools) > _MOST_TOOLS:
        message = f"tools has {len(tools)} tools; it may have {_MOST_TOOLS}."
        raise ApiError(400, message, param="tools")
    if choice == "none":
        return None
    source = source_of(service.tokenizer.chat_template)
    told = [] if takes_tools(source) else body.tools
    style = style_of(source, service.options.tool_call_parser)
    style = HERMES if told and service.options.tool_call_parser is None else style
    wanted = _wanted(tools, choice)
    if wanted is None:
        return ToolUse(style, None, told)
    if style.parser is PythonCalls:  # grammars are of JSON
        style = style._replace(between="; ", parser=JsonCalls)
    several = isinstance(choice, str) and body.parallel_tool_calls is not False
    try:
        grammar = call_grammar(style, wanted, several, service.special_ids)
    except RecursionError as error:
        raise ApiError(400, "tools are nested too deeply.", param="tools") from error
    return ToolUse(style, GrammarSource("grammar", grammar), told)


def _tool(given: Mapping[str, Any], place: int) -> Tool:
    path = f"tools[{place}]"
    kind, function = given.get("type", "function"), given.get("function")
    if kind != "function":
        message = f'{path}.type: should be "function"; it is {shown(kind)}.'
        raise ApiError(400, message, param=f"{path}.type")
    if not isinstance(function, dict):
        raise ApiError(400, f"{path}.function is missing.", param=f"{path}.function")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"{path}.function.name is missing.", param=f"{path}.function.name")
    if schema is not None and not isinstance(schema, dict):
        param = f"{path}.function.parameters"
        raise ApiError(400, f"{param}: should be an object; it is {shown(schema)}.", param=param)
    return Tool(name, schema or {"type": "object"})


def _wanted(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool] | None:
    """The tools of which one must be called; None if none must."""
    if choice == "auto":
        return None
    if choice == "required":
        return [*tools]
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(choice, str) or choice.get("type") != "function" or not isinstance(name, str):
        options = ", ".join(f'"{each}"' for each in _CHOICES)
        message = (
            f'tool_choice: should be {options} or {{"type": "function", "function": {{"name": NAME'
            f"}}}}; it is {shown(choice)}."
        )
        raise ApiError(400, message, param="tool_choice")
    found = [tool for tool in tools if tool.name == name]
    if not found:
        message = f"tool_choice names {shown(name)}, which is none of tools."
        raise ApiError(400, message, param="tool_choice")
    return found[:1]


def with_tools(
    talk: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template that has no place for tools: the system message tells of them, calls
    are text of an answer, and what came of them is a user's message, as Hermes' format has it.
    """
    told = described(tools)
    found = [_in_words(message) for message in talk]
    if found and found[0]["role"] == "system":
        found[0]["content"] = f"{found[0]['content']}\n\n{told}".lstrip("\n")
        return found
    return [{"role": "system", "content": told}, *found]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(message)
    if calls := own.pop("tool_calls", None):
        texts = [
            f"<tool_call>\n{json.dumps(each['function'], ensure_ascii=False)}\n</tool_call>"
            for each in calls
        ]
        own["content"] = "\n".join(filter(None, [own["content"], *texts]))
    if own["role"] in ("tool", "function"):
        own = {"role": "user", "content": f"<tool_response>\n{own['content']}\n</tool_response>"}
    return own
