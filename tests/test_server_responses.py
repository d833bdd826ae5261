"""`/v1/responses` through OpenAI's own client, before an engine that gives what it is told to."""

import json

import openai
import pydantic
import pytest

from specjax.server.stored import Stored
from tests.test_server_tools import BOTH, CALLS, MAY_THINK, asked, client, reply, server, tokenizer

__all__ = ["client", "reply", "server", "tokenizer"]
TEMPLATE = (
    "{# tools #}{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}|{% endfor %}"
)
TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}},
    {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}},
]


def ask(client, given="hi", **more):
    return client.responses.create(model="scripted", input=given, **more)


def test_a_whole_response(client, reply, server, tokenizer):
    reply("Hello.", TEMPLATE)
    made = ask(client, instructions="Be brief.", max_output_tokens=50, temperature=0.5, top_p=0.9)
    assert made.status == "completed"
    assert made.output_text == "Hello."
    (message,) = made.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert made.usage.output_tokens == len(tokenizer("Hello.").input_ids) + 1
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert asked(server, tokenizer) == "system:Be brief.|user:hi|"
    request = server.engine.requests[-1]
    assert (request.max_new_tokens, request.temperature, request.top_p) == (50, 0.5, 0.9)


def test_a_response_that_is_cut_off_is_incomplete(client, reply):
    reply("Hello there, all of you.", TEMPLATE)
    made = ask(client, max_output_tokens=2)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    kinds = [event.type for event in ask(client, max_output_tokens=2, stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_one_goes_on_from_another(client, reply, server, tokenizer):
    reply("One.", TEMPLATE)
    first = ask(client, instructions="Be brief.")
    reply("Two.", TEMPLATE)
    second = ask(client, "and then?", previous_response_id=first.id)
    assert asked(server, tokenizer) == "user:hi|assistant:One.|user:and then?|"
    assert client.responses.retrieve(second.id).output_text == "Two."
    client.responses.delete(second.id)
    for missing in (
        lambda: client.responses.retrieve(second.id),
        lambda: client.responses.delete(second.id),
        lambda: ask(client, previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no response"):
            missing()
    unkept = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_events_of_a_stream(client, reply):
    reply(f"<think>I call.</think>\n{BOTH}", MAY_THINK)
    events = list(ask(client, stream=True, tools=TOOLS))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1].response
    assert [item.type for item in final.output] == [
        "reasoning", "message", "function_call", "function_call"
    ]  # fmt: skip
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        assert all(event.item_id == item.id for event in own if hasattr(event, "item_id"))
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        whole = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas == whole
    assert final.output[0].content[0].text == "I call."
    assert final.output_text == "One moment.\n"
    assert json.loads(final.output[2].arguments) == {"city": "Oslo"}
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_calls_and_what_came_of_them(client, reply, server, tokenizer):
    reply(CALLS, TEMPLATE)
    first = ask(client, tools=TOOLS)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "weather", {"city": "Oslo"}
    )  # fmt: skip
    reply("It rains.", TEMPLATE)
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = ask(client, [told], previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "It rains."
    assert asked(server, tokenizer) == "user:hi|assistant:weather|tool:rain|"
    history = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
               {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                   {"type": "reasoning_text", "text": "hm"}]},
               *[item.model_dump() for item in first.output], told]  # fmt: skip
    ask(client, history, tools=TOOLS, tool_choice={"type": "function", "name": "time"})
    assert asked(server, tokenizer) == "user:hi|assistant:hmweather|tool:rain|"
    matcher = server.engine.requests[-1].grammar.matcher()
    ids = tokenizer('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>').input_ids
    assert matcher.consume(ids) == len(ids)


def test_parsed_responses(client, reply, server):
    class Size(pydantic.BaseModel):
        width: int

    reply('{"width": 3}', TEMPLATE)
    made = client.responses.parse(model="scripted", input="hi", text_format=Size)
    assert made.output_parsed == Size(width=3)
    assert server.engine.requests[-1].grammar is not None
    parsed = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "hi"}], response_format=Size
    )
    assert parsed.choices[0].message.parsed == Size(width=3)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "not supported"),
        ({"input": [{"role": "bot", "content": "a"}]}, "input[0].role", "one of user"),
        ({"input": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"function"'),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"temperature": -1}, "temperature", "greater than"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format.json_schema.schema",
         "missing"),
    ],
)  # fmt: skip
def test_refusals(fields, param, said, client, reply):
    reply("a", TEMPLATE)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            **{"model": "scripted", "input": "hi"}
            | {n: v for n, v in fields.items() if n not in ("conversation", "background")},
            extra_body={n: v for n, v in fields.items() if n in ("conversation", "background")},
        )
    assert refused.value.param == param
    assert said in refused.value.body["message"]


def test_the_oldest_are_forgotten():
    kept = Stored()
    for number in range(1100):
        kept.add([{"role": "user", "content": str(number)}], {"id": str(number)})
    assert kept.messages("1099") == [{"role": "user", "content": "1099"}]
    assert kept.messages("76")
    with pytest.raises(Exception, match="no response '75'"):
        kept.messages("75")
    for number in range(40):
        kept.add([{"role": "user", "content": "a" * 2**20}], {"id": f"large {number}"})
    assert kept.messages("large 39")
    with pytest.raises(Exception, match="no response"):
        kept.messages("large 3")
    for number in range(40):  # what a response says again, such as its tools, counts
        kept.add([], {"id": f"{number} of large tools", "tools": ["a" * 2**20]})
    assert kept.response("39 of large tools")
    with pytest.raises(Exception, match="no response"):
        kept.response("3 of large tools")
