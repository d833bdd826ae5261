"""What the product is, in XLA's operations."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

MIDDLE = {8: 128, 4: 8}
"""The code of 0, by bits."""


def unpacked(
    codes: Num[Array, "*lead O B"],
    scale: Num[Array, "*lead O G"],
    inputs: int,
    offset: Num[Array, "*lead O G"] | None = None,
) -> tuple[Float[Array, "*lead O I"], Float[Array, "*lead O 1"] | float]:
    """The numbers that codes stand for, of two in a byte the first in the lower bits.

    And what products with them are multiplied by: of 8 bits with a scale a row and no offset the
    scale, without which the numbers are whole ones that bfloat16 holds exactly.
    """
    bits = 8 * codes.shape[-1] // inputs
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
    groups = codes.reshape(*scale.shape, -1).astype(jnp.float32)
    wide = scale.astype(jnp.float32)
    if offset is not None:
        numbers = groups * wide[..., None] + offset.astype(jnp.float32)[..., None]
    elif bits == 8 and scale.shape[-1] == 1:
        return (groups - MIDDLE[bits]).reshape(*scale.shape[:-1], inputs), wide
    else:
        numbers = (groups - MIDDLE[bits]) * wide[..., None]
    return numbers.reshape(*scale.shape[:-1], inputs), 1.0


def matmul(
    weights: Num[Array, "*lead O B"],
    x: Float[Array, "*lead I N"],
    scale: Num[Array, "*lead O G"] | None = None,
    offset: Num[Array, "*lead O G"] | None = None,
    *,
    rounded: bool = False,
) -> Float[Array, "*lead O N"]:
    """`weights @ x` in float32; `rounded` rounds both to bfloat16 first."""
    after = 1.0
    if scale is not None:
        weights, after = unpacked(weights, scale, x.shape[-2], offset)
    if rounded:  # and really so: XLA:CPU would fold the cast away
        weights, x = (lax.reduce_precision(each, 8, 7) for each in (weights, x))
    made = jnp.matmul(
        weights.astype(jnp.float32), x.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return after * made
