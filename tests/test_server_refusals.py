"""What OpenAI's API refuses, how it says so, and what it takes because it changes nothing."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.server.protocol import (
    REQUESTS,
    ChatCompletionRequest,
    CompletionRequest,
    Message,
)
from tests.scripted_engine import ScriptedEngine, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED / "target")


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(), tokenizer, max_prompts=3, max_choices=4) as running:
        yield running


@pytest.fixture
def engine(server, tokenizer):
    """The engine, as it was before any test."""
    fresh = vars(ScriptedEngine([[*tokenizer("def f(x):").input_ids, 0]], ready=True))
    vars(server.engine).update(fresh)
    tokenizer.chat_template = TEMPLATE
    return server.engine


@pytest.fixture(scope="module")
def connections(server):
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


@pytest.fixture
def client(connections, engine):
    return connections


def streamed(client, path, body) -> list[dict]:
    """The objects of a stream."""
    response = client.post(path, json=body | {"stream": True})
    lines = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def error_of(client, status, path=COMPLETIONS, **fields) -> dict:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    response = client.post(path, json=body | fields)
    assert response.status_code == status, response.text
    return response.json()["error"]


NEUTRAL = {
    COMPLETIONS: {
        "suffix": None, "best_of": 2, "n": 2, "logit_bias": {}, "stop": [], "min_tokens": 0,
        "use_beam_search": False, "skip_special_tokens": True, "bad_words": [], "stream": False,
        "prompt_logprobs": None, "model": "scripted", "user": "x",
    },
    CHAT: {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None,
        "parallel_tool_calls": True, "modalities": ["text"], "store": False, "metadata": {"a": "b"},
        "reasoning_effort": None, "service_tier": "auto", "max_tokens": 5, "stop": None,
        "max_completion_tokens": 5, "prompt_cache_key": "k", "stream_options": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", NEUTRAL)
def test_values_that_change_nothing_are_taken(client, path):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    for fields in (NEUTRAL[path], *({name: value} for name, value in NEUTRAL[path].items())):
        response = client.post(path, json={"n": fields.get("best_of")} | body | fields)
        assert response.status_code == 200, response.text
    model = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    nulls = {n: None for n, field in model.model_fields.items() if not field.is_required()}
    assert client.post(path, json=nulls | body).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
        (COMPLETIONS, {"best_of": 2}, "best_of", "n, 1"),
        (COMPLETIONS, {"temperature": -0.5}, "temperature", "-0.5"),
        (COMPLETIONS, {"temperature": "1"}, "temperature", "number"),
        (COMPLETIONS, {"temperature": 1e39}, "temperature", "float32"),
        (COMPLETIONS, {"temperature": 10**400}, "temperature", "number"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"top_k": 1.5}, "top_k", "integer"),
        (COMPLETIONS, {"seed": 2**63}, "seed", "less than"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens", "integer"),
        (COMPLETIONS, {"n": 0}, "n", "1"),
        (COMPLETIONS, {"n": 5}, "n", "at most 4"),
        (COMPLETIONS, {"n": 10**400}, "n", "less than"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "17"),
        (COMPLETIONS, {"stop": "a" * 257}, "stop", "257"),
        (COMPLETIONS, {"stop": [""]}, "stop[0]", "1 character"),
        (COMPLETIONS, {"stop": [1]}, "stop[0]", "string"),
        (COMPLETIONS, {"stop_token_ids": [4096]}, "stop_token_ids", "4096"),
        (COMPLETIONS, {"logit_bias": {"4096": 1}}, "logit_bias", "4096"),
        (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias.-1", "pattern"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias.1", "101"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options", "stream"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "1"),
        (COMPLETIONS, {"prompt": []}, "prompt", "1"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt[0]", "1"),
        (COMPLETIONS, {"prompt": [4096]}, "prompt", "4096"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]", "0"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt[1]", "list"),
        (COMPLETIONS, {"prompt": [10**4000]}, "prompt[0]", "less than"),
        (COMPLETIONS, {"max_tokens": 2**53 - 1}, "prompt", "context"),
        (COMPLETIONS, {"prompt": ["a"] * 4}, "prompt", "at most 3"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "an object of 1"),
        (COMPLETIONS, {"prompt": None}, "prompt", "null"),
        (COMPLETIONS, {"messages": USER}, "messages", "/v1/chat/completions"),
        (COMPLETIONS, {"echo": 1}, "echo", "echo: should be a valid boolean"),
        (CHAT, {"tools": [{}]}, "tools[0].function", "missing"),
        (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "missing"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": 3}}]},
            "tools[0].function.parameters",
            "should be an object; it is 3",
        ),
        (CHAT, {"tools": [{"function": {"name": "f"}}] * 129}, "tools", "it may have 128"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "any"},
            "tool_choice",
            '"required"',
        ),
        (
            CHAT,
            {
                "tools": [{"function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
            "none of tools",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (CHAT, {"reasoning_effort": 1}, "reasoning_effort", "string"),
        (CHAT, {"echo": True}, "echo", "not supported"),
        (CHAT, {"echo": 0}, "echo", "false or null; it is 0"),
        (CHAT, {"min_tokens": False}, "min_tokens", "0 or null; it is false"),
        (CHAT, {"messages": []}, "messages", "1 item"),
        (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "bot"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (CHAT, {"messages": [{"role": "developer", "content": "a"}]}, "messages", "no developer"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "4"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "1"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "no"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "no"),
        (CHAT, {"chat_template_kwargs": {"mood": []}}, None, ""),
    ],
)
def test_refused_fields_are_named(client, engine, path, fields, param, said):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    response = client.post(path, content=json.dumps(body | fields), headers=JSON)
    if param is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]
    assert error["message"].endswith(".")
    assert not engine.requests


def test_a_chat_without_a_template(client, tokenizer):
    tokenizer.chat_template = None
    assert "no chat template" in error_of(client, 400, CHAT)["message"]


JSON = {"content-type": "application/json"}
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "too large a number": b'{"prompt": "a", "temperature": 1e999}',
    "too many digits": b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
    "a field twice": b'{"prompt": "a", "prompt": "b"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "half a pair in a name": b'{"prompt": "a", "\\udc00": 1}',
    "half a pair in a stop": b'{"prompt": "a", "stop": ["\\ud83d"]}',
    "no UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "a control character": b'{"prompt": "a\nb"}',
    "many levels": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many levels of objects": b'{"prompt": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "many fields": b"{" + b",".join(b'"f%d": 1' % n for n in range(5000)) + b"}",
    "many wrong items": b'{"prompt": "a", "stop": [' + b"1," * 100_000 + b"1]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(client, engine, name):
    paths = (COMPLETIONS, CHAT, "/tokenize", "/detokenize")
    for path in paths if name != "many wrong items" else (COMPLETIONS, CHAT):
        response = client.post(path, content=BODIES[name], headers=JSON)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 400
    assert not engine.requests


def test_surrogate_pairs_are_characters(client, engine, tokenizer):
    body = b'{"prompt": "\\ud83d\\ude00"}'
    assert client.post(COMPLETIONS, content=body, headers=JSON).status_code == 200
    assert list(engine.requests[-1].prompt) == tokenizer("😀").input_ids


def test_other_statuses_have_the_same_shape(client):
    missing = client.get("/v1/nothing")
    wrong_method = client.get(COMPLETIONS)
    no_json = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text"})
    other_model = client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-4"})
    responses = [missing, wrong_method, no_json, other_model, client.get("/v1/models/gpt-4")]
    assert [each.status_code for each in responses] == [404, 405, 415, 404, 404]
    for each in responses:
        assert set(each.json()["error"]) == {"message", "type", "param", "code"}
    assert wrong_method.headers["allow"] == "POST"
    assert other_model.json()["error"]["code"] == "model_not_found"


def test_a_full_queue(client, engine):
    engine.room, engine.endless, engine.delay = 3, True, 0.001
    response = client.post(COMPLETIONS, json={"prompt": "a", "n": 4})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert not engine.running
    assert not engine.requests


def test_an_engine_that_is_not_ready_or_takes_nothing(client, engine):
    engine.ready = False
    responses = [client.get("/ready"), client.get("/v1/models"), client.post(CHAT, json={})]
    engine.ready = True
    engine.stop_accepting()
    responses.append(client.post(COMPLETIONS, json={"prompt": "a"}))
    assert [response.status_code for response in responses] == [503] * 4
    assert all("retry-after" in response.headers for response in responses)
    assert client.get("/health").json() == {"status": "ready"}


def test_an_engine_that_fails_on_the_way(client, engine):
    engine.trouble = "error"
    assert error_of(client, 500)["code"] == "engine_failed"
    *parts, last = streamed(client, COMPLETIONS, {"prompt": "a"})
    assert "".join(part["choices"][0]["text"] for part in parts)
    assert last["error"]["type"] == "server_error"
    engine.trouble = "exception"
    assert error_of(client, 500)["message"] == "The server failed: RuntimeError."
    (last,) = streamed(client, CHAT, {"messages": USER})
    assert last["error"]["message"] == "The server failed: RuntimeError."
    assert not engine.running


# The documentation.


DOCUMENTS = Path(__file__).parents[1] / "docs"
DOCUMENT = (DOCUMENTS / "serving.md").read_text()


def shown_by(command: str) -> str:
    """What a line of a shell prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_documentations_examples(server, engine, client, capsys):
    (example,) = re.findall(r"```py\n(.*?)```", DOCUMENT, re.DOTALL)
    served = example.replace("http://127.0.0.1:8000", server.url).replace("bundled", "scripted")
    exec(compile(served, "serving.md", "exec"), {})
    assert capsys.readouterr().out == f"def f(x): {len(engine.replies[0])}\n"
    commands = re.findall(r"```sh\n(curl .*?)```", DOCUMENT, re.DOTALL)
    whole, events = (shown_by(each.replace(":8000", f":{server.port}")) for each in commands)
    assert json.loads(whole)["choices"][0]["text"] == "def f(x):"
    assert events.endswith("data: [DONE]\n\n")
    assert events.count("data: {") > 1
    (shown,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    assert json.loads(shown)["error"] == error_of(client, 400, temperature=-1)


def test_the_documentation_names_every_field_status_and_metric(client):
    for model in REQUESTS.values():
        for name in (*model.model_fields, *model.unsupported, *Message.unsupported):
            assert f"`{name}`" in DOCUMENT
    paths = client.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        assert path.split("{")[0] in DOCUMENT
        for operation in operations.values():
            for status in operation["responses"]:
                assert status in DOCUMENT
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created"):
            assert f"`{line.split()[2].split(':')[1]}`" in DOCUMENT


def test_the_dashboard_shows_metrics_that_there_are(client):
    board = json.loads((DOCUMENTS / "serving-dashboard.json").read_text())
    shown = {each["expr"] for panel in board["panels"] for each in panel["targets"]}
    named = {name for expression in shown for name in re.findall(r"vllm:\w+", expression)}
    there = client.get("/metrics").text
    assert len(named) > 12
    for name in named:
        assert f"{name}{{" in there or f"TYPE {name.removesuffix('_bucket')} histogram" in there
    for each in board["templating"]["list"]:
        if each["type"] == "query":
            assert "vllm:num_requests_running" in each["query"]
