"""Verification from the root down: one child after the other, by pure functions.

A trial tests a child by the distribution it was drawn from (`TokenTree.trial_q`, `without_earlier`,
`own_token`) with `multi_step`, which gives the probability of accepting it and the distribution
left if it is not; `match` compares tokens. The walks consume these functions, and tests enumerate
them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from specjax.base.loops import bounded_while, repeated
from specjax.base.pytree import pytree
from specjax.base.sampling import draw
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree

Probs = Float[Array, " V"]
NodeProbs = Callable[[Int32[Array, ""]], Probs]
TrialProbs = Callable[[TokenTree, Int32[Array, ""]], Probs]


class Trial(NamedTuple):
    """One test of a child: the probability of accepting it, and the distribution left if it is
    not.
    """

    accept: Float[Array, ""]
    residual: Probs


def multi_step(probs: Probs, q: Probs, token: Int32[Array, ""]) -> Trial:
    """Multi-step speculative sampling of one child (SpecInfer, Algorithm 2).

    Accepted with probability min(1, probs[token] / q[token]); else the residual distribution
    norm(max(0, probs - q)) goes on. A q that is not finite is never accepted and leaves `probs` as
    they are, as does a residual that is empty by rounding.
    """
    accept = jnp.minimum(1, probs[token] / q[token])
    return Trial(accept, norm(jnp.maximum(probs - q, 0), probs)[0])


def norm(left: Probs, otherwise: Probs) -> tuple[Probs, Float[Array, ""]]:
    """What is left as a distribution, and its mass; `otherwise` where that is 0 or not finite."""
    mass = left.sum()
    usable = (mass > 0) & jnp.isfinite(mass)
    return jnp.where(usable, left / jnp.where(usable, mass, 1), otherwise), mass


def without_earlier(tree: TokenTree, trial: Int32[Array, ""]) -> Probs:
    """The distribution of a draw without replacement: that of `trial_q` without what it gave
    before.

    Recursive rejection sampling (RSD, arXiv 2402.14160; Sequoia, 2402.12374): the distribution of a
    rejected token loses it and is renormalised. Where nothing is left of it (or it is not
    finite), the token was no draw, and its distribution is one-hot.
    """
    row = tree.trial_row[trial]
    earlier = (tree.trial_row == row) & (jnp.arange(tree.trial_row.shape[0]) < trial)
    tokens = jnp.where(earlier, tree.tokens[tree.trial_node], tree.q.shape[-1])
    own = own_token(tree, trial)
    left, _ = norm(tree.q[row].at[tokens].set(0, mode="drop"), own)
    return jnp.where(tree.certain, own, left)


def trial_of(tree: TokenTree, node: Int32[Array, ""]) -> Int32[Array, ""]:
    """The first trial that names a node."""
    return jnp.argmax(tree.trial_node == node).astype(jnp.int32)


def own_token(tree: TokenTree, trial: Int32[Array, ""]) -> Probs:
    """The distribution of a token that was chosen, not drawn: one-hot.

    Right for any token, drawn or not, because verification's own noise is independent of how a
    tree was made; it accepts as often as the naive rule.
    """
    token = tree.tokens[tree.trial_node[trial]]
    return (jnp.arange(tree.q.shape[-1]) == token).astype(tree.q.dtype)


def match(tree: TokenTree, choice: Int32[Array, " N"], window: int) -> Accepted:
    """The path along which each node's child is its parent's `choice`, for one row.

    SpecInfer's VerifyGreedy with the choices of the largest p; with choices drawn from p it is
    naive sampling, lossless for any tree.
    """
    parents = jnp.maximum(tree.parents, 0)
    hit = tree.valid & (tree.tokens == choice[parents])
    is_root = tree.parents < 0
    levels = window - 1
    taken = repeated(lambda t: is_root | (hit & t[parents]), is_root, levels, enough=levels)
    last = jnp.argmax(jnp.where(taken, tree.depth, -1)).astype(jnp.int32)
    return path_to(tree, last, choice[last], window)


def follow(
    tree: TokenTree, choice: Callable[[Int32[Array, ""], Int32[Array, ""]], Array], window: int
) -> Accepted:
    """As `match`, from the root down: `choice` of a node and its depth is asked for on the way.

    Where two children have the token the first one is taken; the text is the same.
    """

    def child(node: Array, token: Array) -> tuple[Array, Array]:
        hit = tree.valid & (tree.parents == node) & (tree.tokens == token)
        return jnp.argmax(hit).astype(jnp.int32), hit.any()

    def body(at: tuple[Array, ...]) -> tuple[Array, ...]:
        path, count, _, _ = at
        node = path[count - 1]
        token = choice(node, count - 1)
        below, found = child(node, token)
        found &= count < window
        path = path.at[count].set(jnp.where(found, below, 0), mode="drop")
        return path, count + found, token, ~found

    zero = jnp.int32(0)
    start = jnp.zeros(window, jnp.int32), zero + 1, zero, zero != 0
    path, count, token, _ = bounded_while(lambda at: ~at[3], body, start, window)
    return Accepted(path=path, count=count, token=token)


def path_to(
    tree: TokenTree, last: Int32[Array, ""], token: Int32[Array, ""], window: int
) -> Accepted:
    """The path from the root to node `last`, with `token` after it."""
    depth = tree.depth[last]
    node, path = last, jnp.zeros(window, jnp.int32)
    for level in range(window - 1, 0, -1):
        on = level <= depth
        path = path.at[level].set(jnp.where(on, node, 0))
        node = jnp.where(on, tree.parents[node], node)
    return Accepted(path=path, count=depth + 1, token=token)


@pytree
class _Walk:
    node: Array
    trial: Array
    probs: Array
    path: Array
    count: Array
    done: Array


def walk(
    tree: TokenTree,
    p: NodeProbs,
    accept: Float[Array, " M"],
    last: Float[Array, "2"],
    window: int,
    trial_probs: TrialProbs = TokenTree.trial_q,
    rule: Callable[[Probs, Probs, Int32[Array, ""]], Trial] = multi_step,
) -> Accepted:
    """The path a token-wise rule takes through one row's tree, given its uniforms.

    With `multi_step` it is SpecInfer's Algorithm 2 (arXiv 2305.09781): multi-step speculative
    sampling.

    Children are tried in drawing order, each by its `trial_probs`; trial `t` is accepted when
    `accept[t]` is strictly below its probability (a uniform can be 0). `last` draws the token
    after the path.
    """
    trials = jnp.arange(tree.trial_node.shape[0])
    of = tree.parents[tree.trial_node]

    def body(at: _Walk) -> _Walk:
        open_trials = (of == at.node) & (trials >= at.trial)
        found, trial = open_trials.any(), jnp.argmax(open_trials).astype(jnp.int32)
        child = tree.trial_node[trial]
        tested = rule(at.probs, trial_probs(tree, trial), tree.tokens[child])
        passed = found & (accept[trial] < tested.accept)
        probs = jnp.where(found, tested.residual, at.probs)
        return _Walk(
            node=jnp.where(passed, child, at.node),
            trial=jnp.where(passed, 0, trial + 1),
            probs=jnp.where(passed, p(child), probs),
            path=at.path.at[at.count].set(jnp.where(passed, child, 0), mode="drop"),
            count=at.count + passed,
            done=~found,
        )

    root = jnp.int32(0)
    start = _Walk(
        node=root,
        trial=root,
        probs=p(root),
        path=jnp.zeros(window, jnp.int32),
        count=root + 1,
        done=root != 0,
    )
    end = bounded_while(lambda at: ~at.done, body, start, trials.size + 1)
    return Accepted(path=end.path, count=end.count, token=draw(end.probs, last))
