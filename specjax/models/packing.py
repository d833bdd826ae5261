"""Columns of a pass over rows with unequal numbers of nodes: only those that exist."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Packing(NamedTuple):
    """The columns of a pass: `place[c]` is the node of column c, counted over all rows' slots.

    `column[b, t]` is the column of a row's node; nodes that do not exist have any column. Columns
    to spare repeat some node.
    """

    place: Int32[Array, " C"]
    column: Int32[Array, "B T"]

    @property
    def row(self) -> Int32[Array, " C"]:
        """The row of each column."""
        return self.place // self.column.shape[1]


def packing_of(exists: Bool[Array, "B T"], width: int) -> Packing:
    """The packing of the nodes that exist, in the order of rows, into `width` columns.

    No more than `width` may exist (checked by the caller on the host).
    """
    before = jnp.cumsum(exists.reshape(-1))
    place = (before <= jnp.arange(width)[:, None]).sum(axis=1, dtype=jnp.int32)
    place = jnp.minimum(place, before.shape[0] - 1)
    # One that does not exist has the column of the node before it, its own row's if that has any:
    # what another row holds, a NaN even, stays there.
    column = jnp.clip(before.reshape(exists.shape) - 1, 0, width - 1)
    return Packing(place, column.astype(jnp.int32))
