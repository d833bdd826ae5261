"""Layers over feature-major activations `[features, columns]`, and every platform-specific form.

Columns are rows × tokens: only attention knows rows. Weights are `[out, in]` as in Hugging Face
files, activations `[in, C]`. Measured reasons for the forms, 2 cores of a Zen 5 CPU with AVX-512,
jax 0.10.2, 2026-11-20, matrices of 1792 × 640:

* weights [out, in] times activations [in, C] is the only orientation that stays fast from 1 to 32
  columns (f32 at 16 columns: 6.7 ms against 21.2 ms for 24 matrices);
* a bfloat16 dot must return float32: 5.1 against 50.8 ms at 16 columns, and 0.65 against 0.17
  TFLOP/s at 4096;
* a bfloat16 dot of fewer than 8 columns is ten times slower than a padded one;
* contracting dimension 0 of a weight (the gradient of the input) runs at 0.18 to 0.24 TFLOP/s,
  a transposed copy of the weight at 0.3 to 0.5.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int32

from pallas_kernels.cpu import (
    MOST_COLUMNS,
    cpu_matmul,
    cpu_matmuls,
    reference,
    share_a_call,
    unable,
    unable_here,
)
from pallas_kernels.dispatch import precision_of
from pallas_kernels.platform import platform
from specjax.models.quantized import BFLOAT16, INT8, PackedWeight
from specjax.models.rope import Stretch, frequencies

_MIN_BF16_COLUMNS = 8
_MOST_OF_BFLOAT16 = 2 * MOST_COLUMNS
"""Columns up to which `cpu_matmul` multiplies a matrix that is kept in bfloat16 (`_packed_linear`
says how long either way takes)."""
_UNROLLED_ROWS = 16
_FEW_TO_WRITE = 8
"""Tokens of a row that a CPU writes to pages one by one, rather than to write pages anew."""
_FEW_TOKENS = 64
_UNPACKED_BYTES = 8 * 2**20


def _dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        x, y, dims, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linears(weights: tuple[Array, ...], x: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Some matrices times the same columns."""
    able = weights[0].dtype == dtype and unable(weights[0], x.shape[0], x.shape[1]) is None
    if able and share_a_call(weights):
        return cpu_matmuls(weights, x, rounded=dtype == jnp.bfloat16)
    return tuple(_xla_linear(weight, x, dtype) for weight in weights)


def _xla_linear(weight: Array, x: Array, dtype: jnp.dtype) -> Array:
    columns = x.shape[1]
    short = dtype == jnp.bfloat16 and columns < _MIN_BF16_COLUMNS and _on_cpu()
    if short:
        x = jnp.pad(x, ((0, 0), (0, _MIN_BF16_COLUMNS - columns)))
    x = row_major(rounded_to(x, dtype))
    return row_major(_dot(rounded_to(weight, dtype), x, (1, 0)))[:, :columns]


def _linears_forward(
    weights: tuple[Array, ...], x: Array, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], Array]]:
    x = rounded_to(x, dtype)
    return _linears(weights, x, dtype), (weights, x)


