"""Invariants of trees, merging and accepted paths, on random topologies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees.tree import (
    NO_DRAFTER,
    NO_PARENT,
    Draws,
    TreeShape,
    draw_tree,
    merge,
    root_only,
    take_row,
)
from specjax.verify import rules

DRAWS, SIZE, DEPTH = 9, 3, 4  # few tokens, so that many draws coincide
WINDOW = DEPTH + 1
ROOT = 2
RULES = (rules.GREEDY, rules.NAIVE, rules.MULTI_STEP)
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
tree_of = quick(merge, static_argnames="depth")
seen = quick(lambda tree: tree.attention_mask)
decide = quick(rules.decide, static_argnames=("rule", "window"))
trial_distributions = quick(lambda tree: jax.vmap(tree.trial_q)(jnp.arange(DRAWS, dtype=jnp.int32)))
checked = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def random_draws(draw):
    """Draws of any topology up to DEPTH, each from a distribution of its own parent."""
    parents, depth = [], []
    for m in range(DRAWS):
        below = [NO_PARENT, *(i for i in range(m) if depth[i] < DEPTH)]
        parents.append(draw(st.sampled_from(below)))
        depth.append(1 if parents[m] == NO_PARENT else depth[parents[m]] + 1)
    numbers = st.lists(st.integers(0, SIZE - 1), min_size=DRAWS, max_size=DRAWS)
    random = np.random.default_rng(draw(st.integers(0, 999)))
    return Draws(
        tokens=jnp.asarray(draw(numbers), jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        depth=jnp.asarray(depth, jnp.int32),
        drafter=jnp.asarray(draw(numbers), jnp.int32),
        row=jnp.asarray(parents, jnp.int32) + 1,
        q=jnp.asarray(random.dirichlet(np.ones(SIZE), DRAWS + 1), jnp.float32),
        certain=jnp.asarray(draw(st.booleans())),
    )


def merged(draws):
    return tree_of(draws, jnp.int32(ROOT), depth=DEPTH)


def path_of(tokens, parents, index, top):
    """Tokens from below the root down to an entry."""
    path = []
    while index != top:
        path.append(int(tokens[index]))
        index = int(parents[index])
    return tuple(reversed(path))


def draw_paths(draws):
    return [path_of(draws.tokens, draws.parents, m, NO_PARENT) for m in range(DRAWS)]


def node_paths(tree):
    """The path of every valid node, the root's first."""
    nodes = np.flatnonzero(tree.valid)
    return {int(n): path_of(tree.tokens, tree.parents, n, 0) for n in nodes}


def both(draws):
    """Draws and their merged tree, on the host."""
    return jax.device_get(draws), jax.device_get(merged(draws))


@checked
@given(random_draws())
def test_a_parent_comes_before_its_child_and_a_level_above_it(draws):
    _, tree = both(draws)
    for node in np.flatnonzero(tree.valid)[1:]:
        assert 0 <= tree.parents[node] < node
        assert tree.valid[tree.parents[node]]
        assert tree.depth[node] == tree.depth[tree.parents[node]] + 1
    assert (tree.tokens[0], tree.parents[0], tree.depth[0]) == (ROOT, NO_PARENT, 0)
    assert tree.drafter[0] == NO_DRAFTER
    filled = int(tree.valid.sum())
    assert tree.valid[:filled].all()
    assert (np.diff(tree.depth[:filled]) >= 0).all()


@checked
@given(random_draws())
def test_merge_keeps_exactly_the_union_of_the_paths(draws):
    draws, tree = both(draws)
    paths = list(node_paths(tree).values())
    assert len(set(paths)) == len(paths)
    assert set(paths) == {(), *draw_paths(draws)}


@checked
@given(random_draws())
def test_every_draw_stays_a_trial_of_its_own_node_and_distribution(draws):
    draws, tree = both(draws)
    paths = node_paths(tree)
    assert [paths[int(node)] for node in tree.trial_node] == draw_paths(draws)
    np.testing.assert_array_equal(tree.trial_row, draws.row)
    np.testing.assert_array_equal(tree.q, draws.q)
    for node in np.flatnonzero(tree.valid)[1:]:
        first = int(np.argmax(tree.trial_node == node))
        assert tree.drafter[node] == draws.drafter[first]


@checked
@given(random_draws())
def test_a_trial_is_tried_by_the_distribution_it_was_drawn_from(draws):
    found, draws = np.asarray(trial_distributions(merged(draws))), jax.device_get(draws)
    own = np.eye(SIZE)[draws.tokens] if draws.certain else draws.q[draws.parents + 1]
    np.testing.assert_array_equal(found, own)


