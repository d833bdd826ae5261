"""Files read straight into place: how much memory that takes, and every name and packing."""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.loading import config_of, write
from specjax.__main__ import main
from specjax.checkpoints.files import BUNDLED, CheckpointError, find
from specjax.checkpoints.huggingface import save_model, save_sharded
from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.models import families, memory
from specjax.models.transformer import initialize
from tests.conftest import tiny_config, tiny_model
from tests.folders import pair_folder
from tests.test_parity import GOLDEN, golden, plain_pass

ROOT = Path(__file__).parent.parent


class Runs:
    """Runs a statement when it is unpickled."""

    def __init__(self, statement: str) -> None:
        self.statement = statement

    def __reduce__(self):
        return exec, (self.statement,)


MEASURE = """
import sys
from benchmarks.loading import measured
import json
print(json.dumps(measured(__import__("pathlib").Path(sys.argv[1]), sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_more_than_the_largest_tensor_is_held_beside_the_model(tmp_path, dtype):
    write(tmp_path, config_of(100 << 20))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["model_bytes"] >= 90 << 20
    # 8 MiB for what Python and jax allocate of their own on the way.
    allowed = 1.3 * found["largest_bytes"] + (8 << 20)
    assert found["peak_bytes"] - found["model_bytes"] <= allowed
    assert found["peak_bytes"] >= found["model_bytes"]  # or nothing was measured


def renamed(case, folder, rename, **changes):
    """A copy of a golden checkpoint with other names of tensors, and more of them."""
    shutil.copytree(GOLDEN / case, folder)
    held = load_file(folder / "model.safetensors")
    extra = changes.pop("extra", {})
    save_file({rename(name): held[name] for name in held} | extra, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(changes.pop("config", lambda c: c)(config)))
    return folder


def same_logits(folder, case):
    tokens, expected, tolerance = golden(case)
    np.testing.assert_allclose(
        plain_pass(load_model(folder), tokens)[0], expected, rtol=0, atol=tolerance
    )


def test_gpt2_reads_without_its_first_name_and_with_its_masks(tmp_path):
    def rename(name):
        return name.removeprefix("transformer.")

    mask = {f"h.{n}.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32)) for n in range(2)}
    same_logits(renamed("gpt2", tmp_path / "copy", rename, extra=mask), "gpt2")


def test_gpt_neox_reads_by_either_name_of_its_unembedding(tmp_path):
    def rename(name):
        return name.replace("embed_out", "lm_head")

    same_logits(renamed("neox", tmp_path / "copy", rename), "neox")


@pytest.mark.parametrize("generation", [4, 5])
def test_of_a_multimodal_gemma_3_the_text_model_is_read(tmp_path, generation):
    first = "language_model.model." if generation == 4 else "model.language_model."
    eye = "vision_tower.patch.weight"
    folder = renamed(
        "gemma3",
        tmp_path / "copy",
        lambda name: name.replace("model.", first, 1),
        extra={eye if generation == 4 else f"model.{eye}": np.zeros((2, 2), np.float32)},
        config=lambda c: {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 7],
            "text_config": c,
        },
    )
    same_logits(folder, "gemma3")
    (folder / "generation_config.json").unlink()
    assert load_model(folder).config.eos_ids == (1, 7)


@pytest.mark.parametrize("case", ["ministral3", "mistral"])
@pytest.mark.parametrize("generation", [4, 5])
def test_of_a_multimodal_mistral_3_the_text_model_is_read(tmp_path, generation, case):
    def rename(name):
        if generation == 4:
            return f"language_model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    eye = "multi_modal_projector.patch_merger.weight"
    folder = renamed(
        case,
        tmp_path / "copy",
        rename,
        extra={eye if generation == 4 else f"model.{eye}": np.zeros((2, 2), np.float32)},
        config=lambda c: {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {key: c[key] for key in c if key != "tie_word_embeddings"},
        },
    )
    same_logits(folder, case)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "mamba"
    with pytest.raises(ValueError, match=r"text_config.model_type is 'mamba'; of mistral3 models"):
        families.read_config(config)


def test_a_minicpm_is_a_granite_by_other_names(tmp_path):
    """Its code is no part of transformers; Granite has the same multipliers."""
    layers, hidden = 2, 24
    golden_config = json.loads((GOLDEN / "granite" / "config.json").read_text())
    drop = {key for key in golden_config if key.endswith(("multiplier", "scaling"))}
    shared = {key: golden_config[key] for key in golden_config if key not in drop}
    shared["attention_bias"] = shared["mlp_bias"] = False
    granite = shared | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / layers**0.5,
        "logits_scaling": hidden / 8,
        "attention_multiplier": (hidden / shared["num_attention_heads"]) ** -0.5,
    }
    minicpm = shared | {
        "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8,
    }  # fmt: skip
    read = [families.read_config(each) for each in (granite, minicpm)]
    np.testing.assert_allclose(read[0].query_scale, read[1].head_dim ** -0.5)
    for field in ("embedding_scale", "residual_scale", "logit_scale"):
        np.testing.assert_allclose(getattr(read[0], field), getattr(read[1], field), rtol=1e-12)
    model = initialize(jax.random.key(0), read[0])
    save_model(model, tmp_path, dtype="float32")
    tokens = np.arange(12).reshape(2, 6)
    expected = plain_pass(load_model(tmp_path), tokens)[0]
    (tmp_path / "config.json").write_text(json.dumps(minicpm))
    found = load_model(tmp_path)
    np.testing.assert_allclose(plain_pass(found, tokens)[0], expected, rtol=0, atol=1e-6)
    assert families.read_config(families.write_config(found.config)) == found.config
    with pytest.raises(ValueError, match="sparse_config is"):
        families.read_config(minicpm | {"sparse_config": {"topk": 64}})


def test_what_chooses_experts_is_not_rounded(tmp_path):
    """Files hold it in float32 beside weights in bfloat16: rounded, other experts are chosen."""
    held = load_model(GOLDEN / "glm4_moe", dtype="bfloat16")
    whole = load_model(GOLDEN / "glm4_moe").layers[1]
    save_model(held, tmp_path)
    for model in (held, load_model(tmp_path, dtype="bfloat16")):
        assert model.embedding.dtype == "bfloat16"
        for leaf in ("router", "correction_bias"):
            np.testing.assert_array_equal(
                getattr(model.layers[1], leaf), getattr(whole, leaf), strict=True
            )


def test_phi_3_knows_its_scaling_by_its_first_name(tmp_path):
    def older(config):
        rope = config.pop("rope_parameters")
        theta = rope.pop("rope_theta")
        del rope["rope_type"], rope["original_max_position_embeddings"]
        return config | {"rope_theta": theta, "rope_scaling": rope | {"type": "su"}}

    same_logits(renamed("phi3_short", tmp_path / "copy", str, config=older), "phi3_short")


def test_positions_beyond_a_models_are_refused():
    assert load_model(GOLDEN / "phi3_short").config.max_positions == 40
    assert load_model(GOLDEN / "phi3_short", positions=160).config.rope_stretch.factors[1] == 1.5
    assert load_model(GOLDEN / "plain", positions=9).config.max_positions == 9
    with pytest.raises(CheckpointError, match="65 positions are asked for; the model has 64"):
        load_model(GOLDEN / "plain", positions=65)


def test_what_a_file_stretches_may_be_used_though_it_counts_less():
    """Qwen's models are told to stretch by YaRN and left to say that they have the original."""
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    original = config["max_position_embeddings"]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    stretched = {**config, "rope_parameters": rope | {"rope_theta": 100.0}}
    assert families.read_config(stretched).max_positions == original
    long = families.read_config(stretched, 4 * original)
    assert long.max_positions == 4 * original
    assert long.rope_stretch == families.read_config(stretched).rope_stretch
    assert families.read_config(families.write_config(long)) == long
    with pytest.raises(ValueError, match=f"the model has {4 * original}"):
        families.read_config(stretched, 4 * original + 1)


