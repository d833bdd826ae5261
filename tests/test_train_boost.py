"""Marking, weighting and held-out estimates against brute force."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax.decode import generate
from specjax.sampling import Sampling
from tests.conftest import tiny_model
from train.boost import Material, mark, matches, step_weights, verdict
from train.collect import Collected
from train.heldout import (
    HeldOut,
    View,
    estimates,
    following,
    hold_out,
    matched_run,
    sampled_chain,
    view,
    walk,
)
from train.labels import Labelled

PROMPT, STEPS = 6, 12
matrices = hnp.arrays(bool, st.tuples(st.integers(1, 3), st.integers(8, 14)))


def rows_of(model, count: int, temperature: np.ndarray, seed: int = 0) -> Collected:
    """Continuations by `model` of random prompts."""
    prompts = np.random.default_rng(seed).integers(1, 64, (count, PROMPT)).astype(np.int32)
    result = generate(
        jax.random.key(seed), model, None, prompts.tolist(), max_new_tokens=STEPS,
        sampling=Sampling(temperature=temperature), stop_at_eos=False,
    )  # fmt: skip
    tokens = np.concatenate([prompts, result.tokens], axis=1).astype(np.int32)
    return Collected(tokens, temperature, PROMPT)


def test_marked_samples_are_those_the_draft_itself_would_produce():
    draft, window = tiny_model(seed=3), 3
    rows = rows_of(draft, 4, np.zeros(4, np.float32))
    tokens = rows.tokens.copy()
    tokens[0, PROMPT + 5] = 9  # a foreign token in the middle of the draft's own text
    tokens[1, PROMPT + STEPS - 1] = 9
    tokens[2, PROMPT:] = np.arange(STEPS) + 20
    rows = rows._replace(tokens=tokens)
    marked = mark(matches(draft, rows), window)
    assert marked.shape == (4, STEPS - window + 1)
    for row, start in np.ndindex(marked.shape):
        at = PROMPT + start
        context = tokens[row, :at].tolist()
        own = generate(
            jax.random.key(0), draft, None, [context], max_new_tokens=window, stop_at_eos=False
        )
        same = np.array_equal(own.tokens[0], tokens[row, at : at + window])
        assert bool(marked[row, start]) == same, (row, start)
    assert 0 < marked.mean() < 1


@given(matrices, st.integers(1, 4), st.sampled_from([0.0, 0.25]))
def test_step_weights_count_the_unmarked_samples_of_a_step(match, window, keep):
    marked = mark(match, window)
    weights = step_weights(marked, window, keep)
    count = np.zeros(match.shape)
    share = np.zeros(match.shape)
    for row, start in np.ndindex(marked.shape):
        assert marked[row, start] == all(match[row, start : start + window])
        for step in range(start, start + window):
            count[row, step] += 1
            share[row, step] += keep if marked[row, start] else 1
    share /= count
    if share.sum():
        np.testing.assert_allclose(weights, share / share.mean(), rtol=1e-5)
    else:
        np.testing.assert_array_equal(weights, 1)


def test_a_step_of_marked_samples_only_has_weight_zero():
    match = np.ones((1, 10), bool)
    match[0, 0] = False
    weights = step_weights(mark(match, 3), 3, 0.0)
    assert (weights[0, 3:] == 0).all()
    assert (weights[0, :3] > 0).all()


def test_weights_fall_on_the_steps_and_spare_the_prompt():
    rows = Collected(np.zeros((2, PROMPT + STEPS), np.int32), np.zeros(2, np.float32), PROMPT)
    none = Labelled(rows.tokens, *(np.zeros((2, PROMPT + STEPS, 1), np.float32),) * 2,
                    np.ones(rows.tokens.shape, np.float32))  # fmt: skip
    weights = np.random.default_rng(0).random((2, STEPS)).astype(np.float32)
    held = HeldOut(rows, np.zeros((2, STEPS), np.float32))
    weight = Material(rows, none, none, held).weighted(weights).collected.weight
    np.testing.assert_array_equal(weight[:, PROMPT - 1 : -1], weights)
    assert (weight[:, : PROMPT - 1] == 1).all()
    assert (weight[:, -1] == 1).all()


@pytest.mark.parametrize(
    ("share", "says"),
    [(0.0, "no boost: under 5 %"), (0.049, "no boost: under 5 %"), (0.05, "the next draft"),
     (0.95, "the next draft"), (0.951, "no boost: over 95 %"), (1.0, "no boost: over 95 %")],
)  # fmt: skip
def test_extreme_shares_are_reported_as_no_boost(share, says):
    assert verdict(share).startswith(says)


@given(matrices, st.integers(1, 8))
def test_matched_run_and_walk_are_a_greedy_chain(match, depth):
    runs, tokens, steps = matched_run(match, depth), 0, 0
    for row, start in np.ndindex(match.shape):
        wanted = len(list(itertools.takewhile(bool, match[row, start : start + depth])))
        assert runs[row, start] == wanted
    for row in match:
        at = 0
        while at + depth <= len(row):
            accepted = len(list(itertools.takewhile(bool, row[at : at + depth])))
            at, tokens, steps = at + accepted + 1, tokens + accepted + 1, steps + 1
    assert walk(runs, depth) == pytest.approx(tokens / max(steps, 1))


def test_sampled_chain_is_the_expectation_over_all_paths():
    p, q = np.array([4, 2, 1, 1]) / 8, np.array([1, 5, 1, 1]) / 8
    low = np.minimum(p, q)
    depth = 2
    paths = list(itertools.product(range(8), repeat=depth))  # 8 draws of equal probability
    token = np.repeat(np.arange(4), (p * 8).astype(int))[np.array(paths)]
    one, chain = sampled_chain(np.log(p)[token], np.log(q)[token], depth)
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
    rows = Collected(np.tile(np.arange(10, dtype=np.int32), (3, 1)), np.zeros(3, np.float32), 2)
    rows = rows._replace(temperature=np.array([0, 0, 0.8], np.float32))
    text, law = following(rows), np.zeros((3, 8), np.float32)

    def draft(right: np.ndarray, rank: int) -> View:
        """Right where `right`, else with the target's token at `rank`."""
        top = np.full((3, 8, 5), 63, np.int32)
        places = np.where(right, 0, rank)
        np.put_along_axis(top, places[..., None], text[..., None], axis=-1)
        return View(top, law)

    first = np.zeros((3, 8), bool)
    first[:, :4] = True
    found = estimates(HeldOut(rows, law), draft(~first, 2), [draft(first, 3)], 4)
    assert found["agreement"] == 0.5
    assert found["pool_agreement"] == 1
    assert found["top2"] == 0.5
    assert found["top3"] == 1
    # each draft goes on where the other stops, and each step's chain is right to its end
    assert found["pool_tokens_per_step"] == 5
