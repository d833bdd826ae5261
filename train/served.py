"""Continuations from an engine, whose rows do not wait for the longest text of a batch."""

import asyncio
import threading
from collections import abc
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.engine.engine import Engine
from specjax.engine.request import Logprob, Request
from specjax.engine.sequence import Sequence
from specjax.models.transformer import Model


class Continuation(NamedTuple):
    """The tokens of a continuation, and what each was taken from if that was asked for."""

    ids: list[int]
    logprobs: list[Logprob]


class EngineRows:
    """An engine of `rows` rows for texts of at most `tokens` tokens, asked from a plain thread."""

    def __init__(self, target: Model, rows: int, tokens: int) -> None:
        self._engine = Engine(target, rows=rows, max_model_len=tokens)
        self._engine.start()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(self, requests: abc.Sequence[Request]) -> "Future[list[Continuation]]":
        """The continuations of `requests`, when all have ended.

        Raises:
          RuntimeError: the engine failed; the future's result raises it.
        """

        async def all_of_them() -> list[Continuation]:
            return await asyncio.gather(*map(self._read, self._engine.submit_all(requests)))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop)

    async def _read(self, sequence: Sequence) -> Continuation:
        found = Continuation([], [])
        async for tokens in sequence:
            found.ids.extend(tokens.ids)
            found.logprobs.extend(tokens.logprobs)
            if tokens.finish_reason not in (None, "stop", "length"):
                raise RuntimeError(self._engine.failure or "the engine was closed.")
        return found


def requests_of(
    prompts: abc.Sequence[abc.Sequence[int]],
    temperatures: Float[np.ndarray, " N"],
    new_tokens: int,
    first: int,
    seed: int,
    logprobs: int | None = None,
) -> list[Request]:
    """Requests for rows from number `first` on, each with a seed of its own.

    So a row's text depends on nothing beside it, but for rounding. `logprobs` likeliest tokens
    come with each token (None: none do).
    """
    rows = enumerate(zip(prompts, temperatures, strict=True), start=first)
    return [
        Request(
            prompt=prompt,
            max_new_tokens=new_tokens,
            temperature=float(temperature),
            seed=seed << 32 | row,
            logprobs=logprobs,
        )
        for row, (prompt, temperature) in rows
    ]
