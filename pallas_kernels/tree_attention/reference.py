"""The definition of tree attention, in float32, one softmax over prefix and block."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tree_attention.operands import Operands, Prefix


def tree_attention(at: Operands) -> Float[Array, "B H T D"]:
    """Softmax attention of `T` queries to the live prefix slots and the visible block.

    A slot at or past its row's `length` and a block column that no query sees have no part in the
    result, whatever they hold (NaN included); a column that some query sees must be finite. A
    query that sees nothing gives zeros.
    SpecInfer (arXiv 2305.09781), section 4.2.
    """
    query, rows, tokens = at.query, at.query.shape[0], at.query.shape[2]
    keys, values, length = _unpacked(at)
    slots = jnp.arange(keys.shape[2])
    in_prefix = jnp.broadcast_to(slots < length[:, None, None], (rows, tokens, slots.size))
    if at.first is not None:
        in_prefix &= slots >= at.first[..., None]
    seen = jnp.concatenate([in_prefix, at.tree_mask], axis=-1)[:, None]
    keys = jnp.concatenate([keys, at.block_keys], axis=2)
    values = jnp.concatenate([values, at.block_values], axis=2)
    used = seen.any(axis=(1, 2))[:, None, :, None]
    keys, values = (
        jnp.repeat(jnp.where(used, x.astype(jnp.float32), 0), at.groups, axis=1)
        for x in (keys, values)
    )
    scores = jnp.einsum("bhtd,bhmd->bhtm", query.astype(jnp.float32), keys, precision="highest")
    scores = scores / jnp.sqrt(query.shape[-1])
    if at.soft_cap is not None:
        scores = at.soft_cap * jnp.tanh(scores / at.soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    sinks = None if at.sinks is None else at.sinks.astype(jnp.float32)[:, :, None, None]
    top = top if sinks is None else jnp.maximum(top, sinks)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("bhtm,bhmd->bhtd", weights, values, precision="highest")
    return out.astype(query.dtype)


def _unpacked(at: Operands) -> tuple[Array, Array, Array]:
    """The prefix's keys and values `[B, K, S, D]` in float32, and the rows' lengths."""
    rows, kv_heads, _, dim = at.block_keys.shape
    none = jnp.zeros((rows, kv_heads, 0, dim), jnp.float32)
    prefix = at.prefix or Prefix(none.swapaxes(2, 3), none, jnp.zeros(rows, jnp.int32))
    keys, values = prefix.keys.swapaxes(2, 3).astype(jnp.float32), prefix.values
    values = values.astype(jnp.float32)
    if prefix.scales is not None:
        keys, values = (
            x * s[..., None] for x, s in zip((keys, values), prefix.scales, strict=True)
        )
    return keys, values, prefix.length
