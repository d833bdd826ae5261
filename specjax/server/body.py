"""Bodies of requests: read up to a limit, and parsed as JSON that means one thing."""

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from specjax.server.errors import ApiError
from specjax.server.options import ServerOptions

_MOST_FIELDS = 1024
"""Of one object. Each field that is wrong makes an error of about a kilobyte."""
_DISCARDED = 4
"""Times the limit that is read beyond it, so that clients who send before they read get a 413."""
_DISCARDED_SECONDS = 2.0
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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
        """The body's value.

        Raises:
          ApiError: it is no JSON, or JSON of which programs would disagree what it means (400).
        """
        return parsed(await self.body())


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


def parsed(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ApiError: it is no JSON in UTF-8, has NaN, a field twice, an infinite number, a lone surrogate
        or very many fields or levels.
    """
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: byte {error.start} is not.") from error
    except UnicodeEncodeError as error:
        raise ApiError(400, "The body has half of a surrogate pair in a string.") from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, "The body has too many levels of lists and objects.") from error
    except ValueError as error:
        raise ApiError(400, f"The body cannot be read: {error}.") from error
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(pairs) > _MOST_FIELDS:
        raise ValueError(f"an object has {len(pairs):,} fields; it may have {_MOST_FIELDS:,}")
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {json.dumps(twice[:80])} is there twice")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is too large")
    return value
