"""Tree attention for NVIDIA's Hopper GPUs (Mosaic GPU), keys and values of 16 bits.

A block of threads holds 64 or 128 nodes of one key/value head, all its query heads together, and
walks over its share of the keys: one warpgroup copies tiles of the cache's live slots, then of the
block's columns, into a ring of shared memory; the others multiply them with `wgmma`, 64 nodes
each, with a running softmax in float32. Ancestors are 32 to a word. The shares of few rows are
merged by their log-sum-exp. Tiles at or past a row's length are not read; a tile lies in one page.
"""

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.platform import at_hand, platform
from pallas_kernels.tree_attention.merge import merged, partial, splits_of
from pallas_kernels.tree_attention.operands import Operands, folded, seen_values, undivided

_LOW = -1e30
_LOG2E = math.log2(math.e)
_NODES = 64
_KEYS = 64
_FEATURES, _MOST_FEATURES = 64, 256
_BLOCKS = 132  # of threads that run at once: one for each multiprocessor of an H100 or H200
_CAPABILITY = "9.0"
_WORD = 32
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_load: Any = plgpu.load
if "idx" in inspect.signature(_load).parameters:  # of jax 0.10
    _load = functools.partial(_load, idx=())


class _Static(NamedTuple):
    """Sizes that a program is compiled for; `workers` are the warpgroups that multiply.

    `page_tiles` are the tiles of a page where rows have several pages, 0 where they have one. The
    interpreter multiplies nothing that is in registers: `interpreted` programs use another product
    there.
    """

    soft_cap: float | None
    heads: int
    dim: int
    page_tiles: int
    column_tiles: int
    splits: int
    workers: int
    stages: int
    interpreted: bool


def unable(at: Operands) -> str | None:
    """Why this implementation cannot run on such operands, or None."""
    if at.block_keys.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies 16-bit keys, not {at.block_keys.dtype}"
    if at.prefix is not None and at.prefix.keys.dtype != at.block_keys.dtype:
        return f"the cache is {at.prefix.keys.dtype}, the block {at.block_keys.dtype}"
    if at.query.shape[-1] % _FEATURES or at.query.shape[-1] > _MOST_FEATURES:
        return f"a head has {at.query.shape[-1]} features; it takes 64, 128, 192 or 256"
    if at.sinks is not None:
        return "it has no sinks"
    if at.prefix is not None and (at.prefix.scales is not None or not at.slots):
        return "it takes no scales and no cache of 0 slots"
    if platform() == "gpu" and at_hand():
        capability = jax.devices()[0].compute_capability
        if capability != _CAPABILITY:
            return f"it needs compute capability {_CAPABILITY} (Hopper), and this is {capability}"
    if (reason := undivided(at, _KEYS)) is not None:
        return reason
    if at.slots % _KEYS:
        return f"the cache has {at.slots} slots, which {_KEYS} does not divide"
    return None


