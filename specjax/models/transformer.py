"""A decoder as pure functions of a pytree of weights."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.platform import platform
from pallas_kernels.tree_attention import Prefix, tree_attention
from specjax.base.pytree import pytree, replace, static, unchecked
from specjax.models import latent_attention, layers
from specjax.models.config import (
    EXPERT_MATRICES,
    LATENT_MATRICES,
    LATENT_PRODUCTS,
    MATRICES,
    ROUTERS,
    LayerKind,
    ModelConfig,
    Shape,
)
from specjax.models.expert_cache import ExpertCache
from specjax.models.expert_products import OfLayer
from specjax.models.features import joined
from specjax.models.kv_cache import KVCache, NewKV, cache_dtype, in_slots, read_before_write
from specjax.models.layer_weights import FUSED, LayerWeights, layer_of, product, products
from specjax.models.mlp import mlp
from specjax.models.packing import UNPACKED, WIDENED, Packing, Unpacked
from specjax.models.quantized import PackedWeight
from specjax.models.rope import Stretch
from specjax.parallel.mesh import all_sum, gathered

Angles = tuple[Array, Array]
_PROJECTIONS = ("query", "key", "value")

PROMPT_BLOCK = 128
"""Columns of a prompt that are read or unembedded at a time."""

_LONG_PROMPT = 512
"""Tokens past which a CPU reads prompts in blocks, as far as they go: the programs are for a few
lengths, of which the next may be half as long again."""


def reads_in_blocks(tokens: int) -> bool:
    """Whether prompts of so many tokens, with padding, are read in blocks by unrolled layers."""
    return tokens > _LONG_PROMPT and platform() == "cpu"


@pytree
class Model:
    """Weights of a decoder with its static `config`; `unembedding` is None when tied.

    Its `layers` are one after the other, or else in a `stack`, each leaf of which has a first axis
    of layers: then a pass is a loop over them, and a program is as long for any number of layers.

    Within a program over a mesh the leaves are a device's own; `axis` is the mesh axis over which
    heads, features and the vocabulary are spread, None where each device has all of them.
    `config` counts the key/value heads that are held, `repeats` times as many as the checkpoint's.

    `row_of` says which row of its tables a token has, where they have fewer rows than there are
    tokens (see `specjax.models.pruning`): the last one is of all that have none of their own. A
    draft that reads hidden states of its target (`config.features`) has embeddings of all of them.

    Where its layers come from is asked of it alone (`is_whole`, `is_offloaded`, `layer`, ...): see
    `specjax.models.streamed` for models whose layers are not in memory.
    """

    embedding: Float[Array, "V E"] | PackedWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Float[Array, " E"]
    unembedding: Float[Array, "D E"] | PackedWeight | None
    config: ModelConfig = static()
    final_norm_bias: Float[Array, " E"] | None = None
    position_embedding: Float[Array, "P E"] | None = None
    stack: LayerWeights | None = None
    row_of: Int32[Array, " U"] | None = None
    feature_projection: Float[Array, "E F"] | PackedWeight | None = None
    feature_norm: Float[Array, " T"] | None = None
    feature_input_norm: Float[Array, " F"] | None = None
    feature_norms: Float[Array, "k T"] | None = None
    feature_token_norm: Float[Array, " E"] | None = None
    axis: str | None = static(default=None)
    repeats: int = static(default=1)

    @property
    def stored_config(self) -> ModelConfig:
        """Its configuration in a checkpoint, where every key/value head is once."""
        heads = self.config.num_kv_heads // self.repeats
        return dataclasses.replace(self.config, num_kv_heads=heads)

    @property
    def kv_heads(self) -> int:
        """How many key/value heads are here."""
        if not self.layers and self.stack is None:
            return self.config.num_kv_heads
        first = self.layers[0] if self.stack is None else self.stack
        return first.num_key_rows // self.config.head_dim

    @property
    def is_stacked(self) -> bool:
        """Whether a pass is a loop over its layers."""
        return self.stack is not None

    @property
    def is_fused(self) -> bool:
        """Whether matrices of its layers are fused."""
        first = self.layers[0] if self.layers else self.stack
        return first is not None and any(getattr(first, name) is not None for name in FUSED)

    @property
    def is_whole(self) -> bool:
        """Whether a program may take it whole; else each layer of a pass is a program."""
        return True

    @property
    def is_offloaded(self) -> bool:
        """Whether passes read layers or experts from disk or from the host's memory."""
        return False

    @property
    def expert_cache(self) -> ExpertCache | None:
        """Where experts come from that are read when they are taken."""
        return None

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads of what is not in memory."""
        return 0

    @property
    def held_bytes(self) -> int | None:
        """Bytes of its weights in memory where its leaves do not say them."""
        return None

    @property
    def outer(self) -> "Model":
        """What lies outside its layers."""
        return replace(self, layers=(), stack=None)

    @property
    def resident(self) -> "Model":
        """What of it stays in memory, as a pytree."""
        return self

    def layer(self, index: int) -> LayerWeights:
        """A layer's weights, within `in_pass` and in order; valid until the one after the next.

        Raises:
          ValueError: it could not be read.
        """
        if self.stack is None:
            return self.layers[index]
        return jax.tree.map(lambda leaf: leaf[index], self.stack)

    def in_pass(self) -> "contextlib.AbstractContextManager[None]":
        """Keeps other threads from taking layers while a pass over all of them does."""
        return contextlib.nullcontext()


def assemble(
    config: ModelConfig,
    outer: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    axis: str | None = None,
    repeats: int = 1,
) -> Model:
    """A model of named leaves: those outside its layers, and those of each layer or of all."""
    if isinstance(layers, Mapping):
        absent = dict.fromkeys(field.name for field in dataclasses.fields(LayerWeights))
        stack, made = unchecked(LayerWeights, **{**absent, **layers}), ()
    else:
        stack, made = None, tuple(map(layer_of, layers))
    whole = {"unembedding": None, **outer}
    return Model(**whole, layers=made, config=config, stack=stack, axis=axis, repeats=repeats)


def initialize(key: Array, config: ModelConfig, dtype: jnp.dtype = jnp.dtype("float32")) -> Model:
    """Random weights: normal with deviation 0.02, output projections scaled by 1/sqrt(2·layers).

    Biases are 0 and norms do nothing. A draft of some tokens knows the first ones. One that has its
    target's embedding, or unembedding, has a row in its place.
    """
    out_scale = 0.02 / (2 * config.num_layers) ** 0.5
    kinds = MATRICES if config.experts is None else (*MATRICES, *EXPERT_MATRICES, *ROUTERS)
    if config.latent is not None:
        kinds = (*kinds, *LATENT_MATRICES, *LATENT_PRODUCTS)
    keys = iter(jax.random.split(key, 2 + len(kinds) * config.num_layers))

    def leaf(name: str, shape: Shape) -> Array:
        if len(shape) == 1 or name == "feature_norms" or name.endswith("_bias"):
            zero = name.endswith("_bias") or name == "sinks" or config.norm.startswith("offset")
            return jnp.zeros(shape, dtype) if zero else jnp.ones(shape, dtype)
        scale = out_scale if name in ("output", "down", "expert_down") else 0.02
        others = ("position_embedding", "feature_projection")
        own = jax.random.fold_in(key, others.index(name)) if name in others else next(keys)
        return scale * jax.random.normal(own, shape, dtype)

    def leaves(shapes: Mapping[str, Shape]) -> dict[str, Array]:
        return {name: leaf(name, shape) for name, shape in shapes.items()}

    outer = config.outer_shapes
    first = leaves({"embedding": outer.pop("embedding", (1, config.hidden_size))})
    layers = [leaves(config.layer_shapes(layer)) for layer in range(config.num_layers)]
    made = first | leaves(outer)
    if config.draft_vocab_size is not None:
        tokens = jnp.arange(config.vocab_size, dtype=jnp.int32)
        made["row_of"] = jnp.minimum(tokens, config.draft_vocab_size)
    return assemble(config, made, layers)


class AttentionMask(NamedTuple):
    """What the tokens of a pass see in a layer.

    `tree_mask` are columns of the pass, as in `forward`; `first` is the first slot of the cached
    prefix that a token sees, None for slot 0; `window` how many tokens up to its own a token of a
    plain sequence sees, None for all.
    """

    tree_mask: Bool[Array, "B T M"] | None
    first: Int32[Array, "B T"] | None = None
    window: int | None = None


def attention_mask_of(
    window: int | None,
    positions: Int32[Array, "B T"],
    cache: KVCache | Prefix | None,
    tree_mask: Bool[Array, "B T M"] | None,
) -> AttentionMask:
    """What is seen through a window: a token's own position and the `window - 1` before it.

    Nodes of earlier passes are seen as `tree_mask` says: a tree that is grown in several may be no
    deeper than the window (see `specjax.draft.limits.check_depth`).
    """
    if window is None or tree_mask is None:
        return AttentionMask(tree_mask, None, window)
    tokens, columns = tree_mask.shape[1:]
    if columns == tokens:
        depth = tree_mask.sum(axis=2)
        tree_mask = tree_mask & (depth[:, :, None] - depth[:, None] < window)
    return AttentionMask(tree_mask, None if cache is None else positions - (window - 1))


class Group(NamedTuple):
    """How some of a pass's columns attend: those of `B` rows with `T` tokens each.

    `angles` are those of the tokens' positions; `prefix` are the rows in the layer's cache and
    `block` keys and values of earlier passes of the same trees. Queries are multiplied by
    `query_growth`, where there is one.
    """

    angles: Angles
    mask: AttentionMask
    prefix: Prefix | None = None
    block: tuple[Array, Array] | None = None
    packing: Packing | Unpacked = UNPACKED
    query_growth: Float[Array, "B T"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens of each."""
        rows, tokens = self.angles[0].shape[1:]
        return rows, tokens

    @property
    def num_columns(self) -> int:
        """Of the pass."""
        return self.packing.num_columns(*self.shape)


