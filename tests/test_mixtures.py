"""Mixtures as targets and drafts: exactness, every way that their experts are stored and held."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pallas_kernels
from specjax.checkpoints.files import CONFIG, WEIGHTS, CheckpointError, find
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.offload import memory
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.offload.memory import division
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.checkpoints.self_drafts import self_bytes, self_draft
from specjax.measure.certificate import Checks, distribution_part, with_rules
from specjax.measure.distribution_tests import logits_after
from specjax.methods import registry
from specjax.models import expert_products, experts, transformer
from specjax.models.config import Experts
from specjax.models.expert_products import OfLayer, expert_linears
from specjax.models.quantized import PackedWeight, quantized_as
from specjax.models.stacking import stacked
from tests.cases import slow_but
from tests.folders import VOCABULARY, byte_tokenizer
from tests.pairs import NEW, PROMPTS, generate, near, varied_model
from tests.test_parity import GOLDEN

EXPERTS = Experts(
    num_experts=4,
    experts_per_token=2,
    intermediate_size=24,
    shared_size=16,
    shared_gate=True,
    dense_layers=(1,),
)
BIASES = ("query", "key", "value")
MIXED = {"num_layers": 3, "experts": EXPERTS, "family": "qwen2_moe", "biases": BIASES}
METHODS = ("chain:3", "tree:2,2", "specexec:9", "recycle:8", "lookup:7")
FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mixture(seed=0, **changes):
    return varied_model(seed, **(MIXED | changes))


@pytest.fixture(scope="module")
def target():
    return mixture()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    made = tmp_path_factory.mktemp("mixture")
    save_model(target, made, dtype="float32")
    return made


def logits(model):
    return logits_after(model, PROMPTS)


def test_weights_that_a_token_reads_are_counted(target):
    config = target.config
    whole = sum(leaf.size for leaf in jax.tree.leaves(target))
    assert config.num_parameters == whole
    idle = EXPERTS.num_experts - EXPERTS.experts_per_token
    unread = 2 * idle * 3 * EXPERTS.intermediate_size * config.hidden_size
    assert config.num_active_parameters == whole - unread
    assert dataclasses.replace(config, experts=None).num_active_parameters < whole


@pytest.mark.parametrize("method", slow_but(METHODS, "specexec:9"))
def test_greedy_texts_are_those_of_plain_decoding(target, method):
    """Of a mixture as target, with mixtures as drafts."""
    pair = Pair(target, None, [near(target, 1)])
    drafter = registry.build(registry.setting_of(method, batch=len(PROMPTS)), pair)
    made = generate(target, drafter, PROMPTS, max_new_tokens=NEW)
    plain = generate(target, None, PROMPTS, max_new_tokens=NEW)
    np.testing.assert_array_equal(made.tokens, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_texts_of_mixtures_have_the_distribution_of_the_target(impl, tmp_path):
    """A mixture drafts for a mixture, and one with other experts beside it."""
    sizes = {"vocab_size": VOCABULARY, "max_positions": 64, "eos_ids": ()}
    own = mixture(**sizes)
    for name, model in {"target": own, "0": near(own, 1), "1": mixture(3, **sizes)}.items():
        save_model(model, tmp_path / name, tokenizer=byte_tokenizer(), dtype="float32")
    drafts = f"{tmp_path}/0,{tmp_path}/1"
    pair = load_pair(tmp_path / "target", drafts, dtype="float32")
    checks = Checks(8, 2048, ("naive", "multi-step", "traversal"), 0)
    settings = [registry.setting_of(name, drafts=2) for name in ("chain:2", "pool:2,1")]
    with jax.default_prng_impl(impl):
        found = distribution_part(pair, with_rules(pair, settings, checks), checks)
    assert found.passed
    assert len(found.tests) > 4


def test_a_stack_keeps_its_experts_together_for_kernels(monkeypatch):
    """As accelerators have them, whose kernels are told a layer's place."""
    own = mixture(experts=dataclasses.replace(EXPERTS, dense_layers=()))
    seen = []

    def linears(weights, *operands):
        seen.append([type(each) for each in weights])
        return expert_linears(weights, *operands)

    for module in (transformer, expert_products):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    monkeypatch.setattr(experts, "expert_linears", linears)
    np.testing.assert_array_equal(logits(stacked(own)), logits(own))
    assert [OfLayer, OfLayer] in seen, "of a stack"


