"""Folders written and read back, and every way a folder can be wrong."""

import json
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import pallas_kernels
from pallas_kernels import cpu
from specjax.checkpoints import files as folder_module
from specjax.checkpoints import names
from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.huggingface import described, save_model, save_sharded
from specjax.checkpoints.load import load, load_drafts, load_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.tokenizer_bounds import bounded
from specjax.checkpoints.tokenizers import encode, tokenizer_of
from specjax.models import families
from tests.conftest import tiny_config, tiny_model

TEXTS = [
    "def f():\n\treturn  1\n",
    "  leading, trailing  ",
    "don't . stop ,  now !",
    "naïve 日本 \u200b\r\n\x00\x01 <s></s>",
    "<|endoftext|>x",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["def f(): return 1", "  now and then"] * 3, trainer)
    return made


@pytest.fixture(scope="module")
def original():
    return tiny_model(vocab_size=300, tie_embeddings=False)


@pytest.fixture(scope="module")
def written(original, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    save_model(original, folder, tokenizer=tokenizer, dtype="float32")
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(written, tmp_path / "copy")


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_what_is_saved_loads_back(written, original):
    again = load_model(written)
    assert again.config == original.config
    jax.tree.map(np.testing.assert_array_equal, again, original)


def test_bfloat16_files_and_bfloat16_models(original, tmp_path):
    save_model(original, tmp_path, dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), original)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path, dtype="bfloat16"), rounded)
    widened = load_model(tmp_path, dtype="float32")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(widened))
    jax.tree.map(np.testing.assert_array_equal, widened, rounded)


def test_extras_go_to_the_configuration(original, tmp_path):
    save_model(original, tmp_path, trained_on="nothing")
    assert json.loads((tmp_path / "config.json").read_text())["trained_on"] == "nothing"


def test_shards_read_like_one_file(folder, original):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, load_model(folder), original)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        load_model(folder)


def test_tokenizer_gives_plain_ids_and_exact_text(written, tokenizer):
    model, loaded = load(written)
    assert model.config.vocab_size == 300
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    assert loaded.bos_token is None
    for text in TEXTS:
        ids = loaded(text).input_ids
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == text


def test_a_loaded_tokenizer_saves_again(original, written, tmp_path):
    save_model(original, tmp_path, tokenizer=tokenizer_of(written))
    assert tokenizer_of(tmp_path)(TEXTS[0]) == tokenizer_of(written)(TEXTS[0])


def test_drafts_load_from_one_folder_or_several(written):
    assert len(load_drafts(written)) == 1
    assert len(load_drafts([written, str(written)])) == 2


def test_the_bundled_pool_loads_in_numeric_order(monkeypatch, tmp_path):
    for module in (names, folder_module):
        monkeypatch.setattr(module, "BUNDLED", tmp_path)
    with pytest.raises(CheckpointError, match=r"no drafts in .*drafts"):
        load_drafts("bundled")
    with pytest.raises(CheckpointError, match=r"no bundled pair: .*target is missing"):
        load("bundled")
    for index, width in ((10, 4), (9, 6)):
        save_model(tiny_model(intermediate_size=width), tmp_path / "drafts" / str(index))
    assert [draft.config.intermediate_size for draft in load_drafts("bundled")] == [6, 4]


def test_default_dtype_on_a_cpu_is_float32(written):
    if jax.default_backend() == "cpu":
        assert load_model(written, dtype=None).embedding.dtype == jnp.float32


@pytest.mark.parametrize("product", ["the best", "portable", "xla"])
def test_default_dtype_of_drafts_is_bfloat16_where_products_in_it_are_fast(product, written):
    form = cpu.status().form
    try:
        if product == "xla":
            pallas_kernels.use("xla")
        elif product == "portable" and form is not None:
            cpu.select("portable")
        (draft,) = load_drafts(written)
    finally:
        pallas_kernels.use("auto")
        if form is not None:
            cpu.select(None)
    fast = product == "the best" and form == "avx512_bf16"
    fast = fast or jax.default_backend() != "cpu"
    assert draft.embedding.dtype == (jnp.bfloat16 if fast else jnp.float32)


def test_tied_file_may_repeat_its_embedding(tmp_path):
    model = tiny_model()
    save_model(model, tmp_path, dtype="float32")
    embedding = np.asarray(model.embedding)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding}))
    assert load_model(tmp_path).unembedding is None
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings, but its lm_head"):
        load_model(tmp_path)
    change_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
    )
    np.testing.assert_array_equal(load_model(tmp_path).embedding, embedding)


