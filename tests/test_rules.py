"""Every rule on every construction, enumerated: lossless where it is allowed, wrong where not."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees.construction import DISTINCT, DRAWN, TOP_K, Construction
from specjax.trees.tree import Draws, TreeShape, merge
from specjax.verify import block, rules, token_wise
from tests import enumeration, oracles
from tests.enumeration import Case, accepted, differs

EXACT = 1e-9
CAUGHT = 1e-3


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def random_case(seed, size, widths, drafters=1, distinct=False, zeros=False, depths=None):
    depths = depths or len(widths) + 1
    p, *qs = oracles.random_distributions(seed, size, depths, 1 + drafters, zeros)
    drafts = tuple(map(enumeration.table, qs))
    return Case(enumeration.table(p), drafts, TreeShape(widths), distinct)


TREES = {
    Construction(DRAWN, chain=True): [((1, 1, 1), 1)],
    Construction(DRAWN): [((2, 1), 1), ((3,), 1), ((2, (2, 0)), 1)],
    Construction(DRAWN, 2): [((2, 1), 2), ((2, (0, 1)), 2)],
    Construction(DRAWN, 3, chain=True): [((1, 1), 3)],
    Construction(DISTINCT): [((2, 2), 1), ((3,), 1), ((2, (0, 2), (1, 0)), 1)],
    Construction(DISTINCT, 2): [((2, 1), 2), ((2,), 2)],
    Construction(TOP_K, chain=True): [((1, 1), 1)],
    Construction(TOP_K): [((2, 1), 1), ((2, (0, 2)), 1)],
}
"""Widths and number of drafts, by construction."""


@partial(jax.jit, static_argnames="depth", compiler_options=enumeration.QUICK_COMPILE)
def block_flow(draws: Draws, p: jax.Array, depth: int) -> jax.Array:
    """Flows `[A, contexts, V]` of block verification, chain by chain, from the leaf up."""

    def one(draw: Draws) -> jax.Array:
        tree = merge(draw, jnp.int32(0), depth)
        contexts = enumeration.node_contexts(tree)
        judged = block.path_weights(tree, lambda node: p[contexts[node]])
        mass, flow = jnp.ones(()), jnp.zeros_like(p)
        for node in reversed(range(tree.num_slots)):
            taken = mass * jnp.clip(judged.weights[node], 0, 1)
            probs = block.probs_after(tree, judged, jnp.int32(node))
            flow, mass = flow.at[contexts[node]].add(taken * probs), mass - taken
        return flow

    return jax.vmap(one)(draws)


JUDGED_WHOLE = {
    rules.BLOCK: block_flow,
    rules.TRAVERSAL: enumeration.traverse_flow,
}
"""The flow of the rules that keep a path as a whole."""
JUDGED = [rule for rule in rules.RULES.values() if rule not in (rules.GREEDY, rules.NAIVE)]


def draws_of(case: Case, children) -> tuple[np.ndarray, np.ndarray]:
    """Joint draws with their probabilities; chosen children are the most likely ones."""
    if children != TOP_K:
        tokens = case.every_draw()
        return tokens, case.weight(tokens)
    best = np.argsort(-case.drafters[0], axis=1, kind="stable")
    tokens = np.zeros((1, case.num_draws), int)
    for m, (parent, nth) in enumerate(zip(case.parents(), case.trees[0].ranks(), strict=True)):
        context = 0 if parent < 0 else case.contexts(tokens)[0, parent]
        tokens[0, m] = best[context, nth]
    return tokens, np.ones(1)


def flows_by(rule, case, tokens) -> np.ndarray:
    """The flows of given draws, every trial tried by the distribution that the rule names."""
    if rule in JUDGED_WHOLE:
        return enumeration.flows_of(case, tokens, flow=JUDGED_WHOLE[rule])
    return enumeration.flows_of(case, tokens, trial_probs=enumeration.TRIAL_PROBS[rule])


def flow_of(rule, case, children) -> np.ndarray:
    """The flow of a step."""
    tokens, weight = draws_of(case, children)
    return np.tensordot(weight, flows_by(rule, case, tokens), 1)


@pytest.mark.parametrize("rule", JUDGED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("trees", TREES, ids=str)
def test_a_rule_is_lossless_where_it_is_not_refused_and_only_there(rule, trees):
    found = []
    for widths, drafters in TREES[trees]:
        for seed, zeros in ((0, False), (1, True)):
            case = random_case(seed, 3, widths, drafters, trees.children == DISTINCT, zeros)
            found.append(differs(flow_of(rule, case, trees.children), case))
    if rule.refusal(trees) is None:
        assert max(found) < EXACT
    else:
        assert max(found) > CAUGHT


def test_every_construction_has_a_rule_and_every_rule_a_construction():
    allowed = {trees: {rule.name for rule in rules.RULES.values() if rule.refusal(trees) is None}
               for trees in TREES}  # fmt: skip
    assert set.union(*allowed.values()) == set(rules.RULES)
    assert set.intersection(*allowed.values()) == {"greedy", "naive", "one-hot"}
    assert allowed[Construction(DRAWN, chain=True)] == set(rules.RULES)


@pytest.mark.parametrize(
    ("seed", "token", "block"), [(0, 1.2508, 1.2708), (1, 1.1225, 1.1570), (2, 1.2953, 1.3356)]
)
def test_fixture_of_block_verification(seed, token, block):
    case = random_case(seed, 3, (1, 1))
    assert accepted(enumeration.step_flow(case), case) == pytest.approx(token, abs=5e-5)
    for flow in JUDGED_WHOLE.values():
        found = accepted(enumeration.step_flow(case, flow=flow), case)
        assert found == pytest.approx(block, abs=5e-5)


def test_the_toy_of_block_verification():
    """P = 1/3, 2/3 and Q = 2/3, 1/3 at both tokens: 11/9 accepted instead of 10/9."""
    p, q = (np.tile(np.array(probs) / 3, (7, 1)) for probs in ((1, 2), (2, 1)))
    case = Case(p, (q,), TreeShape((1, 1)))
    assert accepted(enumeration.step_flow(case), case) == pytest.approx(10 / 9, abs=EXACT)
    for flow in JUDGED_WHOLE.values():
        found = accepted(enumeration.step_flow(case, flow=flow), case)
        assert found == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("rule", JUDGED_WHOLE, ids=lambda rule: rule.name)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_chains_are_judged_as_the_paper_does(length, rule):
    """How many tokens are accepted, of every drawn chain, as the paper's algorithm says."""
    for seed, zeros in ((3, False), (4, True)):
        p, q = oracles.random_distributions(seed, 3, length + 1, 2, zeros)
        case = Case(enumeration.table(p), (enumeration.table(q),), TreeShape((1,) * length))
        tokens = case.every_draw()
        tokens = tokens[case.weight(tokens) > 0]
        flows = flows_by(rule, case, tokens)
        for text, flow in zip(tokens, flows, strict=True):
            expected = oracles.block(p.__getitem__, q.__getitem__, tuple(text.tolist()))
            found = {i: x.sum() for i, x in enumerate(enumeration.levels(flow, length))}
            assert found == pytest.approx({i: float(expected[i]) for i in found}, abs=EXACT)


