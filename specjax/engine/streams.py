"""What an engine gives a request, from its thread to an event loop."""

import asyncio
import threading
from collections.abc import Callable

from specjax.engine.request import Logprob, Request, Statistics, Tokens


class TokenStream:
    """The tokens of a request as they come: an async iterator of `Tokens`.

    The last one has a `finish_reason`. `prompt_logprobs`, where they were asked for, are there
    before the first; the first token of a prompt has None.
    """

    def __init__(
        self, request: Request, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]
    ) -> None:
        self.request = request
        self.statistics = Statistics(prompt_tokens=len(request.prompt))
        self.prompt_logprobs: list[Logprob | None] | None = None
        self._loop, self._cancel = loop, cancel
        self._queue: asyncio.Queue[Tokens] = asyncio.Queue()
        self._ended = self._given = False
        self._lock = threading.Lock()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Tokens:
        if self._given:
            raise StopAsyncIteration
        tokens = await self._queue.get()
        self._given = tokens.finish_reason is not None
        return tokens

    def abort(self) -> None:
        """Ends the request with the reason "abort", if it has not ended; its row is free then."""
        self._cancel()

    def give(self, tokens: Tokens) -> None:
        """Hands tokens over, from any thread; what comes after a finish reason is dropped."""
        with self._lock:
            if self._ended:
                return
            self._ended = tokens.finish_reason is not None
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, tokens)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._cancel()
