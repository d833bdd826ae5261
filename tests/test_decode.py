"""Speculative decoding against plain decoding, token by token, on tiny random models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.decoding import stepping
from specjax.decoding.request import prepare
from specjax.draft import ExpansionDrafter, Wants
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.staged import TableStage
from specjax.draft.token_recycling import RecycleDrafter
from specjax.models import transformer
from specjax.models.transformer import Model
from specjax.trees.construction import TOP_K
from specjax.trees.tree import TreeShape
from tests.cases import slow_among
from tests.conftest import tiny_model
from tests.pairs import (
    KEY,
    NEW,
    PROMPTS,
    alone,
    broken,
    generate,
    near,
    varied_model,
    with_activations_of,
)
from tests.test_growth import random_table

MIXED = Sampling(
    temperature=np.array([0.0, 0.8, 1.0, 0.8]),
    top_k=np.array([0, 0, 12, 0]),
    top_p=np.array([1.0, 0.9, 1.0, 1.0]),
)


def pool(target: Model, stack: bool = False) -> ExpansionDrafter:
    return ExpansionDrafter.of([near(target, 1), near(target, 2)], (2, 1), stack=stack)


TRUST = jnp.asarray([0.0, 0.4, 0.7])
GROWTH = Growth(budget=8, beams=3, width=3, depth=5)


def recycled() -> RecycleDrafter:
    return RecycleDrafter(jnp.full(3, 0.3), TreeShape((3, (2, 0, 1), (1, 0, 1))), 64)


def hybrid(target: Model) -> HybridDrafter:
    """A hybrid whose draft has both stages."""
    table = TableStage(random_table(), TreeShape((2, 1)), fan=2)
    draft = BestFirstDrafter(near(target, 1), jnp.ones(2), GROWTH, table, recycled())
    return HybridDrafter(draft, TRUST, None)


DRAFTERS = {
    "random": lambda target: alone(varied_model(9)),
    "near": lambda target: alone(near(target, 1)),
    "itself": alone,
    "not a number": lambda target: alone(broken(target, np.nan)),
    "infinite": lambda target: alone(broken(target, np.inf)),
    "constant": lambda target: alone(broken(target, 0.0)),
    "chain": lambda target: alone(near(target, 1), (1, 1, 1)),
    "pool": pool,
    "top-k": lambda target: alone(near(target, 1), (3, 1), children=TOP_K),
}
CHOSEN = {
    "hybrid": hybrid,
    "text": lambda target: TextDrafter(TRUST, random_table(), GROWTH, 64),
    "recycled": lambda target: recycled(),
}
POOLS = {
    "stacked": lambda target: pool(target, stack=True),
    "unequal": lambda target: ExpansionDrafter.of([near(target, 1), tiny_model(3)], (2, 1)),
}


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model()


@pytest.fixture(scope="module")
def plain(target):
    """Plain decoding of MIXED."""
    return generate(target, None, sampling=MIXED)


def test_plain_decoding_samples_something(plain, target):
    greedy = generate(target, None)
    np.testing.assert_array_equal(plain.tokens[0], greedy.tokens[0])
    for row in range(1, len(PROMPTS)):
        assert (plain.tokens[row] != greedy.tokens[row]).any()
    assert (plain.steps == NEW).all()
    assert len(np.unique(greedy.tokens)) > 5


@pytest.mark.parametrize("name", slow_among(DRAFTERS | POOLS, "random", "stacked", "unequal"))
def test_greedy_rows_equal_plain_decoding(name, target):
    greedy = generate(target, None)
    got = generate(target, (DRAFTERS | POOLS)[name](target))
    np.testing.assert_array_equal(got.tokens, greedy.tokens)
    assert (got.lengths == NEW).all()
    if name == "near":
        assert got.steps.mean() < 0.7 * NEW


@pytest.mark.slow
def test_greedy_rows_equal_plain_decoding_with_activations_in_8_bits(target):
    """A node's products are those that plain decoding has."""
    model = with_activations_of(target, "int8", 4)
    plain = generate(model, None)
    got = generate(model, alone(near(target, 1), (2, 2, 1)))
    np.testing.assert_array_equal(got.tokens, plain.tokens)
    assert got.steps.mean() < 0.8 * NEW


@pytest.mark.parametrize("name", slow_among(DRAFTERS, "random", "chain"))
def test_naive_equals_plain_sampling_token_for_token(name, plain, target):
    got = generate(target, DRAFTERS[name](target), sampling=MIXED, verify="naive")
    np.testing.assert_array_equal(got.tokens, plain.tokens)
    if name == "near":
        assert got.steps[1:].mean() < NEW


@pytest.mark.parametrize("name", slow_among(CHOSEN, "text"))
def test_chosen_trees_give_the_tokens_of_plain_decoding(name, plain, target):
    """Rows of temperature 0 and others; as many tokens as the cache has room for."""
    got = generate(target, CHOSEN[name](target), sampling=MIXED)
    np.testing.assert_array_equal(got.tokens, plain.tokens)
    assert got.steps.max() <= NEW
    assert got.steps.mean() < (0.7 if name == "hybrid" else 0.97) * NEW
    assert got.nodes.max() > NEW


