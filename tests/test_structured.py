"""Structured output: grammars for a vocabulary, texts that match them, and requests that ask so."""

import json
import re
import time
import weakref

import httpx
import jax
import numpy as np
import pytest

import specjax
from specjax.base import grammars
from specjax.cli.main import main
from specjax.grammar.compiling import LARGEST, GrammarCompiler
from specjax.grammar.sources import GrammarsInUseError, GrammarSource
from specjax.methods.registry import build, setting_of
from specjax.server import service
from tests.cases import slow_but
from tests.folders import answer
from tests.scripted_engine import ScriptedEngine, serving

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["class", "function"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
PROMPT = "def describe():\n    return json.dumps("


@pytest.fixture(scope="module")
def pair():
    return specjax.load_pair("bundled")


@pytest.fixture(scope="module")
def compiler(pair):
    config = pair.target.config
    return GrammarCompiler(pair.tokenizer, config.vocab_size, config.eos_ids)


def follow(compiler, grammar, text: str) -> tuple[bool, bool]:
    """Whether a text's tokens are all allowed, and whether it may end there."""
    matcher = grammar.matcher()
    tokens = compiler_tokens(compiler, text)
    taken = matcher.consume(tokens)
    end = min(compiler._end_ids)
    may_end = bool(matcher.words().view(np.uint32)[end // 32] >> np.uint32(end % 32) & 1)
    return taken == len(tokens), taken == len(tokens) and may_end


def compiler_tokens(compiler, text: str) -> list[int]:
    return compiler._tokenizer.tokenize_str(text)


@pytest.mark.parametrize(
    ("make", "right", "wrong"),
    [
        (lambda c: c.json_schema({"type": "integer"}), "17", "x"),
        (lambda c: c.json_schema('{"enum": ["a", "b"]}'), '"b"', '"c"'),
        (lambda c: c.json_schema({"type": "object"}), '{"a":\n    [1, 2]}', '{"a":\n\n1}'),
        (lambda c: c.json_schema(True), "[null]", "nil"),
        (lambda c: c.json_object(), '{"a": {}}', "[]"),
        (lambda c: c.regex(r"[0-9]{3}-[a-f]+"), "123-abc", "12-abc"),
        (lambda c: c.choice(["yes", "no", 'a "quoted" one\n']), 'a "quoted" one\n', "maybe"),
        (lambda c: c.grammar('start: "a"+ ("b" | "c")'), "aac", "ad"),
        (lambda c: c.grammar('root ::= "x" [0-9]+'), "x42", "y42"),
    ],
)
def test_a_grammar_takes_what_it_says(make, right, wrong, compiler):
    grammar = make(compiler)
    assert follow(compiler, grammar, right) == (True, True)
    assert follow(compiler, grammar, wrong)[0] is False
    assert make(compiler) is grammar  # compiled once


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            GrammarSource("json_schema", '{"type": "foo"}'),
            "the JSON schema is refused: Invalid type",
        ),
        (GrammarSource("json_schema", "[1"), "the JSON schema is refused"),
        (GrammarSource("json_schema", ""), "the JSON schema is refused"),
        (GrammarSource("json_schema", '{"$ref": "#/nope"}'), "'/nope' does not exist"),
        (GrammarSource("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "the JSON schema"),
        (GrammarSource("json_schema", "x" * (LARGEST + 1)), f"it may have {LARGEST}."),
        (GrammarSource("regex", "(a"), "the regex is refused"),
        (GrammarSource("regex", "(?=x)a"), "look-around"),
        (GrammarSource("json_schema", "false"), "the JSON schema is refused"),
        (GrammarSource("choice", "[]"), "one at least"),
        (GrammarSource("choice", '[""]'), "not empty"),
        (GrammarSource("choice", '{"a": 1}'), "a list of texts"),
        (GrammarSource("grammar", "start: nothing"), "the grammar is refused"),
        (GrammarSource("grammar", 'start: a "z"\na[max_tokens=4]: /[ab]+/'), "cannot be drafted"),
        (GrammarSource("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 3}]}'), "use anyOf"),
        (GrammarSource("yaml", "a"), "there is no kind 'yaml'"),
    ],
)
def test_what_is_no_grammar_is_refused_in_a_sentence(source, said, compiler):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        compiler.compile(source)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith(".")
    assert len(str(refused.value)) < 500


def test_a_model_without_an_end_token_has_no_grammars(pair):
    with pytest.raises(ValueError, match="no end token"):
        GrammarCompiler(pair.tokenizer, pair.target.config.vocab_size, ())


def texts(pair, drafter, grammar, **options) -> list[str]:
    prompt = pair.tokenizer(PROMPT).input_ids
    made = specjax.generate(
        jax.random.key(3), pair.target, drafter, [prompt] * 3, max_new_tokens=96, grammar=grammar,
        **options,
    )  # fmt: skip
    return [
        pair.tokenizer.decode(own[:length], skip_special_tokens=True)
        for own, length in zip(made.tokens, made.lengths, strict=True)
    ]


METHODS = ("chain", "tree", "pool", "specexec", "hybrid", "lookup", "recycle", "ngram", "staged",
           "lookahead")  # fmt: skip


@pytest.mark.parametrize("method", slow_but(METHODS, "specexec"))
def test_greedy_texts_are_plain_decodings_whatever_drafts(method, pair, compiler):
    grammar, other = compiler.json_schema(SCHEMA), compiler.regex("[a-z]{3,9}( [a-z]{3,9}){2}")
    mixed = [grammar, None, other]
    plain = texts(pair, None, mixed)
    drafter = build(setting_of(method, drafts=len(pair.drafts)), pair)
    assert texts(pair, drafter, mixed) == plain
    assert json.loads(plain[0]).keys() == SCHEMA["properties"].keys()
    assert re.fullmatch("[a-z]{3,9}( [a-z]{3,9}){2}", plain[2])


def test_a_drafted_node_that_leads_nowhere_ends_no_text(pair, compiler):
    """The parser has no way on after "a" and says so for good; the text goes on with "b"."""
    grammar = compiler.grammar('start: "a" X | "b" /c{3}/\nX: /x/ & /y/')
    prompt = pair.tokenizer("x = ").input_ids
    a, b = (pair.tokenizer(each).input_ids[0] for each in "ab")
    row = grammars._Row(grammar.matcher())
    row.masks(0, [], [(), (a,)])
    (after,) = row.masks(0, [], [(b,)])
    assert after.any()
    assert not row.matcher.error()
    for drafter in (None, build(setting_of("specexec"), pair)):
        made = specjax.generate(
            jax.random.key(0), pair.target, drafter, [prompt], max_new_tokens=8, grammar=grammar,
            sampling=specjax.Sampling(logit_bias={b: 50.0, a: 30.0}),
        )  # fmt: skip
        text = pair.tokenizer.decode(made.tokens[0, : made.lengths[0]], skip_special_tokens=True)
        assert text == "bccc"
    with pytest.raises(ValueError, match="a text came to the limits of its grammar"):
        specjax.generate(
            jax.random.key(0), pair.target, None, [prompt], max_new_tokens=8, grammar=grammar,
            sampling=specjax.Sampling(logit_bias={a: 50.0}),
        )  # fmt: skip
    assert grammars.num_rows() == 0


def test_a_step_that_another_device_asks_for_again_has_the_same_masks(pair, compiler):
    grammar = compiler.regex("[ab]{6}")
    a, b = (pair.tokenizer(each).input_ids[0] for each in "ab")
    row = grammars._Row(grammar.matcher())
    first = row.masks(0, [], [(), (a,), (a, b)])
    second = row.masks(2, [a, b], [(), (a,)])
    again = row.masks(0, [], [(a,), ()])
    assert again == [first[1], first[0]]
    third = row.masks(4, [a, a], [()])
    assert row.masks(2, [a, b], [(a,)])[0] is second[1]
    assert third[0].any()
    fresh = row.masks(0, [], [(), (b, b)])  # a text that begins anew
    np.testing.assert_array_equal(fresh[0], first[0])


def test_many_choices_are_one_of_them(compiler):
    grammar = compiler.choice([f"value {n}" for n in range(5000)])
    assert follow(compiler, grammar, "value 4321") == (True, True)
    assert follow(compiler, grammar, "value 5000")[0] is False


@pytest.mark.slow
def test_a_grammar_of_endless_ways_is_no_burden(compiler):
    """Each mask takes longer than the one before, up to the limit, which ends the text."""
    grammar = compiler.grammar('start: s\ns: s s | "a" | "b" | s s s')
    matcher, tokens = grammar.matcher(), compiler_tokens(compiler, "ab")
    longest = 0.0
    for _ in range(600):
        begin = time.perf_counter()
        matcher.words()
        longest = max(longest, time.perf_counter() - begin)
        if matcher.error() or not matcher.consume(tokens[:1]):
            break
    assert "limits of its grammar" in matcher.error()
    assert longest < 1


@pytest.mark.slow
def test_sampled_texts_match(pair, compiler):
    drafter = build(setting_of("chain"), pair)
    grammar = compiler.json_schema(SCHEMA)
    for text in texts(pair, drafter, grammar, sampling=specjax.Sampling(temperature=1.0)):
        found = json.loads(text)
        assert found.keys() == SCHEMA["properties"].keys()
        assert found["kind"] in ("class", "function")
        assert 0 <= found["size"] <= 999


@pytest.mark.slow
def test_stream_gives_what_generate_gives(pair, compiler):
    prompt = pair.tokenizer(PROMPT).input_ids
    options = {"max_new_tokens": 64, "grammar": compiler.json_schema(SCHEMA)}
    drafter = build(setting_of("chain"), pair)
    whole = specjax.generate(jax.random.key(0), pair.target, drafter, [prompt], **options)
    steps = specjax.stream(jax.random.key(0), pair.target, drafter, [prompt], **options)
    found = [token for step in steps for token in step.tokens[0, : step.count[0]].tolist()]
    assert found == whole.tokens[0, : whole.lengths[0]].tolist()


def test_what_is_no_grammar_or_of_other_rows_is_refused(pair, compiler):
    with pytest.raises(TypeError, match="grammar is a str; it must be a Grammar"):
        texts(pair, None, '{"type": "object"}')
    with pytest.raises(ValueError, match="2 grammars are given for 3 prompts"):
        texts(pair, None, [compiler.json_object()] * 2)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(pair):
    engine = specjax.Engine(pair.target, build(setting_of("chain"), pair), rows=3,
                            max_model_len=512)  # fmt: skip
    pair.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(engine, pair.tokenizer) as running:
        yield running
    engine.close()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=120) as made:
        yield made


def said(client, path: str, **fields) -> str:
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [
        {"role": "user", "content": PROMPT}
    ]}  # fmt: skip
    response = client.post(path, json=asked | {"max_tokens": 120, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA, "grammar": "", "guided_choice": None},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_a_schema_by_any_name(fields, path, client):
    found = json.loads(said(client, path, **fields))
    assert found.keys() == SCHEMA["properties"].keys()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, "[a-c]{4}"),
        ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
        ({"ebnf": 'root ::= "x" [0-9] [0-9]'}, "x[0-9]{2}"),
    ],
)
def test_other_kinds_by_any_name(fields, wanted, client):
    assert re.fullmatch(wanted, said(client, COMPLETIONS, **fields))