def tree_attention(at: Operands, *, interpret: Any = None) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`; `interpret` is that of `mosaic_gpu.kernel`."""
    rows, heads, tokens, dim = at.query.shape
    kv_heads, columns = at.block_keys.shape[1], at.tree_mask.shape[-1]
    reach = at.groups * tokens
    workers = 2 if reach > _NODES and dim <= 128 else 1
    tiles = pl.cdiv(reach, workers * _NODES)
    splits = splits_of(rows * kv_heads * tiles, at.slots, _BLOCKS)
    page_tiles = 0
    if at.prefix is not None and at.prefix.pages_a_row > 1:
        page_tiles = at.prefix.page_size // _KEYS
    static = _Static(
        at.soft_cap, kv_heads, dim, page_tiles, pl.cdiv(columns, _KEYS), splits, workers,
        4 if dim <= 128 else 2, interpret is not None,
    )  # fmt: skip
    nodes, spare = tiles * workers * _NODES, static.column_tiles * _KEYS - columns

    def by_head(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])

    query = folded(at).reshape(rows * kv_heads, reach, dim)
    operands = [
        jnp.pad(query, ((0, 0), (0, nodes - reach), (0, 0))),
        jnp.pad(by_head(at.block_keys).swapaxes(1, 2), ((0, 0), (0, 0), (0, spare))),
        jnp.pad(by_head(seen_values(at)), ((0, 0), (0, spare), (0, 0))),
        jnp.pad(_words(at, spare), ((0, 0), (0, 0), (0, nodes - reach))),
    ]
    if at.prefix is not None:
        operands += [_bounds(at), by_head(at.prefix.keys), by_head(at.prefix.values)]
    if at.prefix is not None and at.first is not None:
        first = jnp.tile(at.first.astype(jnp.int32), (1, at.groups))
        operands.append(jnp.pad(first, ((0, 0), (0, nodes - reach))))
    # 16-bit stores from `wgmma`'s layout are no whole sectors, which newer versions of jax refuse.
    made = partial((rows, kv_heads, splits, nodes), dim, jnp.dtype("float32"))
    mixed, lse = plgpu.kernel(
        functools.partial(_entry, static),
        out_type=[jax.ShapeDtypeStruct((rows * kv_heads, *x.shape[2:]), x.dtype) for x in made],
        grid=(rows * kv_heads, splits, tiles),  # those that read the same keys side by side
        grid_names=("head", "share", "tile"),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)
    mixed, lse = (x.reshape(like.shape) for x, like in zip((mixed, lse), made, strict=True))
    out = merged(mixed, lse)[:, :, :reach]
    return out.reshape(rows, heads, tokens, dim).astype(at.query.dtype)


def _words(at: Operands, spare: int) -> Int32[Array, "B W R"]:
    """What every query of every head may see of the block, 32 columns to a word."""
    padded = jnp.pad(at.tree_mask, ((0, 0), (0, 0), (0, spare)))
    bits = padded.reshape(*padded.shape[:2], -1, _WORD).astype(jnp.uint32)
    words = (bits << jnp.arange(_WORD, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)
    return jnp.tile(words.swapaxes(1, 2), (1, 1, at.groups))


def _bounds(at: Operands) -> Int32[Array, "B _"]:
    """The first slot that some node of a row sees, one past the last, and its pages."""
    assert at.prefix is not None
    length = at.prefix.length.astype(jnp.int32)
    first = jnp.zeros_like(length) if at.first is None else at.first.min(axis=1).astype(jnp.int32)
    bounds = jnp.stack([jnp.clip(first, 0, length), length], axis=1)
    return jnp.concatenate([bounds, at.prefix.page_indices], axis=1)


def _entry(static: _Static, *refs: Any) -> None:
    """Gives every program its shared memory."""
    query_ref, *_ = refs
    dim, stages, workers = static.dim, static.stages, static.workers
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    buffer = functools.partial(plgpu.SMEM, dtype=query_ref.dtype, transforms=swizzled)
    scratch = (
        buffer((workers, _NODES, dim)),
        buffer((stages, dim, _KEYS)),
        buffer((stages, _KEYS, dim)),
        plgpu.Barrier(num_barriers=workers),
        *(plgpu.Barrier(num_barriers=stages) for _ in range(2)),
        *(plgpu.Barrier(num_arrivals=workers, num_barriers=stages) for _ in range(2)),
    )
    pl.run_scoped(
        lambda *shared: _program(static, refs, _Shared(*shared)),
        *scratch,
        collective_axes="warpgroup",
    )


class _Shared(NamedTuple):
    """Queries, a ring of keys and one of values; what tells that they came, and are done with."""

    query: Any
    keys: Any
    values: Any
    query_in: Any
    keys_in: Any
    values_in: Any
    keys_done: Any
    values_done: Any


class _Walk(NamedTuple):
    """A program's share: its first tile of the cache and how many, and how many of the block."""

    row: Any
    start: Any
    stop: Any
    low: Any
    slot_steps: Any
    column_steps: Any


def _walk(static: _Static, bounds_ref: Any) -> _Walk:
    head, share = lax.axis_index("head"), lax.axis_index("share")
    row = head // static.heads
    columns = (static.column_tiles - share + static.splits - 1) // static.splits
    if bounds_ref is None:
        none = jnp.int32(0)
        return _Walk(row, none, none, none, none, columns)
    start, stop = bounds_ref[row, 0], bounds_ref[row, 1]
    begin, end = start // _KEYS, (stop + _KEYS - 1) // _KEYS
    own = (end - begin + static.splits - 1) // static.splits
    low = begin + share * own
    return _Walk(row, start, stop, low, jnp.clip(end - low, 0, own), columns)


def _program(static: _Static, refs: tuple[Any, ...], shared: _Shared) -> None:
    inputs, (out_ref, lse_ref) = refs[:-2], refs[-2:]
    query_ref, block_keys_ref, block_values_ref, words_ref, *past = inputs
    held: Any = past or (None, None, None)
    bounds_ref, keys_ref, values_ref, *first = held
    query, keys, values, query_in, keys_in, values_in, keys_done, values_done = shared
    me, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    walk = _walk(static, bounds_ref)
    share, base = lax.axis_index("share"), lax.axis_index("tile") * static.workers * _NODES

    @pl.when(me == static.workers)
    def _copy_tiles():
        if static.workers > 1:
            plgpu.set_max_registers(40, action="decrease")
        cache, block = (keys_ref, values_ref), (block_keys_ref, block_values_ref)
        _copy(static, walk, shared, bounds_ref, cache, block)

    @pl.when(me < static.workers)
    def _multiply():
        if static.workers > 1:  # two warpgroups have as many from the start
            plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(base + me * _NODES, _NODES)
        plgpu.copy_gmem_to_smem(query_ref.at[head, rows], query.at[me], query_in.at[me])
        plgpu.barrier_wait(query_in.at[me])
        column = plgpu.broadcasted_iota(jnp.int32, (_NODES, _KEYS), 1, layout=plgpu.Layout.WGMMA)

        def by_row(x: Any) -> Any:
            return lax.broadcast_in_dim(x, (_NODES, _KEYS), (0,))

        def of_nodes(ref: Any) -> Any:
            return _load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def update(step: Any, seen: Any, live: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            mixed, top, total = carry
            slot = _slot(static, step)
            plgpu.barrier_wait(keys_in.at[slot])

            def product(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, query.at[me], keys.at[slot])
                return acc_ref[...]

            scores = pl.run_scoped(product, _ACC((_NODES, _KEYS), jnp.float32))
            plgpu.barrier_arrive(keys_done.at[slot])
            if static.soft_cap is not None:
                # PTX bounds the relative error of its approximate tangent by 2^-11 only.
                twice = jnp.exp2(scores * (2 * _LOG2E / static.soft_cap))
                scores = static.soft_cap - 2 * static.soft_cap / (twice + 1.0)
            scores = jnp.where(seen, scores * _LOG2E, _LOW)
            higher = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.where(seen, jnp.exp2(scores - by_row(higher)), 0.0)
            left = jnp.exp2(top - higher)
            total = total * left + weights.sum(axis=1)
            mixed = mixed * lax.broadcast_in_dim(left, mixed.shape, (0,))
            plgpu.barrier_wait(values_in.at[slot])
            if live is not None:
                _clean(values.at[slot], live)

            rounded = weights.astype(query.dtype)
            if static.interpreted:
                mixed += jnp.dot(rounded, values[slot], preferred_element_type=jnp.float32)
            else:

                def add(acc_ref: Any) -> None:
                    plgpu.wgmma(acc_ref, rounded, values.at[slot])

                mixed = pl.run_state(add)(_ACC.init(mixed))
            plgpu.barrier_arrive(values_done.at[slot])
            return mixed, higher, total

        first_slot = by_row(of_nodes(first[0].at[walk.row, rows])) if first else None

        def of_cache(step: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            at = (walk.low + step) * _KEYS
            seen = column < walk.stop - at
            if first_slot is not None:
                seen = seen & (column + at >= first_slot)
            return update(step, seen, walk.stop - at, carry)

        def of_block(step: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            word = (share + step * static.splits) * (_KEYS // _WORD)
            low, high = (by_row(of_nodes(words_ref.at[walk.row, word + n, rows])) for n in (0, 1))
            bits = jnp.where(column < _WORD, low, high)
            seen = (lax.shift_right_logical(bits, column & (_WORD - 1)) & 1) == 1
            return update(walk.slot_steps + step, seen, None, carry)

        def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        one = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            filled((_NODES, static.dim), 0.0, plgpu.Layout.WGMMA),
            filled((_NODES,), _LOW, one),
            filled((_NODES,), 0.0, one),
        )
        if keys_ref is not None:
            carry = lax.fori_loop(0, walk.slot_steps, of_cache, carry)
        mixed, top, total = lax.fori_loop(0, walk.column_steps, of_block, carry)
        some = jnp.where(total > 0, total, 1.0)
        out_ref[head, share, rows] = mixed / lax.broadcast_in_dim(some, mixed.shape, (0,))
        lse_ref[head, share, rows] = jnp.where(
            total > 0, top * (1 / _LOG2E) + jnp.log(some), -jnp.inf
        )


def _slot(static: _Static, step: Any) -> Any:
    """The place of a step's tile in the ring."""
    return lax.rem(step, jnp.int32(static.stages))


def _copy(
    static: _Static,
    walk: _Walk,
    shared: _Shared,
    bounds_ref: Any,
    cache: Sequence[Any],
    block: Sequence[Any],
) -> None:
    """Brings keys and values of every step into the ring, as soon as its place is free."""
    head, share = lax.axis_index("head"), lax.axis_index("share")

    def fetch(step: Any, tile: Any, ring: Any, came: Any, done: Any) -> None:
        slot = _slot(static, step)

        @pl.when(step >= static.stages)
        def _():
            plgpu.barrier_wait(done.at[slot])

        plgpu.copy_gmem_to_smem(tile, ring.at[slot], came.at[slot])

    def fetch_both(step: Any, of: Sequence[Any], head: Any, window: Any) -> None:
        keys, values = of[0].at[head, :, window], of[1].at[head, window]
        fetch(step, keys, shared.keys, shared.keys_in, shared.keys_done)
        fetch(step, values, shared.values, shared.values_in, shared.values_done)

    if bounds_ref is not None:
        only = bounds_ref[walk.row, 2]

        @pl.loop(0, walk.slot_steps)
        def _(step):
            page, tile = only, walk.low + step
            if static.page_tiles:
                number, tile = (of(tile, jnp.int32(static.page_tiles)) for of in (lax.div, lax.rem))
                page = bounds_ref[walk.row, 2 + number]
            held = page * static.heads + head % static.heads
            fetch_both(step, cache, held, pl.ds(tile * _KEYS, _KEYS))

    @pl.loop(0, walk.column_steps)
    def _(step):
        window = pl.ds((share + step * static.splits) * _KEYS, _KEYS)
        fetch_both(walk.slot_steps + step, block, head, window)


def _clean(values_ref: Any, live: Any) -> None:
    """Zeroes the values past a row's length in its last tile, whatever they hold.

    Both warpgroups may do so: they write the same.
    """

    @pl.when(live < _KEYS)
    def _():
        held = _load(values_ref, layout=plgpu.Layout.WGMMA)
        slot = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        values_ref[...] = jnp.where(slot < live, held, jnp.zeros_like(held))
        plgpu.commit_smem()


def interpreted(at: Operands) -> Float[Array, "B H T D"]:
    """The same in the interpreter of jax 0.11 or newer."""
    params: Any = getattr(plgpu, "InterpretGPUParams", None)
    if params is not None:
        return tree_attention(at, interpret=params())
    raise ImplementationError("hopper's loads are not interpreted by jax before 0.11")
