"""Answers to chats, read as they come: thoughts and tool calls apart from the text."""

import dataclasses
from collections.abc import Sequence

from specjax.server.choices import Delta
from specjax.server.reasoning import Thinking, ThoughtSplit
from specjax.server.responses import CalledFunction, ToolCall
from specjax.server.tool_use import ToolUse
from specjax.server.tools import CallArguments, CallStart, Content, Parser


class Reader:
    """Reads the choices of an answer.

    Args:
      use: of tools that may be called; None if there are none.
      thinking: how the model thinks first; None if it does not.
    """

    def __init__(self, use: ToolUse | None, thinking: Thinking | None) -> None:
        self._use, self._thinking = use, thinking
        self._splits: dict[int, ThoughtSplit] = {}
        self._parsers: dict[int, Parser] = {}
        self._calling: set[int] = set()

    def read(self, delta: Delta) -> Delta:
        """What is certain of a choice: its `text` alone, its `calls`, its `thought`."""
        if self._thinking is not None:
            delta = self._without_thoughts(delta, self._thinking)
        if self._use is None:
            return delta
        style = self._use.style
        parser = self._parsers.setdefault(delta.index, style.parser(style))
        pieces = parser.add(delta.text)
        pieces += [] if delta.finish_reason is None else parser.flush()
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        calls = [piece for piece in pieces if not isinstance(piece, Content)]
        if calls:
            self._calling.add(delta.index)
        called = delta.index in self._calling and delta.finish_reason == "stop"
        reason = "tool_calls" if called else delta.finish_reason
        return dataclasses.replace(delta, text=text, calls=calls, finish_reason=reason)

    def _without_thoughts(self, delta: Delta, thinking: Thinking) -> Delta:
        split = self._splits.setdefault(delta.index, ThoughtSplit(inside=thinking.begun))
        said = [split.add(delta.text)]
        said += [] if delta.finish_reason is None else [split.flush()]
        thought, text = ("".join(parts) for parts in zip(*said, strict=True))
        return dataclasses.replace(delta, thought=thought, text=text)


def added_to_call(piece: CallStart | CallArguments) -> ToolCall:
    """What an event adds to a call."""
    if isinstance(piece, CallArguments):
        return {"index": piece.place, "function": {"arguments": piece.text}}
    function: CalledFunction = {"name": piece.name, "arguments": ""}
    return {"index": piece.place, "id": piece.id, "type": "function", "function": function}


def whole_calls(pieces: Sequence[CallStart | CallArguments]) -> list[ToolCall]:
    """The calls that pieces make."""
    found: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            function: CalledFunction = {"name": piece.name, "arguments": ""}
            found.append({"id": piece.id, "type": "function", "function": function})
        else:
            found[piece.place]["function"]["arguments"] += piece.text
    return found
