"""The tree that is worth the most, from measured acceptance: Sequoia's dynamic programme.

Sequoia (arXiv 2402.12374), section 3. Positional acceptance is an array: entry `b` is the
probability that the child of rank `b` of an accepted node is *the accepted one*, over all visits
of such nodes, those among them on which an earlier child was accepted. So it is no probability
given that the earlier ones were rejected, and its sum is that of accepting any child, at most 1.
The paper's assumption is that it depends on the rank alone; an array of rows, one a depth (row 0
for children of the root, the last row for all deeper ones), lets it change with depth.

A node is then accepted with the product of the entries along its path, and the expected tokens
of a step are the sum of these products over all nodes, the root counted as 1: its share is the
token that the target itself gives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from specjax.trees.tree import NO_PARENT, TreeShape

Acceptance: TypeAlias = np.ndarray | Sequence[float] | Sequence[Sequence[float]]
Cost: TypeAlias = Callable[[int], float] | np.ndarray | Sequence[float]
_ROUNDING = 1e-4  # of sums of float32


class Expected(NamedTuple):
    """A tree with the expected tokens of a step, the target's own token included."""

    tokens: float
    shape: TreeShape


class Fastest(NamedTuple):
    """A tree with its expected tokens, and those per second (or per unit of the costs)."""

    rate: float
    tokens: float
    shape: TreeShape


def expected_tokens(shape: TreeShape, acceptance: Acceptance) -> float:
    """The expected tokens F of a step with any tree (Sequoia, section 3).

    Children of a rank beyond `acceptance` are never accepted.

    Raises:
      ValueError: `acceptance` holds no probabilities of exclusive events.
    """
    ranks, depths = shape.ranks(), shape.depths()
    rows = _rows(acceptance, shape.depth)
    known = ranks < rows.shape[1]
    own = np.where(known, rows[depths - 1, np.where(known, ranks, 0)], 0.0)
    product = np.ones(shape.num_nodes)
    for node, parent in enumerate(shape.parents()):
        product[node] = own[node] * (1 if parent == NO_PARENT else product[parent])
    return 1 + float(product.sum())


def most_tokens(
    acceptance: Acceptance, budget: int, depth: int, children: int | None = None
) -> Expected:
    """The tree of most expected tokens (Sequoia, section 3).

    It has at most `budget` nodes below the root, `depth` levels and `children` children a node
    (default: as many as `acceptance` has entries); a node that is worth nothing is left out, but
    for one.

    Raises:
      ValueError: a bound is below 1, or `acceptance` holds no probabilities of exclusive events.
    """
    return _best(_table(acceptance, budget, depth, children), budget)


def best_shape(
    acceptance: Acceptance,
    target_cost: Cost,
    draft_cost: float | Cost,
    budgets: Sequence[int],
    depths: Sequence[int],
    children: int | None = None,
) -> Fastest:
    """The tree of most expected tokens a second among those of `budgets` and `depths`.

    Sequoia, section 3: F(n, d) / (t(n) + d·c). `target_cost` is t, what a pass of the target
    over the root and n nodes takes; `draft_cost` is c, what a draft's pass takes, or what drafting
    d levels takes in all. Costs are functions, or arrays indexed by n or d. n and d are those of
    the tree, which may be smaller than its bounds.

    Raises:
      ValueError: there is no budget or depth, a bound is below 1, a cost is not above 0, or
        `acceptance` holds no probabilities of exclusive events.
    """
    if not budgets or not depths:
        raise ValueError(f"budgets are {budgets} and depths {depths}; each needs one at least.")

    tables = [_table(acceptance, max(budgets), depth, children) for depth in sorted(depths)]
    found = [_best(table, budget) for table in tables for budget in sorted(budgets)]
    rated = [Fastest(one.tokens / _step_cost(one, target_cost, draft_cost), *one) for one in found]
    return max(rated, key=lambda one: one.rate)


