"""Tree attention for GPUs through Triton: cards before Hopper, float32, and caches of 8 bits.

A program holds some nodes of one key/value head with all its query heads, and walks with a running
softmax in float32 over its share of the keys: of the row's live slots and of the block's columns.
The shares of few rows are merged by their log-sum-exp. Tiles at or past a row's length, and
what a power of two, or the least of 16, has beyond a head's features, are not read. A tile lies in
one page.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import precision_of
from pallas_kernels.tree_attention.merge import merged, partial, splits_of
from pallas_kernels.tree_attention.operands import Operands, folded, seen_values, undivided

_LOW = -1e30
_MOST_QUERIES = 64
_KEYS = 64
_FEATURES = 16  # a product over fewer of 16 bits was wrong on an H100 (jax 0.11.2)
_WIDEST = 512  # bytes of a head's features, for three stages
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


class _Static(NamedTuple):
    """What a program knows of its call; `names` are the operands after the block's."""

    soft_cap: float | None
    tokens: int
    dim: int
    tiles: int
    splits: int
    names: tuple[str, ...]


class _Running(NamedTuple):
    """A running softmax: the largest score, the weights' sum and the weighted values."""

    top: Array
    total: Array
    mixed: Array


def unable(at: Operands) -> str | None:
    """Why this implementation cannot run on such operands, or None."""
    return undivided(at, _KEYS)


