"""Which nodes of a tree are accepted, and the token after them: p for the target, q for drafts.

Verification knows no model. A rule is lossless for the tree constructions it names: whatever the
drafts propose, the emitted tokens follow the target's law. `multi_step` is the pure function from
which the sampling walk takes its accept probability and residual; `match` is the whole decision
of the rules that compare tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from specjax.arrays import KeyArray
from specjax.pytree import pytree
from specjax.sampling import Purpose, draw, fold, most_likely
from specjax.tree import TokenTree

Law = Float[Array, " V"]
NodeLaw = Callable[[Int32[Array, ""]], Law]

DRAWN = "drawn"
"""Construction: sampled rows' children are independent draws, each from the law it is tried by."""
TOP_K = "top-k"
"""Construction: children are the draft's most likely tokens, whatever the row's temperature."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verification rule: its name, the constructions it is lossless for, and why not others."""

    name: str
    constructions: tuple[str, ...]
    refusal: str = ""


GREEDY = Rule("greedy", (DRAWN, TOP_K))
NAIVE = Rule("naive", (DRAWN, TOP_K))
MULTI_STEP = Rule(
    "multi-step",
    (DRAWN,),
    "it divides by the law a child was drawn from, and a child that was chosen for being likely "
    "was not drawn from the draft's law (total variation 0.5 on two tokens)",
)
RULES = {rule.name: rule for rule in (GREEDY, NAIVE, MULTI_STEP)}


def find_rule(name: str, construction: str) -> Rule:
    """The rule called `name`, if it is lossless for trees of this construction.

    "auto" is multi-step where the construction allows it, else naive; on rows of temperature 0
    both decide as the greedy rule does.

    Raises:
      ValueError: no such rule, or an illegal pair, with the reason.
    """
    if name == "auto":
        name = MULTI_STEP.name if construction in MULTI_STEP.constructions else NAIVE.name
    if name not in RULES:
        raise ValueError(f"no verification rule {name!r}; there are auto, {', '.join(RULES)}.")
    rule = RULES[name]
    if construction not in rule.constructions:
        raise ValueError(
            f"the {rule.name} rule is not lossless for {construction} trees: {rule.refusal}."
        )
    return rule


@pytree
class Accepted:
    """What verification decides: the first `count` entries of `path`, and the next `token`.

    `path` starts at the root (node 0), so a step emits `count` tokens: those of `path[1:count]`,
    then `token`. `count` is also how many of the pass's keys and values are kept.
    """

    path: Int32[Array, "*B W"]
    count: Int32[Array, "*B"]
    token: Int32[Array, "*B"]


class Trial(NamedTuple):
    """One test of a child: the probability of accepting it, and the law left if it is not."""

    accept: Float[Array, ""]
    residual: Law


def multi_step(law: Law, q: Law, token: Int32[Array, ""]) -> Trial:
    """Multi-step speculative sampling of one child (SpecInfer, Algorithm 2).

    Accepted with probability min(1, law/q) at `token`; else norm(max(0, law - q)) goes on. A q
    that is not finite is never accepted and leaves `law` as it is, as does a residual that is
    empty by rounding.
    """
    accept = jnp.minimum(1, law[token] / q[token])
    left = jnp.maximum(law - q, 0)
    total = left.sum()
    usable = (total > 0) & jnp.isfinite(total)
    return Trial(accept, jnp.where(usable, left / jnp.where(usable, total, 1), law))


