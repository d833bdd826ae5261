"""What every implementation of tree attention is handed, and how a cache is made of 8 bits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, Num


class Prefix(NamedTuple):
    """The cached keys (stored transposed) and values of every row's first `length` tokens.

    The cache is pages of `S` slots: slot `s` of row `b` is slot `s % S` of page `pages[b, s // S]`.
    Where `pages` is None, page `b` is all that row `b` has. Rows may share pages. Entries for slots
    past a row's length may be any page. `scales`, for a cache of 8 bits, are what a slot's keys and
    values are to be multiplied by.
    """

    keys: Num[Array, "P K D S"]
    values: Num[Array, "P K S D"]
    length: Int[Array, " B"]
    scales: tuple[Float[Array, "P K S"], Float[Array, "P K S"]] | None = None
    pages: Int[Array, "B N"] | None = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.keys.shape[-1]

    @property
    def pages_a_row(self) -> int:
        """How many pages a row has."""
        return 1 if self.pages is None else self.pages.shape[1]

    @property
    def page_indices(self) -> Int32[Array, "B N"]:
        """The page table."""
        pages = jnp.arange(self.length.shape[0])[:, None] if self.pages is None else self.pages
        return pages.astype(jnp.int32)

    def taken(self) -> "Prefix":
        """The same with a copy of every row's pages, put together."""
        if self.pages is None:
            return self

        def row(held: Array, axis: int) -> Array:
            if self.pages_a_row == 1:
                return held[self.page_indices[:, 0]]
            parts = jnp.moveaxis(held[self.page_indices], 1, axis)
            return parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])

        scales = self.scales
        if scales is not None:
            scales = row(scales[0], 2), row(scales[1], 2)
        return Prefix(row(self.keys, 3), row(self.values, 2), self.length, scales)


class Operands(NamedTuple):
    """Queries of `T` nodes, the block they may see, the prefix, and what bounds and caps scores.

    Node t sees the prefix from slot `first[b, t]` on (from 0 where `first` is None); scores are
    capped to ±`soft_cap` by a tangent. `sinks` are a further score of each head that takes its
    share of the softmax and has no value.
    """

    query: Float[Array, "B H T D"]
    block_keys: Float[Array, "B K M D"]
    block_values: Float[Array, "B K M D"]
    tree_mask: Bool[Array, "B T M"]
    prefix: Prefix | None = None
    first: Int[Array, "B T"] | None = None
    soft_cap: float | None = None
    sinks: Float[Array, "B H"] | None = None

    @property
    def groups(self) -> int:
        """Query heads a key/value head."""
        return self.query.shape[1] // self.block_keys.shape[1]

    @property
    def slots(self) -> int:
        """Slots of a row's prefix."""
        return 0 if self.prefix is None else self.prefix.pages_a_row * self.prefix.page_size


def of_sequence(query: Array, keys: Array, values: Array, sinks: Array | None = None) -> Operands:
    """Operands of a plain sequence, whose `tree_mask` is None."""
    none: Any = None
    return Operands(query, keys, values, none, sinks=sinks)


def undivided(at: Operands, tile: int) -> str | None:
    """Why rows of several pages cannot be read in tiles of so many slots, or None."""
    if at.prefix is None or at.prefix.pages_a_row == 1 or at.prefix.page_size % tile == 0:
        return None
    return f"a page has {at.prefix.page_size} slots, which {tile} does not divide"


def folded(at: Operands) -> Float[Array, "B K G T D"]:
    """Scaled queries by the key/value head that they use, in the dtype of the block."""
    rows, heads, tokens, dim = at.query.shape
    scaled = (at.query * dim**-0.5).astype(at.block_keys.dtype)
    return scaled.reshape(rows, heads // at.groups, at.groups, tokens, dim)


def sinks_by_query(at: Operands, tokens: int) -> Float[Array, "B K Q 1"]:
    """The sink of every query of so many nodes, by the key/value head that it uses; float32."""
    assert at.sinks is not None
    own = at.sinks.astype(jnp.float32).reshape(len(at.sinks), -1, at.groups)
    return jnp.repeat(own, tokens, axis=2)[..., None]


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