def test_a_json_object(client):
    fields = {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 3}
    response = client.post(
        CHAT, json={"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300} | fields
    )
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema",
         "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "f"}}}},
         "response_format.json_schema.schema", "Invalid type: f"),
        ({"guided_json": {"type": "object"}, "regex": "a"}, "regex", "give one"),
        ({"guided_json": "{"}, "guided_json", "refused"),
        ({"guided_regex": "("}, "guided_regex", "refused"),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "not empty"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "dictionary"),
    ],
)  # fmt: skip
def test_refusals(fields, param, message, client):
    response = client.post(COMPLETIONS, json={"prompt": "a"} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_hostile_schema_stops_nobody(client):
    """Nested as deep as a body may be, or huge; each is one 400, or an answer."""
    deep: dict = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": {"anyOf": [deep, {"type": "array", "items": deep}]}}
    hostile = [
        {"guided_regex": "(" * 20000},
        {"guided_regex": "(a|aa)*" * 2000},
        {"guided_regex": "((a{1,500}){1,500}){1,500}"},
        {"guided_json": {"enum": [f"value {n}" for n in range(6000)]}},
        {"guided_json": {"type": "object", "properties": {
            f"k{n}": {"type": "string", "pattern": "(a|b|ab)*c{1,99}"} for n in range(300)
        }}},
        {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
                         "$ref": "#/$defs/a"}},
    ]  # fmt: skip
    for fields in hostile:
        response = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4} | fields)
        assert response.status_code in (200, 400), response.text
    assert said(client, COMPLETIONS, guided_choice=["left", "right"]) in ("left", "right")