def test_experts_in_bfloat16_stay_so_and_give_the_same(target, tmp_path):
    save_model(target, tmp_path, dtype="bfloat16")
    held = load_file(tmp_path / WEIGHTS)  # routers, too, as most files have them
    save_file({name: each.astype(jnp.bfloat16) for name, each in held.items()}, tmp_path / WEIGHTS)
    plain = load_model(tmp_path, dtype="float32")
    kept = load_model(tmp_path, dtype="float32", keeps_bfloat16=True)
    if isinstance(kept.embedding, PackedWeight):  # where the products are ours
        assert isinstance(kept.layers[0].expert_down, PackedWeight)
        assert isinstance(kept.layers[0].router, PackedWeight)
    np.testing.assert_allclose(logits(kept), logits(plain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_quantized_each_by_itself(target, folder, bits, tmp_path):
    """What is written is read, and gives what the model's own draft in as many bits does."""
    quantize_folder(
        find(folder), tmp_path / "made", bits, group=None if bits == 8 else 8, kept=None
    )
    made = load_model(tmp_path / "made")
    weight = made.layers[0].expert_up
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (
        EXPERTS.num_experts,
        EXPERTS.intermediate_size,
        target.config.hidden_size,
    )
    assert not isinstance(made.layers[0].router, PackedWeight)
    about = json.loads((tmp_path / "made" / CONFIG).read_text())["quantization_config"]
    assert any("mlp" in module and "gate" in module for module in about["ignore"])
    size = np.abs(logits(target)).max()
    off = np.abs(logits(made) - logits(target)).max()
    assert 0 < off < (0.05 if bits == 8 else 0.5) * size


def test_a_draft_of_the_model_itself_packs_its_experts(target, folder):
    draft = self_draft(find(folder), target, 8)
    assert quantized_as(draft) is not None
    assert isinstance(draft.layers[2].expert_gate, PackedWeight)
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(draft.layers))
    assert own <= self_bytes(target.config, 8) <= 1.1 * own
    off = np.abs(logits(draft) - logits(target)).max()
    assert 0 < off < 0.05 * np.abs(logits(target)).max()


@pytest.mark.parametrize("way", slow_but(["disk", "host"], "disk"))
def test_layers_with_and_without_experts_are_streamed(target, folder, way, monkeypatch):
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)
    monkeypatch.setattr(memory, "BUFFERS", 0)
    config = target.config
    whole = division(find(folder), config, jnp.dtype("float32"), 10**9)
    assert list(whole.layers) == [
        4 * sum(map(math.prod, config.layer_shapes(layer).values())) for layer in range(3)
    ]
    assert whole.layers[0] > 1.5 * whole.layers[1]
    room = whole.outer + whole.layers[0] + 1
    made = load_offloaded(find(folder), way, room)
    assert len(made.layers) == 1
    np.testing.assert_array_equal(
        generate(made, None, PROMPTS, max_new_tokens=6).tokens,
        generate(target, None, PROMPTS, max_new_tokens=6).tokens,
    )
    assert made.source is not None
    made.source.close()


def test_experts_that_are_stored_in_ways_that_differ_are_refused(folder, tmp_path):
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "experts.2.up" in name)
    wide, more = np.zeros((25, 32), np.float32), {name.replace("2.up", "4.up"): tensors[name]}
    for what, changed, said in (
        ("lacks one", {key: tensors[key] for key in tensors if key != name}, "has no tensor"),
        ("has a wide one", tensors | {name: wide}, r"has shape \(25, 32\)"),
        ("has one more", tensors | more, "unexpected tensor"),
    ):
        made = tmp_path / what
        made.mkdir()
        (made / CONFIG).write_text((folder / CONFIG).read_text())
        save_file(changed, made / WEIGHTS)
        with pytest.raises(CheckpointError, match=said):
            load_model(made)


