"""The definition of tree attention, in float32, one softmax over prefix and block."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    query: Float[Array, "B H T D"],
    block_keys: Float[Array, "B K M D"],
    block_values: Float[Array, "B K M D"],
    visible: Bool[Array, "B T M"],
    prefix_keys: Float[Array, "B K D S"],
    prefix_values: Float[Array, "B K S D"],
    length: Int[Array, " B"],
) -> Float[Array, "B H T D"]:
    """Softmax attention of `T` queries to the first `length` prefix slots and the visible block.

    A slot at or past its row's `length` and a block column that no query sees have no part in the
    result, whatever they hold (NaN included); a column that some query sees must be finite. A
    query that sees nothing gives zeros.
    SpecInfer (arXiv 2305.09781), section 4.2.
    """
    groups = query.shape[1] // block_keys.shape[1]
    slots = jnp.arange(prefix_keys.shape[-1])
    in_prefix = jnp.broadcast_to(
        slots < length[:, None, None], (query.shape[0], query.shape[2], slots.size)
    )
    seen = jnp.concatenate([in_prefix, visible], axis=-1)[:, None]
    keys = jnp.concatenate([prefix_keys.swapaxes(-1, -2), block_keys], axis=2)
    values = jnp.concatenate([prefix_values, block_values], axis=2)
    used = seen.any(axis=(1, 2))[:, None, :, None]
    keys, values = (
        jnp.repeat(jnp.where(used, x.astype(jnp.float32), 0), groups, axis=1)
        for x in (keys, values)
    )
    scores = jnp.einsum("bhtd,bhmd->bhtm", query.astype(jnp.float32), keys, precision="highest")
    scores = jnp.where(seen, scores / jnp.sqrt(query.shape[-1]), -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("bhtm,bhmd->bhtd", weights, values, precision="highest")
    return out.astype(query.dtype)
