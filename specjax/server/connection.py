"""Work for a client that may go away, and streams of server-sent events to slow ones."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specjax.server.answer import Answer
from specjax.server.choices import Delta
from specjax.server.errors import ApiError
from specjax.server.generation import Generation
from specjax.server.rendering import dumps, rendered
from specjax.server.service import service_of

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What nginx logs for a client that went away; nobody receives it."""


class ClientGoneError(Exception):
    """The client closed its connection before the response was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled as soon as the client goes away.

    Args:
      receive: of a request whose body has been read: the next message is the disconnect.
      work: what the client waits for.

    Raises:
      ClientGoneError: the client went away.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event; one that has a type has its name, too."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + dumps(content).encode() + b"\n\n"


def _long_events(contents: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + rendered(content) + b"\n\n" for content in contents)


_LONG = 64
"""Tokens with log probabilities whose events are made in a thread."""


_COMMENT = b": waiting\n\n"
"""Which clients skip: proxies close connections on which nothing comes for a minute."""


class EventStream(Response):
    """A response of server-sent events, which ends with `[DONE]`, or with an error.

    While the client's connection takes no more, further tokens wait merged in the choices, so that
    a client that reads slowly gets fewer, larger events and keeps nobody waiting.

    Args:
      generation: whose tokens it gives; it is aborted however the response ends.
      answer: the shape of its events.
      idle_seconds: after how long without an event a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, idle_seconds: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._answer = answer
        self._idle_seconds = idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until all choices have ended or the client goes away."""
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ClientGoneError:
            pass
        finally:
            self._generation.abort()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def write(deltas: Sequence[Delta]) -> None:
            if sum(len(delta.ids) for delta in deltas) < _LONG:
                events = b"".join(map(event, self._answer.chunks(deltas)))
            else:
                events = await asyncio.to_thread(lambda: _long_events(self._answer.chunks(deltas)))
            await _send_body(send, events or _COMMENT)

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            await self._generation.stream(write, self._idle_seconds)
            ending = b"".join(map(event, self._answer.last())) + self._answer.ending
        except ApiError as error:
            ending = event(error.content_at(scope["path"]))
        except Exception as error:
            _logger.exception("a stream failed")
            failure = ApiError(500, f"The server failed: {type(error).__name__}.")
            ending = event(failure.content_at(scope["path"]))
        await _send_body(send, ending, last=True)


async def _send_body(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def respond(
    request: Request, generation: Generation, answer: Answer, stream: bool
) -> Response:
    """The response that gives a generation's choices, as a stream or when all have ended.

    Raises:
      ApiError: the engine did not finish one of them.
      ClientGoneError: the client went away.
    """
    service = service_of(request)
    if stream:
        return EventStream(generation, answer, service.options.idle_seconds)
    try:
        await unless_gone(request.receive, generation.run())
    finally:
        generation.abort()
    tokens = generation.usage()["total_tokens"]
    body = await service.run_apart(tokens, lambda: rendered(answer.whole()))
    return Response(body, media_type="application/json")
