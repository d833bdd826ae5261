"""Requests of OpenAI's API, with vLLM's further fields, as pydantic models.

A field that is not here is ignored and named (`fields.py`), unless it is one that others honour and
that would change the text (`unsupported.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from specjax.engine.request import MAX_LOGPROBS
from specjax.server import unsupported
from specjax.server.unsupported import Neutral


def _whole(value: Any) -> Any:
    """100 for 100.0: some clients' languages write every number of JSON as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Floats = BeforeValidator(_whole)
Whole = Annotated[int, Strict(), Field(lt=2**53)]
"""An integer that every program's JSON holds."""
Number = Annotated[float, Strict()]
Count = Annotated[Whole, Field(ge=1), Floats]
Limit = Literal[-1] | Count
"""Of new tokens; -1, llama.cpp's way, is all that fit."""
TokenId = Annotated[Whole, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
"""A token id as a field's name in JSON."""
Bias = Annotated[Number, Field(ge=-100, le=100)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
NonEmpty = Annotated[Text, Field(min_length=1)]
Unused = Any
"""A field that changes no text: it is taken and not used."""


class Body(BaseModel):
    """An object of a request, without infinite numbers; `model_extra` has its unknown fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, Neutral]] = {}
    """Fields that are known and not honoured."""
    nested: ClassVar[tuple[str, ...]] = ()
    """Fields whose values are such objects, or lists that may hold some."""


class StreamOptions(Body):
    """What a stream holds beside its text; `continuous_usage_stats`, vLLM's, counts in each event.

    guidellm asks for it.
    """

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Unused = None


Schema = dict[Text, Any] | Flag
"""A JSON schema."""


class JsonSchema(Body):
    """A schema that an answer must match."""

    name: Text | None = None
    description: Unused = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: Unused = None


class ResponseFormat(Body):
    """What an answer must be; the `schema` of an object is others' way of giving one."""

    nested = ("json_schema",)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")


class StructuredOutputs(Body):
    """What a text must match, as vLLM has it."""

    json_: Schema | Text | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    grammar: Text | None = None


class SampledRequest(Body):
    """What completions, chats and responses have in common; null is a field's default."""

    model: Text | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1), Floats] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63), Floats] | None = None
    stream: Flag | None = None
    user: Unused = None
    metadata: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None


class GenerationRequest(SampledRequest):
    """What completions and chats have in common."""

    nested = ("stream_options", "response_format", "structured_outputs")

    max_tokens: Annotated[Whole, Field(ge=-1), Floats] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    n: Count | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: Flag | None = None
    max_tpot_ms: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: Flag | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | Text | None = None
    grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    store: Unused = None
    priority: Unused = None


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    unsupported = unsupported.COMPLETION

    prompt: (
        NonEmpty
        | Annotated[list[NonEmpty], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    best_of: Count | None = Field(None, description="Must equal n.")
    echo: Flag | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS), Floats] | None = None


class TextPart(Body):
    """A part of a message's content; those of a refusal have it under that name."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Body):
    """The part of an answer that refuses."""

    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(Body):
    """What an answer thought before its text, as Anthropic's and LangChain's histories have it."""

    type: Literal["thinking", "reasoning"]
    thinking: Text | None = None
    text: Text | None = None


class CalledFunction(Body):
    """What an answer called; `arguments` are JSON, as a text or as they are."""

    name: Text
    arguments: Text | dict[Text, Any] | None = None


class ToolCall(Body):
    """A tool call in an answer."""

    nested = ("function",)

    id: Text | None = None
    type: Literal["function"] | None = None
    index: Unused = None
    function: CalledFunction


Part = Text | TextPart | RefusalPart | ThoughtPart


class Message(Body):
    """A message of a chat; those of users and systems have a content."""

    unsupported = unsupported.MESSAGE
    nested = ("content", "tool_calls", "function_call")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    function_call: CalledFunction | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    annotations: Unused = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]
Objects = Annotated[list[dict[Text, Any]], Field(fail_fast=True)]


class TemplateFields(Body):
    """Of a chat: what its template gets."""

    chat_template_kwargs: dict[Text, Any] | None = None
    reasoning_effort: Text | None = None
    enable_thinking: Flag | None = None
    documents: Objects | None = None
    tools: Objects | None = None


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """The body of `/v1/chat/completions`."""

    unsupported = unsupported.CHAT
    nested = ("stream_options", "response_format", "structured_outputs", "messages")

    messages: Messages
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS), Floats] | None = None
    tool_choice: Text | dict[Text, Any] | None = None
    parallel_tool_calls: Flag | None = None
    prediction: Unused = None


class TokenizeRequest(TemplateFields):
    """The body of `/tokenize`: a prompt, or the messages of a chat."""

    unsupported = unsupported.TOKENIZE
    nested = ("messages",)

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None
    return_token_strs: Flag | None = None


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


REQUESTS: Mapping[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""The body of each route."""
