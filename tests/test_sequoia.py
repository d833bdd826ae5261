"""The dynamic programme of shapes, against every tree there is, and its choice by cost."""

import functools
import itertools
import time

import numpy as np
import pytest

from specjax.methods.sequoia import best_shape, expected_tokens, most_tokens
from specjax.trees.tree import TreeShape

Tree = tuple  # a node: the tuple of its children


@functools.cache
def forests(nodes: int) -> list[Tree]:
    """Every ordered forest of so many nodes, so every tree with so many below its root."""
    if nodes == 0:
        return [()]
    return [
        (first, *rest)
        for size in range(1, nodes + 1)
        for first, rest in itertools.product(forests(size - 1), forests(nodes - size))
    ]


def worth(tree: Tree, rows: np.ndarray, depth: int = 0) -> float:
    """F of a tree, the root counted as 1."""
    own = rows[min(depth, len(rows) - 1)]
    return 1 + sum(own[rank] * worth(child, rows, depth + 1) for rank, child in enumerate(tree))


def height(tree: Tree) -> int:
    return 1 + max(map(height, tree)) if tree else 0


def broadest(tree: Tree) -> int:
    return max(len(tree), *map(broadest, tree)) if tree else 0


def widths(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """Children of every node, level by level."""
    found, level = [], [tree]
    while any(level):
        found.append(tuple(map(len, level)))
        level = [child for node in level for child in node]
    return tuple(found)


def shares(seed: int, rows: int = 1, ranks: int = 6) -> np.ndarray:
    """Random acceptance by depth and rank, in no order; what is left is of no child."""
    random = np.random.default_rng(seed)
    return random.dirichlet(np.full(ranks + 1, 0.6), rows)[:, :ranks]


def test_there_are_as_many_trees_as_catalan_numbers():
    assert [len(forests(nodes)) for nodes in range(7)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_within_the_bounds_is_worth_more(seed, rows):
    acceptance = shares(seed, rows)
    given = acceptance[0] if rows == 1 else acceptance
    for nodes, depth, children in itertools.product((1, 2, 4, 6), (1, 2, 3, 6), (1, 2, 6)):
        allowed = [
            worth(tree, acceptance)
            for size in range(1, nodes + 1)
            for tree in forests(size)
            if height(tree) <= depth and broadest(tree) <= children
        ]
        tokens, shape = most_tokens(given, nodes, depth, children)
        assert tokens == pytest.approx(max(allowed), abs=1e-12)
        assert expected_tokens(shape, given) == pytest.approx(tokens, abs=1e-12)
        assert shape.num_nodes <= nodes
        assert shape.depth <= depth
        assert shape.widest <= children


def test_expected_tokens_of_every_small_tree():
    acceptance = shares(7, 2, 4)  # fewer ranks than children: the others are worth nothing
    rows = np.pad(acceptance, ((0, 0), (0, 2)))
    for tree in forests(5):
        found = expected_tokens(TreeShape(widths(tree)), acceptance)
        assert found == pytest.approx(worth(tree, rows), abs=1e-12)


def test_a_tree_of_three_nodes_by_hand():
    assert most_tokens([0.6, 0.3], 3, 3) == (
        pytest.approx(1 + 0.6 + 0.36 + 0.3),
        TreeShape((2, (1, 0))),
    )
    assert most_tokens([0.6, 0.2], 3, 3) == (
        pytest.approx(1 + 0.6 + 0.36 + 0.216),
        TreeShape((1, 1, 1)),
    )
    assert most_tokens([0.5, 0.3], 3, 1) == (pytest.approx(1.8), TreeShape((2,)))


def test_what_is_worth_nothing_is_left_out_but_for_one_node():
    assert most_tokens([0.5, 0.0, 0.0], 6, 2) == (1.75, TreeShape((1, 1)))
    assert most_tokens([0.0, 0.0], 6, 2) == (1.0, TreeShape((1,)))
    assert most_tokens([0.0, 0.5], 9, 2) == (1.75, TreeShape((2, (0, 2))))


def test_more_nodes_levels_or_children_are_never_worth_less():
    acceptance = shares(3, 1, 8)[0]
    for bounds in ("budget", "depth", "children"):
        fixed = {"budget": 40, "depth": 5, "children": 4}
        found = [
            most_tokens(acceptance, **(fixed | {bounds: bound})).tokens for bound in range(1, 20)
        ]
        assert (np.diff(found) >= 0).all()
        assert found[-1] > found[0]


def test_a_tree_outgrows_the_ceiling_of_a_chain():
    acceptance = np.array([0.6, 0.15, 0.08, 0.04])
    found = [most_tokens(acceptance, nodes, 16).tokens for nodes in (4, 32, 128)]
    assert most_tokens(acceptance, 64, 64, 1).tokens == pytest.approx(1 / (1 - 0.6), abs=1e-6)
    assert found[0] < 1 / (1 - 0.6) < found[1] < found[2]


def test_a_budget_of_256_and_16_levels_take_seconds_at_most():
    start = time.perf_counter()
    acceptance = 0.5 ** np.arange(1, 17)
    tokens, shape = most_tokens(acceptance, 256, 16)
    assert time.perf_counter() - start < 5
    assert shape.num_nodes == 256
    assert tokens == pytest.approx(expected_tokens(shape, acceptance))


# The choice by cost. -------------------------------------------------------------------------

ACCEPTANCE = [0.6, 0.15, 0.08, 0.04]


def test_the_fastest_is_the_best_of_a_search_over_bounds():
    target, draft = 1 + 0.02 * np.arange(40), 0.1
    found = best_shape(ACCEPTANCE, target, draft, range(1, 33), range(1, 9))
    rates = []
    for budget, depth in itertools.product(range(1, 33), range(1, 9)):
        tokens, shape = most_tokens(ACCEPTANCE, budget, depth)
        rates.append(tokens / (target[shape.num_nodes] + draft * shape.depth))
    assert found.rate == pytest.approx(max(rates))
    assert found.rate == pytest.approx(
        found.tokens / (target[found.shape.num_nodes] + draft * found.shape.depth)
    )
    assert found.tokens == pytest.approx(expected_tokens(found.shape, ACCEPTANCE))


def test_dear_nodes_make_trees_small_and_dear_levels_make_them_flat():
    def chosen(node: float, level: float) -> TreeShape:
        return best_shape(
            ACCEPTANCE, lambda n: 1 + node * n, level, (1, 4, 16, 64), range(1, 9)
        ).shape

    assert chosen(0.001, 0.01).num_nodes == 64
    assert chosen(1.0, 0.01).num_nodes == 1
    assert chosen(0.001, 1.0).depth < chosen(0.001, 0.01).depth
    assert chosen(0.01, 10.0).depth == 1


def test_costs_are_functions_arrays_or_a_number_a_level():
    by_nodes, by_levels = 2 + np.arange(9) ** 1.5, 0.3 * np.arange(5)
    kinds = [
        best_shape(ACCEPTANCE, target, draft, (2, 4, 8), (1, 2, 4))
        for target in (by_nodes, list(by_nodes), lambda n: by_nodes[n])
        for draft in (by_levels, 0.3, lambda d: 0.3 * d)
    ]
    assert len({kind.shape for kind in kinds}) == 1
    assert [kind.rate for kind in kinds] == pytest.approx([kinds[0].rate] * 9)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: most_tokens([0.5], 0, 1), "budget is 0"),
        (lambda: most_tokens([0.5], 1, -1), "depth is -1"),
        (lambda: most_tokens([0.5], 1, 1, 0), "children is 0"),
        (lambda: most_tokens([], 1, 1), r"acceptance has shape \(1, 0\)"),
        (lambda: most_tokens([0.7, 0.7], 1, 1), r"\[0.7, 0.7\]\]; a row must hold .* 1 in all"),
        (lambda: most_tokens([-0.1], 1, 1), "none below 0"),
        (lambda: most_tokens([np.nan], 1, 1), "none below 0"),
        (lambda: best_shape([0.5], [1.0], 0.1, (), (1,)), r"budgets are \(\)"),
        (lambda: best_shape([0.5], [1.0], 0.1, (1,), (1,)), "1 measured costs, and that of 1"),
        (lambda: best_shape([0.5], lambda _: 0.0, 0.0, (1,), (1,)), "costs 0.0, not above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
