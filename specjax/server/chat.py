"""`/v1/chat/completions`: answers to chats, by the model's chat template."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.server.answer import ChoicesAnswer, finite, reason_of
from specjax.server.choices import Delta
from specjax.server.connection import respond, unless_gone
from specjax.server.errors import ApiError
from specjax.server.fields import check_fields
from specjax.server.generation import Generation, Prompt, submit
from specjax.server.log import record_of
from specjax.server.messages import source_of, talk_of
from specjax.server.protocol import ChatCompletionRequest, Message, TemplateFields
from specjax.server.reader import Reader, added_to_call, whole_calls
from specjax.server.reasoning import BEGIN, END, Thinking, thinks
from specjax.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    TopLogprob,
)
from specjax.server.service import Service, service_of
from specjax.server.structured import grammar_of
from specjax.server.submission import check_limits, new_tokens, requests_of, stops_of
from specjax.server.tool_use import ToolUse, tool_use_of, with_tools

_LAST = 16
"""Tokens of a prompt in which thoughts may begin or end."""
_VARIABLES = ("reasoning_effort", "enable_thinking", "documents", "tools")
"""Fields that chat templates get under their own names."""


class Begun(NamedTuple):
    """An answer that the engine makes, and what reads it."""

    generation: Generation
    reader: Reader


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a chat; in a stream if asked for.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    check_fields(body, request)
    begun = await begin_chat(body, request)
    answer = _Chat(service_of(request), body, begun, record_of(request).id)
    return await respond(request, begun.generation, answer, bool(body.stream))


async def begin_chat(body: ChatCompletionRequest, request: Request) -> Begun:
    """Lets the engine answer a chat.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    service, record = service_of(request), record_of(request)
    service.check_model(body.model)
    check_limits(body, service.options)
    asked = _max_tokens(body)
    use, chat = prepared(service, body)
    special = bool(body.add_special_tokens)
    ids = await unless_gone(request.receive, service.encode_chat(*chat, special=special))
    most = new_tokens(service, asked, None, ids, "messages")
    thinking = thinking_of(service, ids)
    requests = requests_of(
        service, body, ids, max_new_tokens=most, logprobs=_number_of_logprobs(body),
        grammar=await grammar_of(service, body, None if use is None else use.grammar, thinking),
    )  # fmt: skip
    prompts = [Prompt(ids, None, requests)]
    shown = [] if use is None else [use.style.begin, use.style.end]
    shown += [] if thinking is None else [BEGIN, END]
    texts = service.texts_with(shown)
    record.generation = await submit(service, prompts, stops_of(body), record.started, texts)
    return Begun(record.generation, Reader(use, thinking))


def prepared(
    service: Service, body: ChatCompletionRequest
) -> tuple[ToolUse | None, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """What a chat asks of tools, and its messages and variables as the chat template takes them.

    Raises:
      ApiError: the tools are none, or there can be no prompt (400).
    """
    use = tool_use_of(service, body)
    talk, variables = for_template(service, body.messages, variables_of(service, body), answer=True)
    if use is not None and use.told:
        talk = with_tools(talk, use.told)
    return use, (talk, variables)


def thinking_of(service: Service, prompt: Sequence[int]) -> Thinking | None:
    """How a model thinks before it answers a prompt; None if it does not, or has already.

    Its chat template tells; one may begin the thoughts, or end them where it is told not to think.
    """
    if not service.options.reasoning or not thinks(source_of(service.tokenizer.chat_template)):
        return None
    end = service.texts.decode(prompt[-_LAST:], special=True).rstrip()
    return None if end.endswith(END) else Thinking(end.endswith(BEGIN))


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        message = (
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens, its old name, "
            f"is {body.max_tokens}."
        )
        raise ApiError(400, message, param="max_tokens")
    return given.pop() if given else None


def _number_of_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        message = "top_logprobs may only be given where logprobs is true."
        raise ApiError(400, message, param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def variables_of(service: Service, body: TemplateFields) -> dict[str, Any]:
    """What a request gives the chat template beside its messages.

    Raises:
      ApiError: one of `chat_template_kwargs` is none of a template's variables (400).
    """
    own = body.chat_template_kwargs or {}
    _check_variables(service.tokenizer, own)
    named = {name: getattr(body, name) for name in _VARIABLES}
    return {name: value for name, value in named.items() if value not in (None, [])} | own


def for_template(
    service: Service,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    answer: bool,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables as the chat template takes them.

    Args:
      service: of the tokenizer.
      messages: of the chat.
      variables: for the chat template.
      answer: whether the beginning of the model's answer is added.

    Raises:
      ApiError: there is no chat template, or a message has no content (400).
    """
    if not service.tokenizer.chat_template:
        raise ApiError(400, "This model has no chat template.", param="messages")
    talk = talk_of(messages, service.tokenizer.chat_template)
    return talk, {**variables, "add_generation_prompt": answer}


def _check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Refuses what would be an argument of the tokenizer instead of a template's variable."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    own = sorted(taken & {*variables})
    if own:
        param = f"chat_template_kwargs.{own[0]}"
        raise ApiError(400, f"{param} is not supported: it is no template's variable.", param=param)


class _Chat(ChoicesAnswer):
    """A chat's responses."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatCompletionRequest, begun: Begun, identity: str
    ) -> None:
        super().__init__(service, body, begun.generation, f"chatcmpl-{identity}")
        self._logprobs = bool(body.logprobs)
        self._read = begun.reader.read

    def choice(self, delta: Delta) -> ChatChoice:
        """An answer."""
        delta = self._read(delta)
        message: ChatMessage = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = whole_calls(delta.calls)
        if delta.thought:
            message["reasoning_content"] = delta.thought
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._known(delta),
            "finish_reason": reason_of(delta),
        }

    def parts(self, delta: Delta) -> list[Delta]:
        """The first event says whose the answer is, and nothing else."""
        delta = self._read(delta)
        nothing = delta.is_empty and delta.finish_reason is None
        if not delta.first:
            return [] if nothing else super().parts(delta)
        role = Delta(delta.index, True, "", [], [], [], None)
        rest = dataclasses.replace(delta, first=False)
        return [role, *([] if nothing else super().parts(rest))]

    def part(self, delta: Delta) -> ChatChunkChoice:
        """What an event adds to an answer."""
        added: ChatDelta = {}
        if delta.first:
            added["role"] = "assistant"
        if delta.text or delta.first:
            added["content"] = delta.text
        if delta.thought:
            added["reasoning_content"] = delta.thought
        if delta.calls:
            added["tool_calls"] = [added_to_call(each) for each in delta.calls]
        return {
            "index": delta.index,
            "delta": added,
            "logprobs": self._known(delta),
            "finish_reason": reason_of(delta),
        }

    def _known(self, delta: Delta) -> ChatLogprobs | None:
        return logprobs_of(self.texts, delta) if self._logprobs and delta.ids else None


def logprobs_of(texts: TokenTexts, delta: Delta) -> ChatLogprobs:
    """The log probabilities of a message's tokens."""
    content = []
    for token, known in zip(delta.ids, delta.logprobs, strict=True):
        assert known is not None  # only prompts begin with a token that has none
        top = [_entry(texts, other, logprob) for other, logprob in known.top]
        content.append({**_entry(texts, token, known.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token: int, logprob: float) -> TopLogprob:
    return {
        "token": texts.text_of(token),
        "logprob": finite(logprob),
        "bytes": list(texts.bytes_of(token)),
    }
