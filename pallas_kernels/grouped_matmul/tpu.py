"""Grouped products for TPUs.

The blocks of a group follow one another, so that a tile of its matrices stays in fast memory for
all of them; tiles of groups that no block has are never copied there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.dispatch import precision_of
from pallas_kernels.grouped_matmul.operands import Operands

_LANES = 128
_TILE_BYTES = 2 * 2**20
"""Of all matrices together, of which two tiles each are in fast memory: one of 16 MiB on a v5e."""
_MOST_BYTES = 4 * 2**20
_ROW_BYTES = 2**20


def unable(at: Operands) -> str | None:
    """Why this implementation cannot run on such operands, or None."""
    outputs, inputs = at.weights[0].shape[-2:]
    size = min(outputs, _LANES) * inputs * sum(each.dtype.itemsize for each in at.weights)
    if inputs % _LANES == 0 or size <= _MOST_BYTES:
        return None
    return f"inputs that are not in {_LANES}s are read at once, and {inputs} are too many"


def grouped_matmul(at: Operands, *, interpret: bool = False) -> tuple[Array, ...]:
    """See `api.grouped_matmul`; `interpret` is that of `pallas_call`."""
    at = at.in_place()
    blocks, count = len(at.blocks.group), len(at.weights)
    _, outputs, inputs = at.weights[0].shape
    own_outputs, own_inputs = _tiles(at)
    steps = inputs // own_inputs

    def rows(tile: Array, block: Array, step: Array, group: Any, used: Any) -> tuple[Array, ...]:
        return block, jnp.where(used[block] > 0, step, steps - 1)

    def matrix(tile: Array, block: Array, step: Array, group: Any, used: Any) -> tuple[Array, ...]:
        return group[block], tile, jnp.where(used[block] > 0, step, steps - 1)

    made = pl.pallas_call(
        functools.partial(_kernel, count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(outputs, own_outputs), blocks, steps),
            in_specs=[pl.BlockSpec((at.blocks.size, own_inputs), rows)]
            + [pl.BlockSpec((None, own_outputs, own_inputs), matrix)] * count,
            out_specs=[
                pl.BlockSpec((at.blocks.size, own_outputs), lambda tile, block, *_: (block, tile))
            ]
            * count,
        ),
        out_shape=[jax.ShapeDtypeStruct((len(at.rows), outputs), jnp.float32)] * count,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(at.blocks.group, at.blocks.is_used, at.rows, *at.weights)
    return tuple(made)


def _tiles(at: Operands) -> tuple[int, int]:
    """Outputs and inputs that are multiplied at a time: all inputs if they fit."""
    _, outputs, inputs = at.weights[0].shape
    width = sum(weight.dtype.itemsize for weight in at.weights)
    row_bytes = at.blocks.size * at.rows.dtype.itemsize
    own_inputs = inputs
    if inputs % _LANES == 0:
        own_inputs = _part(inputs, min(_TILE_BYTES // (width * _LANES), _ROW_BYTES // row_bytes))
    if outputs <= _LANES:
        return outputs, own_inputs
    return _part(outputs, _TILE_BYTES // (width * own_inputs)), own_inputs


def _part(whole: int, most: int) -> int:
    """A multiple of 128, no more than `most` if it can; one that divides `whole` if there is."""
    sizes = range(_LANES, max(min(most, whole), _LANES) + 1, _LANES)
    return max(sizes, key=lambda size: (whole % size == 0, size))


def _kernel(count: int, group_ref: Any, used_ref: Any, rows_ref: Any, *refs: Any) -> None:
    weights, made = refs[:count], refs[count:]
    step = pl.program_id(2)

    @pl.when(used_ref[pl.program_id(1)] > 0)
    def _() -> None:
        rows = rows_ref[...]
        for weight, found in zip(weights, made, strict=True):
            own = lax.dot_general(
                rows, weight[...].astype(rows.dtype), (((1,), (1,)), ((), ())),
                precision=precision_of(rows.dtype), preferred_element_type=jnp.float32,
            )  # fmt: skip
            found[...] = own + jnp.where(step == 0, 0, found[...])
