"""What each program of an engine does to the state of its rows. No policy here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.tree_attention.xla import reads_rows_in_place
from specjax.base.penalties import TokenCounts
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, fold
from specjax.decoding.extending import extended, shortened
from specjax.decoding.request import Limits, Rows
from specjax.decoding.stepping import (
    DecodeState,
    Served,
    of_tokens,
    prefill,
    step,
)
from specjax.draft.drafter import Drafter, Step, TokenLogprobs
from specjax.draft.switching import SwitchingDrafter
from specjax.engine.state import EngineState, copy_row, put, put_row, specs_of, take
from specjax.models.transformer import Model, unembed
from specjax.parallel.mesh import Layout, everywhere, spread
from specjax.trees.tree import NO_PARENT
from specjax.verify.rules import Rule

_FRESH_SLOTS = 8
"""Slots of the caches of a row that holds a token."""


@pytree
class Parameters:
    """What a request sets of its row, as arrays of one row, on the host or the device.

    `key` are the words of its seed, and `choice` is which continuation of that it is; `naive` says
    whether the naive rule decides, `penalized` whether there is a bias or a penalty.
    """

    sampling: Sampling
    max_new_tokens: Int32[Array | np.ndarray, "1"]
    end_ids: Int32[Array | np.ndarray, "1 e"]
    key: UInt32[Array | np.ndarray, "1 2"]
    choice: Int32[Array | np.ndarray, "1"]
    naive: Int32[Array | np.ndarray, "1"]
    penalized: Int32[Array | np.ndarray, "1"]


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

    `rules` decide the trees of each of the drafter's settings. A row has `slots` cache slots;
    `parameters` are those of any request, for their shapes; `top` log probabilities are made of a
    token where they are asked for.
    """

    rules: Mapping[str, Rule]
    slots: int
    parameters: Parameters
    top: int
    layout: Layout | None = None


class Given(NamedTuple):
    """What a step gave, for the host.

    `packed` holds for each row the number of tokens, whether it is done, the nodes of its tree, the
    nodes that were accepted; then the tokens, the bits of their log probabilities and the path;
    then of each node its token, its parent (-1: the root's, and those of no node) and the bits of
    its chance.
    """

    packed: Int32[Array, "n c"]
    top: Float[Array, "n W k"]
    top_tokens: Int32[Array, "n W k"]


def empty(target: Model, drafter: Drafter, setup: Setup, rows: int) -> EngineState:
    """A state of `rows` rows that hold a token each and are done."""

    def whole(target: Model, drafter: Drafter) -> EngineState:
        return _fresh(target, drafter, setup, jnp.zeros(rows, jnp.int32))

    return _spread(setup, whole, target, drafter)(target, drafter)


