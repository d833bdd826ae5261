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
from pallas_kernels.platform import platform
from specjax.models.layers import (
    bits_of,
    computed_in,
    linear,
    of_bits,
    parts_of,
    rounded_to,
    table_of,
    takes_codes,
)
from specjax.models.quantized import INT8, PackedWeight

_BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""Columns as rows `[P, I]`, those of an expert beside each other, times its own `[O, I]`."""

_COPIED = 3
"""How often an expert's bytes move where it is copied before it is multiplied."""


def expert_linears(
    weights: Sequence[Float[Array, "X _ I"] | PackedWeight],
    x: Float[Array, "I N"],
    chosen: Int32[Array, "K C"],
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "_ K C"], ...]:
    """Each of some matrices of `X` experts times the columns that chose each expert, in float32.

    See `layers.linear` for what is rounded. By our products on a CPU no expert is read that nobody
    chose, and what a column gives does not depend on the others.

    Args:
      weights: matrices, those of the experts behind one another.
      x: `C` columns, each for all `K` experts that it chose, or `K·C`, the columns for the first
        expert of each before those for the second.
      chosen: experts, none twice in a column; of a number that is none the product is 0.
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
    return sequential_vmap(partial(_xla_products, dtype))(weights, x, chosen)


def _xla_products(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """The products without our kernels; what they do has no `vmap` of its own.

    XLA:CPU makes as many copies of the columns as there are experts for its grouped product, 0.3
    GiB for 4,096 of 2,048 inputs and 8 experts, and XLA:TPU a copy of all experts, 0.4 GiB for a
    layer of Qwen3-30B-A3B's shape (jax 0.10.2).
    """
    if platform() == "cpu":
        return _one_by_one(dtype, weights, x, chosen)
    few = chosen.size * _COPIED <= weights[0].shape[0]
    return (_taken if few else _ragged)(dtype, weights, x, chosen)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_by_one(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """One expert after the other times as many columns as `chosen` has, its own among them."""

    def add(made: tuple[Array, ...], expert: Array) -> tuple[tuple[Array, ...], None]:
        own = _of_expert(dtype, chosen == expert, _matrices(weights, expert), x)
        return tuple(map(jnp.add, made, own)), None

    none = tuple(jnp.zeros((weight.shape[1], *chosen.shape), jnp.float32) for weight in weights)
    return lax.scan(add, none, jnp.arange(weights[0].shape[0]))[0]


def _of_expert(
    dtype: jnp.dtype, is_own: Array, matrices: tuple[Array, ...], x: Array
) -> tuple[Array, ...]:
    """What an expert gives the columns that chose it, and 0 elsewhere."""
    by_slot = x.reshape(len(x), -1, is_own.shape[1])
    columns = x if by_slot.shape[1] == 1 else jnp.where(is_own, by_slot, 0).sum(axis=1)
    found = (linear(matrix, columns, dtype)[:, None] for matrix in matrices)
    return tuple(jnp.where(is_own, each, 0) for each in found)


def _matrices(weights: tuple[Array, ...], expert: Array) -> tuple[Array, ...]:
    """Those of one expert, of which XLA:CPU makes no copies in float32 (`layers.bits_of`)."""
    held, at = lax.optimization_barrier((weights, expert))
    bits = (lax.dynamic_index_in_dim(bits_of(each), at, keepdims=False) for each in held)
    return tuple(of_bits(own, each.dtype) for own, each in zip(bits, held, strict=True))


def _one_by_one_forward(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], Array, Array]]:
    return _one_by_one(dtype, weights, x, chosen), (weights, x, chosen)


def _one_by_one_backward(
    dtype: jnp.dtype,
    saved: tuple[tuple[Array, ...], Array, Array],
    grads: tuple[Array, ...],
) -> tuple[tuple[Array, ...], Array, None]:
    weights, x, chosen = saved

    def add(of_x: Array, expert: Array) -> tuple[Array, tuple[Array, ...]]:
        product = partial(_of_expert, dtype, chosen == expert)
        of_matrices, more = jax.vjp(product, _matrices(weights, expert), x)[1](grads)
        return of_x + more, of_matrices

    of_x, of_weights = lax.scan(add, jnp.zeros_like(x), jnp.arange(weights[0].shape[0]))
    return of_weights, of_x, None


_one_by_one.defvjp(_one_by_one_forward, _one_by_one_backward)


def _taken(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """A copy of each column's experts times the column."""
    count, flat = weights[0].shape[0], chosen.reshape(-1)
    is_one = (flat >= 0) & (flat < count)
    rows = rounded_to(x.T[jnp.arange(flat.size) % x.shape[1]], dtype)

    def of(weight: Array) -> Array:
        own = rounded_to(weight[jnp.where(is_one, flat, 0)], dtype)
        made = jnp.einsum(
            "poi,pi->op", own, rows, precision=precision_of(dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return jnp.where(is_one, made, 0).reshape(-1, *chosen.shape)

    return tuple(map(of, weights))


def _ragged(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """XLA's grouped product of columns that are sorted by their experts."""
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
        return jax.vjp(lambda weights, x: _xla_products(dtype, weights, x, chosen), weights, x)[1](
            grads
        )

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
