"""The distribution p against a float64 twin, and draws against the distribution they are of."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.base import sampling
from specjax.base.pytree import replace
from specjax.base.sampling import (
    Purpose,
    Sampling,
    draw,
    draw_distinct,
    fold,
    is_greedy,
    largest,
    most_likely,
    process,
    sampled_probs,
    threefry,
)
from specjax.measure.distribution_tests import g_test

GRID = 2**23  # the uniforms of jax.random in float32 are multiples of 1/GRID


# The distribution.
# ------------------------------------------------------------------------------------


def warp(logits, temperature, top_k, top_p, min_p):
    """p in float64, in the order of Hugging Face's warpers, each a mask on what is left."""
    scores = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    scores = scores / temperature
    if top_k:
        scores = np.where(scores < np.sort(scores)[-min(top_k, len(scores))], -np.inf, scores)
    order = np.argsort(scores)
    running = np.cumsum(softmax(scores)[order])
    removed = order[:-1][running[:-1] <= 1 - top_p]
    scores[removed] = -np.inf
    p = softmax(scores)
    return softmax(np.where(p < min_p * p.max(), -np.inf, scores))


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def probs_of(logits, platform="cpu", **parameters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "platform", lambda: platform)
        rows = Sampling(**parameters).rows(len(logits))  # whose kind tells programs apart
        return np.asarray(jax.jit(process)(jnp.asarray(logits, jnp.float32)[:, None], rows))[:, 0]


PARAMETERS = st.tuples(
    st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 17, 60, 61, 1000]),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.lists(PARAMETERS, min_size=8, max_size=8))
def test_distribution_equals_the_twin_row_by_row(seed, rows):
    logits = np.random.default_rng(seed).normal(0, 3, (8, 61)).astype(np.float32)
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = (np.array(column) for column in zip(*rows, strict=True))
    p = probs_of(logits, **dict(zip(names, columns, strict=True)))
    expected = np.array([warp(x, *row) for x, row in zip(logits, rows, strict=True)])
    np.testing.assert_array_equal(p > 0, expected > 0)
    np.testing.assert_allclose(p, expected, atol=2e-6)


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.3}]
)
def test_each_parameter_changes_the_distribution(changed):
    logits = np.random.default_rng(0).normal(0, 1, (1, 40))
    plain = probs_of(logits, temperature=1.0)
    np.testing.assert_allclose(plain[0], softmax(logits[0]), atol=1e-6)
    p = probs_of(logits, **({"temperature": 1.0} | changed))
    assert np.abs(p - plain).sum() / 2 > 0.05
    assert p.sum() == pytest.approx(1, abs=1e-6)


