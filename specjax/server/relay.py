"""Requests that another process answers: they go there whole, ASGI's messages come back.

`Front` is the application of a process that listens; `answered` runs the server's own application
(`specjax.server.app`) for a request in the process that has the engine.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.server.body import BoundedRequest
from specjax.server.connection import ClientGoneError, event, unless_gone
from specjax.server.errors import ApiError, respond_to_api_error
from specjax.server.metrics import CONTENT_TYPE, merged
from specjax.server.options import ServerOptions
from specjax.server.stored import replica_of

_logger = logging.getLogger(__name__)

_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
"""What of a scope goes to another process: plain values."""
_LARGE = 1 << 16
"""Bytes of a body that would hold the event loop: a thread parses it."""
_MOST = 1 << 16
"""Characters of a prompt's beginning that are looked at."""
NO_PROMPT = "/"
"""The beginning of requests without a prompt, which all go to one replica."""
_RETRY_SECONDS = 1
"""What a client is told to wait whose replica ended: others go on."""


_GONE_SECONDS = 1.0
"""How long an application may take to notice that its client is gone."""
_REQUEST_ID = b"x-request-id"


class ReplicaLostError(Exception):
    """The process that answered has ended."""


@dataclasses.dataclass(frozen=True)
class RelayedRequest:
    """A request as it goes to another process.

    Attributes:
      scope: ASGI's.
      body: all of it.
      prompt: the beginning of its prompt or chat, by which routers keep requests that begin alike
        together (Ray's own reads an attribute of this name); never empty.
      replica: the one that holds the response which the request names; empty if any may answer.
    """

    scope: Mapping[str, Any]
    body: bytes = b""
    prompt: str = NO_PROMPT
    replica: str = ""


async def answered(app: ASGIApp, request: RelayedRequest) -> AsyncGenerator[list[Message], None]:
    """The messages of an application's response, those that are there at once together.

    The client is gone for the application when the generator is closed.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    task = asyncio.create_task(_run(app, request, messages, gone))
    try:
        ended = False
        while not ended:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            ended = ready[-1] is None
            if given := [each for each in ready if each is not None]:
                yield given
    finally:
        gone.set()
        await asyncio.wait((task,), timeout=_GONE_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(
    app: ASGIApp,
    request: RelayedRequest,
    messages: "asyncio.Queue[Message | None]",
    gone: asyncio.Event,
) -> None:
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    try:
        await app(dict(request.scope), receive, messages.put)
    except Exception:  # the application has sent its response to that
        _logger.exception("a request failed")
    finally:
        messages.put_nowait(None)


class Front:
    """Middleware that reads requests within limits and has another process answer them.

    Args:
      app: gets what is no request, such as the events of its lifespan.
      answers: the messages of a request's response; raises `ReplicaLostError`.
      expositions: the metrics of every replica, by its name.
      options: limits of bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        answers: Callable[[RelayedRequest], AsyncGenerator[list[Message], None]],
        expositions: Callable[[], Awaitable[Mapping[str, str]]],
        options: ServerOptions,
    ) -> None:
        self._app = app
        self._answers = answers
        self._expositions = expositions
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].removeprefix(scope.get("root_path", "")) == "/metrics":
            text = merged(await self._expositions())
            await Response(text, media_type=CONTENT_TYPE)(scope, receive, send)
        else:
            with contextlib.suppress(ClientGoneError, ClientDisconnect):
                await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = BoundedRequest(Request(scope, receive), self._options)
        try:
            body = await request.body() if request.method == "POST" else b""
        except ApiError as refused:
            await respond_to_api_error(request, refused)(scope, receive, send)
            return
        if len(body) > _LARGE:
            prompt, named = await asyncio.to_thread(beginning, body)
        else:
            prompt, named = beginning(body)
        relayed = RelayedRequest(
            {name: scope[name] for name in _SCOPE if name in scope},
            body,
            prompt or NO_PROMPT,
            replica_of(named or scope["path"].rpartition("/")[2]),
        )
        await unless_gone(receive, self._relay(relayed, scope, receive, send))

    async def _relay(
        self, request: RelayedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        kind: bytes | None = None
        has_id = any(name == _REQUEST_ID for name, _ in scope["headers"])
        try:
            async with contextlib.aclosing(self._answers(request)) as answers:
                async for messages in answers:
                    for message in messages:
                        if message["type"] == "http.response.start":
                            kind = dict(message["headers"]).get(b"content-type", b"")
                            message = _without_id(message) if has_id else message
                        await send(message)
        except ReplicaLostError:
            lost = ApiError(
                503,
                "The replica that answered has ended; the request may be sent again.",
                code="replica_lost",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )
            if kind is None:
                await respond_to_api_error(Request(scope), lost)(scope, receive, send)
            elif kind.startswith(b"text/event-stream"):
                content = lost.content_at(scope["path"])
                await send({"type": "http.response.body", "body": event(content)})
            else:
                raise


def _without_id(start: Message) -> Message:
    """The start of a response without an id: who gave the request one answers with that."""
    return {**start, "headers": [each for each in start["headers"] if each[0] != _REQUEST_ID]}


def beginning(body: bytes) -> tuple[str, str]:
    """How the prompt of a request begins, and the id of the response that it goes on from.

    Both are empty where there is none, as in a body that is no JSON.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(value, dict):
        return "", ""
    named = value.get("previous_response_id")
    parts = (value.get(name) for name in ("instructions", "system", "messages", "prompt", "input"))
    texts = (_text(part) for part in parts if part is not None)
    return "".join(texts)[:_MOST], named if isinstance(named, str) else ""


def _text(part: object) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
