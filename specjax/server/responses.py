"""Responses in OpenAI's shapes, as the types that the OpenAPI document is made from."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """Of a prompt's tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Counts of tokens; those of a prompt count once for all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(TypedDict):
    """What speculation gave: `acceptance_histogram[k]` steps accepted exactly k drafted tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class ResponseMetrics(TypedDict):
    """Of all choices together; None where no step was made."""

    speculative_decoding: SpeculativeDecoding | None


class CompletionLogprobs(TypedDict):
    """Log probabilities of a text's tokens, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionResponse(TypedDict):
    """A completion, or in a stream a part of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[ResponseMetrics]


class TopLogprob(TypedDict):
    """A token that might have come, with its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """What is called; `arguments` are JSON."""

    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """A tool call, or what an event adds to it; then `index` says to which."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionResponse(TypedDict):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics


class ChatDelta(TypedDict):
    """What an event adds to a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChunkChoice(TypedDict):
    """What an event adds to an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(TypedDict):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[ResponseMetrics]


class ModelCard(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class InputTokens(TypedDict):
    """The size of a prompt."""

    input_tokens: int


class DetokenizeResponse(TypedDict):
    """The text of tokens."""

    prompt: str


class Status(TypedDict):
    """Whether the server is well."""

    status: str


class Readiness(TypedDict):
    """Whether the server takes requests, and settings of which programs are still compiled."""

    status: str
    settings_compiling: list[str]


class Version(TypedDict):
    """The version of specjax."""

    version: str
