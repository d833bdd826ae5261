"""What the product is, in XLA's operations."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

MIDDLE = {8: 128, 4: 8}
"""The code of 0, by bits."""


def unpacked(
    codes: Num[Array, "*lead O B"], scale: Num[Array, "*lead O G"], inputs: int
) -> Float[Array, "*lead O I"]:
    """The numbers that codes stand for, of two in a byte the first in the lower bits."""
    bits = 8 * codes.shape[-1] // inputs
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
    groups = codes.reshape(*scale.shape, -1).astype(jnp.float32) - MIDDLE[bits]
    numbers = groups * scale.astype(jnp.float32)[..., None]
    return numbers.reshape(*scale.shape[:-1], inputs)


def is_scaled_after(codes: Num[Array, "*lead O B"], inputs: int) -> bool:
    """Whether it is products that are scaled: of 8 bits, whose codes bfloat16 holds exactly."""
    return codes.shape[-1] == inputs


def matmul(
    weights: Num[Array, "*lead O B"],
    x: Float[Array, "*lead I N"],
    scale: Num[Array, "*lead O G"] | None = None,
    *,
    rounded: bool = False,
) -> Float[Array, "*lead O N"]:
    """`weights @ x` in float32; `rounded` rounds both to bfloat16 first."""
    after = 1.0
    if scale is not None and is_scaled_after(weights, x.shape[-2]):
        weights, after = weights.astype(jnp.float32) - MIDDLE[8], scale.astype(jnp.float32)
    elif scale is not None:
        weights = unpacked(weights, scale, x.shape[-2])
    if rounded:  # and really so: XLA:CPU would fold the cast away
        weights, x = (lax.reduce_precision(each, 8, 7) for each in (weights, x))
    made = jnp.matmul(
        weights.astype(jnp.float32), x.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return after * made
