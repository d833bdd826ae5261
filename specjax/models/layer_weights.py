"""The weights of one decoder layer, and its matrices times columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.base.pytree import pytree
from specjax.models import layers
from specjax.models.expert_products import OfLayer
from specjax.models.quantized import PackedWeight
from specjax.parallel.mesh import all_sum


@pytree
class LayerWeights:
    """One decoder layer; matrices are `[out, in]`, some packed. What a family has not is None.

    Attention reads `R` numbers of each token: `E`, or twice as many in a draft that reads features.
    One of latents has no `value`, and may make queries of `Q` numbers (see `latent_attention`).
    A layer of a mixture has a `router` of its `X` experts, of which a device may hold `Y`; its
    `gate`, `up` and `down` are the shared expert's.
    """

    attention_norm: Float[Array, " E"] | None
    query: Float[Array, "QD R"] | PackedWeight | None
    key: Float[Array, "KD R"] | PackedWeight
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


def layer_of(leaves: Mapping[str, Any]) -> LayerWeights:
    """A layer of named leaves."""
    absent = dict.fromkeys(("attention_norm", "query", "value", "mlp_norm", "gate", "up", "down"))
    return LayerWeights(**{**absent, **leaves})


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
    made = layers.linears([getattr(weights, matrix) for matrix in matrices], x, dtype)
    return [_biased(weights, *each) for each in zip(matrices, made, strict=True)]


def _biased(weights: LayerWeights, matrix: str, made: Array) -> Array:
    bias = getattr(weights, f"{matrix}_bias", None)
    return made if bias is None else made + bias.astype(made.dtype)[:, None]
