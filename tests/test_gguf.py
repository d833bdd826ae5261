"""GGUF files: families, tensor types, tokenizers, and what is damaged."""

import contextlib
import dataclasses
import json
import math
import shutil
import struct
import sys
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints import quantized
from specjax.checkpoints.files import BUNDLED, CheckpointError, Files, find, tensors
from specjax.checkpoints.gguf import blocks, header_of, vocabulary_of
from specjax.checkpoints.gguf import tokenizer as pre_tokens
from specjax.checkpoints.huggingface import held_bytes, save_model
from specjax.checkpoints.load import load, load_model
from specjax.checkpoints.offload import memory
from specjax.checkpoints.offload.disk import DiskLayers
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.measure.distribution_tests import logits_after
from specjax.models.config import Experts, Latent
from specjax.models.families import read_config
from specjax.models.quantized import PackedWeight, activations_of, quantized_as
from specjax.models.rope import Stretch
from tests.conftest import tiny_model
from tests.damaged import dequantized
from tests.gguf_files import ARCHITECTURES, DRAWN, add, add_tensor, drawn_blocks, finish, write_gguf
from tests.pairs import varied_model
from tests.test_parity import CASES, GOLDEN, loaded, plain_pass

_HERE = [case for case in CASES
         if json.loads((GOLDEN / case / "config.json").read_text("utf-8"))["model_type"]
         in ARCHITECTURES and case not in
         ("llama_yarn_exact", "qwen2_windows", "qwen2_moe", "qwen3_moe")]  # fmt: skip
"""Those whose architecture GGUF has, and that it can say."""


def as_gguf_says(model):
    """A model as a file says it: Gemma's queries are scaled by the size of a head, Mixtral's layers
    have no windows, and gpt-oss' limit is that of the models that there are."""
    if model.config.family == "mixtral":
        return replace(model, config=dataclasses.replace(model.config, windows=()))
    if model.config.family == "gpt_oss":
        experts = dataclasses.replace(model.config.experts, swiglu=(1.702, 7.0))
        return replace(model, config=dataclasses.replace(model.config, experts=experts))
    if model.config.family == "dots1":  # and nor have its
        return replace(model, config=dataclasses.replace(model.config, windows=()))
    if model.config.family == "glm4_moe_lite":
        return replace(model, config=dataclasses.replace(model.config, family="deepseek_v3"))
    if model.config.family == "deepseek_v3":  # whose two factors of YaRN are one
        config = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text("utf-8"))
        config["rope_parameters"]["mscale"] = config["rope_parameters"]["mscale_all_dim"]
        return replace(model, config=read_config(config))
    if not model.config.family.startswith("gemma"):
        return model
    scale = model.config.head_dim**-0.5
    return replace(model, config=dataclasses.replace(model.config, query_scale=scale))


@pytest.mark.parametrize(
    ("case", "of_2024"),
    [*((case, False) for case in _HERE), ("deepseek_v2", True), ("deepseek_v3", True)],
)
def test_every_family_is_the_model_of_its_folder(case, of_2024, tmp_path):
    """Whose logits are those of transformers (tests/test_parity.py)."""
    file = write_gguf(GOLDEN / case, tmp_path / "model.gguf", of_2024=of_2024)
    model = load_model(file, positions={"phi3_long": 64}.get(case))
    folder = as_gguf_says(loaded(case))
    equal = partial(np.testing.assert_allclose, rtol=0, atol=2e-7)  # 1 was added to norms
    jax.tree.map(equal, model, replace(folder, config=model.config))
    stretch = folder.config.rope_stretch
    if stretch is not None and stretch.kind == "llama3":  # see below
        stretch = model.config.rope_stretch
    assert model.config == dataclasses.replace(folder.config, rope_stretch=stretch)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    shutil.copytree(GOLDEN / "glm4_moe", tmp_path / "glm")
    file = tmp_path / "glm" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    found = load_model(write_gguf(tmp_path / "glm", tmp_path / "model.gguf"))
    assert found.config == loaded("glm4_moe").config