def test_names_of_the_model_within_are_read_too(folder, original):
    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(folder, shorten)
    jax.tree.map(np.testing.assert_array_equal, load_model(folder), original)


def test_rotary_constants_of_old_files_are_ignored(folder, original):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    assert load_model(folder).config == original.config


def test_end_tokens_are_those_that_any_file_names(folder, caplog):
    """The tokenizer's too, where one is loaded; drafts and weights alone take the files'."""
    generation, settings = folder / "generation_config.json", folder / "tokenizer_config.json"
    load(folder)
    assert not caplog.messages
    generation.write_text('{"eos_token_id": [3, 4, 10000]}')
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "!"}))
    assert load_model(folder).config.eos_ids == (3, 4, 0)
    assert load(folder)[0].config.eos_ids == (3, 4, 0, 1)
    assert load_pair(str(folder)).target.config.eos_ids == (3, 4, 0, 1)
    assert caplog.messages[:2] == [
        "specjax: end tokens are 0 in config.json; 3, 4, 10000 in generation_config.json; 1 in the "
        "tokenizer. Each of 3, 4, 0, 1 ends a text.",
        "specjax: the end token 10000 can never come: the vocabulary has 300.",
    ]
    save_sharded(load_model(folder), folder.parent / "by_shards", config=described(folder))
    assert load_model(folder.parent / "by_shards").config.eos_ids == (3, 4, 0)
    for wrong in ("true", '"2"', "[[3]]", "2.0", str(2**40)):
        generation.write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(
            CheckpointError, match=r"generation_config.json: eos_token_id is .* must"
        ):
            load_model(folder)


ONE = np.ones(1, np.float32)
LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("names", "tensor", "kind"),
    [
        (["self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.attn.k_scale",
          "self_attn.kv_scale", "self_attn.k_proj.k_scale", "self_attn.prob_scale",
          "self_attn.k_zero_point"], ONE, "scales of an 8-bit KV cache"),
        (["self_attn.q_proj.input_scale", "self_attn.v_proj.output_scale",
          "mlp.down_proj.input_zero_point"], ONE, "scales of activations"),
        (["self_attn.rotary_emb.cos_cached", "rotary_emb.inv_freq"], ONE, "rotary constants"),
        (["self_attn.bias"], np.tri(8)[None, None] > 0, "attention masks"),
        (["self_attn.masked_bias"], ONE, "attention masks"),
        (["self_attn.q_proj.bias", "input_layernorm.bias"], np.zeros(32, np.float16),
         "biases of zeros"),
        (["self_attn._extra_state"], np.zeros(0, np.uint8), "marks of other programs"),
        (["/v_head.summary.weight", "/score.weight", "/classifier.bias", "/medusa_head.0.weight"],
         ONE, "heads for other uses than text"),
        (["/mtp.layers.0.mlp.up_proj.weight", "/model.mtp.fc.weight"], ONE,
         "layers that predict further tokens"),
        (["/vision_tower.a.weight", "/model.multi_modal_projector.b"], ONE,
         "towers of other inputs"),
        (["/lm_head.bias"], np.zeros(300, np.float32), "biases of zeros"),
    ],
)  # fmt: skip
def test_tensors_that_change_no_text_are_told_in_one_line(
    folder, original, names, tensor, kind, caplog
):
    whole = [name[1:] if name[0] == "/" else LAYER + name for name in names]
    change_tensors(folder, lambda t: t.update(dict.fromkeys(whole, tensor)))
    jax.tree.map(np.testing.assert_array_equal, load_model(folder), original)
    (line,) = caplog.messages
    told = [name for name in whole if not name.endswith("inv_freq")]  # as every old file has it
    assert f": {len(told)} {kind} (" in line
    assert any(name in line for name in told)


