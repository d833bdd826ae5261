"""The feed-forward part of a decoder layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.config import ModelConfig
from specjax.models.layer_weights import LayerWeights, product, products


def mlp(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    dtype: jnp.dtype | None = None,
    axis: str | None = None,
) -> tuple[Float[Array, "E C"], Float[Array, "F C"]]:
    """The feed-forward part of a layer for columns `x`, and the features that enter `down`.

    `down · act(up · x)`, or where the family is gated `down · (act(gate · x) * (up · x))`. Matrices
    are multiplied in `dtype`, by default their own; `axis` is the mesh axis that the features `F`
    are spread over, if any.
    """
    first, *rest = products(weights, ("gate", "up") if config.gated else ("up",), x, dtype)
    hidden = _activated(config.activation, first)
    if rest:
        hidden = hidden * rest[0]
    return product(weights, "down", hidden, dtype, axis), hidden


def _activated(kind: str, x: Float[Array, "F C"]) -> Float[Array, "F C"]:
    """The activation of that name in `ACTIVATIONS`."""
    if kind == "silu":
        return jax.nn.silu(x)
    return jax.nn.relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=kind == "gelu_tanh")
