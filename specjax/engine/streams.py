"""What an engine gives a request, from its thread to an event loop."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterable

from specjax.engine.request import Logprob, Request, Statistics, Tokens
from specjax.engine.watch import Recent, Watched


class TokenStream:
    """The tokens of a request as they come: an async iterator of `Tokens`.

    The last one has a `finish_reason`. `prompt_logprobs`, where they were asked for, are there
    before the first; the first token of a prompt has None. `admitted` is when the request got a
    row, by `time.monotonic()`; None before. `recent` is what may be shown of it.
    """

    def __init__(
        self, request: Request, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]
    ) -> None:
        self.request = request
        self.statistics = Statistics(prompt_tokens=len(request.prompt))
        self.prompt_logprobs: list[Logprob | None] | None = None
        self.admitted: float | None = None
        self.first_landed: float | None = None
        self.recent = Recent()
        self.id = f"req-{secrets.token_hex(6)}"
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

    def tpot_ms(self, now: float) -> float:
        """Milliseconds a token since the first."""
        taken = now - (self.first_landed or now)
        return 1000 * taken / max(self.statistics.generated_tokens - 1, 1)

    def watched(self, row: int) -> Watched:
        """What may be shown of it while it runs in a row."""
        counts, asked = self.statistics, self.request
        setting, tree = self.recent.tree
        return Watched(
            self.id, row, asked.prompt, asked.temperature, asked.max_tpot_ms, counts.steps,
            counts.generated_tokens, counts.accepted_tokens, self.recent.tokens, setting, tree,
        )  # fmt: skip

    def give(self, tokens: Tokens) -> None:
        """Hands tokens over, from any thread; what comes after a finish reason is dropped."""
        give_all([(self, tokens)])

    def _takes(self, tokens: Tokens) -> bool:
        """Whether it has not ended; it may end with these tokens."""
        with self._lock:
            if self._ended:
                return False
            self._ended = tokens.finish_reason is not None
        return True


def give_all(given: Iterable[tuple[TokenStream, Tokens]]) -> None:
    """Hands tokens over as `TokenStream.give` does; an event loop is woken once for all of them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, Tokens]]] = {}
    for stream, tokens in given:
        if stream._takes(tokens):
            by_loop.setdefault(stream._loop, []).append((stream, tokens))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:  # the loop is closed: nobody waits any more
            for stream, _ in own:
                stream.abort()


def _put_all(given: list[tuple[TokenStream, Tokens]]) -> None:
    for stream, tokens in given:
        stream._queue.put_nowait(tokens)