def as_mxfp4(folder, out, random):
    """A gpt-oss whose experts are in MXFP4, and the same with the numbers that they stand for."""
    config = json.loads((folder / CONFIG).read_text())
    config |= {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    plain, coded = {}, {}
    for name, old in load_file(folder / WEIGHTS).items():
        shape = tuple({24: 64, 20: 32, 40: 64}.get(n, n) for n in old.shape)
        if (
            "o_proj.weight" in name
            or "q_proj.weight" in name
            or name.endswith(("k_proj.weight", "v_proj.weight"))
        ):
            shape = tuple(64 if n == 24 else n for n in old.shape)
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = shape
            blocks = random.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
            scales = random.integers(122, 127, blocks.shape[:3]).astype(np.uint8)
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
            numbers = np.ldexp(FP4[codes], scales.astype(np.int32)[..., None] - 127)
            plain[name] = np.ascontiguousarray(
                numbers.reshape(count, outputs, inputs).swapaxes(1, 2)
            ).astype(np.float32)
            coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            continue
        own = (random.standard_normal(shape) * 0.3).astype(np.float32) + (len(shape) == 1)
        plain[name] = coded[name] = own
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    for kind, tensors, more in (
        ("plain", plain, {}),
        ("coded", coded, {"quantization_config": about}),
    ):
        (out / kind).mkdir()
        (out / kind / CONFIG).write_text(json.dumps(config | more))
        save_file(tensors, out / kind / WEIGHTS)
    return out / "plain", out / "coded"


def test_mxfp4_is_read_as_it_is_and_means_what_it_stands_for(tmp_path):
    plain, coded = as_mxfp4(GOLDEN / "gpt_oss", tmp_path, np.random.default_rng(0))
    expected, made = load_model(plain), load_model(coded)
    weight = made.layers[0].expert_gate
    assert isinstance(weight, PackedWeight)
    assert (weight.bits, weight.form, weight.group) == (4, "mxfp4", 32)
    assert weight.scale.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(logits(made), logits(expected), rtol=0, atol=1e-4)
    assert made.config == expected.config
    # Where the products are XLA's, as on an accelerator, experts are unpacked.
    drawn, chosen = np.random.default_rng(1), jnp.asarray([[0, 5, 2], [3, 1, 2]], jnp.int32)
    x = jnp.asarray(drawn.standard_normal((64, 3)), jnp.float32)
    own = [layer.expert_gate for layer in (made.layers[0], expected.layers[0])]
    try:
        pallas_kernels.use("xla")
        found, wanted = (expert_linears([each], x, chosen)[0] for each in own)
    finally:
        pallas_kernels.use("auto")
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held | {"scales": np.full_like(held["scales"], 255)}, "a scale is NaN"),
        (lambda held: held | {"scales": held["scales"][:, :-1]}, "do not fit each other"),
        (lambda held: {"blocks": held["blocks"]}, "lacks model.layers.0.mlp.experts.down_proj_sc"),
    ],
)
def test_mxfp4_that_is_damaged_is_refused(change, said, tmp_path):
    _, coded = as_mxfp4(GOLDEN / "gpt_oss", tmp_path, np.random.default_rng(0))
    tensors = load_file(coded / WEIGHTS)
    name = "model.layers.0.mlp.experts.down_proj"
    held = {part: tensors.pop(f"{name}_{part}") for part in ("blocks", "scales")}
    save_file(
        tensors | {f"{name}_{part}": each for part, each in change(held).items()}, coded / WEIGHTS
    )
    with pytest.raises(CheckpointError, match=said):
        load_model(coded)
