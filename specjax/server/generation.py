"""The choices of a request, from their submission to the engine to their last token."""

import asyncio
import itertools
import time
from collections import abc
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.engine.request import (
    EngineClosedError,
    QueueFullError,
    Request,
    RequestError,
    Statistics,
)
from specjax.server.choices import Choice, Delta, Echo
from specjax.server.errors import ApiError, queue_full, unavailable
from specjax.server.metrics import Metrics, Times
from specjax.server.responses import ResponseMetrics, Usage
from specjax.server.service import Service
from specjax.server.stops import StopStrings

if TYPE_CHECKING:
    from specjax.engine.sequence import Sequence

_NAMES = {"max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}
"""Fields that the engine calls by other names."""


class Prompt(NamedTuple):
    """A prompt's tokens, what repeats it in the response, and a request for each choice."""

    ids: abc.Sequence[int]
    echo: Echo | None
    requests: abc.Sequence[Request]


class Generation:
    """Choices that the engine makes, those of one prompt after those of another.

    `abort` must be called in the end, whatever happened; it may be called at any time.

    Args:
      choices: in the order of their indices.
      per_prompt: how many of them continue the same prompt.
      metrics: where they are counted.
      started: when the request came, by `time.monotonic()`.
    """

    def __init__(
        self, choices: abc.Sequence[Choice], per_prompt: int, metrics: Metrics, started: float
    ) -> None:
        self.choices = choices
        self.first_token_seconds: float | None = None
        self._of_prompts = choices[::per_prompt]
        self._metrics = metrics
        self._started = started
        self._changed: dict[int, Choice] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Takes all tokens of all choices.

        Raises:
          ApiError: the engine did not finish one of them.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    group.create_task(self._take(choice))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self.abort()
            self._wake.set()
        self._check()

    async def stream(
        self, write: Callable[[abc.Sequence[Delta]], Awaitable[None]], idle_seconds: float
    ) -> None:
        """Calls `write` with what choices have to give; what comes meanwhile waits, merged.

        Where nothing comes for `idle_seconds`, while requests wait for a row or prompts are read,
        it is called with nothing.

        Raises:
          ApiError: the engine did not finish one of them; what it gave has been written.
        """
        running = asyncio.create_task(self.run())
        clock = asyncio.get_running_loop().time
        written = clock()
        try:
            while not running.done() or self._changed:
                woken = await self._woken(written + idle_seconds)
                self._wake.clear()
                changed, self._changed = self._changed, {}
                deltas = [delta for each in changed.values() if (delta := each.delta())]
                if deltas or not woken:
                    await write(deltas)
                    written = clock()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _woken(self, until: float) -> bool:
        """Whether something comes before that time of the event loop."""
        try:
            async with asyncio.timeout_at(until):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _take(self, choice: Choice) -> None:
        """Takes the tokens of a choice until it ends."""
        times = Times(self._started)
        try:
            async for tokens in choice.sequence:
                if tokens.ids:
                    self._time(times)
                choice.take(tokens)
                self._changed[choice.index] = choice
                self._wake.set()
                if choice.finish_reason is not None:
                    break
        finally:
            choice.sequence.abort()
            times.admitted, times.ended = choice.sequence.admitted, time.monotonic()
            self._metrics.finished(
                choice.finish_reason or "abort", choice.prompt_tokens, choice.completion_tokens,
                times,
            )  # fmt: skip

    def _time(self, times: Times) -> None:
        now = time.monotonic()
        if times.last is not None:
            self._metrics.between_events(now - times.last)
        else:
            self._metrics.first_token.observe(now - self._started)
            self.first_token_seconds = self.first_token_seconds or now - self._started
            times.first = now
        times.last = now

    def _check(self) -> None:
        reasons = {choice.finish_reason or "abort" for choice in self.choices}
        if error := next(filter(None, (each.sequence.grammar_error for each in self.choices)), ""):
            raise ApiError(400, error, code="grammar_limit")
        if "error" in reasons:
            raise ApiError(500, "The engine failed at this request.", code="engine_failed")
        if "abort" in reasons:
            message = "The server shut down before the response was complete."
            raise unavailable(message, "server_shutting_down")

    def abort(self) -> None:
        """Frees the rows of the choices that still run."""
        for choice in self.choices:
            choice.sequence.abort()

    def deltas(self) -> list[Delta]:
        """All that the choices have to give, in their order."""
        return [delta for choice in self.choices if (delta := choice.delta())]

    def usage(self) -> Usage:
        """Counts of tokens so far."""
        prompt = sum(choice.prompt_tokens for choice in self._of_prompts)
        made = sum(choice.completion_tokens for choice in self.choices)
        cached = sum(choice.sequence.statistics.cached_tokens for choice in self._of_prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def speculation(self) -> ResponseMetrics:
        """What speculation gave all choices together."""
        return speculation([choice.sequence.statistics for choice in self.choices])


def speculation(each: abc.Sequence[Statistics]) -> ResponseMetrics:
    """The metrics of statistics taken together; `accepted_at[i]` counts depth i + 1 and deeper."""
    steps = sum(one.steps for one in each)
    if not steps:
        return {"speculative_decoding": None}
    drafted = sum(one.draft_tokens for one in each)
    accepted = sum(one.accepted_tokens for one in each)
    depth = max(len(one.accepted_at) for one in each)
    reached = [steps, *(sum(_at(one.accepted_at, i) for one in each) for i in range(depth)), 0]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [here - deeper for here, deeper in itertools.pairwise(reached)],
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
        }
    }


def _at(counts: abc.Sequence[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0


async def submit(
    service: Service,
    prompts: abc.Sequence[Prompt],
    stops: abc.Sequence[str],
    started: float,
    texts: TokenTexts | None = None,
) -> Generation:
    """Hands all choices of all prompts to the engine, or none.

    `texts` are of the tokens, by default the service's.

    Raises:
      ApiError: the engine refuses a value (400), is full (429) or takes nothing more (503).
    """
    asked = [(prompt, request) for prompt in prompts for request in prompt.requests]
    search = StopStrings(stops, service.texts.special) if stops else None
    sequences = await _submitted(service, prompts)
    try:
        choices = [
            Choice(
                index, sequence, texts or service.texts, prompt.ids,
                stops=search, logprobs=request.logprobs is not None, echo=prompt.echo,
            )
            for index, (sequence, (prompt, request)) in enumerate(
                zip(sequences, asked, strict=True)
            )
        ]  # fmt: skip
    except BaseException:
        for sequence in sequences:
            sequence.abort()
        raise
    return Generation(choices, len(prompts[0].requests), service.metrics, started)


async def _submitted(service: Service, prompts: abc.Sequence[Prompt]) -> "list[Sequence]":
    sequences: list[Sequence] = []
    try:
        for prompt in prompts:
            sequences += service.engine.prepare(prompt.requests)
            await asyncio.sleep(0)  # others are answered between the choices of two prompts
        service.engine.enqueue(sequences)
        return sequences
    except QueueFullError as error:
        raise queue_full(str(error), error.retry_after) from error
    except EngineClosedError as error:
        known = {"failed": "engine_failed", "ready": "structured_output_unavailable"}
        code = known.get(service.state(), "server_shutting_down")
        raise unavailable(str(error), code) from error
    except RequestError as error:
        param = error.field and _NAMES.get(error.field, error.field)
        raise ApiError(400, str(error), param=param) from error