@checked
@given(random_draws())
def test_ancestors_are_what_a_node_reaches_upwards(draws):
    tree = merged(draws)
    mask, tree = np.asarray(seen(tree)), jax.device_get(tree)
    for node in range(tree.num_slots):
        reached, at = {node}, int(node)
        while at > 0:
            at = int(tree.parents[at])
            reached.add(at)
        assert set(np.flatnonzero(mask[node])) == reached


@checked
@given(random_draws(), st.integers(0, 999))
def test_an_accepted_path_runs_down_from_the_root_over_nodes_that_exist(draws, seed):
    p = np.random.default_rng(seed).dirichlet(np.full(SIZE, 0.5), DRAWS + 1).astype(np.float32)
    tree = merged(draws)
    key, at = jax.random.key(seed), jnp.int32(3)
    decided = [decide(rule, key, at, tree, jnp.asarray(p), window=WINDOW) for rule in RULES]
    tree, decided = jax.device_get((tree, decided))
    for got in decided:
        count, path = int(got.count), got.path.tolist()
        assert 1 <= count <= WINDOW
        assert path[0] == 0
        assert path[count:] == [0] * (WINDOW - count)
        assert tree.valid[path[:count]].all()
        assert tree.parents[path[1:count]].tolist() == path[: count - 1]
        assert p[path[count - 1], got.token] > 0
    greedy = decided[0]
    best, last = p.argmax(axis=1), greedy.path[greedy.count - 1]
    along = greedy.path[: greedy.count]
    assert tree.tokens[along[1:]].tolist() == best[along[:-1]].tolist()
    assert greedy.token == best[last]
    children = tree.tokens[(tree.parents == last) & tree.valid]
    assert best[last] not in children, "the greedy path could have gone on"


def test_empty_slots_are_never_accepted():
    """Slots that hold nothing have token 0 and parent 0, as a child of the root might."""
    none = jnp.zeros(DRAWS, jnp.int32)
    draws = Draws(
        tokens=none + 1, parents=none + NO_PARENT, depth=none + 1, drafter=none, row=none,
        q=jnp.ones((DRAWS + 1, SIZE)) / SIZE, certain=jnp.array(False),
    )  # fmt: skip
    tree = merged(draws)
    assert tree.valid.tolist() == [True, True] + [False] * (DRAWS - 1)
    assert tree.trial_node.tolist() == [1] * DRAWS
    p = jnp.zeros((DRAWS + 1, SIZE)).at[:, 0].set(1.0)
    for rule in RULES:
        got = decide(rule, jax.random.key(0), jnp.int32(3), tree, p, window=WINDOW)
        assert (int(got.count), int(got.token)) == (1, 0)
    assert np.flatnonzero(seen(tree)[2]).tolist() == [0, 2]


def test_merge_orders_nodes_by_depth_then_by_first_draw():
    draws = Draws(
        tokens=jnp.array([5, 7, 5, 8, 7, 9], jnp.int32),
        parents=jnp.array([-1, 0, -1, 2, 2, -1], jnp.int32),
        depth=jnp.array([1, 2, 1, 2, 2, 1], jnp.int32),
        drafter=jnp.array([0, 0, 1, 1, 1, 2], jnp.int32),
        row=jnp.array([0, 1, 2, 3, 3, 4], jnp.int32),
        q=jnp.ones((5, 10)) / 10,
        certain=jnp.array(False),
    )
    tree = tree_of(draws, jnp.int32(4), depth=2)
    assert tree.tokens.tolist() == [4, 5, 9, 7, 8, 0, 0]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 0, 0]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 0, 0]
    assert tree.valid.tolist() == [True] * 5 + [False] * 2
    assert tree.drafter.tolist() == [-1, 0, 2, 0, 1, 0, 0]
    assert tree.trial_node.tolist() == [1, 3, 1, 4, 3, 2]


def test_a_tree_draws_itself():
    q = jnp.zeros((3, 10)).at[0, 5].set(0.5).at[0, 9].set(0.25).at[1, 7].set(1.0).at[2, 8].set(0.1)
    draws = Draws(
        tokens=jnp.array([5, 7, 9, 5, 8], jnp.int32),
        parents=jnp.array([-1, 0, -1, -1, 3], jnp.int32),
        depth=jnp.array([1, 2, 1, 1, 2], jnp.int32),
        drafter=jnp.array([0, 0, 0, 1, 1], jnp.int32),
        row=jnp.array([0, 1, 0, 0, 2], jnp.int32),
        q=q,
        certain=jnp.array(False),
    )
    tree = tree_of(draws, jnp.int32(4), depth=2)
    assert draw_tree(tree, lambda token: f"t{token}").splitlines() == [
        "'t4'",
        "├─ 't5' 0.50 draft 0",
        "│  ├─ 't7' 1.00 draft 0",
        "│  └─ 't8' 0.10 draft 1",
        "└─ 't9' 0.25 draft 0",
    ]
    assert "1.00 zero" in draw_tree(tree, str, ["zero", "one"].__getitem__)
    marked = draw_tree(tree, str, accepted=[1]).splitlines()
    assert [line.endswith(" *") for line in marked] == [False, True] + [False] * (len(marked) - 2)


