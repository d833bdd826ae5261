"""Connections: how large and how slow a request's headers may be, and when a client is gone."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
"""Of a request line with its headers, and of the trailers of a body, as in h11."""
HEADER_SECONDS = 30.0
"""How long a client may take from its first byte, or from its connection, to the last header."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which bounds neither the size of headers nor the time for them.

    A client that goes away is gone for every request of its connection: uvicorn tells only the last
    of several that were sent at once, while the first one runs.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._unparsed_bytes = self._header_bytes = 0
        self._cycles: list[Any] = []

    def connection_made(self, transport: Any) -> None:
        """A client has come; its request must follow."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._headers_done()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a client."""
        in_headers = self._header_timer is not None
        super().data_received(data)
        if in_headers and self._header_timer is not None:  # else a body may have been before it
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        if self._header_timer is None:
            self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer of a body."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # uvicorn answers 400

    def on_headers_complete(self) -> None:
        """A request's headers are there."""
        self._headers_done()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._cycles = [each for each in self._cycles if not each.response_complete]
            self._cycles.append(self.cycle)

    def _await_headers(self) -> None:
        self._unparsed_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _headers_done(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()

    def _refuse(self) -> None:
        self._headers_done()
        self.transport.write(_TOO_LARGE)
        self.transport.close()
