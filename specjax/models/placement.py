"""How a model's weights lie on a mesh: logical axes, and the mesh axis that each is spread over."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from specjax.models.config import ModelConfig
from specjax.models.quantized import OF_GROUPS, PackedWeight
from specjax.parallel.mesh import MODEL, put, size_of, with_all_axes

MESH_AXES: Mapping[str, str] = {
    "heads": MODEL,
    "kv_heads": MODEL,
    "features": MODEL,
    "experts": MODEL,
    "vocabulary": MODEL,
}
"""Logical axes of weights, and the mesh axis that each is spread over."""

LEAF_AXES: Mapping[str, tuple[str | None, ...]] = {
    "embedding": ("vocabulary", None),
    "unembedding": ("vocabulary", None),
    "query": ("heads", None),
    "key": ("kv_heads", None),
    "value": ("kv_heads", None),
    "output": (None, "heads"),
    "gate": ("features", None),
    "up": ("features", None),
    "down": (None, "features"),
    "expert_gate": ("experts", None, None),
    "expert_up": ("experts", None, None),
    "expert_down": ("experts", None, None),
    "sinks": ("heads",),
    "query_up": ("heads", None),
    "latent_key": ("heads", None, None),
    "latent_value": ("heads", None, None),
    "expert_gate_bias": ("experts", None),
    "expert_up_bias": ("experts", None),
    "expert_down_bias": ("experts", None),
    "query_bias": ("heads",),
    "key_bias": ("kv_heads",),
    "value_bias": ("kv_heads",),
    "gate_bias": ("features",),
    "up_bias": ("features",),
}
"""Logical axes of a model's leaves; those that are not here are whole everywhere."""


