"""A model's weights as Orbax keeps them: by shards, each process its own, on any mesh."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from specjax.base.pytree import replace
from specjax.models.config import ModelConfig, Shape
from specjax.models.placement import Placement
from specjax.models.stacking import as_stored, leaves_of_layers
from specjax.models.transformer import Model, assemble
from specjax.parallel.mesh import mesh_of

FOLDER = "weights.orbax"
"""Where they lie beside the configuration."""


def once(model: Model) -> Model:
    """The model with every key/value head once, as its checkpoint has it, its layers apart."""
    model = as_stored(model)
    placement = Placement(model.config, mesh_of(model), model.axis, model.repeats)
    names = [name for name in model.config.layer_shapes(0) if placement.is_repeated(name)]
    if not names:
        return model
    layers = tuple(
        replace(layer, **{name: placement.once(getattr(layer, name)) for name in names})
        for layer in model.layers
    )
    return replace(model, layers=layers, config=model.stored_config, repeats=1)


def save(model: Model, folder: Path) -> None:
    """Writes the weights; every process that holds some calls it.

    Raises:
      ValueError: weights are there already.
    """
    ocp = orbax()
    held = {
        "outer": {name: getattr(model, name) for name in model.config.outer_shapes},
        "layers": [
            {name: getattr(each, name) for name in model.config.layer_shapes(number)}
            for number, each in enumerate(model.layers)
        ],
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / FOLDER).absolute(), held)


def restore(
    folder: Path, whole: ModelConfig, placement: Placement, dtype: jnp.dtype, stack: bool = False
) -> Model:
    """The weights that `save` wrote of a model of config `whole`, each shard read where it is to
    lie.

    Key and value heads that are to be held several times are read whole, and of a table of
    positions all are, though fewer may be held. With `stack` the layers are stacked.

    Raises:
      ValueError: the weights are not those of the configuration.
    """
    ocp = orbax()
    config, mesh = placement.config, placement.mesh

    def leaf(name: str, shape: Shape) -> Any:
        spec = placement.spec(name)
        if placement.is_repeated(name):
            shape, spec = (shape[0] // placement.repeats, *shape[1:]), P()
        alone = SingleDeviceSharding(jax.local_devices()[0])
        lies = alone if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)

    def leaves(shapes: Mapping[str, Shape]) -> dict[str, Any]:
        return {name: leaf(name, shape) for name, shape in shapes.items()}

    wanted = {
        "outer": leaves(whole.outer_shapes),
        "layers": [leaves(config.layer_shapes(layer)) for layer in range(config.num_layers)],
    }
    at = (folder / FOLDER).absolute()
    found: Any
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check(wanted, checkpointer.metadata(at).item_metadata)
            found = checkpointer.restore(at, wanted)
    except (ValueError, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:  # what its libraries raise has no type of its own
        raise ValueError(str(error).partition(" See full")[0]) from error
    if not bool(_finite(found)):
        raise ValueError("weights hold NaN or infinity.")
    for name, shape in config.outer_shapes.items():
        if found["outer"][name].shape != shape:
            found["outer"][name] = found["outer"][name][: shape[0]]
    for one in found["layers"]:
        for name in filter(placement.is_repeated, one):
            one[name] = placement.put(name, np.asarray(one[name]), dtype)
    layers = leaves_of_layers(placement, stack)
    for number in reversed(range(config.num_layers)):
        layers.add(number, found["layers"].pop())
    return assemble(config, found["outer"], layers.found, placement.axis, placement.repeats)


@jax.jit
def _finite(tree: Any) -> Any:
    """Whether all numbers are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def orbax() -> Any:
    """The library.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ValueError(
            "weights by shards need orbax-checkpoint; install specjax[train]."
        ) from error


def _check(wanted: Any, there: Any) -> None:
    """Checks that exactly the arrays that are wanted are there, of their shapes."""

    def shapes(tree: Any) -> dict[str, Shape]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
        return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
                for path, leaf in leaves}  # fmt: skip

    asked, held = shapes(wanted), shapes(getattr(there, "tree", there))
    for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(there, "tree", there)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"{name} is {leaf.dtype}; weights must be floating-point numbers.")
    for name in sorted({*asked, *held}):
        if asked.get(name) != held.get(name):
            raise ValueError(
                f"{name} has shape {held.get(name)} there; the configuration asks for "
                f"{asked.get(name)}."
            )
