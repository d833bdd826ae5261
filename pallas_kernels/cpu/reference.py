"""What the product is, in XLA's operations."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

MIDDLE = {8: 128, 4: 8}
"""The code of 0, by bits."""
GROUP_OF_COLUMNS = 32
"""Inputs of a column that share a scale."""
_LEAST = 1e-30


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


def quantized(x: Float[Array, "*lead I N"]) -> Float[Array, "*lead I N"]:
    """The numbers that columns stand for in 8 bits, a scale for each 32 inputs of one.

    The scale is the largest of them over 127. Where one of them is no number, none is; where all
    are below 1e-30 they are 0.
    """
    *lead, inputs, columns = x.shape
    short = [(0, 0)] * len(lead) + [(0, -inputs % GROUP_OF_COLUMNS), (0, 0)]
    groups = jnp.pad(x, short).reshape(*lead, -1, GROUP_OF_COLUMNS, columns)
    most = jnp.abs(groups).max(axis=-2, keepdims=True)
    is_whole, is_zero = jnp.isfinite(most), most < _LEAST
    inverse = jnp.where(is_zero | ~is_whole, 0, 127 / most)
    codes = jnp.rint(jnp.where(is_whole, groups, 0) * inverse)
    numbers = codes * jnp.where(is_whole, most / 127, jnp.nan)
    return numbers.reshape(*lead, -1, columns)[..., :inputs, :]


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
