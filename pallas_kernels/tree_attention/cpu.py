"""Tree attention on a CPU, in C++: float32, over what rows hold and nodes see.

One pass over a row's live slots and its nodes' ancestors, instead of a dozen operations of XLA's
over all slots and columns. The library is that of `pallas_kernels.cpu`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu.library import ATTENTION, status
from pallas_kernels.tree_attention import xla
from pallas_kernels.tree_attention.implementations import differentiable, folding
from pallas_kernels.tree_attention.operands import Operands, of_sequence, undivided

_FEATURES = 16
_PAGE = 64
_INT64 = jnp.dtype("int64").type
_FEATURES_FIRST = (1, 3, 0, 2)
"""The axes of queries in memory: as a model's activations lie, so that nothing is turned."""


def unable(at: Operands) -> str | None:
    """Why it does not take such operands where it is traced, or None."""
    if (reason := status().reason) is not None:
        return reason
    held = [at.query, at.block_keys, at.block_values]
    if at.prefix is not None:
        held += [at.prefix.keys, at.prefix.values]
    if (other := next((x.dtype for x in held if x.dtype != jnp.float32), None)) is not None:
        return f"it takes float32, not {other}"
    if at.soft_cap is not None:
        return "it caps no scores"
    dim = at.query.shape[-1]
    if dim % _FEATURES:
        return f"it takes heads of multiples of {_FEATURES} features, not {dim}"
    return undivided(at, _PAGE)


def tree_attention(at: Operands) -> Float[Array, "B H T D"]:
    """See `reference.tree_attention`; pages of a larger cache are read where they lie.

    What a node gives does not depend on the others, to the bit. Of more than 64 nodes the block is
    taken to be free of NaN in columns that somebody sees.
    """
    return _called(at)


def causal(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    window: int | None = None,
    sinks: Float[Array, "B H"] | None = None,
) -> Float[Array, "B H T D"]:
    """Attention of plain sequences (see `sequence.causal`), differentiable as XLA's form is."""
    at = of_sequence(query, keys, values, sinks)

    def run(at: Operands) -> Array:
        return _called(at, window or 0)

    def alike(at: Operands) -> Array:
        return xla.causal(at.query, at.block_keys, at.block_values, None, window, at.sinks)

    def again(at: Operands) -> Array:
        return causal(at.query, at.block_keys, at.block_values, window, at.sinks)

    return differentiable(folding(run, again), alike)(at)


def _called(at: Operands, window: int = 0) -> Float[Array, "B H T D"]:
    rest: list[Array] = [] if at.tree_mask is None else [at.tree_mask]
    pages = None if at.prefix is None else at.prefix.pages
    if at.prefix is not None:
        rest += [at.prefix.keys, at.prefix.values, at.prefix.length.astype(jnp.int32)]
    rest += [each.astype(jnp.int32) for each in (at.first, pages) if each is not None]
    rest += [] if at.sinks is None else [at.sinks.astype(jnp.float32)]
    made = jax.ShapeDtypeStruct(at.query.shape, jnp.float32)
    orders = _FEATURES_FIRST, None, None, *(None for _ in rest)
    run = jax.ffi.ffi_call(ATTENTION, made, input_layouts=orders, output_layouts=_FEATURES_FIRST)
    return run(
        at.query, at.block_keys, at.block_values, *rest, has_mask=at.tree_mask is not None,
        has_prefix=at.prefix is not None, has_first=at.first is not None,
        has_pages=pages is not None, has_sinks=at.sinks is not None, window=_INT64(window),
    )  # fmt: skip
