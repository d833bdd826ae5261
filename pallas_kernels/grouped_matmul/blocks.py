"""Rows in blocks, each of one group."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

_LEAST = 16
_MOST = 128
"""Rows of a block: the least of a product of 16 bits, and no more than one reading of a matrix
serves well."""


class Blocks(NamedTuple):
    """`P` rows, each of one group, in `U` blocks of `size` rows that are of one group each.

    Where `is_used` is 0 a block has no rows and `group` is the last one before, whose tile needs no
    copy; where groups are distinct, any. `row_of` are the rows in the order of the blocks, row 0
    where a block has room left; `place_of` is where a row is, any place where it is of no group
    (`is_placed`).
    """

    group: Int32[Array, " U"]
    is_used: Int32[Array, " U"]
    row_of: Int32[Array, " R"]
    place_of: Int32[Array, " P"]
    is_placed: Bool[Array, " P"]

    @property
    def size(self) -> int:
        """Rows of a block."""
        return len(self.row_of) // len(self.group)


def sizes_of_blocks(rows: int, groups: int) -> tuple[int, int]:
    """How many blocks so many rows may need, and rows of each."""
    size = min(max(pl.next_power_of_2(-(-rows // groups)), _LEAST), _MOST)
    return min(rows, groups + rows // size), size


def blocks_of(group: Int32[Array, " P"], groups: int, distinct: bool = False) -> Blocks:
    """Puts the rows of each group behind one another, from the start of a block on.

    By comparisons, which are a few kernels of a GPU where sorting is twenty.

    Args:
      group: that of each row, of a number that is none for rows to be left out.
      groups: how many there are.
      distinct: whether no two rows are of one group: a block each, as they come.
    """
    rows = len(group)
    is_placed = (group >= 0) & (group < groups)
    row = jnp.arange(rows, dtype=jnp.int32)
    if distinct:
        return Blocks(
            jnp.clip(group, 0, groups - 1), is_placed.astype(jnp.int32), jnp.repeat(row, _LEAST),
            row * _LEAST, is_placed,
        )  # fmt: skip
    most, size = sizes_of_blocks(rows, groups)
    own = jnp.where(is_placed, group, groups)
    number = jnp.arange(groups, dtype=jnp.int32)
    rank = ((own == own[:, None]) & (row < row[:, None])).sum(axis=1, dtype=jnp.int32)
    taken = -(-(own == number[:, None]).sum(axis=1, dtype=jnp.int32) // size)
    ends = jnp.where(number <= number[:, None], taken, 0).sum(axis=1, dtype=jnp.int32)
    begin = (ends - taken)[jnp.minimum(own, groups - 1)]
    place = jnp.where(is_placed, begin * size + rank, most * size)
    row_of = jnp.zeros(most * size, jnp.int32).at[place].set(row, mode="drop")
    block = jnp.arange(most, dtype=jnp.int32)
    last = jnp.maximum(ends[-1] - 1, 0)
    before = (ends <= jnp.minimum(block, last)[:, None]).sum(axis=1, dtype=jnp.int32)
    return Blocks(
        jnp.minimum(before, groups - 1), (block < ends[-1]).astype(jnp.int32), row_of,
        jnp.minimum(place, most * size - 1), is_placed,
    )  # fmt: skip