def _linears_backward(
    dtype: jnp.dtype, saved: tuple[tuple[Array, ...], Array], grads: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    weights, x = saved

    def of_one(weight: Array, grad: Array) -> tuple[Array, Array]:
        grad = rounded_to(grad, dtype)
        turned = row_major(lax.optimization_barrier(rounded_to(weight, dtype).T))
        return _dot(grad, x, (1, 1)).astype(weight.dtype), _dot(turned, grad, (1, 0))

    of_weights, of_x = zip(*map(of_one, weights, grads), strict=True)
    return of_weights, reduce(jnp.add, of_x)


_linears.defvjp(_linears_forward, _linears_backward)


def _linear(weight: Array, x: Array, dtype: jnp.dtype) -> Array:
    made: Sequence[Array] = _linears((weight,), x, dtype)
    return made[0]


def rounded_to(x: Array, dtype: jnp.dtype) -> Array:
    """`x` in `dtype`, on a CPU really stored so: XLA would fold the cast into a float32 dot."""
    if x.dtype == dtype:
        return x
    return lax.optimization_barrier(x.astype(dtype)) if _on_cpu() else x.astype(dtype)


@jax.custom_jvp
def row_major(x: Array) -> Array:
    """`x`, stored with its last axis contiguous.

    A transpose beside a dot otherwise passes its layout on to the residual stream and from there
    to every dot, which takes them off XLA:CPU's fast path and off bfloat16 altogether. Elsewhere
    layouts are the compiler's: a TPU would fill a row of one column up to 128, 65 MB of logits.
    """
    return x if not _on_cpu() else with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@row_major.defjvp
def _row_major_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return row_major(primals[0]), tangents[0]


def _on_cpu() -> bool:
    return platform() == "cpu"


def linear(
    weight: Float[Array, "O I"] | PackedWeight,
    x: Float[Array, "I C"],
    dtype: jnp.dtype | None = None,
) -> Float[Array, "O C"]:
    """`weight @ x` with float32 accumulation and a float32 result.

    Operands are rounded to `dtype`, by default the weight's own; a packed weight is unpacked to
    float32 first, and of 8 bits with a scale a row it is the product that is scaled. One that
    multiplies rounded activations rounds nothing else.
    Differentiable in reverse mode, of a packed weight in `x` alone.
    """
    kind = computed_in(weight, dtype)
    if not isinstance(weight, PackedWeight):
        return _linear(weight, x, kind)
    x = x if weight.order is None else x[weight.order]
    if weight.activations != INT8 and not takes_codes(weight, x):
        return _packed_linear(weight, x, kind)
    made: Sequence[Array] = _coded_linears((weight,), x, kind)
    return made[0]


def computed_in(weight: Any, dtype: jnp.dtype | None) -> jnp.dtype:
    """What the operands of a product with a matrix, packed or not, are rounded to."""
    is_told = isinstance(weight, PackedWeight) and weight.activations == BFLOAT16
    return jnp.dtype(jnp.bfloat16 if is_told else dtype or weight.dtype)


def linears(
    weights: Sequence[Float[Array, "_ I"] | PackedWeight],
    x: Float[Array, "I C"],
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "_ C"], ...]:
    """`linear` of each of some matrices, which on a CPU is one call where they are alike."""
    kinds = {computed_in(weight, dtype) for weight in weights}
    codes = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(kinds) > 1 or (codes and not _taken_together(codes, len(weights), x)):
        return tuple(linear(weight, x, dtype) for weight in weights)
    (kind,) = kinds
    return (_coded_linears if codes else _linears)(tuple(weights), x, kind)


def fused_linear(
    weight: Float[Array, "O I"],
    x: Float[Array, "I C"],
    bounds: Sequence[int],
    dtype: jnp.dtype | None = None,
) -> list[Float[Array, "_ C"]]:
    """`linear` of matrices that are one, split before rows `bounds`.

    On a GPU it is split where features are side by side: XLA leaves them so in what follows, and
    else transposes queries, keys and values in six kernels (64 columns of Llama-3.1-8B's layer).
    """
    if platform() != "gpu":
        return jnp.split(linear(weight, x, dtype), bounds)
    kind = computed_in(weight, dtype)
    made = _dot(x.astype(kind), weight.astype(kind), (0, 1))
    return [part.T for part in jnp.split(made, bounds, axis=1)]


def _taken_together(codes: Sequence[PackedWeight], count: int, x: Array) -> bool:
    """Whether `cpu_matmul` multiplies all of `count` matrices in one call, as codes."""
    if len(codes) < count or any(weight.order is not None for weight in codes):
        return False
    kinds = {(weight.activations, weight.form) for weight in codes}
    alike = len(kinds) == 1 and share_a_call(*parts_of(codes))
    return alike and all(takes_codes(weight, x) for weight in codes)


