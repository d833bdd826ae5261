"""Logit bias and penalties: against a twin on the host, and their distribution through trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.base.penalties import TokenCounts, counts_of, penalized
from specjax.base.sampling import Sampling
from specjax.decoding import stepping
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.measure.distribution_tests import g_test
from specjax.trees.construction import DISTINCT
from tests.pairs import alone, forward, generate, near, varied_model

PROMPT = [7, 3, 7, 3]
KEPT, TOKENS, ROWS = 3, 3, 8192
LEVEL = 1e-7
PENALTIES = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "repetition_penalty": 1.4,
    "logit_bias": {3: 1.5, 11: 2.0},
}


def twin(logits, prompt, made, presence, frequency, repetition, bias):
    """Logits in float64 after bias and penalties, token by token, as vLLM orders them."""
    found = logits.astype(np.float64)
    for token in range(len(found)):
        found[token] += bias.get(token, 0.0)
        if token in prompt or token in made:
            by = repetition if found[token] <= 0 else 1 / repetition
            found[token] *= by
        found[token] -= frequency * made.count(token)
        found[token] -= presence * (token in made)
    return found


TOKEN = st.integers(0, 6)
SMALL = st.floats(-2, 2, width=32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 99),
    st.lists(TOKEN, min_size=1, max_size=4),
    st.lists(TOKEN, max_size=4),
    st.lists(TOKEN, min_size=3, max_size=3),
    st.tuples(SMALL, SMALL, st.floats(0.25, 2, width=32)),
    st.dictionaries(TOKEN, SMALL, max_size=3),
)
def test_a_node_has_the_logits_of_its_own_path(seed, prompt, made, tree, numbers, bias):
    """A tree of a root, two children and a grandchild below the second child."""
    logits = np.random.default_rng(seed).normal(0, 3, (1, 4, 7)).astype(np.float32)
    path = np.zeros((1, 4, 4), bool)
    path[0, 1, 1] = path[0, 2, 2] = True
    path[0, 3, [2, 3]] = True
    presence, frequency, repetition = numbers
    given = Sampling(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    counts = counts_of(Sampling(logit_bias=bias, presence_penalty=1.0), [prompt], 7)
    counts = counts.after(jnp.asarray([made + [0] * 4])[:, :4], jnp.asarray([len(made)]))
    tokens = jnp.asarray([[0, *tree]], jnp.int32)
    found = penalized(jnp.asarray(logits), given.rows(1), counts, tokens, jnp.asarray(path))
    for node, own in enumerate(([], tree[:1], tree[1:2], tree[1:])):
        wanted = twin(logits[0, node], prompt, made + own, *numbers, bias)
        np.testing.assert_allclose(found[0, node], wanted, rtol=1e-5, atol=1e-5)


def test_rows_without_a_bias_or_a_penalty_keep_their_logits():
    used, none = jnp.asarray([True, False]), jnp.zeros((2, 5), bool)
    counts = TokenCounts(used, jnp.ones((2, 5)), ~none, none.astype(jnp.int32))
    logits = jnp.arange(10.0).reshape(2, 1, 5)
    path = jnp.zeros((2, 1, 1), bool)
    found = penalized(logits, Sampling().rows(2), counts, jnp.zeros((2, 1), jnp.int32), path)
    np.testing.assert_array_equal(found[0], logits[0] + 1)
    np.testing.assert_array_equal(found[1], logits[1])
    assert counts_of(Sampling(temperature=0.8), [PROMPT], 64) is None


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty is 0.0"),
        ({"presence_penalty": np.nan}, ValueError, "presence_penalty is nan"),
        ({"frequency_penalty": np.ones(3)}, ValueError, "has shape"),
        ({"logit_bias": {64: 1.0}}, ValueError, "token 64; the vocabulary has 64"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "token -1"),
        ({"logit_bias": {1: 101.0}}, ValueError, "token 1 is 101.0"),
        ({"logit_bias": {1: np.nan}}, ValueError, "token 1 is nan"),
        ({"logit_bias": {1: "much"}}, TypeError, "it must be a number"),
        ({"logit_bias": {"a": 1.0}}, TypeError, "token ids are integers"),
        ({"logit_bias": 3}, TypeError, "must map token ids"),
        ({"logit_bias": [{}, {}, {}]}, ValueError, "3 mappings; there are 2 prompts"),
    ],
)
def test_what_cannot_be_is_refused(wrong, kind, sentence):
    with pytest.raises(kind, match=sentence):
        generate(varied_model(), None, [PROMPT, PROMPT], sampling=Sampling(**wrong))


@functools.cache
def target():
    return varied_model(hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)


def raw_logits(text):
    """The logits after a whole text."""
    tokens = jnp.asarray([text], jnp.int32)
    positions = jnp.arange(len(text), dtype=jnp.int32)[None]
    return np.asarray(forward(target(), tokens, positions, None, None)[0][0, -1])


def twin_logits(made):
    given = (PENALTIES[f"{name}_penalty"] for name in ("presence", "frequency", "repetition"))
    return twin(raw_logits(PROMPT + made), PROMPT, made, *given, PENALTIES["logit_bias"])


@functools.cache
def expected():
    """The probability of every text of three tokens that top-k leaves."""
    found = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, mass in found.items():
            logits = twin_logits(list(text)) / 1.3
            likely = np.argsort(-logits)[:KEPT]
            weights = np.exp(logits[likely] - logits[likely].max())
            for token, weight in zip(likely.tolist(), weights / weights.sum(), strict=True):
                longer[(*text, token)] = mass * weight
        found = longer
    return found


def best_first():
    growth = Growth(budget=4, beams=2, width=2, depth=2)
    return BestFirstDrafter(near(target(), 1, 0.3), jnp.ones(2), growth)


TREES = {
    "plain": (lambda: None, "auto"),
    "tree": (lambda: alone(near(target(), 1, 0.3), (2, 1)), "multi-step"),
    "block": (lambda: alone(near(target(), 1, 0.3), (1, 1)), "block"),
    "traversal": (lambda: alone(near(target(), 1, 0.3), (2, 1), children=DISTINCT), "traversal"),
    "recursive": (lambda: alone(near(target(), 1, 0.3), (2, 1), children=DISTINCT), "recursive"),
    "naive": (best_first, "naive"),
    "one-hot": (best_first, "one-hot"),
}


def drawn(name, batches=4):
    make, verify = TREES[name]
    sampling = Sampling(temperature=1.3, top_k=KEPT, **PENALTIES)
    cells = {text: cell for cell, text in enumerate(expected())}
    found, drafter = [], make()
    for batch in range(batches):
        made = specjax.generate(
            jax.random.key(batch), target(), drafter, [PROMPT] * ROWS,
            max_new_tokens=TOKENS, sampling=sampling, verify=verify, stop_at_eos=False,
        )  # fmt: skip
        found += [cells.get(tuple(text), -1) for text in made.tokens.tolist()]
    return np.array(found), made.tokens_per_step.mean()


@pytest.mark.slow
@pytest.mark.long_running
@pytest.mark.parametrize("name", TREES)
def test_the_distribution_under_penalties_is_that_of_plain_decoding(name):
    found, per_step = drawn(name)
    assert found.min() >= 0, "a text that p does not allow"
    p = np.array(list(expected().values()))
    assert g_test(found, p).p_value > LEVEL
    assert per_step == 1 if name == "plain" else per_step > 1.1


@pytest.mark.slow
@pytest.mark.long_running
def test_nodes_that_forget_their_path_are_caught(monkeypatch):
    def rootless(logits, sampling, counts, tokens, path):
        return penalized(logits, sampling, counts, tokens, jnp.zeros_like(path))

    monkeypatch.setattr(stepping, "penalized", rootless)
    jax.clear_caches()
    found, _ = drawn("tree", batches=2)
    jax.clear_caches()
    allowed = found[found >= 0]
    p = np.array(list(expected().values()))
    assert len(allowed) < len(found) or g_test(allowed, p).p_value < LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "tree", "naive"])
def test_greedy_texts_take_the_largest_penalized_logit(name):
    make, verify = TREES[name]
    made = generate(
        target(), make(), [PROMPT], max_new_tokens=8, sampling=Sampling(**PENALTIES), verify=verify
    )
    text: list[int] = []
    for _ in range(8):
        text.append(int(twin_logits(text).argmax()))
    assert made.tokens[0].tolist() == text
    assert text != generate(target(), None, [PROMPT], max_new_tokens=8).tokens[0].tolist()
