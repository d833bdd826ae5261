"""The rows' state on the device and the programs over it, behind plain values of the host."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.drafter import Drafter, TokenLogprobs
from specjax.engine import checks, programs
from specjax.engine.programs import Given, Parameters, Setup
from specjax.engine.request import Logprob, Request
from specjax.engine.state import EngineState
from specjax.models.transformer import Model

_KEPT = 1024
"""Sets of rows whose arrays are kept on the device."""

_MEASURED_TOKENS = 2048
"""Tokens that a row holds at most when it is measured how much they slow a chunk."""

_REPEATS, _MOST_REPEATS, _TIMED_SECONDS = 3, 20, 0.1
"""Runs of a program, so many and for so long, whose median is how long it takes."""


class RowResult(NamedTuple):
    """What a step gave a row."""

    tokens: list[int]
    done: bool
    nodes: int
    accepted: int
    logprobs: list[Logprob]


class Pending(NamedTuple):
    """What a step gives, perhaps still being made.

    `places` are those of the rows that were asked for among the step's, `scored` which of them want
    log probabilities.
    """

    given: Given
    scored: tuple[bool, ...]
    places: tuple[int, ...]


class Device:
    """An engine's state, given away to each program and taken back from it.

    Nothing here waits for the device but `results`, `scores`, `wait` and `compile`.

    Args:
      target: the model.
      drafter: what drafts.
      setup: what is static.
      rows: how many rows there are.
    """

    def __init__(self, target: Model, drafter: Drafter, setup: Setup, rows: int) -> None:
        self._setup, self._config, self._rows = setup, target.config, rows
        self._window = drafter.window
        # Programs take and give leaves in lists, which jax flattens without asking Python.
        self._models, self._models_tree = jax.tree.flatten((target, drafter))

        def begun(target: Model, drafter: Drafter) -> EngineState:
            return programs.empty(target, drafter, setup, rows)

        begun_state = jax.jit(begun)(target, drafter)
        self._state, self._state_tree = jax.tree.flatten(begun_state)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._control: dict[tuple[tuple[int, int], ...], jax.Array] = {}
        vocabulary = target.config.vocab_size
        self._no_bias = jnp.zeros(vocabulary, jnp.float32)
        self._no_prompt = jnp.zeros(vocabulary, bool)
        self._wanted = {flag: jax.device_put(np.bool_(flag)) for flag in (False, True)}
        self.chunk_seconds: dict[int, tuple[float, float]] = {}
        self.step_seconds: dict[tuple[int, int], float] = {}

    def _run(self, function: Callable[..., Any], size: int, *given: Any, **static: Any) -> Any:
        """Lets a program take over the state and gives what else there is; `size` is of `given`.

        A program is compiled once, and no cache of jax can lose it.
        """
        key = (function, size, *static.values())
        if key not in self._programs:
            self._programs[key] = self._compiled(function, given, static)
        self._state, rest = self._programs[key](self._models, self._state, *given)
        return rest

    def _compiled(self, function: Callable[..., Any], given: Any, static: dict[str, Any]) -> Any:
        def flat(models: list[Any], state: list[Any], *given: Any) -> tuple[list[Any], Any]:
            both = jax.tree.unflatten(self._models_tree, models)
            rows = jax.tree.unflatten(self._state_tree, state)
            made = function(*both, rows, self._setup, *given, **static)
            rows, rest = (made, None) if isinstance(made, EngineState) else made
            return jax.tree.leaves(rows), rest

        return jax.jit(flat, donate_argnums=1).lower(self._models, self._state, *given).compile()

    def begin(self, row: int, token: int) -> None:
        """A row holds nothing but a token."""
        self._run(programs.begin, 1, _put([row, token]))

    def copy(self, source: int, row: int, length: int, last: int) -> None:
        """A row holds the first `length` tokens of another, the last of which is `last`."""
        self._run(programs.copy, 1, _put([source, row, length, last]))

    def extend(
        self, row: int, tokens: Sequence[int], size: int, scored: bool = False
    ) -> TokenLogprobs | None:
        """A row holds `tokens` too; with `scored`, their log probabilities for `scores`."""
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        at = _put([row, len(tokens)])
        return self._run(programs.extend, size, at, _put(padded), scored=scored)

    def wait(self) -> None:
        """Waits until all that was handed over is done."""
        jax.block_until_ready(self._state)

    def assign(self, row: int, request: Request, asked: Parameters) -> None:
        """A row decodes from here on as a request asks for."""
        bias, prompt = self._no_bias, self._no_prompt
        if asked.integers[3]:
            vocabulary = self._config.vocab_size
            bias = _put(checks.bias_of(request, vocabulary))
            prompt = _put(checks.tokens_of(request.prompt, vocabulary))
        given = _put(np.int32(row)), jax.device_put(asked), bias, prompt
        self._run(programs.assign, 1, *given)

    def advance(
        self, rows: Sequence[int], filling: Sequence[int], width: int, scored: Sequence[bool]
    ) -> Pending:
        """A step of `rows`, of which some want log probabilities; those that fill it up end, if
        they have not.
        """
        order = [*rows, *filling]
        if len(order) == self._rows:  # a step of all rows takes none out of the state
            order.sort()
        ended = frozenset(filling)
        control = self._control_of(tuple((row, int(row in ended)) for row in order))
        wanted = self._wanted[any(scored)]
        given = self._run(programs.advance, len(order), control, wanted, width=width)
        return Pending(given, tuple(scored), tuple(map(order.index, rows)))

    def _control_of(self, rows: tuple[tuple[int, int], ...]) -> jax.Array:
        """Which rows a step runs and which of them end; kept, as they seldom change."""
        found = self._control.get(rows)
        if found is None:
            if len(self._control) >= _KEPT:
                self._control.clear()
            found = self._control[rows] = _put(rows)
        return found

    def results(self, pending: Pending) -> list[RowResult]:
        """What a step gave each of its rows, in the order they were named; waits for it."""
        packed = jax.device_get(pending.given.packed)
        window = (packed.shape[1] - 4) // 2
        top = tops = None
        if any(pending.scored):
            top, tops = jax.device_get((pending.given.top, pending.given.top_tokens))
        found = []
        for number, scored in zip(pending.places, pending.scored, strict=True):
            own = packed[number]
            count, done, nodes, accepted = own[:4].tolist()
            tokens = own[4 : 4 + count].tolist()
            logprobs = []
            if scored and top is not None and tops is not None:
                values = own[4 + window :].view(np.float32)[:count]
                logprobs = _logprobs(values, top[number], tops[number])
            found.append(RowResult(tokens, bool(done), nodes, accepted, logprobs))
        return found

    def scores(self, found: TokenLogprobs, count: int) -> list[Logprob]:
        """The log probabilities of the first `count` tokens of a chunk; waits for them."""
        values, top, tops = jax.device_get((found.of_token, found.top, found.top_tokens))
        return _logprobs(values[0, :count], top[0], tops[0])

    def compile(
        self,
        steps: Sequence[tuple[int, int]],
        chunks: Sequence[int],
        scored: int,
        longest: int,
        reuses: bool,
    ) -> Iterator[str]:
        """Compiles every program and measures those that are planned by; yields what comes next.

        Args:
          steps: rows and columns.
          chunks: numbers of tokens.
          scored: tokens of a chunk that gives log probabilities.
          longest: tokens that a row may hold.
          reuses: whether rows are copied.
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
        alone = {}
        for size in chunks:
            yield f"prompts by {size}"
            self.begin(0, 0)
            alone[size] = self._timed(partial(self.extend, 0, [0], size))
        self.chunk_seconds = self._with_growth(alone, min(longest, _MEASURED_TOKENS))
        yield f"log probabilities of prompts by {scored}"
        found = self.extend(0, [0], scored, scored=True)
        assert found is not None
        self.scores(found, 1)
        for rows, width in steps:
            yield f"{rows} rows, {width} columns"
            self._begin_all(rows)
            run = partial(self.advance, range(rows), (), width, [False] * rows)
            self.step_seconds[rows, width] = self._timed(run, self._setup.slots // self._window)
        self._begin_all(0)

    def _with_growth(self, alone: dict[int, float], tokens: int) -> dict[int, tuple[float, float]]:
        """Seconds of chunks in an empty row, and what each of up to `tokens` in it adds."""
        half = tokens // 2  # the timed runs need room too
        size, held, found = max((n for n in alone if n <= half), default=0), 1, {}
        if not size:
            return {size: (seconds, 0.0) for size, seconds in alone.items()}
        self.begin(0, 0)
        while held + size <= half:
            self.extend(0, [0] * size, size)
            held += size
        for size, seconds in alone.items():
            later = self._timed(partial(self.extend, 0, [0], size))
            found[size] = seconds, max(later - seconds, 0.0) / held
        return found

    def _begin_all(self, live: int) -> None:
        """New texts in all rows, of which the first `live` decode, for as long as there is room."""
        request = Request(prompt=[0], max_new_tokens=2**20, temperature=1.0, ignore_eos=True)
        asked = checks.check_request(request, self._config, 2**30)
        for row in range(self._rows):
            self.begin(row, 0)
            if row < live:
                self.assign(row, request, asked)
        self.wait()

    def _timed(self, run: Callable[[], object], most: int = _MOST_REPEATS) -> float:
        """The median of how long a program takes, in seconds; the first run compiles it.

        It runs no more than `most` times, for which rows must have room.
        """
        run()
        self.wait()
        found: list[float] = []
        most = min(most, _MOST_REPEATS)
        while len(found) < _REPEATS or (len(found) + 1 < most and sum(found) < _TIMED_SECONDS):
            start = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - start)
        return float(np.median(found))


def _put(values: object) -> jax.Array:
    return jax.device_put(np.asarray(values, getattr(values, "dtype", np.int32)))


def _logprobs(values: np.ndarray, top: np.ndarray, tokens: np.ndarray) -> list[Logprob]:
    return [
        Logprob(float(value), tuple(zip(tokens[at].tolist(), top[at].tolist(), strict=True)))
        for at, value in enumerate(values)
    ]
