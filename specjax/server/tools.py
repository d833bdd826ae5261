"""Tool calls: how models of each style write them, read out of a text as it comes.

What a style is called is what vLLM's `--tool-call-parser` calls it.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specjax.grammar.sources import WHITE_SPACE

MOST_CALLS = 8
"""Calls in a text that must hold some."""


class Content(NamedTuple):
    """Text that is no call."""

    text: str


class CallStart(NamedTuple):
    """A call begins: its place among the text's calls, its id and the tool's name."""

    place: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON."""

    place: int
    text: str


Piece = Content | CallStart | CallArguments


class Parser(Protocol):
    """Reads calls out of a text."""

    def add(self, text: str) -> list[Piece]:
        """What is certain with more text."""
        ...

    def flush(self) -> list[Piece]:
        """What is left at the end of the text."""
        ...


class Style(NamedTuple):
    """How models write calls.

    Attributes:
      name: of the style.
      marks: of a chat template that tells models so, all of them.
      begin: what begins calls; empty where a text that begins with an object does.
      end: what ends a call, if anything.
      arguments: the field of a call that holds its arguments.
      parser: makes a parser.
      between: what stands between two calls that must be made.
      around: what stands around them all, and around each.
      id_length: characters of a call's id behind its `call_`, if it has one.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str
    arguments: str
    parser: "Callable[[Style], Parser]"
    between: str = ""
    around: tuple[str, str, str, str] = ("", "", "", "")
    id_length: int = 24

    def new_id(self) -> str:
        """An id for a call."""
        if self.id_length < 10:  # Mistral's templates ask for nine letters and digits
            return secrets.token_hex(8)[: self.id_length]
        return "call_" + secrets.token_hex(self.id_length // 2)


class _Fields:
    """An object of JSON, letter by letter: `take` gets the text of each field's value in pieces."""

    def __init__(self, take: Callable[[str, str, bool], None]) -> None:
        self._take, self._depth, self._name, self._key = take, 0, "", ""
        self._in_text = self._escaped = False
        self._place = "key"

    def add(self, letter: str) -> bool:
        """Whether the object has ended with one more letter."""
        if self._in_text:
            self._of_text(letter)
        elif self._depth > 1:
            self._depth += (letter in "{[") - (letter in "}]")
            self._in_text = letter == '"'
            self._take(self._name, letter, False)
        elif self._depth == 0:
            self._depth += letter == "{"
        elif self._place == "value":
            return self._of_value(letter)
        elif self._place == "colon":
            self._place = "value" if letter == ":" else "colon"
        elif letter == '"':
            self._in_text, self._key = True, ""
        else:
            return letter == "}"
        return False

    def _of_text(self, letter: str) -> None:
        ended = letter == '"' and not self._escaped
        self._escaped = letter == "\\" and not self._escaped
        self._in_text = not ended
        if self._place != "key":
            self._take(self._name, letter, False)
        elif ended:
            self._name, self._place = str(_value(f'"{self._key}"') or ""), "colon"
        else:
            self._key += letter

    def _of_value(self, letter: str) -> bool:
        if letter in ",}":
            self._take(self._name, "", True)
            self._place = "key"
            return letter == "}"
        if not letter.isspace():
            self._depth += letter in "{["
            self._in_text = letter == '"'
            self._take(self._name, letter, False)
        return False


class _Call:
    """A call that is an object with a name and arguments, of which pieces are given as they come.

    `index` is its place if it becomes one; `named` gives its id.
    """

    def __init__(self, style: Style, index: int) -> None:
        self._style, self._index = style, index
        self._fields = _Fields(self._take)
        self._name, self._held, self._known = "", "", False
        self._as_text: bool | None = None
        self._field: str | None = None
        self._pieces: list[Piece] = []
        self._has_arguments = False

    @property
    def is_call(self) -> bool:
        """Whether its name is known."""
        return self._known

    def add(self, letter: str) -> tuple[list[Piece], bool]:
        """What is certain with one more letter, and whether the object has ended."""
        ended = self._fields.add(letter)
        if ended and self._known and not self._has_arguments:
            self._pieces.append(CallArguments(self._index, "{}"))
        pieces, self._pieces = self._pieces, []
        return pieces, ended

    def _take(self, name: str, text: str, done: bool) -> None:
        if name == "name" and not self._known:
            self._name += text
            if done and isinstance(own := _value(self._name), str) and own:
                self._known = True
                self._pieces.append(CallStart(self._index, self._style.new_id(), own))
        elif name in ("arguments", "parameters") and self._field in (None, name):
            self._field = name
            self._as_text = text == '"' if self._as_text is None else self._as_text
            self._held += text
            if done and self._as_text:  # JSON that was written as a text
                self._held, self._as_text = str(_value(self._held) or "{}"), False
        if self._known and self._held and not self._as_text:
            self._pieces.append(CallArguments(self._index, self._held))
            self._held, self._has_arguments = "", True


