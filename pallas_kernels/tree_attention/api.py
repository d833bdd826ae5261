"""The entry point of tree attention: picks an implementation by platform."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.tree_attention import reference, xla


def _reference(
    query: Array,
    block_keys: Array,
    block_values: Array,
    visible: Array | None,
    prefix_keys: Array | None,
    prefix_values: Array | None,
    length: Array | None,
) -> Array:
    rows, kv_heads, columns, dim = block_keys.shape
    if visible is None:
        visible = jnp.broadcast_to(
            jnp.tril(jnp.ones((columns, columns), bool)), (rows, columns, columns)
        )
    if prefix_keys is None or prefix_values is None or length is None:
        prefix_keys = jnp.zeros((rows, kv_heads, dim, 0), block_keys.dtype)
        prefix_values = jnp.zeros((rows, kv_heads, 0, dim), block_keys.dtype)
        length = jnp.zeros(rows, jnp.int32)
    return reference.tree_attention(
        query, block_keys, block_values, visible, prefix_keys, prefix_values, length
    )


IMPLEMENTATIONS = {"reference": _reference, "xla": xla.tree_attention}
DEFAULTS = {"cpu": "xla", "gpu": "xla", "tpu": "xla"}


@functools.partial(jax.named_call, name="tree_attention")
def tree_attention(
    query: Float[Array, "B H T D"],
    block_keys: Float[Array, "B K M D"],
    block_values: Float[Array, "B K M D"],
    visible: Bool[Array, "B T M"] | None,
    prefix_keys: Float[Array, "B K D S"] | None = None,
    prefix_values: Float[Array, "B K S D"] | None = None,
    length: Int[Array, " B"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B H T D"]:
    """Attention of `T` nodes to a cached prefix and to the block columns they may see.

    Query head `h` uses key/value head `h // (H // K)`. The block holds the nodes' own keys and
    values, possibly after those of earlier levels of the same tree (`M >= T`); `visible[b, t, m]`
    says that `m` is `t` itself or one of its ancestors. Prefix keys are stored transposed.
    `visible=None` stands for a plain sequence: each token sees itself and those before it; it
    takes no prefix and no earlier block.

    Raises:
      ValueError: a plain sequence came with a prefix or with more keys than queries.
      ImplementationError: the named implementation does not exist or cannot run here.
    """
    if visible is None and (prefix_keys is not None or block_keys.shape[2] != query.shape[2]):
        raise ValueError(
            f"visible=None takes no prefix and as many keys ({block_keys.shape[2]}) "
            f"as queries ({query.shape[2]})."
        )
    run = dispatch.pick("tree_attention", implementation, IMPLEMENTATIONS, DEFAULTS)
    return run(query, block_keys, block_values, visible, prefix_keys, prefix_values, length)
