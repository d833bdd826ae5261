"""Losslessness, exactly: the distribution of a step's tokens, enumerated through the shipped
functions.

`enumeration` walks every outcome through `tree.merge`, `token_wise.multi_step` and
`token_wise.match`; `oracles` holds the rules in rational numbers, from the papers. `test_lossy`
shows that the same enumeration catches what is not lossless, and `test_walk` that the compiled walk
takes exactly the decisions enumerated here.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees.tree import TreeShape, merge
from specjax.verify import rules
from tests import enumeration, oracles
from tests.enumeration import Case, accepted, differs

EXACT = 1e-9


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def random_case(seed, size, widths, drafters, zeros, same=False):
    """A case with random distributions of every context, and the same distributions as
    rationals.
    """
    p, *qs = oracles.random_distributions(seed, size, len(widths) + 1, 1 + drafters, zeros)
    qs = [qs[0]] * drafters if same else qs
    case = Case(enumeration.table(p), tuple(map(enumeration.table, qs)), TreeShape(widths))
    return case, p.__getitem__, [q.__getitem__ for q in qs]


@pytest.mark.parametrize(
    ("size", "widths", "drafters"),
    [
        (5, (1, 1), 1),
        (3, (1, 1, 1), 1),
        (5, (2,), 1),
        (4, (3,), 1),
        (4, (2, 1), 1),
        (3, (2, 2), 1),
        (3, (2,), 3),
        (4, (1, 1), 2),
        (3, (1, 1), 3),
        (3, (2, 1), 2),
        (3, (1, 1, 1), 2),
    ],
)
def test_multi_step_gives_the_target_distribution(size, widths, drafters):
    for seed, zeros, same in ((0, False, False), (1, True, False), (2, True, True)):
        case, p, qs = random_case(seed, size, widths, drafters, zeros, same)
        flow = enumeration.step_flow(case)
        assert differs(flow, case) < EXACT
        expected = oracles.expected_accepted(p, qs, widths, oracles.multi_step)
        assert accepted(flow, case) == pytest.approx(float(expected), abs=EXACT)


@pytest.mark.parametrize(
    ("size", "widths", "drafters"),
    [(3, (2, 1), 2), (5, (2, 1), 2), (3, (3, 2), 1), (3, (2, 2, 1), 1), (3, (1, 1, 1), 3)],
)
def test_multi_step_gives_the_target_distribution_on_larger_trees(size, widths, drafters):
    case, p, qs = random_case(3, size, widths, drafters, zeros=True)
    flow = enumeration.lazy_step_flow(case)
    assert differs(flow, case) < EXACT
    expected = oracles.expected_accepted(p, qs, widths, oracles.multi_step)
    assert accepted(flow, case) == pytest.approx(float(expected), abs=EXACT)


@pytest.mark.parametrize(
    ("size", "trees"),
    [(4, ((1, 1), (1,))), (3, ((1,), (2, 1))), (3, ((1, 1, 1), (1,), (1, 1)))],
)
def test_multi_step_gives_the_target_distribution_when_every_draft_has_its_own_tree(size, trees):
    for seed, same in ((5, False), (6, True)):
        case, *_ = random_case(seed, size, max(trees, key=len), len(trees), True, same)
        case = dataclasses.replace(case, shape=tuple(map(TreeShape, trees)))
        for flow in (enumeration.step_flow(case), enumeration.lazy_step_flow(case)):
            assert differs(flow, case) < EXACT


def test_lazy_and_joint_enumeration_agree():
    case, *_ = random_case(4, 3, (2, 1), 2, zeros=True)
    np.testing.assert_allclose(
        enumeration.lazy_step_flow(case), enumeration.step_flow(case), atol=1e-13
    )


@pytest.mark.parametrize(
    ("size", "widths", "drafters"),
    [(5, (1, 1), 1), (3, (2,), 1), (4, (2,), 1), (3, (2, 1), 1), (3, (1, 1), 2), (4, (1,), 3)],
)
def test_naive_gives_the_target_distribution_on_every_tree(size, widths, drafters):
    """However its children were chosen: drawn trees and top-k trees are among them."""
    case, p, qs = random_case(5, size, widths, drafters, zeros=True)
    tokens = case.every_draw()
    flows = enumeration.match_flows_of(case, tokens)
    assert max(differs(flow, case) for flow in flows) < EXACT
    flow = np.tensordot(case.weight(tokens), flows, 1)
    expected = oracles.expected_accepted(p, qs, widths, oracles.naive)
    assert accepted(flow, case) == pytest.approx(float(expected), abs=EXACT)


def test_chosen_children_are_lossless_under_multi_step_whatever_they_are():
    case, *_ = random_case(6, 3, (2, 1), 1, zeros=True)
    flows = enumeration.flows_of(case, case.every_draw(), certain=True)
    assert max(differs(flow, case) for flow in flows) < EXACT


def test_a_chosen_child_is_accepted_as_often_as_under_naive():
    case, p, _ = random_case(7, 3, (2, 1), 1, zeros=False)
    tokens = np.array([[0, 2, 1, 1], [1, 1, 0, 2]])
    chosen = enumeration.flows_of(case, tokens, certain=True)
    root = [float(x) for x in p(())]
    below = p((0,))[1] * p(())[0] + p((2,))[1] * p(())[2]
    assert accepted(chosen[0], case) == pytest.approx(root[0] + root[2] + float(below), abs=EXACT)
    one, _, rest = oracles.probs(*p((1,)))
    assert accepted(chosen[1], case) == pytest.approx(root[1] * (1 + float(one + rest)), abs=EXACT)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_multi_step_gives_the_target_distribution_whatever_a_broken_draft_says(value):
    case, *_ = random_case(9, 3, (2, 1), 1, zeros=True)
    broken = dataclasses.replace(case, drafters=(np.full_like(case.p, value),))
    flows = enumeration.flows_of(broken, case.every_draw())
    assert max(differs(flow, case) for flow in flows) < EXACT


@pytest.mark.parametrize("rule", [rules.GREEDY, rules.NAIVE, rules.MULTI_STEP])
def test_every_rule_is_greedy_at_temperature_0(rule):
    case, *_ = random_case(8, 3, (2, 2), 1, zeros=False)
    best, tokens = case.p.argmax(axis=1), case.every_draw()

    @partial(jax.jit, compiler_options=enumeration.QUICK_COMPILE)
    @jax.vmap
    def outcome(draws):
        tree = merge(draws, jnp.int32(0), 2)
        contexts = enumeration.node_contexts(tree)
        p = jnp.eye(3)[jnp.asarray(best)[contexts]]
        got = rules.decide(rule, jax.random.key(0), jnp.int32(5), tree, p, 3)
        return contexts[got.path[got.count - 1]], got.count, got.token

    context, count, token = outcome(case.draws(tokens, certain=True))
    first = best[0] + 1
    second = first * 3 + best[first] + 1
    in_tree = [(case.contexts(tokens) == at).any(axis=1) for at in (first, second)]
    expected = np.where(in_tree[1], second, np.where(in_tree[0], first, 0))
    np.testing.assert_array_equal(context, expected)
    np.testing.assert_array_equal(count, 1 + in_tree[0] + in_tree[1])
    np.testing.assert_array_equal(token, best[expected])