class JsonCalls:
    """Calls as objects, behind what begins them, perhaps in a list; other text is content."""

    def __init__(self, style: Style) -> None:
        self._style, self._calls, self._began_at = style, 0, 0
        self._outside = True
        self._buffer = self._raw = self._skipped = ""
        self._call: _Call | None = None
        self._bare: _Bare | None = None
        self._began = bool(style.begin)

    def add(self, text: str) -> list[Piece]:
        """What is certain with more text."""
        found: list[Piece] = []
        for letter in text:
            self._step(letter, found)
        return _merged(found)

    def _step(self, letter: str, found: list[Piece]) -> None:
        if not self._began:  # a text that begins with an object is calls
            self._buffer += letter
            if letter.isspace():
                return
            self._began, letters = True, self._buffer
            self._outside, self._buffer = letter != "{", ""
            for each in letters if self._outside else letters.lstrip():
                self._step(each, found)
        elif self._outside:
            self._out(letter, found)
        elif self._call is not None:
            self._raw += letter
            pieces, ended = self._call.add(letter)
            found += pieces
            if ended:
                if not self._call.is_call:
                    found.append(Content(self._skipped + self._raw))
                self._calls += self._call.is_call
                self._call, self._raw, self._skipped = None, "", ""
        elif self._bare is not None:
            self._raw += letter
            if self._bare.add(letter, found):
                self._bare, self._raw, self._calls = None, "", self._calls + 1
        else:
            self._between(letter, found)

    def _out(self, letter: str, found: list[Piece]) -> None:
        """Content, of which what may begin calls is held back."""
        self._buffer += letter
        begin = self._style.begin
        if begin and self._buffer.endswith(begin):
            before = self._buffer.removesuffix(begin)
            if before.strip():
                found.append(Content(before))
            self._buffer, self._outside, self._began_at = "", False, self._calls
            return
        held = next((n for n in range(min(len(begin) - 1, len(self._buffer)), 0, -1)
                     if begin.startswith(self._buffer[-n:])), 0)  # fmt: skip
        certain = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(certain) :]
        if certain and (certain.strip() or not self._calls):  # between calls spaces are no content
            found.append(Content(certain))

    def _between(self, letter: str, found: list[Piece]) -> None:
        """Between calls, up to what ends them."""
        self._raw += letter
        if letter == "{":
            self._call = _Call(self._style, self._calls)
            self._skipped, self._raw = self._raw[:-1], letter
            self._call.add(letter)
            return
        end = self._style.end
        if end and self._raw.endswith(end):
            self._raw, self._outside = "", True
        elif not end and self._style.begin and (letter.isalnum() or letter == "_"):
            self._bare = _Bare(self._style, self._calls)
            self._raw = letter
            self._bare.add(letter, found)
        elif not end and not self._style.begin and not (letter.isspace() or letter in ";,[]"):
            found.append(Content(self._raw))  # a text that only began with an object
            self._raw, self._outside = "", True

    def flush(self) -> list[Piece]:
        """What is left: text that was held back, or an object that is no call."""
        found: list[Piece] = []
        call = self._bare if self._call is None else self._call
        if self._outside:
            left = self._buffer
        elif call is not None:
            left = "" if call.is_call else self._skipped + self._raw
        else:  # what ends a list of calls is no content
            left = self._raw if self._calls == self._began_at else self._raw.strip("[],; \n")
        if left.strip() or (left and not self._calls):
            begun = not self._outside and self._calls == self._began_at
            found.append(Content((self._style.begin if begun else "") + left))
        self._buffer = self._raw = self._skipped = ""
        return found


class _Bare:
    """A call as Mistral's newer models write it: `name[ARGS]{...}`."""

    def __init__(self, style: Style, index: int) -> None:
        self._style, self._index, self._name = style, index, ""
        self._depth, self._in_text, self._escaped = 0, False, False
        self.is_call = False

    def add(self, letter: str, found: list[Piece]) -> bool:
        """Whether it has ended with one more letter."""
        if not self.is_call:
            if letter != "{":
                self._name += letter
                return False
            self.is_call = True
            again = self._style.begin.lstrip("[")  # what of a second one came before its name
            name = re.split(r"\[(?:CALL_ID|ARGS)\]", self._name.removeprefix(again))[0].strip()
            found.append(CallStart(self._index, self._style.new_id(), name))
        found.append(CallArguments(self._index, letter))
        if self._in_text:
            self._in_text = letter != '"' or self._escaped
            self._escaped = letter == "\\" and not self._escaped
            return False
        self._depth += (letter in "{[") - (letter in "}]")
        self._in_text = letter == '"'
        return self._depth == 0


