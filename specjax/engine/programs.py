"""What each program of an engine does to the state of its rows. No policy here."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.tree_attention.xla import reads_rows_in_place
from specjax.base.grammars import none_of
from specjax.base.penalties import TokenCounts
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, fold
from specjax.decoding.extending import after_tokens, columns_of_tokens, extended, shortened
from specjax.decoding.request import Limits, Rows
from specjax.decoding.stepping import (
    DecodeState,
    Served,
    of_tokens,
    prefill,
    run_steps,
    step_beside,
)
from specjax.draft.drafter import Drafter, Step, TokenLogprobs
from specjax.draft.switching import SwitchingDrafter
from specjax.engine.pages import Paging
from specjax.engine.state import (
    EngineState,
    copy_row,
    in_pages,
    put,
    put_row,
    specs_of,
    take,
)
from specjax.goodput.bursts import BURST
from specjax.models.transformer import Columns, Model, Pass, unembed
from specjax.parallel.mesh import DATA, Layout, everywhere, gathered, shards_of, spread
from specjax.trees.tree import NO_PARENT
from specjax.verify.rules import Rule

_FRESH_SLOTS = 8
"""Slots of the caches of a row that holds a token."""


@pytree
class Parameters:
    """What a request sets of its row, as arrays of one row, on the host or the device.

    `key` are the words of its seed, and `choice` is which continuation of that it is; `naive` says
    whether the naive rule decides, `penalized` whether there is a bias or a penalty, `grammar` is
    the number of its grammar (0: none).
    """

    sampling: Sampling
    max_new_tokens: Int32[Array | np.ndarray, "1"]
    end_ids: Int32[Array | np.ndarray, "1 e"]
    key: UInt32[Array | np.ndarray, "1 2"]
    choice: Int32[Array | np.ndarray, "1"]
    naive: Int32[Array | np.ndarray, "1"]
    penalized: Int32[Array | np.ndarray, "1"]
    grammar: Int32[Array | np.ndarray, "1"]


def packed(parameters: Parameters) -> Int32[np.ndarray, " w"]:
    """The words of parameters on the host: one array reaches the device sooner than a dozen."""
    return np.concatenate([leaf.ravel().view(np.int32) for leaf in jax.tree.leaves(parameters)])


def unpacked(words: Int32[Array, " w"], like: Parameters) -> Parameters:
    """The parameters whose words these are, of the shapes of others."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = jnp.split(words, ends[:-1])
    cast = [
        lax.bitcast_convert_type(part, leaf.dtype).reshape(leaf.shape)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


class Setup(NamedTuple):
    """What is static in an engine's programs.

    `rules` decide the trees of each of the drafter's settings. A row has `slots` cache slots, in
    pages where there is a `paging`; `parameters` are those of any request, for their shapes; `top`
    log probabilities are made of a token where they are asked for.
    """

    rules: Mapping[str, Rule]
    slots: int
    parameters: Parameters
    top: int
    layout: Layout | None = None
    paging: Paging | None = None

    @property
    def shards(self) -> int:
        """Over how many devices rows are spread."""
        return shards_of(self.layout)


class Given(NamedTuple):
    """What the steps of a burst gave, for the host; nothing but zeros where there was none.

    `packed` holds for each step and row the number of tokens, whether it is done, the nodes of its
    tree, the nodes that were accepted; then the tokens, the bits of their log probabilities and the
    path; then of each node its token, its parent (-1: the root's, and those of no node) and the
    bits of its chance.
    """

    packed: Int32[Array, "K n c"]
    top: Float[Array, "K n W k"]
    top_tokens: Int32[Array, "K n W k"]


def empty(target: Model, drafter: Drafter, setup: Setup, rows: int) -> EngineState:
    """A state of `rows` rows that hold a token each and are done."""

    def whole(target: Model, drafter: Drafter) -> EngineState:
        made = _fresh(target, drafter, setup, jnp.zeros(rows // setup.shards, jnp.int32))
        return made if setup.paging is None else in_pages(made, setup.paging, setup.slots)

    return _spread(setup, whole, target, drafter)(target, drafter)


def begin(
    target: Model, drafter: Drafter, state: EngineState, setup: Setup, at: Int32[Array, "2"]
) -> EngineState:
    """Row `at[0]` holds nothing but the token `at[1]`, and is done.

    The target's cache holds none of it, so that no pass of the target is made.
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Drafter, state: EngineState, at: Array) -> EngineState:
        row, is_own = _here(setup, state, at[0])

        def begun(state: EngineState) -> EngineState:
            own = _fresh(target, drafter, setup, at[1:])
            made = put_row(state, specs, row, own, _FRESH_SLOTS)
            cache = replace(state.decode.cache, length=made.decode.cache.length)
            return replace(made, decode=replace(made.decode, cache=cache))

        return _where(setup, is_own, begun, state)

    return _spread(setup, whole, target, drafter, state)(target, drafter, state, at)


def copy(
    target: Model, drafter: Drafter, state: EngineState, setup: Setup, at: Int32[Array, "4"]
) -> EngineState:
    """Row `at[1]` holds the first `at[2]` tokens of row `at[0]`, the last of them `at[3]`; it is
    done.
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Drafter, state: EngineState, at: Array) -> EngineState:
        state = copy_row(state, specs, *at[:3])
        own = take(state, specs, at[1:2])
        decode = shortened(drafter, own.decode, at[2:3], at[3:])
        decode = replace(decode, done=jnp.ones(1, bool))
        return put(state, specs, at[1:2], own, replace(own, decode=decode))

    return _spread(setup, whole, target, drafter, state)(target, drafter, state, at)


def extend(
    target: Model,
    drafter: Drafter,
    state: EngineState,
    setup: Setup,
    at: Int32[Array, "n 2"],
    tokens: Int32[Array, "n T"],
    *,
    columns: int | None,
    scored: bool,
) -> tuple[EngineState, TokenLogprobs | None]:
    """Rows `at[:, 0]` with the first `at[:, 1]` of their `tokens` after their own; the tokens' log
    probabilities if `scored`, which must be all that there are.

    It is as if chains of these tokens had been drafted elsewhere and accepted. The pass has as many
    `columns`, for the tokens that count; None is one for each token.
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Drafter, state: EngineState, at: Array, tokens: Array) -> Any:
        rows, is_own = _here(setup, state, at[:, 0])
        count = jnp.where(is_own, at[:, 1], 0)
        part = take(state, specs, rows)
        decode, x = extended(target, drafter, part.decode, tokens, count, columns)
        found = None
        if scored:
            found = of_tokens(unembed(target, x).T[None], tokens, setup.top)
            found = _from_owner(setup, is_own, found)
        return put(state, specs, rows, part, replace(part, decode=decode)), found

    run = _spread(setup, whole, target, drafter, state, more=2, gives=_EVERYWHERE)
    return run(target, drafter, state, at, tokens)


def assign(
    target: Model,
    drafter: Drafter,
    state: EngineState,
    setup: Setup,
    row: Int32[Array, ""],
    words: Int32[Array, " w"],
    bias: Float[Array, " V"],
    prompt: Bool[Array, " V"],
) -> EngineState:
    """The row decodes from here on as a request asks for.

    `words` are those of its parameters (see `packed`), `prompt` the tokens of its prompt.
    """

    def whole(target: Model, drafter: Drafter, state: EngineState, *given: Any) -> EngineState:
        del target
        row, words, bias, prompt = given
        row, is_own = _here(setup, state, row)
        parameters = unpacked(words, setup.parameters)
        own = _assigned(parameters, bias, prompt, drafter.window)

        def assigned(state: EngineState) -> EngineState:
            decode = jax.tree.map(lambda x, y: x.at[row].set(y[0]), _asked_of(state.decode), own)
            naive = state.naive.at[row].set(parameters.naive[0] > 0)
            return EngineState(replace(state.decode, **decode), naive)

        return _where(setup, is_own, assigned, state)

    run = _spread(setup, whole, target, drafter, state, more=4)
    return run(target, drafter, state, row, words, bias, prompt)


def advance(
    target: Model,
    drafter: Drafter,
    state: EngineState,
    setup: Setup,
    control: Int32[Array, "n 3"],
    most: Int32[Array, ""],
    wanted: Bool[Array, ""],
    calibration: Float[Array, "2 2"],
    prompts: Int32[Array, "K p c"] | None = None,
    *,
    width: int,
    setting: str,
    masked: bool = False,
    columns: int | None = None,
) -> tuple[EngineState, Given]:
    """A burst of steps of the rows `control[:, 0]`, of which those with a second number above 0 end
    first: `most` steps (`BURST` at most), or as many as it takes until all of them are done.

    They come in order if they are all that there are; their trees are of a setting of the drafter,
    and no deeper than the third number. The target's passes have `width` columns, for the likeliest
    nodes by `calibration` (see `Served`); log probabilities are made where they are `wanted`. Rows
    are held to their grammars if `masked`.

    With `prompts` each step's pass is over tokens of other rows' prompts as well, and there are
    always `most` steps: for each step and such a row they hold its number, how many tokens of it
    are read, and these (see `extend`), in as many `columns`; None is one for each token.
    """
    given = [control, most, wanted, calibration, *([] if prompts is None else [prompts])]

    def whole(
        target: Model, drafter: Drafter, state: EngineState, *given: Array
    ) -> tuple[EngineState, Given]:
        control, most, wanted, calibration, *prompts = given
        own = _control_here(setup, state, control)
        burst = _Burst(target, drafter, setup, own, wanted, calibration, width, setting, masked)
        if prompts:
            return _run_mixed(burst, state, most, prompts[0], columns)
        return _run_burst(burst, state, most)

    run = _spread(setup, whole, target, drafter, state, more=len(given), gives=_OF_ROWS)
    return run(target, drafter, state, *given)


class _Burst(NamedTuple):
    """What the steps of a burst are made with on a device (see `advance`)."""

    target: Model
    drafter: Drafter
    setup: Setup
    control: Int32[Array, "n 3"]
    wanted: Bool[Array, ""]
    calibration: Float[Array, "2 2"]
    width: int
    setting: str
    masked: bool

    @property
    def own(self) -> Drafter:
        """The drafter of its setting."""
        return self.drafter.of_setting(self.setting)

    def taken(self, state: EngineState) -> EngineState:
        """The rows that it runs: all of them where they are, in order, or some by number."""
        every = not reads_rows_in_place() and self.control.shape[:1] == state.naive.shape
        return state if every else take(state, self._specs, self.control[:, 0])

    def put(self, state: EngineState, part: EngineState, decode: DecodeState) -> EngineState:
        """The state after `taken` rows decoded."""
        after = replace(part, decode=decode)
        return after if part is state else put(state, self._specs, self.control[:, 0], part, after)

    @property
    def _specs(self) -> EngineState:
        return specs_of(self.target, self.drafter)

    def begun(self, part: EngineState) -> DecodeState:
        """Rows before its first step: those that it ends have ended."""
        return replace(part.decode, done=part.decode.done | (self.control[:, 1] > 0))

    @property
    def nothing(self) -> Given:
        """What it gives before its first step."""
        return _nothing(self.target, self.own, self.setup, self.control.shape[0])

    def step(
        self, part: EngineState, decode: DecodeState, beside: Columns | None = None
    ) -> tuple[DecodeState, Step, Pass | None]:
        """A step of rows, and what its pass made of other rows' columns."""
        setup, own, width = self.setup, self.own, self.width
        if setup.shards > 1:  # any device's rows may have most of the nodes
            width = min(width, self.control.shape[0] * own.num_slots)
        cut = self.calibration if len(self.drafter.settings) > 1 else None  # else all have columns
        naive = part.naive & ~decode.done
        served = Served(width, naive, self.wanted, setup.top, self.control[:, 2], cut)
        rule = setup.rules[self.setting]
        after, gave, made = step_beside(
            self.target, own, rule, _without_ended(decode, self.masked), served, beside
        )
        return _as_asked(after, decode), gave, made


def _run_burst(
    burst: _Burst, state: EngineState, most: Int32[Array, ""]
) -> tuple[EngineState, Given]:
    """The steps of a burst until its rows are done."""
    part = burst.taken(state)

    def one(decode: DecodeState) -> tuple[DecodeState, Step]:
        after, gave, _ = burst.step(part, decode)
        return after, gave

    def note(given: Given, number: Array, state: DecodeState, gave: Step) -> Given:
        del state
        return _noted(given, number, gave)

    decode, found = run_steps(one, note, burst.begun(part), burst.nothing, most)
    return burst.put(state, part, decode), found


def _run_mixed(
    burst: _Burst,
    state: EngineState,
    most: Int32[Array, ""],
    prompts: Int32[Array, "K p c"],
    columns: int | None,
) -> tuple[EngineState, Given]:
    """The steps of a burst, each with tokens of prompts in its pass (see `advance`)."""
    target, drafter = burst.target, burst.drafter
    specs = specs_of(target, drafter)

    def body(number: Array, at: tuple[EngineState, Given]) -> tuple[EngineState, Given]:
        state, found = at
        rows, is_own = _here(burst.setup, state, prompts[number, :, 0])
        count, tokens = jnp.where(is_own, prompts[number, :, 1], 0), prompts[number, :, 2:]
        beside = columns_of_tokens(take(state, specs, rows).decode, tokens, count, columns)
        part = burst.taken(state)
        decode, gave, made = burst.step(part, part.decode, beside)
        assert made is not None
        state = burst.put(state, part, decode)
        read = take(state, specs, rows)  # with the caches that the step wrote
        decode = after_tokens(target, drafter, read.decode, tokens, count, beside, made)
        state = put(state, specs, rows, read, replace(read, decode=decode))
        return state, _noted(found, number, gave)

    part = burst.taken(state)
    state = burst.put(state, part, burst.begun(part))
    return lax.fori_loop(0, most, body, (state, burst.nothing))


def _here(
    setup: Setup, state: EngineState, rows: Int32[Array, "*n"]
) -> tuple[Int32[Array, "*n"], Bool[Array, "*n"]]:
    """Which rows of a device's state these of all rows are, and whether they are there at all; one
    that is not counts as its first.
    """
    if setup.shards == 1:
        return rows, jnp.ones(rows.shape, bool)
    held = state.naive.shape[0]
    place = rows - lax.axis_index(DATA) * held
    is_own = (place >= 0) & (place < held)
    return jnp.where(is_own, place, 0), is_own


def _where(
    setup: Setup,
    is_own: Bool[Array, ""],
    change: Callable[[EngineState], EngineState],
    state: EngineState,
) -> EngineState:
    """The state, changed on the device whose row it is about."""
    if setup.shards == 1:
        return change(state)
    return lax.cond(is_own, change, lambda state: state, state)


def _from_owner(setup: Setup, is_own: Bool[Array, " n"], found: Any) -> Any:
    """On every device what that one found whose row it is about."""
    if setup.shards == 1:
        return found
    return jax.tree.map(lambda x: lax.psum(jnp.where(is_own.all(), x, 0), DATA), found)


def _control_here(
    setup: Setup, state: EngineState, control: Int32[Array, "n 3"]
) -> Int32[Array, "m 3"]:
    """The rows of a step that a device has; of several devices steps are of all rows, in order."""
    if setup.shards == 1:
        return control
    held = state.naive.shape[0]
    own = lax.dynamic_slice_in_dim(control, lax.axis_index(DATA) * held, held)
    return own.at[:, 0].set(jnp.arange(held, dtype=jnp.int32))


def catch_up(
    target: Model,
    drafter: SwitchingDrafter,
    state: EngineState,
    setup: Setup,
    rows: Int32[Array, " n"],
    *,
    tokens: int,
) -> tuple[EngineState, Float[Array, "n _"]]:
    """The draft reads at most `tokens` tokens that it lacks of each row's text.

    Also how likely it would have had them accepted (see `SwitchingDrafter.catch_up`).
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Any, state: EngineState, rows: Array) -> Any:
        del target

        def caught_up(state: EngineState, rows: Array) -> tuple[EngineState, Array]:
            part = take(state, specs, rows)
            draft, chance = drafter.catch_up(part.decode.draft, part.decode.sampling, tokens)
            after = replace(part, decode=replace(part.decode, draft=draft))
            return put(state, specs, rows, part, after), chance

        if setup.shards == 1:
            return caught_up(state, rows)
        if rows.size > 1:  # those are all that there are
            state, chance = caught_up(state, jnp.arange(state.naive.shape[0], dtype=jnp.int32))
            return state, gathered(chance, DATA)[rows]
        place, is_own = _here(setup, state, rows)
        none = jnp.zeros_like(jax.eval_shape(caught_up, state, place)[1])
        state, chance = lax.cond(is_own[0], caught_up, lambda state, _: (state, none), state, place)
        return state, lax.psum(chance, DATA)

    run = _spread(setup, whole, target, drafter, state, more=1, gives=_EVERYWHERE)
    return run(target, drafter, state, rows)


def _without_ended(decode: DecodeState, masked: bool) -> DecodeState:
    """Rows of which what those that are done asked for costs nothing in a step, nor a grammar where
    none has one.
    """
    done, counts = decode.done, decode.counts
    return replace(
        decode,
        sampling=jax.tree.map(lambda x: jnp.where(done, 0, x), decode.sampling),
        counts=None if counts is None else replace(counts, used=counts.used & ~done),
        grammars=decode.grammars if masked else None,
    )


def _as_asked(decode: DecodeState, before: DecodeState) -> DecodeState:
    """`decode` with what its rows asked for `before`: that some are done is all that is kept."""
    assert decode.counts is not None
    assert before.counts is not None
    counts = replace(decode.counts, used=before.counts.used)
    followed = before.grammars if decode.grammars is None else decode.grammars
    return replace(decode, sampling=before.sampling, counts=counts, grammars=followed)


def _noted(given: Given, number: Int32[Array, ""], gave: Step) -> Given:
    """What is given of a burst with that of its step `number`."""
    return jax.tree.map(lambda whole, x: whole.at[number].set(x), given, _given(gave))


def _nothing(target: Model, drafter: Drafter, setup: Setup, rows: int) -> Given:
    """What is given of a burst before its first step."""
    window, counts = drafter.window, 4
    top = min(setup.top, target.config.vocab_size)
    likeliest = jnp.zeros((BURST, rows, window, top))
    packed = jnp.zeros((BURST, rows, counts + 3 * window + 3 * drafter.num_slots), jnp.int32)
    return Given(packed, likeliest, likeliest.astype(jnp.int32))


def _given(gave: Step) -> Given:
    assert gave.logprobs is not None
    tree, path = gave.tree, gave.accepted.path
    nodes = tree.valid.sum(axis=1, dtype=jnp.int32) - 1
    counts = gave.count, gave.done.astype(jnp.int32), nodes, gave.accepted.count - 1
    logprobs, chance = (_bits(x) for x in (gave.logprobs.of_token, tree.chance))
    parents = jnp.where(tree.valid, tree.parents, NO_PARENT)
    parts = gave.tokens, logprobs, path, tree.tokens, parents, chance
    packed = jnp.concatenate([jnp.stack(counts, axis=1), *parts], axis=1)
    return Given(packed, gave.logprobs.top, gave.logprobs.top_tokens)


def _bits(x: Float[Array, "*B"]) -> Int32[Array, "*B"]:
    """The bits of numbers."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _fresh(target: Model, drafter: Drafter, setup: Setup, tokens: Array) -> EngineState:
    """Rows that hold a token each."""
    rows, vocabulary = tokens.shape[0], target.config.vocab_size
    none = jnp.zeros((rows, vocabulary), bool)
    counts = TokenCounts(none[:, 0], none.astype(jnp.float32), none, none.astype(jnp.int32))
    own, ends = setup.parameters, setup.parameters.end_ids.shape[1]
    asked = Rows(
        prompt=tokens[:, None],
        length=jnp.ones(rows, jnp.int32),
        key=jax.random.split(jax.random.key(0, impl="threefry2x32"), rows),
        sampling=jax.tree.map(lambda x: jnp.zeros(rows, x.dtype), own.sampling),
        limits=Limits(jnp.zeros(rows, jnp.int32), jnp.zeros((rows, ends), jnp.int32) - 1),
        counts=counts,
        grammars=none_of(rows, drafter.window),
    )
    decode = prefill(target, drafter, asked, setup.slots)
    return EngineState(replace(decode, done=jnp.ones(rows, bool)), none[:, 0])


def _asked_of(decode: DecodeState) -> dict[str, Any]:
    """The fields of a state that a request sets."""
    names = ("key", "sampling", "limits", "made", "done", "counts", "grammars")
    return {name: getattr(decode, name) for name in names}


def _assigned(parameters: Parameters, bias: Array, prompt: Array, window: int) -> dict[str, Any]:
    """What a request sets of a row, as arrays of one."""
    seeded = jax.random.wrap_key_data(parameters.key[0], impl="threefry2x32")
    made = jnp.zeros((1, *bias.shape), jnp.int32)
    most, ends, used = map(
        jnp.asarray, (parameters.max_new_tokens, parameters.end_ids, parameters.penalized)
    )
    return {
        "key": fold(seeded, parameters.choice[0])[None],
        "sampling": parameters.sampling,
        "limits": Limits(most, ends),
        "made": jnp.zeros(1, jnp.int32),
        "done": jnp.zeros(1, bool),
        "counts": TokenCounts(used > 0, bias[None], prompt[None], made),
        "grammars": replace(none_of(1, window), number=jnp.asarray(parameters.grammar)),
    }


def _spread(
    setup: Setup,
    whole: Any,
    target: Model,
    drafter: Drafter,
    state: EngineState | None = None,
    more: int = 1,
    gives: jax.sharding.PartitionSpec | None = None,
) -> Any:
    """`whole` on the devices of a mesh: a state if there is one, and `more` arguments on all.

    `gives` is how what it gives beside a state is spread, if anything.
    """
    specs = specs_of(target, drafter)
    taken = () if state is None else (specs, *(_EVERYWHERE,) * more)
    out = specs if gives is None else (specs, gives)
    run = spread(setup.layout, whole, (target, drafter), taken, out)
    if gives is None:
        return run

    def read(*arguments: Any) -> tuple[Any, ...]:
        state, *rest = run(*arguments)
        return state, *(everywhere(setup.layout, each) for each in rest)

    return read


_EVERYWHERE, _OF_ROWS = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, DATA)
