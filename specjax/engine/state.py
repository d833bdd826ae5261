"""The state of an engine's rows on the device, and rows taken out of it and put back."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from specjax.base.pytree import pytree, replace, unchecked
from specjax.decoding.generate import state_specs
from specjax.decoding.stepping import DecodeState
from specjax.draft.drafter import Drafter
from specjax.engine.pages import Paging
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Model
from specjax.parallel.mesh import DATA, ROWS

_COPIED = 256
"""Slots of a row that are copied at a time."""


@pytree
class EngineState:
    """All rows: what decoding needs of each, and whether it is decided by the naive rule."""

    decode: DecodeState
    naive: Bool[Array, " B"]


def specs_of(target: Model, drafter: Drafter) -> EngineState:
    """How a state is spread over a mesh."""
    return unchecked(EngineState, decode=state_specs(target, drafter), naive=ROWS)


def take(state: EngineState, specs: EngineState, rows: Int32[Array, " n"]) -> EngineState:
    """Some rows of a state, no two of which are the same. Caches are not copied, but say which of
    their rows these are; those of models under `vmap` are.
    """

    def one(axis: int, x: Array) -> Array:
        return x.at[_rows_at(axis, rows)].get(mode="promise_in_bounds", unique_indices=True)

    def of_cache(axis: int, cache: KVCache) -> KVCache:
        if _in_place(cache):
            pages = rows[:, None] if cache.pages is None else cache.pages[rows]
            return replace(cache, length=cache.length[rows], pages=pages)
        return jax.tree.map(partial(one, axis), cache)

    return _leaves(specs, of_cache, one, state)


def put(
    state: EngineState,
    specs: EngineState,
    rows: Int32[Array, " n"],
    taken: EngineState,
    part: EngineState,
) -> EngineState:
    """The state with `part`, made of what `take` gave, in the place of its rows.

    Arrays that are those of `taken` are not written: a step changes few of a row's many.
    """

    def set_rows(axis: int, x: Array, was: Array, own: Array) -> Array:
        if own is was:
            return x
        at = x.at[_rows_at(axis, rows)]
        return at.set(own, mode="promise_in_bounds", unique_indices=True)

    def of_cache(axis: int, cache: KVCache, was: KVCache, own: KVCache) -> KVCache:
        if not _in_place(cache):
            return jax.tree.map(partial(set_rows, axis), cache, was, own)
        length = set_rows(0, cache.length, was.length, own.length)
        return replace(own, length=length, pages=cache.pages)

    return _leaves(specs, of_cache, set_rows, state, taken, part)


def _rows_at(axis: int, rows: Int32[Array, " n"]) -> tuple[slice | Array, ...]:
    """The index of rows that are along `axis`."""
    return (*(slice(None),) * axis, rows)


def _in_place(cache: KVCache) -> bool:
    """Whether rows of a cache are read and written where they lie: it is of a single model."""
    return cache.length.ndim == 1


def _row_axis(cache: KVCache) -> int:
    """Along which axis of its keys and values a cache has its rows, after those of layers."""
    return cache.keys[0].ndim - 4


def put_row(
    state: EngineState, specs: EngineState, row: Int32[Array, ""], own: EngineState, slots: int
) -> EngineState:
    """The state with one row in the place of row number `row`, whose caches hold `slots` at most.

    Slots past them stay as they are.
    """

    def set_row(axis: int, x: Array, own: Array) -> Array:
        return lax.dynamic_update_slice(x, own, _at(x, axis, row))

    def of_cache(axis: int, cache: KVCache, own: KVCache) -> KVCache:
        lead, page = _row_axis(cache), row if cache.pages is None else cache.pages[row, 0]

        def held(x: Array, own: Array) -> Array:
            return lax.dynamic_update_slice(x, own, _at(x, lead, page))

        keys = [key[..., :slots] for key in own.keys]
        values = [value[..., :slots, :] for value in own.values]
        return KVCache(
            tuple(map(held, cache.keys, keys)),
            tuple(map(held, cache.values, values)),
            set_row(axis, cache.length, own.length),
            cache.pages,
        )

    return _leaves(specs, of_cache, set_row, state, own)


def copy_row(
    state: EngineState,
    specs: EngineState,
    source: Int32[Array, ""],
    row: Int32[Array, ""],
    length: Int32[Array, ""],
) -> EngineState:
    """The state with a copy of row `source` in row number `row`, of its caches `length` tokens.

    Pages that both begin with are not copied.
    """

    def one(axis: int, x: Array) -> Array:
        own = lax.dynamic_index_in_dim(x, source, axis, keepdims=True)
        return lax.dynamic_update_slice(x, own, _at(x, axis, row))

    def of_cache(axis: int, cache: KVCache) -> KVCache:
        size, lead, paged = min(_COPIED, cache.page_size), _row_axis(cache), cache.page_size
        first, places = jnp.where(source == row, cache.slots, 0), None
        if cache.pages is not None:
            places = cache.pages[source], cache.pages[row]
            first = paged * jnp.cumprod(places[0] == places[1]).sum()

        def part(x: Array, start: Array, along: int) -> Array:
            sizes = list(x.shape)
            sizes[lead], sizes[along] = 1, size
            begin, pages = start, (source, row)
            if places is not None:
                begin, pages = start % paged, tuple(each[start // paged] for each in places)
            own = lax.dynamic_slice(x, _at(x, lead, pages[0], along, begin), sizes)
            return lax.dynamic_update_slice(x, own, _at(x, lead, pages[1], along, begin))

        def chunk(number: Array, held: Any) -> Any:
            start = jnp.minimum(number * size, cache.slots - size)
            keys, values = held
            return [part(x, start, -1) for x in keys], [part(x, start, -2) for x in values]

        held = list(cache.keys), list(cache.values)
        keys, values = lax.fori_loop(first // size, -(-length // size), chunk, held)
        return KVCache(tuple(keys), tuple(values), one(axis, cache.length), cache.pages)

    return _leaves(specs, of_cache, one, state)


def in_pages(state: EngineState, paging: Paging, slots: int) -> EngineState:
    """A state whose rows hold next to nothing, with caches of pages, none of which is a row's; rows
    may have pages for so many slots.
    """

    def of_pages(cache: KVCache, pages: int) -> KVCache:
        lead = _row_axis(cache)

        def zeros(x: Array, axis: int) -> Array:
            shape = list(x.shape)
            shape[lead], shape[axis] = pages, paging.size
            return jnp.zeros(shape, x.dtype)

        rows = cache.length.shape[0]
        return KVCache(
            tuple(zeros(x, -1) for x in cache.keys),
            tuple(zeros(x, -2) for x in cache.values),
            cache.length,
            jnp.zeros((rows, slots // paging.size), jnp.int32),
        )

    def of_draft(node: Any) -> Any:
        is_paged = isinstance(node, KVCache) and _in_place(node)
        return of_pages(node, paging.draft_pages) if is_paged else node

    decode = state.decode
    cache = of_pages(decode.cache, paging.target_pages)
    draft = jax.tree.map(of_draft, decode.draft, is_leaf=_is_cache)
    return replace(state, decode=replace(decode, cache=cache, draft=draft))


def tables_of(state: EngineState) -> list[Array]:
    """Where rows lie: the tables of the target's cache, and of drafts' caches that have pages."""
    caches = [state.decode.cache, *jax.tree.leaves(state.decode.draft, is_leaf=_is_cache)]
    return [each.pages for each in caches if _is_cache(each) and each.pages is not None]


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def _at(x: Array, axis: int, row: Array, along: int | None = None, start: Any = 0) -> list[Array]:
    """Where a row begins in an array, and `start` along another axis."""
    found = [jnp.int32(0)] * x.ndim
    found[axis] = row
    if along is not None:
        found[along] = start
    return found


def _leaves(specs: EngineState, of_cache: Any, leaf: Any, *states: Any) -> Any:
    """Every cache by `of_cache` and every other array by `leaf`, told the axis of rows."""

    def at(spec: P, *parts: Any) -> Any:
        axis = tuple(spec).index(DATA)

        def one(*found: Any) -> Any:
            if isinstance(found[0], KVCache):
                return of_cache(axis, *found)
            return jax.tree.map(partial(leaf, axis), *found)

        return jax.tree.map(one, *parts, is_leaf=_is_cache)

    def of_target(cache: KVCache, *others: KVCache) -> KVCache:
        return at(ROWS, cache, *others)

    caches = of_target(*(state.decode.cache for state in states))
    without = [_without_cache(state) for state in states]
    made = jax.tree.map(at, _without_cache(specs), *without, is_leaf=_is_spec)
    return replace(made, decode=replace(made.decode, cache=caches))


def _without_cache(state: EngineState) -> EngineState:
    return unchecked(
        EngineState,
        decode=unchecked(DecodeState, **{**vars(state.decode), "cache": None}),
        naive=state.naive,
    )


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
