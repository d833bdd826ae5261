"""Grouped products as XLA makes them.

XLA:TPU copies the matrices of all groups first, and XLA:GPU multiplies the rows of a group by those
of all (jax 0.10.2).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.dispatch import precision_of
from pallas_kernels.grouped_matmul.operands import Operands

_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""Rows `[R, I]`, those of a group beside each other, times its own matrix `[O, I]`."""


def grouped_matmul(at: Operands) -> tuple[Array, ...]:
    """See `api.grouped_matmul`; has gradients."""
    at = at.sliced()
    groups, size = len(at.weights[0]), at.blocks.size
    group = jnp.where(at.blocks.is_used > 0, at.blocks.group, groups)
    sizes = jnp.bincount(group, length=groups + 1)[:groups].astype(jnp.int32) * size
    order = jnp.argsort(group)  # of distinct groups as they come, too
    back = jnp.argsort(order)
    rows = at.rows.reshape(-1, size, at.rows.shape[1])[order].reshape(at.rows.shape)

    def of(weight: Array) -> Array:
        made = lax.ragged_dot_general(
            rows, weight.astype(rows.dtype), sizes, _BY_GROUP, precision=precision_of(rows.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return made.reshape(-1, size, made.shape[1])[back].reshape(made.shape)

    return tuple(map(of, at.weights))
