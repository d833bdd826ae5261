"""The enumeration of `test_distribution` on fixtures known to four digits, most of them not
lossless.

Each wrong variant is put in through what the shipped functions take: trials that were drawn or
ordered otherwise, distributions that are not those drawn from, another rule, shared randomness.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base import sampling
from specjax.base.pytree import replace
from specjax.trees.tree import TokenTree, TreeShape
from specjax.verify import token_wise
from specjax.verify.token_wise import Trial
from tests import enumeration, oracles
from tests.enumeration import Case, accepted, differs
from tests.oracles import any_order, independent, merged, probs, sorted_by_q, top_k

EXACT = 1e-9
CAUGHT = 1e-3
P = probs(".5", ".3", ".1", ".1")
Q = probs(".4", ".1", ".4", ".1")
Q2 = probs(".1", ".4", ".1", ".4")


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def without_q_of_earlier(trials):
    """Each trial's distribution without the tokens tried before it."""
    gone = [{token for token, _ in trials[:i]} for i in range(len(trials))]
    return tuple((t, oracles.without(q, g)) for (t, q), g in zip(trials, gone, strict=True))


def each(change, weighted):
    return [(change(trials), weight) for trials, weight in weighted]


def by_q(trials):
    """In the order of the draft's top-k: the most likely first, the lower id of a tie."""
    return sorted_by_q(sorted(trials))


NODE_FIXTURES = {
    "independent draws": (lambda: independent(Q, Q), 0, 0.8300),
    "without replacement, q updated": (
        lambda: each(without_q_of_earlier, oracles.without_replacement(Q, 2)), 0, 0.8500,
    ),
    "without replacement, q kept": (lambda: oracles.without_replacement(Q, 2), 0.0667, 0.9167),
    "without replacement, q updated, sorted by q": (
        lambda: each(without_q_of_earlier, each(by_q, oracles.without_replacement(Q, 2))),
        0.2556, 0.9167,
    ),
    "independent, q zeroed after a rejection": (
        lambda: each(without_q_of_earlier, independent(Q, Q)), 0.0400, 0.7900,
    ),
    "independent, duplicates merged": (lambda: each(merged, independent(Q, Q)), 0.0400, 0.8300),
    "most likely, in id order, softmax q": (lambda: top_k(Q, 2), 0.5000, 1.0000),
    "most likely, in random order, softmax q": (lambda: any_order(top_k(Q, 2)), 0.3375, 0.9375),
    "most likely, one-hot q": (
        lambda: each(lambda ts: tuple((t, oracles.one_hot(t, 4)) for t, _ in ts), top_k(Q, 2)),
        0, 0.6000,
    ),
    "two drafters in random order": (lambda: any_order(independent(Q, Q2)), 0, 0.8050),
    # specjax tries by drafter, then by draw: lossless too, with the better draft first it accepts
    # more, and the two orders average to the random one.
    "two drafters, in our order": (lambda: independent(Q, Q2), 0, 0.8500),
    "two drafters, in our order, exchanged": (lambda: independent(Q2, Q), 0, 0.7600),
    "two drafters, equal tokens merged, random order": (
        lambda: any_order(each(merged, independent(Q, Q2))), 0.0320, 0.8100,
    ),
    "two drafters, equal tokens merged, our order": (
        lambda: each(merged, independent(Q, Q2)), 0.0040, 0.8500,
    ),
    "two drafters, sorted by own q": (
        lambda: each(sorted_by_q, independent(Q, Q2)), 0.0800, 0.7700,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NODE_FIXTURES)
def test_node_fixtures(name):
    weighted, total_variation, hit = NODE_FIXTURES[name]
    weighted = list(weighted())
    flow = enumeration.node_flow(P, weighted)
    p = np.tile(np.array(P, float), (5, 1))
    found = enumeration.total_variation(flow, p, 1), enumeration.mean_accepted(flow, 1)
    assert found == pytest.approx((total_variation, hit), abs=5e-5)
    output, by_oracle = oracles.output_probs(P, weighted, oracles.multi_step)
    expected = oracles.total_variation(output, P), float(by_oracle)
    assert found == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    ("weighted", "hit"),
    [(independent(Q, Q), 0.4600), (oracles.without_replacement(Q, 2), 0.5511), (top_k(Q, 2), 0.6)],
)
def test_naive_fixtures(weighted, hit):
    weighted = list(weighted)
    tokens = np.array([[t for t, _ in trials] for trials, _ in weighted])
    case = Case(np.tile(np.array(P, float), (5, 1)), (np.ones((1, 4)) / 4,), TreeShape((2,)))
    choices = jnp.asarray(list(itertools.product(range(4), repeat=3)), jnp.int32)
    flows = enumeration.match_flow(case.draws(tokens), choices, jnp.asarray(case.p), 1)
    flow = np.tensordot([float(w) for _, w in weighted], np.asarray(flows), 1)
    assert differs(flow, case) < EXACT
    assert accepted(flow, case) == pytest.approx(hit, abs=5e-5)


