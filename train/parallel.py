"""Data-parallel training: weights everywhere, every device its share of a batch's rows."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_T = TypeVar("_T")


class Spread:
    """How a run lies on the devices that are there; on a single one nothing is placed at all.

    The axis of the mesh is `data`. Rows that the devices do not divide are computed on all.
    """

    def __init__(self) -> None:
        devices = jax.devices()
        self._mesh = Mesh(np.array(devices), ("data",)) if len(devices) > 1 else None

    def uneven(self, tree: Any) -> str:
        """A sentence where the devices do not divide a leaf's rows; else nothing."""
        leaves = jax.tree.leaves(tree)
        rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, np.ndarray)}
        bad = sorted(n for n in rows if self._mesh is not None and n % self._mesh.size)
        if not bad or self._mesh is None:
            return ""
        return (
            f"{' and '.join(map(str, bad))} rows are not a multiple of {self._mesh.size} devices: "
            "every device computes all of them."
        )

    def everywhere(self, tree: _T) -> _T:
        """`tree` on every device."""
        if self._mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def rows(self, tree: _T) -> _T:
        """`tree` with the first axis of the host's leaves split over the devices."""
        if self._mesh is None:
            return tree
        mesh = self._mesh

        def place(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return leaf
            even = leaf.shape[0] % mesh.size == 0
            return jax.device_put(
                leaf, NamedSharding(mesh, PartitionSpec("data") if even else PartitionSpec())
            )

        return jax.tree.map(place, tree)

    def together(self, tree: _T) -> _T:
        """`tree` back on the default device."""
        if self._mesh is None:
            return tree
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)
