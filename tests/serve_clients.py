"""Clients as people have them, against a server that runs the bundled model.

    pip install langchain-openai 'litellm[proxy]' anthropic
    python -m tests.serve_clients [CHECK ...]

`specjax serve` is asked through LangChain (`ChatOpenAI`), LiteLLM (both of its forms) and
Anthropic's client, and by requests with the fields that Open WebUI, Continue and Cline send, as
their public code makes them. Fields that the server does not know are refused. The model is small
and its chats are no sense; so what is looked at is their shape, and where a schema or a tool must
hold, that it does. A check that fails is a failure.
"""

import asyncio
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.serving.process import serving
from specjax.checkpoints.files import BUNDLED

KEY = "a key"
MODEL = "bundled"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
    "assistant: "
)
USER = [{"role": "user", "content": "def fibonacci(n):"}]
NEW, ROOM = 24, 600
"""Tokens of a text, and of one that must come to its end."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
INPUT_TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
PACKAGES = ("openai", "langchain-openai", "litellm", "anthropic")

Check = Callable[[str], None]
CHECKS: list[Check] = []


def check(test: Check) -> Check:
    """Adds a check of the server at an address."""
    CHECKS.append(test)
    return test


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=0, le=9)


def holds(given: Any) -> None:
    """That a value matches the schema."""
    assert set(given) == {"city", "days"}, given
    assert given["city"] in ("Oslo", "Rome"), given
    assert isinstance(given["days"], int), given
    assert given["days"] <= 9, given


def _langchain(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    common = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL, "temperature": 0}
    return ChatOpenAI(**{"max_tokens": NEW} | common | more)


def _text(content: Any) -> str:
    """The text of a content, which LangChain gives as blocks for OpenAI's newer API."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@check
def langchain_invoke_and_stream(url: str) -> None:
    for more in ({}, {"use_responses_api": True}):
        model = _langchain(url, stream_usage=True, **more)
        whole = model.invoke([("system", "Be brief."), ("user", "def fibonacci(n):")])
        assert _text(whole.content)
        assert whole.usage_metadata["output_tokens"] == NEW
        parts = list(model.stream([("system", "Be brief."), ("user", "def fibonacci(n):")]))
        added = parts[0]
        for part in parts[1:]:
            added += part
        assert len(parts) > 2
        assert _text(added.content) == _text(whole.content)
        assert added.usage_metadata["output_tokens"] == NEW


@check
def langchain_tools(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = _langchain(url, max_tokens=ROOM).bind_tools(
        [Weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    asked = [HumanMessage("weather?")]
    whole = bound.invoke(asked)
    assert {call["name"] for call in whole.tool_calls} == {"Weather"}
    for call in whole.tool_calls:
        holds(call["args"])
    added = None
    for part in bound.stream(asked):
        added = part if added is None else added + part
    assert [call["args"] for call in added.tool_calls] == [c["args"] for c in whole.tool_calls]
    results = [ToolMessage("rain", tool_call_id=call["id"]) for call in whole.tool_calls]
    assert _langchain(url).invoke([*asked, whole, *results]).content
    assert _langchain(url).invoke(asked, tools=[TOOL]).content is not None


@check
def langchain_structured_output(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        model = _langchain(url, max_tokens=ROOM).with_structured_output(
            Weather, method=method, strict=True
        )
        holds(model.invoke("weather?").model_dump())
    made = _langchain(url, max_tokens=ROOM).with_structured_output(
        {"title": "Weather", "description": "of a city", **SCHEMA}, method="json_schema"
    )
    holds(made.invoke("weather?"))


def _litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    return litellm


def _forms(url: str) -> Iterator[dict[str, Any]]:
    """LiteLLM's arguments for OpenAI's API and for Anthropic's."""
    common = {"api_key": KEY, "messages": USER, "max_tokens": NEW, "temperature": 0}
    yield {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", **common}
    yield {"model": f"anthropic/{MODEL}", "api_base": url, **common}


@check
def litellm_completion_and_stream(url: str) -> None:
    litellm = _litellm()
    for form in _forms(url):
        whole = litellm.completion(**form)
        assert whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == NEW
        parts = list(litellm.completion(stream=True, **form))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        assert parts[-1].choices[0].finish_reason == "length"


@check
def litellm_tools(url: str) -> None:
    litellm = _litellm()
    for form in _forms(url):
        form |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": ROOM}
        form["parallel_tool_calls"] = False
        (choice,) = litellm.completion(**form).choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert {call.function.name for call in calls} == {"weather"}
        for call in calls:
            holds(json.loads(call.function.arguments))
        texts: dict[int, str] = {}
        for part in litellm.completion(stream=True, **form):
            for call in part.choices[0].delta.tool_calls or []:
                texts[call.index] = texts.get(call.index, "") + (call.function.arguments or "")
        assert [json.loads(text) for text in texts.values()] == [
            json.loads(call.function.arguments) for call in calls
        ]
        history = [*USER, choice.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in calls]
        made = litellm.completion(**form | {"messages": history, "tool_choice": "auto"})
        assert made.choices[0].message is not None


@check
def litellm_response_format(url: str) -> None:
    litellm = _litellm()
    schema = {"name": "weather", "schema": SCHEMA, "strict": True}
    given = {"type": "json_schema", "json_schema": schema}
    for response_format in (Weather, given):
        for form in _forms(url):
            made = litellm.completion(
                response_format=response_format, **form | {"max_tokens": ROOM}
            )
            holds(json.loads(made.choices[0].message.content))


@check
def litellm_other_forms(url: str) -> None:
    litellm = _litellm()
    asked = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": KEY, "max_tokens": NEW}

    async def messages() -> None:
        whole = await litellm.anthropic.messages.acreate(messages=USER, temperature=0, **asked)
        assert whole["content"][0]["text"]
        stream = await litellm.anthropic.messages.acreate(
            messages=USER, temperature=0, stream=True, **asked
        )
        pieces = b"".join([piece async for piece in stream]).decode()
        assert "event: message_stop" in pieces

    asyncio.run(messages())
    made = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, input="def f(",
        max_output_tokens=NEW,
    )  # fmt: skip
    assert made.usage.output_tokens == NEW
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY,
        prompt="def fibonacci(n):", max_tokens=NEW,
    )  # fmt: skip
    assert text.choices[0].text


def _anthropic(url: str, key: str = KEY) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


@check
def anthropic_create_stream_and_count(url: str) -> None:
    client = _anthropic(url)
    asked = {
        "model": MODEL, "max_tokens": NEW, "messages": USER, "extra_body": {"temperature": 0},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }  # fmt: skip
    whole = client.messages.create(**asked)
    assert whole.content[0].text
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == NEW
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == NEW
    counted = client.messages.count_tokens(
        **{name: asked[name] for name in ("model", "messages", "system")}
    )
    used = final.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert [each.id for each in client.models.list()] == [MODEL]
    stop = text[5:7]
    stopped = client.messages.create(**asked, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]


@check
def anthropic_tools_and_schemas(url: str) -> None:
    client = _anthropic(url)
    asked = {"model": MODEL, "max_tokens": ROOM, "messages": USER, "tools": [INPUT_TOOL]}
    one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (one, {"type": "tool", "name": "weather"}):
        whole = client.messages.create(tool_choice=choice, **asked)
        assert whole.stop_reason == "tool_use"
        for block in whole.content:
            assert block.type == "tool_use"
            holds(block.input)
    with client.messages.stream(tool_choice=one, **asked) as stream:
        final = stream.get_final_message()
    for block in final.content:
        holds(block.input)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in final.content
    ]
    history = [
        *USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}
    ]  # fmt: skip
    assert client.messages.create(**asked | {"messages": history}).stop_reason
    made = client.messages.create(
        model=MODEL, max_tokens=ROOM, messages=USER,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    holds(json.loads(made.content[0].text))


@check
def anthropic_errors(url: str) -> None:
    import anthropic

    asked = {"model": MODEL, "max_tokens": NEW, "messages": USER}
    for more, key, kind in (
        ({"messages": []}, KEY, anthropic.BadRequestError),
        ({"model": "other"}, KEY, anthropic.NotFoundError),
        ({}, "another", anthropic.AuthenticationError),
    ):
        with pytest.raises(kind) as refused:
            _anthropic(url, key).messages.create(**asked | more)
        assert refused.value.body["type"] == "error"


def _chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def _chat(url: str, body: dict[str, Any], **headers: str) -> tuple[list[dict[str, Any]], str]:
    """The chunks of a chat's stream and the names of fields that were ignored."""
    headers = {"Authorization": f"Bearer {KEY}"} | headers
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as response:
        if response.status_code != 200:
            raise AssertionError(response.read())
        return _chunks(response), response.headers.get("x-ignored-fields", "")


def _content(chunks: list[dict[str, Any]]) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks
                   if each["choices"])  # fmt: skip


@check
def open_webui(url: str) -> None:
    """`routers/openai.py` and `utils/payload.py`: a chat, and the task that finds its title."""
    headers = {"Authorization": f"Bearer {KEY}", "X-OpenWebUI-User-Name": "me"}
    listed = httpx.get(f"{url}/v1/models", headers=headers).json()
    assert [each["id"] for each in listed["data"]] == [MODEL]
    body = {
        "stream": True, "model": MODEL, "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "Hello."}, *USER,
        ],
        "temperature": 0.0, "top_p": 0.9, "max_tokens": NEW, "frequency_penalty": 0.0, "seed": 1,
        "stop": ["zebra"], "logit_bias": {"5": -100},
    }  # fmt: skip
    chunks, ignored = _chat(url, body, **{"X-OpenWebUI-User-Name": "me"})
    assert _content(chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == NEW
    assert not ignored
    task = {"model": MODEL, "messages": USER, "stream": False, "max_completion_tokens": NEW}
    made = httpx.post(f"{url}/v1/chat/completions", json=task, headers=headers, timeout=60)
    assert made.json()["choices"][0]["message"]["content"]


@check
def continue_dev(url: str) -> None:
    """`core/llm/llms/OpenAI.ts` and `openai-adapters`: chat, tools, and completion of code."""
    headers = {"api-key": KEY, "x-api-key": KEY}
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, *USER], "model": MODEL,
        "max_tokens": NEW, "temperature": 0, "top_p": 1, "frequency_penalty": 0,
        "presence_penalty": 0, "stream": True, "stop": ["<|im_end|>", "zebra"],
        "stream_options": {"include_usage": True}, "tools": [TOOL], "parallel_tool_calls": False,
    }  # fmt: skip
    chunks, ignored = _chat(url, body, **headers)
    assert chunks[-1]["usage"]
    assert not ignored
    _chat(url, body | {"messages": [{"role": "user", "content": " "}], "tool_choice": "auto"})
    told = {"model": MODEL, "prompt": "def fibonacci(n):\n", "max_tokens": NEW, "temperature": 0.01,
            "stop": ["/src/", "#- coding: utf-8", "```"], "stream": True}  # fmt: skip
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=told, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        assert "".join(each["choices"][0]["text"] for each in _chunks(response))


@check
def cline(url: str) -> None:
    """`src/core/api/providers`: `openai.ts`, and `anthropic.ts` through Anthropic's client."""
    function = {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    body = {
        "model": MODEL, "temperature": 0, "max_tokens": NEW, "stream": True, "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [{"type": "text", "text": "<task>\nhi\n</task>"},
                                         {"type": "text", "text": "<environment_details>"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    chunks, ignored = _chat(url, body)
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    assert not ignored
    cached = {"cache_control": {"type": "ephemeral"}}
    stream = _anthropic(url).messages.create(
        model=MODEL, max_tokens=ROOM, extra_body={"temperature": 0}, stream=True,
        tools=[INPUT_TOOL], tool_choice={"type": "any"},
        system=[{"text": "You are Cline.", "type": "text", **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
    )  # fmt: skip
    kinds = [event.type for event in stream]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def main() -> None:
    """Runs the checks that are named, or all, and prints what came of each."""
    chosen = [each for each in CHECKS if each.__name__ in sys.argv[1:]] or CHECKS
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        target = shutil.copytree(BUNDLED / "target", Path(folder) / MODEL)
        (target / "chat_template.jinja").write_text(TEMPLATE)
        flags = (
            "--model", str(target), "--draft", str(BUNDLED / "drafts" / "0"), "--method", "chain",
            "--rows", "2", "--port", "0", "--api-key", KEY, "--strict-fields",
        )  # fmt: skip
        with serving(*flags) as (url, _):
            for each in chosen:
                try:
                    each(url)
                except Exception:
                    failed.append(each.__name__)
                    traceback.print_exc()
                print(f"  {each.__name__}: {'FAILED' if each.__name__ in failed else 'ok'}",
                      flush=True)  # fmt: skip
    print(f"{len(chosen)} checks, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
