"""A LLaMA-shaped decoder as pure functions of a pytree of weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.tree_attention import Prefix, tree_attention
from specjax import layers
from specjax.cache import KVCache, NewKV
from specjax.config import ModelConfig
from specjax.pytree import pytree, static

Angles = tuple[Array, Array]


@pytree
class LayerWeights:
    """One decoder layer; matrices are `[out, in]`. What a family has not is None."""

    attention_norm: Float[Array, " E"]
    query: Float[Array, "HD E"]
    key: Float[Array, "KD E"]
    value: Float[Array, "KD E"]
    output: Float[Array, "E HD"]
    mlp_norm: Float[Array, " E"]
    gate: Float[Array, "F E"]
    up: Float[Array, "F E"]
    down: Float[Array, "E F"]
    query_bias: Float[Array, " HD"] | None = None
    key_bias: Float[Array, " KD"] | None = None
    value_bias: Float[Array, " KD"] | None = None
    output_bias: Float[Array, " E"] | None = None
    gate_bias: Float[Array, " F"] | None = None
    up_bias: Float[Array, " F"] | None = None
    down_bias: Float[Array, " E"] | None = None
    query_norm: Float[Array, " D"] | None = None
    key_norm: Float[Array, " D"] | None = None


@pytree
class Model:
    """Weights of a decoder with its static `config`; `unembedding` is None when tied."""

    embedding: Float[Array, "V E"]
    layers: tuple[LayerWeights, ...]
    final_norm: Float[Array, " E"]
    unembedding: Float[Array, "V E"] | None
    config: ModelConfig = static()


def initialize(key: Array, config: ModelConfig, dtype: jnp.dtype = jnp.dtype("float32")) -> Model:
    """Random weights: normal with deviation 0.02, output projections scaled by 1/sqrt(2·layers).

    Biases are 0.
    """
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    out_scale = 0.02 / (2 * config.num_layers) ** 0.5
    keys = iter(jax.random.split(key, 2 + 7 * config.num_layers))
    norms = ("query_norm", "key_norm") if config.head_norms else ()

    def normal(rows: int, columns: int, scale: float = 0.02) -> Array:
        return scale * jax.random.normal(next(keys), (rows, columns), dtype)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=jnp.ones(d, dtype),
            query=normal(config.num_heads * h, d),
            key=normal(config.num_kv_heads * h, d),
            value=normal(config.num_kv_heads * h, d),
            output=normal(d, config.num_heads * h, out_scale),
            mlp_norm=jnp.ones(d, dtype),
            gate=normal(f, d),
            up=normal(f, d),
            down=normal(d, f, out_scale),
            **{f"{name}_bias": jnp.zeros(config.rows_of(name), dtype) for name in config.biases},
            **{name: jnp.ones(h, dtype) for name in norms},
        )

    return Model(
        embedding=normal(config.vocab_size, d),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=jnp.ones(d, dtype),
        unembedding=None if config.tie_embeddings else normal(config.vocab_size, d),
        config=config,
    )


class Sight(NamedTuple):
    """What the tokens of a pass see in a layer.

    `visible` are columns of the pass, as in `forward`; `first` is the first slot of the cached
    prefix that a token sees, None for slot 0; `window` how many tokens up to its own a token of a
    plain sequence sees, None for all.
    """

    visible: Bool[Array, "B T M"] | None
    first: Int32[Array, "B T"] | None = None
    window: int | None = None


def sight_of(
    window: int | None,
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    visible: Bool[Array, "B T M"] | None,
) -> Sight:
    """What is seen through a window: a token's own position and the `window - 1` before it.

    Raises:
      ValueError: nodes of earlier passes, of which positions are not known, may lie outside.
    """
    if window is None or visible is None:
        return Sight(visible, None, window)
    tokens, columns = visible.shape[1:]
    if columns > tokens and columns > window:
        raise ValueError(
            f"a draft with a sliding window of {window} cannot grow a tree of {columns} nodes."
        )
    if columns == tokens:
        depth = visible.sum(axis=2)
        visible = visible & (depth[:, :, None] - depth[:, None] < window)
    return Sight(visible, None if cache is None else positions - (window - 1))


def attend(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    angles: Angles,
    sight: Sight,
    prefix: Prefix | None,
    block: tuple[Array, Array] | None,
    dtype: jnp.dtype | None,
) -> tuple[Float[Array, "HD C"], tuple[Array, Array]]:
    """Attention of one layer before its output projection, and the pass's keys and values."""
    rows, tokens = angles[0].shape[1:]

    def heads(matrix: str) -> Array:
        made = _product(weights, matrix, x, dtype).reshape(-1, config.head_dim, rows, tokens)
        norm = getattr(weights, f"{matrix}_norm", None)
        return made if norm is None else layers.rms_norm(norm, made, config.norm_eps, axis=1)

    query = layers.rotate(heads("query"), angles).transpose(2, 0, 3, 1)
    key = layers.rotate(heads("key"), angles).transpose(2, 0, 3, 1)
    value = heads("value").transpose(2, 0, 3, 1)
    if prefix is not None:  # a node's keys round as they will in the cache, where others read them
        key, value = key.astype(prefix.keys.dtype), value.astype(prefix.values.dtype)
    new = (key, value)
    if block is not None:
        key = jnp.concatenate([block[0], key], axis=2)
        value = jnp.concatenate([block[1], value], axis=2)
    mixed = tree_attention(
        query, key, value, sight.visible, prefix, first=sight.first, window=sight.window
    )
    return mixed.transpose(1, 3, 0, 2).reshape(-1, rows * tokens), new


