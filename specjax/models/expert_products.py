"""Matrices of experts times the columns that chose each."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int32

from pallas_kernels.cpu import cpu_experts, reference, share_a_call, unable
from pallas_kernels.dispatch import precision_of
from pallas_kernels.grouped_matmul import blocks_of, grouped_matmul
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


class OfLayer(NamedTuple):
    """The experts of one of the layers in a stack, which a kernel reads where they lie.

    A slice of the stack, which XLA reads in place, would be copied for a kernel: 0.4 GB for a
    matrix of a layer of Qwen3-30B-A3B.
    """

    stack: Float[Array, "L X _ I"]
    layer: Int32[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the layer's experts."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> jnp.dtype:
        """That of all."""
        return self.stack.dtype


def expert_linears(
    weights: Sequence[Float[Array, "X _ I"] | PackedWeight | OfLayer],
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
    if chosen.size < packed[0].shape[0]:
        packed, chosen = _taken(packed, chosen)
    return _products(tuple(_unpacked(weight, kind) for weight in packed), x, chosen, kind)


def by_block(
    weights: Float[Array, "X O I"] | None, x: Float[Array, "X I C"], dtype: jnp.dtype | None = None
) -> Float[Array, "X O C"]:
    """Each of some matrices times columns of its own, in float32 (see `layers.linear`)."""
    assert weights is not None
    kind, (count, inputs, columns) = computed_in(weights, dtype), x.shape
    assert len(weights) == count
    if platform() == "cpu":
        own = jnp.repeat(jnp.arange(count, dtype=jnp.int32), columns)[None]
        (made,) = expert_linears((weights,), jnp.moveaxis(x, 1, 0).reshape(inputs, -1), own, dtype)
        return jnp.moveaxis(made.reshape(-1, count, columns), 1, 0)
    dims = (((2,), (1,)), ((0,), (0,)))
    return lax.dot_general(
        weights.astype(kind), x.astype(kind), dims, precision=precision_of(kind),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _taken(
    weights: Sequence[PackedWeight], chosen: Int32[Array, "K C"]
) -> tuple[list[PackedWeight], Int32[Array, "K C"]]:
    """The codes of what each column chose alone, which are less to unpack than all of them."""
    flat, count = chosen.reshape(-1), weights[0].shape[0]
    is_one = (flat >= 0) & (flat < count)
    own = jnp.where(is_one, flat, 0)
    taken = [each.of_rows(lambda part: part[own]) for each in weights]
    number = jnp.where(is_one, jnp.arange(flat.size, dtype=jnp.int32), -1)
    return taken, number.reshape(chosen.shape)


def _unpacked(weight: PackedWeight, dtype: jnp.dtype) -> Float[Array, "X O I"]:
    def one(rows: dict[str, Array]) -> Array:
        return weight.changed(**rows).unpacked().astype(dtype)

    return jax.vmap(one)(weight.rows)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    weights: tuple[Any, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[Array, ...]:
    if platform() != "cpu":
        product = partial(_in_blocks, dtype)
    else:
        able = weights[0].dtype == dtype and unable(weights[0], x.shape[0], 1) is None
        if able and share_a_call(weights):
            return cpu_experts(weights, x, chosen, rounded=dtype == jnp.bfloat16)
        product = partial(_one_by_one, dtype)
    return sequential_vmap(product)(weights, x, chosen)  # neither has a `vmap` of its own


def _in_blocks(
    dtype: jnp.dtype,
    weights: tuple[Any, ...],
    x: Array,
    chosen: Array,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Columns in blocks of each expert (`pallas_kernels.grouped_matmul`)."""
    blocks = blocks_of(chosen.reshape(-1), weights[0].shape[0], distinct=chosen.shape[1] == 1)
    layer = weights[0].layer if isinstance(weights[0], OfLayer) else None
    weights = tuple(each.stack if isinstance(each, OfLayer) else each for each in weights)
    made = grouped_matmul(
        weights, rounded_to(x, dtype).T, blocks, layer=layer, implementation=implementation
    )
    return tuple(each.T.reshape(-1, *chosen.shape) for each in made)


def _one_by_one(
    dtype: jnp.dtype, weights: tuple[Array, ...], x: Array, chosen: Array
) -> tuple[Array, ...]:
    """One expert after the other times as many columns as `chosen` has, its own among them.

    XLA:CPU makes as many copies of the columns as there are experts for its grouped product, 0.3
    GiB for 4,096 of 2,048 inputs and 8 experts (jax 0.10.2).
    """

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


def _gradients_one_by_one(
    dtype: jnp.dtype,
    weights: tuple[Array, ...],
    x: Array,
    chosen: Array,
    grads: tuple[Array, ...],
) -> tuple[tuple[Array, ...], Array]:
    """Those of `_one_by_one`, which has none of its own: bits have no gradients."""

    def add(of_x: Array, expert: Array) -> tuple[Array, tuple[Array, ...]]:
        product = partial(_of_expert, dtype, chosen == expert)
        of_matrices, more = jax.vjp(product, _matrices(weights, expert), x)[1](grads)
        return of_x + more, of_matrices

    of_x, of_weights = lax.scan(add, jnp.zeros_like(x), jnp.arange(weights[0].shape[0]))
    return of_weights, of_x


def _gradients_in_blocks(
    dtype: jnp.dtype,
    weights: tuple[Any, ...],
    x: Array,
    chosen: Array,
    grads: tuple[Array, ...],
) -> tuple[tuple[Any, ...], Array]:
    """Those of XLA's grouped product, as kernels have none."""

    def product(weights: tuple[Any, ...], x: Array) -> tuple[Array, ...]:
        return _in_blocks(dtype, weights, x, chosen, "xla")

    return jax.vjp(product, weights, x)[1](grads)


def _products_forward(
    weights: tuple[Any, ...], x: Array, chosen: Array, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[tuple[Any, ...], Array, Array]]:
    return _products(weights, x, chosen, dtype), (weights, x, chosen)


def _products_backward(
    dtype: jnp.dtype, saved: tuple[tuple[Any, ...], Array, Array], grads: tuple[Array, ...]
) -> tuple[tuple[Any, ...], Array, None]:
    gradients = _gradients_one_by_one if platform() == "cpu" else _gradients_in_blocks
    return *sequential_vmap(partial(gradients, dtype))(*saved, grads), None


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