def test_top_k_comes_before_top_p_and_that_before_min_p():
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    p = probs_of(np.log(weights)[None], temperature=1.0, top_k=3, top_p=0.75, min_p=0.7)
    # top-k leaves 4/9, 3/9, 2/9, of which top-p keeps two (4/9 < 0.75 <= 7/9); 3/4 >= 0.7
    np.testing.assert_allclose(p[0], [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    p = probs_of(np.log(weights)[None], temperature=0.5, min_p=0.6)
    np.testing.assert_allclose(p[0], [1, 0, 0, 0], atol=1e-6)  # 9/16 < 0.6 after temperature


def test_temperature_0_is_one_hot_at_the_lowest_id_of_a_tie():
    logits = np.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    p = probs_of(logits, temperature=0.0, top_k=3, top_p=0.5, min_p=0.3)
    np.testing.assert_array_equal(p, [[0, 1, 0, 0], [1, 0, 0, 0]])


def test_a_limited_row_leaves_the_tails_of_its_batch_mates_alone():
    """Beside a limited row every row has limits; sums that round to all must cut nothing off."""
    logits = jnp.concatenate([jnp.array([30.0]), -0.01 * jnp.arange(500.0)])[None, None]
    free = Sampling(temperature=1.0)
    alone = process(logits, free.rows(1))[0]
    mates = Sampling(temperature=1.0, top_k=np.array([0, 3]))
    beside = process(jnp.tile(logits, (2, 1, 1)), mates.rows(2))
    np.testing.assert_array_equal(beside[0], alone)
    assert (alone > 0).all()
    assert (beside[1] > 0).sum() == 3


@settings(deadline=None, max_examples=50, derandomize=True)
@given(scores=st.lists(st.integers(-2, 2), min_size=1, max_size=6))
def test_the_most_likely_token_is_the_first_of_the_largest(scores):
    assert int(most_likely(jnp.array(scores, jnp.float32))) == scores.index(max(scores))


def test_a_score_that_is_not_a_number_still_gives_a_token():
    scores = jnp.array([[0.0, jnp.nan, 1.0], [jnp.inf, 0.0, jnp.inf]])
    assert most_likely(scores).tolist() == [2, 0]


def test_ties_at_the_edge_of_top_k_are_kept():
    p = probs_of(np.array([[1.0, 2.0, 1.0, 0.0]]), temperature=1.0, top_k=2)
    np.testing.assert_array_equal(p > 0, [[True, True, True, False]])


EXTREMES = [-np.inf, -3e38, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, np.nextafter(np.float32(1), 2)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    scores=st.lists(st.sampled_from(EXTREMES), min_size=6, max_size=6), k=st.integers(1, 7)
)  # fmt: skip
def test_the_edge_of_top_k_is_a_score_to_the_last_bit(platform, scores, k):
    """Among others infinite ones, a zero of either sign, and the next number after another."""
    logits = np.array([[*scores, 0.5]], np.float32)  # one of them is finite
    expected = logits[0] >= np.sort(logits[0])[-k]
    p = probs_of(logits, platform, temperature=1.0, top_k=k)[0]
    np.testing.assert_array_equal(p > 0, expected & (logits[0] > -80))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_edge_of_top_p_is_a_score_to_the_last_bit(platform):
    """What is all but equal to the edge is not; what is equal is kept, and what has no mass not."""
    near = np.nextafter(np.float32(1), 0)
    logits = np.array([[1.0, near, 1.0, near, -np.inf, 3.0, -200.0]], np.float32)
    e = np.exp(np.float64([3, 1]))
    share = (e[0] + e[1] * np.arange(5)) / (e[0] + 4 * e[1])  # of the first ones, as they are kept
    for top_p, kept in ((0.9 * share[0], 1), (share[0] + 0.01, 3), (share[2] + 0.01, 5), (1.0, 5)):
        p = probs_of(logits, platform, temperature=1.0, top_p=top_p)[0]
        expected = np.flatnonzero(logits[0] >= np.sort(logits[0])[-kept])
        assert np.flatnonzero(p).tolist() == expected.tolist(), top_p


@pytest.mark.parametrize("top_p", [np.nextafter(np.float32(0), np.float32(1)), 1e-40, 1.2e-38])
def test_the_least_top_p_leaves_the_likeliest_token(top_p):
    p = probs_of(np.array([[1.0, 2.0, 3.0, 0.5]]), temperature=1.0, top_p=np.float32(top_p))
    np.testing.assert_array_equal(p, [[0, 0, 1, 0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_limits_are_found_in_every_dtype(dtype):
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (1, 4, 50)), dtype)
        probs = jax.jit(process)(logits, Sampling(temperature=1.0, top_k=9, top_p=0.8).rows(1))
    assert probs.dtype == dtype
    for one, p in zip(np.asarray(logits[0], float), np.asarray(probs[0], float), strict=True):
        edge = np.sort(one)[-9]
        expected = warp(one, 1.0, int((one >= edge).sum()), 0.8, 0.0)
        assert np.abs(p - expected).max() < 0.02
        assert 1 < (p > 0).sum() <= (one >= edge).sum()


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.7}])
def test_a_score_that_is_not_a_number_spoils_its_own_distribution_alone(limits):
    scores = np.random.default_rng(0).normal(0, 2, (2, 20))
    alone = probs_of(scores[:1], temperature=1.0, **limits)
    scores[1, 4] = np.nan
    p = probs_of(scores, temperature=1.0, **limits)
    np.testing.assert_array_equal(p[:1], alone)
    assert np.isnan(p[1]).all()


def test_every_node_of_a_row_has_the_same_parameters():
    logits = np.random.default_rng(1).normal(0, 2, (2, 3, 20)).astype(np.float32)
    rows = Sampling(temperature=np.array([0.0, 0.9]), top_k=np.array([0, 4])).rows(2)
    p = jax.jit(process)(jnp.asarray(logits), rows)
    for row, node in itertools.product(range(2), range(3)):
        expected = warp(logits[row, node], [0, 0.9][row], [0, 4][row], 1.0, 0.0)
        np.testing.assert_allclose(p[row, node], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "sampling.temperature is -1.0; it must lie in"),
        ({"temperature": np.nan}, "sampling.temperature is nan; it must lie in"),
        ({"top_k": -2}, "sampling.top_k is -2; it must lie in"),
        ({"top_p": 0.0}, "sampling.top_p is 0.0; it must lie in"),
        ({"top_p": 1.5}, "sampling.top_p is 1.5; it must lie in"),
        ({"min_p": -0.1}, "sampling.min_p is -0.1; it must lie in"),
        ({"min_p": 1.1}, "sampling.min_p is 1.1; it must lie in"),
        ({"top_k": np.array([1, -1, 2])}, "sampling.top_k is \\[1, -1, 2\\]; it must lie in"),
        ({"top_p": np.array([0.5, 0.5])}, "sampling.top_p has shape \\(2,\\); there are 3 prompts"),
    ],
)
def test_parameters_out_of_range_are_refused_in_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong).rows(3)


