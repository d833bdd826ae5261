"""The compiled walk takes exactly the decisions that `test_distribution` enumerates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.base.sampling import Purpose, fold
from specjax.trees.tree import TokenTree, TreeShape, merge
from specjax.verify import rules
from tests import enumeration, oracles
from tests.enumeration import Case

ROWS, WINDOW = 1500, 3
quick = partial(jax.jit, compiler_options=enumeration.QUICK_COMPILE)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def random_trees(seed: int) -> tuple[TokenTree, np.ndarray]:
    """Merged trees of two drafters with tokens of any probability, and p at their nodes."""
    random = np.random.default_rng(seed)
    p, *qs = oracles.random_distributions(seed, 3, 3, 3, zeros=True)
    case = Case(enumeration.table(p), tuple(map(enumeration.table, qs)), TreeShape((2, 1)))
    draws = case.draws(random.integers(0, 3, (ROWS, case.num_draws)))
    draws = replace(draws, certain=jnp.asarray(random.random(ROWS) < 0.2))
    trees = quick(jax.vmap(lambda d: merge(d, jnp.int32(0), 2)))(draws)
    return trees, case.p[np.asarray(jax.vmap(enumeration.node_contexts)(trees))]


def inverse(probs, uniform):
    """The first token of positive probability past the uniform's share."""
    running = np.cumsum(probs)
    return next(x for x, w in enumerate(probs) if w > 0 and running[x] > uniform * running[-1])


def plain_walk(tree, p, accept, last):
    """The walk with lists and loops: path, token."""
    path, probs, done = [0], p[0], False
    while not done:
        done = True
        for trial, node in enumerate(tree.trial_node):
            if tree.parents[node] != path[-1]:
                continue
            token = tree.tokens[node]
            q = np.eye(3)[token] if tree.certain else tree.q[tree.trial_row[trial]]
            chance = probs[token] / q[token] if q[token] else float(probs[token] > 0)
            if accept[trial] < chance:
                path, probs, done = [*path, int(node)], p[node], False
                break
            left = np.maximum(probs - q, 0)
            probs = left / left.sum() if left.sum() > 0 else probs
    return path, inverse(probs, last[1])


def same_paths(compiled, plain, trees, p, accept, last):
    """Checks that every row's path and token are those of a plain twin, and of every length."""
    got = jax.device_get(compiled(trees, jnp.asarray(p), jnp.asarray(accept), jnp.asarray(last)))
    trees = jax.device_get(trees)
    lengths = set()
    for row in range(ROWS):
        tree = jax.tree.map(lambda leaf, row=row: leaf[row], trees)
        path, token = plain(tree, p[row], accept[row], last[row])
        assert got.path[row].tolist() == path + [0] * (WINDOW - len(path))
        assert (got.count[row], got.token[row]) == (len(path), token)
        lengths.add(len(path))
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("seed", [0, 1])
def test_walk_equals_a_plain_walk(seed):
    trees, p = random_trees(seed)
    random = np.random.default_rng(seed + 100)
    accept = random.random((ROWS, trees.trial_node.shape[1]))
    accept[random.random(accept.shape) < 0.2] = 0
    last = random.random((ROWS, 2))
    last[random.random(last.shape) < 0.2] = 0

    @quick
    @jax.vmap
    def walk(tree, p, accept, last):
        return rules.walk(tree, p.__getitem__, accept, last, WINDOW)

    same_paths(walk, plain_walk, trees, p, accept, last)


def distinct_trees(seed: int) -> tuple[TokenTree, np.ndarray]:
    """Trees of one drafter whose siblings differ, tokens of any probability, and p at the nodes."""
    random = np.random.default_rng(seed)
    p, q = oracles.random_distributions(seed, 3, 3, 2, zeros=True)
    case = Case(enumeration.table(p), (enumeration.table(q),), TreeShape((2, 2)))
    pairs = random.permuted(np.tile(np.arange(3), (ROWS, 3, 1)), axis=2)[..., :2]
    draws = replace(
        case.draws(pairs.reshape(ROWS, 6)), certain=jnp.asarray(random.random(ROWS) < 0.2)
    )
    trees = quick(jax.vmap(lambda d: merge(d, jnp.int32(0), 2)))(draws)
    return trees, case.p[np.asarray(jax.vmap(enumeration.node_contexts)(trees))]


