"""Layers as a stack that a loop runs: when, made of layers, and of leaves as they are loaded."""

from collections.abc import Mapping
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
from specjax.models.layer_weights import LayerWeights
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


def leaves_of_layers(count: int, stack: bool) -> "OwnLeaves | StackedLeaves":
    """What collects the leaves of `count` layers."""
    return StackedLeaves(count) if stack else OwnLeaves(count)


class OwnLeaves:
    """The leaves of `count` layers, by layer."""

    def __init__(self, count: int) -> None:
        self.found: list[dict[str, Any]] = [{} for _ in range(count)]

    def add(self, layer: int, leaves: Mapping[str, Any]) -> None:
        """Takes leaves of a layer."""
        self.found[layer] |= leaves


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
