"""`/v1/responses`: OpenAI's newer API, over the same chats."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.server.answer import ObjectAnswer
from specjax.server.chat import Begun, begin_chat
from specjax.server.choices import Delta
from specjax.server.connection import respond
from specjax.server.errors import ApiError, sentence
from specjax.server.fields import check_fields
from specjax.server.log import record_of
from specjax.server.protocol import ChatCompletionRequest
from specjax.server.response_items import Output, ResponsesRequest, chat_of, messages_of
from specjax.server.service import Service, service_of
from specjax.server.stored import Stored, response_id


async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers an input; in a stream if asked for.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    service = service_of(request)
    check_fields(body, request)
    stored = service.stored
    before = stored.messages(body.previous_response_id) if body.previous_response_id else []
    messages = [*before, *messages_of(body.input)]
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = _checked(chat_of(body, [*first, *messages]))
    begun = await begin_chat(chat, request)
    answer = _Response(service, begun, record_of(request).id, body, messages, stored)
    return await respond(request, begun.generation, answer, bool(body.stream))


def _checked(chat: dict[str, Any]) -> ChatCompletionRequest:
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        message, param = sentence(found, chat)
        message, param = (
            None if each is None else each.replace("messages", "input", 1)
            for each in (message, param)
        )
        raise ApiError(400, message or "", param=param) from error


async def show_response(response: str, request: Request) -> Response:
    """A response that was made.

    Raises:
      ApiError: it is not known (404).
    """
    return JSONResponse(service_of(request).stored.response(response))


async def delete_response(response: str, request: Request) -> Response:
    """Forgets a response.

    Raises:
      ApiError: it is not known (404).
    """
    service_of(request).stored.remove(response)
    return JSONResponse({"id": response, "object": "response", "deleted": True})


class _Response(ObjectAnswer):
    """A response's object and its events."""

    def __init__(
        self,
        service: Service,
        begun: Begun,
        identity: str,
        body: ResponsesRequest,
        messages: Sequence[Mapping[str, Any]],
        stored: Stored,
    ) -> None:
        self._output, self._number, self._made = Output(), 0, int(time.time())
        self._body, self._messages, self._stored = body, messages, stored
        self._tokenizer = service.tokenizer
        named = response_id(identity, service.options.replica)
        super().__init__(service, begun.generation, begun.reader.read, self._output.add, named)

    def _first(self) -> list[dict[str, Any]]:
        kinds = "response.created", "response.in_progress"
        return [{"type": kind, "response": self._object_of(None)} for kind in kinds]

    def chunks(self, deltas: Sequence[Delta]) -> list[Mapping[str, Any]]:
        """The events of what came, with their numbers."""
        return [self._numbered(each) for each in super().chunks(deltas)]

    def last(self) -> list[Mapping[str, Any]]:
        """The event that ends it."""
        whole = self._ended()
        return [self._numbered({"type": f"response.{whole['status']}", "response": whole})]

    def _numbered(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _ended(self) -> dict[str, Any]:
        status = "incomplete" if self._reason == "length" else "completed"
        whole = self._object_of(status)
        if self._body.store is not False:
            self._stored.add([*self._messages, *self._output.messages()], whole)
        return whole

    def _object_of(self, status: str | None) -> dict[str, Any]:
        """The response; one that goes on has no `status` here."""
        body = self._body
        usage = None if status is None else self._usage_of()
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        own = None if body.text is None else body.text.format
        kind = {"type": "text"} if own is None else own.model_dump(by_alias=True, exclude_none=True)
        effort = None if body.reasoning is None else body.reasoning.effort
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._made,
            "status": status or "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [] if status is None else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": kind},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage_of(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens()},
            "total_tokens": usage["total_tokens"],
        }

    def _thought_tokens(self) -> int:
        """Tokens of the thoughts' text."""
        items = (each for each in self._output.items if each["type"] == "reasoning")
        texts = [each["content"][0]["text"] for each in items]
        return sum(len(self._tokenizer(text).input_ids) for text in texts)
