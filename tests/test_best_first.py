"""Best-first trees against a plain search, and what stays of them after a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.models.transformer import Model
from specjax.verify.rules import find_rule
from tests.grown import (
    TEMPERATURES,
    children_of,
    commit,
    paths_of,
    plain_search,
    propose,
    sharpness_of,
    start,
)
from tests.pairs import PROMPTS, generate, near, varied_model

GROWTHS = {
    "small": Growth(budget=6, beams=2, width=3, depth=5),
    "deep": Growth(budget=12, beams=1, width=2, depth=12, decay=0.9999),
    "wide": Growth(budget=40, beams=16, width=8, depth=4, decay=0.5),
    "one level": Growth(budget=5, beams=4, width=9, depth=1),
    "a chain": Growth(budget=4, beams=3, width=1, depth=9),
    "more beams than nodes": Growth(budget=3),
}


def drafter_of(model: Model, growth: Growth) -> BestFirstDrafter:
    return BestFirstDrafter(model, jnp.asarray(TEMPERATURES), growth)


@pytest.mark.parametrize(("name", "windows"), [*((each, ()) for each in GROWTHS), ("wide", (3,))])
def test_the_tree_is_that_of_a_plain_search(name, windows):
    """Of a draft with a sliding window too, though the tree has more nodes than it."""
    growth, model = GROWTHS[name], varied_model(1, windows=windows)
    drafter = drafter_of(model, growth)
    tree, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    assert tree.tokens.shape[1] == drafter.num_slots == growth.budget + 1
    for row, text in enumerate(PROMPTS):
        children = children_of(model, text, growth, sharpness_of(row))
        expected = plain_search(children, growth)
        found = paths_of(tree, row)
        assert found.keys() - {()} == expected.keys()
        assert max(map(len, found)) < drafter.window
        for path, node in found.items():
            above = expected.get(path[:-1], 0.0) if path else 0.0
            chance = np.exp(expected[path] - above) / growth.decay if path else 1.0
            assert tree.chance[row, node] == pytest.approx(chance, rel=1e-3)
        trials = tree.trial_node[row]
        assert sorted(trials[trials > 0]) == sorted(found[path] for path in expected)


@pytest.mark.parametrize("counts", [(1, 2, 3, 9), (9, 9, 1, 0)])
@pytest.mark.parametrize("name", ["small", "deep", "a chain"])
def test_a_draft_that_kept_its_keys_is_one_that_read_the_text(name, counts):
    model = varied_model(1, windows=(4,) if name == "small" else ())
    drafter = drafter_of(model, GROWTHS[name])
    texts, state = PROMPTS, start(drafter, PROMPTS)
    for _ in range(2):
        tree, state = propose(drafter, state, texts)
        state, texts = commit(drafter, state, tree, texts, counts, (5, 9, 33, 60))
    fresh = start(drafter, texts)
    np.testing.assert_array_equal(state.held.cache.length, fresh.held.cache.length)
    np.testing.assert_allclose(state.held.logits, fresh.held.logits, atol=2e-4)
    for row, text in enumerate(texts):
        for got, expected in zip(state.held.cache.keys, fresh.held.cache.keys, strict=True):
            np.testing.assert_allclose(got[row, ..., : len(text)], expected[row, ..., : len(text)],
                                       atol=1e-4)  # fmt: skip
    kept, anew = (propose(drafter, at, texts)[0] for at in (state, fresh))
    for row in range(len(texts)):
        assert paths_of(kept, row).keys() == paths_of(anew, row).keys()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding(temperature):
    target = varied_model()
    sampling = Sampling(temperature=temperature)
    plain = generate(target, None, sampling=sampling, verify="naive")
    rates = []
    for budget in (4, 24):
        growth = Growth(budget=budget, beams=4, width=6, depth=8)
        drafter = drafter_of(near(target, 1), growth)
        made = generate(target, drafter, sampling=sampling, verify="naive")
        np.testing.assert_array_equal(made.tokens, plain.tokens)
        rates.append(made.tokens_per_step.mean())
    assert 1.2 < rates[0] < rates[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_draft_costs_speed_alone(value):
    target = varied_model()
    broken = near(target, 1)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, value), broken)
    drafter = drafter_of(broken, Growth(budget=6, beams=2, width=3, depth=4))
    sampling = Sampling(temperature=0.9)
    plain = generate(target, None, sampling=sampling, verify="naive")
    made = generate(target, drafter, sampling=sampling, verify="naive")
    np.testing.assert_array_equal(made.tokens, plain.tokens)


def test_its_trees_are_chosen():
    drafter = drafter_of(varied_model(1), GROWTHS["small"])
    assert find_rule("auto", drafter.construction).name == "naive"
    assert find_rule("one-hot", drafter.construction).name == "one-hot"
    with pytest.raises(ValueError, match="multi-step rule is not lossless"):
        find_rule("multi-step", drafter.construction)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"budget": 0}, "budget is 0; it must be at least 1."),
        ({"budget": 4, "depth": 0}, "depth is 0; it must be at least 1."),
        ({"budget": 4, "decay": 1.0}, "decay is 1.0; it must lie in"),
    ],
)
def test_growth_that_cannot_be_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Growth(**wrong)
