"""Held-out estimates against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.conftest import tiny_model
from tests.rows import PROMPT, rows_of, whole
from train.heldout import (
    HeldOut,
    View,
    cover,
    estimates,
    hold_out,
    matched_run,
    rank,
    sampled_chain,
    view,
    walk,
)

matrices = hnp.arrays(bool, st.tuples(st.integers(1, 3), st.integers(8, 14)))


@given(matrices, st.integers(1, 8))
def test_matched_run_and_walk_are_a_greedy_chain(match, depth):
    runs, tokens, steps = matched_run([match] * depth), 0, 0
    for row, start in np.ndindex(match.shape):
        wanted = len(list(itertools.takewhile(bool, match[row, start : start + depth])))
        assert runs[row, start] == wanted
    length = np.arange(len(match)) + match.shape[1] - len(match) + 1
    for row, end in zip(match, length, strict=True):
        at = 0
        while at + depth <= end:
            accepted = len(list(itertools.takewhile(bool, row[at : at + depth])))
            at, tokens, steps = at + accepted + 1, tokens + accepted + 1, steps + 1
    assert walk(runs, length, depth) == pytest.approx(tokens / max(steps, 1))


def test_sampled_chain_is_the_expectation_over_all_paths():
    p, q = np.array([4, 2, 1, 1]) / 8, np.array([1, 5, 1, 1]) / 8
    low = np.minimum(p, q)
    depth = 2
    paths = list(itertools.product(range(8), repeat=depth))  # 8 draws of equal probability
    token = np.repeat(np.arange(4), (p * 8).astype(int))[np.array(paths)]
    length = np.full(len(token), depth)
    one, chain = sampled_chain(np.log(p)[token], [np.log(q)[token]] * depth, length)
    wanted = 1 + low.sum() + sum(low[a] * low[b] for a, b in itertools.product(range(4), repeat=2))
    assert one == pytest.approx(low.sum())
    assert chain == pytest.approx(wanted)


def test_a_model_is_its_own_perfect_draft():
    model = tiny_model(seed=3)
    rows = rows_of(model, 4, np.array([0, 0.8, 0, 0.8], np.float32))
    held = hold_out(model, rows)
    found = estimates(held, view(model, rows), [], 4)
    assert found["agreement"] == 1
    assert found["tokens_per_step"] == 5
    assert found["sampled_acceptance"] == pytest.approx(1)
    assert found["sampled_tokens_per_step"] == pytest.approx(5)


def test_pool_figures_are_those_of_the_union():
    tokens = np.tile(np.arange(PROMPT + 8, dtype=np.int32), (3, 1))
    rows = whole(tokens, np.array([0, 0, 0.8], np.float32))
    text, probs = rows.following, np.zeros((3, 8), np.float32)

    def draft(right: np.ndarray, rank: int) -> View:
        """Right where `right`, else with the target's token at `rank`."""
        top = np.full((3, 8, 5), 63, np.int32)
        places = np.where(right, 0, rank)
        np.put_along_axis(top, places[..., None], text[..., None], axis=-1)
        return View(top, probs)

    first = np.zeros((3, 8), bool)
    first[:, :4] = True
    found = estimates(HeldOut(rows, probs), draft(~first, 2), [draft(first, 3)], 4)
    assert found["agreement"] == 0.5
    assert found["pool_agreement"] == 1
    assert found["top2"] == 0.5
    assert found["top3"] == 1
    # each draft goes on where the other stops, and each step's chain is right to its end
    assert found["pool_tokens_per_step"] == 5


def test_steps_after_a_rows_end_count_nowhere():
    model = tiny_model(seed=3)
    rows = rows_of(model, 4, np.array([0, 0.8, 0, 0.8], np.float32))
    tokens = rows.tokens.copy()
    tokens[:, PROMPT + 7 :] = 0
    short = rows._replace(tokens=tokens, length=np.full(4, 7, np.int32))
    found = estimates(hold_out(model, short), view(model, short), [], 4)
    assert found["agreement"] == 1
    assert found["tokens_per_step"] == 5
    assert found["sampled_tokens_per_step"] == pytest.approx(5)


@given(st.integers(0, 1000))
def test_cover_and_rank_are_those_of_sets(seed):
    rng = np.random.default_rng(seed)
    tops = [np.stack([rng.permutation(7)[:5] for _ in range(12)]).reshape(2, 6, 5)
            for _ in range(2)]  # fmt: skip
    text, alive = rng.integers(0, 7, (2, 6)), rng.random((2, 6)) < 0.8
    alive[0, 0] = True
    found, where = cover(text, alive, tops), list(zip(*np.nonzero(alive), strict=True))
    for k in range(1, 6):
        hits = [any(text[at] in top[at][:k] for top in tops) for at in where]
        assert found[k - 1] == pytest.approx(np.mean(hits))
    places = rank(tops[0], text)
    for at in np.ndindex(text.shape):
        own = tops[0][at].tolist()
        assert places[at] == (own.index(text[at]) if text[at] in own else 5)
