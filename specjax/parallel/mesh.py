"""Meshes: their axes, arrays over many devices, and what passes between devices.

A program over a mesh is one `shard_map`: every device runs what a single one would, on its own
rows (`data`), its own part of each layer of the target (`model`) and its own drafts (`draft`), and
what passes between devices is written where it happens (`all_sum`, `gathered`): two sums a layer,
and two means more where norms of heads span all of them (OLMo-2).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

AXES = DATA, MODEL, DRAFT = "data", "model", "draft"

ROWS = P(DATA)
"""How arrays with rows first are spread."""


def make_mesh(*, data: int = 1, model: int = 1, draft: int = 1) -> Mesh:
    """A mesh of the first devices there are, of all processes.

    Args:
      data: devices that share rows.
      model: devices that share each layer of the target (heads and features).
      draft: devices that share the drafts of a pool.

    Returns:
      The mesh, with these three axes.

    Raises:
      ValueError: there are too few devices, or a size is below 1.
    """
    sizes = {DATA: data, MODEL: model, DRAFT: draft}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name} is {size}; it must be at least 1.")
    needed, devices = data * model * draft, jax.devices()
    if needed > len(devices):
        shape = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"mesh {shape} needs {needed} devices; there are {len(devices)}.")
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:needed]
    )


def with_all_axes(mesh: Mesh | None) -> Mesh | None:
    """A mesh with the axes `data`, `model` and `draft`, those that it lacks of size 1.

    Raises:
      ValueError: it has an axis of another name.
    """
    if mesh is None:
        return None
    for name in mesh.axis_names:
        if name not in AXES:
            raise ValueError(f"a mesh has axes data, model and draft, not {name!r}.")
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    shape = [mesh.shape.get(name, 1) for name in AXES]
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def size_of(mesh: Mesh | None, axis: str) -> int:
    """Devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[axis]


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of several devices that the arrays of a tree lie on, if any of them does."""
    for leaf in jax.tree.leaves(tree):
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and placed.mesh.size > 1:
            assert isinstance(placed.mesh, Mesh)
            return placed.mesh
    return None


def put(value: Any, mesh: Mesh, spec: P) -> Array:
    """An array on a mesh, the same in every process."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(value), mesh, spec)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    held = np.asarray(value)
    placed = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(held.shape, placed, lambda index: held[index])


def settled(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with every array on the mesh: where it is, or else whole on all devices."""
    if mesh is None:
        return tree

    def settle(leaf: Any) -> Any:
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and placed.mesh == mesh:
            return leaf
        return put(leaf, mesh, P())

    return jax.tree.map(settle, tree)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the models of a program lie on a mesh. Hashable: it is part of what is compiled.

    `held` are the specs of each one's leaves, in order.
    """

    mesh: Mesh
    held: tuple[tuple[P, ...], ...]


def layout_of(target: Any, *drafters: Any) -> Layout | None:
    """How a target and drafters lie on the mesh of the target; None on a single device.

    Raises:
      ValueError: a drafter is on another mesh.
    """
    mesh, other = mesh_of(target), mesh_of(drafters)
    if mesh is None and other is None:
        return None
    if mesh is None or other not in (None, mesh):
        raise ValueError(f"the target is on {mesh} and the drafts are on {other}; they must agree.")

    def specs(tree: Any) -> tuple[P, ...]:
        placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
        return tuple(s.spec if isinstance(s, NamedSharding) else P() for s in placed)

    return Layout(mesh, tuple(map(specs, (target, *drafters))))


def shards_of(layout: Layout | None) -> int:
    """Over how many devices rows are spread."""
    return 1 if layout is None else size_of(layout.mesh, DATA)


def check_rows(layout: Layout | None, rows: int, what: str = "prompts") -> None:
    """Checks that the data axis takes as many rows, which a message calls so.

    Raises:
      ValueError: it does not divide them.
    """
    devices = shards_of(layout)
    if rows % devices:
        raise ValueError(f"mesh axis data={devices} does not divide {rows} {what}.")


def spread(
    layout: Layout | None, function: Callable[..., Any], held: Sequence[Any], specs: Any, out: Any
) -> Callable[..., Any]:
    """`function` of the models that are `held` and of more, each device on what it has of them.

    `specs` are those of the further arguments and `out` those of the result. Without a layout it
    is the function itself.
    """
    if layout is None:
        return function
    own = (
        jax.tree.unflatten(jax.tree.structure(tree), leaves)
        for tree, leaves in zip(held, layout.held, strict=True)
    )
    return jax.shard_map(
        function, mesh=layout.mesh, in_specs=(*own, *specs), out_specs=out, check_vma=False
    )


def laid_out(layout: Layout | None, tree: Any, spec: P) -> Any:
    """The tree's arrays on the mesh; as they are without a layout."""
    return tree if layout is None else jax.tree.map(lambda x: put(x, layout.mesh, spec), tree)


def everywhere(layout: Layout | None, tree: Any) -> Any:
    """The tree's arrays on every device, so that each process can read them."""
    if layout is None:
        return tree
    return lax.with_sharding_constraint(tree, NamedSharding(layout.mesh, P()))


def all_sum(x: Array, axis: str | None) -> Array:
    """The sum over the devices along `axis`; `x` itself where that is None."""
    return x if axis is None else lax.psum(x, axis)


def gathered(tree: Any, axis: str | None) -> Any:
    """The parts of all devices along `axis`, one after the other; as it is where that is None."""
    if axis is None:
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, axis, axis=0, tiled=True), tree)


def place_along(axis: str | None) -> Array | int:
    """The number of this device along `axis`; 0 where that is None."""
    return 0 if axis is None else lax.axis_index(axis)


def stacked(trees: Sequence[Any], mesh: Mesh | None, axis: str | None) -> Any:
    """Equal trees on a leading axis, which is spread over a mesh's `axis`."""

    def together(*trees: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    if mesh is None:
        return together(*trees)
    return jax.jit(together, out_shardings=NamedSharding(mesh, P(axis)))(*trees)
