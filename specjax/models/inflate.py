"""Growth of a model that keeps its function, to measure costs of sizes nobody trained."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.base.pytree import replace
from specjax.models.config import ModelConfig
from specjax.models.layer_weights import LayerWeights
from specjax.models.quantized import PackedWeight, quantized_as, widened
from specjax.models.stacking import as_stored, fused, stacked
from specjax.models.transformer import Model

_FORM = ("biases", "head_norms", "windows", "no_rope_layers", "sinks", "norm", "norms",
         "activation", "gated", "parallel", "rotary_dim", "window_theta", "query_scale",
         "attention_cap", "logit_cap", "embedding_scale", "position_offset", "experts",
         "residual_scale", "query_growth", "latent")  # fmt: skip


def inflate(model: Model, parameters: int) -> Model:
    """A model of about `parameters` weights with the logits of `model`, up to rounding.

    It is made wider by the largest whole factor that fits, then deeper by layers that add nothing
    until it is as close as it gets. No rounding of weights is involved, in any dtype. Layers that
    are stacked or fused are so again.

    Raises:
      ValueError: `model` has more weights than `parameters`, is not of LLaMA's form, or quantized.
    """
    model = widened(model)
    check_inflates(model, parameters)
    stack, fuse, model = model.is_stacked, model.is_fused, as_stored(model)
    factor = 1
    while _wider(model.config, factor + 1).num_parameters <= parameters:
        factor += 1
    made = deepen(widen(model, factor), parameters)
    made = fused(made) if fuse else made
    return stacked(made) if stack else made


def check_inflates(model: Model, parameters: int) -> None:
    """Checks that a model can be grown to `parameters` weights.

    Raises:
      ValueError: it has more of them, is not of LLaMA's form, or quantized.
    """
    if (name := quantized_as(model)) is not None:
        raise ValueError(f"the model's weights are quantized ({name}); it cannot be inflated.")
    before = model.config.num_parameters
    if parameters < before:
        raise ValueError(f"the model has {before} weights; it cannot be inflated to {parameters}.")
    _check_plain(model.config)


def grown(config: ModelConfig, factor: int, parameters: int) -> ModelConfig:
    """`factor` times as wide, and as deep as comes closest to `parameters` weights."""
    wider = _wider(config, factor)
    deeper = dataclasses.replace(wider, num_layers=wider.num_layers + 1)
    each = deeper.num_parameters - wider.num_parameters
    extra = max(0, round((parameters - wider.num_parameters) / each))
    return dataclasses.replace(wider, num_layers=wider.num_layers + extra)


def widen(model: Model, factor: int) -> Model:
    """`model` with `factor` times the width, heads and feed-forward width, the same function.

    The residual stream holds `factor` copies of the old one, so that its mean square stays; norms
    have weight 0 on all copies but the first, so matrices that read it may hold anything there
    and are tiled; matrices that write it read the first copy of the heads only. Old query heads
    come first and keep their key/value head.
    """
    if factor == 1:
        return model
    _check_plain(model.config)
    assert not isinstance(model.embedding, PackedWeight)
    assert not isinstance(model.unembedding, PackedWeight)
    return Model(
        embedding=jnp.tile(model.embedding, (1, factor)),
        layers=tuple(_wider_layer(weights, factor) for weights in model.layers),
        final_norm=_first_of(model.final_norm, factor),
        unembedding=None if model.unembedding is None else jnp.tile(model.unembedding, (1, factor)),
        config=_wider(model.config, factor),
    )


def deepen(model: Model, parameters: int) -> Model:
    """`model` with as many layers that add nothing as come closest to `parameters` weights.

    An added layer is a copy of a real one, in turn, whose output and down projections are zero.
    """
    config = model.config
    _check_plain(config)
    deeper = grown(config, 1, parameters)
    extra = deeper.num_layers - config.num_layers
    added = tuple(_idle(model.layers[index % config.num_layers]) for index in range(extra))
    return replace(model, layers=model.layers + added, config=deeper)


def _check_plain(config: ModelConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _FORM and value != field.default:
            raise ValueError(
                f"this {config.family} model has {field.name} {value!r}; only one with "
                f"{field.default!r}, as LLaMA's, can be inflated."
            )


def _wider(config: ModelConfig, factor: int) -> ModelConfig:
    return dataclasses.replace(
        config,
        hidden_size=config.hidden_size * factor,
        intermediate_size=config.intermediate_size * factor,
        num_heads=config.num_heads * factor,
        num_kv_heads=config.num_kv_heads * factor,
    )


def _wider_layer(weights: LayerWeights, factor: int) -> LayerWeights:
    def reads(matrix: Array | PackedWeight) -> Array:
        assert not isinstance(matrix, PackedWeight)
        return jnp.tile(matrix, (factor, factor))

    def writes(matrix: Array | PackedWeight) -> Array:
        assert not isinstance(matrix, PackedWeight)
        return jnp.tile(_first_of(matrix, factor), (factor, 1))

    assert weights.attention_norm is not None
    assert weights.query is not None
    assert weights.key is not None
    assert weights.value is not None
    assert weights.mlp_norm is not None
    assert weights.gate is not None
    assert weights.up is not None
    assert weights.down is not None
    return LayerWeights(
        attention_norm=_first_of(weights.attention_norm, factor),
        query=reads(weights.query),
        key=reads(weights.key),
        value=reads(weights.value),
        output=writes(weights.output),
        mlp_norm=_first_of(weights.mlp_norm, factor),
        gate=reads(weights.gate),
        up=reads(weights.up),
        down=writes(weights.down),
    )


def _first_of(x: Float[Array, "*rows E"], factor: int) -> Float[Array, "*rows wide"]:
    """`x`, followed along its last axis by `factor - 1` times as many zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] * (factor - 1))])


def _idle(weights: LayerWeights) -> LayerWeights:
    """A copy of a layer, in memory of its own, that adds nothing to the residual stream."""
    copy = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), weights)
    return replace(copy, output=jnp.zeros_like(copy.output), down=jnp.zeros_like(copy.down))
