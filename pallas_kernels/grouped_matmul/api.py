"""The entry point of grouped products: picks an implementation by platform and shape."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import tpu, xla
from pallas_kernels.grouped_matmul.blocks import Blocks
from pallas_kernels.grouped_matmul.operands import Operands
from pallas_kernels.platform import platform


def _triton(name: str) -> Callable[..., Any]:
    """A function of Triton's file, which is imported when it is called, as attention's is."""

    def call(*operands: Any, **options: Any) -> Any:
        found = importlib.import_module("pallas_kernels.grouped_matmul.triton")
        return getattr(found, name)(*operands, **options)

    return call


IMPLEMENTATIONS = {
    "xla": Implementation(xla.grouped_matmul),
    "tpu": Implementation(
        tpu.grouped_matmul, tpu.unable, ("tpu",),
        interpreted=functools.partial(tpu.grouped_matmul, interpret=True),
    ),
    "triton": Implementation(
        _triton("grouped_matmul"), _triton("unable"), ("gpu",),
        interpreted=functools.partial(_triton("grouped_matmul"), interpret=True),
    ),
}  # fmt: skip


@functools.partial(jax.named_call, name="grouped_matmul")
def grouped_matmul(
    weights: Sequence[Float[Array, "*L X _ I"]],
    rows: Float[Array, "N I"],
    blocks: Blocks,
    *,
    layer: Int32[Array, ""] | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "P _"], ...]:
    """Rows times the transposed matrices of their groups, in float32; 0 of rows of no group.

    Operands are multiplied as `rows` are; products of a group are the same whatever rows other
    groups have. Kernels read no matrix of a group that no row has; "xla" alone has gradients.

    Args:
      weights: some matrices of `X` groups, with as many outputs each, or those of all layers.
      rows: those that `blocks` were made of, or so many of which all are repetitions.
      blocks: rows by their groups (`blocks_of`).
      layer: which of the layers, if they are of all; kernels read it in their stack.
      implementation: "tpu", "triton" or "xla", by default the platform's own.
      interpret: runs a kernel in Pallas's interpreter.

    Raises:
      ImplementationError: the named implementation does not exist or cannot run here.
    """
    name, at = implementation or _usual(), Operands(tuple(weights), rows, blocks, layer)
    run = dispatch.pick(
        "grouped_matmul", name, implementation is not None, IMPLEMENTATIONS, at, interpret
    )
    made = run(at._replace(rows=rows[blocks.row_of % len(rows)]))
    is_placed = blocks.is_placed[:, None]
    return tuple(jnp.where(is_placed, each[blocks.place_of], 0) for each in made)


def _usual() -> str:
    if dispatch.named() == "xla":
        return "xla"
    return {"tpu": "tpu", "gpu": "triton"}.get(platform(), "xla")
