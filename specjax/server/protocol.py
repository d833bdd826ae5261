"""Requests of OpenAI's API, with vLLM's further fields, as pydantic models.

A field that is not here is refused. Of those that OpenAI or vLLM know and this server does not
honour, `UNSUPPORTED`, a request may give the values that change nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

from specjax.engine.request import MAX_LOGPROBS

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), Field(lt=2**53)]
"""An integer that every program's JSON holds."""
Number = Annotated[float, Strict()]
Count = Annotated[Whole, Field(ge=1)]
TokenId = Annotated[Whole, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
"""A token id as a field's name in JSON."""
Bias = Annotated[Number, Field(ge=-100, le=100)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
NonEmpty = Annotated[Text, Field(min_length=1)]
Nothing = Annotated[list[Any], Field(max_length=0)]
"""An empty list."""


def _exactly(kind: type) -> BeforeValidator:
    """Refuses values of other types than `kind`: Python takes 0 for False and 1.0 for 1."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            names = {"kind": {bool: "boolean", int: "integer"}[kind]}
            raise PydanticCustomError("type", "Input should be a valid {kind}", names)
        return value

    return BeforeValidator(check)


Off = Annotated[Literal[False], _exactly(bool)]
On = Annotated[Literal[True], _exactly(bool)]
Zero = Annotated[Literal[0], _exactly(int)]


class Body(BaseModel):
    """An object of a request: no unknown fields, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream holds beside its text; `continuous_usage_stats`, vLLM's, counts in each event.

    guidellm asks for it.
    """

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Off | None = None


class TextFormat(Body):
    """The only format of a response."""

    type: Literal["text"]


class GenerationRequest(Body):
    """What completions and chats have in common; null is a field's default."""

    model: Text | None = None
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    seed: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: Flag | None = None
    max_tpot_ms: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None


class UnsupportedFields(Body):
    """Fields of vLLM's sampling that may only have the values that change nothing."""

    min_tokens: Zero | None = None
    use_beam_search: Off | None = None
    skip_special_tokens: On | None = None
    spaces_between_special_tokens: On | None = None
    include_stop_str_in_output: Off | None = None
    bad_words: Nothing | None = None
    allowed_token_ids: None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    priority: Zero | None = None


class UnsupportedCompletionFields(UnsupportedFields):
    """Those of completions."""

    suffix: Literal[""] | None = None
    best_of: Count | None = Field(None, description="Must equal n.")


class UnsupportedChatFields(UnsupportedFields):
    """Those of chats."""

    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    moderation: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Off | None = None
    echo: Off | None = None
    chat_template: None = None
    add_generation_prompt: On | None = None
    continue_final_message: Off | None = None


class CompletionRequest(GenerationRequest, UnsupportedCompletionFields):
    """The body of `/v1/completions`."""

    prompt: (
        NonEmpty
        | Annotated[list[NonEmpty], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    echo: Flag | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a chat; fields that responses have may come back empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]
    name: Text | None = None
    refusal: None = None
    tool_calls: Nothing | None = None
    function_call: None = None
    audio: None = None
    annotations: Nothing | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatCompletionRequest(GenerationRequest, UnsupportedChatFields):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    metadata: dict[Text, Text] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt, or the messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
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

UNSUPPORTED: Mapping[str, frozenset[str]] = {
    "/v1/completions": frozenset(UnsupportedCompletionFields.model_fields),
    "/v1/chat/completions": frozenset(UnsupportedChatFields.model_fields),
}
"""Fields of a route that are known and not honoured."""
