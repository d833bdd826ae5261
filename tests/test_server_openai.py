"""OpenAI's own client: completions and chats, whole and as streams, its typed errors, and keys."""

import httpx
import openai
import pytest

from tests.letters import Letters
from tests.scripted_engine import ScriptedEngine, serving, until

USER = [{"role": "user", "content": "hi"}]
REPLY = (1, 2, 3, 0)


@pytest.fixture(scope="module")
def server():
    tokenizer = Letters()
    tokenizer.chat_template = "its own"
    with serving(ScriptedEngine(), tokenizer) as running:
        yield running


@pytest.fixture
def engine(server):
    vars(server.engine).update(vars(ScriptedEngine([REPLY], delay=0.002, ready=True)))
    return server.engine


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_whole_responses(client, engine):
    made = client.completions.create(model="scripted", prompt="a", max_tokens=99, logprobs=1)
    assert made.choices[0].text == "abc"
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    assert len(made.choices[0].logprobs.tokens) == made.usage.completion_tokens == len(REPLY)
    assert made.metrics["speculative_decoding"]["num_spec_steps"] == 2
    answer = client.chat.completions.create(
        model="scripted", messages=USER, logprobs=True, top_logprobs=2, seed=1, n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["abc", "abc"]
    first = answer.choices[0].logprobs.content[0]
    assert bytes(first.bytes).decode() == first.token == "a"
    assert len(first.top_logprobs) == 2
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


def test_streams(client, engine):
    with client.chat.completions.create(
        model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert last.usage.completion_tokens == len(REPLY)
    with client.completions.create(model="scripted", prompt="a", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_a_stream_that_is_closed_frees_its_row(client, engine):
    engine.endless = True
    with client.completions.create(
        model="scripted", prompt="a", stream=True, max_tokens=400
    ) as stream:
        next(iter(stream))
        assert engine.running
    assert until(lambda: not engine.running) < 0.9


def test_errors(client, engine):
    def ask(**more):
        return client.chat.completions.create(**{"model": "scripted", "messages": USER} | more)

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="other")
    assert missing.value.code == "model_not_found"
    engine.trouble = "error"
    with pytest.raises(openai.APIError), ask(stream=True) as stream:
        list(stream)
    with pytest.raises(openai.InternalServerError):
        ask()
    engine.room = 0
    with pytest.raises(openai.RateLimitError) as full:
        ask()
    assert full.value.response.headers["retry-after"] == "7"


def test_keys():
    with serving(ScriptedEngine(), Letters(), api_keys=("one", "twö")) as own:
        with httpx.Client(base_url=own.url) as client:
            for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
                assert client.get(path).status_code == 200
            for path in ("completions", "chat/completions"):
                refused(client, f"/v1/{path}")
            refused(client, "/tokenize")
            refused(client, "/detokenize")
            for key in ("one", "twö"):
                header = {"authorization": f"bearer {key}".encode()}
                assert client.get("/v1/models", headers=header).status_code == 200
        wrong = openai.OpenAI(base_url=f"{own.url}/v1", api_key="no", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
    with pytest.raises(ValueError, match="key is empty"), serving(None, Letters(), api_keys=("",)):
        pass


def refused(client: httpx.Client, path: str) -> None:
    for key in ("", "Bearer", "Bearer on", "one", "Bearer two", "Basic one"):
        response = client.post(path, headers={"authorization": key}, content=b"{")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
