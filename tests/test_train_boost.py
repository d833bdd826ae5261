"""Marking, weighting and held-out estimates against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax.decoding.generate import generate
from specjax.verify.token_wise import multi_step
from tests.conftest import tiny_model
from tests.pairs import near, varied_model
from tests.rows import PROMPT, STEPS, rows_of, whole
from train.boost import BoostData, boost_filter, seen, weighted
from train.collect import Collected
from train.config import Boost
from train.heldout import (
    probs_at,
    rank,
    view,
)
from train.labels import Labelled, _top_of_probs
from train.marking import (
    BY_NOTHING,
    NAMES,
    RESIDUAL,
    RULES,
    Seen,
    by_chance,
    by_errors,
    by_samples,
    by_tokens,
    by_union,
    mark,
    normalized,
    residual,
    verdict,
)

matrices = hnp.arrays(bool, st.tuples(st.integers(1, 3), st.integers(8, 14)))


def test_marked_samples_are_those_the_draft_itself_would_produce():
    draft, window = tiny_model(seed=3), 3
    rows = rows_of(draft, 4, np.zeros(4, np.float32))
    tokens = rows.tokens.copy()
    tokens[0, PROMPT + 5] = 9  # a foreign token in the middle of the draft's own text
    tokens[1, PROMPT + STEPS - 1] = 9
    tokens[2, PROMPT:] = np.arange(STEPS) + 20
    rows = rows._replace(tokens=tokens)
    marked = mark(view(draft, rows).top[..., 0] == rows.following, window)
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


def drafts(match: np.ndarray, *others: np.ndarray) -> list[Seen]:
    """Earlier drafts that give the target's token where they match, and have it second else."""
    alive = np.ones(match.shape, bool)
    return [Seen(np.where(m, 0, 1), m.astype(float), alive) for m in (match, *others)]


@given(matrices, st.integers(1, 4), st.sampled_from([0.0, 0.25]))
def test_the_published_rule_counts_the_unmarked_samples_of_a_step(match, window, keep):
    found = by_samples(drafts(match), Boost(window=window, keep=keep))
    count, share, marks = np.zeros(match.shape), np.zeros(match.shape), []
    for row, start in itertools.product(range(len(match)), range(match.shape[1] - window + 1)):
        marks.append(all(match[row, start : start + window]))
        for step in range(start, start + window):
            count[row, step] += 1
            share[row, step] += keep if marks[-1] else 1
    share /= count
    assert found.marked == pytest.approx(np.mean(marks))
    if share.sum():
        np.testing.assert_allclose(found.steps, share / share.mean(), rtol=1e-5)
    else:
        np.testing.assert_array_equal(found.steps, 1)


@given(matrices, st.integers(1, 4))
def test_a_sample_is_marked_by_any_one_draft_but_not_by_two_in_parts(match, window):
    settings = Boost(window=window)
    both = by_samples(drafts(match, ~match), settings).marked
    alone = [by_samples(drafts(m), settings).marked for m in (match, ~match)]
    assert both == pytest.approx(sum(alone))  # no window is all right and all wrong
    assert by_union(drafts(match), settings).marked == 1
    assert by_union(drafts(match), Boost(window=window, cover=1)).marked == alone[0]


@given(matrices, st.integers(1, 4))
def test_on_certain_drafts_the_chance_rule_is_the_published_one(match, window):
    settings = Boost(window=window)
    one, other = by_chance(drafts(match), settings), by_samples(drafts(match), settings)
    np.testing.assert_allclose(one.steps, other.steps)
    assert one.marked == pytest.approx(other.marked)


