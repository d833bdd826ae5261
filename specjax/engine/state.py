"""The state of an engine's rows on the device, and rows taken out of it and put back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from pallas_kernels.tree_attention.xla import reads_rows_in_place
from specjax.base.pytree import pytree, replace, unchecked
from specjax.decoding.generate import state_specs
from specjax.decoding.stepping import DecodeState
from specjax.draft.drafter import Drafter
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Model
from specjax.parallel.mesh import DATA, ROWS

_FEW_SLOTS = 128
"""Of a state that is only looked at."""


@pytree
class EngineState:
    """All rows: what decoding needs of each, and whether it is decided by the naive rule."""

    decode: DecodeState
    naive: Bool[Array, " B"]


def specs_of(target: Model, drafter: Drafter) -> EngineState:
    """How a state is spread over a mesh."""
    return unchecked(EngineState, decode=state_specs(target, drafter), naive=ROWS)


def take(state: EngineState, specs: EngineState, rows: Int32[Array, " n"]) -> EngineState:
    """Some rows of a state. Where a platform reads rows of a cache in place, caches are not copied.

    No two of `rows` are the same.
    """

    def of_cache(cache: KVCache) -> KVCache:
        return replace(cache, length=cache.length[rows], rows=rows)

    return _over(specs, of_cache, lambda axis, x: jnp.take(x, rows, axis=axis), state)


def put(
    state: EngineState, specs: EngineState, rows: Int32[Array, " n"], part: EngineState
) -> EngineState:
    """The state with `part`, which `take` gave, in the place of its rows."""

    def of_cache(cache: KVCache, own: KVCache) -> KVCache:
        length = cache.length.at[rows].set(own.length)
        return replace(own, length=length, rows=None)

    def set_rows(axis: int, x: Array, own: Array) -> Array:
        return x.at[(slice(None),) * axis + (rows,)].set(own)

    return _over(specs, of_cache, set_rows, state, part)


def take_row(state: EngineState, specs: EngineState, row: Int32[Array, ""]) -> EngineState:
    """A copy of one row, its caches too."""
    return _leaves(
        specs, lambda axis, x: lax.dynamic_index_in_dim(x, row, axis, keepdims=True), state
    )


def put_row(
    state: EngineState, specs: EngineState, row: Int32[Array, ""], own: EngineState
) -> EngineState:
    """The state with one row, its caches too, in the place of row number `row`."""
    return _leaves(
        specs, lambda axis, x, y: lax.dynamic_update_index_in_dim(x, y, row, axis), state, own
    )


def can_truncate(drafter: Drafter) -> bool:
    """Whether a row may begin with what another holds: whether a draft's state can be shortened."""

    def shorter() -> object:
        state = drafter.init(
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            _FEW_SLOTS,
            jnp.zeros((1, 1, drafter.target_top_k), jnp.int32),
        )
        nonlocal able
        able = drafter.truncate(state, jnp.ones(1, jnp.int32)) is not None

    able = False
    jax.eval_shape(shorter)
    return able


def _over(specs: EngineState, of_cache: Callable[..., KVCache], leaf: Any, *states: Any) -> Any:
    """Every array by `leaf`, and caches whose rows come first by `of_cache` where that saves."""

    def at(spec: P, *parts: Any) -> Any:
        axis = tuple(spec).index(DATA)

        def one(*found: Any) -> Any:
            if isinstance(found[0], KVCache) and axis == 0 and reads_rows_in_place():
                return of_cache(*found)
            return jax.tree.map(lambda *x: leaf(axis, *x), *found)

        return jax.tree.map(one, *parts, is_leaf=lambda node: isinstance(node, KVCache))

    def of_target(cache: KVCache, *others: KVCache) -> KVCache:
        return at(ROWS, cache, *others)

    caches = of_target(*(state.decode.cache for state in states))
    without = [_without_cache(state) for state in states]
    made = jax.tree.map(at, _without_cache(specs), *without, is_leaf=_is_spec)
    return replace(made, decode=replace(made.decode, cache=caches))


def _leaves(specs: EngineState, leaf: Any, *states: Any) -> Any:
    """Every array by `leaf`, which is told the axis of rows."""

    def at(spec: P, *parts: Any) -> Any:
        axis = tuple(spec).index(DATA)
        return jax.tree.map(lambda *x: leaf(axis, *x), *parts)

    return jax.tree.map(at, specs, *states, is_leaf=_is_spec)


def _without_cache(state: EngineState) -> EngineState:
    return unchecked(
        EngineState,
        decode=unchecked(DecodeState, **{**vars(state.decode), "cache": None}),
        naive=state.naive,
    )


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