def test_rows_broadcasts_scalars():
    rows = Sampling(temperature=np.array([0.0, 1.0]), top_k=3).rows(2)
    np.testing.assert_array_equal(rows.top_k, [3, 3])
    np.testing.assert_array_equal(is_greedy(rows), [True, False])


# Keys. ---------------------------------------------------------------------------------------


@jax.jit
def folded(key, uses):
    return jax.vmap(lambda numbers: jax.random.key_data(fold(key, *numbers)))(uses)


def test_no_two_uses_share_a_key():
    """All (position, purpose, further number) of a long text, trials and levels included."""
    uses = [(at, purpose) for at in range(150) for purpose in Purpose]
    uses += [(at, Purpose.DRAFT, d) for at in range(150) for d in range(4)]
    uses += [(at, Purpose.DRAFT, d, i) for at in range(40) for d in range(4) for i in range(6)]
    by_length = {n: np.array([u for u in uses if len(u) == n], np.int32) for n in (2, 3, 4)}
    seen: set[tuple[int, ...]] = set()
    for row in range(3):
        key = jax.random.fold_in(jax.random.key(0), row)
        for numbers in by_length.values():
            seen |= {tuple(data) for data in np.asarray(folded(key, numbers)).tolist()}
    assert len(seen) == 3 * len(uses)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_folds_alone_as_it_folds_in_a_batch(impl):
    """Whatever made it; and no two keys, nor a key of another implementation, share a hash."""
    keys = jax.random.split(jax.random.key(3, impl=impl), 64)
    batch = jax.random.key_data(jax.jit(jax.vmap(lambda key: fold(key, 7, 2)))(keys))
    each = [jax.random.key_data(fold(key, 7, 2)) for key in keys]
    np.testing.assert_array_equal(batch, np.stack(each))
    assert len(np.unique(np.asarray(batch), axis=0)) == 64
    assert batch.shape[-1] == 2
    if impl == "threefry2x32":
        np.testing.assert_array_equal(
            jax.random.key_data(threefry(keys)), jax.random.key_data(keys)
        )


# Draws. --------------------------------------------------------------------------------------


@jax.jit
def draws(p, first, second):
    """Tokens by pairs of uniforms, given as numerators over GRID."""
    uniforms = jnp.stack([first, second], axis=1).astype(jnp.float32) / GRID
    return jax.vmap(draw, (None, 0))(p, uniforms)


def smallest(beyond, count):
    """For each of `count` entries the smallest numerator where `beyond` holds, or GRID."""
    low, high = np.zeros(count, int), np.full(count, GRID)
    while (low < high).any():
        middle = (low + high) // 2
        past = beyond(np.minimum(middle, GRID - 1)) & (middle < GRID)
        low, high = np.where(past | (low >= high), low, middle + 1), np.where(past, middle, high)
    return low