def test_the_chance_rule_multiplies_what_breaks_the_chains():
    accepted = np.array([[0.5, 0.8, 0.25]]), np.array([[1.0, 0.5, 0.1]])
    earlier = [Seen(np.ones((1, 3), int), each, np.ones((1, 3), bool)) for each in accepted]
    value = np.array([(1 - 0.4) * (1 - 0.5), (1 - 0.2) * (1 - 0.05)])
    for strength, keep in ((1.0, 0.0), (2.0, 0.25)):
        of = keep + (1 - keep) * value**strength
        wanted = np.array([of[0], of.mean(), of[1]])
        found = by_chance(earlier, Boost(window=2, strength=strength, keep=keep))
        np.testing.assert_allclose(found.steps[0], wanted / wanted.mean(), rtol=1e-6)


@given(matrices)
def test_single_tokens_count_less_where_a_draft_is_right(match):
    found = by_tokens(drafts(match), Boost(keep=0.2))
    wanted = np.where(match, 0.2, 1.0)
    np.testing.assert_allclose(found.steps, wanted / wanted.mean(), rtol=1e-5)
    assert found.marked == match.mean()


def test_adaboost_gives_the_missed_half_of_the_weight():
    match = np.array([[True] * 6 + [False] * 2])
    found = by_errors(drafts(match), Boost(strength=1.0)).steps
    assert found[~match].sum() == pytest.approx(found[match].sum())  # its classical property
    again = by_errors(drafts(match, match), Boost(strength=1.0)).steps
    np.testing.assert_allclose(again, found, rtol=1e-5)  # a draft that is no better: weight 0
    np.testing.assert_allclose(by_errors(drafts(match), Boost(strength=0.0)).steps, 1)


@given(matrices, st.sampled_from(sorted(RULES)))
def test_weights_have_a_mean_of_one_and_are_never_negative(match, rule):
    found = RULES[rule](drafts(match, ~match), Boost())
    assert found.steps.mean() == pytest.approx(1, rel=1e-5)
    assert (found.steps >= 0).all()
    assert 0 <= found.marked <= 1


@pytest.mark.parametrize("rule", sorted(RULES))
def test_what_follows_a_rows_end_changes_no_weight(rule):
    """Rows padded by ten more steps, whatever the drafts say there, teach what they taught."""
    rng = np.random.default_rng(0)
    rank, accepted = rng.integers(0, 3, (2, 3, 24)), rng.random((2, 3, 24))
    alive = np.arange(24) < np.array([[14], [9], [2]])
    short = [Seen(r[:, :14], a[:, :14], alive[:, :14]) for r, a in zip(rank, accepted, strict=True)]
    long = [Seen(r, a, alive) for r, a in zip(rank, accepted, strict=True)]
    settings = Boost(window=3, keep=0.1, strength=0.7)
    found, wanted = RULES[rule](long, settings), RULES[rule](short, settings)
    np.testing.assert_allclose(found.steps[:, :14], wanted.steps, rtol=1e-6)
    assert (found.steps[~alive] == 0).all()
    assert found.marked == pytest.approx(wanted.marked)
    assert found.steps[alive].mean() == pytest.approx(1, rel=1e-5)


def test_a_step_of_marked_samples_only_has_weight_zero():
    match = np.ones((1, 10), bool)
    match[0, 0] = False
    weights = by_samples(drafts(match), Boost(window=3)).steps
    assert (weights[0, 3:] == 0).all()
    assert (weights[0, :3] > 0).all()


def distributions(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(5), (count, 3))


def test_the_residual_is_what_multi_step_verification_goes_on_with():
    p, *qs = distributions(0, 3)
    left, reached = residual(p, qs)
    for at in range(3):
        probs, mass = p[at], 1.0
        for q in qs:
            step = multi_step(jnp.float32(probs), jnp.float32(q[at]), jnp.int32(0))
            rest = np.maximum(probs - q[at], 0)
            probs, mass = rest / rest.sum(), mass * rest.sum()
            np.testing.assert_allclose(step[1], probs, atol=1e-5)
        np.testing.assert_allclose(left[at], probs, rtol=1e-6)
        assert reached[at] == pytest.approx(mass)