def match(tree: TokenTree, choice: Int32[Array, " N"], window: int) -> Accepted:
    """The path along which each node's child is its parent's `choice`, for one row.

    SpecInfer's VerifyGreedy with the choices of the largest p; with choices drawn from p it is
    naive sampling, lossless for any tree.
    """
    parents = jnp.maximum(tree.parents, 0)
    hit = tree.valid & (tree.tokens == choice[parents])
    is_root = tree.parents < 0
    taken = lax.fori_loop(0, window - 1, lambda _, t: is_root | (hit & t[parents]), is_root)
    last = jnp.argmax(jnp.where(taken, tree.depth, -1)).astype(jnp.int32)
    depth = tree.depth[last]
    node, path = last, jnp.zeros(window, jnp.int32)
    for level in range(window - 1, 0, -1):
        on = level <= depth
        path = path.at[level].set(jnp.where(on, node, 0))
        node = jnp.where(on, parents[node], node)
    return Accepted(path=path, count=depth + 1, token=choice[last])


@pytree
class _Walk:
    node: Array
    trial: Array
    law: Array
    path: Array
    count: Array
    done: Array


def walk(
    tree: TokenTree,
    p: NodeLaw,
    accept: Float[Array, " M"],
    last: Float[Array, "2"],
    window: int,
    rule: Callable[[Law, Law, Int32[Array, ""]], Trial] = multi_step,
) -> Accepted:
    """The path a token-wise rule takes through one row's tree, given its uniforms.

    Children are tried in drawing order; trial `t` is accepted when `accept[t]` is strictly below
    its probability (a uniform can be 0). `last` draws the token after the path.
    """
    trials = jnp.arange(tree.trial_node.shape[0])
    of = tree.parents[tree.trial_node]

    def body(at: _Walk) -> _Walk:
        open_trials = (of == at.node) & (trials >= at.trial)
        found, trial = open_trials.any(), jnp.argmax(open_trials).astype(jnp.int32)
        child = tree.trial_node[trial]
        tested = rule(at.law, tree.trial_q(trial), tree.tokens[child])
        passed = found & (accept[trial] < tested.accept)
        law = jnp.where(found, tested.residual, at.law)
        return _Walk(
            node=jnp.where(passed, child, at.node),
            trial=jnp.where(passed, 0, trial + 1),
            law=jnp.where(passed, p(child), law),
            path=at.path.at[at.count].set(jnp.where(passed, child, 0), mode="drop"),
            count=at.count + passed,
            done=~found,
        )

    root = jnp.int32(0)
    start = _Walk(
        node=root,
        trial=root,
        law=p(root),
        path=jnp.zeros(window, jnp.int32),
        count=root + 1,
        done=root != 0,
    )
    end = lax.while_loop(lambda at: ~at.done, body, start)
    return Accepted(path=end.path, count=end.count, token=draw(end.law, last))


def decide(
    rule: Rule,
    key: KeyArray,
    position: Int32[Array, ""],
    tree: TokenTree,
    p: Float[Array, "N V"] | NodeLaw,
    window: int,
) -> Accepted:
    """What `rule` accepts of one row's tree, whose root stands at `position`.

    `p` is the target's law after each node, as an array or as a function of the node. `window`
    is the static depth of the tree plus 1. The naive rule's noise is keyed by the position of
    the token it emits, so that one key gives the same tokens as plain decoding, whatever the
    tree; the other noise is keyed by the root's position, purpose and trial.
    """
    of_node = p if callable(p) else p.__getitem__
    if rule is MULTI_STEP and tree.trial_node.shape[0]:
        accept = jax.random.uniform(
            fold(key, position, Purpose.ACCEPT), tree.trial_node.shape, tree.q.dtype
        )
        last = jax.random.uniform(fold(key, position, Purpose.RESIDUAL), (2,), tree.q.dtype)
        return walk(tree, of_node, accept, last, window)
    laws = jax.vmap(of_node)(jnp.arange(tree.num_slots))
    if rule is GREEDY:
        return match(tree, most_likely(laws), window)
    noise = jax.vmap(
        lambda depth: jax.random.uniform(
            fold(key, position + 1 + depth, Purpose.TOKEN), (2,), laws.dtype
        )
    )(jnp.arange(window))
    return match(tree, jax.vmap(draw)(laws, noise[tree.depth]), window)
