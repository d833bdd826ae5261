"""The rows' state on the device and the programs over it, behind plain values of the host."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.drafter import Drafter, TokenLogprobs
from specjax.engine import checks, programs
from specjax.engine.programs import Given, Parameters, Setup
from specjax.engine.request import Logprob, Request
from specjax.engine.state import EngineState
from specjax.models.transformer import Model

_REPEATS = 3
"""Runs of a program whose median is taken for how long it takes."""


class RowResult(NamedTuple):
    """What a step gave a row."""

    tokens: list[int]
    done: bool
    nodes: int
    accepted: int
    logprobs: list[Logprob]


class Pending(NamedTuple):
    """What a step gives, perhaps still being made; `scored` where log probabilities are there."""

    given: Given
    scored: bool


class Device:
    """An engine's state, given away to each program and taken back from it.

    Nothing here waits for the device but `results`, `scores` and `compile`.

    Args:
      target: the model.
      drafter: what drafts.
      setup: what is static.
      rows: how many rows there are.
    """

    def __init__(self, target: Model, drafter: Drafter, setup: Setup, rows: int) -> None:
        self._models, self._setup = (target, drafter), setup
        self._config, self._rows = target.config, rows
        self._state: EngineState = programs.empty(*self._models, setup, rows)
        vocabulary = target.config.vocab_size
        self._no_bias = jnp.zeros(vocabulary, jnp.float32)
        self._no_prompt = jnp.zeros(vocabulary, bool)
        self._wanted = {flag: jax.device_put(np.bool_(flag)) for flag in (False, True)}
        self.chunk_seconds: dict[int, float] = {}
        self.step_seconds: dict[tuple[int, int], float] = {}

    def begin(self, row: int, token: int) -> None:
        """A row holds nothing but a token."""
        self._state = programs.begin(*self._models, self._state, self._setup, _put([row, token]))

    def copy(self, source: int, row: int, length: int, last: int) -> None:
        """A row holds the first `length` tokens of another, the last of which is `last`."""
        at = _put([source, row, length, last])
        self._state = programs.copy(*self._models, self._state, self._setup, at)

    def extend(
        self, row: int, tokens: Sequence[int], size: int, scored: bool = False
    ) -> TokenLogprobs | None:
        """A row holds `tokens` too; with `scored`, their log probabilities for `scores`."""
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        at = _put([row, len(tokens)])
        self._state, found = programs.extend(
            *self._models, self._state, self._setup, at, _put(padded), scored=scored
        )
        return found

    def assign(self, row: int, request: Request, asked: Parameters) -> None:
        """A row decodes from here on as a request asks for."""
        bias, prompt = self._no_bias, self._no_prompt
        if asked.integers[3]:
            vocabulary = self._config.vocab_size
            bias = _put(checks.bias_of(request, vocabulary))
            prompt = _put(checks.tokens_of(request.prompt, vocabulary))
        given = _put(np.int32(row)), jax.device_put(asked), bias, prompt
        self._state = programs.assign(*self._models, self._state, self._setup, *given)

    def advance(
        self, rows: Sequence[int], filling: Sequence[int], width: int, scored: bool
    ) -> Pending:
        """A step of `rows`; those that fill it up end, if they have not."""
        control = [(row, 0) for row in rows] + [(row, 1) for row in filling]
        self._state, given = programs.advance(
            *self._models, self._state, self._setup, width, _put(control), self._wanted[scored]
        )
        return Pending(given, scored)

    def results(self, pending: Pending, rows: int) -> list[RowResult]:
        """What a step gave its first `rows` rows; waits for it."""
        packed = jax.device_get(pending.given.packed)[:rows]
        window = (packed.shape[1] - 4) // 2
        top = tops = None
        if pending.scored:
            top, tops = jax.device_get((pending.given.top, pending.given.top_tokens))
        found = []
        for number, own in enumerate(packed):
            count, done, nodes, accepted = own[:4].tolist()
            tokens = own[4 : 4 + count].tolist()
            logprobs = []
            if top is not None and tops is not None:
                values = own[4 + window :].view(np.float32)[:count]
                logprobs = _logprobs(values, top[number], tops[number])
            found.append(RowResult(tokens, bool(done), nodes, accepted, logprobs))
        return found

    def scores(self, found: TokenLogprobs, count: int) -> list[Logprob]:
        """The log probabilities of the first `count` tokens of a chunk; waits for them."""
        values, top, tops = jax.device_get((found.of_token, found.top, found.top_tokens))
        return _logprobs(values[0, :count], top[0], tops[0])

    def compile(
        self, steps: Sequence[tuple[int, int]], chunks: Sequence[int], scored: int, reuses: bool
    ) -> Iterator[str]:
        """Compiles every program and measures those that are planned by; yields what comes next.

        `steps` are rows and columns, `chunks` numbers of tokens; a chunk of `scored` tokens gives
        log probabilities.
        """
        request = Request(prompt=[0])
        asked = checks.check_request(request, self._config, 2**30)
        yield "a row"
        for row in range(self._rows):
            self.begin(row, 0)
        if reuses:
            yield "a copy"
            self.copy(0, 0, 1, 0)
        yield "parameters"
        self.assign(0, request, asked)
        for size in chunks:
            yield f"prompts by {size}"
            self.chunk_seconds[size] = self._timed(lambda size=size: self.extend(0, [0], size))
        yield f"log probabilities of prompts by {scored}"
        found = self.extend(0, [0], scored, scored=True)
        assert found is not None
        self.scores(found, 1)
        for rows, width in steps:
            yield f"{rows} rows, {width} columns"
            self._begin_all(rows)
            run = partial(self.advance, range(rows), (), width, False)
            self.step_seconds[rows, width] = self._timed(run)
        self._begin_all(0)

    def _begin_all(self, live: int) -> None:
        """New texts in all rows, of which the first `live` decode, for as long as there is room."""
        request = Request(prompt=[0], max_new_tokens=2**20, temperature=1.0, ignore_eos=True)
        asked = checks.check_request(request, self._config, 2**30)
        for row in range(self._rows):
            self.begin(row, 0)
            if row < live:
                self.assign(row, request, asked)
        self._wait()

    def _timed(self, run: Callable[[], object]) -> float:
        """The median of how long a program takes, in seconds; the first run compiles it."""
        run()
        self._wait()
        found = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run()
            self._wait()
            found.append(time.perf_counter() - start)
        return float(np.median(found))

    def _wait(self) -> None:
        jax.block_until_ready(self._state.naive)
        jax.block_until_ready(self._state.decode.last)


def _put(values: object) -> jax.Array:
    return jax.device_put(np.asarray(values, getattr(values, "dtype", np.int32)))


def _logprobs(values: np.ndarray, top: np.ndarray, tokens: np.ndarray) -> list[Logprob]:
    return [
        Logprob(float(value), tuple(zip(tokens[at].tolist(), top[at].tolist(), strict=True)))
        for at, value in enumerate(values)
    ]