def test_a_perfect_draft_leaves_no_residual():
    p = distributions(1, 1)[0]
    left, reached = residual(p, [p])
    np.testing.assert_allclose(reached, 0, atol=1e-12)
    np.testing.assert_allclose(left, p)


def material_of(rows: Collected, **changes) -> BoostData:
    """Material of which only rows and weights matter."""
    shape = rows.tokens.shape
    labels = Labelled(rows.tokens, np.zeros((*shape, 1), np.uint8), np.zeros((*shape, 1)),
                      np.ones(shape, np.float32))  # fmt: skip
    own = np.zeros(rows.alive.shape, np.float32)
    return BoostData(rows, labels, labels, own)._replace(**changes)


def test_weights_fall_on_the_steps_spare_the_prompt_and_stop_at_the_end():
    tokens = np.zeros((2, PROMPT + STEPS), np.int32)
    rows = whole(tokens, np.zeros(2, np.float32))
    rows = rows._replace(prompt=np.array([6, 4], np.int32), length=np.array([12, 3], np.int32))
    weights = np.random.default_rng(0).random((2, STEPS)).astype(np.float32)
    scaled = normalized(weights, rows.alive)
    found = weighted(material_of(rows), scaled).collected.weight
    scale = np.concatenate([weights[0], weights[1, :3]]).mean()
    np.testing.assert_allclose(found[0, 5:17], weights[0] / scale, rtol=1e-5)
    np.testing.assert_allclose(found[1, 3:6], weights[1, :3] / scale, rtol=1e-5)
    assert (found[0, :5] == 1).all()
    assert (found[1, :3] == 1).all()
    assert (found[1, 6:] == 0).all()
    assert found[0, 17] == 0


def test_rules_are_told_ranks_and_acceptance_along_the_text():
    target, draft = tiny_model(seed=3), tiny_model(seed=4)
    rows = rows_of(target, 4, np.array([0, 0.8, 0, 0.8], np.float32))
    rows = rows._replace(length=np.array([12, 12, 5, 7], np.int32))
    own, other = view(target, rows), view(draft, rows)
    told = seen(material_of(rows, own=own.log_probs), other)
    np.testing.assert_array_equal(told.rank, rank(other.top, rows.following))
    np.testing.assert_array_equal(told.alive, rows.alive)
    for row, step in np.ndindex(told.accepted.shape):
        if rows.temperature[row] == 0:
            wanted = float(other.top[row, step, 0] == rows.following[row, step])
        else:
            wanted = min(1.0, float(np.exp(other.log_probs[row, step] - own.log_probs[row, step])))
        assert told.accepted[row, step] == pytest.approx(wanted, rel=1e-4)


def test_drafts_trained_alike_learn_from_the_same():
    rows = whole(np.zeros((2, PROMPT + STEPS), np.int32), np.zeros(2, np.float32))
    data = material_of(rows)
    settings = Boost(rule=BY_NOTHING, elsewhere=0.25)
    assert boost_filter(data, [tiny_model(seed=4)], settings)[0] is data


@pytest.mark.parametrize("rule", NAMES)
def test_every_rule_gives_a_lesson(rule):
    target = varied_model(3)
    draft = near(target, 4, 0.1)
    rows = rows_of(target, 3, np.array([0, 0, 0.8], np.float32))
    ids, log_p, _ = _top_of_probs(target, rows.tokens, rows.temperature, 6, "float32")
    labels = Labelled(rows.tokens, np.asarray(ids).astype(np.uint8),
                      np.asarray(log_p).astype(np.float16),
                      np.ones(rows.tokens.shape, np.float32))  # fmt: skip
    data = material_of(rows, collected=labels, corpus=labels, own=view(target, rows).log_probs)
    taught, marked = boost_filter(data, [draft], Boost(rule=rule, keep=0.5, window=2))
    weight = np.take_along_axis(taught.collected.weight, rows.columns - 1, axis=1)
    assert weight.mean() == pytest.approx(1, rel=1e-4)
    assert 0 <= marked < 1
    assert (taught.collected.log_p is labels.log_p) == (rule != RESIDUAL)
    assert (np.ptp(weight) > 0) == (rule != BY_NOTHING)