def test_a_file_that_does_not_say_what_logits_become_says_it_by_its_biases(tmp_path):
    for case, family in (("deepseek_v3", "deepseek_v3"), ("deepseek_v2", "deepseek_v2")):
        name = tmp_path / f"{case}.gguf"
        file = write_gguf(GOLDEN / case, name, deepseek2__expert_gating_func=0)
        assert load_model(file).config.family == family


def test_numbers_and_words_are_split_as_deepseek_has_it():
    """The sequence of its own tokenizer.json: digits by three, then Chinese and Japanese."""
    text = "x = 12345 + foo.bar(\n  'it’s')  // 中文かな9"
    pieces = [text]
    for pattern in pre_tokens._SPLITS["deepseek-v3"].pattern:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        pieces = [own for piece in pieces for own, _ in cut.pre_tokenize_str(piece)]
    assert pieces == [
        "x", " =", " ", "123", "45", " +", " foo", ".bar", "(\n", " ", " '", "it", "’", "s", "')",
        " ", " //", " ", "中文かな", "9",
    ]  # fmt: skip


def test_a_correction_bias_may_have_lost_its_axis_of_1(tmp_path):
    shutil.copytree(GOLDEN / "ernie_moe", tmp_path / "ernie")
    file = tmp_path / "ernie" / "model.safetensors"
    held = load_file(file)
    end = "e_score_correction_bias"
    save_file({k: v[0] if k.endswith(end) else v for k, v in held.items()}, file)
    found = load_model(write_gguf(tmp_path / "ernie", tmp_path / "model.gguf"))
    jax.tree.map(np.testing.assert_array_equal, found, loaded("ernie_moe"))


@pytest.mark.parametrize("of_2024", [False, True])
def test_what_makes_keys_and_values_of_latents_is_unpacked(of_2024, tmp_path):
    own = tiny_model(
        family="deepseek_v3", tie_embeddings=False, num_kv_heads=1, head_dim=40, rotary_dim=8,
        query_scale=40**-0.5, latent=Latent(32, 32, 16, 32),
        experts=Experts(3, 2, 32, scores="sigmoid", correction_bias=True, shared_size=32),
    )  # fmt: skip
    save_model(own, tmp_path, dtype="float32")
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0", of_2024=of_2024)
    model = load_model(file)
    assert isinstance(model.layers[0].query_up, PackedWeight)
    held = {each.name: each for each in gguf.GGUFReader(file).tensors}

    def stands_for(name):
        return gguf.quants.dequantize(held[name].data, held[name].tensor_type)

    if of_2024:
        parts = stands_for("blk.1.attn_kv_b.weight").reshape(4, -1, 32)
        key, value = parts[:, :32].swapaxes(1, 2), parts[:, 32:]
    else:
        key, value = stands_for("blk.1.attn_k_b.weight"), stands_for("blk.1.attn_v_b.weight")
    np.testing.assert_array_equal(model.layers[1].latent_key, key)
    np.testing.assert_array_equal(model.layers[1].latent_value, value)
    assert np.isfinite(logits_after(model, [[3, 1, 4]])).all()
    held_here = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert held_bytes(find(file), "float32") == held_here


@pytest.mark.parametrize(
    ("case", "metadata", "sentence"),
    [
        ("dots1", {"dots1__expert_gating_func": 1}, r"gating_func is 1; 2 \(sigmoid\) is"),
        ("glm4_moe", {"glm4moe__nextn_predict_layers": 4_000_000_000}, "000; there are 3 blocks"),
        ("deepseek_v2", {"deepseek2__attention__kv_lora_rank": 0}, "not say kv_lora_rank of its"),
        ("deepseek_v2", {"deepseek2__attention__key_length_mla": [1, 2]}, "mla is "),
        ("deepseek_v2", {"deepseek2__rope__dimension_count": 14}, "count is 14; keys have 14"),
    ],
)
def test_mixtures_that_are_not_supported_are_refused(case, metadata, sentence, tmp_path):
    file = write_gguf(GOLDEN / case, tmp_path / "model.gguf", **metadata)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(file)


