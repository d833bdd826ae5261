"""`/v1/chat/completions`: answers to chats, by the model's chat template."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.server.answer import Answer, finite, reason_of
from specjax.server.choices import Delta
from specjax.server.connection import respond, unless_gone
from specjax.server.errors import ApiError
from specjax.server.generation import Generation, Prompt, submit
from specjax.server.log import record_of
from specjax.server.protocol import ChatCompletionRequest, Message
from specjax.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    TopLogprob,
)
from specjax.server.service import Service, service_of
from specjax.server.submission import check_limits, new_tokens, requests_of, stops_of


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a chat; in a stream if asked for.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    service, record = service_of(request), record_of(request)
    service.check_model(body.model)
    check_limits(body, service.options)
    asked = _max_tokens(body)
    chat = for_template(service, body.messages, body.chat_template_kwargs, answer=True)
    ids = await unless_gone(request.receive, service.encode_chat(*chat))
    most = new_tokens(service, asked, None, ids, "messages")
    requests = requests_of(
        service, body, ids, max_new_tokens=most, logprobs=_number_of_logprobs(body)
    )
    generation = submit(service, [Prompt(ids, None, requests)], stops_of(body), record.started)
    record.generation = generation
    return await respond(
        request, generation, _Chat(service, body, generation, record.id), bool(body.stream)
    )


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


def for_template(
    service: Service,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None,
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
      ApiError: there is no chat template, or it has no such variables (400).
    """
    if not service.tokenizer.chat_template:
        raise ApiError(400, "This model has no chat template.", param="messages")
    _check_variables(service.tokenizer, variables or {})
    return [_message(each) for each in messages], {
        **(variables or {}),
        "add_generation_prompt": answer,
    }


def _check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Refuses what would be an argument of the tokenizer instead of a template's variable."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    own = sorted(taken & {*variables})
    if own:
        param = f"chat_template_kwargs.{own[0]}"
        raise ApiError(400, f"{param} is not supported: it is no template's variable.", param=param)


def _message(message: Message) -> dict[str, str]:
    """A message as templates take it: parts of its content on lines of their own."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text} | name


class _Chat(Answer):
    """A chat's responses."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatCompletionRequest, generation: Generation, identity: str
    ) -> None:
        super().__init__(service, body, generation, f"chatcmpl-{identity}")
        self._logprobs = bool(body.logprobs)

    def choice(self, delta: Delta) -> ChatChoice:
        """An answer."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._known(delta),
            "finish_reason": reason_of(delta),
        }

    def part(self, delta: Delta) -> ChatChunkChoice:
        """What an event adds to an answer; the first says whose it is."""
        added: ChatDelta = {}
        if delta.first:
            added["role"] = "assistant"
        if delta.text or delta.first:
            added["content"] = delta.text
        return {
            "index": delta.index,
            "delta": added,
            "logprobs": self._known(delta),
            "finish_reason": reason_of(delta),
        }

    def _known(self, delta: Delta) -> ChatLogprobs | None:
        return logprobs_of(self.texts, delta) if self._logprobs else None


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
