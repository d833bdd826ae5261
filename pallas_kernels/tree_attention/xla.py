"""Tree attention as XLA runs it well: prefix and block apart, grouped heads folded into rows."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import precision_of
from pallas_kernels.platform import platform
from pallas_kernels.tree_attention.operands import Operands, Prefix, sinks_by_query

_Row = tuple[Array, Array, Array, Array | None]
"""Queries, keys, values and sinks of a plain sequence."""

_CHUNK = 128
"""Queries of a causal chunk: its scores stay in cache (2026-11-20, 16 rows of 512 tokens, 10 heads
of 64, 2 cores: 0.07 s forward and 0.26 s with gradients, against 0.30 and 0.60 s in one piece)."""

_LARGE = 128
_QUERIES = 64
"""Nodes of a tree past which its queries are run in chunks, and those of a chunk: on a CPU 256,
512, 1,024 and 2,048 nodes take 38, 117, 306 and 1,142 ms a layer, and 55, 174, 502 and 2,654 at
once (40 heads of 64, 8 of keys, 512 slots, 2 cores of a Zen 3, 2026-11-25)."""

SLOTS_AT_ONCE = 128
"""Slots of a page that a row's queries see at a time where pages are read in place."""

_UNROLLED = 6
"""Chunks of a sequence that are written out; more of them are a loop."""

_SPANS = 8
"""Numbers of keys that chunks of a loop have."""