def plain_traversal(tree, p, accept, last):
    """The traversal with recursion: path, token."""
    distributions, weights = {0: p[0]}, {0: 1.0}

    def probs_of(node):
        own = tree.tokens[node]
        before = [n for n in range(1, node) if tree.parents[n] == tree.parents[node]]
        q = tree.q[tree.trial_row[node - 1]].copy()
        q[[tree.tokens[n] for n in before]] = 0
        return np.eye(3)[own] if tree.certain or q.sum() == 0 else q / q.sum()

    def below(node, path):
        for child in (n for n in range(1, 7) if tree.parents[n] == node):
            q, token = probs_of(child), tree.tokens[child]
            ratio = weights[node] * distributions[node][token]
            weights[child] = min(1.0, ratio / q[token] if q[token] else np.inf) if ratio else 0.0
            distributions[child] = p[child]
            if found := below(child, [*path, child]):
                return found
            left = np.maximum(weights[node] * distributions[node] - q, 0)
            whole = left.sum() + 1 - weights[node]
            distributions[node] = left / left.sum() if left.sum() > 0 else distributions[node]
            weights[node] = left.sum() / whole if whole > 0 else 1.0
        kept = node == 0 or accept[node] < weights[node]
        return (path, inverse(distributions[node], last[1])) if kept else None

    return below(0, [0])


@pytest.mark.parametrize("seed", [0, 1])
def test_traversal_equals_a_plain_recursion(seed):
    trees, p = distinct_trees(seed)
    random = np.random.default_rng(seed + 100)
    accept, last = random.random((ROWS, trees.num_slots)), random.random((ROWS, 2))
    accept[random.random(accept.shape) < 0.2] = 0

    @quick
    @jax.vmap
    def traverse(tree, p, accept, last):
        return rules.traverse(tree, p.__getitem__, accept, last, WINDOW)

    same_paths(traverse, plain_traversal, trees, p, accept, last)


@pytest.mark.parametrize("seed", [0, 1])
def test_block_decides_as_traversal_does(seed):
    """On the same chains, some of them with empty slots at their end, with the same uniforms."""
    random = np.random.default_rng(seed)
    p, q = oracles.random_distributions(seed, 3, 4, 2, zeros=True)
    case = Case(enumeration.table(p), (enumeration.table(q),), TreeShape((1, 1, 1)))
    certain = jnp.asarray(random.random(ROWS) < 0.2)
    draws = replace(case.draws(random.integers(0, 3, (ROWS, 3))), certain=certain)
    trees = quick(jax.vmap(lambda d: merge(d, jnp.int32(0), 3)))(draws)
    nodes = random.integers(0, 4, (ROWS, 1))
    trees = replace(trees, valid=jnp.asarray(np.arange(4) <= nodes))
    p = case.p[np.asarray(jax.vmap(enumeration.node_contexts)(trees))]
    accept, last = random.random((ROWS, 4)), random.random((ROWS, 2))
    accept[random.random(accept.shape) < 0.2] = 0

    def decided(rule):
        def one(tree, p, accept, last):
            return rule(tree, p.__getitem__, accept, last, 4)

        return quick(jax.vmap(one))(trees, p, accept, last)

    found, expected = decided(rules.block), decided(rules.traverse)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert set(found.count.tolist()) == {1, 2, 3, 4}
    assert (found.count <= nodes[:, 0] + 1).all()


@pytest.mark.parametrize("rule", [rules.MULTI_STEP, rules.RECURSIVE, rules.ONE_HOT])
def test_every_token_wise_rule_tries_by_its_own_distribution(rule):
    trees, p = distinct_trees(2)
    keys = jax.random.split(jax.random.key(9), ROWS)

    @quick
    @jax.vmap
    def both(key, tree, p):
        at = jnp.int32(11)
        accept = jax.random.uniform(fold(key, at, Purpose.ACCEPT), (tree.num_slots,))
        last = jax.random.uniform(fold(key, at, Purpose.RESIDUAL), (2,))
        distributions = jax.vmap(lambda trial: enumeration.TRIAL_PROBS[rule](tree, trial))(
            jnp.arange(6, dtype=jnp.int32)
        )
        given = replace(
            tree,
            q=distributions,
            trial_row=jnp.arange(6, dtype=jnp.int32),
            certain=tree.certain & False,
        )
        walked = rules.walk(given, p.__getitem__, accept, last, WINDOW)
        return rules.decide(rule, key, at, tree, p, WINDOW), walked, distributions

    decided, walked, distributions = jax.device_get(both(keys, trees, jnp.asarray(p)))
    jax.tree.map(np.testing.assert_array_equal, decided, walked)
    trees = jax.device_get(trees)
    second = trees.trial_node[:, 1]  # the root's second child
    drawn = ~trees.certain
    token = trees.tokens[np.arange(ROWS), second]
    sibling = trees.tokens[np.arange(ROWS), trees.trial_node[:, 0]]
    at = distributions[np.arange(ROWS), 1]
    if rule is rules.MULTI_STEP:
        np.testing.assert_array_equal(at[drawn], trees.q[drawn, 0])
    elif rule is rules.RECURSIVE:
        assert (at[drawn, sibling[drawn]] == 0).all()
    if rule is rules.ONE_HOT:
        np.testing.assert_array_equal(at, np.eye(3)[token])
    np.testing.assert_array_equal(at[~drawn], np.eye(3)[token[~drawn]])


