"""The rows' state on the device and the programs over it, behind plain values of the host."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.drafter import Drafter, TokenLogprobs
from specjax.draft.retrieval import Corpus
from specjax.engine import checks, programs
from specjax.engine.programs import Given, Parameters, Setup, packed
from specjax.engine.request import Logprob, Request
from specjax.engine.state import EngineState, tables_of
from specjax.engine.watch import WatchedNode
from specjax.goodput.bursts import BURST
from specjax.goodput.chunks import PrefillBatch
from specjax.goodput.costs import Cost
from specjax.goodput.policy import StepShape
from specjax.models.transformer import Model

_KEPT = 1024
"""Sets of rows whose arrays are kept on the device."""

COMPILED_AT_ONCE = 2
"""Programs, at most: each takes some hundred megabytes while it is compiled."""


class RowResult(NamedTuple):
    """What a step gave a row; its tree is that of the nodes that the target scored."""

    tokens: list[int]
    done: bool
    nodes: int
    accepted: int
    logprobs: list[Logprob]
    tree: Callable[[], list[WatchedNode]]

    def seen(self) -> list[tuple[float, bool]]:
        """Of the nodes below accepted ones the drafter's probability, and whether they were."""
        nodes = self.tree()
        accepted = [node.accepted for node in nodes]
        return [(n.chance, n.accepted) for n in nodes[1:] if accepted[n.parent]]


class Pending(NamedTuple):
    """What a burst gives, perhaps still being made.

    `places` are those of the rows that were asked for among the steps', `scored` which of them want
    log probabilities.
    """

    given: Given
    scored: tuple[bool, ...]
    places: tuple[int, ...]


class _Call(NamedTuple):
    """A program's function, a size of what it is given, that, and what is static of it."""

    function: Callable[..., Any]
    size: int
    given: tuple[Any, ...]
    static: dict[str, Any]

    @property
    def program(self) -> tuple[Any, ...]:
        """What it is compiled for."""
        return (self.function, self.size, *self.static.values())

    @property
    def name(self) -> str:
        """That in words: of the function, the size and what is static."""
        parts = (self.function.__name__, self.size, *self.static.values())
        return " ".join(map(str, parts))


class Plan(NamedTuple):
    """The programs that an engine needs.

    Attributes:
      steps: of which `advance` is made.
      chunks: numbers of tokens that `extend` reads.
      scored: tokens of a chunk that gives log probabilities.
      catch_ups: rows, and tokens that the draft reads of each.
      longest: tokens that a row may hold.
      reuses: whether rows are copied.
      batch: of which several rows' prompts are read together; None where there is one row.
      mixed: what steps read of prompts; None where none does.
      mixed_steps: those that have such programs, too.
      masked_steps: those that have programs which hold rows to grammars.
    """

    steps: Sequence[StepShape]
    chunks: Sequence[int]
    scored: int
    catch_ups: Sequence[tuple[int, int]]
    longest: int
    reuses: bool
    batch: PrefillBatch | None = None
    mixed: PrefillBatch | None = None
    mixed_steps: Sequence[StepShape] = ()
    masked_steps: Sequence[StepShape] = ()


class Measured(NamedTuple):
    """How long programs take: chunks by their size (in an empty row, and what each token in it
    adds), steps, how long the draft takes to read some tokens of a row, a pass over prompts of
    several rows (never, where there is none), and what tokens of prompts add to steps.
    """

    chunk_seconds: dict[int, tuple[float, float]]
    step_costs: dict[StepShape, Cost]
    catch_up_seconds: dict[int, float]
    batch_seconds: float = math.inf
    mixed_seconds: Mapping[StepShape, float] = MappingProxyType({})


