"""OpenAI's API over real sockets, in front of an engine that gives what it is told to."""

import dataclasses
import json
import logging
import socket

import httpx
import pytest
from pydantic import TypeAdapter

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.engine.request import Request
from specjax.server.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ModelList,
    TokenizeResponse,
)
from tests.scripted_engine import ScriptedEngine, serving, until

TEXT = "def f(x):\n    return 'é你👩‍👩‍👧'\n\n\nclass A: pass\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{{ m.role }}{{ ' ' + m.name if m.name else '' }}: {{ m.content }}\n{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}assistant:{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED / "target")


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(), tokenizer, max_prompts=3, max_choices=4) as running:
        yield running


@pytest.fixture
def engine(server, tokenizer):
    """The engine, as it was before any test; it replies `TEXT`."""
    fresh = vars(ScriptedEngine([[*tokenizer(TEXT).input_ids, 0]], ready=True))
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


def completion(client, prompt="a b", status=200, **more):
    response = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 200} | more)
    assert response.status_code == status, response.text
    made = response.json()
    return TypeAdapter(CompletionResponse).validate_python(made) if status == 200 else made["error"]


def chat(client, messages=USER, status=200, **more):
    response = client.post(CHAT, json={"messages": messages} | more)
    assert response.status_code == status, response.text
    made = response.json()
    shape = TypeAdapter(ChatCompletionResponse)
    return shape.validate_python(made) if status == 200 else made["error"]


