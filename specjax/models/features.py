"""Hidden states of a target that a draft reads (see `specjax.models.config.Features`).

A slot of an EAGLE-3 head or of a layer of multi-token prediction holds a token's embedding beside
what the target made of the token before it; a node of a tree, whose parent the target has not read,
has what the draft made of the parent. DFlash's slots hold what the target made of their own token.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from specjax.models import layers
from specjax.models.config import CONTEXT, INPUT, Features

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
    if (way := _read_of(model).way) != INPUT:
        assert model.feature_projection is not None
        x = layers.linear(model.feature_projection, x, dtype)
    if way == CONTEXT:
        x = _normed(model, model.feature_norm, x)
    return x.T.reshape(*hidden.shape[:2], -1)


def joined(
    model: "Model",
    x: Float[Array, "E C"],
    features: Float[Array, "F C"],
    positions: Int32[Array, "1 C"],
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "E C"], Float[Array, "R C"] | None]:
    """What a layer's outputs are added to, and what its attention reads if that is not it, normed.

    `x` are the embeddings of tokens at `positions`; `dtype` is that of the matrix product.
    """
    read = _read_of(model)
    own = _normed(model, model.feature_norm, features)
    if read.way == INPUT:
        x = _normed(model, model.feature_token_norm, jnp.where(positions == 0, 0, x))
        assert model.feature_projection is not None
        return layers.linear(model.feature_projection, jnp.concatenate([own, x]), dtype), None
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
