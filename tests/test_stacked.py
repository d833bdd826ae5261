"""A target with stacked layers: its texts are those of the same target with one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.checkpoints.huggingface import save_model, save_sharded
from specjax.checkpoints.load import load_model
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import prepare
from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.engine.request import Request
from specjax.goodput.chunks import PrefillBatch
from specjax.models.inflate import inflate
from specjax.models.quantized import PackedWeight, packed
from specjax.models.stacking import stacked, unstacked
from tests.cases import slow_among
from tests.engines import alone, ids_of, mixing, random_request, running, served
from tests.pairs import KEY, PROMPTS, forward, generate, near, varied_model
from tests.test_parity import GOLDEN

LAYERS = 3


@pytest.fixture(scope="module")
def target():
    return varied_model(num_layers=LAYERS)


def drafter_of(target, method):
    if method == "none":
        return None
    if method == "specexec":
        return BestFirstDrafter(near(target, 1), jnp.ones(2), Growth(7, beams=2, width=3, depth=4))
    count = 3 if method == "pool" else 1
    return ExpansionDrafter.of([near(target, n) for n in range(1, 1 + count)], (1, 1, 1))


def same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "method", slow_among(["none", "chain", "pool", "specexec"], "pool", "specexec")
)
def test_texts_are_those_of_layers_one_after_the_other(method, temperature, target):
    drafter, whole = drafter_of(target, method), stacked(target)
    assert whole.is_stacked
    found, expected = (
        generate(each, drafter, sampling=Sampling(temperature)) for each in (whole, target)
    )
    for name in ("tokens", "lengths", "steps", "nodes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_many_rows_are_written_together(target):
    prompts = [[3 + n, 5, 9] for n in range(18)]
    found, expected = (generate(each, None, prompts) for each in (stacked(target), target))
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_a_target_is_stacked_as_it_is_loaded(tmp_path, target, monkeypatch):
    save_model(target, tmp_path, dtype="float32")
    monkeypatch.setattr("specjax.models.stacking.platform", lambda: "tpu")
    whole = load_model(tmp_path)
    assert whole.is_stacked
    same_leaves(whole, stacked(target))
    assert not load_model(tmp_path, split=False).is_stacked  # which is how drafts are loaded
    save_sharded(whole, tmp_path / "sharded")
    same_leaves(load_model(tmp_path / "sharded"), whole)
    assert not load_model(tmp_path / "sharded", split=False).is_stacked


def test_stacking_is_undone(target, tmp_path):
    same_leaves(unstacked(stacked(target)), target)
    grown = inflate(target, 3 * target.config.num_parameters)
    same_leaves(inflate(stacked(target), 3 * target.config.num_parameters), stacked(grown))
    assert stacked(stacked(target)).is_stacked
    save_model(stacked(target), tmp_path, dtype="float32")
    same_leaves(load_model(tmp_path, dtype="float32"), target)


def test_packed_weights_are_stacked():
    model = load_model("bundled", dtype="float32")

    def pack(leaf):
        if leaf.ndim < 2:
            return leaf
        return jax.tree.map(jnp.asarray, packed(np.asarray(leaf), 4, 64))

    layers = tuple(jax.tree.map(pack, own) for own in model.layers)
    model = type(model)(
        model.embedding, layers, model.final_norm, model.unembedding, config=model.config
    )
    whole = stacked(model)
    assert isinstance(whole.stack.up, PackedWeight)
    assert whole.kv_heads == model.kv_heads
    tokens = jnp.asarray([[1, 2, 3, 4]])
    positions = jnp.arange(4)[None]
    found, expected = (forward(each, tokens, positions, None, None)[0] for each in (whole, model))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_layers_with_different_windows_stay_as_they_are():
    model = load_model(GOLDEN / "gemma3")
    assert not stacked(model).is_stacked


@pytest.mark.slow
def test_an_engine_serves_it(target):
    """Also what it holds of another's prompt, and reads beside others."""
    drawn = np.random.default_rng(0)
    requests = [random_request(drawn, target.config.vocab_size, most=12) for _ in range(6)]
    prompt = drawn.integers(0, target.config.vocab_size, 40).tolist()
    requests += [Request(prompt=[*prompt, at], max_new_tokens=9) for at in range(3)]
    whole, drafter = stacked(target), drafter_of(target, "chain")
    with (
        mixing(PrefillBatch(1, 8, 8)) as read,
        running(whole, drafter, rows=2, max_model_len=64) as engine,
    ):
        found = list(map(ids_of, served(engine, requests)))
        assert engine.statistics().cached_tokens >= 40
    assert read
    assert found == alone(target, requests)


def test_a_program_is_as_long_for_any_number_of_layers(target):
    def lines(count):
        model = stacked(varied_model(num_layers=count))
        request = prepare(KEY, model, None, PROMPTS, max_new_tokens=8)
        return len(generate_jit.lower(**request._asdict()).as_text().splitlines())

    assert lines(2) == lines(6)