class Device:
    """An engine's state, given away to each program and taken back from it.

    Nothing here waits for the device but `results`, `scores`, `wait`, `begin_all` and `assign_all`.

    Args:
      target: the model.
      drafter: what drafts.
      setup: what is static.
      rows: how many rows there are.
      running: how many of them decode at a time, at most.
    """

    def __init__(
        self, target: Model, drafter: Drafter, setup: Setup, rows: int, running: int
    ) -> None:
        self._setup, self._config = setup, target.config
        self._rows, self._running = rows, running
        self.slots, self.window = setup.slots, drafter.window
        # Programs take and give leaves in lists, which jax flattens without asking Python.
        self._models, self._models_tree = jax.tree.flatten((target, drafter))

        def begun(target: Model, drafter: Drafter) -> EngineState:
            return programs.empty(target, drafter, setup, rows)

        begun_state = jax.jit(begun)(target, drafter)
        self._state, self._state_tree = jax.tree.flatten(begun_state)
        tables = {id(leaf) for leaf in tables_of(begun_state)}  # that of the target comes first
        self._table_places = [at for at, leaf in enumerate(self._state) if id(leaf) in tables]
        self._shapes = [_shape_of(leaf) for leaf in self._state]  # a program may have it right now
        if (paging := setup.paging) is not None:
            kinds = 1 + (paging.draft_pages > 0)
            self._tables = np.zeros((kinds, rows, setup.slots // paging.size), np.int32)
        self._measures = False
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._control: dict[tuple[tuple[int, ...], ...], jax.Array] = {}
        self.calibrate([[0.0, 1.0], [0.0, 1.0]])
        vocabulary = target.config.vocab_size
        self._no_bias = jnp.zeros(vocabulary, jnp.float32)
        self._no_prompt = jnp.zeros(vocabulary, bool)
        self._wanted = {flag: jax.device_put(np.bool_(flag)) for flag in (False, True)}
        self._most = [_put(np.int32(steps)) for steps in range(BURST + 1)]
        self.chunk_seconds: dict[int, tuple[float, float]] = {}
        self.step_costs: dict[StepShape, Cost] = {}
        self.catch_up_seconds: dict[int, float] = {}
        self.batch_seconds = math.inf
        self.mixed_seconds: Mapping[StepShape, float] = {}

    def _run(self, call: _Call) -> Any:
        """Lets a program take over the state and gives what else there is.

        A program is compiled once, and no cache of jax can lose it.
        """
        if call.program not in self._programs:
            self._programs[call.program] = self._compiled(call)
        self._state, rest = self._programs[call.program](self._models, self._state, *call.given)
        return rest

    def _compiled(self, call: _Call) -> Any:
        def flat(models: list[Any], state: list[Any], *given: Any) -> tuple[list[Any], Any]:
            both = jax.tree.unflatten(self._models_tree, models)
            rows = jax.tree.unflatten(self._state_tree, state)
            made = call.function(*both, rows, self._setup, *given, **call.static)
            rows, rest = (made, None) if isinstance(made, EngineState) else made
            return jax.tree.leaves(rows), rest

        flat.__name__ = call.name.replace(" ", "_")  # what progress and profiles call it
        lowered = jax.jit(flat, donate_argnums=1).lower(self._models, self._shapes, *call.given)
        return lowered.compile()

    def remember(self, corpus: Corpus) -> None:
        """Drafts from these earlier texts from here on."""
        target, drafter = jax.tree.unflatten(self._models_tree, self._models)
        changed = jax.tree.leaves((target, drafter.with_earlier(corpus)))
        self._models = [
            new if new is old else jax.device_put(new, old.sharding)
            for new, old in zip(changed, self._models, strict=True)
        ]

    def place(self, changes: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Rows lie in these pages from here on: of the target's cache, then of the drafts'."""
        for row, own in changes.items():
            for table, pages in zip(self._tables, own, strict=True):
                table[row] = 0
                table[row, : len(pages)] = pages
        if changes or self._measures:
            self._measures = False
            self._put_tables(self._tables)

    def _put_tables(self, tables: np.ndarray) -> None:
        for number, at in enumerate(self._table_places):
            own = tables[min(number, 1)].copy()  # which later changes leave alone
            self._state[at] = jax.device_put(own, self._shapes[at].sharding)

    def begin(self, row: int, token: int) -> None:
        """A row holds nothing but a token."""
        self._run(_Call(programs.begin, 1, (_put([row, token]),), {}))

    def copy(self, source: int, row: int, length: int, last: int) -> None:
        """A row holds the first `length` tokens of another, the last of which is `last`."""
        self._run(_Call(programs.copy, 1, (_put([source, row, length, last]),), {}))

    def extend(
        self, row: int, tokens: Sequence[int], size: int, scored: bool = False
    ) -> TokenLogprobs | None:
        """A row holds `tokens` too; with `scored`, their log probabilities for `scores`."""
        return self._run(_extend({row: tokens}, size, None, scored))

    def extend_together(self, tokens: Mapping[int, Sequence[int]], batch: PrefillBatch) -> None:
        """Rows hold these tokens too, read in one pass."""
        others = (row for row in range(self._rows) if row not in tokens)
        spare = dict.fromkeys(islice(others, batch.rows - len(tokens)), ())
        self._run(_extend({**tokens, **spare}, batch.tokens, batch.columns))

    def wait(self) -> None:
        """Waits until all that was handed over is done."""
        jax.block_until_ready(self._state)

    def assign(self, row: int, request: Request, parameters: Parameters) -> None:
        """A row decodes from here on as a request asks for."""
        self._run(self._assign(row, request, parameters))

    def _assign(self, row: int, request: Request, parameters: Parameters) -> _Call:
        bias, prompt = self._no_bias, self._no_prompt
        if parameters.penalized[0]:
            vocabulary = self._config.vocab_size
            bias = _put(checks.bias_of(request, vocabulary))
            prompt = _put(checks.tokens_of(request.prompt, vocabulary))
        given = _put(np.int32(row)), _put(packed(parameters)), bias, prompt
        return _Call(programs.assign, 1, given, {})

    def advance(
        self,
        shape: StepShape,
        rows: Sequence[int],
        filling: Sequence[int],
        depths: Sequence[int],
        scored: Sequence[bool],
        steps: int = 1,
        prompts: Sequence[Mapping[int, Sequence[int]]] = (),
        mixed: PrefillBatch | None = None,
        masked: bool = False,
    ) -> Pending:
        """A burst of steps of `rows`, with trees of a setting no deeper than `depths`.

        It has `steps` of them, `BURST` at most, or fewer if all of its rows end before.
        Some of the rows want log probabilities (`scored`). Those that fill it up end, if they have
        not. With `mixed` each step reads tokens of other rows' `prompts` as well, no more of them
        than that has room for; then there are always as many steps. Rows are held to their grammars
        if `masked`, which goes with no `mixed`.
        """
        control = [(row, 0, depth) for row, depth in zip(rows, depths, strict=True)]
        control += [(row, 1, 0) for row in filling]
        if len(control) == self._rows:  # a step of all rows takes none out of the state
            control.sort()
        order = [row for row, *_ in control]
        call = self._advance(shape, tuple(control), any(scored), steps, masked)
        if mixed is not None:
            call = self._with_prompts(call, prompts, mixed)
        given = self._run(call)
        return Pending(given, tuple(scored), tuple(map(order.index, rows)))

    def _advance(
        self,
        shape: StepShape,
        control: tuple[tuple[int, ...], ...],
        scored: bool = False,
        steps: int = 1,
        masked: bool = False,
    ) -> _Call:
        rows, most = self._control_of(control), self._most[steps]
        given = rows, most, self._wanted[scored], self._calibration
        static = {"width": shape.width, "setting": shape.setting}
        static |= {"masked": True} if masked else {}
        return _Call(programs.advance, shape.rows, given, static)

    def _with_prompts(
        self, call: _Call, prompts: Sequence[Mapping[int, Sequence[int]]], mixed: PrefillBatch
    ) -> _Call:
        """A burst whose steps read tokens of prompts, too."""
        given = np.zeros((BURST, mixed.rows, 2 + mixed.tokens), np.int32)
        for step, own in zip(given, (*prompts, *({},) * (BURST - len(prompts))), strict=True):
            others = (row for row in range(self._rows) if row not in own)
            spare = dict.fromkeys(islice(others, mixed.rows - len(own)), ())
            for at, (row, tokens) in zip(step, (*own.items(), *spare.items()), strict=True):
                at[:2] = row, len(tokens)
                at[2 : 2 + len(tokens)] = tokens
        return call._replace(
            given=(*call.given, _put(given)),
            static={**call.static, "columns": mixed.packed_columns},
        )

    def calibrate(self, calibration: Sequence[Sequence[float]]) -> None:
        """Takes other intercepts and slopes of the nodes' chances (see `Served`)."""
        self._calibration = _put(np.asarray(calibration, np.float32))

    def catch_up(self, rows: Sequence[int], size: int) -> jax.Array:
        """The draft reads at most `size` tokens that it lacks of each of the rows.

        Gives how likely they were to be accepted, which may still be being made.
        """
        return self._run(_catch_up(rows, size))

    def _control_of(self, rows: tuple[tuple[int, ...], ...]) -> jax.Array:
        """Which rows a step runs and which of them end; kept, as they seldom change."""
        found = self._control.get(rows)
        if found is None:
            if len(self._control) >= _KEPT:
                self._control.clear()
            found = self._control[rows] = _put(rows)
        return found

    def results(self, pending: Pending) -> list[list[RowResult]]:
        """What each step of a burst gave each of its rows, in the order they were named.

        Waits for it. A row that is done gets no tokens from there on.
        """
        given = pending.given
        packed = jax.device_get(given.packed)
        top = tops = None
        if any(pending.scored):
            top, tops = jax.device_get((given.top, given.top_tokens))
        found = []
        for step in range(BURST):
            if not packed[step, :, 0].any():
                break
            likeliest = None if top is None or tops is None else (top[step], tops[step])
            found.append(_results(pending, packed[step], given.top.shape[2], likeliest))
        return found

    def scores(self, found: TokenLogprobs, count: int) -> list[Logprob]:
        """The log probabilities of the first `count` tokens of a chunk; waits for them."""
        values, top, tops = jax.device_get((found.of_token, found.top, found.top_tokens))
        return _logprobs(values[0, :count], top[0], tops[0])

    def compile(self, plan: Plan, at_once: int = COMPILED_AT_ONCE) -> Iterator[str]:
        """Compiles every program of a plan that is not there yet; yields what is done.

        Any thread may, also while another runs programs.
        """
        calls = (call for call in self._calls(plan) if call.program not in self._programs)
        yield from self._compiled_at_once(list(calls), at_once)

    @property
    def measured(self) -> Measured:
        """How long programs take."""
        return Measured(
            self.chunk_seconds, self.step_costs, self.catch_up_seconds, self.batch_seconds,
            self.mixed_seconds,
        )  # fmt: skip

    def _calls(self, plan: Plan) -> list[_Call]:
        """A call of every program."""
        batches = [] if plan.batch is None else [plan.batch]
        copies = [_Call(programs.copy, 1, (_put([0, 0, 1, 0]),), {})] if plan.reuses else []
        steps = {s: self._advance(s, ((0, 0, 0),) * s.rows) for s in plan.steps}
        mixed = (
            []
            if plan.mixed is None
            else [self._with_prompts(steps[s], (), plan.mixed) for s in plan.mixed_steps]
        )
        return [
            *steps.values(),
            *(self._advance(s, ((0, 0, 0),) * s.rows, masked=True) for s in plan.masked_steps),
            *mixed,
            *(_catch_up(range(rows), size) for rows, size in plan.catch_ups),
            *(_extend({0: [0]}, size) for size in plan.chunks),
            *(_extend(dict.fromkeys(range(b.rows), (0,)), b.tokens, b.columns) for b in batches),
            _extend({0: [0]}, plan.scored, scored=True),
            *copies,
            self._assign(0, Request(prompt=[0]), self._setup.parameters),
            _Call(programs.begin, 1, (_put([0, 0]),), {}),
        ]

    def _compiled_at_once(self, calls: Sequence[_Call], at_once: int) -> Iterator[str]:
        """Compiles programs on several cores; gives the names of those that are done."""
        workers = max(1, min(at_once, os.cpu_count() or 1))
        pool = ThreadPoolExecutor(workers, "specjax-compile")
        try:
            waiting = {pool.submit(self._compiled, call): call for call in calls}
            for each in as_completed(waiting):
                call = waiting[each]
                self._programs[call.program] = each.result()
                yield call.name
        finally:
            pool.shutdown(cancel_futures=True)

    def begin_all(self, live: int) -> None:
        """New texts in as many rows as run, of which the first `live` decode, for as long as there
        is room.

        They lie in as many pages as there are, the first ones of each row; past them in page 0.
        """
        if (paging := self._setup.paging) is not None:
            self._measures, (kinds, rows, each) = True, self._tables.shape
            number = np.arange(1, 1 + rows * each, dtype=np.int32).reshape(each, rows).T
            counts = (paging.target_pages, paging.draft_pages)[:kinds]
            self._put_tables(np.stack([np.where(number < most, number, 0) for most in counts]))
        for row in range(self._running):
            self.begin(row, 0)
        self.assign_all(live)

    def assign_all(self, live: int) -> None:
        """Lets the first rows decode, for as long as there is room."""
        request = Request(prompt=[0], max_new_tokens=2**20, temperature=1.0, ignore_eos=True)
        parameters = checks.check_request(request, self._config, 2**30)
        for row in range(live):
            self.assign(row, request, parameters)
        self.wait()


def _results(
    pending: Pending,
    packed: np.ndarray,
    window: int,
    likeliest: tuple[np.ndarray, np.ndarray] | None,
) -> list[RowResult]:
    """What a step gave its rows."""
    found = []
    for number, scored in zip(pending.places, pending.scored, strict=True):
        own = packed[number]
        count, done, nodes, accepted = own[:4].tolist()
        tokens = own[4 : 4 + count].tolist()
        logprobs = []
        if scored and likeliest is not None:
            values = own[4 + window :].view(np.float32)[:count]
            logprobs = _logprobs(values, *(x[number] for x in likeliest))
        tree = partial(_tree_of, own[4 + 2 * window :], window, accepted)
        found.append(RowResult(tokens, bool(done), nodes, accepted, logprobs, tree))
    return found


def _extend(
    tokens: Mapping[int, Sequence[int]],
    size: int,
    columns: int | None = None,
    scored: bool = False,
) -> _Call:
    padded = np.zeros((len(tokens), size), np.int32)
    for own, given in zip(padded, tokens.values(), strict=True):
        own[: len(given)] = given
    at = [[row, len(given)] for row, given in tokens.items()]
    static = {"columns": columns, "scored": scored}
    return _Call(programs.extend, size, (_put(at), _put(padded)), static)


def _catch_up(rows: Sequence[int], size: int) -> _Call:
    return _Call(programs.catch_up, len(rows), (_put(list(rows)),), {"tokens": size})


def _tree_of(packed: np.ndarray, window: int, accepted: int) -> list[WatchedNode]:
    """The nodes of a row's tree, the root first, numbered anew."""
    path = set(packed[: accepted + 1].tolist())
    tokens, parents, chances = packed[window:].reshape(3, -1)
    number, found = {0: 0}, [WatchedNode(int(tokens[0]), -1, 1.0, True)]
    for node in np.flatnonzero(parents >= 0).tolist():
        number[node] = len(found)
        chance = float(chances[node : node + 1].view(np.float32)[0])
        parent = number[int(parents[node])]
        found.append(WatchedNode(int(tokens[node]), parent, chance, node in path))
    return found


def _shape_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    own, placed = jax.typeof(leaf), leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=placed, weak_type=own.weak_type)


def _put(values: object) -> jax.Array:
    return jax.device_put(np.asarray(values, getattr(values, "dtype", np.int32)))


def _logprobs(values: np.ndarray, top: np.ndarray, tokens: np.ndarray) -> list[Logprob]:
    return [
        Logprob(float(value), tuple(zip(tokens[at].tolist(), top[at].tolist(), strict=True)))
        for at, value in enumerate(values)
    ]
