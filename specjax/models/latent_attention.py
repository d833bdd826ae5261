"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed.

All heads share one key/value head, whose features are those that a token's latent is and, first,
those that are rotated: a head's part of the matrix that would make its keys of latents goes into
its query instead, and the part that would make its values comes behind attention. So the cache
holds a latent for each token, whatever the heads are, and attention is as everywhere. Values are
the keys before rotation, whose first features are left out behind attention.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models import layers
from specjax.models.config import Latent, ModelConfig
from specjax.models.expert_products import by_block
from specjax.models.layer_weights import LayerWeights, product, products

_EPSILON = 1e-6
"""Of the norms of latents, whatever that of the other norms is."""


def projected(
    config: ModelConfig,
    latent: Latent,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    dtype: jnp.dtype | None,
) -> list[Float[Array, "_ C"]]:
    """Queries, keys and values of columns, the features that are to be rotated first in each
    head.
    """
    first = "query" if latent.query_rank is None else "query_down"
    query, key = products(weights, (first, "key"), x, dtype)
    if latent.query_rank is not None:
        query = _normed(weights.query_down_norm, query)
        query = product(weights, "query_up", query, dtype)
    columns, turned = query.shape[1], config.rotated
    heads = query.reshape(-1, turned + latent.unrotated, columns)
    absorbed = by_block(weights.latent_key, heads[:, turned:], dtype)
    query = jnp.concatenate([heads[:, :turned], absorbed], axis=1).reshape(-1, columns)
    key = jnp.concatenate([key[:turned], _normed(weights.latent_norm, key[turned:])])
    return [query, key, key]


def values_of(
    config: ModelConfig,
    weights: LayerWeights,
    mixed: Float[Array, "HD C"],
    dtype: jnp.dtype | None,
) -> Float[Array, "HV C"]:
    """What heads make of the latents that attention mixed."""
    columns = mixed.shape[1]
    heads = mixed.reshape(-1, config.head_dim, columns)[:, config.rotated :]
    return by_block(weights.latent_value, heads, dtype).reshape(-1, columns)


def _normed(weight: Array | None, x: Float[Array, "N C"]) -> Float[Array, "N C"]:
    assert weight is not None
    return layers.normed("rms", weight, None, x, _EPSILON)