def attend(
    model: Model,
    weights: LayerWeights,
    x: Float[Array, "R C"],
    groups: Sequence[Group],
    dtype: jnp.dtype | None,
) -> tuple[Float[Array, "HD C"], tuple[tuple[Array, Array], ...]]:
    """Attention of one layer before its output projection, and each group's keys and values.

    The columns are those of the groups, one after the other; packed ones are put back into rows.
    """
    bounds = np.cumsum([group.num_columns for group in groups])[:-1]
    latent = model.config.latent
    if latent is None:
        every = products(weights, _PROJECTIONS, x, dtype)
    else:
        every = latent_attention.projected(model.config, latent, weights, x, dtype)
    made = (jnp.split(own, bounds, axis=1) for own in every)
    found = [
        _attend(model, weights, own, group)
        for own, group in zip(zip(*made, strict=True), groups, strict=True)
    ]
    mixed = [each for each, _ in found]
    new = [own for _, own in found]
    in_place = any(each.prefix is not None and each.prefix.pages is not None for each in groups)
    for each in mixed if in_place else ():
        new = [read_before_write(each, own) for own in new]
    columns = [
        group.packing.pack(_columns_of(each)) for each, group in zip(mixed, groups, strict=True)
    ]
    read = jnp.concatenate(columns, axis=1)
    if latent is not None:
        read = latent_attention.values_of(model.config, weights, read, dtype)
    return read, tuple(new)


