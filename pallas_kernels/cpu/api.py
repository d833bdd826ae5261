"""The product as a function of jax arrays: inside jit, loops, `vmap` and `shard_map`."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels.cpu.library import EXPERTS, MATMUL, MOST_COLUMNS, status
from pallas_kernels.dispatch import named
from pallas_kernels.platform import platform

_XLA = "xla"
_GROUPED_BY, _HALVED = 32, 16
"""Inputs that groups are multiples of; codes of 8 bits may have such of half as many."""
_Operand = jax.ShapeDtypeStruct | Array


class _Columns(NamedTuple):
    """What becomes of x before it is multiplied."""

    rounded: bool
    quantized: bool
    has_table: bool


def unable_here(columns: int) -> str | None:
    """Why no product of so many columns runs as `cpu_matmul` where it is traced, or None."""
    if platform() != "cpu":
        return f"it needs a CPU, and this is {platform()}"
    if named() == _XLA:
        return "XLA's forms are asked for"
    if (reason := status().reason) is not None:
        return reason
    if not 1 <= columns <= MOST_COLUMNS:
        return f"it takes 1 to {MOST_COLUMNS} columns, not {columns}"
    return None


def unable(
    weights: _Operand,
    inputs: int,
    columns: int,
    scale: _Operand | None = None,
    offset: _Operand | None = None,
    quantized: bool = False,
) -> str | None:
    """Why a product cannot run as `cpu_matmul` where it is traced; None if it can.

    Args:
      weights: `[..., O, I]` of float32 or bfloat16, or codes: uint8 of 8 bits `[..., O, I]`, or of
        4 bits `[..., O, I / 2]`. Shapes and dtypes count alone.
      inputs: `I`.
      columns: of x.
      scale: `[..., O, G]` of codes; float32, bfloat16 or float16.
      offset: the same of codes that have offsets.
      quantized: whether x is.
    """
    return unable_here(columns) or _unable_of(weights, inputs, scale, offset, quantized)


def _unable_of(
    weights: _Operand,
    inputs: int,
    scale: _Operand | None,
    offset: _Operand | None,
    quantized: bool,
) -> str | None:
    held = weights.shape[-1]
    if scale is None:
        known = weights.dtype in (jnp.float32, jnp.bfloat16) and held == inputs
        return None if known else f"it takes float32 and bfloat16, not {weights.dtype}"
    if weights.dtype != jnp.uint8 or held not in (inputs, inputs / 2):
        return "codes are bytes, one or half of one for each input"
    if scale.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"scales are float32, bfloat16 or float16, not {scale.dtype}"
    if offset is not None and (offset.dtype, offset.shape) != (scale.dtype, scale.shape):
        return f"offsets are as scales are, {scale.dtype}{list(scale.shape)}"
    groups = scale.shape[-1]
    if groups == 1:
        return None
    unit = _HALVED if held == inputs and not quantized else _GROUPED_BY
    fits = inputs % groups == 0 and inputs // groups % unit == 0
    return None if fits else f"groups are of multiples of {unit} inputs"


def multiplies_bfloat16() -> bool:
    """Whether it runs where it is traced, on a processor that multiplies bfloat16 itself."""
    return unable_here(1) is None and status().form == "avx512_bf16"


def products() -> str:
    """Which product of weights and columns runs where it is traced, and why, as a person reads it.

    Such as "cpu_matmul (avx512_bf16), up to 64 columns".
    """
    if platform() == "cpu" and named() != _XLA:
        return status().line
    return "XLA's"


def cpu_matmul(
    weights: Num[Array, "*lead O B"],
    x: Float[Array, "*lead I N"],
    scale: Num[Array, "*lead O G"] | None = None,
    offset: Num[Array, "*lead O G"] | None = None,
    *,
    rounded: bool = False,
    quantized: bool = False,
    table: Float[Array, "*lead 16"] | None = None,
) -> Float[Array, "*lead O N"]:
    """`weights @ x` with sums in float32, for each of the first dimensions.

    Codes stand for `scale · (code - middle)`, the middle being 128 or 8, for
    `scale · code + offset`, or for `scale · table[code]`; of those of 8 bits with a scale a row and
    no offset the sums are scaled. What a column gives does not depend on the others, nor on the
    number of threads, to the bit.

    Args:
      weights: see `unable`.
      x: float32, 1 to 64 columns.
      scale: of codes.
      offset: of codes.
      rounded: whether x is rounded to bfloat16, and so are the numbers that codes stand for, but
        where it is sums that are scaled.
      quantized: whether x is quantized to 8 bits (`reference.quantized`), of codes alone. Their
        products are summed as integers for each 32 inputs; every form gives the same bits.
      table: of codes of 4 bits, float32.

    Raises:
      ValueError: it cannot run so (`unable`), weights of float32 would have to be rounded, or x is
        to be both, or quantized for others than codes or for those of a table.
    """
    scales, offsets = (None if part is None else (part,) for part in (scale, offset))
    (made,) = cpu_matmuls(
        (weights,), x, scales, offsets, rounded=rounded, quantized=quantized, table=table
    )
    return made


def cpu_matmuls(
    weights: Sequence[Num[Array, "*lead _ B"]],
    x: Float[Array, "*lead I N"],
    scales: Sequence[Num[Array, "*lead _ G"]] | None = None,
    offsets: Sequence[Num[Array, "*lead _ G"]] | None = None,
    *,
    rounded: bool = False,
    quantized: bool = False,
    table: Float[Array, "*lead 16"] | None = None,
) -> tuple[Float[Array, "*lead _ N"], ...]:
    """Several matrices times the same columns in one call: to the bit what `cpu_matmul` gives.

    Args:
      weights: see `cpu_matmul`; of one dtype, and with rows of one length.
      x: see `cpu_matmul`.
      scales: of codes; each matrix has as many a row.
      offsets: of codes; all of them have some or none has.
      rounded: see `cpu_matmul`.
      quantized: see `cpu_matmul`.
      table: see `cpu_matmul`; of all matrices.

    Raises:
      ValueError: see `cpu_matmul`; or they cannot share a call (`share_a_call`).
    """
    columns = _Columns(rounded, quantized, table is not None)
    _check(weights, scales, offsets, columns)
    scale, offset = (None if parts is None else parts[0] for parts in (scales, offsets))
    reason = unable(weights[0], x.shape[-2], x.shape[-1], scale, offset, quantized)
    if reason is not None:
        raise ValueError(f"cpu_matmul cannot run here: {reason}.")
    parts = (*weights, *(scales or ()), *(offsets or ()), *([] if table is None else [table]))
    return _products(columns, len(weights), parts, x.astype(jnp.float32))


def cpu_experts(
    weights: Sequence[Num[Array, "X _ B"]],
    x: Float[Array, "I N"],
    chosen: Int32[Array, "K C"],
    scales: Sequence[Num[Array, "X _ G"]] | None = None,
    offsets: Sequence[Num[Array, "X _ G"]] | None = None,
    *,
    rounded: bool = False,
    quantized: bool = False,
    table: Float[Array, "16"] | None = None,
) -> tuple[Float[Array, "_ K C"], ...]:
    """Matrices of experts times the columns that chose each; those that nobody chose are not read.

    To the bit what `cpu_matmul` gives of a column and an expert's matrix, for any number of
    columns.

    Args:
      weights: as of `cpu_matmuls`, those of `X` experts behind one another.
      x: float32; `C` columns, each for all `K` experts that it chose, or `K·C`, the columns for the
        first expert of each before those for the second.
      chosen: experts; of a number that is none the product is 0.
      scales: see `cpu_matmuls`.
      offsets: see `cpu_matmuls`.
      rounded: see `cpu_matmul`.
      quantized: see `cpu_matmul`.
      table: see `cpu_matmuls`.

    Raises:
      ValueError: see `cpu_matmuls`, but for the number of columns.
    """
    how = _Columns(rounded, quantized, table is not None)
    _check(weights, scales, offsets, how)
    scale, offset = (None if parts is None else parts[0] for parts in (scales, offsets))
    if (reason := unable(weights[0], x.shape[-2], 1, scale, offset, quantized)) is not None:
        raise ValueError(f"cpu_matmul cannot run here: {reason}.")
    made = [jax.ShapeDtypeStruct((each.shape[-2], chosen.size), jnp.float32) for each in weights]

    @jax.custom_batching.sequential_vmap
    def call(parts: tuple[Array, ...], x: Array, chosen: Array) -> tuple[Array, ...]:
        return tuple(jax.ffi.ffi_call(EXPERTS, made)(x, chosen, *parts, **how._asdict()))

    parts = (*weights, *(scales or ()), *(offsets or ()), *([] if table is None else [table]))
    found = call(parts, x.astype(jnp.float32), chosen)
    return tuple(each.reshape(-1, *chosen.shape) for each in found)


def _check(
    weights: Sequence[_Operand],
    scales: Sequence[_Operand] | None,
    offsets: Sequence[_Operand] | None,
    how: _Columns,
) -> None:
    """Checks that matrices can share a call, and what becomes of x.

    Raises:
      ValueError: they cannot, or it cannot be.
    """
    rounded, quantized, has_table = how
    if has_table and (quantized or offsets is not None or scales is None):
        raise ValueError("cpu_matmul has tables for codes without offsets, of x that is no codes.")
    if rounded and weights[0].dtype == jnp.float32:
        raise ValueError("cpu_matmul rounds no weights of float32; give them as bfloat16.")
    if quantized and (rounded or scales is None):
        raise ValueError("cpu_matmul quantizes x for codes alone, and does not round it too.")
    if not share_a_call(weights, scales, offsets):
        given = " and ".join(f"{each.dtype}{list(each.shape)}" for each in weights)
        raise ValueError(
            "cpu_matmul takes matrices of one dtype, with rows of one length and as many scales, "
            f"not {given}."
        )


def share_a_call(
    weights: Sequence[_Operand],
    scales: Sequence[_Operand] | None = None,
    offsets: Sequence[_Operand] | None = None,
) -> bool:
    """Whether matrices are alike but for their number of rows, as `cpu_matmuls` takes them.

    If one of them can run as `cpu_matmul`, all can.
    """

    def kinds(operands: Sequence[_Operand]) -> set[Any]:
        return {(each.dtype, each.shape[:-2], each.shape[-1]) for each in operands}

    of_groups = [part for part in (scales, offsets) if part is not None]
    whole = all(len(part) == len(weights) for part in of_groups)
    return whole and len(kinds(weights)) == 1 and all(len(kinds(part)) == 1 for part in of_groups)


def _products(how: _Columns, count: int, parts: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
    """The products of `count` matrices; `parts` are these, then scales, then offsets."""
    columns = x.shape[-1]
    made = [
        jax.ShapeDtypeStruct((*each.shape[:-1], columns), jnp.float32) for each in parts[:count]
    ]

    @jax.custom_batching.custom_vmap
    def call(parts: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        return tuple(jax.ffi.ffi_call(MATMUL, made)(x, *parts, **how._asdict()))

    call.def_vmap(partial(_of_each, how, count))
    return call(parts, x)


def _of_each(
    how: _Columns,
    matrices: int,
    count: int,
    batched: Sequence,
    parts: tuple[Array, ...],
    x: Array,
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    """Under `vmap`: columns of one matrix lie beside each other, or go one after the other where
    they are too many; matrices lie behind one another.
    """
    of_parts, of_x = batched
    all_of_them = (True,) * matrices
    if any(of_parts):

        def each(array: Array, is_batched: bool) -> Array:
            return array if is_batched else jnp.broadcast_to(array, (count, *array.shape))

        parts = tuple(map(each, parts, of_parts))
        return _products(how, matrices, parts, each(x, of_x)), all_of_them
    inputs, columns = x.shape[-2:]
    if count * columns > MOST_COLUMNS:
        return lax.map(partial(_products, how, matrices, parts), x), all_of_them
    beside = jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-2], inputs, count * columns)

    def apart(made: Array) -> Array:
        return jnp.moveaxis(made.reshape(*made.shape[:-1], count, columns), -2, 0)

    return tuple(map(apart, _products(how, matrices, parts, beside))), all_of_them
