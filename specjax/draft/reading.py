"""A draft model along a text: what it holds of it, and its passes over what is new and over trees.

A draft that reads hidden states of the target (EAGLE-3, arXiv 2503.01840) has a slot for each token
but the first: in slot i are the embedding of token i + 1 and the target's hidden states after token
i, at position i. What it drafts itself stands there until the target has read it, and goes then.
One that predicts blocks (see `specjax.draft.block`) has a slot for each token but the last: in slot
i are keys and values of the hidden states after token i.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree, replace
from specjax.draft.block import predicted
from specjax.models.features import handed_on, projected
from specjax.models.kv_cache import KVCache, NewKV, cache_dtype, empty_cache
from specjax.models.transformer import Model, context_of, trunk, unembed


@pytree
class ModelState:
    """A draft model's cache, root included, and its logits after the root.

    Of one that reads hidden states also its `features` of the root, which its children read. One
    that predicts blocks has its cache alone until it drafts (see `ready`); then also logits of the
    levels below the root's children, which are `ahead`.
    """

    cache: KVCache
    logits: Float[Array, "*G B V"] | None
    features: Float[Array, "*G B E"] | None = None
    ahead: Float[Array, "*G B l V"] | None = None


class Run(NamedTuple):
    """A draft's pass: normed columns, keys and values, and features for what is below."""

    x: Float[Array, "E C"]
    new: NewKV
    features: Float[Array, "B T E"] | None


def read_by(models: Iterable[Model | None]) -> tuple[int, ...]:
    """The hidden states that models read, by the number of the target's layers before them.

    One that stands without weights, as in a setting that shares them (see `switching`), is None.
    """
    read = (model.config.features for model in models if model is not None)
    return tuple(sorted({layer for each in read if each is not None for layer in each.layers}))


def run(
    model: Model,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    tree_mask: Bool[Array, "B T M"] | None,
    block: NewKV | None = None,
    features: Float[Array, "B T E"] | None = None,
) -> Run:
    """A pass (see `specjax.models.transformer.forward`); `features` are those beside each token."""
    if features is None:
        x, new, *_ = trunk(model, tokens, positions, cache, tree_mask, block)
        return Run(x, new, None)
    beside = features.reshape(-1, features.shape[-1]).T
    x, new, (out,), _ = trunk(
        model, tokens, positions, cache, tree_mask, block, hidden_layers=(1,), features=beside
    )
    return Run(x, new, handed_on(model, out, x).T.reshape(features.shape))


def prefill(
    model: Model,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    slots: int,
    hidden: Float[Array, "B T H"],
    layers: tuple[int, ...],
) -> ModelState:
    """A draft's state after each row's first `length` tokens, with room for `slots`.

    `hidden` are the states after `layers` of the target, after each token but the last.
    """
    rows = prompt.shape[0]
    dtype = cache_dtype(model.embedding.dtype)
    cache = empty_cache(model.config, rows, slots, dtype, model.kv_heads)
    features = None
    if model.config.block_levels is not None:
        return _with_context(model, ModelState(cache, None), length - 1, hidden[:, :-1], layers)
    if model.config.features is not None:
        if prompt.shape[1] == 1:
            return _of_nothing(model, cache)
        features = projected(model, _own(model, hidden[:, :-1], layers))
        prompt, length = prompt[:, 1:], length - 1
    tokens = prompt.shape[1]
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
    after = run(model, prompt, positions, None, None, features=features)
    at = jnp.maximum(length - 1, 0)
    found = ModelState(
        cache.keep(after.new, None, length), _logits_at(model, after.x, at, tokens),
        _features_at(after, at),
    )  # fmt: skip
    return found if features is None else _chosen(length > 0, found, _of_nothing(model, cache))


def shorter(model: Model, held: ModelState, length: Int32[Array, " B"]) -> ModelState:
    """A draft's state with a cache of the first `length` tokens."""
    slots = length if model.config.features is None else jnp.maximum(length - 1, 0)
    return replace(held, cache=replace(held.cache, length=slots))