@pytest.mark.parametrize(
    ("seed", "naive", "recursive", "traversal"),
    [(0, 1.086, 1.693, 1.703), (1, 1.111, 1.588, 1.621), (2, 1.061, 1.647, 1.701)],
)
def test_fixture_of_a_distinct_tree(seed, naive, recursive, traversal):
    case = random_case(seed, 3, (2, 2), distinct=True, depths=4)
    for rule, mean in (
        (rules.ONE_HOT, naive),
        (rules.RECURSIVE, recursive),
        (rules.TRAVERSAL, traversal),
    ):
        found = flow_of(rule, case, DISTINCT)
        assert accepted(found, case) == pytest.approx(mean, abs=5e-4)
    p, q = (distributions.__getitem__ for distributions in oracles.random_distributions(seed, 3, 4))
    exact = oracles.expected_without_replacement(p, q, (2, 2), oracles.recursive)
    assert accepted(flow_of(rules.RECURSIVE, case, DISTINCT), case) == pytest.approx(float(exact))


def test_the_node_fixture_of_recursive_rejection():
    p, q = (np.tile(np.array(probs) / 10, (5, 1)) for probs in ((5, 3, 1, 1), (4, 1, 4, 1)))
    for distinct, rule, hit in (
        (False, rules.MULTI_STEP, 0.83),
        (True, rules.RECURSIVE, 0.85),
        (True, rules.ONE_HOT, 0.5511),
        (True, rules.TRAVERSAL, 0.85),
    ):
        case = Case(p, (q,), TreeShape((2,)), distinct)
        flow = flow_of(rule, case, DISTINCT if distinct else DRAWN)
        assert accepted(flow, case) == pytest.approx(hit, abs=5e-5)


