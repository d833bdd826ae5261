"""Hidden states of a target that a draft reads (EAGLE-3, arXiv 2503.01840, section 3.1).

A slot of such a draft holds a token's embedding beside what the target made of the token before it;
a node of a tree, whose parent the target has not read, has what the draft made of the parent.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models import layers
from specjax.models.config import Features

if TYPE_CHECKING:
    from specjax.models.transformer import Model


def projected(
    model: "Model", hidden: Float[Array, "B T F"], dtype: jnp.dtype | None = None
) -> Float[Array, "B T E"]:
    """What a draft reads of hidden states, one behind the other as its `config.features` names.

    `dtype` is that of the matrix product.
    """
    x = hidden.reshape(-1, hidden.shape[-1]).T
    if model.feature_input_norm is not None:
        x = _normed(model, model.feature_input_norm, x)
    if model.feature_norms is not None:
        parts = zip(jnp.split(x, len(model.feature_norms)), model.feature_norms, strict=True)
        x = jnp.concatenate([_normed(model, weight, part) for part, weight in parts])
    assert model.feature_projection is not None
    return layers.linear(model.feature_projection, x, dtype).T.reshape(*hidden.shape[:2], -1)


def joined(
    model: "Model", x: Float[Array, "E C"], features: Float[Array, "E C"]
) -> tuple[Float[Array, "E C"], Float[Array, "R C"]]:
    """What a layer's outputs are added to, and what its attention reads."""
    read = _read_of(model)
    own = _normed(model, model.feature_norm, features)
    entering = jnp.concatenate([_normed(model, model.layers[0].attention_norm, x), own])
    return own if read.normed_residual else features, entering


def handed_on(
    model: "Model", out: Float[Array, "E C"], normed: Float[Array, "E C"]
) -> Float[Array, "E C"]:
    """What stands for the target's features below a node: what left its layer, perhaps normed."""
    return normed if _read_of(model).normed_output else out


def _read_of(model: "Model") -> Features:
    assert model.config.features is not None
    return model.config.features


def _normed(model: "Model", weight: Array | None, x: Array) -> Array:
    assert weight is not None
    return layers.normed(model.config.norm, weight, None, x, model.config.norm_eps)
