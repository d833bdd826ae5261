"""A model without some of its layers as its draft."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints import skipped_layers
from specjax.checkpoints.pair import load_pair, names_in
from specjax.checkpoints.skipped_layers import layers_of, search, speedup, without
from specjax.methods import records
from specjax.methods.registry import build, setting_of
from specjax.models.layer_weights import LayerWeights
from specjax.models.stacking import stacked
from specjax.models.transformer import Model
from tests.cases import slow_but
from tests.folders import own_cache, target_folder
from tests.pairs import forward, generate, varied_model

__all__ = ["own_cache"]
LAYERS = 6


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model(num_layers=LAYERS, windows=(None, 8, None, 8, None, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("own") / "target", 3, num_layers=LAYERS))


def logits_of(model: Model) -> jnp.ndarray:
    tokens = jnp.asarray([[5, 9, 2, 33, 60, 1, 17, 8, 4, 4, 9, 2]], jnp.int32)
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return forward(model, tokens, at, None, None)[0][0]


def silenced(target: Model, skipped: tuple[int, ...]) -> Model:
    """The model with layers that add nothing, which is as if they were not there."""

    def idle(layer: LayerWeights) -> LayerWeights:
        nothing = {name: jnp.zeros_like(getattr(layer, name)) for name in ("output", "down")}
        return replace(layer, **nothing)

    layers = [idle(own) if at in skipped else own for at, own in enumerate(target.layers)]
    return replace(target, layers=tuple(layers))


@pytest.mark.parametrize("skipped", [(2,), (0, 3, 4), (5,)])
def test_it_is_the_model_as_if_layers_added_nothing(target, skipped):
    draft = without(target, skipped)
    kept = [layer for at, layer in enumerate(target.layers) if at not in skipped]
    assert all(one is other for one, other in zip(draft.layers, kept, strict=True))
    assert draft.embedding is target.embedding
    np.testing.assert_allclose(logits_of(draft), logits_of(silenced(target, skipped)), atol=1e-5)


def test_of_stacked_layers_the_others_are_stacked(target):
    plain = varied_model(num_layers=LAYERS)
    found = without(stacked(plain), (1, 4))
    np.testing.assert_allclose(logits_of(found), logits_of(without(plain, (1, 4))), atol=1e-5)


@pytest.mark.parametrize("method", slow_but(["chain:3", "tree:2,1", "specexec:5"], "chain:3"))
def test_texts_are_those_of_the_model(method, folder):
    pair = load_pair(folder, "self:skip=2-3,5")
    assert pair.drafts[0].config.num_layers == LAYERS - 3
    found = generate(pair.target, build(setting_of(method), pair))
    np.testing.assert_array_equal(found.tokens, generate(pair.target, None).tokens)


def test_layers_that_change_nothing_are_found(target, monkeypatch):
    monkeypatch.setattr(skipped_layers, "_TOKENS", 64)
    idle = silenced(target, (1, 3, 4))
    tokens = np.random.default_rng(0).integers(0, 64, 48).tolist()
    assert search(idle, tokens, 30.0) == (1, 3, 4)


def test_what_was_found_is_kept_by_model(folder, own_cache, monkeypatch, caplog):
    first = load_pair(folder, "self:skip").drafts[0]
    (said,) = [line for line in caplog.messages if "self:skip leaves out layers" in line]
    monkeypatch.setattr(skipped_layers, "search", lambda *_: pytest.fail("looked for again"))
    again = load_pair(folder, "self:skip").drafts[0]
    assert 0 < again.config.num_layers == first.config.num_layers < LAYERS
    assert said.count(",") == LAYERS - first.config.num_layers - 1


def test_a_chain_gains_by_agreement_and_share():
    assert speedup(1.0, 0.5) == pytest.approx(8 / 4.5)
    assert speedup(0.8, 0.25) == pytest.approx(max(
        sum(0.8**n for n in range(size + 1)) / (1 + size / 4) for size in range(1, 8)
    ))  # fmt: skip
    assert speedup(0.2, 1.0) == pytest.approx(1.2 / 2)


def test_names_may_have_commas_within_ranges_alone():
    assert names_in("self:skip=0-9,20-29") == ["self:skip=0-9,20-29"]
    assert names_in("a, self:skip=1,3-4 ,b,5") == ["a", "self:skip=1,3-4", "b", "5"]
    assert layers_of("0-2,5", 6) == (0, 1, 2, 5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "self:skip=x names no layers; write numbers and ranges"),
        ("3-1", "leaves out layers 3 to 1; the model has 0 to 5"),
        ("2-6", "leaves out layers 2 to 6; the model has 0 to 5"),
        ("0-5", "leaves out all 6 layers"),
    ],
)
def test_what_names_no_such_layers_is_said(text, sentence, folder, capsys):
    with pytest.raises(ValueError, match=sentence):
        load_pair(folder, f"self:skip={text}")
    assert main(["generate", "x", "--model", folder, "--draft", f"self:skip={text}"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_of_two_layers_has_none_to_leave_out(tmp_path):
    small = str(target_folder(tmp_path / "target", 3, num_layers=2))
    with pytest.raises(ValueError, match="between the first and the last; the model has 2 layers"):
        load_pair(small, "self:skip")


def test_info_plans_its_cache_and_no_weights(folder, capsys):
    def plan(draft: str) -> dict:
        assert main(["info", "--model", folder, "--draft", draft, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    alone, skipped = plan("none"), plan("self:skip=2-4")
    assert skipped["weights_bytes"] == alone["weights_bytes"]
    assert skipped["draft_weights_bytes"] == 0
    assert skipped["draft_caches_bytes"] == skipped["caches_bytes"] / 2


def test_measurements_of_other_layers_are_others(target):
    names = {
        records.setting(target, [without(target, skipped)], 1, False)
        for skipped in ((1, 2), (1, 3), (2, 3))
    }
    assert len(names) == 3