def test_roots_alone_are_trees_without_trials():
    trees = root_only(jnp.array([3, 8], jnp.int32), 11)
    assert trees.tokens.tolist() == [[3], [8]]
    assert trees.trial_node.shape == (2, 0)
    assert trees.q.shape == (2, 0, 11)
    assert seen(trees).tolist() == [[[True]], [[True]]]
    row = take_row(trees, 1)
    assert (row.tokens.tolist(), row.num_slots) == ([8], 1)


# Static shapes. ------------------------------------------------------------------------------


def expansion(widths):
    """Nodes of a static expansion by brute force: parent, depth, number of its distribution,
    rank.
    """
    frontier, nodes, expanded = [NO_PARENT], [], 0
    for level, width in enumerate(widths, 1):
        below = []
        for place, parent in enumerate(frontier):
            own = width[place] if isinstance(width, tuple) else width
            nodes += [(parent, level, expanded, rank) for rank in range(own)]
            below += range(len(nodes) - own, len(nodes))
            expanded += own > 0
        frontier = below
    return nodes, expanded


UNIFORM = [(1,), (1, 1, 1), (3,), (2, 2), (2, 1, 3), (1, 1, 3, 1, 1)]
GENERAL = [
    *((3, (2, 1, 0), (1, 0, 1)), (2, (0, 1), 2), (1, 2, (2, 0), (0, 3))),
    *((2, (1, 1)), (4, (0, 0, 0, 1)), (3, 2, (0, 1, 1, 0, 2, 0), 1)),
]


@pytest.mark.parametrize("widths", UNIFORM + GENERAL)
def test_a_shape_numbers_its_nodes_level_by_level(widths):
    shape, (nodes, expanded) = TreeShape(widths), expansion(widths)
    parents, depths, distributions, ranks = zip(*nodes, strict=True)
    assert shape.parents().tolist() == list(parents)
    assert shape.depths().tolist() == list(depths)
    assert shape.distributions().tolist() == list(distributions)
    assert shape.ranks().tolist() == list(ranks)
    assert (shape.num_nodes, shape.num_distributions) == (len(nodes), expanded)
    assert shape.depth == len(widths)
    assert shape.levels == (1, *(depths.count(level) for level in range(1, shape.depth + 1)))
    assert shape.widest == max(ranks) + 1


@pytest.mark.parametrize("widths", UNIFORM + GENERAL)
def test_a_shape_says_which_nodes_of_a_level_have_children(widths):
    shape = TreeShape(widths)
    parents, starts = shape.parents().tolist(), np.cumsum((0, *shape.levels[1:]))
    for level in range(shape.depth):
        nodes = [NO_PARENT] if level == 0 else range(starts[level - 1], starts[level])
        own = [parents.count(node) for node in nodes]
        places, counts = shape.expanded(level)
        assert places.tolist() == [place for place, count in enumerate(own) if count]
        assert counts.tolist() == [count for count in own if count]


def test_equal_trees_are_equal_shapes():
    assert TreeShape((2, (2, 2), (1, 1, 1, 1))) == TreeShape((2, 2, 1))
    assert len({TreeShape((2, (1, 1))), TreeShape((2, 1)), TreeShape((2, (1, 0)))}) == 2
    assert TreeShape((2, (1, 0), 1)) == TreeShape((2, (1, 0), (1,)))


@pytest.mark.parametrize("widths", [(), (0,), (2, 0, 1), (1, -1)])
def test_widths_below_1_are_refused(widths):
    with pytest.raises(ValueError, match="a tree needs widths of at least 1, not \\("):
        TreeShape(widths)


@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        ((3, (2, 1)), "level 2 has widths 2,1, which are 2; it needs 3, one a node above it"),
        (((2, 1), 1), "level 1 has widths 2,1, which are 2; it needs 1,"),
        ((2, (1, 0), (1, 1)), "level 3 has widths 1,1, which are 2; it needs 1,"),
        ((2, (0, 0)), "level 2 has widths 0,0, and so not one node"),
        ((2, (2, -1)), "level 2 has widths 2,-1; none may be below 0"),
    ],
)
def test_widths_that_are_not_one_a_node_are_refused(widths, sentence):
    with pytest.raises(ValueError, match=sentence):
        TreeShape(widths)
