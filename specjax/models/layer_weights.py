"""The weights of one decoder layer, and its matrices times columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.base.pytree import pytree, replace
from specjax.models import layers
from specjax.models.expert_products import OfLayer
from specjax.models.quantized import PackedWeight
from specjax.parallel.mesh import all_sum

FUSED: Mapping[str, tuple[str, ...]] = {
    "query_key_value": ("query", "key", "value"),
    "gate_up": ("gate", "up"),
}
"""Matrices of the same columns that may be one, whose rows are theirs one after the other."""


@pytree
class LayerWeights:
    """One decoder layer; matrices are `[out, in]`, some packed. What a family has not is None.

    Attention reads `R` numbers of each token: `E`, or twice as many in a draft that reads features.
    One of latents has no `value`, and may make queries of `Q` numbers (see `latent_attention`).
    A layer of a mixture has a `router` of its `X` experts, of which a device may hold `Y`; its
    `gate`, `up` and `down` are the shared expert's. Matrices that are fused are None (see `FUSED`).
    """

    attention_norm: Float[Array, " E"] | None
    query: Float[Array, "QD R"] | PackedWeight | None
    key: Float[Array, "KD R"] | PackedWeight | None
    value: Float[Array, "KD R"] | PackedWeight | None
    output: Float[Array, "E HD"] | PackedWeight
    mlp_norm: Float[Array, " E"] | None
    gate: Float[Array, "F E"] | PackedWeight | None
    up: Float[Array, "F E"] | PackedWeight | None
    down: Float[Array, "E F"] | PackedWeight | None
    query_bias: Float[Array, " QD"] | None = None
    key_bias: Float[Array, " KD"] | None = None
    value_bias: Float[Array, " KD"] | None = None
    output_bias: Float[Array, " E"] | None = None
    gate_bias: Float[Array, " F"] | None = None
    up_bias: Float[Array, " F"] | None = None
    down_bias: Float[Array, " E"] | None = None
    query_norm: Float[Array, " N"] | None = None
    key_norm: Float[Array, " M"] | None = None
    attention_norm_bias: Float[Array, " E"] | None = None
    attention_post_norm: Float[Array, " E"] | None = None
    attention_post_norm_bias: Float[Array, " E"] | None = None
    mlp_norm_bias: Float[Array, " E"] | None = None
    mlp_post_norm: Float[Array, " E"] | None = None
    mlp_post_norm_bias: Float[Array, " E"] | None = None
    sinks: Float[Array, " H"] | None = None
    router: Float[Array, "X E"] | PackedWeight | None = None
    router_bias: Float[Array, " X"] | None = None
    correction_bias: Float[Array, " X"] | None = None
    expert_gate: Float[Array, "Y G E"] | PackedWeight | OfLayer | None = None
    expert_up: Float[Array, "Y G E"] | PackedWeight | OfLayer | None = None
    expert_down: Float[Array, "Y E G"] | PackedWeight | OfLayer | None = None
    expert_gate_bias: Float[Array, "Y G"] | None = None
    expert_up_bias: Float[Array, "Y G"] | None = None
    expert_down_bias: Float[Array, "Y E"] | None = None
    shared_gate: Float[Array, "1 E"] | PackedWeight | None = None
    query_down: Float[Array, "Q E"] | PackedWeight | None = None
    query_down_norm: Float[Array, " Q"] | None = None
    query_up: Float[Array, "QD Q"] | PackedWeight | None = None
    latent_norm: Float[Array, " L"] | None = None
    latent_key: Float[Array, "H L U"] | None = None
    latent_value: Float[Array, "H V L"] | None = None
    query_key_value: Float[Array, "A R"] | None = None
    gate_up: Float[Array, "B E"] | None = None

    @property
    def num_key_rows(self) -> int:
        """Rows of the matrix that makes keys."""
        if self.query_key_value is not None:
            first, second = _bounds(self, "query_key_value")
            return second - first
        assert self.key is not None
        return self.key.shape[-2]

    def fused(self) -> "LayerWeights":
        """The same with matrices fused that can be (see `fused_leaves`)."""
        return layer_of(fused_leaves(vars(self)))

    def unfused(self) -> "LayerWeights":
        """The same with each matrix by itself."""
        changes: dict[str, Array | None] = {}
        for name, parts in FUSED.items():
            if (whole := getattr(self, name)) is not None:
                own = jnp.split(whole, _bounds(self, name), axis=-2)
                changes |= {name: None} | dict(zip(parts, own, strict=True))
        return replace(self, **changes)


def layer_of(leaves: Mapping[str, Any]) -> LayerWeights:
    """A layer of named leaves."""
    names = ("attention_norm", "query", "key", "value", "mlp_norm", "gate", "up", "down")
    absent = dict.fromkeys(names)
    return LayerWeights(**{**absent, **leaves})


def fused_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a layer with matrices fused that are there, are no packed ones and of one type."""
    made = dict(leaves)
    for name, parts in FUSED.items():
        own = [part for each in parts if isinstance(part := made.get(each), jax.Array)]
        if len(own) == len(parts) and len({part.dtype for part in own}) == 1:
            made = {each: leaf for each, leaf in made.items() if each not in parts}
            made[name] = jnp.concatenate(own, axis=-2)
    return made


def _bounds(weights: LayerWeights, name: str) -> list[int]:
    """Where rows of each of fused matrices but the first begin."""
    if name == "gate_up":
        assert weights.down is not None
        return [weights.down.shape[-1]]
    queries = weights.output.shape[-1]  # as many as what heads give
    assert weights.query_key_value is not None
    return [queries, (queries + weights.query_key_value.shape[-2]) // 2]


def product(
    weights: LayerWeights, matrix: str, x: Array, dtype: jnp.dtype | None, axis: str | None = None
) -> Array:
    """A matrix of a layer times columns, and its bias if it has one.

    `axis` is the mesh axis that its inputs are spread over.
    """
    made = all_sum(layers.linear(getattr(weights, matrix), x, dtype), axis)
    return _biased(weights, matrix, made)


def products(
    weights: LayerWeights, matrices: Sequence[str], x: Array, dtype: jnp.dtype | None
) -> list[Array]:
    """Matrices of a layer, each times the same columns, with the bias that it has."""
    name = next((name for name, parts in FUSED.items() if parts == tuple(matrices)), None)
    if name is not None and (whole := getattr(weights, name)) is not None:
        made = layers.fused_linear(whole, x, _bounds(weights, name), dtype)
    else:
        made = layers.linears([getattr(weights, matrix) for matrix in matrices], x, dtype)
    return [_biased(weights, *each) for each in zip(matrices, made, strict=True)]


def _biased(weights: LayerWeights, matrix: str, made: Array) -> Array:
    bias = getattr(weights, f"{matrix}_bias", None)
    return made if bias is None else made + bias.astype(made.dtype)[:, None]
