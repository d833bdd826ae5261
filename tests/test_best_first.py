"""Best-first trees against a plain search, and what stays of them after a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import law
from specjax.draft import Step
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.model import Model
from specjax.sampling import Sampling
from specjax.verify import find_rule
from specjax.walk import Accepted
from tests.pairs import PROMPTS, generate, near, nothing_seen, varied_model

SLOTS = 96
SAMPLING = Sampling(temperature=np.array([0.0, 0.8, 1.3, 0.0]))
TEMPERATURES = (0.5, 1.0)
GROWTHS = {
    "small": Growth(budget=6, beams=2, width=3, depth=5),
    "deep": Growth(budget=12, beams=1, width=2, depth=12, decay=0.9999),
    "wide": Growth(budget=40, beams=16, width=8, depth=4, decay=0.5),
    "one level": Growth(budget=5, beams=4, width=9, depth=1),
    "a chain": Growth(budget=4, beams=3, width=1, depth=9),
    "more beams than nodes": Growth(budget=3),
}
INIT = jax.jit(BestFirstDrafter.init, static_argnums=3)
PROPOSE = jax.jit(BestFirstDrafter.propose)
COMMIT = jax.jit(BestFirstDrafter.commit)


def drafter_of(model: Model, growth: Growth) -> BestFirstDrafter:
    return BestFirstDrafter(model, jnp.asarray(TEMPERATURES), growth)


def plain_tree(model: Model, text: list[int], growth: Growth, sharpness: float) -> dict:
    """Paths with their scores, as the paper's code grows them, one draft pass a node."""

    def children(scores):
        """All likeliest children of some paths."""
        texts = [text + list(path) for path in scores]
        texts += [text] * (16 - len(texts))  # one compiled size
        logits = law.logits_after(model, texts) / sharpness
        log_q = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
        best = np.argsort(-log_q, axis=1, kind="stable")[:, : min(growth.width, growth.budget)]
        return {
            (*path, int(x)): score + np.log(growth.decay) + log_q[n, x]
            for n, (path, score) in enumerate(scores.items())
            for x in best[n]
        }

    def trimmed(scores):
        return dict(sorted(scores.items(), key=lambda item: -item[1])[: growth.budget])

    tree, expanded = trimmed(children({(): 0.0})), set()
    for _ in range(growth.depth - 1):
        waiting = sorted((path for path in tree if path not in expanded), key=lambda p: -tree[p])
        taken = waiting[: min(growth.beams, growth.budget)]
        expanded |= set(taken)
        grown = trimmed(tree | children({path: tree[path] for path in taken}))
        if grown.keys() <= tree.keys():
            break
        tree = grown
    return tree


def start(drafter, texts):
    length = jnp.asarray([len(text) for text in texts], jnp.int32)
    padded = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return INIT(drafter, jnp.asarray(padded), length, SLOTS, nothing_seen(padded.shape))


def propose(drafter, state, texts):
    keys = jax.random.split(jax.random.key(0), len(texts))
    position = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    last = jnp.asarray([text[-1] for text in texts], jnp.int32)
    tree, state = PROPOSE(drafter, keys, position, state, last, SAMPLING.rows(len(texts)))
    return jax.tree.map(np.asarray, tree), state


def paths_of(tree, row) -> dict[tuple[int, ...], int]:
    """The node of every path of a row's tree."""
    paths = {0: ()}
    for node in range(1, tree.tokens.shape[1]):
        if tree.valid[row, node]:
            above = int(tree.parents[row, node])
            assert above < node
            assert tree.depth[row, node] == tree.depth[row, above] + 1
            paths[node] = (*paths[above], int(tree.tokens[row, node]))
    assert len(set(paths.values())) == len(paths)
    return {path: node for node, path in paths.items()}


@pytest.mark.parametrize("name", GROWTHS)
def test_the_tree_is_that_of_a_plain_search(name):
    growth, model = GROWTHS[name], varied_model(1)
    drafter = drafter_of(model, growth)
    tree, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    assert tree.tokens.shape[1] == drafter.num_slots == growth.budget + 1
    for row, text in enumerate(PROMPTS):
        sharpness = TEMPERATURES[0 if SAMPLING.temperature[row] == 0 else 1]
        expected = plain_tree(model, text, growth, sharpness)
        found = paths_of(tree, row)
        assert found.keys() - {()} == expected.keys()
        assert max(map(len, found)) < drafter.window
        for path, node in found.items():
            above = expected.get(path[:-1], 0.0) if path else 0.0
            chance = np.exp(expected[path] - above) / growth.decay if path else 1.0
            assert tree.chance[row, node] == pytest.approx(chance, rel=1e-3)
        trials = tree.trial_node[row]
        assert sorted(trials[trials > 0]) == sorted(found[path] for path in expected)


def commit(drafter, state, tree, texts, counts, rests):
    """A step along each row's deepest path, cut to `counts` tokens with a last one of `rests`."""
    window = drafter.window
    path, tokens = (
        np.zeros((len(texts), window), np.int32),
        np.zeros((len(texts), window), np.int32),
    )
    made = []
    for row, (count, rest) in enumerate(zip(counts, rests, strict=True)):
        deepest = max(paths_of(tree, row), key=len)
        nodes = [paths_of(tree, row)[deepest[:n]] for n in range(len(deepest) + 1)]
        text = [*deepest, rest]
        count = min(count, len(text))
        path[row, : len(nodes)] = nodes
        tokens[row, : len(text)] = text
        made.append(text[:count])
    length = jnp.asarray([len(text) for text in made], jnp.int32)
    accepted = Accepted(jnp.asarray(path), length, length)
    grown = jax.tree.map(jnp.asarray, tree)
    step = Step(jnp.asarray(tokens), length, grown, accepted, nothing_seen(grown.tokens.shape))
    return COMMIT(drafter, state, step), [[*t, *new] for t, new in zip(texts, made, strict=True)]


@pytest.mark.parametrize("counts", [(1, 2, 3, 9), (9, 9, 1, 0)])
@pytest.mark.parametrize("name", ["small", "deep", "a chain"])
def test_a_draft_that_kept_its_keys_is_one_that_read_the_text(name, counts):
    model = varied_model(1)
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