def _columns_of(mixed: Float[Array, "B H T D"]) -> Float[Array, "HD B*T"]:
    """What heads give, as columns; on a GPU features stay side by side (see `fused_linear`)."""
    count = mixed.shape[0] * mixed.shape[2]
    if platform() == "gpu":
        return mixed.transpose(0, 2, 1, 3).reshape(count, -1).T
    return mixed.transpose(1, 3, 0, 2).reshape(-1, count)


def _attend(
    model: Model, weights: LayerWeights, made: Sequence[Array], group: Group
) -> tuple[Float[Array, "B H T D"], tuple[Array, Array]]:
    """What a group's tokens take from those that they see, and their keys and values."""
    config, block = model.config, group.block
    query, key, value = (
        _heads(model, weights, matrix, own, group)
        for matrix, own in zip(_PROJECTIONS, made, strict=True)
    )
    if config.query_scale is not None:  # attention itself scales by the root of the head's size
        query = query * (config.query_scale * config.head_dim**0.5)
    # A token's keys round as they will in the cache, where others read them.
    prefix, mask = group.prefix, group.mask
    kind = cache_dtype(model.embedding.dtype) if prefix is None else prefix.keys.dtype
    key, value = key.astype(kind), value.astype(kind)
    if weights.sinks is not None and mask.tree_mask is None and platform() == "gpu":
        # XLA would keep query, key and value of all layers, one product in float32, for the cache.
        key, value = lax.optimization_barrier((key, value))
    new = (key, value)
    if block is not None:
        key = jnp.concatenate([block[0], key], axis=2)
        value = jnp.concatenate([block[1], value], axis=2)
    mixed = tree_attention(
        query, key, value, mask.tree_mask, prefix,
        first=mask.first, soft_cap=config.attention_cap, window=mask.window, sinks=weights.sinks,
    )  # fmt: skip
    return mixed, new


