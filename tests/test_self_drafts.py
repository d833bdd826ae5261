"""The model's own weights in 4 or 8 bits as its draft."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.checkpoints import pair as pairs
from specjax.checkpoints.files import find
from specjax.checkpoints.load import load_model
from specjax.checkpoints.offload import memory
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.checkpoints.self_drafts import self_bytes, self_draft
from specjax.decoding import pass_times
from specjax.decoding.pass_times import OffloadTimes
from specjax.decoding.request import memory_plan, rule_of
from specjax.methods.choice import Asked, choose
from specjax.methods.registry import build, setting_of
from specjax.models.quantized import PackedWeight, packed, quantized_as
from tests.cases import slow_but
from tests.folders import target_folder
from tests.pairs import generate
from tests.test_parity import GOLDEN

LAYERS = 5
MATRICES = ("query", "key", "value", "output", "up", "down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("own") / "target", 3, num_layers=LAYERS)


@pytest.fixture
def offloaded(monkeypatch, folder):
    """Bytes in which a layer stays, as if streaming the others took a byte."""
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)
    config, _ = memory.read_config(folder)
    whole = memory.division(find(folder), config, np.dtype("float32"), 10**9)
    return whole.outer + whole.layers[0] + 1


def dequantized(draft):
    return jax.tree.map(
        lambda leaf: leaf.unpacked() if isinstance(leaf, PackedWeight) else leaf,
        draft,
        is_leaf=lambda leaf: isinstance(leaf, PackedWeight),
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_its_matrices_are_the_targets_in_so_many_bits(bits, folder):
    target = load_model(folder)
    draft = self_draft(find(folder), target, bits)
    assert draft.embedding is target.embedding
    assert draft.config is target.config
    assert (quantized_as(draft) or "").startswith(f"int{bits}")
    for own, whole in zip(draft.layers, target.layers, strict=True):
        np.testing.assert_array_equal(own.mlp_norm, whole.mlp_norm)
        for name in MATRICES:
            matrix = getattr(whole, name)
            group = getattr(own, name).group
            wanted = packed(np.asarray(matrix), bits, group)
            found = getattr(own, name)
            np.testing.assert_array_equal(found.values, wanted.values)
            np.testing.assert_array_equal(found.scale, wanted.scale)
            error = jnp.abs(found.unpacked() - matrix).max() / jnp.abs(matrix).max()
            assert error < (0.15 if bits == 4 else 0.01)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(draft.layers))
    assert held == self_bytes(target.config, bits)
    drafter = build(setting_of("chain"), Pair(target, None, [draft]))
    planned = memory_plan(target, drafter, rule_of("auto", drafter), 1, 32, 64)
    assert planned.draft_weights == held  # what it shares with the target counts once


@pytest.mark.parametrize("case", slow_but(["gpt2", "phi3_short", "neox", "gemma3"], "phi3_short"))
def test_families_draft_for_themselves(case):
    target = load_model(GOLDEN / case)
    draft = self_draft(find(GOLDEN / case), target, 8)
    prompts = [[5, 9, 2, 11], list(range(3, 12))]
    found, expected = (generate(each, None, prompts, max_new_tokens=9)
                       for each in (dequantized(draft), draft))  # fmt: skip
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["chain", "specexec"])
def test_texts_are_the_targets_and_most_drafts_are_accepted(method, folder, offloaded):
    pair = load_pair(str(folder), "self:4bit", dtype="float32", offload="disk", memory=offloaded)
    assert pair.target.is_offloaded
    assert len(pair.target.layers) == 1
    tree = {"chain": {"widths": (1, 1, 1)}, "specexec": {"budget": 7}}[method]
    drafter = build(setting_of(method, **tree), pair)
    whole = load_model(folder)
    prompts = [[5, 9, 2, 11], list(range(3, 12))]
    found = generate(pair.target, drafter, prompts, max_new_tokens=24)
    np.testing.assert_array_equal(
        found.tokens, generate(whole, None, prompts, max_new_tokens=24).tokens
    )
    assert found.tokens_per_step.min() > 1.5  # of random weights in 4 bits
    hot = Sampling(temperature=0.9)
    streamed = generate(pair.target, drafter, prompts, sampling=hot)
    resident = generate(whole, drafter, prompts, sampling=hot)
    np.testing.assert_array_equal(streamed.tokens, resident.tokens)


def test_a_target_that_is_offloaded_drafts_for_itself(folder, offloaded, tmp_path, monkeypatch):
    def drafts(model=folder, draft=None, memory=offloaded):
        return load_pair(str(model), draft, dtype="float32", offload="disk", memory=memory).drafts

    assert [quantized_as(each) for each in drafts()] == ["int4, a scale for each row"]
    assert drafts(draft="none") == []
    assert drafts(memory=10**9) == []  # all of it is in memory
    assert load_pair(str(folder)).drafts == []
    quantize_folder(find(folder), tmp_path / "packed", 8)
    config, _ = memory.read_config(tmp_path / "packed")
    room = memory.division(find(tmp_path / "packed"), config, np.dtype("float32"), 10**9).outer
    assert drafts(tmp_path / "packed", memory=room + 1) == []
    monkeypatch.setattr(pairs.memory, "available", lambda mesh: 1000)
    assert drafts() == []


def test_what_cannot_be_is_said(folder, tmp_path):
    with pytest.raises(
        ValueError,
        match="no draft self:2bit; there are self:4bit, self:8bit, self:skip and self:mtp",
    ):
        load_pair(str(folder), "self:2bit")
    quantize_folder(find(folder), tmp_path / "packed", 8)
    with pytest.raises(ValueError, match=r"packed is quantized .int8, .* made of full weights"):
        load_pair(str(tmp_path / "packed"), "self:4bit")


@pytest.mark.parametrize(("draft_seconds", "levels"), [(0.001, 16), (0.05, 13), (0.2, 7), (1.0, 1)])
def test_a_slow_draft_goes_less_deep(draft_seconds, levels):
    found = OffloadTimes(10**9, 1.0, (16,), (0.1,)).levels(draft_seconds)
    assert found == levels


def test_auto_says_how_deep_it_drafts(folder, offloaded, monkeypatch):
    pair = load_pair(str(folder), dtype="float32", offload="disk", memory=offloaded)
    slow = OffloadTimes(10**9, 1.0, (16, 64, 256), (0.2, 0.4, 2.0))
    monkeypatch.setitem(pass_times._measured, pair.target, slow)
    monkeypatch.setattr("specjax.methods.choice.draft_seconds", lambda draft: 0.5)
    levels = slow.levels(0.5)
    assert 1 < levels < 16
    greedy, sampled = (choose(Asked(), pair, temperature) for temperature in (0.0, 0.8))
    assert greedy.setting.method == "specexec"
    assert greedy.setting.growth is not None
    assert greedy.setting.growth.depth == levels
    assert sampled.setting.method == "chain"
    assert sampled.setting.nodes == levels
    assert f"a token of the draft takes 0.500 s, so it goes {levels} deep" in greedy.reason
    for choice in (greedy, sampled):
        build(choice.setting, pair)


@pytest.mark.slow
def test_the_command_line_takes_it(folder, offloaded, capsys):
    flags = ["--model", str(folder), "--offload", "disk", "--memory", str(offloaded)]
    asked = ["generate", "def add(a", "--json", "--max-new-tokens", "8"]
    texts = []
    for more in (["--draft", "self:4bit", "--method", "chain"], ["--draft", "none"]):
        assert main([*asked, *flags, *more, "--dtype", "float32"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_info_says_what_an_offloaded_model_takes(folder, offloaded, capsys):
    flags = ["--model", str(folder), "--offload", "disk", "--memory", str(offloaded)]
    assert main(["info", *flags, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config, _ = memory.read_config(folder)
    shared = memory.division(find(folder), config, np.dtype("float32"), offloaded)
    assert (found["layers_in_memory"], found["layers"]) == (1, LAYERS)
    assert found["weights_bytes"] == shared.total
    assert found["draft_weights_bytes"] == self_bytes(config, 4)
    assert found["read_a_pass_bytes"] == shared.bytes_a_pass > 3 * shared.layers[0]
    assert "reading" in found["method_greedy"]
    assert main(["info", *flags[:-1], "1KiB"]) == 2
    assert "there are 0.0 MiB for both" in capsys.readouterr().err
    assert main(["check-pair", str(folder), str(folder), *flags[2:]]) == 0
    assert "can draft for the model" in capsys.readouterr().out