def apply_layer(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    angles: Angles,
    sight: Sight,
    prefix: Prefix | None = None,
    block: tuple[Array, Array] | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "E C"], tuple[Array, Array]]:
    """One decoder layer over flat columns, and the keys and values `[B, K, T, D]` it made."""
    normed = layers.rms_norm(weights.attention_norm, x, config.norm_eps)
    mixed, new = attend(config, weights, normed, angles, sight, prefix, block, dtype)
    x = x + _product(weights, "output", mixed, dtype)
    normed = layers.rms_norm(weights.mlp_norm, x, config.norm_eps)
    hidden = jax.nn.silu(_product(weights, "gate", normed, dtype))
    hidden = hidden * _product(weights, "up", normed, dtype)
    return x + _product(weights, "down", hidden, dtype), new


def _product(weights: LayerWeights, matrix: str, x: Array, dtype: jnp.dtype | None) -> Array:
    """A matrix of a layer times columns, and its bias if it has one."""
    made = layers.linear(getattr(weights, matrix), x, dtype)
    bias = getattr(weights, f"{matrix}_bias")
    return made if bias is None else made + bias.astype(made.dtype)[:, None]


@jax.named_scope("pass")
def trunk(
    model: Model,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    visible: Bool[Array, "B T M"] | None,
    block: NewKV | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "E C"], NewKV]:
    """All layers: the normed hidden columns (`C = B·T`, row-major) and the new keys and values."""
    config = model.config
    x = layers.embed(model.embedding, tokens)
    angles = layers.rotary_angles(
        positions, config.head_dim, config.rope_theta, config.rope_stretch
    )
    windows = config.windows or (None,) * config.num_layers
    sights = {window: sight_of(window, positions, cache, visible) for window in set(windows)}
    made = []
    for index, weights in enumerate(model.layers):
        prefix = None
        if cache is not None:
            prefix = Prefix(cache.keys[index], cache.values[index], cache.length)
        earlier = None if block is None else block[index]
        sight = sights[windows[index]]
        x, new = apply_layer(config, weights, x, angles, sight, prefix, earlier, dtype)
        made.append(new)
    return layers.rms_norm(model.final_norm, x, config.norm_eps), tuple(made)


@jax.named_scope("pass")
def unembed(
    model: Model, x: Float[Array, "E C"], dtype: jnp.dtype | None = None
) -> Float[Array, "V C"]:
    """Logits of each column, float32."""
    table = model.embedding if model.unembedding is None else model.unembedding
    return layers.linear(table, x, dtype)


def forward(
    model: Model,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    visible: Bool[Array, "B T M"] | None,
    block: NewKV | None = None,
) -> tuple[Float[Array, "B T V"], NewKV]:
    """Logits after each token, and the keys and values of this pass (the cache is only read).

    A token sees the cached prefix of its row up to `cache.length`, and the columns of the pass
    that `visible` grants it: first those of `block` (an earlier pass of the same tree), then the
    pass's own; `visible=None` is a plain sequence without cache. `positions` place tokens for the
    rotary embedding; slots play no part in it.
    """
    x, new = trunk(model, tokens, positions, cache, visible, block)
    logits = unembed(model, x).T.reshape(*tokens.shape, -1)
    return logits, new