@pytest.mark.parametrize(("seed", "mean"), [(0, 1.2508), (1, 1.1225), (2, 1.2953)])
def test_fixture_of_a_chain_of_two(seed, mean):
    p, q = oracles.random_distributions(seed, 3, 3)
    case = Case(enumeration.table(p), (enumeration.table(q),), TreeShape((1, 1)))
    flow = enumeration.step_flow(case)
    assert differs(flow, case) < EXACT
    assert accepted(flow, case) == pytest.approx(mean, abs=5e-5)


@pytest.mark.parametrize(
    ("seed", "naive", "recursive"), [(0, 1.086, 1.693), (1, 1.111, 1.588), (2, 1.061, 1.647)]
)
def test_oracle_fixture_of_trees_without_replacement(seed, naive, recursive):
    p, q = (distributions.__getitem__ for distributions in oracles.random_distributions(seed, 3, 4))
    for rule, mean in ((oracles.naive, naive), (oracles.recursive, recursive)):
        found = oracles.expected_without_replacement(p, q, (2, 2), rule)
        assert float(found) == pytest.approx(mean, abs=5e-4)


# Whole steps: the same enumeration as in `test_distribution`, with one thing wrong.
# ----------------------


def merge_trials(tree: TokenTree) -> TokenTree:
    """One trial a node; the others name the root, which has no parent and is never tried."""
    node = tree.trial_node
    first = jnp.argmax(node[:, None] == node, axis=1) == jnp.arange(node.shape[0])
    return replace(tree, trial_node=jnp.where(first, node, 0))


def sort_trials(tree: TokenTree) -> TokenTree:
    """Trials in the order of their own q, the largest first."""
    tokens = tree.tokens[tree.trial_node]
    order = jnp.argsort(-tree.q[tree.trial_row, tokens], stable=True)
    return replace(tree, trial_node=tree.trial_node[order], trial_row=tree.trial_row[order])


def share_probs(tree: TokenTree) -> TokenTree:
    """Every trial names the distribution of its parent's first trial."""
    above = tree.parents[tree.trial_node]
    first = jnp.argmax(above[:, None] == above, axis=1)
    return replace(tree, trial_row=tree.trial_row[first])


def keep_p(p, q, token):
    """p itself where the residual is due."""
    return Trial(token_wise.multi_step(p, q, token).accept, p)


def absolute(p, q, token):
    """The residual of |p - q|."""
    left = jnp.abs(p - q)
    return Trial(token_wise.multi_step(p, q, token).accept, left / left.sum())


def inverted(p, q, token):
    """p and q exchanged."""
    return Trial(jnp.minimum(1, q[token] / p[token]), token_wise.multi_step(p, q, token).residual)