def test_layers_that_predict_further_tokens_are_left_out_where_the_configuration_says_so(
    folder, original, caplog
):
    name = "model.layers.2.eh_proj.weight"
    change_tensors(folder, lambda t: t.update({name: ONE}))
    with pytest.raises(CheckpointError, match=r"of layer 2, and config.json says 2 layers, from 0"):
        load_model(folder)
    change_config(folder, num_nextn_predict_layers=1)
    jax.tree.map(np.testing.assert_array_equal, load_model(folder), original)
    assert f"1 tensors of layers that predict further tokens ({name})" in caplog.text


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (LAYER + "self_attn.q_proj.bias", np.eye(1, 32, dtype=np.float32)[0], "not zero; llama"),
        (LAYER + "mlp.up_proj.bias", np.full(48, np.nan, np.float32), "a bias that is not zero"),
        ("nowhere.bias", np.zeros(3, np.float32), "unexpected tensor nowhere.bias"),
        (LAYER + "self_attn.q_norm.weight", ONE, "unexpected tensor"),
        (LAYER + "self_attn.sinks", ONE, "unexpected tensor"),
        (LAYER + "self_attn.q_proj.weight_scale", ONE, "of a quantized matrix that config.json"),
        (LAYER + "self_attn.q_proj.lora_A.weight", ONE, "of a LoRA adapter, which must be merged"),
        ("_orig_mod.model.norm.weight", ONE, "'_orig_mod.' at the beginning .* torch.compile's"),
        ("module.model.norm.weight", ONE, "'module.' at the beginning .* DataParallel's"),
        ("model._orig_mod.norm.weight", ONE, "'_orig_mod.' in names is torch's"),
        (LAYER + "_checkpoint_wrapped_module.mlp.b", ONE, "'_checkpoint_wrapped_module.' in name"),
        ("pretrained_model.lm_head.weight", ONE, "'pretrained_model.' at the beginning .* TRL's"),
        (LAYER + "mlp.up_proj.base_layer.weight", ONE, "of a LoRA adapter, which must be merged"),
        ("d2t", np.zeros(3, np.int64), "unexpected tensor d2t"),
        (LAYER + "self_attn.bias", ONE[None], "unexpected tensor"),
    ],
)  # fmt: skip
def test_other_tensors_beside_the_models_are_refused_by_name(folder, name, tensor, said):
    change_tensors(folder, lambda t: t.update({name: tensor}))
    with pytest.raises(CheckpointError, match=said):
        load_model(folder)


