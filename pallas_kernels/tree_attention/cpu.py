"""Tree attention on a CPU, in C++: float32, over what rows hold and nodes see.

One pass over a row's live slots and its nodes' ancestors, instead of a dozen operations of XLA's
over all slots and columns. The library is that of `pallas_kernels.cpu_matmul`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu_matmul.library import ATTENTION, status
from pallas_kernels.tree_attention.operands import Operands

_FEATURES = 16
_FEATURES_FIRST = (1, 3, 0, 2)
"""The axes of queries in memory: as a model's activations lie, so that nothing is turned."""


def unable(at: Operands) -> str | None:
    """Why it does not take such operands where it is traced, or None."""
    if (reason := status().reason) is not None:
        return reason
    held = [at.query, at.block_keys, at.block_values]
    if at.prefix is not None:
        held += [at.prefix.keys, at.prefix.values]
        if at.prefix.rows is not None:
            return "it takes no rows of a larger cache"
    if (other := next((x.dtype for x in held if x.dtype != jnp.float32), None)) is not None:
        return f"it takes float32, not {other}"
    if at.soft_cap is not None:
        return "it caps no scores"
    dim = at.query.shape[-1]
    return (
        f"it takes heads of multiples of {_FEATURES} features, not {dim}"
        if dim % _FEATURES
        else None
    )


def tree_attention(at: Operands) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`.

    What a node gives does not depend on the others, to the bit.
    """
    past: tuple[Array, ...] = ()
    if at.prefix is not None:
        past = at.prefix.keys, at.prefix.values, at.prefix.length.astype(jnp.int32)
        if at.first is not None:
            past += (at.first.astype(jnp.int32),)
    made = jax.ShapeDtypeStruct(at.query.shape, jnp.float32)
    orders = _FEATURES_FIRST, None, None, None, *(None for _ in past)
    run = jax.ffi.ffi_call(ATTENTION, made, input_layouts=orders, output_layouts=_FEATURES_FIRST)
    return run(at.query, at.block_keys, at.block_values, at.tree_mask, *past)