MIXED = {
    "qwen2_moe": {"experts": Experts(5, 2, 32, norm_topk=False, shared_size=64, shared_gate=True),
                  "biases": ("query", "key", "value")},
    "qwen3_moe": {"experts": Experts(5, 2, 32, norm_topk=True), "head_norms": "head"},
}  # fmt: skip
"""Whose folders may have layers without experts, which files cannot say."""


@pytest.mark.parametrize("family", MIXED)
def test_mixtures_are_those_of_their_folders(family, tmp_path):
    own = varied_model(family=family, hidden_size=64, **MIXED[family])
    save_model(own, tmp_path, dtype="float32")
    read = load_model(write_gguf(tmp_path, tmp_path / "model.gguf"))
    jax.tree.map(np.testing.assert_array_equal, read, replace(own, config=read.config))
    assert read.config == dataclasses.replace(load_model(tmp_path).config)


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "Q4_K", "Q5_K", "Q5_0", "IQ4_NL", "Q6_K", "BF16"]
)
def test_experts_stay_packed_where_that_is_exact(kind, tmp_path):
    """They are what the package gguf reads, and are streamed as they are."""
    own = varied_model(family="qwen3_moe", hidden_size=256, **(MIXED["qwen3_moe"]))
    save_model(own, tmp_path, dtype="float32")
    file = write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    model = load_model(file, dtype="float32")
    held = {each.name: each for each in gguf.GGUFReader(file).tensors}
    for name, leaf in (("gate", model.layers[0].expert_gate), ("up", model.layers[0].expert_up)):
        stored = held[f"blk.0.ffn_{name}_exps.weight"]
        assert stored.tensor_type.name == kind
        assert isinstance(leaf, PackedWeight) == (kind != "BF16")
        numbers = leaf
        if isinstance(leaf, PackedWeight):
            assert quantized_as(model) is not None
            each = [leaf.of_rows(lambda part, at=at: part[at]) for at in range(5)]
            numbers = np.stack([matrix.unpacked() for matrix in each])
        wanted = gguf.quants.dequantize(stored.data, stored.tensor_type)
        np.testing.assert_array_equal(np.asarray(numbers), wanted)
    streamed = load_offloaded(find(file), memory_bytes=64 << 20, dtype="float32")
    prompts = [[3, 1, 4], [1, 5]]
    np.testing.assert_array_equal(logits_after(model, prompts), logits_after(streamed, prompts))


def test_factors_of_llama_3_are_its_stretch(tmp_path):
    """They are a tensor in a file, and four numbers in a folder."""
    model = tiny_model(head_dim=16, max_positions=512)
    stretch = Stretch("llama3", 8.0, 64, 1.0, 4.0)
    model = replace(model, config=dataclasses.replace(model.config, rope_stretch=stretch))
    save_model(model, tmp_path / "folder", dtype="float32")
    found = load_model(write_gguf(tmp_path / "folder", tmp_path / "model.gguf"))
    assert found.config.max_positions == 512
    tokens = np.random.default_rng(0).integers(0, 40, (1, 300))
    expected, made = (plain_pass(each, tokens)[0] for each in (model, found))
    np.testing.assert_allclose(made, expected, atol=2e-5)


TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
"""Those that the package gguf writes; of the others blocks are drawn."""


@pytest.mark.parametrize("kind", [*TYPES, *DRAWN])
def test_every_type_stands_for_what_llama_cpp_reads(kind, tmp_path):
    """Packed where that is exact, to the bit; else rounded to the dtype that is asked for."""
    outputs, inputs = 6, 512
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    if kind in DRAWN:
        raw = drawn_blocks(kind, outputs, inputs)
        writer.add_tensor("a", raw, raw_dtype=Type[kind])
        expected = gguf.quants.dequantize(raw, Type[kind])
    else:
        values = np.random.default_rng(1).standard_normal((outputs, inputs)).astype(np.float32)
        add_tensor(writer, "a", values, kind)
        raw = gguf.quants.quantize(values, Type[kind])
        expected = gguf.quants.dequantize(raw, Type[kind])
    finish(writer)
    ((name, _, tensor),) = quantized.read(tensors(Files(file)), [])
    assert name == "a"
    assert isinstance(tensor, PackedWeight) == (kind not in ("F32", "F16", "BF16"))
    if isinstance(tensor, PackedWeight):
        form, held = blocks.form_of(header_of(file).tensors["a"])
        taken = tensor.nbytes - (0 if tensor.table is None else tensor.table.nbytes)
        assert taken == blocks.bytes_packed(form, math.prod(held)), "as is planned"
        tensor = dequantized(jax.tree.map(jnp.asarray, tensor))
    np.testing.assert_array_equal(np.asarray(tensor, np.float32), expected)


