"""The feed-forward part of a decoder layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models import layers
from specjax.models.config import ModelConfig
from specjax.models.experts import mixture
from specjax.models.layer_weights import LayerWeights, product, products
from specjax.parallel.mesh import all_sum


def mlp(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    dtype: jnp.dtype | None = None,
    axis: str | None = None,
) -> tuple[Float[Array, "E C"], Float[Array, "F C"] | None]:
    """The feed-forward part of a layer for columns `x`, and the features that enter `down`, if any.

    `down · act(up · x)`, or where the family is gated `down · (act(gate · x) * (up · x))`; of a
    layer with experts what they give (see `Experts`), and so much more of one that is shared.
    Matrices are multiplied in `dtype`, by default their own; `axis` is the mesh axis that the
    features `F` and the experts are spread over, if any.
    """
    if weights.router is None:
        hidden = _hidden(config, weights, x, dtype)
        return product(weights, "down", hidden, dtype, axis), hidden
    made, hidden = with_shared(config, weights, x, mixture(config, weights, x, dtype, axis), dtype)
    return all_sum(made, axis), hidden


def with_shared(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    made: Float[Array, "E C"],
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "E C"], Float[Array, "F C"] | None]:
    """What experts gave columns `x`, with what a shared one gives, and its features, if any."""
    if weights.up is None and weights.gate_up is None:
        return made, None
    hidden = _hidden(config, weights, x, dtype)
    shared = product(weights, "down", hidden, dtype)
    if weights.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(layers.linear(weights.shared_gate, x, dtype))
    return made + shared, hidden


def _hidden(
    config: ModelConfig, weights: LayerWeights, x: Float[Array, "E C"], dtype: jnp.dtype | None
) -> Float[Array, "F C"]:
    first, *rest = products(weights, ("gate", "up") if config.gated else ("up",), x, dtype)
    hidden = layers.activated(config.activation, first)
    return hidden * rest[0] if rest else hidden
