"""Which nodes of a tree are accepted, and the token after them: p for the target, q for drafts.

Verification knows no model. A rule is lossless for the trees that it does not refuse: whatever
the drafts propose, the emitted tokens follow the target's distribution.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from specjax.base.axes import KeyArray
from specjax.base.sampling import Purpose, draw, fold, most_likely
from specjax.trees.accepted import Accepted
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K, Construction
from specjax.trees.tree import TokenTree
from specjax.verify.block import block
from specjax.verify.token_wise import NodeProbs, TrialProbs, match, own_token, walk, without_earlier
from specjax.verify.traversal import traverse

Refusal = Callable[[Construction], str | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verification rule: its name, and why it is not lossless for a construction, or None.

    A token-wise rule tries children by `trial_probs`.
    """

    name: str
    refusal: Refusal = lambda _: None
    trial_probs: TrialProbs | None = None


def _needs_independent(trees: Construction) -> str | None:
    if trees.children == TOP_K:
        return (
            "it divides by the distribution a child was drawn from, and a child that was chosen "
            "for being likely was not drawn from the draft's distribution (total variation 0.5 on "
            "two tokens)"
        )
    if trees.children == DISTINCT and not trees.chain:
        return (
            "it divides by the draft's distribution, and a draw without replacement has another "
            "one once a token is gone (total variation 0.067 on four tokens)"
        )
    return None


def _needs_distinct(trees: Construction) -> str | None:
    if trees.children == TOP_K:
        return _needs_independent(trees)
    if trees.children == DRAWN and not trees.chain:
        return (
            "it takes a rejected token out of the draft's distribution, and an independent draw "
            "can give it again (total variation 0.04 on four tokens)"
        )
    return None


def _needs_one_draft(trees: Construction) -> str | None:
    if trees.drafts > 1:
        return "it goes by one distribution a node, and a merged node was drawn from several"
    return _needs_distinct(trees)


def _needs_chain(trees: Construction) -> str | None:
    if not trees.chain:
        return "it judges a block of tokens that follow each other; use traversal"
    return _needs_one_draft(trees)


GREEDY = Rule("greedy")
NAIVE = Rule("naive")
ONE_HOT = Rule("one-hot", trial_probs=own_token)
MULTI_STEP = Rule("multi-step", _needs_independent, TokenTree.trial_q)
RECURSIVE = Rule("recursive", _needs_distinct, without_earlier)
BLOCK = Rule("block", _needs_chain)
TRAVERSAL = Rule("traversal", _needs_one_draft)
_RULES = (GREEDY, NAIVE, ONE_HOT, MULTI_STEP, RECURSIVE, BLOCK, TRAVERSAL)
RULES = {rule.name: rule for rule in _RULES}
_BEST_FIRST = (BLOCK, TRAVERSAL, MULTI_STEP, RECURSIVE, NAIVE)


def find_rule(name: str, trees: Construction) -> Rule:
    """The rule called `name`, if it is lossless for trees of this construction.

    "auto" is the one of those that the construction allows which accepts most: block, traversal,
    multi-step, recursive, naive, in this order; on rows of temperature 0 all of them decide as the
    greedy rule does.

    Raises:
      ValueError: no such rule, or an illegal pair, with the reason.
    """
    if name == "auto":
        return next(rule for rule in _BEST_FIRST if rule.refusal(trees) is None)
    if name not in RULES:
        raise ValueError(f"no verification rule {name!r}; there are auto, {', '.join(RULES)}.")
    if reason := RULES[name].refusal(trees):
        raise ValueError(f"the {name} rule is not lossless for {trees}: {reason}.")
    return RULES[name]


def decide(
    rule: Rule,
    key: KeyArray,
    position: Int32[Array, ""],
    tree: TokenTree,
    p: Float[Array, "N V"] | NodeProbs,
    window: int,
) -> Accepted:
    """What `rule` accepts of one row's tree, whose root stands at `position`.

    `p` is the target's distribution after each node, as an array or as a function of the node.
    `window` is the static depth of the tree plus 1. The naive rule's noise is keyed by the position
    of the token it emits, so that one key gives the same tokens as plain decoding, whatever the
    tree; the other noise is keyed by the root's position, purpose and trial.
    """
    of_node = p if callable(p) else p.__getitem__
    if rule not in (GREEDY, NAIVE) and tree.trial_node.shape[0]:
        count = max(tree.trial_node.shape[0], tree.num_slots)
        accept = jax.random.uniform(fold(key, position, Purpose.ACCEPT), (count,), tree.q.dtype)
        last = jax.random.uniform(fold(key, position, Purpose.RESIDUAL), (2,), tree.q.dtype)
        if rule is BLOCK:
            return block(tree, of_node, accept, last, window)
        if rule.trial_probs is None:
            return traverse(tree, of_node, accept, last, window)
        return walk(tree, of_node, accept, last, window, rule.trial_probs)
    distributions = jax.vmap(of_node)(jnp.arange(tree.num_slots))
    if rule is GREEDY:
        return match(tree, most_likely(distributions), window)
    noise = jax.vmap(
        lambda depth: jax.random.uniform(
            fold(key, position + 1 + depth, Purpose.TOKEN), (2,), distributions.dtype
        )
    )(jnp.arange(window))
    return match(tree, jax.vmap(draw)(distributions, noise[tree.depth]), window)