@pytest.fixture(scope="module")
def model():
    """A tiny LLaMA of which every matrix has whole blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
    return tiny_model(**sizes, head_dim=16, vocab_size=len(BYTES) + 2, tie_embeddings=True)


@pytest.fixture
def file(model, tmp_path):
    """The same as a file, in 4 bits with offsets, with a tokenizer and a chat template."""
    save_model(model, tmp_path / "folder", dtype="float32")
    return write_gguf(tmp_path / "folder", tmp_path / "tiny.gguf", "Q4_1", **TOKENIZER)


BYTES = list(ByteLevel.alphabet())
TOKENIZER = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "qwen2",
    "tokenizer__ggml__tokens": [*sorted(BYTES), "ab", "<|end|>"],
    "tokenizer__ggml__token_type": [1] * (len(BYTES) + 1) + [3],
    "tokenizer__ggml__merges": ["a b"],
    "tokenizer__chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}<|end|>",
}


def test_what_maps_exactly_stays_packed(file):
    found, tokenizer = load(file, activations="float")
    form = "int4, a scale and an offset for each 32 inputs"
    assert quantized_as(found) == f"{form}; embedding in {form}"
    assert found.config.eos_ids == (0, len(BYTES) + 1), "<|end|> ends a text too"
    tokens = np.array([tokenizer("cab abc").input_ids])
    full = jax.tree.map(
        lambda leaf: dequantized(leaf) if isinstance(leaf, PackedWeight) else leaf,
        found, is_leaf=lambda leaf: isinstance(leaf, PackedWeight),
    )  # fmt: skip
    expected, made = (plain_pass(each, tokens)[0] for each in (full, found))
    np.testing.assert_allclose(made, expected, atol=1e-5 * np.abs(expected).max())


def test_a_message_of_gpt_oss_may_end_before_the_turn(tmp_path):
    own = varied_model(family="qwen3_moe", vocab_size=260, **MIXED["qwen3_moe"])
    save_model(own, tmp_path, dtype="float32")
    more = ["<|end|>", "<|return|>", "<|call|>"]
    tokens = {
        "tokenizer__ggml__tokens": [*sorted(BYTES), "ab", *more],
        "tokenizer__ggml__token_type": [1] * (len(BYTES) + 1) + [3] * 3,
    }
    file = write_gguf(tmp_path, tmp_path / "model.gguf", **TOKENIZER | tokens)
    found = load_model(file).config.eos_ids
    assert set(found) == {*own.config.eos_ids, len(BYTES) + 2, len(BYTES) + 3}


def test_a_file_is_a_model_wherever_one_is_named(file, capsys):
    named = "--model", str(file)
    assert (
        main(["generate", "ab", *named, "--method", "lookup", "--max-new-tokens", "4", "--json"])
        == 0
    )
    assert main(["info", *named, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["tensor_types"] == {"Q4_1": "15 packed", "F32": "5"}
    assert facts["weights_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(load(file)[0]))
    assert main(["check-pair", str(file), str(file), "--json"]) == 0
    assert main(["shard", str(file), str(file.parent / "out")]) == 2
    assert "quantized" in capsys.readouterr().err


@pytest.mark.parametrize(("activations", "said"), [("int8", "8 bits"), ("bfloat16", "bfloat16")])
def test_rounded_activations_are_a_choice(file, activations, said, capsys, monkeypatch):
    form = "int4, a scale and an offset for each 32 inputs"
    asked = "--activations", activations
    command = ["generate", "ab", "--method", "none", "--max-new-tokens", "2", "--json", "--model"]
    assert main([*command, str(file), *asked]) == 0
    said = f"{form}, activations in {said}"
    assert f"{said}; embedding in {said}" in capsys.readouterr().out
    for more, sentence in (
        ([str(file.parent / "folder"), *asked], "integers of 8 or 4 bits, and this model has none"),
        ([str(file), "--activations", "int4"], "'int4'; there are float, bfloat16, int8"),
        ([str(file), *asked, "--offload", "disk"], "for models that are in memory, not offloaded"),
    ):
        assert main([*command, *more]) == 2
        assert sentence in capsys.readouterr().err
    monkeypatch.setattr("specjax.models.quantized.platform", lambda: "gpu")
    with pytest.raises(ValueError, match=f"{activations} are computed on a CPU, and this is gpu"):
        load(file, activations=activations)


@pytest.mark.parametrize("multiplies", [True, False])
def test_by_default_activations_are_what_the_processor_multiplies(file, multiplies, monkeypatch):
    monkeypatch.setattr("specjax.models.quantized.multiplies_bfloat16", lambda: multiplies)
    taken = "bfloat16" if multiplies else "float"
    assert activations_of(load(file)[0]) == taken
    assert activations_of(load_pair(str(file)).target) == taken


def test_layers_of_a_file_can_stay_on_the_disk(file, monkeypatch):
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)
    config, _ = memory.read_config(file)
    shared = memory.division(find(file), config, np.dtype("float32"), 10**9)
    model = load_offloaded(find(file), memory_bytes=shared.outer + 1)
    whole = load_model(file)
    assert shared.total == sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    source = model.source
    assert isinstance(source, DiskLayers)
    with source.in_pass():
        for number, layer in enumerate(whole.layers):
            jax.tree.map(np.testing.assert_array_equal, source.take(number), layer)
    source.close()


def test_a_model_in_several_files_is_named_by_the_first(file, tmp_path):
    reader = gguf.GGUFReader(file)
    parts = [tmp_path / f"big-{n:05}-of-00002.gguf" for n in (1, 2)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        if not number:
            for field in reader.fields.values():
                if field.name.startswith(("llama.", "tokenizer.")):
                    sub = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
    made, whole = load_model(parts[0]), load_model(file)
    jax.tree.map(np.testing.assert_array_equal, made, whole)
    with pytest.raises(CheckpointError, match=r"is one of 2 files; name the first, .*-00001-of-0"):
        load_model(parts[1])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"-00002-of-00002.gguf is missing; .* 2 files"):
        load_model(parts[0])


def test_names_of_files_on_a_hub(monkeypatch, file):
    asked = []

    class Hub:
        @staticmethod
        def hf_hub_download(repository, name, revision):
            asked.append((repository, name, revision))
            return str(file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert find("org/name:Q/a-00001-of-00002.gguf") == Files(file)
    assert find("org/name@main:a.gguf") == Files(file)
    assert asked == [
        ("org/name", "Q/a-00001-of-00002.gguf", None),
        ("org/name", "Q/a-00002-of-00002.gguf", None),
        ("org/name", "a.gguf", "main"),
    ]
    assert find("folder/model.gguf") == Files(Path("folder/model.gguf"))


def test_what_is_no_model_is_one_sentence(file, tmp_path, monkeypatch):
    wrong = {
        "llama.attention.clamp_kqv is 8.0, which": {"llama__attention__clamp_kqv": 8.0},
        "architecture 'mamba' is not supported; llama, .*deepseek2 are": {"arch": "mamba"},
        "its tokenizer is 't5'; gpt2 and llama are": {"tokenizer__ggml__model": "t5"},
        "its pre-tokenizer is 'x', which is not": {"tokenizer__ggml__pre": "x"},
        r"llama.logit_scale is \[1, 2\], which": {"llama__logit_scale": [1, 2]},
        "rope.scaling.factor is -4.0; it must": {"llama__rope__scaling__factor": -4.0},
    }
    for sentence, change in wrong.items():
        arch = change.pop("arch", None)
        other = write_gguf(tmp_path / "folder", tmp_path / "other.gguf", **TOKENIZER | change)
        if arch:
            held = other.read_bytes().replace(
                b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"
            )
            other.write_bytes(held)
        with pytest.raises(CheckpointError, match=sentence):
            load(other)
    with pytest.raises(CheckpointError, match=r"there is no file .*missing\.gguf"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match=r"is a GGUF file; name a model's folder"):
        quantize_folder(Files(file), tmp_path / "out", 8)
    shutil.copy(file, tmp_path / "folder" / "a.gguf")
    (tmp_path / "folder" / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no config.json, .*; of its GGUF files name .*a\.gguf"
    ):
        load(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "gguf", None)
    blocks._forms.cache_clear()
    with pytest.raises(CheckpointError, match=r"install it, or specjax\[gguf\]"):
        load_model(file)


@pytest.mark.parametrize(
    ("name", "shape", "offset", "sentence"),
    [
        ("a\nb", (4,), 0, r"has a tensor of the name 'a\\nb'"),
        ("a", (4, 0), 0, r"a in .* has the shape \(0, 4\)"),
        ("a", (2**30, 2**30), 0, "a in .* has the shape"),
        ("rope_freqs.weight", (2**32,), 0, "rope_freqs.weight has 4,294,967,296 numbers"),
        ("rope_freqs.weight", (4,), 2**64 - 64, "rope_freqs.weight has 4 numbers"),
    ],
)
def test_tensors_that_cannot_be_are_one_sentence(name, shape, offset, sentence, tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def place(name, shape, offset):
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        return text(name) + axes + struct.pack("<IQ", 0, offset)

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    file = tmp_path / "model.gguf"
    file.write_bytes(head + place("token_embd.weight", (8, 4), 0) + place(name, shape, offset))
    with pytest.raises(CheckpointError, match=sentence):
        load_model(file)


def test_pieces_that_would_be_cut_without_end_are_refused(tmp_path):
    file = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a" * n for n in range(1, 900)])
    writer.add_token_scores([0.0] * 899)
    finish(writer)
    with pytest.raises(CheckpointError, match=r"899 tokens have 404,550 characters; .* 32 each"):
        tokenizer_of(file)


def test_white_space_after_the_marks_of_phi_3_is_left_out(tmp_path):
    file = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, "phi3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "▁", "a", "<0x0A>", "<|user|>"])
    writer.add_token_scores([0.0] * 6)
    writer.add_token_types([2, 3, 1, 1, 6, 3])
    writer.add_add_bos_token(False)
    writer.add_unk_token_id(0)
    finish(writer)
    found = tokenizer_of(file)
    assert found("<|user|>\na").input_ids == [5, 2, 3]
    assert found("<s>\n").input_ids == [1, 2, 4]


def test_damaged_files_are_refused_or_read(file, tmp_path):
    """Cut off anywhere, and with any byte of the header changed: one sentence, or a model."""
    held, drawn = file.read_bytes(), np.random.default_rng(0)
    first = header_of(file).tensors["token_embd.weight"].start
    other = tmp_path / "damaged.gguf"
    ends = {*drawn.integers(0, len(held), 40).tolist(), 0, 3, 4, 8, 24, first, len(held) - 1}
    for end in sorted(ends):
        other.write_bytes(held[:end])
        with pytest.raises(CheckpointError):
            load_model(other)
    refused = 0
    for at in drawn.integers(0, first, 150).tolist():
        changed = bytearray(held)
        changed[at] = drawn.integers(0, 256)
        if drawn.random() < 0.3:
            changed[at : at + 8] = b"\xff" * 8
        other.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            load(other)
            refused -= 1
        refused += 1
    assert refused > 30


def odd_lines(count=300):
    """Lines of all sorts: scripts, signs, digits, white space, special tokens."""
    drawn = np.random.default_rng(0)
    pieces = ["Hello", "don't", "I'LL", "2024", "3.14", "foo_bar", " ", "  ", "   ", "\n", "\r\n",
              "\t", "x=1;", "naïve", "日本語", "русский", "한국어", "😀", "👩‍👧", "e\u0301",
              "½²Ⅷ", "ﬁ", "\u00a0", "\u3000", "\u200b", "<|end|>", "</s>", "▁", "C++", "1,000",
              "\x01", "ab", "'s", "(x)", "...", "अ"]  # fmt: skip
    return ["".join(drawn.choice(pieces, drawn.integers(1, 15))) for _ in range(count)]


def test_byte_level_tokens_are_those_of_the_folder(tmp_path):
    folder = tokenizer_of(BUNDLED / "target")
    folder.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # GPT-2's
    state = json.loads(folder.backend_tokenizer.to_str())
    tokens = folder.convert_ids_to_tokens(list(range(len(folder))))
    end = str(folder.eos_token)
    file = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    special = {each["content"] for each in state["added_tokens"]}
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(end))
    finish(writer)
    found = tokenizer_of(file)
    assert vocabulary_of(file) == found.get_vocab() == folder.get_vocab()
    assert found.eos_token == end
    for line in [*odd_lines(), *special, f"a{end}b"]:
        ids = folder(line).input_ids
        assert found(line).input_ids == ids, line
        assert found.decode(ids) == folder.decode(ids)


def test_names_of_pre_tokenizers_split_as_their_models_do(tmp_path):
    """By hand, of what llama.cpp's source says of each name."""
    split = {
        "gpt-2": ["I", "'ll", "Ġpay", "Ġ2024", "Ġ", "Ġ", "Ġ1", "Ċ"],
        "smollm": ["I", "'ll", "Ġpay", "Ġ", "2", "0", "2", "4", "ĠĠĠ", "1", "Ċ"],
        "llama-bpe": ["I", "'ll", "Ġpay", "Ġ", "202", "4", "ĠĠ", "Ġ", "1", "Ċ"],
        "qwen2": ["I", "'ll", "Ġpay", "Ġ", "2", "0", "2", "4", "ĠĠ", "Ġ", "1", "Ċ"],
    }
    split["gpt-2"][4:6] = ["ĠĠ"]
    for name, expected in split.items():
        file = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        for key, value in (TOKENIZER | {"tokenizer__ggml__pre": name}).items():
            add(writer, key.replace("__", "."), value)
        finish(writer)
        steps = tokenizer_of(file).backend_tokenizer.pre_tokenizer
        assert [piece for piece, _ in steps.pre_tokenize_str("I'll pay 2024   1\n")] == expected


