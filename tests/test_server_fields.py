"""Fields beside those of OpenAI: ignored and named, refused, honoured; histories of agents."""

import dataclasses
import json
import logging

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specjax.server import unsupported
from tests.scripted_engine import ScriptedEngine, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
HEADER = "x-ignored-fields"
BODIES = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": USER},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and a special one that begins every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: n for n, name in enumerate(["<s>", *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(ready=True, max_model_len=16384), tokenizer) as running:
        yield running


@pytest.fixture
def client(server, tokenizer):
    tokenizer.chat_template = "{{ messages | tojson }}"
    server.engine.requests.clear()
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def sent(client, path, status=200, **fields) -> httpx.Response:
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == status, response.text
    return response


def rendered(server, tokenizer) -> str:
    """The text of the last request's prompt."""
    return tokenizer.decode(server.engine.requests[-1].prompt)


# Unknown fields.


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named(client, server, caplog, path):
    name = f"colour_of{path.replace('/', '_')}"
    with caplog.at_level(logging.WARNING, "specjax.server.fields"):
        responses = [sent(client, path, **{name: 1, "seeds": [2], "null": None}) for _ in range(2)]
    assert [each.headers[HEADER] for each in responses] == [f"{name}, seeds"] * 2
    lines = [each for each in caplog.records if each.fields["ignored_field"] == name]
    assert len(lines) == 1
    assert HEADER not in sent(client, path).headers
    if path.startswith("/v1"):
        streamed = sent(client, path, stream=True, stream_options={"colour": 1})
        assert streamed.headers[HEADER] == "stream_options.colour"
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = sent(client, path, 400, colour=1, temperature=1e39)
        assert refused.headers[HEADER] == "colour"


def test_unknown_fields_of_messages_are_named_once(client):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "function": {"name": "f", "arguments": "{}", "strict": True}, "extra": 1}
    messages = [
        {"role": "user", "content": [part, part], "id": "m1", "name": "Ann", "opts": {}},
        {"role": "user", "content": "x", "opts": {}},
        {"role": "assistant", "tool_calls": [call, call]},
    ]
    names = sent(client, CHAT, messages=messages).headers[HEADER].split(", ")
    assert names == [
        "messages[].id", "messages[].opts", "messages[].content[].cache_control",
        "messages[].tool_calls[].extra", "messages[].tool_calls[].function.strict",
    ]  # fmt: skip


def test_names_in_logs_and_headers_are_bounded_and_plain(client, server, caplog):
    with caplog.at_level(logging.WARNING, "specjax.server.fields"):
        for turn in range(40):
            fields: dict = {f"field{turn}_{n}": 0 for n in range(20)}
            names = sent(client, CHAT, **fields).headers[HEADER].split(", ")
            assert len(names) == 17
            assert names[-1] == "..."
    assert 200 < len(caplog.records) <= 257
    odd = sent(client, CHAT, **{"a\r\nSet-Cookie: b, c": 1, "é你": 2, "x" * 10**6: 3})
    assert odd.headers[HEADER] == f"a??Set-Cookie??b??c, ??, {'x' * 64}..."
    assert "set-cookie" not in odd.headers


def test_strict_fields_are_refused(client, server, monkeypatch):
    service = server.app.state.service
    strict = dataclasses.replace(service.options, strict_fields=True)
    monkeypatch.setattr(service, "options", strict)
    for fields, param, said in (
        ({"tempreature": 1}, "tempreature", "there is temperature"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "no field"),
        ({"x" * 10**6: 1}, "x" * 80 + "...", "no field"),
    ):
        error = sent(client, CHAT, 400, **fields).json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        assert len(error["message"]) < 200
    messages = [*USER, {"role": "user", "content": "a", "opts": {}}]
    error = sent(client, CHAT, 400, messages=messages).json()["error"]
    assert error["param"] == "messages[1].opts"
    sent(client, CHAT, user={"a": 1}, mirostat=0, tools=None)