def _step_cost(found: Expected, target_cost: Cost, draft_cost: float | Cost) -> float:
    nodes, levels = found.shape.num_nodes, found.shape.depth
    cost = _of(target_cost, nodes) + _of(draft_cost, levels)
    if not cost > 0:
        raise ValueError(f"a step with {nodes} nodes in {levels} levels costs {cost}, not above 0.")
    return cost


def _of(cost: float | Cost, count: int) -> float:
    """What `count` nodes or levels cost; a plain number is the cost of each."""
    if callable(cost):
        return float(cost(count))
    known = np.asarray(cost, float)
    if known.ndim == 0:
        return float(known) * count
    if count >= known.size:
        raise ValueError(f"there are {known.size} measured costs, and that of {count} is needed.")
    return float(known[count])


def _rows(acceptance: Acceptance, depth: int) -> np.ndarray:
    """Acceptance by depth and rank, checked; float64 [D, K]."""
    given = np.atleast_2d(np.asarray(acceptance, float))
    if given.ndim != 2 or not given.size:
        raise ValueError(f"acceptance has shape {given.shape}; it must be by rank, or depth, rank.")
    if not (given >= 0).all() or given.sum(axis=1).max() > 1 + _ROUNDING:
        raise ValueError(
            f"acceptance is {given.tolist()}; a row must hold probabilities of which child is the "
            "accepted one, so none below 0 and at most 1 in all."
        )
    return given[np.minimum(np.arange(depth), len(given) - 1)]


class _Table(NamedTuple):
    """What nodes are worth: `worth[m]` the root with at most m nodes below it.

    `sizes[d, b, m]` is how many of m nodes the child of rank b below a node of depth d takes, when
    m are left for it and the ranks after it; 0 where it and they are not worth having.
    """

    worth: np.ndarray
    sizes: np.ndarray


def _table(acceptance: Acceptance, budget: int, depth: int, children: int | None) -> _Table:
    for name, bound in (("budget", budget), ("depth", depth), ("children", children)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name} is {bound}; it must be at least 1.")
    rows = _rows(acceptance, min(depth, budget))[:, :budget][:, :children]
    sizes = np.zeros((*rows.shape, budget + 1), int)
    worth = np.ones(budget + 1)
    for level in reversed(range(rows.shape[0])):
        later = np.zeros(budget + 1)
        for rank in reversed(range(rows.shape[1])):
            later, sizes[level, rank] = _with_child(rows[level, rank] * worth, later)
        worth = 1 + later
    return _Table(worth, sizes)


def _with_child(child: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most that a child and the ranks after it give of m nodes, and how many it takes; [N+1].

    `child[m]` is what a child gives with m nodes below it, `later[m]` what later ranks give.
    """
    left = np.arange(later.size)[:, None] - np.arange(later.size)
    totals = np.where(left >= 0, np.roll(child, 1) + later[left], 0)
    totals[:, 0] = 0  # no child
    taken = totals.argmax(axis=1)
    return np.take_along_axis(totals, taken[:, None], axis=1)[:, 0], taken


def _best(table: _Table, budget: int) -> Expected:
    """The tree that a table gives for a budget, read from the root down."""
    widths, above = [], [budget]
    for level, sizes in enumerate(table.sizes):
        below = [_children_of(sizes, nodes, 1 if level == 0 else 0) for nodes in above]
        if not any(below):
            break
        widths.append(tuple(len(own) for own in below))
        above = [nodes for own in below for nodes in own]
    return Expected(float(table.worth[budget]), TreeShape(tuple(widths)))


def _children_of(sizes: np.ndarray, nodes: int, least: int) -> list[int]:
    """How many nodes every child of a node has below itself, `least` children or more."""
    found = []
    for own in sizes:
        taken = max(int(own[nodes]), len(found) < least)
        if not taken:
            break
        found.append(taken - 1)
        nodes -= taken
    return found
