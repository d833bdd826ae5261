"""LoRA adapters: merged as peft's definition has it, and refused where they cannot be."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.__main__ import main
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.huggingface import named_tensors, save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.checkpoints.self_drafts import self_draft
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder  # noqa: F401
from tests.test_parity import GOLDEN

UP = "model.layers.0.mlp.up_proj"
QUERY = "model.layers.1.self_attn.q_proj"


def adapter(folder, tensors, **about):
    """Writes an adapter of rank 2 with such tensors, by the names of modules."""
    folder.mkdir()
    described = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2,
                 "lora_alpha": 6, "bias": "none"} | about  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))
    held = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(held, folder / "adapter_model.safetensors")
    return folder


def low(module, outputs, inputs, rank=2, seed=0):
    """The two matrices of a module by their names, and their product."""
    drawn = np.random.default_rng(seed)
    a = drawn.standard_normal((rank, inputs)).astype(np.float32)
    b = drawn.standard_normal((outputs, rank)).astype(np.float32)
    product = np.zeros((outputs, inputs))
    for one in range(rank):
        product += np.outer(b[:, one], a[one])
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, product


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    save_model(tiny_model(tie_embeddings=False), folder, dtype="float32")
    return folder


def tensors_of(*names):
    return {name: np.asarray(each) for name, each in named_tensors(load_model(find(*names)))}


@pytest.mark.parametrize(
    ("about", "scale"),
    [
        ({}, 6 / 2),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"k_proj": 9, "up_proj": 5}}, 5 / 2),
        ({"alpha_pattern": {"^model.layers.0.mlp.up_proj": 1, "up_proj": 5}}, 1 / 2),
        ({"alpha_pattern": {"^mlp.up_proj": 1}}, 6 / 2),
        ({"rank_pattern": {"up_proj": 2}, "r": 7}, 6 / 2),
    ],
)
def test_what_is_added_is_scaled_as_the_configuration_says(about, scale, base, tmp_path):
    parts, product = low(UP, 48, 32)
    found = tensors_of(base, adapter(tmp_path / "lora", parts, **about))
    for name, before in tensors_of(base).items():
        added = scale * product if name == f"{UP}.weight" else 0
        np.testing.assert_allclose(found[name], before + added, rtol=1e-5, atol=1e-5)


def test_rows_of_dora_have_the_norms_that_it_names(base, tmp_path):
    parts, product = low(UP, 48, 32)
    norms = np.arange(1, 49, dtype=np.float32)
    parts[f"{UP}.lora_magnitude_vector"] = norms
    found = tensors_of(base, adapter(tmp_path / "lora", parts, use_dora=True))[f"{UP}.weight"]
    whole = tensors_of(base)[f"{UP}.weight"] + 3 * product
    wanted = whole / np.sqrt(np.square(whole).sum(axis=1, keepdims=True)) * norms[:, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_embeddings_and_whole_tensors(base, tmp_path):
    before = tensors_of(base)
    rows, width = before["model.embed_tokens.weight"].shape
    parts, product = low("", width, rows)
    head, norm = np.full((rows, width), 0.5, np.float32), np.full(width, 2, np.float16)
    parts = {
        "model.embed_tokens.lora_embedding_A": parts[".lora_A.weight"],
        "model.embed_tokens.lora_embedding_B": parts[".lora_B.weight"],
        "lm_head.modules_to_save.default.weight": head,
        "lm_head.original_module.weight": head + 1,
        "model.norm.modules_to_save.weight": norm,
    }
    found = tensors_of(base, adapter(tmp_path / "lora", parts, modules_to_save=["lm_head"]))
    wanted = before["model.embed_tokens.weight"] + 3 * product.T
    np.testing.assert_allclose(found["model.embed_tokens.weight"], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["lm_head.weight"], head)
    np.testing.assert_array_equal(found["model.norm.weight"], norm)


@pytest.mark.parametrize(
    ("case", "module"),
    [("phi3_short", "model.layers.0.self_attn.qkv_proj"), ("gpt2", "transformer.h.0.attn.c_attn"),
     ("gemma3", "model.layers.0.mlp.gate_proj")],
)  # fmt: skip
def test_matrices_are_changed_as_their_files_pack_them(case, module, tmp_path):
    before = tensors_of(GOLDEN / case)
    matrix = before[f"{module}.weight"]
    turned = case == "gpt2"
    outputs, inputs = matrix.shape[::-1] if turned else matrix.shape
    parts, product = low(module, outputs, inputs)
    found = tensors_of(GOLDEN / case, adapter(tmp_path / "lora", parts, fan_in_fan_out=turned))
    wanted = matrix + 3 * (product.T if turned else product)
    np.testing.assert_allclose(found[f"{module}.weight"], wanted, rtol=1e-5, atol=1e-5)
    same = [name for name in before if (found[name] == before[name]).all()]
    assert len(same) == len(before) - 1


def test_an_adapter_of_another_model_is_told_in_one_line(base, tmp_path, caplog):
    parts, _ = low(QUERY, 32, 32)
    load_model(find(base, adapter(tmp_path / "own", parts)))
    load_model(find(base, adapter(tmp_path / "other", parts, base_model_name_or_path="x/7B")))
    told = f"specjax: {tmp_path / 'other'} is a LoRA adapter of x/7B; it is merged into base."
    assert caplog.messages == [told]


A, B = f"{UP}.lora_A.weight", f"{UP}.lora_B.weight"


@pytest.mark.parametrize(
    ("parts", "about", "said"),
    [
        (low(UP, 48, 16)[0], {}, r"lora_A \(2, 16\) and lora_B \(48, 2\); .* is 48 × 32"),
        (low(UP, 48, 32, rank=3)[0], {}, "has rank 3; adapter_config.json says r 2"),
        ({A: np.ones((2, 32), np.float32)}, {}, "lacks a matrix lora_A or lora_B"),
        (low("model.layers.7.mlp.up_proj", 48, 32)[0], {}, "has no tensor model.layers.7.mlp.up_p"),
        (
            {"model.norm.weight": np.ones(7, np.float32)},
            {},
            r"shape \(7,\); the model's is \(32,\)",
        ),
        ({A: np.full((2, 32), np.nan, np.float32)}, {}, "not of finite floating-point numbers"),
        ({}, {}, "holds no tensor of an adapter"),
        (low(UP, 48, 32)[0], {"use_dora": True}, "has no lora_magnitude_vector; use_dora is True"),
        (low(UP, 48, 32)[0], {"peft_type": "IA3"}, "peft_type 'IA3' is not merged here; LORA is"),
        (low(UP, 48, 32)[0], {"use_qalora": True}, "use_qalora is True, which is not merged here"),
        (low(UP, 48, 32)[0], {"layer_replication": [[0, 2]]}, "layer_replication is .*not merged"),
        (low(UP, 48, 32)[0], {"init_lora_weights": "pissa"}, "the base's weights are changed too"),
        (low(UP, 48, 32)[0], {"lora_alpha": "6"}, "the alpha lora_alpha is '6'; it must be a num"),
        (low(UP, 48, 32)[0], {"r": 0}, "r is 0; it must be a whole number from 1"),
        (low(UP, 48, 32)[0], {"alpha_pattern": {"(a+)+b": 1}}, "the regular expression '.a...b'"),
        (
            {A: np.full((2, 32), 1e30, "f4"), B: np.full((48, 2), 1e30, "f4")},
            {},
            "up_proj.weight with the adapter in .* holds NaN or infinity",
        ),
        (
            low(UP, 48, 32)[0],
            {"lora_alpha": 10**400},
            "alpha lora_alpha is 1000.* must be a number",
        ),
        (low(UP, 48, 32)[0] | {f"{UP}.lora_A.default.weight": np.ones(1)}, {}, "is there twice"),
        (
            low(UP, 48, 32)[0],
            {"use_rslora": "false"},
            "use_rslora is 'false'; it must be true or f",
        ),
        (low(UP, 48, 32)[0], {"modules_to_save": ["lm_head"]}, "'lm_head', and there is no tensor"),
        (low(UP, 48, 32)[0], {"modules_to_save": "lm_head"}, "is 'lm_head'; it must be names"),
        (low(UP, 48, 32)[0], {"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; it must be an obj"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(parts, about, said, base, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        load_model(find(base, adapter(tmp_path / "lora", parts, **about)))


def test_bases_that_an_adapter_cannot_be_merged_into(base, tmp_path):
    lora = adapter(tmp_path / "lora", low(UP, 48, 32)[0])
    quantize_folder(find(base), tmp_path / "small", 8)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is quantized \(int8.*full model"):
        load_model(find(tmp_path / "small", lora))
    with pytest.raises(ValueError, match="is not merged into a model that is offloaded"):
        load_pair(str(base), "none", lora=str(lora), offload="disk")
    save_model(tiny_model(), tmp_path / "tied", dtype="float32")
    embedding = adapter(tmp_path / "embedding", {"model.embed_tokens.weight": np.ones(1, "f4")})
    with pytest.raises(CheckpointError, match="which the model's unembedding is too"):
        load_model(find(tmp_path / "tied", embedding))
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json, so it is no LoRA"):
        find(base, base)


def test_the_model_as_its_own_draft_has_the_adapter_too(base, tmp_path):
    files = find(base, adapter(tmp_path / "lora", {"model.layers.0.input_layernorm.weight":
                                                   np.full(32, 5, np.float32)}))  # fmt: skip
    draft = self_draft(files, load_model(files), 8)
    np.testing.assert_array_equal(draft.layers[0].attention_norm, 5)


def test_a_folder_of_an_adapter_says_what_it_is_and_what_to_do(tmp_path, capsys):
    lora = str(adapter(tmp_path / "lora", low(UP, 48, 32)[0]))
    assert main(["info", "--model", lora]) == 2
    said = [capsys.readouterr().err]
    for names in ((lora, None), (str(pair_folder() / "target"), lora)):
        with pytest.raises(CheckpointError) as error:
            load_pair(*names)
        said.append(str(error.value))
    (tmp_path / "lora" / "adapter_model.safetensors").rename(
        tmp_path / "lora" / "adapters.safetensors"
    )
    for names in ((lora,), (pair_folder() / "target", lora)):
        with pytest.raises(CheckpointError, match=r"as mlx-lm writes it, .* mlx_lm\.fuse writes"):
            load_model(find(*names))
    with pytest.raises(CheckpointError, match="no LoRA adapter at /nowhere; it must be a folder"):
        find(lora, "/nowhere")
    for part in ("is a LoRA adapter of org/base, not a whole model", "--lora", "merge_and_unload"):
        assert all(part in each for each in said)


def test_a_pair_has_its_target_merged(tmp_path):
    target = str(pair_folder() / "target")
    lora = str(adapter(tmp_path / "lora", {"model.norm.weight": np.full(32, 3, np.float32)}))
    pair = load_pair(target, target, lora=lora)
    np.testing.assert_array_equal(pair.target.final_norm, 3)
    np.testing.assert_array_equal(pair.drafts[0].final_norm, load_model(target).final_norm)


@pytest.mark.parametrize("verb", ["generate x", "bench", "tune x", "verify", "info --json"])
def test_every_verb_with_a_model_takes_an_adapter(verb, tmp_path, capsys):
    target = str(pair_folder() / "target")
    lora = str(adapter(tmp_path / "lora", low("model.layers.9.mlp.up_proj", 48, 32)[0]))
    assert main([*verb.split(), "--model", target, "--lora", lora]) == 2
    assert "the model has no tensor model.layers.9.mlp.up_proj.weight" in capsys.readouterr().err
