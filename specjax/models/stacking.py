"""How layers lie: as a stack that a loop runs, or with their matrices fused; when, made of layers,
and of leaves as they are loaded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels.platform import platform
from specjax.base.pytree import replace
from specjax.models.config import ModelConfig
from specjax.models.layer_weights import LayerWeights, fused_leaves
from specjax.models.placement import Placement
from specjax.models.transformer import Model


def can_stack(config: ModelConfig) -> bool:
    """Whether the layers are alike, so that a loop can run them: they attend in the same way, and
    all or none have experts.
    """
    layers = range(config.num_layers)
    return len({(config.kind_of(layer), config.has_experts(layer)) for layer in layers}) == 1


def stacked(model: Model) -> Model:
    """The same model with a stack of its layers; as it is if it has one, or they are not alike."""
    if not model.layers or not can_stack(model.config):
        return model

    def together(*own: Array) -> Array:
        made, placed = jnp.stack(own), _stacked_sharding(own[0])
        return made if placed is None else jax.device_put(made, placed)

    return replace(model, layers=(), stack=jax.tree.map(together, *model.layers))


def unstacked(model: Model) -> Model:
    """The same model with its layers one after the other."""
    stack = model.stack
    if stack is None:
        return model

    def layer(number: int) -> LayerWeights:
        return jax.tree.map(lambda x: x[number], stack)

    return replace(model, layers=tuple(map(layer, range(model.config.num_layers))), stack=None)


def stacks(config: ModelConfig) -> bool:
    """Whether a target of this shape has its layers stacked here.

    They are on a TPU, whose compiler takes a second or two for each dot of a program, and reads a
    layer of a stack where it lies. A CPU is fastest with a layer after the other; of GPUs it is not
    known.
    """
    return platform() == "tpu" and can_stack(config)


def fused(model: Model) -> Model:
    """The same model with each layer's matrices fused that can be."""
    return _each(model, LayerWeights.fused)


def as_stored(model: Model) -> Model:
    """The same model as files have it: a layer after the other, each matrix by itself."""
    return _each(unstacked(model), LayerWeights.unfused)


def _each(model: Model, change: Callable[[LayerWeights], LayerWeights]) -> Model:
    stack = None if model.stack is None else change(model.stack)
    return replace(model, layers=tuple(map(change, model.layers)), stack=stack)


def fuses(placed: Placement) -> bool:
    """Whether a model that lies so has its layers' matrices fused here.

    They are on a GPU, where a pass over few columns starts hundreds of kernels of some microseconds
    each, and these are three fewer of a layer. A CPU's products of alike matrices are one call
    anyway. Matrices that several devices share are split by rows, and stay as they are.
    """
    return platform() == "gpu" and placed.axis is None


def leaves_of_layers(
    placed: Placement, stack: bool = False, fuse: bool = True
) -> "OwnLeaves | StackedLeaves":
    """What collects the leaves of a model's layers; matrices are fused where that is faster."""
    count = placed.config.num_layers
    return StackedLeaves(count) if stack else OwnLeaves(count, fuse and fuses(placed))


class OwnLeaves:
    """The leaves of `count` layers, by layer; with `fuse` those of one are fused once they are
    there.
    """

    def __init__(self, count: int, fuse: bool = False) -> None:
        self.found: list[dict[str, Any]] = [{} for _ in range(count)]
        self._fuse = fuse

    def add(self, layer: int, leaves: Mapping[str, Any]) -> None:
        """Takes leaves of a layer."""
        found = {**self.found[layer], **leaves}
        self.found[layer] = fused_leaves(found) if self._fuse else found


class StackedLeaves:
    """The leaves of `count` layers, stacked: beside the stacks there is one layer's leaf."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.found: dict[str, Any] = {}

    def add(self, layer: int, leaves: Mapping[str, Any]) -> None:
        """Takes leaves of a layer, which are not to be used any more."""
        for name, leaf in leaves.items():
            if name not in self.found:
                self.found[name] = jax.tree.map(partial(_room, self._count), leaf)
            self.found[name] = _written(self.found[name], leaf, jnp.int32(layer))
            jax.block_until_ready(self.found[name])


def _room(count: int, leaf: Array) -> Array:
    """Zeros for so many leaves, which lie as one does."""
    placed = _stacked_sharding(leaf) or leaf.sharding
    return jnp.zeros((count, *leaf.shape), leaf.dtype, device=placed)


def _stacked_sharding(leaf: Array) -> NamedSharding | None:
    """How a stack of leaves lies that are on a mesh; None where they are on none."""
    placed = getattr(leaf, "sharding", None)
    if not isinstance(placed, NamedSharding) or not isinstance(placed.mesh, Mesh):
        return None
    return NamedSharding(placed.mesh, P(None, *placed.spec))


@partial(jax.jit, donate_argnums=0)
def _written(whole: Any, own: Any, layer: Array) -> Any:
    return jax.tree.map(lambda x, one: x.at[layer].set(one), whole, own)
