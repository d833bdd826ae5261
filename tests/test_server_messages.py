"""`/v1/messages` before an engine that gives what it is told to; `tests/serve_clients.py` asks it
through Anthropic's own client.
"""

import json

import httpx
import pytest

from specjax.server.message_blocks import MessagesRequest
from tests.letters import Letters
from tests.scripted_engine import ScriptedEngine, serving
from tests.test_server_refusals import DOCUMENT
from tests.test_server_responses import TEMPLATE
from tests.test_server_tools import BOTH, CALLS, MAY_THINK, asked, reply, server, tokenizer

__all__ = ["reply", "server", "tokenizer"]
PATH = "/v1/messages"
TOOLS = [
    {"name": name, "description": f"the {name}", "input_schema": {"type": "object"}}
    for name in ("weather", "time")
]
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.fixture(scope="module")
def client(server):
    headers = {"x-api-key": "any", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=server.url, timeout=20, headers=headers) as made:
        yield made


def posted(client, *, path=PATH, status=200, **more):
    body = {"model": "scripted", "max_tokens": 400, "messages": [USER]} | more
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response


def ask(client, **more):
    return posted(client, **more).json()


def events_of(client, **more) -> list[dict]:
    lines = posted(client, stream=True, **more).text.split("\n\n")
    assert lines.pop() == ""
    found = []
    for line in lines:
        if not line.startswith(":"):
            name, data = line.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def blocks_of(events: list[dict]) -> list[dict]:
    """The blocks that the events of a stream make, as clients put them together."""
    blocks, texts = [], []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            match event["delta"]:
                case {"type": "input_json_delta", "partial_json": text}:
                    texts[-1] += text
                case {"type": "signature_delta", "signature": text}:
                    blocks[-1]["signature"] += text
                case {"type": "text_delta" | "thinking_delta" as kind, **own}:
                    name = kind.removesuffix("_delta")
                    blocks[-1][name] += own[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(texts[-1])
    return blocks


def without_ids(blocks: list[dict]) -> list[dict]:
    return [{name: value for name, value in each.items() if name != "id"} for each in blocks]


def test_a_whole_message(client, reply, server, tokenizer):
    reply("Hello.", TEMPLATE)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    made = ask(
        client, system=system, temperature=0.5, top_p=0.9, top_k=7, metadata={"user_id": "a"}
    )
    assert made.pop("id").startswith("msg_")
    prompt = len(server.engine.requests[-1].prompt)
    assert made == {
        "type": "message", "role": "assistant", "model": "scripted",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": len(tokenizer("Hello.").input_ids) + 1,
        },
    }  # fmt: skip
    assert asked(server, tokenizer) == "system:Be brief.|user:hi|"
    request = server.engine.requests[-1]
    assert (request.max_new_tokens, request.temperature) == (400, 0.5)
    assert (request.top_p, request.top_k) == (0.9, 7)


def test_why_messages_end(client, reply):
    reply("Hello there, all of you.", TEMPLATE)
    cut = ask(client, max_tokens=2)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = ask(client, stop_sequences=["zebra", "e,", "all"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "e,")
    assert stopped["content"][0]["text"] == "Hello ther"
    *_, end, _ = events_of(client, stop_sequences=["all"])
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "all"}
    reply("", TEMPLATE)
    assert ask(client)["content"] == []


def test_a_stop_sequence_that_is_a_special_token(client, reply, server, tokenizer):
    name, number = next(iter(tokenizer.get_added_vocab().items()))
    reply("Hello.", TEMPLATE)
    server.engine.replies = [[*tokenizer("Hel").input_ids, number, 5, 0]]
    made = ask(client, stop_sequences=["x", name])
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", name)
    assert made["content"][0]["text"] == "Hel"


def test_events_of_a_stream(client, reply):
    reply(f"<think>I call.</think>\n{BOTH}", MAY_THINK)
    events = events_of(client, tools=TOOLS)
    start, *middle, end, stop = events
    assert (start["type"], end["type"], stop) == (
        "message_start", "message_delta", {"type": "message_stop"}
    )  # fmt: skip
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert {event["type"] for event in middle} == {
        "content_block_start", "content_block_delta", "content_block_stop"
    }  # fmt: skip
    blocks = blocks_of(middle)
    whole = ask(client, tools=TOOLS)
    assert without_ids(blocks) == without_ids(whole["content"])
    assert end["usage"] == whole["usage"]
    assert without_ids(blocks) == [
        {"type": "thinking", "thinking": "I call.", "signature": ""},
        {"type": "text", "text": "One moment.\n"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]


def test_calls_and_what_came_of_them(client, reply, server, tokenizer):
    reply(CALLS, TEMPLATE)
    first = ask(client, tools=TOOLS)
    assert first["stop_reason"] == "tool_use"
    (call,) = first["content"]
    result = {
        "type": "tool_result", "tool_use_id": call["id"], "is_error": False,
        "content": [{"type": "text", "text": "rain"}],
    }  # fmt: skip
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"},
               {"type": "redacted_thinking", "data": "x"}]  # fmt: skip
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [*thought, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    ask(client, messages=history, tools=TOOLS, tool_choice={"type": "tool", "name": "time"})
    assert asked(server, tokenizer) == "user:a\nb\nc|assistant:hmweather|tool:rain|user:And now?|"
    request = server.engine.requests[-1]
    ids = tokenizer('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>').input_ids
    assert request.grammar.matcher().consume(ids) == len(ids)
    for kind, has_grammar in (("any", True), ("auto", False), ("none", False)):
        ask(client, tools=TOOLS, tool_choice={"type": kind, "disable_parallel_tool_use": True})
        assert (server.engine.requests[-1].grammar is not None) == has_grammar


def test_arguments_that_were_cut_off(client, reply, tokenizer):
    reply(CALLS, TEMPLATE)
    made = ask(client, tools=TOOLS, max_tokens=len(tokenizer(CALLS[: CALLS.index("}")]).input_ids))
    assert made["stop_reason"] == "max_tokens"
    assert made["content"][0]["input"] == {}


def test_thoughts_and_schemas(client, reply, server, tokenizer):
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if enable_thinking == false %}"
        "</think>{% endif %}{{ reasoning_effort }}"
    )
    reply('hm</think>{"a": 1}', template)
    schema = {"type": "json_schema", "schema": {"properties": {"a": {"type": "integer"}}}}
    config = {"effort": "low", "format": schema}
    made = ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [each["type"] for each in made["content"]] == ["thinking", "text"]
    reply('{"a": 1}', template)
    made = ask(client, thinking={"type": "disabled"}, output_config=config)
    assert made["content"] == [{"type": "text", "text": '{"a": 1}'}]
    assert asked(server, tokenizer) == "hi<think></think>low"
    assert server.engine.requests[-1].grammar is not None