def takes_codes(weight: PackedWeight, x: Array) -> bool:
    """Whether `cpu_matmul` multiplies the codes as they are."""
    inputs, columns = x.shape
    block = min(columns, MOST_COLUMNS)
    if weight.form == BFLOAT16:
        return columns <= _MOST_OF_BFLOAT16 and unable(weight.values, inputs, block) is None
    quantized = weight.activations == INT8
    columns = block if quantized else columns
    parts = weight.scale, weight.offset, quantized
    is_known = weight.is_integer or weight.is_looked_up
    return is_known and unable(weight.values, inputs, columns, *parts) is None


def parts_of(
    weights: Sequence[PackedWeight],
) -> tuple[list[Array], list[Array] | None, list[Array] | None]:
    """The codes, scales and offsets of matrices; None where none has some, or needs them."""
    offsets = [weight.offset for weight in weights if weight.offset is not None]
    scales = [weight.scale for weight in weights if weight.form != BFLOAT16]
    return [weight.values for weight in weights], scales or None, offsets or None


def table_of(weight: PackedWeight) -> Float[Array, " 16"] | None:
    """The table of a matrix that is looked up, float32; matrices of a form have the same."""
    return None if weight.table is None else weight.table.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _coded_linears(
    weights: tuple[PackedWeight, ...], x: Array, dtype: jnp.dtype
) -> tuple[Array, ...]:
    """The products, of as many columns at a time as `cpu_matmul` takes."""
    is_quantized = weights[0].activations == INT8
    if is_quantized and not all(takes_codes(weight, x) for weight in weights):
        x = reference.quantized(x)
        return tuple(_packed_linear(weight, x, jnp.dtype(jnp.float32)) for weight in weights)
    values, scales, offsets = parts_of(weights)
    rounded = dtype == jnp.bfloat16 and not is_quantized

    def of_block(x: Array) -> tuple[Array, ...]:
        return cpu_matmuls(
            values, x, scales, offsets, rounded=rounded, quantized=is_quantized,
            table=table_of(weights[0]),
        )  # fmt: skip

    inputs, columns = x.shape
    if columns <= MOST_COLUMNS:
        return of_block(x)
    blocks = -(-columns // MOST_COLUMNS)
    whole = jnp.pad(x, ((0, 0), (0, -columns % blocks)))
    made = lax.map(of_block, jnp.moveaxis(whole.reshape(inputs, blocks, -1), 1, 0))
    return tuple(jnp.moveaxis(each, 0, 1).reshape(each.shape[1], -1)[:, :columns] for each in made)


def _coded_linears_forward(
    weights: tuple[PackedWeight, ...], x: Array, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[tuple[PackedWeight, ...], Array]]:
    return _coded_linears(weights, x, dtype), (weights, x)


def _coded_linears_backward(
    dtype: jnp.dtype, saved: tuple[tuple[PackedWeight, ...], Array], grads: tuple[Array, ...]
) -> tuple[None, Array]:
    weights, x = saved

    def each(x: Array) -> tuple[Array, ...]:
        return tuple(_packed_linear(weight, x, dtype) for weight in weights)

    _, back = jax.vjp(each, x)
    return None, *back(grads)


_coded_linears.defvjp(_coded_linears_forward, _coded_linears_backward)


def _packed_linear(weight: PackedWeight, x: Array, dtype: jnp.dtype) -> Array:
    """The product with a packed weight: on a CPU some rows after the others, but for bfloat16.

    XLA:CPU unpacks into memory, which it gets anew for each program: touching 33 MB for the first
    time takes 6 ms, where unpacking takes 0.8 and the product 1.3 (8,192 x 2,048, 16 columns, 2
    cores, 2026-11-25). Two codes of a byte are never brought beside each other, which takes as
    long again. A matrix in bfloat16 is widened when its columns are there, so that all matrices are
    in one place: of 512 columns 30 layers of 576 features take 734 ms then, 796 without, 936 by
    `cpu_matmul` in blocks of 64, and 654 where they are float32; of 128 columns 279 ms, 250 by
    `cpu_matmul` and 174 where they are float32 (2 cores, 2026-11-27).
    """
    if weight.form == BFLOAT16:
        values, x = lax.optimization_barrier((weight.values, x))
        return _linear(values.astype(dtype), x, dtype)
    strides = weight.strides

    def product(own: PackedWeight) -> Array:
        cast = jnp.dtype(jnp.float32) if _on_cpu() else dtype
        parts: list[Array] = [
            _linear(own.columns_from(n, cast), x[n::strides], dtype) for n in range(strides)
        ]
        made = reduce(jnp.add, parts)
        return made * own.scale.astype(jnp.float32) if own.is_scaled_after else made

    blocks = _blocks_of(weight, dtype) if _on_cpu() else 1
    if blocks == 1:
        return product(weight)
    kinds = {name: part.dtype for name, part in weight.rows.items()}
    rows = {
        name: bits_of(part).reshape(blocks, -1, part.shape[1]) for name, part in weight.rows.items()
    }

    def of_block(own: dict[str, Array]) -> Array:
        return product(
            weight.changed(**{name: of_bits(part, kinds[name]) for name, part in own.items()})
        )

    return lax.map(of_block, rows).reshape(-1, x.shape[1])


def _blocks_of(weight: PackedWeight, dtype: jnp.dtype) -> int:
    """In how many blocks of rows a matrix is unpacked: as few as are small, if they are equal.

    At least two: what one block unpacks XLA would do ahead of the loop in which a tree grows, for
    all layers, and hold (0.3 GiB of the keys' and values' matrices of 2B parameters).
    """
    outputs, inputs = weight.shape
    least = max(2, -(-outputs * inputs * dtype.itemsize // _UNPACKED_BYTES))
    equal = (n for n in range(least, min(2 * least, outputs) + 1) if outputs % n == 0)
    return next(equal, 1)


def fast_columns(columns: int, dtype: jnp.dtype) -> int:
    """The number of columns, at least `columns`, at which a pass over them is fastest.

    XLA:CPU's dots of odd widths are slow: a 100M-parameter pass in milliseconds at 9 / 12 / 16 /
    17 / 25 / 32 columns took 32 / 31 / 27 / 37 / 50 / 44 in float32 and 17 / 21 / 25 / 38 / 34 /
    29 in bfloat16 (2 cores, 2026-11-21).
    """
    if not _on_cpu() or unable_here(columns) is None:
        return columns
    exact = _MIN_BF16_COLUMNS if dtype == jnp.float32 else 2 * _MIN_BF16_COLUMNS
    return columns if columns <= exact else -(-columns // 16) * 16


def normed(
    kind: str,
    weight: Float[Array, " E"],
    bias: Float[Array, " E"] | None,
    x: Float[Array, "*shape"],
    eps: float,
    axis: int = 0,
    across: str | None = None,
) -> Float[Array, "*shape"]:
    """The features along `axis` scaled to unit mean square, then by `weight` (see `NORM_KINDS`).

    `across` is the mesh axis that the features are spread over, if any.
    """

    def mean(x: Array) -> Array:
        own = _mean(x, axis)
        return own if across is None else lax.pmean(own, across)

    def beside(leaf: Array) -> Array:
        return leaf.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - axis - 1))

    if kind.endswith("layer"):
        x = x - mean(x)
    x = x * lax.rsqrt(mean(jnp.square(x)) + eps)
    x = x * (1 + beside(weight) if kind.startswith("offset") else beside(weight))
    return x if bias is None else x + beside(bias)


def _mean(x: Array, axis: int) -> Array:
    """The mean along an axis, which stays."""
    return total(x, axis) / x.shape[axis]


def total(x: Array, axis: int) -> Array:
    """The sum along an axis, which stays.

    On a CPU of few columns by a product, so that what a column gives does not depend on the others:
    in which order XLA:CPU sums features depends on how many columns there are.
    """
    columns = math.prod(x.shape[axis + 1 :])
    if unable_here(columns) is not None:
        return jnp.sum(x, axis=axis, keepdims=True)
    made = _sums(x.reshape(*x.shape[: axis + 1], columns))
    return made.reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])


