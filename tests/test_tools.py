"""Calls of tools in texts of each style, however the text comes in pieces."""

import json
import time

import numpy as np
import pytest

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.grammar.compiling import GrammarCompiler
from specjax.grammar.sources import GrammarSource
from specjax.server.tools import (
    STYLES,
    CallArguments,
    CallStart,
    Content,
    Tool,
    call_grammar,
    described,
    style_of,
)

WEATHER = {"city": 'Oslo "N"', "days": [1, {"a": "}]"}], "unit": None}


def read(style: str, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls' names and arguments."""
    parser = STYLES[style].parser(STYLES[style])
    ends = [*cuts, len(text)]
    pieces = [
        piece
        for begin, end in zip([0, *cuts], ends, strict=True)
        for piece in parser.add(text[begin:end])
    ]
    pieces += parser.flush()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.place == len(calls)
            assert piece.id
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            calls[piece.place][1] += piece.text
    return content, [(name, arguments) for name, arguments in calls]


def call(name: str, arguments: object, field: str = "arguments") -> str:
    return json.dumps({"name": name, field: arguments})


TEXTS = [
    ("hermes", f"<tool_call>\n{call('f', WEATHER)}\n</tool_call>", "", ["f"]),
    ("hermes", f"Let me see.\n<tool_call>{call('f', WEATHER)}</tool_call>\n<tool_call>\n"
               f"{call('g', WEATHER)}\n</tool_call>\n", "Let me see.\n", ["f", "g"]),
    ("hermes", f"<tool_call>[{call('f', WEATHER)}, {call('g', WEATHER)}]</tool_call>", "",
     ["f", "g"]),
    ("hermes", f"<tool_call>{json.dumps({'arguments': WEATHER, 'name': 'f'})}</tool_call>", "",
     ["f"]),
    ("hermes", f"<tool_call>{call('f', json.dumps(WEATHER))}</tool_call>", "", ["f"]),
    ("hermes", "a <tool and <tool_cal", "a <tool and <tool_cal", []),
    ("hermes", '<tool_call>{"no": 1}</tool_call>', '{"no": 1}', []),
    ("hermes", "ok <tool_call> I will not call", "ok <tool_call> I will not call", []),
    ("hermes", f"<tool_call>{call('f', WEATHER)} and more", "and more", ["f"]),
    ("llama3_json", '{"a": 1}, {"b": 2}', '{"a": 1}, {"b": 2}', []),
    ("llama3_json", call("f", WEATHER, "parameters"), "", ["f"]),
    ("llama3_json", f" {call('f', WEATHER, 'parameters')}; {call('g', WEATHER, 'parameters')}", "",
     ["f", "g"]),
    ("llama3_json", '{"a": 1} is JSON.', '{"a": 1} is JSON.', []),
    ("llama3_json", "It is {hot}.", "It is {hot}.", []),
    ("mistral", f"[TOOL_CALLS][{call('f', WEATHER)}, {call('g', WEATHER)}]", "", ["f", "g"]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{json.dumps(WEATHER)}[TOOL_CALLS]g[CALL_ID]abc[ARGS]"
                f"{json.dumps(WEATHER)}", "", ["f", "g"]),
    ("mistral", f"[TOOL_CALLS] f{json.dumps(WEATHER)}", "", ["f"]),
    ("pythonic", "[f(**{}, city='x')]", "[f(**{}, city='x')]", None),
    ("pythonic", f"[f({', '.join(f'{k}={v!r}' for k, v in WEATHER.items())}), g("
                 f"{', '.join(f'{k}={v!r}' for k, v in WEATHER.items())})]", "", ["f", "g"]),
    ("pythonic", "[1] is a list", "[1] is a list", []),
    ("pythonic", "[a dog (that barks)] said", "[a dog (that barks)] said", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "names"), TEXTS)
def test_calls_are_read_however_the_text_is_cut(style, text, content, names):
    drawn = np.random.default_rng(0)
    for turn in range(30):
        cuts = sorted(drawn.choice(len(text), min(turn, len(text)), replace=False).tolist())
        said, calls = read(style, text, cuts)
        if names is None:  # which of both it is does not matter
            continue
        assert said == content
        assert [name for name, _ in calls] == names
        assert all(json.loads(arguments) == WEATHER for _, arguments in calls)


def test_arguments_come_as_they_are_written():
    parser = STYLES["hermes"].parser(STYLES["hermes"])
    given = [parser.add(each) for each in f"<tool_call>{call('f', {'a': 'bc'})}</tool_call>"]
    pieces = [piece for each in given for piece in each]
    assert isinstance(pieces[0], CallStart)
    assert len(pieces) > 8
    assert "".join(piece.text for piece in pieces[1:]) == '{"a": "bc"}'


def test_a_call_without_arguments_has_none():
    assert read("hermes", '<tool_call>{"name": "f"}</tool_call>', []) == ("", [("f", "{}")])


def test_a_call_has_one_field_of_arguments():
    text = '<tool_call>{"name": "f", "parameters": {"b": 1}, "arguments": {"a": 1}}</tool_call>'
    assert read("hermes", text, []) == ("", [("f", '{"b": 1}')])


@pytest.mark.parametrize("style", ["hermes", "pythonic"])
def test_half_a_surrogate_pair_is_no_text_that_cannot_be_sent(style):
    text = '<tool_call>{"name": "\\ud800f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'
    text = text if style == "hermes" else "[f(a='\\ud800')]"
    _, calls = read(style, text, [])
    json.dumps(calls, ensure_ascii=False).encode()
    assert len(calls) == 1


def test_long_texts_are_read_in_time_that_grows_with_them():
    for style, text in (
        ("pythonic", "[f" + "a" * 200_000), ("pythonic", "[f(a='" + "a" * 200_000),
        ("hermes", f"<tool_call>{call('f', {})}</tool_call>" + " " * 200_000),
        ("hermes", "<tool_cal" * 20_000), ("llama3_json", " " * 200_000),
    ):  # fmt: skip
        begin = time.perf_counter()
        read(style, text, list(range(4, len(text), 4)))
        assert time.perf_counter() - begin < 10


def test_references_of_a_tools_schema_are_to_itself():
    schema = {"type": "object", "$defs": {"P": {"type": "integer"}},
              "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"],
              "additionalProperties": False}  # fmt: skip
    tools = [Tool("f", {"type": "object"}), Tool("g", schema)]
    tokenizer = tokenizer_of(BUNDLED / "target")
    text = call_grammar(STYLES["hermes"], tools, False, {})
    grammar = GrammarCompiler(tokenizer, 4096, (0,)).compile(GrammarSource("grammar", text))
    for value, taken in (("17", True), ('"a"', False)):
        ids = tokenizer(f'<tool_call>\n{{"name": "g", "arguments": {{"p": {value}}}}}').input_ids
        assert (grammar.matcher().consume(ids) == len(ids)) == taken


