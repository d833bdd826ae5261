"""What every implementation of tree attention is handed, and how a cache is made of 8 bits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, Num


class Prefix(NamedTuple):
    """The cached keys (stored transposed) and values of every row's first `length` tokens.

    `scales`, for a cache of 8 bits, are what a slot's keys and values are to be multiplied by.
    `rows` says which rows of a larger cache these are; None stands for all, in order.
    """

    keys: Num[Array, "R K D S"]
    values: Num[Array, "R K S D"]
    length: Int[Array, " B"]
    scales: tuple[Float[Array, "R K S"], Float[Array, "R K S"]] | None = None
    rows: Int[Array, " B"] | None = None

    @property
    def row_indices(self) -> Int32[Array, " B"]:
        """Which rows of the cache these are, one by one."""
        rows = jnp.arange(self.length.shape[0]) if self.rows is None else self.rows
        return rows.astype(jnp.int32)

    def taken(self) -> "Prefix":
        """The same with a copy of the rows that these are of a larger cache."""
        if self.rows is None:
            return self
        scales = self.scales
        if scales is not None:
            scales = scales[0][self.rows], scales[1][self.rows]
        return Prefix(self.keys[self.rows], self.values[self.rows], self.length, scales)


class Operands(NamedTuple):
    """Queries of `T` nodes, the block they may see, the prefix, and what bounds and caps scores.

    Node t sees the prefix from slot `first[b, t]` on (from 0 where `first` is None); scores are
    capped to ±`soft_cap` by a tangent.
    """

    query: Float[Array, "B H T D"]
    block_keys: Float[Array, "B K M D"]
    block_values: Float[Array, "B K M D"]
    tree_mask: Bool[Array, "B T M"]
    prefix: Prefix | None = None
    first: Int[Array, "B T"] | None = None
    soft_cap: float | None = None

    @property
    def groups(self) -> int:
        """Query heads a key/value head."""
        return self.query.shape[1] // self.block_keys.shape[1]

    @property
    def slots(self) -> int:
        """Slots of the prefix."""
        return 0 if self.prefix is None else self.prefix.keys.shape[-1]


def of_sequence(query: Array, keys: Array, values: Array) -> Operands:
    """Operands of a plain sequence, whose `tree_mask` is None."""
    none: Any = None
    return Operands(query, keys, values, none)


def folded(at: Operands) -> Float[Array, "B K G T D"]:
    """Scaled queries by the key/value head that they use, in the dtype of the block."""
    rows, heads, tokens, dim = at.query.shape
    scaled = (at.query * dim**-0.5).astype(at.block_keys.dtype)
    return scaled.reshape(rows, heads // at.groups, at.groups, tokens, dim)


def seen_values(at: Operands) -> Float[Array, "B K M D"]:
    """The block's values, zero in columns that no query attends to, whatever they held."""
    return jnp.where(at.tree_mask.any(axis=1)[:, None, :, None], at.block_values, 0)


def quantized(
    x: Float[Array, "..."], axis: int = -1
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """`x` in 8 bits, and the float32 scale of each of its vectors along `axis`.

    The largest entry of a vector becomes ±127; a vector of zeros has scale 0.
    """
    scale = jnp.abs(x).max(axis=axis).astype(jnp.float32) / 127
    turned = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    rounded = jnp.round(x.astype(jnp.float32) * jnp.expand_dims(turned, axis))
    return rounded.astype(jnp.int8), scale
