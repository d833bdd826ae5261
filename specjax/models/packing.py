"""How the nodes of rows lie in the columns of a pass: all slots, or those alone that exist.

`generate` passes over every slot of every row (`Unpacked`); a server's rows have trees of unequal
sizes, and some none, so that its passes are over the nodes that exist (`Packing`). What a step does
with columns is said once, by the methods that both have.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Unpacked(NamedTuple):
    """A column for every slot of every row, one row after the other; `B` rows of `T` slots."""

    @property
    def has_every_slot(self) -> bool:
        """Whether each slot has a column, so that more slots are more columns."""
        return True

    def num_columns(self, rows: int, slots: int) -> int:
        """How many columns there are of so many rows and slots of each."""
        return rows * slots

    def pack(self, x: Array) -> Array:
        """The columns `[E, C]` of all rows' slots `[E, B·T]`."""
        return x

    def unpack(self, x: Array) -> Array:
        """The rows' slots `[E, B·T]` of columns `[E, C]`."""
        return x

    def by_column(self, x: Array, rows: int, slots: int) -> Array:
        """Columns `[E, C]` as what follows has them: `[B, T, E]`, without those to spare."""
        return x.T.reshape(rows, -1, x.shape[0])[:, :slots]

    def of_rows(self, tree: Any) -> Any:
        """What each column's row has, of arrays with rows first."""
        return tree

    def of_nodes(self, x: Array) -> Array:
        """What each column's node has, of an array `[B, T, ...]`: as `by_column` lies."""
        return x

    def by_node(self, x: Array) -> Array:
        """An array `[B, T, ...]` of one that lies as `by_column`."""
        return x

    def at(self, x: Array, nodes: Int32[Array, "B W"]) -> Array:
        """What some nodes of each row have, `[B, W, V]`, of an array that lies as `by_column`."""
        return jnp.take_along_axis(x, nodes[:, :, None], axis=1)

    def looked_up(self, x: Array) -> tuple[Array, Callable[[Array], Any]]:
        """An array with rows first, and what makes of one row's part a function of its nodes.

        `x` lies as `by_column`; the function gives a node's own entry.
        """
        return x, lambda own: own.__getitem__


UNPACKED = Unpacked()


class Widened(Unpacked):
    """The only column of a pass, beside one that nothing reads.

    Of the norm of several columns XLA:GPU makes one kernel, and three of a single one's. A product
    takes as long for both.
    """

    def num_columns(self, rows: int, slots: int) -> int:
        """One more than there are slots."""
        return rows * slots + 1

    def pack(self, x: Array) -> Array:
        """The column, and zeros."""
        return jnp.pad(x, ((0, 0), (0, 1)))

    def unpack(self, x: Array) -> Array:
        """The column alone."""
        return x[:, :-1]


WIDENED = Widened()


class Packing(NamedTuple):
    """The columns of a pass: `place[c]` is the node of column c, counted over all rows' slots.

    `column[b, t]` is the column of a row's node; nodes that do not exist have any column. Columns
    to spare repeat some node. See `Unpacked` for what its methods give: here arrays lie
    `[C, 1, ...]` by column.
    """

    place: Int32[Array, " C"]
    column: Int32[Array, "B T"]

    @property
    def has_every_slot(self) -> bool:
        """Whether each slot has a column: those of nodes that exist have one."""
        return False

    @property
    def row(self) -> Int32[Array, " C"]:
        """The row of each column."""
        return self.place // self.column.shape[1]

    def num_columns(self, rows: int, slots: int) -> int:
        """How many columns there are."""
        del rows, slots
        return self.place.shape[0]

    def pack(self, x: Array) -> Array:
        """The columns of all rows' slots."""
        return x[:, self.place]

    def unpack(self, x: Array) -> Array:
        """The rows' slots of columns."""
        return x[:, self.column.reshape(-1)]

    def by_column(self, x: Array, rows: int, slots: int) -> Array:
        """Columns as what follows has them, `[C, 1, E]`."""
        del rows, slots
        return x.T[:, None]

    def of_rows(self, tree: Any) -> Any:
        """What each column's row has."""
        return jax.tree.map(lambda x: x[self.row], tree)

    def of_nodes(self, x: Array) -> Array:
        """What each column's node has."""
        return x.reshape(-1, 1, *x.shape[2:])[self.place]

    def by_node(self, x: Array) -> Array:
        """What each row's nodes have."""
        return x[:, 0][self.column]

    def at(self, x: Array, nodes: Int32[Array, "B W"]) -> Array:
        """What some nodes of each row have."""
        return x[:, 0][jnp.take_along_axis(self.column, nodes, axis=1)]

    def looked_up(self, x: Array) -> tuple[Array, Callable[[Array], Any]]:
        """The columns of each row's nodes, and what looks them up."""
        return self.column, lambda own: lambda node: x[own[node], 0]


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
