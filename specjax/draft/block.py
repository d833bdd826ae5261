"""Drafts that predict a block of tokens in one pass (DFlash, arXiv 2602.06036).

What such a draft has of a text are keys and values of the target's hidden states. Its pass runs the
last token and masks, which see all of that and each other; each mask predicts the token of its
place, whatever stands in the others. So its trees take no further pass: a node's children are what
is likely at their level.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree
from specjax.draft.growth import Likely, Nodes, ScoredNodes, Source
from specjax.models.kv_cache import KVCache, NewKV
from specjax.models.transformer import Model, trunk, unembed


def predicted(model: Model, last: Int32[Array, " B"], cache: KVCache) -> Float[Array, "B l V"]:
    """Logits of every level below each row's last token."""
    rows, size = last.shape[0], masks_of(model).shape[0]
    tokens = in_blocks(model, last[:, None])
    positions = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)
    made = trunk(model, tokens, positions, cache, jnp.ones((rows, size, size), bool))
    x = made.x.reshape(-1, rows, size)[:, :, 1:]
    return unembed(model, x.reshape(x.shape[0], -1)).T.reshape(rows, size - 1, -1)


def predicted_along(
    model: Model,
    tokens: Int32[Array, "B n"],
    positions: Int32[Array, "B n"],
    context: NewKV,
    seen: Bool[Array, "B n S"],
    dtype: jnp.dtype | None = None,
) -> Float[Array, "E B n l"]:
    """What a draft makes of blocks that begin with some tokens, at every level, normed.

    Args:
      model: the draft.
      tokens: that begin blocks.
      positions: theirs.
      context: keys and values of a text (see `specjax.models.transformer.context_of`).
      seen: which slots of these each block sees.
      dtype: of the matrix products.
    """
    size, (rows, count) = masks_of(model).shape[0], tokens.shape
    whole = in_blocks(model, tokens)
    at = positions[:, :, None] + jnp.arange(size, dtype=jnp.int32)
    own = jnp.repeat(jnp.repeat(jnp.eye(count, dtype=bool), size, 0), size, 1)
    mask = jnp.concatenate(
        [jnp.repeat(seen, size, axis=1), jnp.broadcast_to(own, (rows, *own.shape))], axis=2
    )
    x = trunk(model, whole, at.reshape(rows, -1), None, mask, context, dtype).x
    return x.reshape(-1, rows, count, size)[..., 1:]


def in_blocks(model: Model, tokens: Int32[Array, "B n"]) -> Int32[Array, "B m"]:
    """Blocks that begin with tokens, one after the other."""
    masks = masks_of(model)
    whole = jnp.broadcast_to(masks, (*tokens.shape, masks.shape[0])).at[:, :, 0].set(tokens)
    return whole.reshape(tokens.shape[0], -1)


def masks_of(model: Model) -> Int32[Array, " b"]:
    """The masks of a block, its first token's place included."""
    read = model.config.features
    assert read is not None
    assert read.block_size is not None
    assert read.mask_token is not None
    return jnp.full(read.block_size, read.mask_token, jnp.int32)


@pytree
class LevelSource(Source):
    """What is likely at each level below the root, the same below all nodes of the level above."""

    likely: Likely
    """Of every level, the root's children first."""

    def after(self, nodes: Nodes, scored: ScoredNodes, carry: Any) -> tuple[Likely, Any]:
        """That of the level below; no pass."""
        del carry
        depth = jnp.take_along_axis(nodes.depth, jnp.maximum(scored.slots, 0), axis=1)
        last = self.likely.tokens.shape[1] - 1
        at = jnp.clip(depth, 0, last)[:, :, None]
        tokens, log_q = (
            jnp.take_along_axis(each, at, axis=1)
            for each in (self.likely.tokens, self.likely.log_q)
        )
        return Likely(tokens, log_q), ()

    def hold(self, carry: Any, made: Any, slots: Int32[Array, "B Q"]) -> Any:
        """Nothing is made of nodes."""
        del made, slots
        return carry
