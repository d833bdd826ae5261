"""Grouped products for GPUs through Triton.

A program multiplies a block of rows with some outputs of its group's matrices: programs of one
group run beside each other, so that a matrix comes from memory once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.dispatch import precision_of
from pallas_kernels.grouped_matmul.operands import Operands

_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_OUTPUTS = (128, 64, 32)
_INPUT_BYTES = (256, 128)
_STAGE_BYTES = 32 * 1024
"""Of what a program has on its way there are three stages, and of shared memory 99 KiB on the cards
that have least (compute capability 8.6 and 8.9)."""


class _Static(NamedTuple):
    """Matrices, what they have of outputs and inputs, and how much of each a program takes."""

    matrices: int
    outputs: int
    inputs: int
    own_outputs: int
    own_inputs: int


def unable(at: Operands) -> str | None:
    """Why this implementation cannot run on such operands, or None."""
    for weight in at.weights:
        if weight.size >= 2**31:
            return f"it counts to 2^31, and the matrices have {weight.size:,} numbers"
    return None


def grouped_matmul(at: Operands, *, interpret: bool = False) -> tuple[Array, ...]:
    """See `api.grouped_matmul`; `interpret` is that of `pallas_call`."""
    at = at.in_place()
    group, size = at.blocks.group, at.blocks.size
    _, outputs, inputs = at.weights[0].shape
    static = _static(at, len(group))
    of_rows = pl.BlockSpec((size, inputs), lambda block, tile: (block, 0))
    made = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(len(group), pl.cdiv(outputs, static.own_outputs)),
        in_specs=[pl.no_block_spec, pl.no_block_spec, of_rows]
        + [pl.no_block_spec] * static.matrices,
        out_specs=[pl.BlockSpec((size, outputs), lambda block, tile: (block, 0))] * static.matrices,
        out_shape=[jax.ShapeDtypeStruct((len(at.rows), outputs), jnp.float32)] * static.matrices,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(group, at.blocks.is_used, at.rows, *at.weights)
    return tuple(made)


def _static(at: Operands, blocks: int) -> _Static:
    _, outputs, inputs = at.weights[0].shape
    width = max(at.rows.dtype.itemsize, *(weight.dtype.itemsize for weight in at.weights))
    fitting = [
        (own, own_bytes // width) for own in _OUTPUTS for own_bytes in _INPUT_BYTES
        if (own * len(at.weights) + at.blocks.size) * own_bytes <= _STAGE_BYTES
    ]  # fmt: skip
    many = [each for each in fitting if blocks * pl.cdiv(outputs, each[0]) >= _PROGRAMS]
    own_outputs, own_inputs = (many or fitting[-1:])[0]
    own_outputs = min(own_outputs, max(16, pl.next_power_of_2(outputs)))
    own_inputs = min(own_inputs, max(16, pl.next_power_of_2(inputs)))
    return _Static(len(at.weights), outputs, inputs, own_outputs, own_inputs)


def _kernel(static: _Static, group_ref: Any, used_ref: Any, rows_ref: Any, *refs: Any) -> None:
    weights, made = refs[: static.matrices], refs[static.matrices :]
    block, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(used_ref[block] > 0)
    def _() -> None:
        group = group_ref[block]
        size = rows_ref.shape[0]
        row = jnp.arange(size)
        output = tile * static.own_outputs + jnp.arange(static.own_outputs)
        is_output = output < static.outputs

        def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            column = number * static.own_inputs + jnp.arange(static.own_inputs)
            is_input = column < static.inputs
            every = jnp.broadcast_to(is_input[None, :], (size, static.own_inputs))
            own = plgpu.load(rows_ref.at[row[:, None], column[None, :]], mask=every, other=0)
            inside = is_output[:, None] & is_input[None, :]
            added = []
            for weight, sum_ in zip(weights, sums, strict=True):
                held = weight.at[group, output[:, None], column[None, :]]
                matrix = plgpu.load(held, mask=inside, other=0).astype(own.dtype)
                added.append(sum_ + plgpu.dot(own, matrix.T, precision=precision_of(own.dtype)))
            return tuple(added)

        none = jnp.zeros((size, static.own_outputs), jnp.float32)
        steps = pl.cdiv(static.inputs, static.own_inputs)
        sums = lax.fori_loop(0, steps, step, (none,) * static.matrices)
        within = jnp.broadcast_to(is_output[None, :], none.shape)
        for found, sum_ in zip(made, sums, strict=True):
            plgpu.store(found.at[row[:, None], output[None, :]], sum_, mask=within)
