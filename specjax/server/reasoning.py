"""What models think before they answer, between `<think>` and `</think>`, apart from the answer."""

import json
from typing import NamedTuple

from specjax.grammar.sources import WHITE_SPACE, GrammarSource, choice_in_lark, regex_in_lark

BEGIN, END = "<think>", "</think>"


class Thinking(NamedTuple):
    """That a model thinks before it answers, and whether the prompt has begun its thoughts."""

    begun: bool


class Said(NamedTuple):
    """More of what a model thought, and of what it answered."""

    thought: str
    answer: str


class ThoughtSplit:
    """Splits a text as it comes.

    Args:
      inside: whether the prompt has begun the thoughts already, as some chat templates do.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state = "inside" if inside else "start"
        self._held = ""
        self._any = False

    def add(self, text: str) -> Said:
        """What is certain with more text."""
        self._held += text
        thought = answer = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(BEGIN):
                self._state, self._held = "inside", begun.removeprefix(BEGIN)
            elif not BEGIN.startswith(begun):
                self._state = "answer"
        if self._state == "inside":
            thought = self._thought()
        if self._state == "after":  # lines between thoughts and answer belong to neither
            self._held = self._held.lstrip("\n")
            self._state = "answer" if self._held else "after"
        if self._state == "answer":
            answer, self._held = self._held, ""
        return Said(thought, answer)

    def _thought(self) -> str:
        """What is certain of the thoughts: no part of what may end them, nor lines at the end."""
        before, ended, after = self._held.partition(END)
        if ended:
            self._state, self._held = "after", after
            return self._begun(before.rstrip("\n"))
        held = next(n for n in range(len(END) - 1, -1, -1) if before.endswith(END[:n]))
        certain = before[: len(before) - held].rstrip("\n")
        self._held = before[len(certain) :]
        return self._begun(certain)

    def _begun(self, text: str) -> str:
        """Thoughts without the lines that they begin with."""
        if self._any:
            return text
        text = text.lstrip("\n")
        self._any = bool(text)
        return text

    def flush(self) -> Said:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        return Said(self._begun(held), "") if self._state == "inside" else Said("", held)


def thinks(template: str) -> bool:
    """Whether a chat template is of a model that thinks before it answers."""
    return END in template


def after_thoughts(source: GrammarSource, *, inside: bool) -> GrammarSource | None:
    """A grammar of thoughts, if there are any, and then of what `source` says; None for a grammar
    that a client wrote, which cannot be put behind something.

    Args:
      source: of the answer.
      inside: whether the prompt has begun the thoughts already.
    """
    body = _body_of(source)
    return None if body is None else calls_after_thoughts(
        GrammarSource("grammar", f"start: answer\nanswer: {body}\n"), inside=inside
    )  # fmt: skip


def calls_after_thoughts(calls: GrammarSource, *, inside: bool) -> GrammarSource:
    """The same of a grammar whose first line is its rule `start`, to which no other rule refers."""
    thought = "thought" if inside else f"({json.dumps(BEGIN)} thought)?"
    text = calls.text.replace("start: ", f"start: {thought} /[\\n]{{0,2}}/ ", 1)
    rule = f"thought[suffix={json.dumps(END)}]: /(.|\\n)*/\n"
    return GrammarSource("grammar", text + rule)


def _body_of(source: GrammarSource) -> str | None:
    """A grammar as the right side of a rule of Lark's."""
    match source.kind:
        case "json_schema":
            schema = json.loads(source.text)
            schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
            options = {"whitespace_pattern": WHITE_SPACE}
            return f"%json {json.dumps({'x-guidance': options} | schema)}"
        case "regex":
            return regex_in_lark(source.text)
        case "choice":
            return f"CHOICE\n{choice_in_lark(json.loads(source.text))}"
    return None