def test_a_tensor_that_is_in_two_files_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    index = {"weight_map": {"model.norm.weight": "b.safetensors", "x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.norm.weight in .*b.safetensors is there tw"):
        load_model(folder)


def test_missing_unused_and_misshapen_tensors_are_named(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda t: t.update({name: t[name][:5]}))
    with pytest.raises(CheckpointError, match=rf"{name} .*shape \(5, 32\).*\(48, 32\)"):
        load_model(folder)
    change_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load_model(folder)
    change_tensors(folder, lambda t: t.update({"model.extra": np.ones(2, np.float32)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.extra in"):
        load_model(folder)


def test_damaged_and_missing_files_are_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"no model folder at .*nowhere"):
        load_model(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        load_model(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pointer of Git LFS"):
        load_model(folder)
    weights.rename(folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"copy has neither model\.safetensors nor .*; it has "
                       r"consolidated\.safetensors, of a format that is not read"):  # fmt: skip
        load_model(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*copy"):
        tokenizer_of(folder)
    (folder / "consolidated.safetensors").rename(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a pointer of Git LFS"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy has no config\.json"):
        load_model(folder)


YARN = {"rope_type": "yarn", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "original_max_position_embeddings": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bloom"}, "'bloom' is not supported; supported: llama"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling 'dynamic' .*not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope scaling 'su'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5; .* from 1"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 8,
                              "high_freq_factor": 4, "original_max_position_embeddings": 9}},
         "from 8.0 to 4.0 turns"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' has no 'factor'"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "yarn", "factor": 4}},
         "give one of them"),
        ({"original_max_position_embeddings": 7,
          "rope_parameters": {"rope_type": "yarn", "factor": 2,
                              "original_max_position_embeddings": 9}}, "is 7, and 9"),
        ({"model_type": "mistral", "sliding_window": 8.0}, "window is 8.0"),
        ({"rope_parameters": {"full_attention": {}}}, "differ between layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "mistral", "sliding_window": 0}, "window is 0; it must be an integer"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"] * 2},
         "layer_types has 'chunked'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
         "layer_types names 1 layers; there are 2"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'.*silu"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: it has no .quant_method."),
        ({"vocab_size": "absent"}, "no 'vocab_size'"),
        ({"num_key_value_heads": 3}, r"num_heads \(4\)"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0; it must be"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be a"),
        ({"vocab_size": 10**400}, "vocab_size is 1000.* it must be an integer from 1 to"),
        ({"eos_token_id": 2**40}, "eos_token_id is 1099511627776; it must be a token's number"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0; it must be an integer"),
        ({"rope_parameters": None, "rope_scaling": "linear"},
         "rope_scaling is 'linear'; it must be an object"),
        *(({"rope_parameters": None, "rope_theta": theta}, f"rope_theta is {theta}; it must be a")
          for theta in (0.0, -1.0, float("nan"), float("inf"))),
        ({"rope_parameters": {"rope_theta": 0}}, "parameters.rope_theta is 0; it must be a finite"),
        ({"model_type": "gemma3_text", "rope_parameters": None, "rope_local_base_freq": 0},
         "rope_local_base_freq is 0; it must be a finite number"),
        ({"model_type": "gemma2", "rope_parameters": None, "final_logit_softcapping": 0},
         "final_logit_softcapping is 0; it must be a finite number"),
        ({"model_type": "gemma2", "rope_parameters": None, "query_pre_attn_scalar": 0},
         "query_pre_attn_scalar is 0; it must be"),
        ({"rms_norm_eps": float("inf")}, "norm_eps is inf; it must be a finite number"),
        *(({"eos_token_id": end}, "eos_token_id is .*; tokens are 0 to 299, as vocab_size is 300")
          for end in (-1, 10**9, 300, [0, 300])),
        *(({"eos_token_id": end}, "eos_token_id is .*; it must be a token's number, or several")
          for end in (True, "2", 2.0, [[0]], {"id": 0})),
        ({"eos_token_id": [*range(257)]}, "eos_token_id names 257 tokens; it may name 256"),
        *(({"rope_parameters": {"rope_type": "linear", "factor": factor}},
           "rope_parameters.factor is .*; it must be a finite number from 1 to 1e.06")
          for factor in (1e300, 10**400, float("inf"), 0, -1, float("nan"), "8", True)),
        *(({"rope_parameters": None, "rope_theta": theta}, "rope_theta is .* above 1, at most")
          for theta in (1e300, 1, "1e4")),
        *(({"rope_parameters": YARN | {name: value}},
           f"rope_parameters.{name} is {re.escape(repr(value))}; it must")
          for name, value in (("attention_factor", float("nan")), ("attention_factor", 1e300),
                              ("beta_fast", "32"), ("mscale", -1), ("truncate", "no"),
                              ("original_max_position_embeddings", 0))),
        ({"rope_parameters": YARN | {"beta_slow": 8, "beta_fast": 8}}, "from 8.0 to 8.0 turns"),
        *(({"rope_parameters": LONG | {"long_factor": factors}}, words) for factors, words in (
            ([1.0] * 3, "long_factor has 3 factors for 4 frequencies"),
            ([1.0, float("nan"), 1.0, 1.0], r"long_factor\[1\] is nan; it must be a finite number"),
            ([1.0, 1.0, "2", 1.0], r"long_factor\[2\] is '2'"),
            (4.0, "long_factor is 4.0; it must be a list"),
        )),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "factor is 1.5; .* at most 1"),
        ({"model_type": "gpt_neox", "rotary_pct": "all"}, "rotary_pct is 'all'; it must be a f"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; it must be true or false"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\].*silu"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"head_dim": 0}, "head_dim is 0; it must be an integer"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000; it must"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1; it must be"),
        ({"model_type": "mistral", "layer_types": 4}, "layer_types is 4; it must be a list"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "28"},
         "max_window_layers is '28'; it must be an integer from 0"),
        ({"model_type": "gemma3_text", "rope_parameters": None, "sliding_window_pattern": 0},
         "sliding_window_pattern is 0; it must be an integer from 1"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"factor": 0.5}}},
         "rope_parameters.full_attention.factor is 0.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor is inf"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_the_path(folder, changes, words):
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=rf"copy/config\.json: .*{words}"):
        load_model(folder)


