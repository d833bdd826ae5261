"""Verification from the leaves up: traversal (arXiv 2505.12398).

A path is kept or cut off as a whole. `descend` and `retreat` are pure functions, which `traverse`
consumes and tests enumerate.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree
from specjax.base.sampling import draw
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree
from specjax.verify.token_wise import NodeProbs, norm, path_to, trial_of, without_earlier


@pytree
class Branch:
    """Where traversal stands: at `node`, all before it in drawing order being decided.

    Of the path to it, by depth: the `distributions` that go on there and the `weights` with which
    the path so far is kept. `open` are the nodes not yet visited.
    """

    node: Int32[Array, ""]
    distributions: Float[Array, "W V"]
    weights: Float[Array, " W"]
    open: Bool[Array, " N"]


def start(tree: TokenTree, p: NodeProbs, window: int) -> Branch:
    """At the root, which is kept with weight 1."""
    root = jnp.int32(0)
    probs = p(root)
    return Branch(
        node=root,
        distributions=jnp.zeros((window, probs.shape[0]), probs.dtype).at[0].set(probs),
        weights=jnp.zeros(window, probs.dtype).at[0].set(1),
        open=tree.valid.at[0].set(False),
    )


def next_child(tree: TokenTree, at: Branch) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
    """Whether the node has children left, and the first of them in drawing order."""
    left = at.open & (tree.parents == at.node)
    return left.any(), jnp.argmax(left).astype(jnp.int32)


def descend(tree: TokenTree, p: NodeProbs, at: Branch, child: Int32[Array, ""]) -> Branch:
    """At a child, kept with weight min(1, weight · distribution / q) (arXiv 2505.12398)."""
    depth, token = tree.depth[child], tree.tokens[child]
    probs, q = (
        at.distributions[depth - 1, token],
        without_earlier(tree, trial_of(tree, child))[token],
    )
    weight = jnp.where(probs > 0, jnp.minimum(1, at.weights[depth - 1] * probs / q), 0)
    return Branch(
        node=child,
        distributions=at.distributions.at[depth].set(p(child)),
        weights=at.weights.at[depth].set(weight),
        open=at.open.at[child].set(False),
    )


def retreat(tree: TokenTree, at: Branch) -> Branch:
    """At the parent of a node that was rejected with all below it.

    What is left there is d = max(0, weight · distribution - q): the distribution becomes norm(d),
    the weight Σd / (Σd + 1 - weight), or 1 for 0/0. A d that is empty leaves the distribution as it
    is.
    """
    above = tree.depth[at.node] - 1
    q = without_earlier(tree, trial_of(tree, at.node))
    probs, mass = norm(
        jnp.maximum(at.weights[above] * at.distributions[above] - q, 0), at.distributions[above]
    )
    whole = mass + 1 - at.weights[above]
    weight = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1), 1)
    return Branch(
        node=tree.parents[at.node],
        distributions=at.distributions.at[above].set(probs),
        weights=at.weights.at[above].set(weight),
        open=at.open,
    )


def traverse(
    tree: TokenTree,
    p: NodeProbs,
    accept: Float[Array, " N"],
    last: Float[Array, "2"],
    window: int,
) -> Accepted:
    """The path that traversal verification takes, from the leaves to the root, for one row.

    arXiv 2505.12398. The first leaf is kept, and the path to it, when `accept` of it is strictly
    below its weight; else it is cut off, and the next leaf is tried; a node whose children are
    gone is a leaf, and the root is always kept. On a chain this is block verification
    (2403.10444), for which `specjax.verify.block` is faster.
    """

    def kept(at: Branch) -> Array:
        passed = (accept[at.node] < at.weights[tree.depth[at.node]]) | (at.node == 0)
        return ~next_child(tree, at)[0] & passed

    def body(at: Branch) -> Branch:
        inner, child = next_child(tree, at)
        return lax.cond(inner, lambda: descend(tree, p, at, child), lambda: retreat(tree, at))

    at = lax.while_loop(lambda at: ~kept(at), body, start(tree, p, window))
    return path_to(tree, at.node, draw(at.distributions[tree.depth[at.node]], last), window)