def means_of(seed: int) -> dict[str, float]:
    """Tokens accepted of trees ⟨2,1⟩ of one draft, by rule."""
    drawn, distinct = (random_case(seed, 3, (2, 1), distinct=d) for d in (False, True))
    return {
        rule.name: accepted(flow_of(rule, case, children), case)
        for rule, case, children in (
            (rules.TRAVERSAL, distinct, DISTINCT),
            (rules.RECURSIVE, distinct, DISTINCT),
            (rules.MULTI_STEP, drawn, DRAWN),
            (rules.ONE_HOT, drawn, DRAWN),
        )
    }


@pytest.mark.parametrize("seed", range(8))
def test_order_of_the_rules(seed):
    """Traversal accepts no less than recursive; naive (as one-hot does) less than multi-step."""
    found = means_of(seed)
    assert found["traversal"] >= found["recursive"] - EXACT
    assert min(found["recursive"], found["multi-step"]) >= found["one-hot"] - EXACT


def test_recursive_mostly_but_not_always_accepts_more_than_multi_step():
    """With distributions that are far apart, an independent second draw can be nearer to what is
    left.
    """
    more = [means_of(seed) for seed in range(8)]
    found = [each["recursive"] > each["multi-step"] for each in more]
    assert found == [True, True, True, False, False, True, True, True]


@pytest.mark.parametrize("rule", [rules.RECURSIVE, rules.TRAVERSAL], ids=lambda rule: rule.name)
def test_draws_beyond_the_support_are_lossless(rule):
    """A draft that is sure, or knows two tokens: what it cannot draw comes in the order of ids."""
    for seed, probs in ((0, (0, 1, 0)), (1, (0.3, 0, 0.7)), (2, (1, 0, 0))):
        case = random_case(seed, 3, (3, 1), distinct=True)
        case = dataclasses.replace(case, drafters=(np.tile(np.array(probs, float), (4, 1)),))
        assert differs(flow_of(rule, case, DISTINCT), case) < EXACT


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rule", JUDGED, ids=lambda rule: rule.name)
def test_the_distribution_is_the_targets_whatever_a_broken_draft_says(rule, value):
    widths = (1, 1) if rule is rules.BLOCK else (2, 1)
    case = random_case(9, 3, widths, zeros=True)
    broken = dataclasses.replace(case, drafters=(np.full_like(case.p, value),))
    flows = flows_by(rule, broken, case.every_draw())
    assert max(differs(flow, case) for flow in flows) < EXACT


def denominator_of_q(tree, at):
    """A public implementation's retreat, whose weight divides by what is left of q."""
    moved = RETREAT(tree, at)
    above = tree.depth[at.node] - 1
    q = token_wise.without_earlier(tree, jnp.argmax(tree.trial_node == at.node).astype(jnp.int32))
    token = tree.tokens[at.node]
    left = jnp.maximum(at.weights[above] * at.distributions[above] - q, 0).sum()
    rest = q.sum() - q[token]
    weight = jnp.where(rest > 0, jnp.minimum(1, left / rest), 1)
    return dataclasses.replace(moved, weights=moved.weights.at[above].set(weight))


RETREAT = enumeration.traversal.retreat


def test_a_wrong_weight_of_traversal_is_caught(monkeypatch):
    case = random_case(0, 3, (2, 2), distinct=True)
    assert differs(flow_of(rules.TRAVERSAL, case, DISTINCT), case) < EXACT
    monkeypatch.setattr(enumeration.traversal, "retreat", denominator_of_q)
    wrong = partial(enumeration.traverse_flow, alter=lambda tree: tree)  # compiled anew
    flow = enumeration.step_flow(case, flow=wrong)
    assert differs(flow, case) > CAUGHT