def catch_up(
    model: Model,
    held: ModelState,
    tokens: Int32[Array, "B W"],
    count: Int32[Array, " B"],
    hidden: Float[Array, "B W H"],
    layers: tuple[int, ...],
) -> ModelState:
    """The state after the first `count` of `tokens`; a row with no new token keeps its logits.

    `hidden` are the states after `layers` of the target, before each of the tokens.
    """
    if model.config.block_levels is not None:
        return _with_context(model, held, count, hidden, layers)
    rows, window = tokens.shape
    steps = jnp.arange(window, dtype=jnp.int32)
    tree_mask = jnp.broadcast_to(steps <= steps[:, None], (rows, window, window))
    features = None
    if model.config.features is not None:
        features = projected(model, _own(model, hidden, layers))
    positions = held.cache.length[:, None] + steps
    after = run(model, tokens, positions, held.cache, tree_mask, features=features)
    at = jnp.maximum(count - 1, 0)
    found = ModelState(
        held.cache.keep(after.new, None, count), _logits_at(model, after.x, at, window),
        _features_at(after, at),
    )  # fmt: skip
    return _chosen(count > 0, found, held)


def ready(model: Model, held: ModelState, last: Int32[Array, " B"]) -> ModelState:
    """The state of a draft that is to draft below each row's last token.

    That is what it holds, but of one that predicts blocks: it makes its pass now, so that steps
    that do not draft with it take none, and states hold no logits of whole blocks.
    """
    if model.config.block_levels is None:
        return held
    logits = predicted(model, last, held.cache)
    return replace(held, logits=logits[:, 0], ahead=logits[:, 1:])


def _with_context(
    model: Model,
    held: ModelState,
    count: Int32[Array, " B"],
    hidden: Float[Array, "B W H"],
    layers: tuple[int, ...],
) -> ModelState:
    """The state of a draft that predicts blocks with the first `count` of hidden states, too."""
    if not hidden.shape[1]:
        return held
    positions = held.cache.length[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)
    context = context_of(model, projected(model, _own(model, hidden, layers)), positions)
    return replace(held, cache=held.cache.keep(context, None, count))


def of_layers(
    hidden: Float[Array, "B T H"], layers: tuple[int, ...], wanted: tuple[int, ...]
) -> Float[Array, "B T F"]:
    """Of hidden states after `layers` those that are `wanted`, in that order."""
    if wanted == layers:
        return hidden
    parts = jnp.split(hidden, len(layers), axis=2) if wanted else []
    own = [parts[layers.index(layer)] for layer in wanted]
    return jnp.concatenate(own, axis=2) if own else hidden[..., :0]


def _own(
    model: Model, hidden: Float[Array, "B T H"], layers: tuple[int, ...]
) -> Float[Array, "B T F"]:
    """Of hidden states after `layers` those that a draft reads."""
    read = model.config.features
    assert read is not None
    return of_layers(hidden, layers, read.layers)


def _of_nothing(model: Model, cache: KVCache) -> ModelState:
    """The state of a draft before a lone token, of which it knows nothing."""
    rows, config = cache.length.shape[0], model.config
    features = jnp.zeros((rows, config.hidden_size))
    return ModelState(cache, jnp.zeros((rows, config.vocab_size)), features)


def _chosen(which: Bool[Array, " B"], one: ModelState, other: ModelState) -> ModelState:
    """`one`, but what it says of `other` in rows that are not among `which`."""

    def of_row(own: Array | None, kept: Array | None) -> Array | None:
        if own is None or kept is None:
            return None
        return jnp.where(which[:, None], own, kept)

    return replace(
        one,
        logits=of_row(one.logits, other.logits),
        features=of_row(one.features, other.features),
    )


def _features_at(after: Run, index: Int32[Array, " B"]) -> Float[Array, "B E"] | None:
    if after.features is None:
        return None
    return jnp.take_along_axis(after.features, index[:, None, None], axis=1)[:, 0]


def _logits_at(
    model: Model, x: Float[Array, "E C"], index: Int32[Array, " B"], tokens: int
) -> Float[Array, "B V"]:
    """Logits after token `index` of each row."""
    rows = jnp.arange(index.shape[0], dtype=jnp.int32)
    return unembed(model, jnp.take(x, rows * tokens + index, axis=1)).T