WIDE = ("router", "correction_bias")
"""Leaves by which experts are chosen: those in float32 stay so, as others would be chosen else."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a model lies on a mesh.

    `config` is the model's with as many key/value heads as are held: where devices outnumber them,
    each is held `repeats` times. `axis` is the mesh axis that layers are split over, if any.
    """

    config: ModelConfig
    mesh: Mesh | None = None
    axis: str | None = None
    repeats: int = 1

    def spec(self, leaf: str) -> P:
        """How a leaf is spread."""
        axes = LEAF_AXES.get(leaf, ())
        if leaf in ("query_norm", "key_norm") and self.config.head_norms == "whole":
            axes = ("heads",)
        if "vocabulary" in axes and self.config.vocab_size % size_of(self.mesh, MODEL):
            axes = ()
        if self.axis is None:
            axes = ()
        return P(*(None if axis is None else MESH_AXES[axis] for axis in axes))

    def put(self, leaf: str, value: np.ndarray, dtype: Any, *, copy: bool = True) -> Array:
        """A leaf on its devices, rounded to `dtype` a shard at a time (see `WIDE`).

        Without `copy` a CPU may share the memory of `value`, which must not change then while the
        leaf is used.
        """
        if leaf in WIDE and value.dtype == np.float32:
            dtype = value.dtype
        if self.is_repeated(leaf):
            value = self._repeated(value)
        if self.mesh is None:
            made = jax.device_put(np.array(value, dtype, copy=copy or None))
        else:
            placed = NamedSharding(self.mesh, self.spec(leaf))
            made = jax.make_array_from_callback(
                value.shape, placed, lambda index: np.array(value[index], dtype)
            )
        return made.block_until_ready()

    def put_packed(
        self, leaf: str, weight: PackedWeight, dtype: Any, *, copy: bool = True
    ) -> PackedWeight:
        """A packed matrix on its devices; products with it are computed in `dtype`.

        For `copy` see `put`.

        Raises:
          ValueError: its groups cannot be spread over the devices.
        """
        if self.is_repeated(leaf):
            weight = weight.of_rows(self._repeated)
        rank = weight.values.ndim
        *first, inputs = (*self.spec(leaf), *(None,) * rank)[:rank]
        devices = 1 if inputs is None else size_of(self.mesh, inputs)
        groups = weight.scale.shape[-1]
        if devices > 1 and (weight.order is not None or (groups > 1 and groups % devices)):
            kind = "out of order" if weight.order is not None else f"of {weight.group} inputs"
            raise ValueError(
                f"{groups} groups {kind} of a matrix of {weight.shape[-1]} inputs cannot be spread "
                f"over {devices} devices."
            )
        of_groups = P(*first, inputs if groups > 1 else None)
        specs = {"values": P(*first, inputs)} | dict.fromkeys(OF_GROUPS, of_groups)
        made: dict[str, Any] = {
            name: self._put_as_is(part, specs.get(name, P()), copy)
            for name in ("values", *OF_GROUPS, "order", "table")
            if (part := getattr(weight, name)) is not None
        }
        return weight.changed(dtype=np.dtype(dtype), **made)

    def _put_as_is(self, value: np.ndarray, spec: P, copy: bool) -> Array:
        if self.mesh is None:
            return jax.device_put(np.array(value, copy=copy or None)).block_until_ready()
        return put(value, self.mesh, spec).block_until_ready()

    def is_repeated(self, leaf: str) -> bool:
        """Whether a leaf has key/value heads, each of which is held several times."""
        per_head = leaf == "key_norm" and self.config.head_norms == "head"
        return self.repeats > 1 and leaf.split("_")[0] in ("key", "value") and not per_head

    def once(self, value: Array) -> Array:
        """One copy of each head of a leaf that has each several times, spread if that divides."""
        spec = P() if value.shape[0] // self.repeats % size_of(self.mesh, MODEL) else P(MODEL)
        placed = None if self.mesh is None else NamedSharding(self.mesh, spec)
        return _first(value, self.config.num_kv_heads // self.repeats, self.repeats, placed)

    def _repeated(self, value: np.ndarray) -> np.ndarray:
        heads = self.config.num_kv_heads // self.repeats
        parts = value.reshape(heads, -1, *value.shape[1:])
        return np.repeat(parts, self.repeats, axis=0).reshape(-1, *value.shape[1:])


@partial(jax.jit, static_argnames=("heads", "repeats", "placed"))
def _first(value: Array, heads: int, repeats: int, placed: NamedSharding | None) -> Array:
    """Of each of `heads` that come `repeats` times the first."""
    parts = value.reshape(heads, repeats, -1, *value.shape[1:])
    made = parts[:, 0].reshape(-1, *value.shape[1:])
    return made if placed is None else lax.with_sharding_constraint(made, placed)


def placement(config: ModelConfig, mesh: Mesh | None, split: bool = True) -> Placement:
    """How a model of `config` is `split` over the `model` axis of a mesh, or whole on all of it.

    Raises:
      ValueError: the axis does not divide its heads, key/value heads or features.
    """
    mesh = with_all_axes(mesh)
    devices = size_of(mesh, MODEL)
    if not split or devices == 1:
        return Placement(config, mesh)
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"a draft that knows {config.draft_vocab_size} of {config.vocab_size} tokens is not "
            f"split over mesh axis model={devices}; load_drafts gives drafts that are whole."
        )
    for what, count in _divided(config):
        if count % devices:
            raise ValueError(
                f"mesh axis model={devices} does not divide the model's {count} {what}."
            )
    kv_heads = config.num_kv_heads
    if kv_heads % devices and devices % kv_heads:
        raise ValueError(
            f"mesh axis model={devices} and the model's {kv_heads} key/value heads do not divide "
            "one another."
        )
    repeats = max(1, devices // kv_heads)
    held = dataclasses.replace(config, num_kv_heads=kv_heads * repeats)
    return Placement(held, mesh, MODEL, repeats)


def _divided(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """What the devices of a mesh axis must divide."""
    yield "heads", config.num_heads
    if not all(map(config.has_experts, range(config.num_layers))):
        yield "features", config.intermediate_size
    if config.experts is not None:
        yield "experts", config.experts.num_experts
        yield "features of the shared expert", config.experts.shared_size
