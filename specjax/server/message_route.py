"""`/v1/messages`: Anthropic's Messages API, over the same chats."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.server.answer import ObjectAnswer
from specjax.server.chat import Begun, begin_chat, prepared
from specjax.server.connection import respond, unless_gone
from specjax.server.errors import ApiError
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
    answer = _Message(service, begun, record_of(request).id)
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


class _Message(ObjectAnswer):
    """A message and its events."""

    def __init__(self, service: Service, begun: Begun, identity: str) -> None:
        self._output = Output()
        read, add = begun.reader.read, self._output.add
        super().__init__(service, begun.generation, read, add, f"msg_{identity}")

    def _first(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._object_of([], None, None)}]

    def _ended(self) -> dict[str, Any]:
        return self._object_of(self._output.blocks, *self._end())

    def last(self) -> list[Mapping[str, Any]]:
        """The events that end it."""
        reason, stop = self._end()
        ended = {"stop_reason": reason, "stop_sequence": stop}
        delta = {"type": "message_delta", "delta": ended, "usage": self._usage_of()}
        return [delta, {"type": "message_stop"}]

    def _end(self) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that ended it."""
        stop = self._generation.choices[0].stop_string if self._reason == "stop" else None
        reason = "end_turn" if stop is None else "stop_sequence"
        return _REASONS.get(self._reason or "", reason), stop

    def _object_of(
        self, content: Sequence[Mapping[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
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