@pytest.mark.parametrize(
    "change",
    [
        {"alter": merge_trials},
        {"alter": sort_trials},
        {"alter": share_probs},
        {"rule": keep_p},
        {"rule": absolute},
        {"rule": inverted},
    ],
    ids=lambda change: next(iter(change.values())).__name__,
)
def test_wrong_steps_are_caught(change):
    p, *qs = oracles.random_distributions(0, 3, 3, 3)
    drafters = tuple(map(enumeration.table, qs))
    case = Case(enumeration.table(p), drafters, TreeShape((2, 1)))
    assert differs(enumeration.step_flow(case), case) < EXACT
    assert differs(enumeration.step_flow(case, **change), case) > CAUGHT


def test_multi_step_on_most_likely_children_is_caught():
    """The pair that `find_rule` refuses: top-k trees, tried by the draft's softmax distribution."""
    p, q = oracles.random_distributions(0, 3, 3)
    case = Case(enumeration.table(p), (enumeration.table(q),), TreeShape((2, 1)))
    best = [np.argsort(-probs, kind="stable") for probs in case.drafters[0]]
    first, second = best[0][:2]
    tokens = np.array([[first, second, best[first + 1][0], best[second + 1][0]]])
    assert differs(enumeration.flows_of(case, tokens)[0], case) > 0.01
    assert differs(enumeration.flows_of(case, tokens, certain=True)[0], case) < EXACT


def shared_draws(*distributions):
    """Draws of several drafters from one uniform, by the breakpoints of their distributions."""
    points = sorted({0.0, 1.0, *(float(x) for q in distributions for x in itertools.accumulate(q))})
    for low, high in itertools.pairwise(points):
        uniform = jnp.full(2, (low + high) / 2)
        tokens = [int(sampling.draw(jnp.array(q, float), uniform)) for q in distributions]
        yield tuple(zip(tokens, distributions, strict=True)), high - low


def test_one_key_for_all_drafters_is_caught():
    p = np.tile(np.array(P, float), (5, 1))
    for distributions in ((Q, Q2), (Q, Q)):
        separate = enumeration.node_flow(P, independent(*distributions))
        shared = enumeration.node_flow(P, shared_draws(*distributions))
        assert shared.sum() == pytest.approx(1, abs=EXACT)
        assert enumeration.total_variation(separate, p, 1) < EXACT
        assert enumeration.total_variation(shared, p, 1) > CAUGHT


def both(a, b, shared):
    """P(u < a, v < b), P(u < a, v >= b), ... of two accept uniforms, the same one if `shared`."""
    hit = min(a, b) if shared else a * b
    return {(1, 1): hit, (1, 0): a - hit, (0, 1): b - hit, (0, 0): 1 - a - b + hit}


def two_steps(p, q, shared):
    """The distribution of the first three tokens of two steps, each over one drawn child."""
    trial = jax.jit(token_wise.multi_step)
    flow = np.zeros_like(p)

    def after(context, token):
        return context * 3 + token + 1

    def emit(context, probs, mass):
        flow[context] += mass * probs

    for x in range(3):
        first = trial(jnp.asarray(p[0]), jnp.asarray(q[0]), jnp.int32(x))
        for accept in (1, 0):
            above, probs = (
                (after(0, x), p[after(0, x)]) if accept else (0, np.asarray(first.residual))
            )
            for token, y in itertools.product(range(3), repeat=2):
                root = after(above, token)
                second = trial(jnp.asarray(p[root]), jnp.asarray(q[root]), jnp.int32(y))
                chances = both(float(first.accept), float(second.accept), shared)
                mass = q[0, x] * probs[token] * q[root, y]
                emit(after(root, y), p[after(root, y)], mass * chances[accept, 1])
                emit(root, np.asarray(second.residual), mass * chances[accept, 0])
    return flow


def test_noise_reused_across_steps_is_caught():
    p, q = map(enumeration.table, oracles.random_distributions(0, 3, 5))
    assert enumeration.total_variation(two_steps(p, q, shared=False), p, 4) < EXACT
    assert enumeration.total_variation(two_steps(p, q, shared=True), p, 4) > CAUGHT