def test_pieces_with_scores_are_merged_as_sentencepiece_does(tmp_path):
    """A tokenizer in the form of LLaMA 2's `tokenizer.json`, and the same as scores."""
    words = ["▁t", "he", "▁the", "in", "▁a", "er", "on", "▁▁", "▁▁▁▁", "▁C", "20", "日本"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = list(dict.fromkeys("▁theinaro C20日本abxyz.'"))
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words, *[c for c in letters if c != " "]]
    pairs = "▁ t,h e,▁t he,i n,▁ a,e r,o n,▁ ▁,▁▁ ▁▁,▁ C,2 0,日 本"
    merges = [(one, other) for one, other in (pair.split() for pair in pairs.split(","))]
    tokens = list(dict.fromkeys(tokens))
    own = Tokenizer(
        BPE({token: at for at, token in enumerate(tokens)}, merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True)
    )  # fmt: skip
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.add_special_tokens(["<unk>", "<s>", "</s>"])
    file = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    for name, number in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    finish(writer)
    found = tokenizer_of(file)
    assert vocabulary_of(file) == found.get_vocab()
    for line in odd_lines():
        ids = own.encode(line, add_special_tokens=False).ids
        assert found(line).input_ids == [1, *ids], line
        assert str(found.decode(ids)).replace(" ", "") == line.replace(" ", "").replace("▁", "")
