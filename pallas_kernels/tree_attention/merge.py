"""Shares of the keys: how many, and how what they give is put together."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LEAST_SLOTS = 256


def splits_of(programs: int, slots: int, at_once: int) -> int:
    """How many shares of `slots` keys keep a GPU busy that runs `at_once` of so many `programs`."""
    return max(1, min(-(-at_once // programs), slots // _LEAST_SLOTS))


def partial(
    shape: tuple[int, ...], dim: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What programs write for `merged`, of shape `[B, K, P, R]`: a single share is the whole."""
    kind = dtype if shape[2] == 1 else jnp.float32
    return jax.ShapeDtypeStruct((*shape, dim), kind), jax.ShapeDtypeStruct(shape, jnp.float32)


def merged(
    mixed: Float[Array, "B K P R D"], lse: Float[Array, "B K P R"]
) -> Float[Array, "B K R D"]:
    """The attention over all keys, from that over each share and its scores' log-sum-exp.

    A share in which a query sees nothing has log-sum-exp -inf; one that sees nothing at all gives
    zeros.
    """
    if mixed.shape[2] == 1:
        return mixed[:, :, 0]
    top = lse.max(axis=2, keepdims=True)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=2)[..., None]
    summed = (mixed * weights[..., None]).sum(axis=2)
    return summed / jnp.where(total > 0, total, 1)