class PythonCalls:
    """A list of Python's calls, `[f(a=1), g()]`, that is the whole text."""

    _MAY_BE = re.compile(r"\s{0,64}(\[\s{0,64}([A-Za-z_][\w.]{0,127}\s{0,64}(\(.*)?)?)?", re.DOTALL)
    _CALLS = re.compile(r"\s*\[\s*[\w.]+\s*\(")

    def __init__(self, style: Style) -> None:
        self._style, self._text = style, ""
        self._is_content = self._begun = False

    def add(self, text: str) -> list[Piece]:
        """Nothing, as long as it may be calls."""
        if self._is_content:
            return [Content(text)]
        self._text += text
        if self._begun or self._MAY_BE.fullmatch(self._text):
            self._begun = self._begun or bool(self._CALLS.match(self._text))
            return []
        self._is_content = True
        return [Content(self._text)]

    def flush(self) -> list[Piece]:
        """The calls, or else the text."""
        if self._is_content or not self._text:
            return []
        try:
            calls = [_python_call(each) for each in _list_of(self._text)]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return [Content(self._text)]
        found: list[Piece] = []
        for index, (name, arguments) in enumerate(calls):
            found += [CallStart(index, self._style.new_id(), name), CallArguments(index, arguments)]
        return found


def _list_of(text: str) -> list[ast.expr]:
    made = ast.parse(text.strip(), mode="eval").body
    if not isinstance(made, ast.List) or not made.elts:
        raise ValueError("it is no list.")
    return made.elts


def _python_call(call: ast.expr) -> tuple[str, str]:
    """A call's name and its arguments as JSON."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("it is no call with named arguments.")
    arguments = {
        own.arg: ast.literal_eval(own.value) for own in call.keywords if own.arg is not None
    }
    return ast.unparse(call.func), json.dumps(arguments, allow_nan=False)


def _value(text: str) -> Any:
    """The value of JSON, None if it is none; a text without halves of surrogate pairs."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of one content, or of one call's arguments, as one."""
    found: list[Piece] = []
    for each in pieces:
        last = found[-1] if found else None
        if isinstance(each, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + each.text)
        elif isinstance(each, CallArguments) and isinstance(last, CallArguments) and (
            each.place == last.place
        ):  # fmt: skip
            found[-1] = CallArguments(each.place, last.text + each.text)
        else:
            found.append(each)
    return found


HERMES = Style(
    "hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", "arguments", JsonCalls,
    between="\n", around=("", "", "\n", "\n"),
)  # fmt: skip
STYLES = {
    style.name: style
    for style in (
        Style("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", "arguments", JsonCalls,
              between=", ", around=("[", "]", "", ""), id_length=9),
        HERMES,
        Style("pythonic", ("func_name1(params_name1",), "", "", "parameters", PythonCalls),
        Style("llama3_json", ("ipython",), "", "", "parameters", JsonCalls, between="; "),
    )
}  # fmt: skip
"""By their names; the first whose marks a template has is its own."""


def style_of(template: str, name: str | None = None) -> Style:
    """The style of a chat template, or that of a name; Hermes' where it tells of none."""
    if name is not None:
        return STYLES[name]
    found = (style for style in STYLES.values() if all(mark in template for mark in style.marks))
    return next(found, HERMES)


def takes_tools(template: str) -> bool:
    """Whether a chat template tells its model of tools."""
    return re.search(r"\btools\b", template) is not None


class Tool(NamedTuple):
    """A tool that may be called: its name, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


def call_grammar(
    style: Style, tools: Sequence[Tool], several: bool, special: Mapping[str, int]
) -> str:
    """A grammar, in Lark's notation, of calls in a style; of tools with fields it knows.

    Args:
      style: of the model.
      tools: of which one is called, or some.
      several: whether there may be more than one call.
      special: ids of tokens without text by their names.
    """
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                style.arguments: _moved(
                    tool.schema, f"#/anyOf/{place}/properties/{style.arguments}"
                ),
            },
            "required": ["name", style.arguments],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    schema = json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, "anyOf": options})

    def said(text: str) -> str:
        if not text:
            return ""
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    before, after, inside, last = map(said, style.around)
    begin, end = said(style.begin), said(style.end)
    more = f"({said(style.between)} call){{0,{MOST_CALLS - 1}}}" if several else ""
    tagged = style.end != ""
    whole = f"{before} call {more} {after}" if tagged else f"{begin} {before} call {more} {after}"
    one = f"{begin} {inside} object {last} {end}" if tagged else "object"
    return f"start: {whole}\ncall: {one}\nobject: %json {schema}\n"


def _moved(schema: Any, to: str) -> Any:
    """A schema that lies elsewhere in another: references to itself say so."""
    if isinstance(schema, Mapping):
        return {
            name: to + value[1:]
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, to)
            for name, value in schema.items()
        }
    return [_moved(each, to) for each in schema] if isinstance(schema, list) else schema


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools in words, for a model whose chat template has no place for them, in Hermes' format."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to help with the user's request. Their signatures are "
        f"inside <tools></tools>:\n<tools>\n{listed}\n</tools>\nFor each call write an object with "
        "its name and arguments inside <tool_call></tool_call>:\n<tool_call>\n"
        '{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )
