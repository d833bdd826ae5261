"""Tools of chats through OpenAI's own client, before an engine that gives what it is told to."""

import json

import openai
import pytest

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.tokenizers import tokenizer_of
from tests.scripted_engine import ScriptedEngine, serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name} of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]
USER = [{"role": "user", "content": "hi"}]
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BOTH = f'One moment.\n{CALLS}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>'
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}<tool_call>"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.city }}{% endif %}|{% endfor %}"
)
WITHOUT = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED / "target")


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedEngine(), tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def reply(server, tokenizer):
    """Lets the model reply a text, and tells what it was asked."""

    def replies(text: str, template: str = WITH_TOOLS):
        tokenizer.chat_template = template
        ids = [*tokenizer(text).input_ids, 0]
        vars(server.engine).update(vars(ScriptedEngine([ids], ready=True)))
        server.engine.max_model_len = 4096

    return replies


def asked(server, tokenizer) -> str:
    return tokenizer.decode(server.engine.requests[-1].prompt)


def ask(client, **more):
    return client.chat.completions.create(
        **{"model": "scripted", "messages": USER, "tools": TOOLS} | more
    )


def test_calls_of_a_whole_answer(client, reply, server, tokenizer):
    reply(BOTH)
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment.\n"
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == (
        "weather", {"city": "Oslo"}
    )  # fmt: skip
    assert (second.function.name, second.function.arguments) == ("time", "{}")
    assert first.id != second.id
    assert first.id.startswith("call_")
    assert asked(server, tokenizer).startswith("weather;time;")
    reply(CALLS)
    assert ask(client).choices[0].message.content is None


def test_calls_of_a_stream(client, reply):
    reply(BOTH)
    content, calls, reasons = "", {}, []
    for chunk in ask(client, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            own = calls.setdefault(call.index, {"arguments": ""})
            if call.id:
                own |= {"id": call.id, "name": call.function.name}
            own["arguments"] += call.function.arguments or ""
    assert content == "One moment.\n"
    assert [own["name"] for own in calls.values()] == ["weather", "time"]
    assert [json.loads(own["arguments"]) for own in calls.values()] == [{"city": "Oslo"}, {}]
    assert reasons == [*[None] * (len(reasons) - 1), "tool_calls"]


def test_text_that_calls_nothing(client, reply):
    for text in ("no call", "a <tool", ""):
        reply(text)
        (choice,) = ask(client).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == text
        assert choice.message.tool_calls is None
        parts = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True)]
        assert "".join(parts) == text


def test_without_a_choice_of_tools_text_is_text(client, reply):
    reply(CALLS)
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        (choice,) = ask(client, **more).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == CALLS


def test_an_answer_that_must_call_has_a_grammar(client, reply, server):
    named = {"type": "function", "function": {"name": "time"}}
    for choice, texts in (
        ("required", (CALLS, '<tool_call>\n{"name": "time", "arguments": {"city": "a"}}\n'
                             "</tool_call>")),
        (named, ('<tool_call>\n{"name": "time", "arguments": {"city": "a"}}\n</tool_call>',)),
    ):  # fmt: skip
        reply(CALLS)
        ask(client, tool_choice=choice)
        grammar = server.engine.requests[-1].grammar
        for text in texts:
            matcher = grammar.matcher()
            ids = server.app.state.service.tokenizer(text).input_ids
            assert matcher.consume(ids) == len(ids)
            end = matcher.words().view("uint32")[0] & 1
            assert end
        matcher = grammar.matcher()
        ids = server.app.state.service.tokenizer("no call").input_ids
        assert matcher.consume(ids) < len(ids)
    assert server.engine.requests[-1].grammar is not None
    ask(client)
    assert server.engine.requests[-1].grammar is None


def test_calls_that_must_be_made_are_read_in_a_style_whose_own_are_no_json(client, reply, server):
    reply(
        '{"name": "time", "parameters": {"city": "a"}}',
        "{{ tools }} ipython [func_name1(params_name1",
    )
    (choice,) = ask(client, tool_choice="required").choices
    assert choice.message.tool_calls[0].function.name == "time"
    assert choice.finish_reason == "tool_calls"


def test_a_template_without_tools_is_told_of_them_in_words(client, reply, server, tokenizer):
    reply(CALLS, WITHOUT)
    history = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    (choice,) = ask(client, messages=history).choices
    assert choice.message.tool_calls[0].function.name == "weather"
    said = asked(server, tokenizer)
    assert said.startswith("system:Be brief.")
    assert '"name": "time"' in said
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in said
    assert "user:<tool_response>\nrain\n</tool_response>" in said
    reply(CALLS, WITHOUT)
    ask(client)
    assert asked(server, tokenizer).startswith("system:You may call")


def test_an_agents_loop_of_twenty_turns(client, reply):
    """Each answer calls, what it called is told, and the last one does not."""
    messages = [*USER]
    for turn in range(20):
        reply(CALLS if turn < 19 else "It rains.")
        message = ask(client, messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"})
    assert message.content == "It rains."
    assert len(messages) == 1 + 19 * 2 + 1


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if x else '' }}<think>"
MAY_THINK = "{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}"


def streamed(client, **more) -> tuple[str, str, list[str]]:
    """Thoughts, content and names of calls."""
    thought, content, names = "", "", []
    for chunk in ask(client, stream=True, **more):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        names += [call.function.name for call in delta.tool_calls or [] if call.function.name]
    return thought, content, names


@pytest.mark.parametrize(
    ("text", "template", "thought", "content", "names"),
    [
        ("a\n</think>\n\nb", THINKS + "{# </think> #}", "a", "b", []),
        ("<think>\na </thin b\n</think>\n\nc", MAY_THINK, "a </thin b", "c", []),
        ("no thoughts </think>", MAY_THINK, "", "no thoughts </think>", []),
        ("<think>\nendless", MAY_THINK, "endless", "", []),
        ("<thin", MAY_THINK, "", "<thin", []),
        (f"<think>I call.</think>\n{CALLS}", MAY_THINK, "I call.", "", ["weather"]),
        ("<think>a</think>b", "{{ messages[0].content }}", "", "<think>a</think>b", []),
        ("b", MAY_THINK + "<think>\n\n</think>\n\n", "", "b", []),
    ],
)
def test_thoughts_are_told_apart(text, template, thought, content, names, client, reply):
    reply(text, template)
    message = ask(client).choices[0].message
    assert getattr(message, "reasoning_content", None) == (thought or None)
    assert (message.content or "") == content
    assert [call.function.name for call in message.tool_calls or []] == names
    assert streamed(client) == (thought, content, names)


@pytest.mark.parametrize(
    ("template", "before"), [(THINKS + "{# </think> #}", "x"), (MAY_THINK, "<think>x")]
)
def test_only_the_answer_is_held_to_a_schema(template, before, client, reply, server):
    reply("1", template)
    own = {"name": "n", "schema": {"type": "integer"}}
    formats = (
        {"response_format": {"type": "json_schema", "json_schema": own}},
        {"extra_body": {"guided_regex": "1/?[0-9]"}},
        {"extra_body": {"guided_choice": ["17", "19"]}},
    )
    tokenizer = server.app.state.service.tokenizer
    for asked_for in formats:
        ask(client, tools=openai.NOT_GIVEN, **asked_for)
        grammar = server.engine.requests[-1].grammar
        for text, taken in ((f"{before}\ny</think>\n\n17", True), (f"{before}</think>y", False)):
            matcher, ids = grammar.matcher(), tokenizer(text).input_ids
            assert (matcher.consume(ids) == len(ids)) == taken
    ask(client, tool_choice="required")
    matcher, ids = (
        server.engine.requests[-1].grammar.matcher(),
        tokenizer(f"{before}</think>\n{CALLS}").input_ids,
    )
    assert matcher.consume(ids) == len(ids)
