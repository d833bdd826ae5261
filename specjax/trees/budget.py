"""Trees cut to what a pass has columns for: the likeliest nodes of all rows together."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.base.pytree import replace
from specjax.trees.tree import TokenTree

_EDGE = 1e-6
"""Probabilities this near 0 and 1 count as no nearer."""
_LEVEL = 1e-3
"""What a level takes from a logarithm, so that rounding never puts a child before its parent."""


def log_acceptance(
    tree: TokenTree, intercept: Float[Array, " B"], slope: Float[Array, " B"]
) -> Float[Array, "B N"]:
    """How likely each node is to be on the accepted path, as a logarithm; less for a child.

    Below an accepted parent a node is accepted with the logistic function of `intercept` and
    `slope` times the logit of its `chance`.
    """
    chance = jnp.clip(tree.chance, _EDGE, 1 - _EDGE)
    logit = jnp.log(chance) - jnp.log1p(-chance)
    own = jax.nn.log_sigmoid(intercept[:, None] + slope[:, None] * logit) - _LEVEL
    own = jnp.where(jnp.arange(tree.num_slots) == 0, 0.0, own)
    path = tree.attention_mask
    return jnp.where(path, own[:, None], 0.0).sum(axis=2)


def likeliest(
    tree: TokenTree, exists: Bool[Array, "B N"], score: Float[Array, "B N"], width: int
) -> TokenTree:
    """The trees with the `width` nodes of the largest scores, over all rows, the roots first.

    Only for trees whose nodes were chosen and are decided by the naive rule: which drawn node is
    verified may not depend on what was drawn.

    Args:
      tree: the rows' trees.
      exists: nodes that would be scored; rows that are done have none.
      score: of each node, below its parent's, so that what is left are trees.
      width: nodes that are kept, at least one a row.
    """
    root = jnp.arange(tree.num_slots) == 0
    order = jnp.where(exists, jnp.where(root, jnp.inf, score), -jnp.inf).reshape(-1)
    best = jnp.argsort(-order, stable=True)
    rank = jnp.zeros(best.shape, jnp.int32).at[best].set(jnp.arange(best.size, dtype=jnp.int32))
    valid = tree.valid & ((rank < width).reshape(exists.shape) | ~exists)
    there = jnp.take_along_axis(valid, tree.trial_node, axis=1)
    return replace(tree, valid=valid, trial_node=jnp.where(there, tree.trial_node, 0))
