"""Layers whose matrices are fused, as on a GPU: they give what they give one by one."""

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.platform import DEVICES, traced_for
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.draft import ExpansionDrafter
from specjax.models.inflate import inflate
from specjax.models.layer_weights import FUSED
from specjax.models.quantized import packed
from specjax.models.stacking import as_stored, fused, stacked
from specjax.models.transformer import forward
from tests import dflash_twin, eagle_twin, test_dflash, test_eagle
from tests.cases import slow_but
from tests.pairs import generate, near, varied_model
from tests.test_parity import CASES, columns, golden, loaded
from tests.test_stacked import same_leaves


@pytest.fixture(scope="module")
def target():
    return varied_model(num_layers=2)


def on_gpu():
    return traced_for(DEVICES["h100"])


def test_rows_are_one_after_the_other_and_come_apart_again(target):
    whole = fused(target)
    for layer, own in zip(whole.layers, target.layers, strict=True):
        for name, parts in FUSED.items():
            expected = np.concatenate([getattr(own, part) for part in parts])
            np.testing.assert_array_equal(getattr(layer, name), expected)
            assert {getattr(layer, part) for part in parts} == {None}
    assert whole.is_fused
    assert not target.is_fused
    assert whole.kv_heads == target.kv_heads
    same_leaves(as_stored(whole), target)
    same_leaves(as_stored(fused(stacked(target))), target)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_matrices_by_themselves(temperature, target):
    def texts(change):
        drafter = ExpansionDrafter.of([change(near(target, n)) for n in (1, 2)], (2, 1))
        return generate(change(target), drafter, sampling=Sampling(temperature))

    found, expected = texts(fused), texts(lambda model: model)
    for name in ("tokens", "lengths", "steps", "nodes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("case", slow_but(CASES, "grouped_tied", "qwen3", "olmo2", "phi3_long"))
def test_a_gpus_form_has_the_logits_of_transformers(case):
    """Every family, its programs traced as for a GPU, but for what is attended with."""
    tokens, expected, near_enough = golden(case)
    model = fused(loaded(case))
    pallas_kernels.use("xla")
    try:
        with on_gpu():
            found, _ = jax.jit(forward)(model, *columns(tokens, 0), None, None)
            alone, _ = jax.jit(forward)(model, *columns(tokens[:1, :1], 0), None, None)
    finally:
        pallas_kernels.use("auto")
    np.testing.assert_allclose(found, expected, atol=near_enough, rtol=0)
    np.testing.assert_allclose(alone, expected[:1, :1], atol=near_enough, rtol=0)


def test_a_gpus_models_are_fused_as_they_are_loaded(target, tmp_path):
    save_model(target, tmp_path, dtype="float32")
    with on_gpu():
        found = load_model(tmp_path)
        grown = inflate(found, 3 * target.config.num_parameters)
    same_leaves(found, fused(target))
    assert grown.is_fused
    same_leaves(as_stored(grown), inflate(target, 3 * target.config.num_parameters))
    save_model(found, tmp_path / "again", dtype="float32")
    same_leaves(load_model(tmp_path / "again"), target)


def test_of_a_text_that_is_all_that_a_draft_sees_queries_are_not_made(tmp_path):
    with on_gpu():
        head, _ = test_eagle.loaded(
            varied_model(num_layers=test_eagle.LAYERS, hidden_size=32),
            tmp_path / "eagle", next(iter(eagle_twin.DIALECTS.values())),
        )  # fmt: skip
        draft, _ = test_dflash.loaded(
            varied_model(num_layers=dflash_twin.TARGET_LAYERS, hidden_size=test_dflash.SIZE),
            tmp_path / "dflash", next(iter(dflash_twin.DIALECTS.values())),
        )  # fmt: skip
    assert head.is_fused
    assert not draft.is_fused


def test_packed_matrices_stay_by_themselves(target):
    layer = target.layers[0]
    weight = jax.tree.map(jax.numpy.asarray, packed(np.asarray(layer.gate), 4, 16))
    found = replace(layer, gate=weight).fused()
    assert found.gate is not None
    assert found.gate_up is None
    assert found.query_key_value is not None