@jax.custom_vjp
def _sums(x: Float[Array, "*lead F C"]) -> Float[Array, "*lead 1 C"]:
    return cpu_matmul(jnp.ones((*x.shape[:-2], 1, x.shape[-2]), jnp.float32), x)


def _sums_backward(shape: tuple[int, ...], grad: Array) -> tuple[Array]:
    return (jnp.broadcast_to(grad, shape),)


_sums.defvjp(lambda x: (_sums(x), x.shape), _sums_backward)


def activated(kind: str, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The activation of that name in `ACTIVATIONS`."""
    if kind == "silu":
        return jax.nn.silu(x)
    if kind == "squared_relu":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=kind == "gelu_tanh")


def capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """`x` within ±`cap`, by a tangent; as it is where that is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotary_angles(
    positions: Int32[Array, "B T"], features: int, theta: float, stretch: Stretch | None = None
) -> tuple[Float[Array, "half B T"], Float[Array, "half B T"]]:
    """Cosine and sine of each position's rotary angles, one per pair of features.

    XLA:CPU would compute them anew for each head of each layer, in which 80 of the 100 us go that
    queries of 16 nodes and 20 heads are rotated in; what a branch computes it does not.
    """
    frequency = jnp.asarray(frequencies(features, theta, stretch))
    magnitude = 1.0 if stretch is None else stretch.magnitude

    def made(positions: Array) -> tuple[Array, Array]:
        angle = frequency[:, None, None] * positions.astype(jnp.float32)
        return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)

    if not _on_cpu() or 0 in (positions.size, features):
        return made(positions)
    none = jnp.zeros((features // 2, *positions.shape), jnp.float32)
    always = positions.reshape(-1)[0] < jnp.iinfo(jnp.int32).max
    return lax.cond(always, made, lambda _: (none, none), positions)


def rotate(
    x: Float[Array, "_ _ _ _"],
    angles: tuple[Float[Array, "half B T"], Float[Array, "half B T"]],
    axis: int = 1,
) -> Float[Array, "_ _ _ _"]:
    """Rotary position embedding, pairing feature `i` with `i + half` (Hugging Face's LLaMA).

    Features are along `axis`: `x` is `[H, D, B, T]` with 1 and `[B, T, H, D]` with 3. Those past
    the angles stay as they are.
    """
    half = angles[0].shape[0]
    cos, sin = angles
    if axis == 3:
        cos, sin = (each.transpose(1, 2, 0)[:, :, None] for each in angles)
    first, second, rest = jnp.split(x, (half, 2 * half), axis=axis)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate([part for part in turned if part.shape[axis]], axis=axis)


def embed(
    table: Float[Array, "V E"] | PackedWeight, tokens: Int32[Array, "B T"]
) -> Float[Array, "E C"]:
    """Rows of `table` as columns, in float32; of a packed one only they are unpacked."""
    if isinstance(table, PackedWeight):
        return row_major(_unpacked_rows(table, tokens.reshape(-1)).T)
    return row_major(_looked_up(table, tokens.reshape(-1)))


def _unpacked_rows(table: PackedWeight, tokens: Array) -> Array:
    found = table.of_rows(lambda part: _columns(part, tokens).T).unpacked()
    return found if table.order is None else found[:, jnp.argsort(table.order)]


def _columns(table: Array, tokens: Array) -> Array:
    """Rows of a table as columns.

    XLA:CPU takes the table's size for the work of a gather, and wakes a second thread for it: a
    few rows are sliced there. And it does both in float32 alone, so that it would widen a whole
    table of bfloat16: it gets the bits. Behind a barrier it does neither ahead of a loop.
    """
    if not _on_cpu():
        return _rows_at(table, tokens).T
    held, tokens = lax.optimization_barrier((table, tokens))
    bits = bits_of(held)
    if tokens.size > _FEW_TOKENS:
        return of_bits(_rows_at(bits, tokens).T, table.dtype)
    rows = [lax.dynamic_index_in_dim(bits, token, keepdims=False) for token in tokens]
    return of_bits(jnp.stack(rows, axis=1), table.dtype)


@jax.custom_batching.custom_vmap
def _rows_at(table: Array, tokens: Array) -> Array:
    """Rows of a table. Of a batch of tables they are rows of one long table.

    A TPU's gather from several would first copy all of them.
    """
    return table[tokens]


@_rows_at.def_vmap
def _rows_of_each(
    count: int, batched: Sequence[bool], table: Array, tokens: Array
) -> tuple[Array, bool]:
    if not batched[0]:
        return table[tokens], True
    own = tokens if batched[1] else jnp.broadcast_to(tokens, (count, *tokens.shape))
    rows = table.shape[1]
    own = jnp.where(own < 0, own + rows, own).clip(0, rows - 1)  # as it would be in each
    first = rows * jnp.arange(count, dtype=own.dtype)[:, None]
    return table.reshape(-1, table.shape[2])[own + first], True


@jax.custom_vjp
def _looked_up(table: Array, tokens: Array) -> Array:
    return _columns(table, tokens).astype(jnp.float32)


def _looked_up_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _looked_up(table, tokens), (table, tokens)


def _looked_up_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    table, tokens = saved
    return jnp.zeros_like(table).at[tokens].add(grad.T.astype(table.dtype)), None


_looked_up.defvjp(_looked_up_forward, _looked_up_backward)


def bits_of(x: Array) -> Array:
    """Numbers of 16 bits as their bits, which XLA:CPU moves as they are.

    Others stay as they are, and elsewhere all do: a TPU would copy the whole.
    """
    are_narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return lax.bitcast_convert_type(x, jnp.uint16) if are_narrow and _on_cpu() else x


def of_bits(x: Array, dtype: jnp.dtype) -> Array:
    """The numbers of `dtype` that `bits_of` took apart."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def write_window(
    buffer: Array,
    window: Array,
    start: Int32[Array, " B"],
    axis: int,
    pages: Int32[Array, "B N"] | None = None,
    lead: int = 0,
) -> Array:
    """`buffer` with `window[b]` written from slot `start[b]` on along `axis`, for each row b.

    Row b is in `pages[b]` of the buffer, one after the other, if they are given: no two rows write
    to the same one but for page 0 of several, which is nobody's, and so is what lies past a row's
    pages. Rows or pages are along axis `lead`, after those of stacked layers.
    With a page or none the window must fit: `start + window.shape[axis] <= buffer.shape[axis]`
    (checked by the caller on the host, because XLA would move the window silently, or write
    anywhere). Few rows are written one by one, which XLA does in place; a batched update would
    become a scatter. Of chosen rows and pages it is one on a GPU, where each row would be a kernel
    of its own; on a TPU it would have another layout than the cache, which is then copied in every
    step.
    """
    window = window.astype(buffer.dtype)
    count = window.shape[lead]
    if pages is not None and platform() == "gpu":
        return _scattered(buffer, window, start, axis, pages, lead)
    if pages is not None and pages.shape[1] > 1:
        return _written_to_pages(buffer, window, start, axis, pages, lead)

    def written(row: Array | int, buffer: Array) -> Array:
        own = lax.dynamic_index_in_dim(window, row, lead, keepdims=True)
        place = row if pages is None else pages[row, 0]
        return lax.dynamic_update_slice(buffer, own, _at(buffer, lead, place, axis, start[row]))

    if count <= _UNROLLED_ROWS or pages is not None:
        return _one_by_one(written, count, buffer)
    update = partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(update, (lead, lead, 0), lead)(buffer, window, start)


def _at(
    buffer: Array, lead: int, place: Array | int, axis: int, slot: Array | int
) -> list[Array | int]:
    """Where a slot of a row or page is in a buffer."""
    at: list[Array | int] = [0] * buffer.ndim
    at[lead], at[axis] = place, slot
    return at


def _scattered(
    buffer: Array,
    window: Array,
    start: Int32[Array, " B"],
    axis: int,
    pages: Int32[Array, "B N"],
    lead: int,
) -> Array:
    """What `write_window` gives of pages, by one scatter of the tokens."""
    size = buffer.shape[axis]
    slot = start[:, None] + jnp.arange(window.shape[axis], dtype=jnp.int32)
    page = jnp.take_along_axis(pages, slot // size, axis=1, mode="fill", fill_value=0)
    if pages.shape[1] > 1:  # page 0 is nobody's
        page = jnp.where(page == 0, buffer.shape[lead], page)
    at: list[Any] = [slice(None)] * buffer.ndim
    at[lead], at[axis] = page, slot % size
    tokens = jnp.moveaxis(window, (lead, axis), (0, 1))
    return buffer.at[tuple(at)].set(tokens, mode="drop", unique_indices=True)


def _in_order(x: Array) -> Array:
    """`x`, stored with its last axis contiguous: else a TPU turns the cache that it goes to."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _written_to_pages(
    buffer: Array,
    window: Array,
    start: Int32[Array, " B"],
    axis: int,
    pages: Int32[Array, "B N"],
    lead: int,
) -> Array:
    """What `write_window` gives of pages: tokens one by one where they are few, or else each page
    that they lie in, read, changed and written back.
    """
    count, width, size = window.shape[lead], window.shape[axis], buffer.shape[axis]

    def page_of(row: Array | int, number: Array) -> Array:
        return pages.at[row, number].get(mode="fill", fill_value=0)

    if width == 1 or (width <= _FEW_TO_WRITE and _on_cpu()):

        def token(index: Array | int, buffer: Array) -> Array:
            row, part = index // width, index % width
            slot = start[row] + part
            own = lax.dynamic_index_in_dim(window, row, lead, keepdims=True)
            own = lax.dynamic_index_in_dim(own, part, axis, keepdims=True)
            at = _at(buffer, lead, page_of(row, slot // size), axis, slot % size)
            return lax.dynamic_update_slice(buffer, own, at)

        return _one_by_one(token, count * width, buffer)
    touched = (width + size - 2) // size + 1
    spare = [(0, 0)] * window.ndim
    spare[axis] = (size, touched * size)
    padded = jnp.pad(window, spare)
    shape = list(buffer.shape)
    shape[lead] = 1
    slots = jnp.arange(size).reshape(-1, *(1,) * (buffer.ndim - axis - 1))

    def written(index: Array | int, buffer: Array) -> Array:
        row, part = index // touched, index % touched
        begin = start[row] % size
        own = lax.dynamic_index_in_dim(padded, row, lead, keepdims=True)
        own = lax.dynamic_slice_in_dim(own, size * (1 + part) - begin, size, axis)
        token = slots + (size * part - begin)
        at = _at(buffer, lead, page_of(row, start[row] // size + part), axis, 0)
        held = lax.dynamic_slice(buffer, at, shape)
        own = jnp.where((token >= 0) & (token < width), _in_order(own), held)
        return lax.dynamic_update_slice(buffer, own, at)

    return _one_by_one(written, count * touched, buffer)


def _one_by_one(written: Callable[[Array | int, Array], Array], count: int, buffer: Array) -> Array:
    """`buffer` with so many parts written, the few of which XLA writes in place as they stand."""
    if count > _UNROLLED_ROWS:
        return lax.fori_loop(0, count, written, buffer)
    for index in range(count):
        buffer = written(index, buffer)
    return buffer
