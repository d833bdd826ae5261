"""How many experts the tokens of a text take, and what is said and timed by it."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.checkpoints.huggingface import save_model
from specjax.cli import info
from specjax.decoding import pass_times
from specjax.decoding.expert_use import experts_taken
from specjax.models import transformer
from specjax.models.experts import expected_experts
from tests.folders import VOCABULARY, byte_tokenizer, own_cache
from tests.pairs import varied_model
from tests.test_mixtures import EXPERTS, mixture

__all__ = ["own_cache"]
TEXT = tuple(np.random.default_rng(3).integers(0, 64, 30).tolist())
MANY = {"experts": dataclasses.replace(EXPERTS, num_experts=9)}


def test_experts_of_a_text_are_those_of_its_pass(monkeypatch):
    """Of a pass over the whole text, in one program; windows are counted one by one."""
    target, real, seen = mixture(**MANY), transformer.mlp, []

    def noted(config, weights, x, dtype, axis):
        if weights.router is not None:
            logits = np.asarray(weights.router @ x)
            seen.append(np.argsort(-logits, axis=0)[:2])
        return real(config, weights, x, dtype, axis)

    monkeypatch.setattr(transformer, "mlp", noted)
    tokens = jnp.asarray(TEXT)[None]
    transformer.forward(target, tokens, jnp.arange(len(TEXT))[None], None, None)
    monkeypatch.undo()
    assert len(seen) == 2  # the layer between them is dense
    found = experts_taken(target, TEXT, (1, 7, 30, 64))
    for size, own in zip((1, 7, 30, 64), found, strict=True):
        windows = [
            len({*layer[:, start : start + size].flat})
            for layer in seen
            for start in range(0, max(1, 31 - size), size)
        ]
        assert own == pytest.approx(np.mean(windows))
    assert found[0] == 2


@pytest.mark.parametrize("text", [TEXT, ()])
def test_passes_of_a_mixture_are_timed_with_tokens_of_a_text(text, monkeypatch):
    target, entered = mixture(**MANY), []
    monkeypatch.setattr(pass_times, "_pass", lambda outer, config, layers, x: entered.append(x))
    monkeypatch.setattr(pass_times, "_least_seconds", lambda clocks, _: [1.0] * len(clocks))
    pass_times.passes_seconds(target, (1, 40), text)
    assert [each.shape[1] for each in entered] == [1, 40]
    tokens = np.resize(TEXT, 40)
    own = np.asarray(target.embedding)[tokens].T
    assert np.array_equal(entered[1], own) == bool(text)


@pytest.mark.parametrize("on_a_mesh", [False, True])
def test_info_says_what_more_nodes_read(on_a_mesh, tmp_path, capsys, monkeypatch):
    """On a mesh, where nothing is measured, as if any expert were as likely as the others."""
    made = varied_model(0, num_layers=3, vocab_size=VOCABULARY, family="qwen2_moe",
                        biases=("query", "key", "value"), max_positions=512, **MANY)  # fmt: skip
    save_model(made, tmp_path, tokenizer=byte_tokenizer(), dtype="float32")
    asked = ["info", "--model", str(tmp_path), "--draft", "none", "--dtype", "float32"]
    if on_a_mesh:
        monkeypatch.setattr(info, "mesh_of", lambda _: "a mesh")
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["active_parameters"] == made.config.num_active_parameters
    assert found["experts"] == 9
    taken = found["experts_by_nodes"]
    assert taken["1"] == 2
    assert taken["1"] < taken["4"] < taken["16"] <= taken["64"] <= 9
    alike = round(expected_experts(made.config.experts, 4), 1)
    assert (taken["4"] == alike) == on_a_mesh
    an_expert = 2 * 3 * 32 * 24 * 4  # of two layers, in float32
    read = found["read_by_nodes_bytes"]
    assert read["4"] - read["1"] == pytest.approx((taken["4"] - 2) * an_expert, rel=0.05)
    assert main(asked) == 0
    assert f"experts by nodes: 1 2.0, 4 {taken['4']}, " in capsys.readouterr().out