def test_the_engine_learns_what_steps_under_a_grammar_take(client, server):
    def steps() -> int:
        return sum(known for *_, known in server.engine._costs.table())

    said(client, COMPLETIONS, response_format=FORMAT)  # its program is there from now on
    before = steps()
    said(client, COMPLETIONS, response_format=FORMAT)
    assert steps() > before


def test_streamed_and_several_choices(client):
    asked = {
        "messages": [{"role": "user", "content": PROMPT}], "response_format": FORMAT, "n": 3,
        "temperature": 1.0, "max_tokens": 160, "stream": True,
    }  # fmt: skip
    found = ["", "", ""]
    with client.stream("POST", CHAT, json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found[choice["index"]] += choice["delta"].get("content") or ""
    for text in found:
        assert json.loads(text).keys() == SCHEMA["properties"].keys()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--regex", "[a-c]{4}"], "[a-c]{4}"),
        (["--choice", "left", "right"], "left|right"),
        (["--schema", "schema.json"], r"[0-9]{1,3}"),
        (["--grammar", "grammar.lark"], "x[0-9]{2}"),
    ],
)
def test_the_command_takes_them(options, wanted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "integer", "minimum": 0, "maximum": 999}')
    (tmp_path / "grammar.lark").write_text('start: "x" /[0-9]{2}/')
    found = answer(capsys, "generate", "x = ", "--json", "--max-new-tokens", "16", *options)
    assert re.fullmatch(wanted, found["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "("], "the regex is refused"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice both say"),
        (["--schema", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_the_command_refuses_in_a_sentence(options, message, capsys):
    assert main(["generate", "x = ", "--max-new-tokens", "4", *options]) == 2
    assert message in capsys.readouterr().err


def fresh_words(grammar, tokens: list[int]) -> np.ndarray:
    """The mask after tokens, by a matcher that was asked for nothing else."""
    matcher = grammar.matcher()
    assert matcher.consume(tokens) == len(tokens)
    return matcher.words()


def test_what_was_drafted_and_not_taken_leaves_no_trace(compiler):
    """llguidance's own way back leaves one: where a mask was looked for after the draft ` "` of
    `{"1":`, and a list or an object came, it let `",` follow in place of `":`.
    """
    grammar = compiler.json_object()
    text = compiler_tokens(compiler, '{"1":')
    drafted, taken = (compiler_tokens(compiler, own) for own in (' "', '{"'))
    row = grammars._Row(grammar.matcher())
    for path in (drafted, taken, drafted):
        (found,) = row.masks(len(text), text, [tuple(path)])
        np.testing.assert_array_equal(found, fresh_words(grammar, text + path))
    (found,) = row.masks(len(text) + len(taken), taken, [()])
    np.testing.assert_array_equal(found, fresh_words(grammar, text + taken))


@pytest.mark.parametrize("schema", [SCHEMA, {"type": "object"}, {"type": "array"}], ids=str)
def test_masks_of_any_tree_are_those_of_its_paths(schema, compiler):
    grammar, drawn = compiler.json_schema(schema), np.random.default_rng(0)
    parts = [
        '{"name": "ab", "size": [12, {"x": null}], "kind": true} ',
        ' "',
        " 1",
        " [",
        '":',
        "{",
    ]
    often = [token for part in parts for token in compiler_tokens(compiler, part)]

    def drawn_after(tokens: list[int]) -> int:
        allowed = np.unpackbits(fresh_words(grammar, tokens).view(np.uint8), bitorder="little")
        own = [token for token in often if allowed[token]] or np.flatnonzero(allowed)
        return int(drawn.choice(own))

    for _ in range(20):
        row, text, new = grammars._Row(grammar.matcher()), list[int](), list[int]()
        while len(text) < 30 and not compiler._end_ids & {*text}:
            paths = [list[int]()]
            for _ in range(4):
                above = paths[drawn.integers(len(paths))]
                token = drawn_after(text + above)
                if token not in compiler._end_ids:
                    paths.append([*above, token])
            found = row.masks(len(text), new, [tuple(path) for path in paths])
            for path, words in zip(paths, found, strict=True):
                np.testing.assert_array_equal(words, fresh_words(grammar, text + path))
            new = paths[drawn.integers(len(paths))]
            new = [*new, drawn_after(text + new)]
            text = text + new


def test_a_text_that_has_left_its_grammar_ends_with_an_error(compiler):
    matcher = compiler.regex("ab").matcher()
    row = grammars._Row(matcher)
    row.masks(1, compiler_tokens(compiler, "x"), [()])
    assert matcher.error() == "a text has left its grammar."


def test_large_grammars_are_forgotten_before_small_ones_are_many(pair):
    compiler = GrammarCompiler(pair.tokenizer, pair.target.config.vocab_size, (0,))

    def compiled(number: int, size: int):
        return compiler.json_schema({"type": "integer", "description": f"{number:{size}}"})

    small = [compiled(number, 10) for number in range(8)]
    assert [compiled(number, 10) for number in range(8)] == small
    large = [weakref.ref(compiled(number, 200_000)) for number in range(6)]  # 5 have a mebibyte
    assert [each() is not None for each in large] == [False, *[True] * 5]
    assert compiled(5, 200_000) is large[5]()
    assert compiled(0, 10) is small[0]  # as it is in use
    forgotten = weakref.ref(small.pop())
    assert forgotten() is None


def test_large_grammars_in_use_are_bounded_and_small_ones_are_not(pair):
    config = pair.target.config
    compiler = GrammarCompiler(
        pair.tokenizer, config.vocab_size, config.eos_ids, max_characters_in_use=20_000
    )

    def compiled(number: int, size: int):
        return compiler.regex(f"{number}" + "a" * (size - 1))

    held = [compiled(number, 6_000) for number in range(3)]
    assert compiled(1, 6_000) is held[1]
    message = "large grammars of 18000 characters are in use; with 5000 more they exceed the 20000"
    with pytest.raises(GrammarsInUseError, match=message):
        compiled(9, 5_000)
    compiled(9, 50)
    for number in range(5):  # what is kept beside what is held makes no room scarce
        del held[0]
        held.append(compiled(number + 3, 6_000))


def test_a_server_has_requests_with_large_grammars_come_again(pair, monkeypatch):
    monkeypatch.setattr(service, "_GRAMMARS_IN_USE", 12_000)
    engine = ScriptedEngine()
    with serving(engine, pair.tokenizer) as server:

        def ask(number: int, size: int) -> httpx.Response:
            body = {"prompt": "x", "guided_regex": f"{number}" + "a" * size}
            return httpx.post(f"{server.url}/v1/completions", json=body)

        assert [ask(number, 5_000).status_code for number in range(2)] == [200, 200]
        refused = ask(2, 5_000)  # this engine never lets go of its requests
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "guided_regex")
        assert int(refused.headers["retry-after"]) > 0
        assert ask(3, 50).status_code == 200
        server.engine.requests.clear()