def test_what_ends_in_the_middle_of_a_call_is_what_came_of_it():
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', []) == (
        "", [("f", '{"a": 1')]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{% if tools %}[TOOL_CALLS]", "mistral"),
        ("ipython {{ tools }}", "llama3_json"),
        ("ipython [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_a_template_tells_its_style(template, name):
    assert style_of(template).name == name
    assert style_of(template, "mistral").name == "mistral"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_what_a_grammar_allows_is_read_as_calls(style, several):
    compiler = GrammarCompiler(tokenizer_of(BUNDLED / "target"), 4096, (0,))
    tools = [
        Tool("f", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                   "additionalProperties": False}),
        Tool("g", {"type": "object", "additionalProperties": False}),
    ]  # fmt: skip
    text = call_grammar(STYLES[style], tools, several, {})
    grammar = compiler.compile(GrammarSource("grammar", text))
    drawn = np.random.default_rng(0)
    for _ in range(6):
        matcher, ids = grammar.matcher(), []
        while len(ids) < 2000:
            words = matcher.words().view(np.uint32)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token = int(drawn.choice(np.flatnonzero(bits)))
            if matcher.is_end(token):
                break
            assert matcher.consume([token]) == 1
            ids.append(token)
        own = "llama3_json" if style == "pythonic" else style
        content, calls = read(own, compiler._tokenizer.decode_str(ids), [])
        assert content == ""
        assert 1 <= len(calls) <= (8 if several else 1)
        for name, arguments in calls:
            assert json.loads(arguments) in ([{"a": 1}, {"a": 2}] if name == "f" else [{}])


def test_tools_in_words_name_each():
    told = described([{"type": "function", "function": {"name": "f"}}])
    assert '"name": "f"' in told
    assert "<tool_call>" in told
