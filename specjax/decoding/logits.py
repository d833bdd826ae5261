"""The target's logits of whole texts, by plain passes: what other passes are compared with."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from specjax.decoding import streamed
from specjax.models.transformer import Model, trunk, unembed
from specjax.parallel.mesh import Layout, layout_of, spread


def logits_at(
    model: Model, tokens: Int32[Array, "B T"], columns: Int32[Array, "B n"]
) -> Float[Array, "B n V"]:
    """The logits after some columns of whole texts, by a pass without cache or tree.

    Raises:
      ValueError: a layer could not be read.
    """
    if not model.is_whole:
        return streamed.logits_by_layers(model, tokens, columns)
    return _logits_at(model, tokens, columns, layout_of(model))


@partial(jax.jit, static_argnames="layout")
def _logits_at(model: Model, tokens: Array, columns: Array, layout: Layout | None) -> Array:
    def whole(model: Model, tokens: Array, columns: Array) -> Array:
        rows, size = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
        x = trunk(model, tokens, positions, None, None).x
        flat = jnp.arange(rows)[:, None] * size + columns
        logits = unembed(model, jnp.take(x, flat.reshape(-1), axis=1))
        return logits.T.reshape(*columns.shape, -1)

    return spread(layout, whole, (model,), (P(), P()), P())(model, tokens, columns)