def events(response: httpx.Response) -> list[dict]:
    """The objects of a stream, which ends as it must."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *lines, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# What is given.


def test_a_completion(client, tokenizer):
    made = completion(client)
    assert made["id"].startswith("cmpl-")
    assert [choice["text"] for choice in made["choices"]] == [TEXT]
    count = len(tokenizer(TEXT).input_ids) + 1
    assert made["usage"] == {
        "prompt_tokens": len(tokenizer("a b").input_ids),
        "completion_tokens": count,
        "total_tokens": len(tokenizer("a b").input_ids) + count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["system_fingerprint"] is None
    found = made["metrics"]["speculative_decoding"]
    steps = found["num_spec_steps"]
    assert sum(found["acceptance_histogram"]) == steps
    assert found["mean_acceptance_length"] == pytest.approx(count / steps)
    assert completion(client, max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_a_chat(client, engine, tokenizer):
    made = chat(client, [{"role": "system", "content": "s"}, *USER])
    assert made["id"].startswith("chatcmpl-")
    assert made["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    ids = tokenizer("system: s\nuser: hi\nassistant:").input_ids
    assert list(engine.requests[-1].prompt) == ids
    assert engine.requests[-1].max_new_tokens == engine.max_model_len - len(ids)


def test_fields_that_are_absent_or_null_take_the_servers_defaults(
    client, engine, tokenizer, server, monkeypatch
):
    service = server.app.state.service
    defaults = {"temperature": 0.2, "top_p": 0.9, "top_k": 10**9, "repetition_penalty": 1.1,
                "min_p": 0.01, "max_tokens": 7}  # fmt: skip
    options = dataclasses.replace(service.options, defaults=defaults)
    monkeypatch.setattr(service, "options", options)

    def taken(**body) -> list[float]:
        chat(client, **body)
        made = engine.requests[-1]
        return [made.temperature, made.top_p, made.top_k, made.repetition_penalty, made.min_p,
                made.max_new_tokens]  # fmt: skip

    everything = [0.2, 0.9, engine.vocab_size, 1.1, 0.01, 7]
    assert taken() == everything
    assert taken(**dict.fromkeys(defaults)) == everything
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1, "min_p": 0}
    assert taken(**own, max_completion_tokens=9) == [0, 1, 0, 1, 0, 9]
    assert client.post(COMPLETIONS, json={"prompt": "a b"}).status_code == 200
    assert engine.requests[-1].max_new_tokens == 7


def test_messages_and_variables_reach_the_template(client, engine, tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
    ]
    chat(client, messages, chat_template_kwargs={"mood": "glad "})
    assert tokenizer.decode(engine.requests[-1].prompt) == (
        "user Ann: one\ntwo\nassistant: \nglad assistant:"
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"logprobs": 3},
        {"logprobs": 0, "echo": True, "n": 2},
        {"echo": True, "prompt": ["a", "b c"]},
        {"stop": ["\n    ret", "x"]},
        {"stop": ["\n\n\nclass", "你👩‍👩"], "logprobs": 1, "n": 2},
        {"max_tokens": 5, "stop": ["never"]},
    ],
)
def test_a_stream_is_the_whole_in_parts(client, engine, more):
    engine.delay, engine.replies = 0.001, [engine.replies[0], engine.replies[0][3:]]
    whole = completion(client, **more)
    body = {"prompt": "a b", "max_tokens": 200, "stream": True} | more
    body["stream_options"] = {"include_usage": True}
    *parts, last = events(client.post(COMPLETIONS, json=body))
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    assert set(last["metrics"]) == {"speculative_decoding"}
    for part in parts:
        TypeAdapter(CompletionResponse).validate_python(part)
        assert part["usage"] is None
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert (mine[-1]["text"], mine[-1]["logprobs"]) == ("", None)
        if choice["logprobs"] is None:
            assert {part["logprobs"] for part in mine} == {None}
        else:
            known = [part["logprobs"] for part in mine if part["logprobs"]]
            for name, values in choice["logprobs"].items():
                assert [each for part in known for each in part[name]] == values


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}])
def test_a_chats_stream_is_the_whole_in_parts(client, engine, more):
    engine.delay = 0.001
    whole = chat(client, **more)
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}} | more
    *parts, last = events(client.post(CHAT, json=body))
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (
            len(mine) - 1
        )
        content = "".join(part["delta"].get("content", "") for part in mine)
        assert content == choice["message"]["content"]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["stop"]
        if choice["logprobs"] is not None:
            given = [e for part in mine if part["logprobs"] for e in part["logprobs"]["content"]]
            assert given == choice["logprobs"]["content"]
    for part in parts:
        TypeAdapter(ChatCompletionChunk).validate_python(part)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_of_one_step_is_ended_by_an_event_of_its_own(client, engine, tokenizer, path):
    """Clients that read no text of the event with the reason lose none."""
    text = "def f("
    engine.replies, engine.sizes = [[*tokenizer(text).input_ids, 0]], (8,)
    asked = {"messages": USER} if path == CHAT else {"prompt": "a b"}
    parts = [
        each["choices"][0] for each in events(client.post(path, json=asked | {"stream": True}))
    ]
    if path == CHAT:
        deltas = [each["delta"] for each in parts]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": text}, {}]
    else:
        assert [each["text"] for each in parts] == [text, ""]
    assert [each["finish_reason"] for each in parts] == [None] * (len(parts) - 1) + ["stop"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_waits_sends_comments(server, client, engine, monkeypatch, path):
    """Proxies close connections on which nothing comes for a minute."""
    options = dataclasses.replace(server.app.state.service.options, idle_seconds=0.02)
    monkeypatch.setattr(server.app.state.service, "options", options)
    engine.first_delay = 0.2
    asked = {"messages": USER} if path == CHAT else {"prompt": "a b"}
    response = client.post(path, json=asked | {"stream": True})
    lines = response.text.split("\n\n")
    assert lines[:3] == [": waiting"] * 3
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_counts_may_come_with_each_event(client, engine, path):
    engine.delay, engine.sizes = 0.02, (3,)
    asked = {"messages": USER} if path == CHAT else {"prompt": "a b"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = asked | {"stream": True, "stream_options": options, "max_tokens": 12}
    *parts, last = events(client.post(path, json=body))
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == last["usage"]["completion_tokens"]
    alone = body | {"stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in part for part in events(client.post(path, json=alone)))


def test_an_event_holds_all_tokens_of_a_step(client, engine):
    engine.delay, engine.sizes = 0.02, (4,)
    parts = events(client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "logprobs": 0}))
    *parts, end = [part["choices"][0]["logprobs"] for part in parts]
    assert [len(part["tokens"]) for part in parts] == [4, 4, 4, 4]
    assert end is None


def test_a_stop_string_ends_text_tokens_and_row(client, engine, tokenizer):
    engine.endless, engine.delay = True, 0.001
    made = completion(client, stop="\nclass A", logprobs=1, max_tokens=400)
    (choice,) = made["choices"]
    assert choice["text"] == TEXT[: TEXT.index("\nclass A")]
    assert choice["finish_reason"] == "stop"
    count = made["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["tokens"]) == count
    kept = tokenizer.decode(list(engine.replies[0])[:count])
    assert kept.endswith("A")
    assert "\nclass A" in kept
    assert not engine.running
    assert engine.aborted == 1


def test_an_end_token_has_no_text(client, engine, tokenizer):
    engine.replies = [tokenizer("one two").input_ids]
    first = tokenizer.decode(engine.replies[0][:-1])
    assert completion(client)["choices"][0]["text"] == first


def test_echo(client, engine, tokenizer):
    prompt = "def é(x):"
    ids = tokenizer(prompt).input_ids
    made = completion(client, prompt, echo=True, max_tokens=0, logprobs=2)
    (choice,) = made["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    known = choice["logprobs"]
    assert known["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1)
    assert known["top_logprobs"][0] is None
    assert len(known["top_logprobs"][1]) >= 2
    assert [prompt[offset:].startswith(token) for token, offset in
            zip(known["tokens"], known["text_offset"], strict=True) if "bytes" not in token
            ] == [True] * (len(ids) - 2)  # fmt: skip
    assert completion(client, ids, echo=True)["choices"][0]["text"] == prompt + TEXT
    assert completion(client, prompt, echo=True, max_tokens=0)["choices"][0]["text"] == prompt
    assert made["metrics"] == {"speculative_decoding": None}
    half = tokenizer("é").input_ids[:1]
    engine.replies = [[*tokenizer("é").input_ids[1:], 0]]
    assert completion(client, half, echo=True)["choices"][0]["text"] == "é"
    assert completion(client, half)["choices"][0]["text"] == "é"


def test_prompts_and_choices_have_indices_in_order(client, engine, tokenizer):
    replies = ["one", "two"]
    engine.replies = [[*tokenizer(reply).input_ids, 0] for reply in replies]
    engine.delay = 0.002
    made = completion(client, ["a b", "c d e"], n=2)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in made["choices"]] == replies * 2
    prompts = sum(len(tokenizer(prompt).input_ids) for prompt in ("a b", "c d e"))
    assert made["usage"]["prompt_tokens"] == prompts
    assert [request.choice for request in engine.requests] == [0, 1, 0, 1]
    assert len(completion(client, [[1, 2], [3]])["choices"]) == 2


def test_all_that_is_asked_for_reaches_the_engine(client, engine):
    asked = {
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": -1.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.25, "seed": -3,
        "stop_token_ids": [7, 8], "ignore_eos": True,
    }  # fmt: skip
    completion(client, [1, 2], **asked, top_k=2**52, max_tokens=9, logit_bias={"5": -100, "6": 1})
    expected = Request(
        prompt=[1, 2], max_new_tokens=9, top_k=4096, logit_bias={5: -100.0, 6: 1.0}, **asked
    )
    assert engine.requests[-1] == expected
    completion(client, [1, 2], max_tokens=None, top_k=-1, user="me", temperature=None)
    assert engine.requests[-1] == Request(prompt=[1, 2], max_new_tokens=16, temperature=1.0)
    chat(client, max_completion_tokens=3, logprobs=True, top_logprobs=20)
    assert (engine.requests[-1].max_new_tokens, engine.requests[-1].logprobs) == (3, 20)


def test_a_context_is_used_up_to_its_end(client, engine):
    completion(client, [1] * 511, max_tokens=None)
    assert engine.requests[-1].max_new_tokens == 1
    completion(client, [1] * 500, max_tokens=12)
    error = completion(client, [1] * 500, 400, max_tokens=13)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "513" in error["message"]
    assert "512" in error["message"]
    assert chat(client, [{"role": "user", "content": "a b" * 900}], 400)["param"] == "messages"


# Other routes.


def test_tokenize_and_detokenize(client, tokenizer, engine):
    ids = tokenizer(TEXT).input_ids
    made = client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    TypeAdapter(TokenizeResponse).validate_python(made)
    names = tokenizer.convert_ids_to_tokens(ids)
    assert made == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": names}
    text = client.post("/detokenize", json={"tokens": [*ids, 0]}).json()
    TypeAdapter(DetokenizeResponse).validate_python(text)
    assert text == {"prompt": TEXT + "<|endoftext|>"}
    long = client.post("/tokenize", json={"prompt": TEXT * 500}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": long}).json()["prompt"] == TEXT * 500
    for extra, expected in ({}, "user: hi\nassistant:"), (
        {"add_generation_prompt": False, "chat_template_kwargs": {"mood": "m"}}, "user: hi\nm",
    ):  # fmt: skip
        made = client.post("/tokenize", json={"messages": USER} | extra).json()
        assert made["tokens"] == tokenizer(expected).input_ids
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": USER}),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
        ("/tokenize", {"prompt": "a", "tools": [{}]}),
        ("/detokenize", {"tokens": [4096]}),
        ("/detokenize", {"tokens": [True]}),
    ):
        assert client.post(path, json=body).status_code == 400


def test_models_and_version(client):
    models = client.get("/v1/models").json()
    TypeAdapter(ModelList).validate_python(models)
    assert client.get("/v1/models/scripted").json() == models["data"][0]
    assert list(client.get("/version").json()) == ["version"]


def test_another_method_is_told_all_that_a_path_has(client):
    for path, methods in (
        ("/v1/responses/a", "DELETE, GET, HEAD"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/completions", "POST"),
        ("/health", "GET, HEAD"),
    ):
        response = client.put(path)
        assert (response.status_code, response.headers["allow"]) == (405, methods)


def test_metrics(client, engine):
    before = numbers(client.get("/metrics").text)
    completion(client, n=2)
    after = numbers(client.get("/metrics").text)
    label = '{model_name="scripted"}'
    for name, value in {
        "num_requests_running": 0, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 100, "generation_tokens_total": 50,
        "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 40,
        "spec_decode_num_drafts_total": 20, "spec_decode_num_draft_tokens_total": 40,
        "spec_decode_num_accepted_tokens_total": 30,
    }.items():  # fmt: skip
        assert after[f"vllm:{name}{label}"] == after[f"specjax:{name}{label}"] == value
    for state, count in {"free": 4, "running": 3, "cached": 5}.items():
        assert after[f'specjax:kv_cache_pages{{model_name="scripted",state="{state}"}}'] == count
    assert after[f"specjax:kv_cache_pages_leaked{label}"] == 0
    assert after[f"specjax:grammar_matchers{label}"] == 2
    by_position = (
        'spec_decode_num_accepted_tokens_per_pos_total{model_name="scripted",position="1"}'
    )
    assert after[f"vllm:{by_position}"] == after[f"specjax:{by_position}"] == 12
    ended = 'vllm:request_success_total{finished_reason="stop",model_name="scripted"}'
    assert after[ended] - before.get(ended, 0) == 2
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_time_per_output_token_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds",
    ):  # fmt: skip
        key = f"vllm:{name}_count{label}"
        assert after[key] - before[key] == 2
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert after[f"vllm:{name}_count{label}"] > before[f"vllm:{name}_count{label}"]


def numbers(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_one_line_a_request_without_its_text(client, caplog):
    with caplog.at_level(logging.INFO, "specjax.server.requests"):
        made = completion(client, "secret", n=2)
        completion(client, "secret", 400, temperature=-1)
        client.get("/health")
        client.get("/secret")
        until(lambda: len(caplog.records) == 3)
    first, second, third = (record.fields for record in caplog.records)
    assert first["id"] == made["id"].removeprefix("cmpl-")
    assert first["finish_reasons"] == ["stop", "stop"]
    assert first["completion_tokens"] == made["usage"]["completion_tokens"]
    assert 0 < first["ttft_s"] <= first["seconds"]
    assert first["mean_acceptance_length"] > 1
    assert (first["status"], second["status"], third["status"]) == (200, 400, 404)
    assert "secret" not in str(first) + str(second)


def test_a_connection_serves_requests_that_were_sent_together(server, engine):
    body = b'{"prompt": "a"}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request * 2)
        received = b""
        while received.count(b'"usage"') < 2:
            received += connection.recv(65536)
    assert received.count(b"200 OK") == 2