def _heads(
    model: Model, weights: LayerWeights, matrix: str, made: Array, group: Group
) -> Float[Array, "B H T D"]:
    """A product with a matrix of `_PROJECTIONS` by head, normed and rotated as that wants it."""
    config, (rows, tokens) = model.config, group.shape
    made = group.packing.unpack(made)
    normed, per_head = matrix != "value" and config.head_norms, config.head_norms == "head"
    if normed and not per_head:
        made = _norm(config, weights, f"{matrix}_norm", made, across=model.axis)
    made = made.reshape(-1, config.head_dim, rows, tokens)
    axis, by_head = 1, (2, 0, 3, 1)
    if platform() == "gpu":  # features stay side by side (see `fused_linear`)
        made, axis, by_head = made.transpose(2, 3, 0, 1), 3, (0, 2, 1, 3)
    if normed and per_head:
        made = _norm(config, weights, f"{matrix}_norm", made, axis=axis)
    made = made if matrix == "value" else layers.rotate(made, group.angles, axis)
    made = made.transpose(by_head)
    if matrix == "query" and group.query_growth is not None:
        made = made * group.query_growth[:, None, :, None]
    return made


def context_of(
    model: Model,
    features: Float[Array, "B T E"],
    positions: Int32[Array, "B T"],
    dtype: jnp.dtype | None = None,
) -> NewKV:
    """Keys and values of what is all that a draft's layers see of a text (see `Features`).

    `features` are those of tokens at `positions`; `dtype` is that of the matrix products.
    """
    x, kind = features.reshape(-1, features.shape[-1]).T, cache_dtype(model.embedding.dtype)
    made = []
    for index, weights in enumerate(model.layers):
        kind_of = model.config.kind_of(index)
        group = group_of(model.config, kind_of, positions)
        own = zip(_PROJECTIONS[1:], products(weights, _PROJECTIONS[1:], x, dtype), strict=True)
        key, value = (_heads(model, weights, *each, group).astype(kind) for each in own)
        made.append((key, value))
    return tuple(made)


def apply_layer(
    model: Model,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    groups: Sequence[Group],
    dtype: jnp.dtype | None = None,
    inputs: dict[str, Array] | None = None,
    entering: Float[Array, "R C"] | None = None,
) -> tuple[Float[Array, "E C"], tuple[tuple[Array, Array], ...]]:
    """One decoder layer over flat columns, and the keys and values `[B, K, T, D]` of each group.

    `entering` is what attention reads, by default the columns normed. `inputs`, where given, takes
    the columns that matrices are multiplied with: those of "query" are the key's and the value's
    too, and those of "up" the gate's.
    """
    at = before_mlp(model, weights, x, groups, dtype, entering)
    made, hidden = mlp(model.config, weights, at.entering, dtype, model.axis)
    if inputs is not None:
        inputs |= {"query": at.seen, "output": at.mixed}
        inputs |= {"up": at.entering} | ({} if hidden is None else {"down": hidden})
    return after_mlp(model.config, weights, at.x, made), at.new


