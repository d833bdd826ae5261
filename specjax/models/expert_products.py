"""Matrices of experts times the columns that chose each."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int32

from pallas_kernels.cpu import cpu_experts, reference, share_a_call, unable
from pallas_kernels.dispatch import precision_of
from specjax.models.layers import computed_in, parts_of, rounded_to, table_of, takes_codes
from specjax.models.quantized import INT8, PackedWeight

_BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""Columns as rows `[P, I]`, those of an expert beside each other, times its own `[O, I]`."""


def expert_linears(
    weights: Sequence[Float[Array, "X _ I"] | PackedWeight],
    x: Float[Array, "I N"],
    chosen: Int32[Array, "K C"],
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "_ K C"], ...]:
    """Each of some matrices of `X` experts times the columns that chose each expert, in float32.

    See `layers.linear` for what is rounded. On a CPU no expert is read that nobody chose, and what
    a column gives does not depend on the others.

    Args:
      weights: matrices, those of the experts behind one another.
      x: `C` columns, each for all `K` experts that it chose, or `K·C`, the columns for the first
        expert of each before those for the second.
      chosen: experts; of a number that is none the product is 0.
      dtype: what operands are rounded to, by default the weights' own.
    """
    kinds = {computed_in(weight, dtype) for weight in weights}
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(kinds) > 1 or (packed and len(packed) < len(weights)):
        return tuple(expert_linears((weight,), x, chosen, dtype)[0] for weight in weights)
    (kind,) = kinds
    if not packed:
        return _products(tuple(weights), x, chosen, kind)
    alike = len({weight.form for weight in packed}) == 1 and share_a_call(*parts_of(packed))
    if alike and all(takes_codes(weight, x[:, :1]) for weight in packed):
        return _coded_products(tuple(packed), x, chosen, kind)
    if packed[0].activations == INT8:
        x, kind = reference.quantized(x), jnp.dtype(jnp.float32)
    return _products(tuple(_unpacked(weight, kind) for weight in packed), x, chosen, kind)


def _unpacked(weight: PackedWeight, dtype: jnp.dtype) -> Float[Array, "X O I"]:
    def one(rows: dict[str, Array]) -> Array:
        return weight.changed(**rows).unpacked().astype(dtype)

    return jax.vmap(one)(weight.rows)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    weights: tuple[Array, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[Array, ...]:
    able = weights[0].dtype == dtype and unable(weights[0], x.shape[0], 1) is None
    if able and share_a_call(weights):
        return cpu_experts(weights, x, chosen, rounded=dtype == jnp.bfloat16)
    return sequential_vmap(partial(_ragged, dtype))(weights, x, chosen)


def _ragged(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """XLA's grouped product of columns that are sorted by their experts, which has no `vmap`."""
    count, flat = weights[0].shape[0], chosen.reshape(-1)
    expert = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
    rows = rounded_to(x.T[order % x.shape[1]], dtype)
    back = jnp.argsort(order)

    def of(weight: Array) -> Array:
        made = lax.ragged_dot_general(
            rows, rounded_to(weight, dtype), sizes, _BY_EXPERT, precision=precision_of(rows.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        made = jnp.where((expert < count)[:, None], made[back], 0)
        return made.T.reshape(-1, *chosen.shape)

    return tuple(map(of, weights))


def _products_forward(
    weights: tuple[Array, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], Array, Array]]:
    return _products(weights, x, chosen, dtype), (weights, x, chosen)


def _products_backward(
    dtype: jnp.dtype,
    saved: tuple[tuple[Array, ...], Array, Array],
    grads: tuple[Array, ...],
) -> tuple[tuple[Array, ...], Array, None]:
    weights, x, chosen = saved

    @sequential_vmap
    def back(weights: tuple[Array, ...], x: Array, chosen: Array, grads: tuple[Array, ...]) -> Any:
        return jax.vjp(lambda weights, x: _ragged(dtype, weights, x, chosen), weights, x)[1](grads)

    return *back(weights, x, chosen, grads), None


_products.defvjp(_products_forward, _products_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _coded_products(
    weights: tuple[PackedWeight, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[Array, ...]:
    quantized = weights[0].activations == INT8
    values, scales, offsets = parts_of(weights)
    rounds = dtype == jnp.bfloat16 and not quantized
    return cpu_experts(
        values, x, chosen, scales, offsets, rounded=rounds, quantized=quantized,
        table=table_of(weights[0]),
    )  # fmt: skip


def _coded_forward(
    weights: tuple[PackedWeight, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[tuple[PackedWeight, ...], Array, Array]]:
    return _coded_products(weights, x, chosen, dtype), (weights, x, chosen)


def _coded_backward(
    dtype: jnp.dtype,
    saved: tuple[tuple[PackedWeight, ...], Array, Array],
    grads: tuple[Array, ...],
) -> tuple[None, Array, None]:
    weights, x, chosen = saved
    whole = tuple(_unpacked(weight, dtype) for weight in weights)
    return None, _products_backward(dtype, (whole, x, chosen), grads)[1], None


_coded_products.defvjp(_coded_forward, _coded_backward)