def test_absent_keys_mean_what_they_mean_to_transformers():
    config = {
        "model_type": "llama",
        "vocab_size": 7,
        "hidden_size": 24,
        "intermediate_size": 9,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "rope_theta": 5e5,
    }
    read = families.read_config(config)
    assert (read.head_dim, read.num_kv_heads, read.rope_theta) == (8, 3, 5e5)
    assert (read.tie_embeddings, read.eos_ids, read.norm_eps) == (False, (), 1e-6)
    assert families.read_config(config | {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize("eos", [(), (5,), (1, 2)])
def test_a_configuration_written_reads_back(eos):
    config = tiny_config(eos_ids=eos, rope_theta=1234.0, norm_eps=1e-5, tie_embeddings=False)
    assert families.read_config(json.loads(json.dumps(families.write_config(config)))) == config


FINITE = np.array([0.0, -0.0, 1e-30, -1e30, 3.0e38, -3.0e38], np.float32)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_a_number_that_is_not_finite_is_found_in_every_float(kind):
    highest = float(jnp.finfo(kind).max)
    whole = np.clip(FINITE.astype(np.float64), -highest, highest).astype(jnp.dtype(kind))
    assert folder_module.is_finite(whole)
    assert folder_module.is_finite(whole[:0])
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, 3, 5):
            wrong = whole.copy()
            wrong[place] = value
            assert not folder_module.is_finite(wrong)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: np.full_like(x, np.nan), "holds NaN or infinity"),
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 7, -np.inf, x), "holds NaN or"),
        (lambda x: x.astype(np.int8), "is int8; weights must be floating-point numbers"),
        (lambda x: x != 0, "is bool; weights must be floating-point numbers"),
    ],
    ids=["all NaN", "one infinity", "integers", "truth"],
)
def test_weights_that_are_no_numbers_are_refused(folder, change, words):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} in .*copy/model\.safetensors {words}"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_weights_by_shards_that_are_no_numbers_are_refused(tmp_path, kind):
    model = tiny_model()
    norm = jnp.full(model.final_norm.shape, np.nan if kind == "float32" else 1, kind)
    spoilt = jax.tree.map(lambda leaf: norm if leaf is model.final_norm else leaf, model)
    save_sharded(spoilt, tmp_path / "kept")
    words = "hold NaN or infinity" if kind == "float32" else "final_norm is int32; weights must be"
    with pytest.raises(CheckpointError, match=rf"weights\.orbax cannot be read: .*{words}"):
        load_model(tmp_path / "kept")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "a\\b"]
)
def test_an_index_names_files_of_its_own_folder(folder, name):
    """Whatever they are: what is outside is not opened."""
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json names .*in the same folder"):
        load_model(folder)


def test_a_long_value_is_shortened(folder):
    change_config(folder, eos_token_id="x" * 5000)
    with pytest.raises(
        CheckpointError, match=r"eos_token_id is 'xxx.* \.\.\. .*or several"
    ) as said:
        load_model(folder)
    assert len(str(said.value)) < 700


def test_a_tokenizer_of_wrong_settings_is_refused_when_it_is_read(folder):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "many"}))
    with pytest.raises(CheckpointError, match=r"tokenizer in .*copy cannot be read: '>' not"):
        tokenizer_of(folder)


def spoilt_tokenizer(folder, **changes):
    """The folder, with a tokenizer's file in which fields are others."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def replacing(pattern, content, times):
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": replacing({"String": "a"}, "aaaa", 10)}, "normalizer can make .* 1.05e"),
        ({"normalizer": replacing({"Regex": "(?=a)"}, "b", 40)}, "normalizer can make a text"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "prepend has 999 bytes"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}] * 31}}, "decoder"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 31}},
         "pre_tokenizer can make a text 2.15e.09 times as long; it may make it 64 times"),
        ({"post_processor": {"type": "TemplateProcessing", "pair": [],
                             "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9,
                             "special_tokens": {}}}, "post_processor repeats the text 9 times"),
        ({"truncation": "x" * (5 << 20)}, r"has 5,\S+ bytes; it may have 4,501,504 for"),
        ({"normalizer": [1]}, "is not a tokenizer's: "),
    ],
)  # fmt: skip
def test_a_tokenizer_that_costs_more_than_real_ones_is_refused(folder, changes, words):
    spoilt_tokenizer(folder, **changes)
    with pytest.raises(CheckpointError, match=rf"copy/tokenizer\.json.*{words}"):
        load(folder)


def test_normalizers_of_real_tokenizers_are_taken(folder):
    """Gemma's and LLaMA 2's, T5's and XLNet's."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "NFKC"},
        *({"type": "Replace", "pattern": {"String": own}, "content": '"'} for own in ("``", "''")),
        *(
            {"type": "Replace", "pattern": {"Regex": own}, "content": " "}
            for own in (" {2,}", "\\s+")
        ),
        {"type": "Lowercase"},
    ]
    spoilt_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": steps})
    assert encode(tokenizer_of(folder, 300), "aB") == tokenizer_of(folder)("aB").input_ids


def test_a_library_that_panics_or_takes_long_gives_one_sentence(folder, caplog):
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    found = tokenizer_of(spoilt_tokenizer(folder, pre_tokenizer=slow), 40)
    assert "tokens up to 278, and the model a vocabulary of 40;" in caplog.text
    with pytest.raises(ValueError, match=r"the prompt cannot be tokenized: .*retry-limit"):
        encode(found, "a" * 40 + "b", what="the prompt")
    with pytest.raises(ValueError, match=r"it took more than 0\.01 seconds to tokenize"):
        bounded(lambda: time.sleep(0.5), "it", 0.01)


def test_nested_json_gets_one_sentence(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_model(folder)