class BeforeMlp(NamedTuple):
    """A layer up to its feed-forward part: what was added so far, and what that part reads.

    `seen` and `mixed` are what the matrices of attention were multiplied with; `new` are the keys
    and values of each group.
    """

    x: Float[Array, "E C"]
    entering: Float[Array, "E C"]
    seen: Float[Array, "R C"]
    mixed: Float[Array, "HD C"]
    new: tuple[tuple[Array, Array], ...]


def before_mlp(
    model: Model,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    groups: Sequence[Group],
    dtype: jnp.dtype | None = None,
    entering: Float[Array, "R C"] | None = None,
) -> BeforeMlp:
    """The attention of a layer (see `apply_layer`)."""
    config, before = model.config, x
    seen = normed(config, weights, "attention_norm", x) if entering is None else entering
    mixed, new = attend(model, weights, seen, groups, dtype)
    made = product(weights, "output", mixed, dtype, model.axis)
    x = x + _added(config, weights, "attention_post_norm", made)
    if config.parallel and "mlp_norm" not in config.norms:
        return BeforeMlp(x, seen, seen, mixed, new)
    entering = normed(config, weights, "mlp_norm", before if config.parallel else x)
    return BeforeMlp(x, entering, seen, mixed, new)


def after_mlp(
    config: ModelConfig, weights: LayerWeights, x: Float[Array, "E C"], made: Float[Array, "E C"]
) -> Float[Array, "E C"]:
    """What leaves a layer whose feed-forward part `made` that."""
    return x + _added(config, weights, "mlp_post_norm", made)


def normed(config: ModelConfig, weights: LayerWeights, name: str, x: Array) -> Array:
    """As a norm of a layer leaves it, if it has that."""
    return _norm(config, weights, name, x) if name in config.norms else x


def _added(config: ModelConfig, weights: LayerWeights, name: str, made: Array) -> Array:
    """What a part of a layer adds, normed by its own norm and scaled."""
    made = normed(config, weights, name, made)
    return made if config.residual_scale == 1 else config.residual_scale * made


def _norm(
    config: ModelConfig,
    weights: LayerWeights | Model,
    name: str,
    x: Array,
    axis: int = 0,
    across: str | None = None,
) -> Array:
    leaf, bias = getattr(weights, name), getattr(weights, f"{name}_bias", None)
    return layers.normed(config.norm, leaf, bias, x, config.norm_eps, axis, across)


class Pass(NamedTuple):
    """What all layers make of columns: them, normed by `trunk`, and the pass's keys and values.

    `hidden` are the hidden states that were asked for, in that order; `beside` is the same of the
    columns of other rows.
    """

    x: Float[Array, "E C"]
    new: NewKV
    hidden: tuple[Float[Array, "E C"], ...]
    beside: "Pass | None" = None


class Columns(NamedTuple):
    """Columns of a pass: the tokens of rows of a cache, and what each of them sees of its row's."""

    tokens: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]
    cache: KVCache | None
    tree_mask: Bool[Array, "B T M"] | None
    packing: Packing | Unpacked = UNPACKED