# Known fields that are not supported.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_would_change_the_text_are_refused(client, server, path):
    table = unsupported.CHAT if path == CHAT else unsupported.COMPLETION
    for turn in range(3):
        values = {n: (None, *known.values)[turn : turn + 1] for n, known in table.items()}
        neutral = {name: value[0] for name, value in values.items() if value}
        assert HEADER not in sent(client, path, **neutral | BODIES[path]).headers
    own = table if path == CHAT else {*table} - {*unsupported.GENERATION}
    for name in own:
        error = sent(client, path, 400, **{name: [17]}).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not supported here: should be ")
        assert error["message"].endswith(".")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"repeat_penalty": 1.1}, "repeat_penalty", "Give repetition_penalty."),
        ({"n_predict": 5}, "n_predict", "Give max_tokens."),
        ({"mirostat": 2}, "mirostat", "should be 0 or null; it is 2"),
        ({"mirostat": 0.0, "mirostat_tau": 5.0}, None, ""),
        ({"typical_p": True}, "typical_p", "it is true"),
        ({"typical_p": 1.0}, None, ""),
        ({"do_sample": False}, "do_sample", "temperature 0"),
        ({"format": "json"}, "format", "Give response_format."),
        ({"structural_tag": {"a": 1}}, "structural_tag", "Give response_format."),
        ({"structured_outputs": {"json": None}, "guided_json": {}}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
        ({"length_penalty": 2.0, "early_stopping": True}, None, ""),
        ({"options": {"temperature": 0}}, "options", "by themselves"),
        ({"options": {"num_ctx": 4096, "seed": None}}, None, ""),
        ({"repeat_last_n": 64}, None, ""),
        ({"max_tokens": -2}, "max_tokens", "should be -1 or greater than or equal to 1"),
        ({"reasoning": {"exclude": True}}, None, ""),
        ({"reasoning": {"effort": "low"}}, "reasoning", "Give reasoning_effort."),
        ({"repeat_last_n": 64, "presence_penalty": 1}, "repeat_last_n", "should be -1; it is 64"),
        ({"repeat_last_n": -1, "presence_penalty": 1}, None, ""),
        ({"store": True, "service_tier": "flex", "metadata": {"a": 1}, "priority": 3}, None, ""),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "web"}], "tool_choice": "auto"}, "tools[0].type", '"function"'),
        ({"functions": [{}]}, "functions", "Give tools."),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "needs tools"),
        ({"messages": [USER[0] | {"prefix": True}]}, "messages[0].prefix", "should be false"),
        ({"messages": [USER[0] | {"images": []}]}, None, ""),
    ],
)  # fmt: skip
def test_what_others_honour(client, fields, param, said):
    response = sent(client, CHAT, 200 if param is None else 400, **fields)
    if param is not None:
        error = response.json()["error"]
        assert error["param"] == param
        assert said in error["message"]


def test_a_seed_of_minus_one_is_none(client, server):
    for seed, expected in ((-1, None), (-2, -2), (0, 0), (None, None)):
        sent(client, COMPLETIONS, seed=seed)
        assert server.engine.requests[-1].seed == expected


def test_integers_may_be_floats(client, server):
    asked: dict = {"max_tokens": 7.0, "seed": 5.0, "top_k": 40.0, "n": 1.0}
    for path in (COMPLETIONS, CHAT):
        sent(client, path, **asked)
        made = server.engine.requests[-1]
        assert (made.max_new_tokens, made.seed, made.top_k) == (7, 5, 40)
        assert sent(client, path, 400, max_tokens=7.5).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")],
)
def test_a_limit_of_minus_one_takes_all_the_room(client, server, path, name):
    sent(client, path, **{name: -1})
    made = server.engine.requests[-1]
    assert len(made.prompt) + made.max_new_tokens == server.engine.max_model_len


# What the template and the tokenizer get.


def test_special_tokens_are_added_where_asked_for(client, server):
    for path, asked, expected in (
        (COMPLETIONS, None, True), (COMPLETIONS, False, False), (COMPLETIONS, True, True),
        (CHAT, None, False), (CHAT, False, False), (CHAT, True, True),
    ):  # fmt: skip
        sent(client, path, add_special_tokens=asked)
        assert (server.engine.requests[-1].prompt[0] == 0) == expected
        body = {"messages": USER} if path == CHAT else {"prompt": "a"}
        made = client.post("/tokenize", json=body | {"add_special_tokens": asked}).json()
        assert made["tokens"] == list(server.engine.requests[-1].prompt)