def tree_attention(at: Operands) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`; without a prefix only the block is attended to.

    Each visible set must be non-empty (a node always sees itself). Scores, softmax and sums are
    float32 whatever the dtype of the keys; the block is taken to be free of NaN in columns that
    somebody sees. Of large trees the scores that live at once are those of a chunk of queries.
    """
    if at.prefix is None or at.prefix.pages is not None:
        return _at_once(at)
    tokens = at.query.shape[2]
    size = queries_at_once(tokens)
    return _at_once(at) if size == tokens else _by_chunks(at, size)


def queries_at_once(nodes: int) -> int:
    """Of how many nodes of a tree the scores live at once."""
    return _QUERIES if nodes > _LARGE and platform() == "cpu" else nodes


def _by_chunks(at: Operands, size: int) -> Float[Array, "B H T D"]:
    """The queries of a tree in chunks of so many, one after the other."""
    tokens = at.query.shape[2]
    count = -(-tokens // size)

    def chunks(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * size - tokens)
        filled = jnp.pad(x, widths, mode="edge")  # with queries whose visible sets are not empty
        return jnp.stack(jnp.split(filled, count, axis=axis))

    def one(own: tuple[Array, Array, Array | None]) -> Array:
        query, tree_mask, first = own
        return _at_once(at._replace(query=query, tree_mask=tree_mask, first=first))

    first = None if at.first is None else chunks(at.first, 1)
    made = lax.map(one, (chunks(at.query, 2), chunks(at.tree_mask, 1), first))
    return jnp.concatenate(list(made), axis=2)[:, :, :tokens]


def _at_once(at: Operands) -> Float[Array, "B H T D"]:
    rows, heads, tokens, dim = at.query.shape
    query = (at.query * dim**-0.5).reshape(rows, heads // at.groups, at.groups * tokens, dim)
    scores = _capped(_dot(query, at.block_keys, "bkqd,bkmd->bkqm"), at.soft_cap)
    scores = _by_node(scores, tokens)
    bias = jnp.where(at.tree_mask, 0.0, -jnp.inf)[:, None, None]
    scores = jnp.where(at.tree_mask[:, None, None], scores, bias).reshape(*query.shape[:3], -1)
    top = scores.max(axis=-1, keepdims=True)
    sinks = None
    if at.sinks is not None:
        sinks = sinks_by_query(at, tokens)
        top = jnp.maximum(top, sinks)
    if at.prefix is None:
        top = lax.stop_gradient(top)
        weights = jnp.exp(scores - top)
        total = _with_sinks(weights.sum(axis=-1, keepdims=True), sinks, top)
        mixed = _dot(weights, at.block_values, "bkqm,bkmd->bkqd")
    elif at.prefix.pages is not None:
        weights = jnp.exp(scores - top)
        own = _with_sinks(weights.sum(axis=-1, keepdims=True), sinks, top)
        mixed = _dot(weights, at.block_values, "bkqm,bkmd->bkqd")
        total, mixed = _past_in_place(at, query, top, own, mixed)
    else:
        past, live = _past(at, query)
        top = jnp.maximum(top, past.max(axis=-1, keepdims=True))
        weights, past = jnp.exp(scores - top), jnp.exp(past - top)
        total = weights.sum(axis=-1, keepdims=True) + past.sum(axis=-1, keepdims=True)
        total = _with_sinks(total, sinks, top)
        mixed = _dot(weights, at.block_values, "bkqm,bkmd->bkqd")
        mixed = mixed + _past_values(at, past, live)
    return (mixed / total).reshape(rows, heads, tokens, dim).astype(at.query.dtype)


def _with_sinks(total: Array, sinks: Array | None, top: Array) -> Array:
    """The sums of weights with those of sinks."""
    return total if sinks is None else total + jnp.exp(sinks - top)


def _capped(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _by_node(scores: Float[Array, "B K Q M"], tokens: int) -> Float[Array, "B K G T M"]:
    return scores.reshape(*scores.shape[:2], -1, tokens, scores.shape[3])


def _past(
    at: Operands, query: Float[Array, "B K Q D"]
) -> tuple[Float[Array, "B K Q S"], Bool[Array, "B 1 S"]]:
    """Scores of the prefix, -inf where they are not seen, and which slots are live."""
    assert at.prefix is not None
    slots = jnp.arange(at.slots)
    live = (slots < at.prefix.length[:, None])[:, None]
    past = _dot(query, _of_query(at.prefix.keys, at), "bkqd,bkds->bkqs")
    if at.prefix.scales is not None:
        past = past * at.prefix.scales[0][:, :, None]
    past = _capped(past, at.soft_cap)
    if at.first is None:
        return jnp.where(live[:, :, None], past, -jnp.inf), live
    seen = live & (slots >= at.first[..., None])
    by_node = jnp.where(seen[:, None, None], _by_node(past, at.first.shape[1]), -jnp.inf)
    return by_node.reshape(past.shape), live


def _past_values(
    at: Operands, weights: Float[Array, "B K Q S"], live: Bool[Array, "B 1 S"]
) -> Float[Array, "B K Q D"]:
    """The prefix's values by weight."""
    assert at.prefix is not None
    if at.prefix.scales is not None:
        weights = weights * jnp.where(live, at.prefix.scales[1], 0)[:, :, None]
    # Which says nothing of live slots, but ties the copy to this layer's weights: XLA:CPU would
    # make those of all layers first, and hold half of the caches twice.
    live = live[..., None] & (weights[:, :, :1, :1] >= 0)
    values = jnp.where(live, _of_query(at.prefix.values, at), 0)
    return _dot(weights, values, "bkqs,bksd->bkqd")


def reads_rows_in_place() -> bool:
    """Whether a row's pages of a larger cache are read where they lie: one after the other, as far
    as they are filled.

    On a CPU that costs what the rows hold. 8 nodes of a row of 300 tokens in a cache of 2,112 slots
    (10 heads of 64, 2 of keys) took 0.20 ms a layer, and 0.68 by dots over all slots; 8 such rows
    1.4 and 4.7, and 5.8 and 5.9 with 1,500 tokens each (two cores of an AMD EPYC, jax 0.10.2,
    2026-11-23; `python -m benchmarks.kernels.rows_in_place`).
    """
    return platform() == "cpu"


class _Mix(NamedTuple):
    """A softmax on its way: the largest score, the sum of weights and the values by weight."""

    top: Array
    total: Array
    mixed: Array


def _past_in_place(
    at: Operands, query: Float[Array, "B K Q D"], top: Array, total: Array, mixed: Array
) -> tuple[Array, Array]:
    """Sums of weights, and values by weight, of block and prefix; those of the block are given."""
    assert at.prefix is not None
    assert at.prefix.pages is not None
    prefix, slots = at.prefix, at.prefix.page_size
    pages, size = at.prefix.pages, min(SLOTS_AT_ONCE, slots)
    of_page = -(-slots // size)

    def row_of(index: Array, mix: _Mix) -> _Mix:
        length, first = prefix.length[index], None if at.first is None else at.first[index]
        own = query[index]

        def chunk_of(number: Array, mix: _Mix) -> _Mix:
            page, since = number // of_page, number % of_page * size
            start = jnp.minimum(since, slots - size)
            slot = page * slots + start + jnp.arange(size)
            live = (slot < length) & (slot >= page * slots + since)
            seen = live if first is None else live & (slot >= first[:, None])
            keys, values, scales = _chunk_of_page(prefix, pages[index, page], start, size)
            past = _dot(own, keys, "kqd,kds->kqs")
            past = past if scales is None else past * scales[0][:, None]
            past = _capped(past, at.soft_cap)
            by_node = past.reshape(past.shape[0], -1, at.query.shape[2], size)
            past = jnp.where(seen, by_node, -jnp.inf).reshape(past.shape)
            top = jnp.maximum(mix.top, past.max(axis=-1, keepdims=True))
            weights, kept = jnp.exp(past - top), jnp.exp(mix.top - top)
            total = mix.total * kept + weights.sum(axis=-1, keepdims=True)
            if scales is not None:
                weights = weights * jnp.where(live, scales[1], 0)[:, None]
            values = jnp.where(live[:, None], values, 0)
            return _Mix(top, total, mix.mixed * kept + _dot(weights, values, "kqs,ksd->kqd"))

        def chunk_with(slot: Array) -> Array:
            return slot // slots * of_page + slot % slots // size

        begin = jnp.int32(0) if first is None else chunk_with(jnp.maximum(first.min(), 0))
        own_mix = jax.tree.map(lambda x: x[index], mix)
        done = lax.fori_loop(begin, chunk_with(length - 1) + 1, chunk_of, own_mix)
        return jax.tree.map(lambda all_rows, one: all_rows.at[index].set(one), mix, done)

    mix = lax.fori_loop(0, pages.shape[0], row_of, _Mix(top, total, mixed))
    return mix.total, mix.mixed


def _chunk_of_page(
    prefix: Prefix, page: Array, start: Array, size: int
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Keys `[K, D, size]`, values and scales of the slots of a page from `start` on."""

    def part(x: Array, axis: int) -> Array:
        one = lax.dynamic_index_in_dim(x, page, keepdims=False)
        return lax.dynamic_slice_in_dim(one, start, size, axis=axis)

    keys, values = part(prefix.keys, 2), part(prefix.values, 1)
    if prefix.scales is None:
        return keys, values, None
    scales = part(prefix.scales[0], 1), part(prefix.scales[1], 1)
    return keys.astype(jnp.float32), values.astype(jnp.float32), scales


def _of_query(cached: Array, at: Operands) -> Array:
    """The cache in the dtype that is multiplied: its own, or the block's if it holds 8 bits."""
    return cached.astype(at.block_keys.dtype) if cached.dtype == jnp.int8 else cached


def causal(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    soft_cap: float | None,
    window: int | None = None,
    sinks: Float[Array, "B H"] | None = None,
) -> Float[Array, "B H T D"]:
    """Attention of plain sequences: each token sees itself and those before it.

    With a `window`, the last `window` of these. Rows, and chunks of their queries, are run one
    after the other: the scores that live at once are those of a chunk (of a few in short
    sequences), and the program is as long for any number of tokens.
    """
    if query.shape[2] <= _UNROLLED * _CHUNK:
        one = jax.checkpoint(partial(_written_out, soft_cap, window))
    else:
        one = partial(_looped, soft_cap, window)
    return lax.map(one, (query, keys, values, sinks))


def within(query: Array, key: Array, window: int | None) -> Bool[Array, "T M"]:
    """Which keys of a plain sequence a query sees, by their positions."""
    before = query[:, None] - key
    return before >= 0 if window is None else (before >= 0) & (before < window)


def _written_out(soft_cap: float | None, window: int | None, row: _Row) -> Array:
    """One row of causal attention `[H, T, D]`, in chunks of queries that skip unseen keys."""
    query, keys, values, sinks = row
    tokens = query.shape[1]
    starts = range(0, tokens, _CHUNK)
    chunks = [
        _chunk(soft_cap, window, query[:, start : start + _CHUNK], keys, values, sinks, start,
               0 if window is None else max(0, start - window + 1), min(start + _CHUNK, tokens))
        for start in starts
    ]  # fmt: skip
    return jnp.concatenate(chunks, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _looped(soft_cap: float | None, window: int | None, row: _Row) -> Array:
    """The same by a loop over chunks.

    A chunk takes the keys from the first on up to one of `_SPANS` ends, the first that holds all
    that it sees (9/8 of the products that are needed where it could be any); with a window those
    that it sees.
    """
    query, keys, values, sinks = row
    heads, tokens, dim = query.shape
    count = -(-tokens // _CHUNK)
    spare = count * _CHUNK - tokens  # queries that only fill up; what they give is cut off
    chunks = jnp.pad(query, ((0, 0), (0, spare), (0, 0))).reshape(heads, count, _CHUNK, dim)

    def from_first(span: int) -> Callable[..., Array]:
        def run(query: Array, keys: Array, values: Array, start: Array) -> Array:
            return _chunk(soft_cap, window, query, keys, values, sinks, start, 0, span)

        return run

    ends = sorted({min(-(-count * n // _SPANS) * _CHUNK, tokens) for n in range(1, _SPANS + 1)})
    runs = [from_first(end) for end in ends]

    def near(start: Array, query: Array) -> Array:
        assert window is not None
        span = window + _CHUNK - 1
        since = jnp.clip(start - window + 1, 0, tokens - span)
        own_keys = lax.dynamic_slice_in_dim(keys, since, span, axis=1)
        own_values = lax.dynamic_slice_in_dim(values, since, span, axis=1)
        return _chunk(soft_cap, window, query, own_keys, own_values, sinks, start - since, 0, span)

    def one(start: Array, query: Array) -> Array:
        if window is not None and window + _CHUNK <= tokens:
            return near(start, query)
        which = jnp.searchsorted(jnp.asarray(ends), start + 1)
        return lax.switch(which, runs, query, keys, values, start)

    def in_place(number: Array, chunks: Array) -> Array:
        made = one(number * _CHUNK, chunks[number])
        return chunks.at[number].set(made, mode="promise_in_bounds")

    # Zeros to write to would be made for all layers of a pass at once, by XLA for GPUs.
    made = lax.fori_loop(0, count, in_place, chunks.swapaxes(0, 1))
    return made.swapaxes(0, 1).reshape(heads, -1, dim)[:, :tokens]


def _looped_forward(soft_cap: float | None, window: int | None, row: _Row) -> tuple[Array, _Row]:
    return _looped(soft_cap, window, row), row


def _looped_backward(
    soft_cap: float | None, window: int | None, row: _Row, grad: Array
) -> tuple[_Row]:
    """Gradients by the chunks written out: those of the loop take three times as long."""
    return jax.vjp(partial(_written_out, soft_cap, window), row)[1](grad)


_looped.defvjp(_looped_forward, _looped_backward)


def _chunk(
    soft_cap: float | None,
    window: int | None,
    query: Float[Array, "H Q D"],
    keys: Float[Array, "K T D"],
    values: Float[Array, "K T D"],
    sinks: Float[Array, " H"] | None,
    start: int | Int[Array, ""],
    since: int,
    stop: int,
) -> Float[Array, "H Q D"]:
    """Attention of the queries from number `start` on to the keys from `since` to `stop`.

    Queries past the last key, which only fill up, see what the last one sees.
    """
    number = jnp.minimum(start + jnp.arange(query.shape[1]), keys.shape[1] - 1)
    tree_mask = within(number, jnp.arange(since, stop), window)
    seen = keys[None, :, since:stop], values[None, :, since:stop]
    sinks = None if sinks is None else sinks[None]
    at = Operands(query[None], *seen, tree_mask[None], soft_cap=soft_cap, sinks=sinks)
    return tree_attention(at)[0]


def _dot(x: Array, y: Array, axes: str) -> Array:
    return jnp.einsum(
        axes,
        x.astype(y.dtype),
        y,
        precision=precision_of(y.dtype),
        preferred_element_type=jnp.float32,
    )