@jax.named_scope("pass")
def trunk(
    model: Model,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    tree_mask: Bool[Array, "B T M"] | None,
    block: NewKV | None = None,
    dtype: jnp.dtype | None = None,
    packing: Packing | Unpacked = UNPACKED,
    slots: int | None = None,
    hidden_layers: tuple[int, ...] = (),
    beside: Columns | None = None,
    features: Float[Array, "E C"] | None = None,
) -> Pass:
    """All layers: the normed hidden columns and the new keys and values.

    Columns are `C = B·T`, row-major, or those of `packing`; behind them are those of rows `beside`,
    which see nothing of the others. With `slots` the new keys and values of stacked layers lie as
    in a cache of so many, of which they are the first. `hidden_layers` are the hidden states to
    keep, by the number of layers before them. `features` are what a draft that reads hidden states
    reads beside the columns' tokens (see `specjax.models.features`).
    """
    config = model.config
    if packing is UNPACKED and beside is None and _is_widened(model, tokens.size):
        packing = WIDENED
        features = None if features is None else packing.pack(features)
    parts = [Columns(tokens, positions, cache, tree_mask, packing)]
    parts += [] if beside is None else [beside]
    columns = [
        [part.packing.pack(each.reshape(1, -1)) for each in (part.tokens, part.positions)]
        for part in parts
    ]
    x = embed(model, *(jnp.concatenate(own, axis=1) for own in zip(*columns, strict=True)))
    entering = None
    if features is not None:
        x, entering = joined(model, x, features, columns[0][1], dtype)
    kinds = [*map(config.kind_of, range(config.num_layers))]
    views = {
        kind: [
            group_of(config, kind, part.positions, part.tree_mask, part.cache, part.packing)
            for part in parts
        ]
        for kind in set(kinds)
    }
    caches = [part.cache for part in parts]
    if model.stack is not None:
        (groups,) = views.values()
        x, new, hidden = _looped(
            model, model.stack, x, groups, caches, block, dtype, slots, hidden_layers
        )
        made = [(own,) for own in new]
    else:
        states, by_layer = {0: x}, []
        for index, weights in enumerate(model.layers):
            held = None if cache is None else (cache.keys[index], cache.values[index])
            earlier = None if block is None else block[index]
            groups = _of_layer(views[kinds[index]], caches, held, earlier)
            x, new = apply_layer(
                model, weights, x, groups, dtype, entering=None if index else entering
            )
            by_layer.append(new)
            if index + 1 in hidden_layers:
                states[index + 1] = x
        hidden = tuple(states[number] for number in hidden_layers)
        made = list(zip(*by_layer, strict=True))
    x = final_norm(model, x)
    if packing is WIDENED:
        x, *hidden = map(packing.unpack, (x, *hidden))
    if beside is None:
        return Pass(x, made[0], tuple(hidden))
    own, others = slice(columns[0][0].shape[1]), slice(columns[0][0].shape[1], None)
    return Pass(
        x[:, own], made[0], tuple(each[:, own] for each in hidden),
        Pass(x[:, others], made[1], tuple(each[:, others] for each in hidden)),
    )  # fmt: skip


def _is_widened(model: Model, columns: int) -> bool:
    """Whether a pass over so many columns has one more (see `Widened`): of a mixture it would take
    experts.
    """
    return columns == 1 and model.config.experts is None and platform() == "gpu"


def group_of(
    config: ModelConfig,
    kind: LayerKind,
    positions: Int32[Array, "B T"],
    tree_mask: Bool[Array, "B T M"] | None = None,
    held: KVCache | Prefix | None = None,
    packing: Packing | Unpacked = UNPACKED,
) -> Group:
    """How columns attend in layers of a kind: beside a layer's `Prefix`, or of a cache of all
    layers without what each of them holds.
    """
    mask = attention_mask_of(kind.window, positions, held, tree_mask)
    prefix = held if isinstance(held, Prefix) else None
    growth = None if config.query_growth is None else _growth(positions, *config.query_growth)
    return Group(_angles(config, kind, positions), mask, prefix, None, packing, growth)