def begin(
    target: Model, drafter: Drafter, state: EngineState, setup: Setup, at: Int32[Array, "2"]
) -> EngineState:
    """Row `at[0]` holds nothing but the token `at[1]`, and is done.

    The target's cache holds none of it, so that no pass of the target is made.
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Drafter, state: EngineState, at: Array) -> EngineState:
        own = _fresh(target, drafter, setup, at[1:])
        made = put_row(state, specs, at[0], own, _FRESH_SLOTS)
        cache = replace(state.decode.cache, length=made.decode.cache.length)
        return replace(made, decode=replace(made.decode, cache=cache))

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
    at: Int32[Array, "2"],
    tokens: Int32[Array, " T"],
    *,
    scored: bool,
) -> tuple[EngineState, TokenLogprobs | None]:
    """Row `at[0]` with the first `at[1]` of `tokens` after its own; their log probabilities if
    `scored`.

    It is as if a chain of these tokens had been drafted elsewhere and accepted.
    """
    specs = specs_of(target, drafter)

    def whole(target: Model, drafter: Drafter, state: EngineState, at: Array, tokens: Array) -> Any:
        part = take(state, specs, at[:1])
        decode, found = _extended(target, drafter, setup, part.decode, tokens[None], at[1:], scored)
        return put(state, specs, at[:1], part, replace(part, decode=decode)), found

    run = _spread(setup, whole, target, drafter, state, more=2, gives=1)
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
        del target, drafter
        row, words, bias, prompt = given
        parameters = unpacked(words, setup.parameters)
        own = _assigned(parameters, bias, prompt)
        decode = jax.tree.map(lambda x, y: x.at[row].set(y[0]), _asked_of(state.decode), own)
        naive = state.naive.at[row].set(parameters.naive[0] > 0)
        return EngineState(replace(state.decode, **decode), naive)

    run = _spread(setup, whole, target, drafter, state, more=4)
    return run(target, drafter, state, row, words, bias, prompt)


def advance(
    target: Model,
    drafter: Drafter,
    state: EngineState,
    setup: Setup,
    control: Int32[Array, "n 3"],
    wanted: Bool[Array, ""],
    calibration: Float[Array, "2 2"],
    *,
    width: int,
    setting: str,
) -> tuple[EngineState, Given]:
    """A step of the rows `control[:, 0]`, of which those with a second number above 0 end first.

    They come in order if they are all that there are; their trees are of a setting of the drafter,
    and no deeper than the third number. The target's pass has `width` columns, for the likeliest
    nodes by `calibration` (see `Served`); log probabilities are made where they are `wanted`.
    """
    specs = specs_of(target, drafter)

    def whole(
        target: Model, drafter: Drafter, state: EngineState, *given: Array
    ) -> tuple[EngineState, Given]:
        control, wanted, calibration = given
        rows, ended = control[:, 0], control[:, 1] > 0
        every = not reads_rows_in_place() and rows.shape == state.naive.shape
        part = state if every else take(state, specs, rows)
        live = _without_ended(part, ended)
        cut = calibration if len(drafter.settings) > 1 else None  # else all nodes have columns
        served = Served(width, live.naive, wanted, setup.top, control[:, 2], cut)
        own, rule = drafter.of_setting(setting), setup.rules[setting]
        decode, gave = step(target, own, rule, live.decode, served)
        after = replace(part, decode=_as_asked(decode, part.decode))
        return (after if every else put(state, specs, rows, part, after)), _given(gave)

    run = _spread(setup, whole, target, drafter, state, more=3, gives=1)
    return run(target, drafter, state, control, wanted, calibration)


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
        part = take(state, specs, rows)
        draft, chance = drafter.catch_up(part.decode.draft, part.decode.sampling, tokens)
        after = replace(part, decode=replace(part.decode, draft=draft))
        return put(state, specs, rows, part, after), chance

    run = _spread(setup, whole, target, drafter, state, more=1, gives=1)
    return run(target, drafter, state, rows)


def _without_ended(state: EngineState, ended: Bool[Array, " n"]) -> EngineState:
    """Rows of which some end; what they and those before them asked for costs nothing in a step."""
    done = state.decode.done | ended
    counts = state.decode.counts
    decode = replace(
        state.decode,
        done=done,
        sampling=jax.tree.map(lambda x: jnp.where(done, 0, x), state.decode.sampling),
        counts=None if counts is None else replace(counts, used=counts.used & ~done),
    )
    return EngineState(decode, state.naive & ~done)


def _as_asked(decode: DecodeState, before: DecodeState) -> DecodeState:
    """`decode` with what its rows asked for `before`: that some are done is all that is kept."""
    assert decode.counts is not None
    assert before.counts is not None
    counts = replace(decode.counts, used=before.counts.used)
    return replace(decode, sampling=before.sampling, counts=counts)


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
    )
    decode = prefill(target, drafter, asked, setup.slots)
    return EngineState(replace(decode, done=jnp.ones(rows, bool)), none[:, 0])


def _asked_of(decode: DecodeState) -> dict[str, Any]:
    """The fields of a state that a request sets."""
    names = ("key", "sampling", "limits", "made", "done", "counts")
    return {name: getattr(decode, name) for name in names}


def _assigned(parameters: Parameters, bias: Array, prompt: Array) -> dict[str, Any]:
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
    }


def _extended(
    target: Model,
    drafter: Drafter,
    setup: Setup,
    state: DecodeState,
    tokens: Int32[Array, "1 T"],
    count: Int32[Array, "1"],
    scored: bool,
) -> tuple[DecodeState, TokenLogprobs | None]:
    """A row's state after the first `count` of `tokens`; their log probabilities if `scored`."""
    state, x = extended(target, drafter, state, tokens, count)
    if not scored:
        return state, None
    return state, of_tokens(unembed(target, x).T[None], tokens, setup.top)


def _spread(
    setup: Setup,
    whole: Any,
    target: Model,
    drafter: Drafter,
    state: EngineState | None = None,
    more: int = 1,
    gives: int = 0,
) -> Any:
    """`whole` on the devices of a mesh: a state if there is one, and `more` arguments on all."""
    specs = specs_of(target, drafter)
    taken = () if state is None else (specs, *(_EVERYWHERE,) * more)
    out = (specs, *(_EVERYWHERE,) * gives) if gives else specs
    run = spread(setup.layout, whole, (target, drafter), taken, out)
    if not gives:
        return run

    def read(*arguments: Any) -> tuple[Any, ...]:
        state, *rest = run(*arguments)
        return state, *(everywhere(setup.layout, each) for each in rest)

    return read


_EVERYWHERE = jax.sharding.PartitionSpec()
