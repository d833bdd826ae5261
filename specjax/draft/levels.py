"""What a draft that reads hidden states says along a text (EAGLE-3, arXiv 2503.01840, section 3.2).

It has a slot for each token but the first: in slot i are the embedding of token i + 1 and the
target's hidden states after token i, and it says what follows token i + 1. While it drafts, what it
made itself stands for hidden states that the target has not made yet. So it says something else
after l tokens of its own: at level 0 each slot reads the target, at level l what the slot before it
gave at level l - 1. Of a draft that predicts blocks (see `specjax.draft.block`) level l is what the
block that began l tokens before predicts for that place.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.draft.block import predicted_along
from specjax.models.features import handed_on, projected
from specjax.models.kv_cache import NewKV
from specjax.models.transformer import Model, context_of, trunk, unembed

_BLOCKS = 16
"""Blocks of a row in a pass."""


def logits_by_level(
    model: Model,
    tokens: Int32[Array, "B T"],
    hidden: Float[Array, "B T F"],
    count: int,
    dtype: jnp.dtype | None = None,
) -> Iterator[Float[Array, "V C"]]:
    """A head's logits after every token of whole sequences at each level (see `by_level`)."""
    for x in by_level(model, tokens, hidden, count, dtype):
        yield unembed(model, x, dtype)


def by_level(
    model: Model,
    tokens: Int32[Array, "B T"],
    hidden: Float[Array, "B T F"],
    count: int,
    dtype: jnp.dtype | None = None,
) -> Iterator[Float[Array, "E C"]]:
    """What a head makes of every token of whole sequences at each of `count` levels, normed,
    `C = B·T` columns, beside the target's hidden states after the tokens that it reads.

    After the first l + 1 tokens level l knows nothing, and what it makes there means nothing.
    `dtype` is that of the matrix products.
    """
    if (most := model.config.block_levels) is not None:
        yield from _by_level_in_blocks(model, tokens, hidden, min(count, most), dtype)
        return
    features = projected(model, hidden[:, :-1].astype(jnp.float32), dtype)
    for x in levels(model, tokens[:, 1:], features, count, dtype):
        by_row = x.reshape(x.shape[0], tokens.shape[0], -1)
        yield jnp.pad(by_row, ((0, 0), (0, 0), (1, 0))).reshape(x.shape[0], -1)


def _by_level_in_blocks(
    model: Model,
    tokens: Int32[Array, "B T"],
    hidden: Float[Array, "B T F"],
    count: int,
    dtype: jnp.dtype | None,
) -> Iterator[Float[Array, "E C"]]:
    """`by_level` of a draft that predicts blocks: one begins at every token, a few in a pass."""
    rows, size = tokens.shape
    at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
    context = context_of(model, projected(model, hidden.astype(jnp.float32), dtype), at, dtype)
    passes = -(-size // _BLOCKS)

    def several(own: tuple[Array, Array]) -> Float[Array, "E B n l"]:
        began, places = own
        seen = jnp.arange(size) < places[:, :, None]
        return predicted_along(model, began, places, context, seen, dtype)[..., :count]

    def parted(values: Array) -> Array:
        whole = jnp.pad(values, ((0, 0), (0, passes * _BLOCKS - size)))
        return whole.reshape(rows, passes, _BLOCKS).swapaxes(0, 1)

    x = lax.map(several, (parted(tokens), parted(at)))
    x = jnp.moveaxis(x, 0, 2).reshape(x.shape[1], rows, -1, count)[:, :, :size]
    for level in range(count):
        yield jnp.roll(x[..., level], level, axis=2).reshape(x.shape[0], -1)


def levels(
    model: Model,
    tokens: Int32[Array, "B S"],
    features: Float[Array, "B S E"],
    count: int,
    dtype: jnp.dtype | None = None,
) -> Iterator[Float[Array, "E C"]]:
    """What a head makes of its slots at each of `count` levels, normed, `C = B·S` columns.

    At level l the first l slots have nothing before them, and mean nothing.

    Args:
      model: a head with an embedding.
      tokens: that of each slot.
      features: what the target's hidden states became, for each slot.
      count: levels.
      dtype: of the matrix products.
    """
    rows, slots = tokens.shape
    at = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, slots))
    block: NewKV | None = None
    for level in range(count):
        mask = None if level == 0 else jnp.broadcast_to(
            _seen(level, slots), (rows, slots, (level + 1) * slots)
        )  # fmt: skip
        beside = features.reshape(-1, features.shape[-1]).T
        made = trunk(
            model, tokens, at, None, mask, block, dtype, hidden_layers=(1,), features=beside
        )
        yield made.x
        new = made.new if block is None else _joined(block, made.new)
        out = handed_on(model, made.hidden[0], made.x).T.reshape(features.shape)
        block, features = new, jnp.roll(out, 1, axis=1)


def _seen(level: int, slots: int) -> Bool[np.ndarray, "S M"]:
    """The slots of each level that a slot of the last one sees: of level 0 all up to the one that
    its chain begins at, of each later level the one that its chain went through.
    """
    own = np.arange(slots)[:, None] - np.arange(slots)
    return np.concatenate([own >= level, *(own == level - n for n in range(1, level + 1))], axis=1)


def _joined(block: NewKV, new: NewKV) -> NewKV:
    """Keys and values of earlier levels, and those of one more behind them."""
    return tuple(
        (jnp.concatenate([keys, own], axis=2), jnp.concatenate([values, others], axis=2))
        for (keys, values), (own, others) in zip(block, new, strict=True)
    )