def _growth(positions: Int32[Array, "B T"], rate: float, length: int) -> Float[Array, "B T"]:
    return 1 + rate * jnp.log1p((positions // length).astype(jnp.float32))


def _angles(config: ModelConfig, kind: LayerKind, positions: Int32[Array, "B T"]) -> Angles:
    """What heads are rotated by in layers of a kind: nothing, where they are not."""
    features = config.rotated if kind.rotated else 0
    return layers.rotary_angles(positions, features, *rotary_of(config, kind.window))


def _of_layer(
    views: Sequence[Group],
    caches: Sequence[KVCache | None],
    held: tuple[Array, Array] | None,
    block: tuple[Array, Array] | None,
) -> list[Group]:
    """The groups of a layer whose cache holds such keys and values; `block` is of the first."""
    prefixes = [
        None if held is None or cache is None else Prefix(*held, cache.length, pages=cache.pages)
        for cache in caches
    ]
    blocks = (block, *(None,) * (len(views) - 1))
    return [
        view._replace(prefix=prefix, block=own)
        for view, prefix, own in zip(views, prefixes, blocks, strict=True)
    ]


def _looped(
    model: Model,
    stack: LayerWeights,
    x: Float[Array, "E C"],
    views: Sequence[Group],
    caches: Sequence[KVCache | None],
    block: NewKV | None,
    dtype: jnp.dtype | None,
    slots: int | None,
    hidden_layers: tuple[int, ...],
) -> tuple[Float[Array, "E C"], NewKV, tuple[Float[Array, "E C"], ...]]:
    """All stacked layers; each group's keys and values are stacked as the cache's are.

    Pages are read where they lie, as pages of one cache of all layers: a kernel would be given a
    copy of a layer's.
    """
    cache = caches[0]
    held = None if cache is None else (cache.keys[0], cache.values[0])
    earlier = None if block is None else block[0]
    experts = {} if platform() == "cpu" else _unpacked_experts(stack)
    if experts:
        stack = unchecked(LayerWeights, **(vars(stack) | dict.fromkeys(experts)))
    kept = sorted({*hidden_layers})
    in_pages = all(each is not None and each.pages is not None for each in caches)

    def of_layer(number: Array, own: Any, earlier: Any) -> list[Group]:
        if not in_pages or held is None:
            return _of_layer(views, caches, own, earlier)
        own = tuple(x.reshape(-1, *x.shape[2:]) for x in held)
        first = number * held[0].shape[1]
        moved = [
            replace(each, pages=each.pages + first)
            for each in caches
            if each is not None and each.pages is not None
        ]
        return _of_layer(views, moved, own, earlier)

    def one(carry: tuple[Array, Array], own: Any) -> tuple[tuple[Array, Array], Any]:
        x, hidden = carry
        number, place, weights, held, earlier = own
        if experts:
            own_experts = {name: OfLayer(every, number) for name, every in experts.items()}
            weights = unchecked(LayerWeights, **(vars(weights) | own_experts))
        x, new = apply_layer(model, weights, x, of_layer(number, held, earlier), dtype)
        hidden = hidden.at[place].set(x, mode="drop") if kept else hidden
        return (x, hidden), new if slots is None else tuple(in_slots(own, slots) for own in new)

    places = [kept.index(n) if n in kept else len(kept) for n in range(model.config.num_layers + 1)]
    before = jnp.zeros((len(kept), *x.shape), x.dtype)
    if 0 in kept:
        before = before.at[0].set(x)
    numbers = jnp.arange(model.config.num_layers, dtype=jnp.int32)
    places_of = jnp.asarray(places[1:], jnp.int32)
    own = numbers, places_of, stack, None if in_pages else held, earlier
    (x, hidden), new = lax.scan(one, (x, before), own)
    return x, new, tuple(hidden[places[number]] for number in hidden_layers)


def _unpacked_experts(stack: LayerWeights) -> dict[str, Array]:
    """The matrices of experts that kernels read, of all layers."""
    own = {name: getattr(stack, name) for name in EXPERT_MATRICES}
    return {name: leaf for name, leaf in own.items() if isinstance(leaf, Array)}


def layer_of_pass(
    outer: Model,
    weights: LayerWeights,
    kind: LayerKind,
    x: Float[Array, "E C"],
    positions: Int32[Array, "B T"],
    tree_mask: Bool[Array, "B T M"] | None,
    prefix: Prefix | None,
    inputs: dict[str, Array] | None = None,
) -> tuple[Float[Array, "E C"], tuple[Array, Array]]:
    """One layer of `trunk` by itself, of a model whose layers are elsewhere.

    `inputs` takes what its matrices are multiplied with (see `apply_layer`).
    """
    group = group_of(outer.config, kind, positions, tree_mask, prefix)
    x, (new,) = apply_layer(outer, weights, x, [group], inputs=inputs)
    return x, new


def final_norm(model: Model, x: Float[Array, "E C"]) -> Float[Array, "E C"]:
    """What leaves the last layer, normed."""
    return _norm(model.config, model, "final_norm", x)


def embed(
    model: Model, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]
) -> Float[Array, "E C"]:
    """What enters the first layer; a position past a table of them takes its last row."""
    config, table = model.config, model.embedding
    x = _rows_of(model, tokens)
    if config.embedding_scale != 1:
        x = x * jnp.asarray(config.embedding_scale, table.dtype).astype(x.dtype)
    if config.position_offset is None or model.position_embedding is None:
        return x
    rows = jnp.minimum(positions, config.max_positions - 1) + config.position_offset
    return x + layers.embed(model.position_embedding, rows)


def _rows_of(model: Model, tokens: Int32[Array, "B T"]) -> Float[Array, "E C"]:
    """The tokens' embeddings; a device gives those of its part of the vocabulary."""
    held = model.embedding.shape[0]
    if model.row_of is not None and model.config.features is None:
        return layers.embed(model.embedding, model.row_of[tokens])
    if held == model.config.vocab_size:
        return layers.embed(model.embedding, tokens)
    tokens = tokens - held * lax.axis_index(model.axis)
    own = (tokens >= 0) & (tokens < held)
    x = layers.embed(model.embedding, jnp.where(own, tokens, 0))
    return all_sum(jnp.where(own.reshape(-1), x, 0), model.axis)


def rotary_of(config: ModelConfig, window: int | None) -> tuple[float, Stretch | None]:
    """The base and the stretch of the rotary frequencies of layers with such a window."""
    if window is not None and config.window_theta is not None:
        return config.window_theta, None
    return config.rope_theta, config.rope_stretch


@jax.named_scope("pass")
def unembed(
    model: Model, x: Float[Array, "E C"], dtype: jnp.dtype | None = None
) -> Float[Array, "V C"]:
    """Logits of each column, float32."""
    table = model.embedding if model.unembedding is None else model.unembedding
    logits = layers.linear(table, x, dtype)
    if model.config.logit_scale != 1:
        logits = logits * jnp.float32(model.config.logit_scale)
    logits = layers.capped(logits, model.config.logit_cap)
    if model.row_of is not None:
        lowest = jnp.finfo(logits.dtype).min
        if model.config.features is not None:  # what it does not know has no row
            logits = jnp.pad(logits, ((0, 1), (0, 0)))
        return logits.at[-1].set(lowest).at[model.row_of].get(mode="promise_in_bounds")
    if table.shape[0] < model.config.vocab_size:
        logits = gathered(logits, model.axis)
    if model.config.num_known is None:
        return logits
    known = jnp.arange(logits.shape[0]) < model.config.num_known
    return jnp.where(known[:, None], logits, jnp.finfo(logits.dtype).min)


def forward(
    model: Model,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    tree_mask: Bool[Array, "B T M"] | None,
    block: NewKV | None = None,
) -> tuple[Float[Array, "B T V"], NewKV]:
    """Logits after each token, and the keys and values of this pass (the cache is only read).

    A token sees the cached prefix of its row up to `cache.length`, and the columns of the pass
    that `tree_mask` grants it: first those of `block` (an earlier pass of the same tree), then the
    pass's own; `tree_mask=None` is a plain sequence without cache. `positions` place tokens for the
    rotary embedding; slots play no part in it.
    """
    x, new, *_ = trunk(model, tokens, positions, cache, tree_mask, block)
    logits = unembed(model, x).T.reshape(*tokens.shape, -1)
    return logits, new
