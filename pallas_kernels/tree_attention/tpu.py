"""Tree attention for TPU (Mosaic): one pass over the live tiles of a row's cache, then the block.

A program holds the nodes of one key/value head, all its query heads together, and walks along
the keys with a running softmax in float32. Tiles at or past a row's length are not fetched: their
index is that of the last live one, and a tile whose index stays is not copied again. A tile lies in
one page, whose number is prefetched. The grid has rows and heads on its parallel axes; a core walks
along keys alone, so that no merge is needed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import precision_of
from pallas_kernels.tree_attention.operands import (
    Operands,
    folded,
    seen_values,
    sinks_by_query,
    undivided,
)

_LOW = -1e30
_LANES = 128
_ROWS = 512
_SLOTS = 512
_COLUMNS = 256


class _Tiles:
    """Static sizes of a call: nodes, slots and block columns a tile, and how many tiles."""

    def __init__(self, at: Operands) -> None:
        _, _, tokens, _ = at.query.shape
        least = 32 // at.block_keys.dtype.itemsize  # sublanes of a tile, those of the int8 mask too
        most = max(32, _ROWS // at.groups // 32 * 32)
        self.tokens = min(_up(tokens, max(least, 32)), most)
        self.slots = min(_up(at.slots, _LANES), _SLOTS)
        if at.prefix is not None and at.prefix.pages_a_row > 1:
            self.slots = math.gcd(at.prefix.page_size, _SLOTS)
        self.columns = min(_up(at.tree_mask.shape[-1], _LANES), _COLUMNS)
        self.token_tiles = pl.cdiv(tokens, self.tokens)
        self.slot_tiles = 0 if at.prefix is None else pl.cdiv(at.slots, self.slots)
        self.column_tiles = pl.cdiv(at.tree_mask.shape[-1], self.columns)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def unable(at: Operands) -> str | None:
    """Why this implementation cannot run on such operands, or None."""
    return undivided(at, _LANES)


def tree_attention(at: Operands, *, interpret: Any = False) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`; `interpret` is that of `pallas_call`."""
    tiles = _Tiles(at)
    rows, heads, tokens, dim = at.query.shape
    kv_heads = at.block_keys.shape[1]
    spare = tiles.token_tiles * tiles.tokens - tokens
    empty = tiles.column_tiles * tiles.columns - at.tree_mask.shape[-1]

    query = jnp.pad(folded(at), [(0, 0)] * 3 + [(0, spare), (0, 0)])
    tree_mask = jnp.pad(at.tree_mask.astype(jnp.int8), [(0, 0), (0, spare), (0, empty)])
    keys, values = (
        jnp.pad(x, [(0, 0), (0, 0), (0, empty), (0, 0)]) for x in (at.block_keys, seen_values(at))
    )
    block = [query, keys, values, tree_mask]
    group = (1, 1, at.groups, tiles.tokens, dim)
    column = (1, 1, tiles.columns, dim)

    def column_tile(j: Array) -> Array:
        return jnp.maximum(j - tiles.slot_tiles, 0)

    specs = [
        pl.BlockSpec(group, lambda b, k, i, j, *_: (b, k, 0, i, 0)),
        pl.BlockSpec(column, lambda b, k, i, j, *_: (b, k, column_tile(j), 0)),
        pl.BlockSpec(column, lambda b, k, i, j, *_: (b, k, column_tile(j), 0)),
        pl.BlockSpec(
            (1, tiles.tokens, tiles.columns), lambda b, k, i, j, *_: (b, i, column_tile(j))
        ),
    ]
    bounds, past, past_specs = _prefix(at, tiles, spare)
    reach = at.groups * tiles.tokens
    if at.sinks is not None:
        block.append(sinks_by_query(at, tiles.tokens))
        specs.append(pl.BlockSpec((1, 1, reach, 1), lambda b, k, i, j, *_: (b, k, 0, 0)))
    out = pl.pallas_call(
        functools.partial(_kernel, at.soft_cap, tiles, at.first is not None, at.sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, kv_heads, tiles.token_tiles, tiles.slot_tiles + tiles.column_tiles),
            in_specs=specs + past_specs,
            out_specs=specs[0],
            scratch_shapes=[
                pltpu.VMEM((reach, _LANES), jnp.float32),
                pltpu.VMEM((reach, _LANES), jnp.float32),
                pltpu.VMEM((reach, dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, at.query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="tree_attention",
    )(bounds, *block, *past)
    return out[:, :, :, :tokens].reshape(rows, heads, tokens, dim)


def _prefix(at: Operands, tiles: _Tiles, spare: int) -> tuple[Array, list[Array], list[Any]]:
    """Every row's first and one past its last slot and its pages, the prefix's arrays, and their
    tiles.
    """
    if at.prefix is None:
        return jnp.zeros((at.query.shape[0], 3), jnp.int32), [], []
    length = at.prefix.length.astype(jnp.int32)
    start = jnp.zeros_like(length) if at.first is None else at.first.min(axis=1).astype(jnp.int32)
    bounds = jnp.stack([jnp.clip(start, 0, length), length], axis=1)
    bounds = jnp.concatenate([bounds, at.prefix.page_indices], axis=1)
    dim, several = at.query.shape[-1], at.prefix.pages_a_row > 1
    page_tiles = at.prefix.page_size // tiles.slots

    def page_and_tile(b: Array, j: Array, bounds_ref: Any) -> tuple[Array, Array]:
        low, last = (lax.div(bounds_ref[b, n] - n, jnp.int32(tiles.slots)) for n in (0, 1))
        tile = jnp.clip(low + j, 0, jnp.maximum(last, 0))
        if not several:
            return bounds_ref[b, 2], tile
        number, tile = (of(tile, jnp.int32(page_tiles)) for of in (lax.div, lax.rem))
        return bounds_ref[b, 2 + number], tile

    def along_lanes(b: Array, k: Array, i: Array, j: Array, bounds_ref: Any) -> tuple[Any, ...]:
        page, tile = page_and_tile(b, j, bounds_ref)
        return page, k, 0, tile

    def along_sublanes(b: Array, k: Array, i: Array, j: Array, bounds_ref: Any) -> tuple[Any, ...]:
        page, tile = page_and_tile(b, j, bounds_ref)
        return page, k, tile, 0

    arrays: list[Array] = [at.prefix.keys, at.prefix.values]
    specs = [
        pl.BlockSpec((1, 1, dim, tiles.slots), along_lanes),
        pl.BlockSpec((1, 1, tiles.slots, dim), along_sublanes),
    ]
    if at.prefix.scales is not None:
        arrays += [scale[:, :, None] for scale in at.prefix.scales]
        specs += [pl.BlockSpec((1, 1, 1, tiles.slots), along_lanes)] * 2
    if at.first is not None:
        arrays.append(jnp.pad(at.first.astype(jnp.int32), [(0, 0), (0, spare)])[..., None])
        specs.append(pl.BlockSpec((1, tiles.tokens, 1), lambda b, k, i, j, s: (b, i, 0)))
    return bounds, arrays, specs


def _kernel(
    soft_cap: float | None, tiles: _Tiles, bounded: bool, sinks: bool, bounds_ref: Any, *refs: Any
) -> None:
    query_ref, keys_ref, values_ref, visible_ref, *past, out_ref, top_ref, sum_ref, mix_ref = refs
    sinks_ref = past.pop(0) if sinks else None
    row, step = pl.program_id(0), pl.program_id(3)
    start, stop = bounds_ref[row, 0], bounds_ref[row, 1]
    groups, tokens, dim = query_ref.shape[2:]
    query = query_ref[0, 0].reshape(groups * tokens, dim)
    update = functools.partial(_update, soft_cap, query, top_ref, sum_ref, mix_ref)

    def all_heads(seen: Array) -> Array:
        """What nodes see, for each head; numbers, as layouts of single bits are not reshaped."""
        words = jnp.broadcast_to(seen.astype(jnp.int32)[None], (groups, *seen.shape))
        return words.reshape(-1, seen.shape[1]) != 0

    @pl.when(step == 0)
    def _():
        if sinks_ref is None:
            top_ref[...] = jnp.full_like(top_ref, _LOW)
            sum_ref[...] = jnp.zeros_like(sum_ref)
        else:
            top_ref[...] = jnp.broadcast_to(sinks_ref[0, 0], top_ref.shape)
            sum_ref[...] = jnp.ones_like(sum_ref)
        mix_ref[...] = jnp.zeros_like(mix_ref)

    def of_cache() -> None:
        tile = lax.div(start, jnp.int32(tiles.slots)) + step

        @pl.when((step < tiles.slot_tiles) & (tile * tiles.slots < stop))
        def _():
            slot = tile * tiles.slots + lax.broadcasted_iota(jnp.int32, (tokens, tiles.slots), 1)
            seen = slot < stop
            if bounded:
                seen &= slot >= past[-1][0]
            live = tile * tiles.slots + lax.broadcasted_iota(jnp.int32, (tiles.slots, dim), 0)
            keys, values = (ref[0, 0].astype(query.dtype) for ref in past[:2])
            scales = [ref[0, 0] for ref in past[2:4]] if len(past) - bounded == 4 else None
            update(keys, jnp.where(live < stop, values, 0), all_heads(seen), 0, scales)

    if past:
        of_cache()

    @pl.when(step >= tiles.slot_tiles)
    def _():
        update(keys_ref[0, 0], values_ref[0, 0], all_heads(visible_ref[0]), 1, None)

    @pl.when(step == tiles.slot_tiles + tiles.column_tiles - 1)
    def _():
        total = sum_ref[:, :1]
        mixed = mix_ref[...] / jnp.where(total > 0, total, 1)
        out_ref[0, 0] = mixed.reshape(groups, tokens, dim).astype(out_ref.dtype)


def _update(
    soft_cap: float | None,
    query: Array,
    top_ref: Any,
    sum_ref: Any,
    mix_ref: Any,
    keys: Array,
    values: Array,
    seen: Array,
    axis: int,
    scales: list[Array] | None,
) -> None:
    """Takes a tile of keys into the running softmax; `axis` is that of its features.

    Scales `[1, keys]` are those of keys and values of 8 bits.
    """
    precision = precision_of(query.dtype)
    scores = lax.dot_general(
        query, keys, (((1,), (axis,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    if scales is not None:
        scores = scores * scales[0]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    before = top_ref[:, :1]
    top = jnp.maximum(before, jnp.where(seen, scores, _LOW).max(axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    left = jnp.exp(before - top)
    total = sum_ref[:, :1] * left + weights.sum(axis=1, keepdims=True)
    if scales is not None:
        weights = jnp.where(seen, weights * scales[1], 0)
    mixed = lax.dot_general(
        weights.astype(values.dtype), values, (((1,), (0,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    mix_ref[...] = mix_ref[...] * left + mixed
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)


interpreted = functools.partial(tree_attention, interpret=True)
"""The same in the interpreter."""
