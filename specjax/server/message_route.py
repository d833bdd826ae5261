"""`/v1/messages`: Anthropic's Messages API, over the same chats."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.server.answer import Answer
from specjax.server.chat import Begun, begin_chat, prepared
from specjax.server.choices import Delta
from specjax.server.connection import respond, unless_gone
from specjax.server.errors import ApiError, MessagesErrorResponse
from specjax.server.fields import check_fields
from specjax.server.log import record_of
from specjax.server.message_blocks import CountTokensRequest, MessagesRequest, Output, chat_of
from specjax.server.protocol import ChatCompletionRequest
from specjax.server.service import Service, service_of

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Fields of a chat that have other names here."""


async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers messages; in a stream if asked for.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    service = service_of(request)
    check_fields(body, request)
    chat = ChatCompletionRequest.model_validate(chat_of(body))
    try:
        begun = await begin_chat(chat, request)
    except ApiError as error:
        raise _renamed(error) from error
    answer = _Message(service, chat, begun, record_of(request).id)
    return await respond(request, begun.generation, answer, bool(body.stream))


async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens the prompt of messages has.

    Raises:
      ApiError: the messages cannot be a prompt (400).
      ClientGoneError: the client went away.
    """
    service = service_of(request)
    check_fields(body, request)
    chat = ChatCompletionRequest.model_validate(chat_of(body))
    service.check_model(chat.model)
    _, talk = prepared(service, chat)
    count = await unless_gone(request.receive, service.count_of_chat(*talk))
    return JSONResponse({"input_tokens": count})


def _renamed(error: ApiError) -> ApiError:
    """An error about a field of a chat, with the name that the client gave."""
    own = _NAMES.get(error.param or "")
    if own is None:
        return error
    message = error.detail.replace(error.param or "", own, 1)
    return ApiError(error.status_code, message, param=own, code=error.code, headers=error.headers)


class _Message(Answer):
    """A message and its events."""

    whole_kind = chunk_kind = "message"
    ending = b""

    def __init__(
        self, service: Service, chat: ChatCompletionRequest, begun: Begun, identity: str
    ) -> None:
        super().__init__(service, chat, begun.generation, f"msg_{identity}")
        self._read, self._begun = begun.reader.read, False
        self._output = Output()
        self._reason: str | None = None

    def choice(self, delta: Delta) -> Mapping[str, Any]:
        """The message, of which `delta` is all."""
        list(self._events_of(delta))
        return {}

    part = choice

    def whole(self) -> Mapping[str, Any]:
        """The message when it has ended."""
        for delta in self._generation.deltas():
            self.choice(delta)
        return self._object_of(self._output.blocks) | self._end()

    def chunks(self, deltas: Sequence[Delta]) -> list[Mapping[str, Any]]:
        """The events of what came."""
        events: list[Mapping[str, Any]] = []
        if deltas and not self._begun:
            self._begun = True
            nothing = {"stop_reason": None, "stop_sequence": None}
            events.append({"type": "message_start", "message": self._object_of([]) | nothing})
        for delta in deltas:
            events += self._events_of(delta)
        return events

    def last(self) -> list[Mapping[str, Any]]:
        """The events that end it."""
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage_of()}
        return [delta, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> MessagesErrorResponse:
        """The event in place of those that end it."""
        return error.content_of_messages()

    def _events_of(self, delta: Delta) -> list[dict[str, Any]]:
        own = self._read(delta)
        self._reason = own.finish_reason or self._reason
        return list(self._output.add(own))

    def _end(self) -> dict[str, Any]:
        """Why it ended."""
        stop = self._generation.choices[0].stop_string if self._reason == "stop" else None
        reason = "end_turn" if stop is None else "stop_sequence"
        return {
            "stop_reason": _REASONS.get(self._reason or "", reason),
            "stop_sequence": stop,
        }

    def _object_of(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The message with its content, but for why it ended."""
        return {
            "id": self._envelope["id"],
            "type": "message",
            "role": "assistant",
            "model": self._envelope["model"],
            "content": content,
            "usage": self._usage_of(),
        }

    def _usage_of(self) -> dict[str, int]:
        """Counts so far; those that were taken over from another row are no `input_tokens`."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