def test_what_no_rule_judges_can_count_less():
    rows = whole(np.zeros((2, PROMPT + STEPS), np.int32), np.zeros(2, np.float32))
    draft = tiny_model(seed=4)
    for elsewhere in (1.0, 0.25):
        settings = Boost(rule="tokens", keep=1.0, elsewhere=elsewhere)
        taught, _ = boost_filter(material_of(rows), [draft], settings)
        weight = taught.collected.weight
        assert (weight[:, : PROMPT - 1] == elsewhere).all()
        assert (weight[:, PROMPT - 1 : -1] == 1).all()
        assert (taught.corpus.weight == elsewhere).all()


def test_residual_labels_are_distributions_of_what_is_left():
    target, draft = tiny_model(seed=3), tiny_model(seed=4)
    rows = rows_of(target, 2, np.array([0.8, 1.0], np.float32))
    ids, log_p, _ = _top_of_probs(target, rows.tokens, rows.temperature, 6, "float32")
    labels = Labelled(rows.tokens, np.asarray(ids), np.asarray(log_p),
                      np.ones(rows.tokens.shape, np.float32))  # fmt: skip
    data = material_of(rows, collected=labels, corpus=labels)
    taught, _ = boost_filter(data, [draft], Boost(rule=RESIDUAL, keep=0.0))
    p, q = np.exp(labels.log_p), np.exp(probs_at(draft, labels))
    rest = np.maximum(p - q, 0)
    tail = np.maximum((1 - p.sum(-1)) - (1 - q.sum(-1)), 0)
    wanted = rest / (rest.sum(-1) + tail)[..., None]
    found, steps = np.exp(taught.collected.log_p.astype(np.float64)), rows.columns - 1
    row = np.arange(2)[:, None]
    np.testing.assert_allclose(found[row, steps], wanted[row, steps], atol=2e-3)
    mass = (rest.sum(-1) + tail)[row, steps]
    weight = taught.collected.weight
    np.testing.assert_allclose(weight[row, steps], mass / mass.mean(), rtol=1e-3)
    assert taught.corpus.log_p is labels.log_p
    assert (taught.corpus.weight == 1).all()
    np.testing.assert_array_equal(taught.collected.log_p[:, : PROMPT - 1],
                                  labels.log_p[:, : PROMPT - 1])  # fmt: skip


def test_labels_stay_distributions_where_hardly_anything_is_left():
    """Two drafts that are the target: what is left of its distribution is rounding."""
    target = tiny_model(seed=3)
    rows = rows_of(target, 2, np.array([0.8, 1.0], np.float32))
    ids, log_p, _ = _top_of_probs(target, rows.tokens, rows.temperature, 6, "float32")
    labels = Labelled(rows.tokens, np.asarray(ids), np.asarray(log_p),
                      np.ones(rows.tokens.shape, np.float32))  # fmt: skip
    data = material_of(rows, collected=labels, corpus=labels)
    taught, marked = boost_filter(data, [target, target], Boost(rule=RESIDUAL, keep=0.0))
    np.testing.assert_allclose(taught.collected.log_p, labels.log_p, atol=1e-5)
    assert marked > 0.999
    assert np.isfinite(taught.collected.weight).all()


@pytest.mark.parametrize(
    ("share", "says"),
    [(0.0, "no boost: under 5 %"), (0.049, "no boost: under 5 %"), (0.05, "the next draft"),
     (0.95, "the next draft"), (0.951, "no boost: over 95 %"), (1.0, "no boost: over 95 %")],
)  # fmt: skip
def test_extreme_shares_are_reported_as_no_boost(share, says):
    assert verdict(share).startswith(says)
