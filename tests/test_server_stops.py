"""Stops that are special tokens, or name some, over HTTP."""

import json

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.scripted_engine import ScriptedEngine, serving, until

NAMES = ["a", "b", "foo", "bar", " ", "\n", "<", ">", "|"]
SPECIAL = ["<|im_end|>", "<|im_end|>2", "<|x|>", "<end_of_turn>", "</s>", "[/INST]", "<wide>"]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a name: text, then special tokens, of which the last takes spaces beside it."""
    made = Tokenizer(models.WordLevel({name: n for n, name in enumerate(NAMES)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(
        [AddedToken(name, lstrip=name == "<wide>", rstrip=name == "<wide>") for name in SPECIAL]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(), tokenizer) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def ids(*names: str) -> list[int]:
    return [(NAMES + SPECIAL).index(name) for name in names]


def made(client, server, tokens, **asked) -> list[tuple[str, str]]:
    """Texts and reasons of a completion whose steps are five tokens; the same as a stream."""
    script = ScriptedEngine([tokens], ready=True, sizes=(5,), endless=True, delay=0.001)
    vars(server.engine).update(vars(script))
    body = {"prompt": [0], "max_tokens": len(tokens)} | asked
    whole = client.post("/v1/completions", json=body).json()["choices"]
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    for choice in whole:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    until(lambda: not server.engine.running)
    return [(choice["text"], choice["finish_reason"]) for choice in whole]


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        ("<|im_end|>", ["foo", "<|im_end|>", "bar"], "foo"),
        (["never", "<|im_end|>"], ["<|im_end|>", "bar"], ""),
        ("foo<|im_end|>", ["bar", "foo", "<|im_end|>", "a"], "bar"),
        ("foo<|im_end|>", ["bar", "foo", "b", "<|im_end|>", "a"], None),
        ("foo<|im_end|>", ["foo", "<|x|>", "<|im_end|>", "a"], None),
        (["foo<|im_end|>", "<|im_end|>"], ["bar", "foo", "<|im_end|>", "a"], "bar"),
        ("a<|x|>b", ["foo", "a", "<|x|>", "b", "bar"], "foo"),
        ("a<|x|>b", ["foo", "a", "b", "<|x|>", "bar"], None),
        ("<|x|>b", ["foo", "a", "<|x|>", "b", "bar"], "fooa"),
        ("<|im_end|>\n", ["foo", "<|im_end|>", "\n", "bar"], "foo"),
        ("<|im_end|>\n", ["foo", "<|im_end|>", "bar"], None),
        ("<|im_end|><|x|>", ["foo", "<|im_end|>", "<|x|>", "bar"], "foo"),
        ("<|im_end|>2", ["foo", "<|im_end|>", "a", "<|im_end|>2", "b"], "fooa"),
        (["</s>", "[/INST]", "<end_of_turn>"], ["foo", "[/INST]", "b"], "foo"),
        ("foobar", ["foo", "<|x|>", "bar", "a"], ""),
        (["ob", "<|x|>a"], ["foo", "<|x|>", "b", "a"], "fo"),
        ("|", ["foo", "<|im_end|>", "a"], None),
        ("<|x|>", ["foo", "<", "|", "x"], None),
        (" <wide>", ["foo", " ", "<wide>", "bar"], "foo"),
        (" <wide>", ["foo", "<wide>", "bar"], "foo"),
        ("a\n<wide> b", ["foo", "a", "<wide>", "b", "bar"], "foo"),
    ],
)
def test_stops_that_name_special_tokens(client, server, stop, tokens, text):
    tokens = ids(*[each for each in tokens if each != "x"])
    whole = "".join(each for each in map((NAMES + SPECIAL).__getitem__, tokens) if each in NAMES)
    expected = (whole, "length") if text is None else (text, "stop")
    for more in ({}, {"n": 2}, {"ignore_eos": True}, {"stop_token_ids": list(range(100, 116))}):
        assert set(made(client, server, tokens, stop=stop, **more)) == {expected}


def test_the_engine_ends_at_them_where_it_has_room(client, server):
    stops = ["<|im_end|>", "foo<|x|>", "</s>", " <wide>", "a"]
    made(client, server, ids("b", "b"), stop=stops, stop_token_ids=[7, ids("</s>")[0]])
    asked = [7, *ids("</s>", "<|im_end|>", "<wide>")]
    assert server.engine.requests[-1].stop_token_ids == asked
    made(client, server, ids("b", "b"), stop=stops, stop_token_ids=list(range(100, 115)))
    assert server.engine.requests[-1].stop_token_ids == [*range(100, 115), *ids("<|im_end|>")]
    server.engine.vocab_size = 8
    client.post("/v1/completions", json={"prompt": [0], "stop": "<|im_end|>"})
    assert server.engine.requests[-1].stop_token_ids == ()


@pytest.mark.parametrize("ends", [True, False])
def test_an_end_token_ends_a_longer_stop(client, server, ends):
    """The engine's own end token too, whose step ends the reply."""
    tokens = ids("bar", "foo", "<|im_end|>")
    script = ScriptedEngine([tokens], ready=True, sizes=(2, 1))
    vars(server.engine).update(vars(script))
    stop = "foo<|im_end|>" if ends else "foo<|x|>"
    body = {"prompt": [0], "stop": stop, "logprobs": 1}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == ("bar" if ends else "barfoo")
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["bar", "foo", "<|im_end|>"]


def test_tokens_behind_a_special_token_of_a_step_are_left_out(client, server):
    tokens = ids("foo", "<|x|>", "a", "b", "bar")
    script = ScriptedEngine([tokens], ready=True, sizes=(5,), endless=True)
    vars(server.engine).update(vars(script))
    body = {"prompt": [0], "stop": "<|x|>", "logprobs": 0, "max_tokens": 50}
    response = client.post("/v1/completions", json=body).json()
    assert response["choices"][0]["logprobs"]["tokens"] == ["foo", "<|x|>"]
    assert response["usage"]["completion_tokens"] == 2
    assert not server.engine.running