@pytest.mark.parametrize("case", ["gpt2", "opt", "gemma3", "mistral"])
def test_fewer_positions_change_nothing_within_them(case):
    """A table of positions is cut; windows that nobody is outside of go, but not their rotation."""
    model = load_model(GOLDEN / case, positions=4)
    tokens, expected, tolerance = golden(case)
    logits = plain_pass(model, tokens[:, :4])[0]
    np.testing.assert_allclose(logits, expected[:, :4], rtol=0, atol=tolerance)
    assert bool(model.config.windows) == (case == "gemma3")


def test_what_opt_and_others_cannot_be_is_refused(tmp_path):
    for case, changes, words in (
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim is 8 and hidden_size 24"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("plain", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number"),
        ("plain", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true"),
        ("plain", {"hidden_size": "24"}, "hidden_size is '24'; it must be an integer"),
        ("plain", {"eos_token_id": "x"}, "eos_token_id is 'x'; it must be a token's number"),
        ("gemma3", {"model_type": "gemma3"}, "text_config is None; it must be an object"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional_attention is True"),
        ("phi3_short", {"rope_parameters": {"rope_type": "longrope"}}, "has no 'short_factor'"),
    ):
        config = json.loads((GOLDEN / case / "config.json").read_text()) | changes
        with pytest.raises(ValueError, match=words):
            families.read_config(config)


def test_a_list_of_files_is_a_model():
    files = sorted((GOLDEN / "single_kv_untied").glob("*.safetensors"))
    assert len(files) > 1
    listed = load_model(files)
    jax.tree.map(np.testing.assert_array_equal, listed, load_model(GOLDEN / "single_kv_untied"))
    with pytest.raises(CheckpointError, match="has no tensor"):
        load_model(files[:1])
    with pytest.raises(CheckpointError, match=r"absent\.safetensors is missing, though it is"):
        load_model([*files, files[0].with_name("absent.safetensors")])
    for wrong in ([], [files[0], GOLDEN / "plain" / "model.safetensors"], [GOLDEN / "plain"]):
        with pytest.raises(CheckpointError, match="safetensors files in one folder"):
            find(wrong)


def test_pickles_need_torch_and_run_nothing(tmp_path, monkeypatch):
    shutil.copy(GOLDEN / "plain" / "config.json", tmp_path)
    ran = tmp_path / "ran"
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Runs(f"open({str(ran)!r}, 'w')"), file)
    if importlib.util.find_spec("torch"):
        with pytest.raises(CheckpointError, match="cannot be read as weights alone"):
            load_model(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"install torch to read it \(weights only"):
        load_model(tmp_path)
    assert not ran.exists()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch writes such files")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_weights_of_pytorchs_own_format_are_those_of_safetensors(tmp_path, kind):
    torch = importlib.import_module("torch")
    shutil.copy(GOLDEN / "opt" / "config.json", tmp_path)
    held = load_file(GOLDEN / "opt" / "model.safetensors")
    older = {name.removeprefix("model."): torch.tensor(held[name]) for name in held}
    dtype = getattr(torch, kind)
    torch.save({n: older[n].to(dtype) for n in older}, tmp_path / "pytorch_model.bin")
    expected = load_model(GOLDEN / "opt", dtype=kind)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path, dtype=kind), expected)
    torch.save(
        older, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )  # before torch 1.6
    assert load_model(tmp_path, dtype=kind).config == expected.config
    for spoilt in (
        {7: torch.ones(1)},
        {"a": torch.ones(1).to_sparse()},
        {"a": torch.ones(1).to(torch.float8_e5m2)},
    ):
        torch.save(spoilt, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"not a tensor of a name|which is not supp"):
            load_model(tmp_path, dtype=kind)
    torch.save(list(older.values()), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list, not tensors by name"):
        load_model(tmp_path, dtype=kind)


def test_a_name_of_a_hub_is_found_in_its_cache(tmp_path):
    """Offline, by name and revision, as huggingface_hub lays its cache out."""
    home = tmp_path / "hub" / "models--org--tiny"
    for revision, case in (("a" * 40, "plain"), ("b" * 40, "qwen3")):
        shutil.copytree(GOLDEN / case, home / "snapshots" / revision)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    (home / "refs" / "v2").write_text("b" * 40)
    code = """
from specjax.checkpoints.load import load_model
for name in ("org/tiny", "org/tiny@v2", "org/tiny@v3"):
    try:
        print(load_model(name).config.family)
    except ValueError as error:
        print(error)
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("llama", "qwen3")
    assert "no model folder at org/tiny@v3" in third
    assert "HF_HUB_OFFLINE is set" in third


def test_weights_kept_by_shards_read_back_and_must_be_the_configurations(tmp_path):
    model = tiny_model()
    save_sharded(model, tmp_path / "kept")
    again = load_model(tmp_path / "kept")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again, model)
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    (tmp_path / "kept" / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(CheckpointError, match=r"orbax cannot be read: outer\.embedding .*64.*65"):
        load_model(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="exists already; name another folder"):
        save_sharded(model, tmp_path / "kept")
    save_model(model, tmp_path / "kept")
    with pytest.raises(CheckpointError, match="holds weights twice"):
        load_model(tmp_path / "kept")


def test_shard_keeps_the_configuration_word_for_word(tmp_path, capsys):
    """Both sets of LongRoPE's factors, of which a model has one."""
    source, kept = tmp_path / "source", tmp_path / "kept"
    shutil.copytree(GOLDEN / "phi3_short", source)
    for file in (pair_folder() / "target").glob("tokenizer*"):
        shutil.copy(file, source)
    assert main(["shard", str(source), str(kept)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {kept}: ")
    told = [json.loads((folder / "config.json").read_text()) for folder in (source, kept)]
    assert told[0] == told[1]
    for positions in (None, 160):
        models = [load_model(folder, positions=positions) for folder in (source, kept)]
        assert models[0].config == models[1].config
        jax.tree.map(np.testing.assert_array_equal, *models)
    before = sorted(source.iterdir())
    assert main(["shard", str(kept), str(source)]) == 2
    assert "exists already; name another folder" in capsys.readouterr().err
    assert sorted(source.iterdir()) == before


def test_a_table_of_positions_kept_by_shards_may_be_cut(tmp_path):
    save_sharded(load_model(GOLDEN / "gpt2"), tmp_path / "kept")
    cut = load_model(tmp_path / "kept", positions=4)
    expected = load_model(GOLDEN / "gpt2", positions=4)
    assert cut.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, cut, expected)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 1000)
    with pytest.raises(CheckpointError, match=r"its weights in float32 would take .* to spare"):
        load_model(GOLDEN / "plain")


def test_a_plan_counts_what_is_held():
    model = initialize(jax.random.key(0), tiny_config())
    held = memory.load_of(model)
    assert held.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    config = model.config
    assert held.caches(3, 50) == 3 * 50 * 2 * 2 * config.num_kv_heads * config.head_dim * 4


def test_chat_templates_render_as_transformers_renders_them(tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(BUNDLED / "target", tmp_path / "chat")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    talk = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "y = 2"}]
    ours = tokenizer_of(tmp_path / "chat")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "chat")
    made = ours.apply_chat_template(talk, tokenize=False)
    assert made == theirs.apply_chat_template(talk, tokenize=False)
    assert made == "<user>x = 1\n<assistant>y = 2\n"