def test_a_uniform_of_zero_never_accepts_what_p_excludes():
    trees, p = random_trees(2)
    zeros = jnp.zeros((ROWS, trees.trial_node.shape[1]))

    @quick
    @jax.vmap
    def walk(tree, p, accept):
        return rules.walk(tree, p.__getitem__, accept, jnp.zeros(2), WINDOW)

    got = jax.device_get(walk(trees, jnp.asarray(p), zeros))
    tokens, rows = np.asarray(trees.tokens), np.arange(ROWS)
    for level in range(1, WINDOW):
        on = got.count > level
        emitted = tokens[rows, got.path[:, level]]
        assert (p[rows, got.path[:, level - 1], emitted] > 0)[on].all()
    assert (p[rows, got.path[rows, got.count - 1], got.token] > 0).all()


def test_decide_walks_with_uniforms_of_its_own_purposes():
    trees, p = random_trees(3)
    keys = jax.random.split(jax.random.key(9), ROWS)

    @quick
    @jax.vmap
    def both(key, tree, p):
        at = jnp.int32(11)
        decided = rules.decide(rules.MULTI_STEP, key, at, tree, p, WINDOW)
        accept = jax.random.uniform(fold(key, at, Purpose.ACCEPT), tree.trial_node.shape)
        last = jax.random.uniform(fold(key, at, Purpose.RESIDUAL), (2,))
        return decided, rules.walk(tree, p.__getitem__, accept, last, WINDOW)

    decided, walked = both(keys, trees, jnp.asarray(p))
    for name in ("path", "count", "token"):
        np.testing.assert_array_equal(getattr(decided, name), getattr(walked, name))


def test_naive_emits_the_same_tokens_whatever_the_tree():
    """Noise is keyed by the emitted position: a tree only changes how many tokens come at once."""
    case = Case(
        enumeration.table(oracles.random_distributions(5, 3, 3)[0]),
        (np.ones((13, 3)) / 3,),
        TreeShape((2, 1)),
    )
    tokens = case.every_draw()

    @quick
    @jax.vmap
    def outcome(draws):
        tree = merge(draws, jnp.int32(0), 2)
        contexts = enumeration.node_contexts(tree)
        p = jnp.asarray(case.p)[contexts]
        got = rules.decide(rules.NAIVE, jax.random.key(4), jnp.int32(7), tree, p, 3)
        return contexts[got.path[got.count - 1]] * 3 + got.token + 1, got.count

    ended, count = jax.device_get(outcome(case.draws(tokens)))
    assert set(count.tolist()) == {1, 2, 3}
    full = int(ended[count == 3][0])
    prefix = {3: full, 2: (full - 1) // 3, 1: ((full - 1) // 3 - 1) // 3}
    assert all(at == prefix[int(n)] for at, n in zip(ended, count, strict=True))


@pytest.mark.parametrize("rule", [rules.GREEDY, rules.NAIVE])
def test_from_the_root_down_is_the_same_decision(rule):
    """`visiting` asks for p of the nodes on the way alone; no two children have a token here."""
    trees, p = random_trees(4)
    keys = jax.random.split(jax.random.key(4), ROWS)
    places = jnp.arange(ROWS, dtype=jnp.int32)

    def both(key, place, tree, p):
        asked = key, place, tree, p.__getitem__, WINDOW
        return rule.decide(*asked), rule.visiting(*asked)

    whole, visited = jax.device_get(quick(jax.vmap(both))(keys, places, trees, jnp.asarray(p)))
    for name in ("path", "count", "token"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(visited, name))
    assert set(whole.count) == {1, 2, 3}


@pytest.mark.parametrize("rule", rules.RULES.values(), ids=rules.RULES)
def test_what_visits_asks_for_no_other_nodes(rule):
    """Distributions of nodes that are not on the way may be anything, such as no numbers."""
    if rule.visiting is None:
        assert rule in (rules.BLOCK, rules.TRAVERSAL)
        return
    trees, p = random_trees(5)
    decide = quick(jax.vmap(lambda *of: rule.visiting(*of[:3], of[3].__getitem__, WINDOW)))
    keys, places = jax.random.split(jax.random.key(5), ROWS), jnp.arange(ROWS, dtype=jnp.int32)
    found = jax.device_get(decide(keys, places, trees, jnp.asarray(p)))
    on_the_way = np.zeros(p.shape[:2], bool)
    on_the_way[np.arange(ROWS)[:, None], found.path] = True
    unknown = np.where(on_the_way[..., None], p, np.nan)
    again = jax.device_get(decide(keys, places, trees, jnp.asarray(unknown)))
    for name in ("path", "count", "token"):
        np.testing.assert_array_equal(getattr(found, name), getattr(again, name))
