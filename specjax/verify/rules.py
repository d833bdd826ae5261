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
from specjax.verify.token_wise import (
    NodeProbs,
    TrialProbs,
    follow,
    match,
    own_token,
    walk,
    without_earlier,
)
from specjax.verify.traversal import traverse

Refusal = Callable[[Construction], str | None]
Decision = Callable[[KeyArray, Int32[Array, ""], TokenTree, NodeProbs, int], Accepted]
"""From a row's key, its root's position, its tree, p of each node and the window to what is
accepted."""
Verifier = Callable[[TokenTree, NodeProbs, Float[Array, " M"], Float[Array, "2"], int], Accepted]
"""The same from uniforms: one for each trial (or node), and two for the token after the path."""
AUTO = "auto"
"""The rule of those that a construction allows which accepts most."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verification rule.

    Attributes:
      name: what `verify=` and `--verify` call it.
      decide: what it accepts of one row's tree (see `Decision`; `with_uniforms` makes one of a
        `Verifier`).
      summary: for which trees it is lossless, for help and for the table of rules.
      source: the paper and its arXiv number, or an empty text.
      refusal: why it is not lossless for trees of a construction, the end of a sentence, or None.
      children: how drafters should make children for it, one of `specjax.trees.construction`.
      greedy_only: whether it is lossless at temperature 0 alone.
      visiting: the same decision from p of the nodes on the way alone, which it asks for one after
        the other; None if it needs those of others.
      live_distributions: float32 arrays over a tree's nodes and the vocabulary that are in memory
        at once where it decides: logits in two layouts, p, q and what is between them (3 to 9 %
        more than XLA:CPU takes; `python -m benchmarks.programs.memory_plan`, jax 0.10.2,
        2026-11-23).
    """

    name: str
    decide: Decision
    summary: str = ""
    source: str = ""
    refusal: Refusal = lambda _: None
    children: str = DRAWN
    greedy_only: bool = False
    visiting: Decision | None = None
    live_distributions: float = 4.4


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
        return "it verifies a block of tokens that follow each other; use traversal"
    return _needs_one_draft(trees)


def with_uniforms(verifier: Verifier) -> Decision:
    """A decision that gives `verifier` the uniforms of a row, keyed by the root's position.

    A tree that lists no trials is decided by the naive rule, which is lossless for any tree.
    """

    def decision(
        key: KeyArray, position: Int32[Array, ""], tree: TokenTree, p: NodeProbs, window: int
    ) -> Accepted:
        if not tree.trial_node.shape[0]:
            return _naive(key, position, tree, p, window)
        count = max(tree.trial_node.shape[0], tree.num_slots)
        accept = jax.random.uniform(fold(key, position, Purpose.ACCEPT), (count,), tree.q.dtype)
        last = jax.random.uniform(fold(key, position, Purpose.RESIDUAL), (2,), tree.q.dtype)
        return verifier(tree, p, accept, last, window)

    return decision


def _all_probs(tree: TokenTree, p: NodeProbs) -> Float[Array, "N V"]:
    return jax.vmap(p)(jnp.arange(tree.num_slots))


def _greedy(
    key: KeyArray, position: Int32[Array, ""], tree: TokenTree, p: NodeProbs, window: int
) -> Accepted:
    """SpecInfer's VerifyGreedy: the target's most likely tokens, as far as the tree has them."""
    return match(tree, most_likely(_all_probs(tree, p)), window)


def _naive(
    key: KeyArray, position: Int32[Array, ""], tree: TokenTree, p: NodeProbs, window: int
) -> Accepted:
    """SpecInfer's naive sampling: the target's own draws, as far as the tree has them.

    The noise is keyed by the position of the token it gives, so that one key gives the same tokens
    as plain decoding, whatever the tree.
    """
    probs = _all_probs(tree, p)
    noise = _token_noise(key, position, window, probs.dtype)
    return match(tree, jax.vmap(draw)(probs, noise[tree.depth]), window)


def _token_noise(
    key: KeyArray, position: Int32[Array, ""], window: int, dtype: jnp.dtype
) -> Float[Array, "W 2"]:
    """What the target's own draws are made with, after nodes of each depth."""
    return jax.vmap(
        lambda depth: jax.random.uniform(
            fold(key, position + 1 + depth, Purpose.TOKEN), (2,), dtype
        )
    )(jnp.arange(window))


def _greedy_visiting(
    key: KeyArray, position: Int32[Array, ""], tree: TokenTree, p: NodeProbs, window: int
) -> Accepted:
    """As `_greedy`, from the root down."""
    return follow(tree, lambda node, depth: most_likely(p(node)), window)


def _naive_visiting(
    key: KeyArray, position: Int32[Array, ""], tree: TokenTree, p: NodeProbs, window: int
) -> Accepted:
    """As `_naive`, from the root down."""
    noise = _token_noise(key, position, window, tree.q.dtype)
    return follow(tree, lambda node, depth: draw(p(node), noise[depth]), window)