def test_counted_tokens(client, reply, server, tokenizer):
    reply("a", TEMPLATE)
    for more in ({}, {"system": "Be brief."}, {"tools": TOOLS}):
        count = ask(client, path=f"{PATH}/count_tokens", **more)
        ask(client, **more)
        assert count == {"input_tokens": len(server.engine.requests[-1].prompt)}
    server.engine.max_model_len = 8
    assert ask(client, path=f"{PATH}/count_tokens", system="a b c d e f")["input_tokens"] > 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]},
         'messages[0].content[0].type is not supported here; it is "image".'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                     "content": [IMAGE]}]}]},
         'messages[0].content[0].content[0].type is not supported here; it is "image".'),
        ({"system": [IMAGE]}, 'system[0].type is not supported here; it is "image".'),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
         'messages[0].content[0].type: it goes with the role "assistant"'),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role: should be 'user'"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "not continued here"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is missing."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text is missing."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text: should be a valid string; it is 1."),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: should be greater than or equal to 1; it is 0."),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences has 99 strings"),
        ({"stop": ["a"]}, "Give stop_sequences."),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported here"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         'tools[0].type is not supported here; it is "web_search_20250305".'),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing."),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools."),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing."),
        ({"output_config": {"format": {"type": "json_schema"}}},
         "output_config.format.schema is missing."),
    ],
)  # fmt: skip
def test_refusals(fields, said, client, reply):
    reply("a", TEMPLATE)
    error = ask(client, status=400, **fields)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert said in error["error"]["message"]


def test_unknown_fields_are_ignored_and_named(client, reply):
    reply("a", TEMPLATE)
    block = {"type": "text", "text": "a", "opts": 1}
    response = posted(client, messages=[{"role": "user", "content": [block]}], seeds=1)
    assert response.headers["x-ignored-fields"] == "seeds, messages[].content[].opts"
    cleared = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    response = posted(client, context_management=cleared, cache_control={"type": "ephemeral"})
    assert "x-ignored-fields" not in response.headers


def test_errors_have_anthropics_shape(client, reply, server):
    reply("a", TEMPLATE)

    def kind(response):
        assert response.json()["type"] == "error"
        return response.json()["error"]["type"]

    assert kind(posted(client, status=404, model="other")) == "not_found_error"
    assert kind(client.get(PATH)) == "invalid_request_error"
    assert kind(client.get(f"{PATH}/batches")) == "not_found_error"
    assert kind(client.post(PATH, content=b"{", headers={"content-type": "text/plain"})) == (
        "invalid_request_error"
    )
    assert kind(client.post(PATH, json={}, headers={"host": "evil.example"})) == "permission_error"
    server.engine.room = 0
    assert kind(posted(client, status=429)) == "rate_limit_error"
    assert "error" in client.get("/v1/messagesx").json()
    assert "type" not in client.get("/v1/messagesx").json()
    reply("a", TEMPLATE)
    server.engine.trouble = "error"
    assert kind(posted(client, status=500)) == "api_error"
    *_, last = events_of(client)
    assert last["error"]["type"] == "api_error"


def test_keys_of_either_header():
    with serving(ScriptedEngine(), Letters(), api_keys=("one",)) as own:
        for headers, status in (
            ({"x-api-key": "one"}, 200),
            ({"Authorization": "Bearer one"}, 200),
            ({"Authorization": "Bearer no", "x-api-key": "one"}, 200),
            ({"x-api-key": "no"}, 401),
            ({"Authorization": "one"}, 401),
            ({}, 401),
        ):
            assert httpx.get(f"{own.url}/v1/models", headers=headers).status_code == status
        wrong = httpx.post(f"{own.url}{PATH}", json={"max_tokens": 1, "messages": [USER]})
        assert wrong.json()["error"]["type"] == "authentication_error"
        schemes = httpx.get(f"{own.url}/openapi.json").json()["components"]["securitySchemes"]
        assert {each["type"] for each in schemes.values()} == {"http", "apiKey"}


def test_the_documentation_names_every_field():
    for name in (*MessagesRequest.model_fields, *MessagesRequest.unsupported):
        assert f"`{name}`" in DOCUMENT