@pytest.mark.parametrize(
    "widths", [(2, 1), (1, 1, 1), pytest.param((2, (2, 0), (1, 0)), marks=pytest.mark.slow)]
)
def test_the_target_as_its_own_drafter_is_accepted_whole(widths, target):
    drafter = alone(target, widths)
    for count in (4, 20, NEW):
        got = generate(target, drafter, max_new_tokens=count)
        assert (got.steps == -(-count // drafter.window)).all()
        np.testing.assert_allclose(got.tokens_per_step, count / got.steps)


@pytest.mark.slow
def test_greedy_rule_equals_multi_step_at_temperature_0(target):
    drafter = alone(near(target, 1), (1, 1, 1))
    by_rule = [generate(target, drafter, verify=v) for v in ("greedy", "multi-step", "auto")]
    for other in by_rule[1:]:
        np.testing.assert_array_equal(by_rule[0].tokens, other.tokens)
        np.testing.assert_array_equal(by_rule[0].steps, other.steps)


@pytest.mark.slow
def test_stacked_and_unrolled_pools_draw_the_same(target):
    one, other = (generate(target, pool(target, stack), sampling=MIXED) for stack in (False, True))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.steps, other.steps)
    assert one.steps.mean() < 0.8 * NEW


@pytest.mark.parametrize(
    ("name", "verify"), [pytest.param("pool", "auto", marks=pytest.mark.slow), ("near", "naive")]
)
def test_rows_of_a_mixed_batch_equal_their_solo_runs(name, verify, target):
    """Prompts of two buckets, rows that end early, every sampling parameter."""
    drafter, options = DRAFTERS[name](target), {"verify": verify, "stop_at_eos": True}
    biases = [{3: 2.0}, {}, {5: -4.0, 9: 1.5}, {}]
    sampling = replace(
        MIXED,
        min_p=np.array([0.0, 0.0, 0.0, 0.1]),
        presence_penalty=np.array([0.0, 0.5, 0.0, 0.0]),
        frequency_penalty=np.array([0.2, 0.0, 0.0, 0.0]),
        repetition_penalty=np.array([1.0, 1.3, 1.0, 1.0]),
        logit_bias=biases,
    )
    prompts = [*PROMPTS[:3], PROMPTS[3] * 2]
    batch = generate(target, drafter, prompts, sampling=sampling, **options)
    for row, prompt in enumerate(prompts):
        own = {
            name: np.broadcast_to(value, len(prompts))[row]
            for name, value in vars(sampling).items()
            if name not in ("logit_bias", "kind")
        }
        mine = Sampling(**own, logit_bias=biases[row])
        keys = jax.random.fold_in(KEY, row)[None]
        solo = generate(target, drafter, [prompt], keys, sampling=mine, **options)
        np.testing.assert_array_equal(solo.tokens[0], batch.tokens[row])
        assert solo.lengths[0] == batch.lengths[row]
        assert solo.steps[0] == batch.steps[row]


def test_keys_decide_the_tokens(target):
    sampling = Sampling(temperature=0.8)
    drafter = alone(near(target, 1))
    one, same, other = (
        generate(target, drafter, key=jax.random.key(seed), sampling=sampling) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.tokens, same.tokens)
    assert (one.tokens != other.tokens).any(axis=1).all()
    raw = generate(target, drafter, key=jax.random.key_data(jax.random.key(1)), sampling=sampling)
    np.testing.assert_array_equal(one.tokens, raw.tokens)


def test_long_prompts_are_read_in_blocks_as_in_one_piece(monkeypatch):
    """Of unequal lengths, with a window in one layer; the caches and the likeliest tokens."""
    model = tiny_model(max_positions=1024, num_layers=2, windows=(40, None))
    noise = np.random.default_rng(0)
    prompts = [noise.integers(0, model.config.vocab_size, n).tolist() for n in (600, 513)]
    asked = prepare(jax.random.key(0), model, None, prompts, max_new_tokens=4)

    def read():
        wants = Wants(top_tokens=2, hidden_layers=(0, 2))
        call = partial(stepping.read, slots=asked.slots, wants=wants)
        return jax.jit(call)(model, asked.rows)

    state, found = read()
    monkeypatch.setattr(transformer, "_LONG_PROMPT", 1 << 20)
    expected, seen = read()
    for row, length in enumerate((600, 513)):
        np.testing.assert_array_equal(found.top_tokens[row, :length], seen.top_tokens[row, :length])
        np.testing.assert_allclose(
            found.hidden_states[row, :length], seen.hidden_states[row, :length], atol=2e-5
        )
        for keys, whole in zip(state.cache.keys, expected.cache.keys, strict=True):
            assert keys.shape == whole.shape
            held = keys[row, ..., : length - 1], whole[row, ..., : length - 1]
            np.testing.assert_allclose(*held, rtol=0, atol=2e-5 * np.abs(held[1]).max())