def tree_attention(at: Operands, *, interpret: bool = False) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`; `interpret` is that of `pallas_call`."""
    rows, heads, tokens, dim = at.query.shape
    kv_heads, columns = at.block_keys.shape[1], at.tree_mask.shape[-1]
    reach = at.groups * tokens
    tile = max(16, min(_MOST_QUERIES, pl.next_power_of_2(reach)))
    tiles = pl.cdiv(reach, tile)
    splits = splits_of(rows * kv_heads * tiles, at.slots, _PROGRAMS)

    wide = max(_FEATURES, pl.next_power_of_2(dim))
    spare = ((0, 0), (0, 0), (0, tiles * tile - reach), (0, wide - dim))
    query = jnp.pad(folded(at).reshape(rows, kv_heads, reach, dim), spare)
    operands = [query, at.block_keys, seen_values(at), at.tree_mask.astype(jnp.int8)]
    specs = [
        pl.BlockSpec((None, None, tile, wide), lambda i, k, b: (b, k, i % tiles, 0)),
        pl.BlockSpec((None, None, columns, dim), lambda i, k, b: (b, k, 0, 0)),
        pl.BlockSpec((None, None, columns, dim), lambda i, k, b: (b, k, 0, 0)),
        pl.BlockSpec((None, tokens, columns), lambda i, k, b: (b, 0, 0)),
    ]
    names = []
    if at.prefix is not None:
        operands += [at.prefix.length.astype(jnp.int32), at.prefix.page_indices]
        specs.append(pl.BlockSpec((None,), lambda i, k, b: (b,)))
        specs.append(pl.BlockSpec((None, at.prefix.pages_a_row), lambda i, k, b: (b, 0)))
        operands += [at.prefix.keys, at.prefix.values]
        names += ["length", "pages", "keys", "values"]
        if at.prefix.scales is not None:
            operands += at.prefix.scales
            names += ["key_scales", "value_scales"]
        specs += [pl.no_block_spec] * (len(operands) - len(specs))  # a page is anywhere in them
        if at.first is not None:
            operands.append(at.first.astype(jnp.int32))
            specs.append(pl.BlockSpec((None, tokens), lambda i, k, b: (b, 0)))
            names.append("first")
    if at.sinks is not None:
        operands.append(at.sinks.astype(jnp.float32).reshape(rows, kv_heads, at.groups))
        specs.append(pl.BlockSpec((None, None, at.groups), lambda i, k, b: (b, k, 0)))
        names.append("sinks")
    static = _Static(at.soft_cap, tokens, dim, tiles, splits, tuple(names))
    shape = (rows, kv_heads, splits, tiles * tile)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(tiles * splits, kv_heads, rows),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, None, tile, wide),
                         lambda i, k, b: (b, k, i // tiles, i % tiles, 0)),
            pl.BlockSpec((None, None, None, tile), lambda i, k, b: (b, k, i // tiles, i % tiles)),
        ],
        out_shape=partial(shape, wide, at.query.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=_stages(wide, at)),
        interpret=interpret,
        name="tree_attention",
    )(*operands)  # fmt: skip
    mixed = merged(out, lse)[:, :, :reach, :dim]
    return mixed.reshape(rows, heads, tokens, dim).astype(at.query.dtype)


def _stages(wide: int, at: Operands) -> int:
    """How many tiles of keys and values are loaded while one is worked on, and that one.

    With three stages float32 heads of 256 needed 276 KiB of shared memory, where an H100 has 227.
    """
    read = at.block_keys if at.prefix is None else at.prefix.keys
    return 3 if wide * max(at.query.dtype.itemsize, read.dtype.itemsize) <= _WIDEST else 2


def _kernel(static: _Static, *refs: Any) -> None:
    query_ref, keys_ref, values_ref, visible_ref, *past, out_ref, lse_ref = refs
    named = dict(zip(static.names, past, strict=True))
    share = pl.program_id(0) // static.tiles
    tile, wide = query_ref.shape
    query = query_ref[...]
    row = (pl.program_id(0) % static.tiles) * tile + jnp.arange(tile)
    token = row % static.tokens  # of all heads; rows past the last see what a first one sees
    feature = jnp.arange(wide)
    known_feature = feature < static.dim
    update = functools.partial(_update, static.soft_cap, query)

    def block(step: Array, at: _Running) -> _Running:
        column = (step * static.splits + share) * _KEYS + jnp.arange(_KEYS)
        known = column < visible_ref.shape[1]
        seen = plgpu.load(
            visible_ref.at[token[:, None], column[None, :]], mask=known[None, :], other=0
        )
        across = known[:, None] & known_feature[None, :]
        keys = plgpu.load(keys_ref.at[column[:, None], feature[None, :]], mask=across, other=0)
        values = plgpu.load(values_ref.at[column[:, None], feature[None, :]], mask=across, other=0)
        return update(keys.T, values, seen != 0, None, at)

    def prefix(step: Array, at: _Running) -> _Running:
        slot = step * _KEYS + jnp.arange(_KEYS)
        live = slot < stop
        if several:
            number = lax.div(step * _KEYS, jnp.int32(slots))
            held_at = named["pages"][number], head
            place = step * _KEYS - number * slots + jnp.arange(_KEYS)
        else:
            held_at, place = only, slot
        held = place < slots
        seen = jnp.broadcast_to(live[None, :], (tile, _KEYS))
        if first is not None:
            seen &= slot[None, :] >= first[:, None]
        keys = plgpu.load(
            named["keys"].at[*held_at, feature[:, None], place[None, :]],
            mask=known_feature[:, None] & held[None, :],  # not `live`, for wide loads
            other=0,
        )
        values = plgpu.load(
            named["values"].at[*held_at, place[:, None], feature[None, :]],
            mask=live[:, None] & known_feature[None, :],
            other=0,
        )
        scales = None
        if "key_scales" in named:
            scales = [plgpu.load(named[name].at[*held_at, place], mask=live, other=0)
                      for name in ("key_scales", "value_scales")]  # fmt: skip
        return update(keys.astype(query.dtype), values.astype(query.dtype), seen, scales, at)

    top = jnp.full((tile,), _LOW, jnp.float32)
    total = jnp.zeros((tile,), jnp.float32)
    if "sinks" in named:  # of the first share alone
        group = jnp.minimum(row // static.tokens, named["sinks"].shape[0] - 1)
        top = jnp.where(share == 0, plgpu.load(named["sinks"].at[group]), top)
        total = jnp.where(share == 0, 1.0, total)
    at = _Running(top, total, jnp.zeros((tile, wide), jnp.float32))
    if "length" in named:
        stop, slots = named["length"][...], named["values"].shape[2]
        head, several = pl.program_id(1), named["pages"].shape[0] > 1
        only = named["pages"][0], head
        first = None
        begin = 0
        if "first" in named:
            first = plgpu.load(named["first"].at[token])
            begin = jnp.maximum(first.min(), 0) // _KEYS
        own = pl.cdiv(pl.cdiv(stop, _KEYS) - begin, static.splits)
        low = begin + share * own
        at = lax.fori_loop(low, jnp.minimum(low + own, pl.cdiv(stop, _KEYS)), prefix, at)
    steps = pl.cdiv(pl.cdiv(visible_ref.shape[1], _KEYS), static.splits)
    at = lax.fori_loop(0, steps, block, at)
    lse_ref[...] = jnp.where(at.total > 0, at.top + jnp.log(jnp.where(at.total > 0, at.total, 1)),
                             -jnp.inf)  # fmt: skip
    mixed = at.mixed / jnp.where(at.total > 0, at.total, 1)[:, None]
    out_ref[...] = mixed.astype(out_ref.dtype)


def _update(
    soft_cap: float | None,
    query: Array,
    keys: Array,
    values: Array,
    seen: Array,
    scales: list[Array] | None,
    at: _Running,
) -> _Running:
    """Takes a tile of keys `[D, keys]` and their values into the running softmax."""
    precision = precision_of(query.dtype)
    scores = plgpu.dot(query, keys, precision=precision)
    if scales is not None:
        scores *= scales[0][None, :]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _LOW)
    top = jnp.maximum(at.top, scores.max(axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0)
    left = jnp.exp(at.top - top)
    total = at.total * left + weights.sum(axis=1)
    if scales is not None:
        weights *= scales[1][None, :]
    mixed = plgpu.dot(weights.astype(values.dtype), values, precision=precision)
    return _Running(top, total, at.mixed * left[:, None] + mixed)
