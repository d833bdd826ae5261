"""Bodies of requests: read up to a limit, and parsed as JSON that means one thing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from specjax.server.connection import unless_gone
from specjax.server.errors import ApiError
from specjax.server.options import ServerOptions
from specjax.server.parsing import RefusedError, check_amount, parsed
from specjax.server.service import refusal, service_of

_DISCARDED = 4
"""Times the limit that is read beyond it, so that clients who send before they read get a 413."""
_DISCARDED_SECONDS = 2.0
_LARGE = 1 << 16
"""Bytes of a body that would hold the event loop: a worker parses it."""


class BoundedRequest(Request):
    """A request whose body is read within limits of size and time, and parsed strictly."""

    def __init__(self, request: Request, options: ServerOptions) -> None:
        super().__init__(request.scope, request.receive)
        self._options = options

    async def body(self) -> bytes:
        """The body.

        Raises:
          ApiError: it is no JSON by its type (415), too large (413) or too slow (408).
        """
        if not hasattr(self, "_body"):
            _check_type(self.headers.get("content-type", ""))
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._options.body_seconds):
                return await self._read_up_to(self._options.max_body_bytes)
        except TimeoutError:
            message = f"The body did not come within {self._options.body_seconds:g} seconds."
            raise ApiError(408, message, headers={"Connection": "close"}) from None

    async def _read_up_to(self, limit: int) -> bytes:
        length = self.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit:
            if "expect" not in self.headers:  # who asks first has not sent it
                await _discard(self.stream(), limit)
            self._refuse(f"{int(length):,}")
        received, pieces = bytearray(), self.stream()
        async for piece in pieces:
            received += piece
            if len(received) > limit:
                await _discard(pieces, limit)
                self._refuse("more")
        return bytes(received)

    def _refuse(self, size: str) -> NoReturn:
        limit = self._options.max_body_bytes
        message = f"The body may have {limit:,} bytes; it has {size}."
        raise ApiError(413, message, headers={"Connection": "close"})

    async def json(self) -> Any:
        """The body's value; a large body is parsed by a worker.

        Raises:
          ApiError: it is no JSON, JSON of which programs would disagree what it means, or has more
            messages, token ids or other values than a request may have (400).
        """
        body = await self.body()
        service = service_of(self)
        if len(body) > _LARGE:
            return await unless_gone(self.receive, service.parsed(body))
        try:
            value = parsed(body)
            check_amount(value, service.most())
        except RefusedError as refused:
            raise refusal(refused) from refused
        return value


async def _discard(pieces: AsyncIterator[bytes], limit: int) -> None:
    """Reads the rest if it comes soon: a connection closed on it loses the response."""
    left = _DISCARDED * limit
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DISCARDED_SECONDS):
            async for piece in pieces:
                left -= len(piece)
                if left < 0:
                    return


def _check_type(content_type: str) -> None:
    if content_type.split(";")[0].strip().lower() != "application/json":
        shown = f"it is {content_type[:80]!r}" if content_type else "there is none"
        raise ApiError(415, f"The content type must be application/json; {shown}.")
