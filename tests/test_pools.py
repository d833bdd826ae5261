"""Pools at equal nodes: the trees that are tried, and differences between paired prompts."""

import numpy as np
import pytest

from benchmarks.pools import _tried, accepted, difference
from specjax.methods.acceptance import measured
from specjax.trees.tree import TreeShape
from tests.pairs import near, varied_model
from tests.rows import rows_of
from train.runs import Counts


def counts(tokens, steps) -> Counts:
    return Counts(np.array(tokens), np.array(steps), np.array(steps))


def test_a_difference_is_of_tokens_per_step_over_all_prompts():
    one, other = counts([30, 60, 10], [10, 15, 5]), counts([30, 60, 10], [15, 20, 5])
    percent, low, high = difference(one, other)
    assert percent == pytest.approx(100 * (40 / 30 - 1))
    assert 0 <= low < percent < high <= 50 + 1e-9
    assert difference(one, one) == (0, 0, 0)


def test_an_interval_is_of_pairs():
    """Prompts that differ much from one another, and little between the two."""
    rng = np.random.default_rng(0)
    tokens, steps = rng.integers(50, 500, 64), rng.integers(10, 60, 64)
    percent, low, high = difference(counts(tokens * 102, steps), counts(tokens * 100, steps))
    assert (percent, low, high) == pytest.approx((2, 2, 2))


def test_trees_that_are_tried_share_the_nodes():
    tried = _tried([np.array([[0.7, 0.1]]), np.array([[0.5, 0.3]])], 7)
    nodes = [[TreeShape(widths).num_nodes for widths in trees] for trees in tried]
    assert nodes == [[5, 5], [5, 4], [4, 4], [4, 3]]


@pytest.mark.slow
def test_tokens_tried_one_by_one_survive_less_often_than_paths_verified_as_a_whole():
    target = varied_model(eos_ids=())
    draft = near(target, 1)
    made = rows_of(target, 4, np.full(4, 0.8, np.float32))
    found = accepted(target, draft, made, 0.8)
    assert 1 > found["survival"][0] > found["survival"][3] > 0
    assert found["survival"][3] < found["survival_as_a_whole"][3]
    whole = measured(target, draft, made.tokens.tolist(), made.prompt.tolist(), 0.8, 8, 4)
    assert found["by_rank"] == pytest.approx(whole.by_rank.tolist())
    assert found["by_rank"][0] == pytest.approx(found["survival"][0], abs=0.25)
