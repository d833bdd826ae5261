"""A request in flight: what it asks for, how far it is, and its tokens on their way to a caller."""

import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from specjax.engine.request import Logprob, Request, Statistics, Tokens
from specjax.engine.watch import Recent, Watched

if TYPE_CHECKING:
    import asyncio
    import threading

    from specjax.base.grammars import Matcher
    from specjax.engine.programs import Parameters


class Sequence:
    """A request in an engine, from its check to its last token: an async iterator of `Tokens`.

    The last of them has a `finish_reason`. The scheduler decides when its prompt is read and which
    steps it takes part in; the engine counts and hands over what each step gave it.

    Args:
      request: what is asked for; nobody changes it.
      parameters: the same as arrays, for its row; None where no device runs it.
      loop: the event loop in which its tokens are waited for; None where nobody waits.
      queue: holds those that are not taken yet.
      abort: frees the row or the place in the queue of this sequence.
      all_read: is set while whoever reads it waits for more than it was given, or has aborted it;
        None where nobody waits for that.

    Attributes:
      id: names it where it is shown.
      statistics: counts so far.
      recent: its last tokens and its last tree.
      admitted: when it got a row, by `time.monotonic()`; None before.
      first_token: when its first token came, by `time.perf_counter()`; None before.
      prefilled: tokens of its prompt that the row holds.
      left: tokens that it may still be given, as far as is known.
      in_flight: steps of it whose output is not processed yet, each of which gives a token at
        least.
      tokens_in_flight: tokens that those give at most.
      prefix_checked: whether other rows were searched for its beginning when its turn to be read
        came.
      finished: whether it gets no more tokens; read and set under the engine's lock.
      matcher: what follows it through its grammar, and the number by which programs ask for that
        (0: none), once it decodes.
    """

    def __init__(
        self,
        request: Request,
        parameters: "Parameters | None" = None,
        *,
        loop: "asyncio.AbstractEventLoop | None" = None,
        queue: "asyncio.Queue[Tokens] | None" = None,
        abort: "Callable[[Sequence], None] | None" = None,
        all_read: "threading.Event | None" = None,
    ) -> None:
        self.request, self.parameters = request, parameters
        self.id = f"req-{secrets.token_hex(6)}"
        self.statistics = Statistics(prompt_tokens=len(request.prompt))
        self.recent = Recent()
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.prefilled, self.left = 0, request.max_new_tokens
        self.in_flight = self.tokens_in_flight = 0
        self.prefix_checked = self.finished = False
        self.all_read = all_read
        self.matcher: Matcher | None = None
        self.grammar_number = 0
        self._prompt_logprobs: list[Logprob | None] = [None]
        self._loop, self._queue, self._abort = loop, queue, abort
        self._exhausted = False

    def __aiter__(self) -> "Sequence":
        return self

    async def __anext__(self) -> Tokens:
        if self._exhausted or self._queue is None:
            raise StopAsyncIteration
        if self.all_read is not None and self._queue.empty():
            self.all_read.set()
        tokens = await self._queue.get()
        self._exhausted = tokens.finish_reason is not None
        return tokens

    def abort(self) -> None:
        """Ends it with the reason "abort", if it has not finished; its row is free then."""
        if self._abort is not None:
            self._abort(self)
        if self.all_read is not None:
            self.all_read.set()

    @property
    def prompt_logprobs(self) -> list[Logprob | None] | None:
        """The log probabilities of the prompt's tokens, where they were asked for.

        They are there before the first tokens come, and None before. The first token has None.
        """
        asked, found = self.request, self._prompt_logprobs
        whole = asked.prompt_logprobs is not None and len(found) == len(asked.prompt)
        return found if whole else None

    def add_prompt_logprobs(self, found: Iterable[Logprob]) -> None:
        """Notes those of the next tokens of the prompt."""
        self._prompt_logprobs.extend(found)

    @property
    def grammar_error(self) -> str:
        """Why its text could not go on under its grammar, in a sentence; empty if it could."""
        return "" if self.matcher is None else self.matcher.error()

    @property
    def prefilling(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.prefilled < len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        """Whether it takes part in steps: those in flight may not give all its tokens."""
        return self.left > self.in_flight and not self.prefilling

    @property
    def begins(self) -> bool:
        """Whether the step that gives its first token is the next one."""
        return self.first_token is None and not self.in_flight

    @property
    def may_end_early(self) -> bool:
        """Whether something but `max_new_tokens` may end it."""
        asked = self.request
        ends = not asked.ignore_eos or asked.grammar is not None
        return ends or bool(asked.stop_token_ids) or asked.has_stop_strings

    def steps_left(self, pace: float) -> float:
        """Steps that it is expected to take after those in flight, of `pace` tokens each."""
        counts = self.statistics
        pace = counts.generated_tokens / counts.steps if counts.steps else pace
        return self.left / pace - self.in_flight

    def tpot_ms(self, now: float) -> float:
        """Milliseconds a token since the first."""
        taken = now - (self.first_token or now)
        return 1000 * taken / max(self.statistics.generated_tokens - 1, 1)

    def watched(self, row: int) -> Watched:
        """What may be shown of it while it runs in a row."""
        counts, asked = self.statistics, self.request
        setting, tree = self.recent.tree
        return Watched(
            self.id, row, asked.prompt, asked.temperature, asked.max_tpot_ms, counts.steps,
            counts.generated_tokens, counts.accepted_tokens, self.recent.tokens, setting, tree,
        )  # fmt: skip


def hand_over(outputs: Iterable[tuple[Sequence, Tokens]]) -> None:
    """Hands tokens to their sequences' event loops, each of which is woken once for all of them.

    Any thread may. What follows a finish reason is not read any more.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sequence, Tokens]]] = {}
    for sequence, tokens in outputs:
        if sequence._loop is not None:
            by_loop.setdefault(sequence._loop, []).append((sequence, tokens))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:  # the loop is closed: nobody waits any more
            for sequence, _ in own:
                sequence.abort()


def _put_all(outputs: list[tuple[Sequence, Tokens]]) -> None:
    for sequence, tokens in outputs:
        if sequence._queue is not None:
            sequence._queue.put_nowait(tokens)