def _token_wise(trial_probs: TrialProbs) -> Decision:
    """Children tried one after the other, each by the distribution that `trial_probs` gives."""
    return with_uniforms(
        lambda tree, p, accept, last, window: walk(tree, p, accept, last, window, trial_probs)
    )


def _block(
    tree: TokenTree, p: NodeProbs, accept: Float[Array, " M"], last: Float[Array, "2"], window: int
) -> Accepted:
    return block(tree, p, accept, last, window)


def _traversal(
    tree: TokenTree, p: NodeProbs, accept: Float[Array, " M"], last: Float[Array, "2"], window: int
) -> Accepted:
    return traverse(tree, p, accept, last, window)


GREEDY = Rule(
    "greedy",
    _greedy,
    summary="any tree, at temperature 0",
    source="SpecInfer's VerifyGreedy (2305.09781)",
    greedy_only=True,
    visiting=_greedy_visiting,
)
NAIVE = Rule(
    "naive",
    _naive,
    summary="any tree",
    source="SpecInfer's naive sampling, SpecExec (2406.02532)",
    children=TOP_K,
    visiting=_naive_visiting,
)
_BY_OWN_TOKEN = _token_wise(own_token)
_BY_DRAWS = _token_wise(TokenTree.trial_q)
_BY_DISTINCT_DRAWS = _token_wise(without_earlier)
ONE_HOT = Rule(
    "one-hot",
    _BY_OWN_TOKEN,
    summary="any tree, with noise of its own",
    source="multi-step with one-hot q",
    children=TOP_K,
    visiting=_BY_OWN_TOKEN,
)
MULTI_STEP = Rule(
    "multi-step",
    _BY_DRAWS,
    summary="independent draws",
    source="multi-step speculative sampling, SpecInfer, Algorithm 2",
    refusal=_needs_independent,
    visiting=_BY_DRAWS,
    live_distributions=5.4,
)
RECURSIVE = Rule(
    "recursive",
    _BY_DISTINCT_DRAWS,
    summary="draws without replacement",
    source="recursive rejection sampling, RSD (2402.14160), Sequoia (2402.12374)",
    refusal=_needs_distinct,
    children=DISTINCT,
    visiting=_BY_DISTINCT_DRAWS,
    live_distributions=5.3,
)
BLOCK = Rule(
    "block",
    with_uniforms(_block),
    summary="a drawn chain",
    source="block verification (2403.10444)",
    refusal=_needs_chain,
    live_distributions=7.2,
)
TRAVERSAL = Rule(
    "traversal",
    with_uniforms(_traversal),
    summary="draws of one draft without replacement",
    source="traversal verification (2505.12398)",
    refusal=_needs_one_draft,
    children=DISTINCT,
    live_distributions=5.8,
)
RULES = {
    rule.name: rule for rule in (GREEDY, NAIVE, ONE_HOT, MULTI_STEP, RECURSIVE, BLOCK, TRAVERSAL)
}
"""Every rule by its name; `register_rule` adds one."""
_PREFERENCE = (BLOCK, TRAVERSAL, MULTI_STEP, RECURSIVE, NAIVE)
"""What "auto" takes: the first of these that is lossless for the trees."""


def table() -> str:
    """The rules as the Markdown table of README."""
    rows = [f"| `{each.name}` | {each.summary} | {each.source} |" for each in RULES.values()]
    return "\n".join(["| rule | lossless for | source |", "|---|---|---|", *rows])


def register_rule(rule: Rule) -> None:
    """Makes a rule known by its name in this process: to `generate`, `build` and the certificate.

    Raises:
      ValueError: there is one of that name.
    """
    if rule.name == AUTO or rule.name in RULES:
        raise ValueError(f"there is a verification rule {rule.name!r}; give this one another name.")
    RULES[rule.name] = rule


def check_rule(name: str) -> None:
    """Checks that `name` is a verification rule, or "auto".

    Raises:
      ValueError: it is not.
    """
    if name not in (AUTO, *RULES):
        raise ValueError(f"no verification rule {name!r}; there are auto, {', '.join(RULES)}.")


def find_rule(name: str, trees: Construction) -> Rule:
    """The rule called `name`, if it is lossless for trees of this construction.

    "auto" is the one of those that the construction allows which accepts most: block, traversal,
    multi-step, recursive, naive, in this order; on rows of temperature 0 all of them decide as the
    greedy rule does.

    Raises:
      ValueError: no such rule, or an illegal pair, with the reason.
    """
    check_rule(name)
    if name == AUTO:
        return next(rule for rule in _PREFERENCE if rule.refusal(trees) is None)
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

    Args:
      rule: the verification rule.
      key: the row's key.
      position: of the root; with `key` it names all noise.
      tree: the row's tree of N slots.
      p: the target's distribution after each node, as an array or as a function of the node.
      window: the static depth of the tree plus 1.
    """
    return rule.decide(key, position, tree, p if callable(p) else p.__getitem__, window)
