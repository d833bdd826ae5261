"""Block verification of a chain (arXiv 2403.10444): every length weighed at once, the longest kept.

What traversal does on a chain, without its loop: the walk from the leaf to the root is decided by
one weight a node, and only the node it ends at needs a distribution. `path_weights` and
`probs_after` are pure functions, which `block` consumes and tests enumerate.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree
from specjax.base.sampling import draw
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree
from specjax.verify.token_wise import NodeProbs, Probs, norm, own_token, trial_of


@pytree
class PathWeights:
    """What block verification knows of a chain of nodes 0 (the root) to N - 1.

    `p` and `q` are the distributions of the target after each node and of the draw of the node
    below it (0 where there is none). Node i is `reached` with min(1, reached[i-1] · p/q at its
    token), and kept with `weights[i]` if nothing below it is.
    """

    p: Float[Array, "N V"]
    q: Float[Array, "N V"]
    reached: Float[Array, " N"]
    weights: Float[Array, " N"]


def path_weights(tree: TokenTree, p: NodeProbs) -> PathWeights:
    """The weights of all nodes of a chain (arXiv 2403.10444, algorithm 2).

    A node that the next one follows has weight m / (m + 1 - reached), m being the mass of
    max(0, reached · p - q); the last one has `reached`, the root 1, and a slot that is not valid 0.
    """
    distributions = jax.vmap(p)(jnp.arange(tree.num_slots))
    drawn = tree.tokens[1:]
    trial = jax.vmap(partial(trial_of, tree))(jnp.arange(1, tree.num_slots, dtype=jnp.int32))
    own = jax.vmap(partial(own_token, tree))(trial)
    q = jax.vmap(norm)(tree.q[tree.trial_row[trial]], own)[0]
    q = jnp.where(tree.certain, own, q)
    at_token = jnp.take_along_axis(distributions[:-1], drawn[:, None], axis=1)[:, 0]
    q_at_token = jnp.take_along_axis(q, drawn[:, None], axis=1)[:, 0]
    reached = [jnp.ones((), distributions.dtype)]
    for above, below in zip(at_token, q_at_token, strict=True):
        weight = jnp.minimum(1, reached[-1] * above / below)
        reached.append(jnp.where(above > 0, weight, 0))
    reached = jnp.stack(reached)
    q = jnp.pad(jnp.where(tree.valid[1:, None], q, 0), ((0, 1), (0, 0)))
    mass = jnp.maximum(reached[:, None] * distributions - q, 0).sum(axis=-1)
    whole = mass + 1 - reached
    weights = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1), 1)
    weights = jnp.where(_followed(tree), weights, jnp.where(tree.valid, reached, 0))
    return PathWeights(distributions, q, reached, weights.at[0].set(1))


def probs_after(tree: TokenTree, of: PathWeights, node: Int32[Array, ""]) -> Probs:
    """The distribution of the token after `node`, if that is the one kept: norm(max(0, reached · p
    - q)).

    Of the last node, and where that is empty, p.
    """
    left = jnp.maximum(of.reached[node] * of.p[node] - of.q[node], 0)
    return jnp.where(_followed(tree)[node], norm(left, of.p[node])[0], of.p[node])


def _followed(tree: TokenTree) -> Bool[Array, " N"]:
    """Which nodes have one below them."""
    return jnp.pad(tree.valid[1:], (0, 1))


def block(
    tree: TokenTree,
    p: NodeProbs,
    accept: Float[Array, " N"],
    last: Float[Array, "2"],
    window: int,
) -> Accepted:
    """The path that block verification takes through one row's chain, given its uniforms.

    The deepest node is kept whose `accept` is strictly below its weight. `last` draws the token
    after it.
    """
    of = path_weights(tree, p)
    number = jnp.arange(tree.num_slots, dtype=jnp.int32)
    kept = (accept[: tree.num_slots] < of.weights) | (number == 0)
    node = jnp.max(jnp.where(kept, number, 0))
    along = jnp.arange(window, dtype=jnp.int32)
    token = draw(probs_after(tree, of, node), last)
    return Accepted(path=jnp.where(along <= node, along, 0), count=node + 1, token=token)