def test_variables_of_the_template(client, server, tokenizer):
    tokenizer.chat_template = (
        "{{ reasoning_effort }}|{{ enable_thinking }}{{ tools | tojson }}|{{ documents | tojson }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    given = {
        "reasoning_effort": "low",
        "enable_thinking": False,
        "tools": tools,
        "documents": [{"title": "t"}],
    }
    expected = f'low|False{json.dumps(tools)}|[{{"title": "t"}}]'
    sent(client, CHAT, tool_choice="none", **given)
    assert rendered(server, tokenizer) == expected
    made = client.post("/tokenize", json={"messages": USER} | given).json()
    assert tokenizer.decode(made["tokens"]) == expected
    sent(client, CHAT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert rendered(server, tokenizer).startswith("high|")


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ ' for ' + m.tool_call_id if m.tool_call_id else '' }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]},
         'assistant:[c1 f {"city": "Paris"}];'),
        ({"role": "assistant", "tool_calls": [CALL, CALL]},
         'assistant:[c1 f {"city": "Paris"}][c1 f {"city": "Paris"}];'),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]},
         'assistant:[c1 f {"city": "Paris"}];'),
        ({"role": "assistant", "content": [], "tool_calls": [CALL]},
         'assistant:[c1 f {"city": "Paris"}];'),
        ({"role": "assistant", "content": "one", "tool_calls": []}, "assistant:one;"),
        ({"role": "assistant", "content": None}, "assistant:;"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "assistant:no;"),
        ({"role": "tool", "tool_call_id": "c1", "content": "22"}, "tool:22 for c1;"),
        ({"role": "tool", "content": [{"type": "text", "text": "22"}, "C"]}, "tool:22\nC;"),
        ({"role": "tool", "tool_call_id": "c1", "content": None}, "tool: for c1;"),
        ({"role": "function", "name": "f", "content": "22"}, "function:22;"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         "assistant:no;"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "user:a;"),
        ({"role": "developer", "content": "a"}, "developer:a;"),
    ],
)  # fmt: skip
def test_histories_of_agents(client, server, tokenizer, message, text):
    tokenizer.chat_template = TEMPLATE
    sent(client, CHAT, messages=[message])
    assert rendered(server, tokenizer) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ("[1]", "[1]"),
        ("Paris", "Paris"),
        ('{"a": 1', '{"a": 1'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 10**3, "[" * 10**3),
        ("1" * 4400, "1" * 4400),
    ],
)
def test_arguments_become_objects(client, server, tokenizer, arguments, expected):
    function = {"name": "f", "arguments": arguments}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    sent(client, CHAT, messages=[called, {"role": "assistant", "function_call": function}])
    first, second = json.loads(rendered(server, tokenizer))
    assert first["tool_calls"] == [
        {"type": "function", "function": function | {"arguments": expected}}
    ]
    assert second["function_call"] == function | {"arguments": expected}


@pytest.mark.parametrize(
    ("template", "as_text"),
    [
        ("{{ 'x' + call['function']['arguments'] + 'y' }}", True),
        ("x{{- call.function.arguments -}}y", True),
        ("x{{ call.function.arguments ~ 'y' }}", True),
        ("x{{ call.function.arguments | tojson }}y", False),
        ("{% set a = call.function['arguments'] %}x{{ a | tojson }}y", False),
        ("x{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}"
         "{% else %}{{ call.function.arguments }}{% endif %}y", False),
    ],
)  # fmt: skip
def test_arguments_are_what_the_template_expects(client, server, tokenizer, template, as_text):
    """Some write a text of JSON as it is: an object would come out as Python writes it."""
    tokenizer.chat_template = "{% set call = messages[0].tool_calls[0] %}" + template
    for given in ('{"a":  1}', {"a": 1}):
        call = {"id": "1", "function": {"name": "f", "arguments": given}}
        sent(client, CHAT, messages=[{"role": "assistant", "tool_calls": [call]}])
        written = given if as_text and isinstance(given, str) else '{"a": 1}'
        assert rendered(server, tokenizer) == f"x{written}y"


def test_thoughts_reach_the_template(client, server, tokenizer):
    thoughts: dict = {"reasoning_content": "hm", "reasoning": "ha", "thinking": "ho", "name": "n"}
    message = {"role": "assistant", "content": "a"} | thoughts
    sent(client, CHAT, messages=[message])
    assert json.loads(rendered(server, tokenizer)) == [message]
    odd = {"reasoning": {"effort": "low"}, "thinking": ["a"], "reasoning_details": [{}]}
    sent(client, CHAT, messages=[{"role": "assistant", "content": "a"} | odd])
    assert json.loads(rendered(server, tokenizer)) == [{"role": "assistant", "content": "a"}]
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "reasoning", "text": "ha"},
        {"type": "text", "text": "a"},
    ]
    sent(client, CHAT, messages=[{"role": "assistant", "content": parts}])
    (made,) = json.loads(rendered(server, tokenizer))
    assert (made["content"], made["reasoning_content"]) == ("a", "hm\nha")


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "user", "content": None}, "messages[0].content", "missing"),
        ({"role": "system"}, "messages[0].content", "missing"),
        ({"role": "user", "content": []}, "messages[0].content", "missing"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[0].content[0].type", '"image_url"'),
        ({"role": "user", "content": ["a", {"type": "input_audio"}]},
         "messages[0].content[1].type", '"input_audio"'),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "missing"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
         "messages[0].tool_calls[0].type", '"custom"'),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
         "messages[0].tool_calls[0].function.name", "missing"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
         "messages[0].tool_calls[0].function.arguments", "it is 3"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio", "null"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(client, message, param, said):
    error = sent(client, CHAT, 400, messages=[message]).json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert error["message"].endswith(".")