def drawn_probs(p):
    """The distribution of `draw` by the breakpoints of its two uniforms, exactly."""
    p = jnp.asarray(p, jnp.float32)
    size, blocks = len(p), -(-len(p) // 128)
    ends = smallest(lambda u: np.asarray(draws(p, u, 0 * u)) // 128 > np.arange(blocks), blocks)
    starts = np.concatenate([[0], ends[:-1]])
    token = np.arange(size)
    inside = np.minimum(starts[token // 128], GRID - 1)
    reached = (starts < ends)[token // 128]
    past = smallest(lambda u: np.asarray(draws(p, inside, u)) > token, size)
    before = np.where(token % 128 == 0, 0, np.concatenate([[0], past[:-1]]))
    return np.where(reached, (ends - starts)[token // 128] / GRID * (past - before) / GRID, 0)


def random_probs(size, seed):
    weights = np.random.default_rng(seed).exponential(size=size) ** 2
    weights[np.random.default_rng(seed + 1).random(size) < 0.3] = 0
    weights[-2] = 0
    weights[0] += size / 10
    return weights / weights.sum()


@pytest.mark.parametrize("size", [5, 128, 129, 1000])
def test_draws_follow_the_distribution_by_every_breakpoint(size):
    p = random_probs(size, size).astype(np.float32)
    found = drawn_probs(p)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert not found[p == 0].any()
    assert (found[p > 4 / GRID] > 0).all()
    np.testing.assert_allclose(found, p / p.astype(float).sum(), atol=2.5e-7)
    assert np.abs(found - p / p.astype(float).sum()).sum() / 2 < 2e-6


@pytest.mark.parametrize("size", [5, 128, 129, 1000])
def test_the_scale_of_a_distribution_is_free(size):
    p = random_probs(size, 3)
    uniforms = np.random.default_rng(0).integers(0, GRID, (2, 500))
    np.testing.assert_array_equal(draws(p, *uniforms), draws(jnp.asarray(p) * 8, *uniforms))


@pytest.mark.parametrize("size", [5, 128, 129, 1000])
def test_the_ends_of_the_uniforms_draw_only_what_is_possible(size):
    ends = jnp.array([0.0, 0.5, 1 - 2**-24], jnp.float32)
    uniforms = jnp.array(list(itertools.product(ends, ends)))
    draw_all = jax.jit(jax.vmap(draw, (None, 0)))
    p = random_probs(size, 7)
    p[:3] = 0
    tokens = np.asarray(draw_all(jnp.asarray(p, jnp.float32), uniforms))
    assert (p[tokens] > 0).all()
    assert tokens[0] == np.flatnonzero(p)[0]
    assert tokens[-1] == np.flatnonzero(p)[-1]
    last = jnp.zeros(size).at[size - 1].set(1e-30)
    assert (draw_all(last, uniforms) == size - 1).all()


def test_distinct_draws_follow_the_distribution_of_drawing_without_replacement():
    p, rows = np.array([0.5, 0.3, 0.15, 0.05, 0]), 40_000
    distributions = jnp.asarray(np.tile(p, (rows, 1)), jnp.float32)
    found = np.asarray(
        jax.jit(draw_distinct, static_argnames="count")(distributions, jax.random.key(0), count=3)
    )
    cells = list(itertools.permutations(range(4), 3))
    expected = [p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]) for a, b, c in cells]
    numbers = np.array([cells.index(tuple(row)) for row in found.tolist()])
    assert g_test(numbers, np.array(expected)).p_value > 1e-6
    biased = np.array(expected) * np.where(np.arange(len(cells)) % 2, 1.06, 0.94)
    assert g_test(numbers, biased / biased.sum()).p_value < 1e-3


def test_distinct_draws_of_what_has_no_probability_come_last_by_their_ids():
    distributions = jnp.asarray([[0, 1, 0, 0], [0, 0.5, 0, 0.5]], jnp.float32)
    for seed in range(20):
        found = np.asarray(draw_distinct(distributions, jax.random.key(seed), 4))
        assert found[0].tolist() == [1, 0, 2, 3]
        assert found[1].tolist() in ([1, 3, 0, 2], [3, 1, 0, 2])


def test_distinct_draws_do_not_find_what_is_all_but_impossible():
    """10 million chances of 1e-12: with coarse uniforms one of them would come up."""
    p = jnp.full((100, 100_000), 1e-12, jnp.float32).at[:, 7].set(1.0)
    assert (draw_distinct(p, jax.random.key(0), 1) == 7).all()


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_a_distribution_of_nothing_still_gives_a_token_of_the_vocabulary(value):
    for size in (5, 128, 1000):
        tokens = draws(np.full(size, value, np.float32), *np.array([[0, GRID // 2]] * 2))
        assert (tokens >= 0).all()
        assert (tokens < size).all()


def test_processed_distributions_can_be_drawn_from():
    logits = np.random.default_rng(2).normal(0, 4, (1, 1, 1000)).astype(np.float32)
    rows = replace(Sampling(temperature=0.9, top_k=20, top_p=0.9), min_p=0.01).rows(1)
    p = jax.jit(process)(jnp.asarray(logits), rows)[0, 0]
    found = drawn_probs(p)
    assert not found[np.asarray(p) == 0].any()
    np.testing.assert_allclose(found, warp(logits[0, 0], 0.9, 20, 0.9, 0.01), atol=1e-6)


@pytest.mark.parametrize("size", [3, 100, 1000, 4096, 5003])
@pytest.mark.parametrize("count", [1, 4, 15])
def test_the_largest_are_those_of_a_plain_top_k(size, count):
    """With many equal scores, some of them minus infinity."""
    count = min(count, size)
    rng = np.random.default_rng(size)
    scores = np.round(rng.normal(size=(4, size)) * 2) / 2
    scores[1, rng.random(size) < 0.999] = -np.inf
    scores[3] = 0
    scores = jnp.asarray(scores, jnp.float32)
    for found, expected in zip(largest(scores, count), jax.lax.top_k(scores, count), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_plain_rows_have_the_softmax_of_their_logits():
    """Whatever their sampling, and the others the distribution that `process` gives them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 300)) * 3, jnp.float32)
    rows = Sampling(np.array([0.0, 0.7, 0.7]), top_k=5, top_p=0.9, min_p=0.01).rows(3)
    found = sampled_probs(logits, rows, jnp.asarray([True, True, False]))
    np.testing.assert_allclose(found[:2], jax.nn.softmax(logits[:2]), rtol=1e-5)
    np.testing.assert_array_equal(found[2], process(logits, rows)[2])
