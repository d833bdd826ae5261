"""Weights in 8 and 4 bits: what they stand for, files of every layout, models that hold them."""

import json
import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing

from pallas_kernels.cpu import unable_here
from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints import gptq_rounding, huggingface
from specjax.checkpoints.calibration import Calibration, rows_of
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.huggingface import save_model, save_sharded
from specjax.checkpoints.load import load, load_drafts, load_model
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.offload.memory import division, dtype_of_layers
from specjax.checkpoints.quantizing import _in_8_bits, quantize_folder
from specjax.checkpoints.tokenizers import fitted
from specjax.draft import ExpansionDrafter
from specjax.measure.timing import weight_bytes
from specjax.methods import records
from specjax.models import families, layers, memory, quantized
from specjax.models.config import MATRICES, PACKABLE, Experts, Latent
from specjax.models.inflate import inflate
from specjax.models.placement import Placement
from specjax.models.quantized import (
    PackedWeight,
    in_dtype,
    packed,
    packed_weight,
    quantized_as,
)
from specjax.models.transformer import final_norm, unembed
from specjax.parallel.mesh import make_mesh
from tests.cases import slow_but
from tests.conftest import tiny_config, tiny_model
from tests.damaged import damaged, dequantized, outcome
from tests.pairs import forward, generate, varied_model
from tests.quantized_files import LAYOUTS, rewrite
from tests.test_parity import GOLDEN

GROUPED = {"bits": 4, "group": 16}
GROUPS_OF_32 = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny model."""
    save_model(tiny_model(tie_embeddings=False), tmp_path / "model", dtype="float32")
    return tmp_path / "model"


def logits(model):
    tokens = jnp.arange(3, 17).reshape(2, 7)
    return forward(model, tokens, jnp.broadcast_to(jnp.arange(7), (2, 7)), None, None)[0]


def unpacked(model):
    """The model with the matrices that its packed ones stand for."""
    return jax.tree.map(
        lambda leaf: dequantized(leaf) if isinstance(leaf, PackedWeight) else leaf,
        model,
        is_leaf=lambda leaf: isinstance(leaf, PackedWeight),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_what_it_stands_for(layout, folder):
    expected = rewrite(folder, layout)
    model = load_model(folder)
    names = dict(zip(("query", "key", "value", "output", "gate", "up", "down"),
                     ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                      "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
                     strict=True))  # fmt: skip
    for number, layer in enumerate(model.layers):
        for leaf, name in names.items():
            found = getattr(layer, leaf)
            assert isinstance(found, PackedWeight)
            wanted = expected[f"model.layers.{number}.{name}.weight"]
            np.testing.assert_array_equal(dequantized(found), wanted)
    np.testing.assert_allclose(logits(model), logits(unpacked(model)), rtol=2e-4, atol=2e-4)
    assert quantized_as(model).split(",")[0] in ("int4", "int8", "fp8", "nf4")
    held = huggingface.held_bytes(find(folder), "float32")
    # Tables and names weigh as much as such tiny matrices.
    assert held == pytest.approx(memory.load_of(model).weights, rel=0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_layout_are_read_as_what_they_stand_for(layout, tmp_path):
    """But for inputs in an order of their own, which each expert would have another of."""
    own = tiny_model(
        family="qwen3_moe", head_norms="head", tie_embeddings=False, experts=Experts(3, 2, 32)
    )
    save_model(own, tmp_path, dtype="float32")
    expected = rewrite(tmp_path, layout)
    if "shuffled" in layout:
        with pytest.raises(CheckpointError, match=r"order of its own \(desc_act\), which is not"):
            load_model(tmp_path)
        return
    model = load_model(tmp_path)
    for number, layer in enumerate(model.layers):
        for name in ("gate", "up", "down"):
            found = getattr(layer, f"expert_{name}")
            assert isinstance(found, PackedWeight)
            for expert in range(3):
                matrix = found.of_rows(lambda part, at=expert: part[at])
                wanted = expected[f"model.layers.{number}.mlp.experts.{expert}.{name}_proj.weight"]
                np.testing.assert_array_equal(dequantized(matrix), wanted)
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    "layout",
    slow_but([each for each in LAYOUTS if "shuffled" not in each], "blocks of fp8"),
)
@pytest.mark.parametrize("rank", [None, 32])
def test_latents_of_a_layout_are_read_as_what_they_stand_for(layout, rank, tmp_path):
    """Rotated rows are the last of a head's; what makes keys and values is not packed here."""
    own = tiny_model(
        family="deepseek_v3", tie_embeddings=False, num_kv_heads=1, head_dim=40, rotary_dim=8,
        query_scale=24**-0.5, latent=Latent(32, 16, 16, rank),
        experts=Experts(3, 2, 32, scores="sigmoid", correction_bias=True, shared_size=32),
    )  # fmt: skip
    save_model(own, tmp_path, dtype="float32")
    plain = load_file(tmp_path / "model.safetensors")
    config = (tmp_path / "config.json").read_text()
    names = ("_proj.weight", "_mqa.weight")
    expected = rewrite(tmp_path, layout, ends=names)
    model = load_model(tmp_path)
    queries = model.layers[0].query if rank is None else model.layers[0].query_up
    assert isinstance(queries, PackedWeight)
    save_file(plain | expected, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    np.testing.assert_allclose(logits(model), logits(load_model(tmp_path)), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("layout", "name", "about"),
    [
        ("gptq 4 bits", "quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False}),
        ("gptq_v2 4 bits shuffled", "quantize_config.json", {"bits": 4, "format": "gptq_v2"}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}),
        ("awq", "quantize_config.json", {"w_bit": 4, "zero_point": True}),
    ],
)
def test_files_that_older_libraries_wrote_describe_a_folder_too(layout, name, about, folder):
    expected = rewrite(folder, layout)
    described = json.loads((folder / "config.json").read_text())
    del described["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    (folder / name).write_text(json.dumps(about))
    wanted = expected["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(dequantized(load_model(folder).layers[0].up), wanted)
    (folder / name).write_text(json.dumps(about | {"quant_method": "exl2"}))
    with pytest.raises(CheckpointError, match=f"{name}: quantization_config: quantization 'exl2'"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(described | {"quantization": {"bits": 4}}))
    with pytest.raises(
        CheckpointError, match="it has no 'quant_method'; it is MLX's, which is not"
    ):
        load_model(folder)


@pytest.mark.parametrize(("named", "stored"), [("gptq", 7), ("gptq", 8), ("gptq_v2", 8)])
def test_symmetric_zeros_are_the_middle_whatever_the_version_is_called(named, stored, folder):
    expected = rewrite(folder, "gptq_v2 4 bits shuffled")
    file, config = folder / "model.safetensors", folder / "config.json"
    held = load_file(file)
    word = np.asarray([0x11111111 * stored], np.uint32).view(np.int32)
    held = {name: np.broadcast_to(word, each.shape) if name.endswith("qzeros") else each
            for name, each in held.items()}  # fmt: skip
    save_file({name: np.ascontiguousarray(each) for name, each in held.items()}, file)
    about = json.loads(config.read_text())
    about["quantization_config"] |= {"checkpoint_format": named, "sym": True}
    config.write_text(json.dumps(about))
    for number, layer in enumerate(load_model(folder).layers):
        assert layer.query.zero is not None
        np.testing.assert_array_equal(layer.query.zero, 8)
        shape = expected[f"model.layers.{number}.self_attn.q_proj.weight"].shape
        assert dequantized(layer.query).shape == shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_blocks_of_rows_are_the_same(layout, dtype, folder, monkeypatch):
    rewrite(folder, layout)
    weight = load_model(folder, dtype=dtype).layers[0].up
    x = jnp.sin(jnp.arange(weight.shape[1] * 5.0)).reshape(-1, 5)
    scale = jnp.ones_like(weight.scale)
    alike = weight.changed(scale=scale) if weight.is_scaled_after else weight
    after = weight.scale.astype(jnp.float32) if weight.is_scaled_after else 1.0
    whole = dequantized(alike).astype(dtype)

    def made(linear, weight):
        """A product, the second of two at once, and a gradient, by one program."""

        def run(weight, x):
            several = jax.vmap(linear, (None, 0))(weight, jnp.stack([x, 2 * x]))
            return linear(weight, x), several[1], jax.grad(lambda x: linear(weight, x).sum())(x)

        return jax.jit(run)(weight, x)

    wanted = made(lambda whole, x: after * layers.linear(whole, x), whole)
    for size in (1, 4 * weight.shape[1] * 3, 1 << 20):  # a row, a few, all of them
        monkeypatch.setattr(layers, "_UNPACKED_BYTES", size)
        for found, expected in zip(made(layers.linear, weight), wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_blocks_are_equal_and_small():
    def blocks(outputs, inputs):
        weight = packed(np.ones((outputs, inputs), np.float32), 8)
        return layers._blocks_of(weight, np.dtype("float32"))

    assert blocks(64, 64) == 2
    assert blocks(8192, 1024) == 4
    assert blocks(8190, 1024) == 5
    assert blocks(8191, 1024) == 1  # a prime number


@pytest.mark.parametrize("group", [3, 5])
def test_groups_of_odd_size_are_unpacked_whole(group):
    matrix = np.random.default_rng(0).standard_normal((16, 30)).astype(np.float32)
    weight = jax.tree.map(jnp.asarray, packed(matrix, 4, group))
    assert weight.strides == 1
    x = jnp.ones((30, 2))
    np.testing.assert_allclose(layers.linear(weight, x), weight.unpacked() @ x, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 24, None])
def test_packed_weights_are_as_near_as_their_steps(bits, group):
    matrix = np.random.default_rng(bits).standard_normal((16, 48)).astype(np.float32)
    matrix[3] = 0
    matrix[5, 7] = 40.0
    weight = packed(matrix, bits, group)
    assert weight.shape == matrix.shape
    assert weight.group == (group or 48)
    assert weight.values.nbytes == matrix.size * bits // 8
    found = np.asarray(dequantized(jax.tree.map(jnp.asarray, weight)))
    most = np.abs(matrix).reshape(16, -1, group or 48).max(axis=2)
    step = np.repeat(most / ((1 << (bits - 1)) - 1), group or 48, axis=1)
    error = np.abs(found - matrix)
    assert (error <= 2.8 * step + 1e-6).all()  # of four bits large weights may be cut
    usual = np.arange(16) != 5
    assert np.sqrt((error[usual] ** 2).mean()) < (0.13 if bits == 4 else 0.011)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, None), (8, 24)])
def test_scales_are_those_of_the_least_error(bits, group, monkeypatch):
    """Against a slow twin that tries every scale by itself, and least squares of the best."""
    monkeypatch.setattr(quantized, "_AT_A_TIME", 7 * 48)  # several blocks, the last one padded
    drawn = np.random.default_rng(bits)
    matrix = drawn.standard_t(3, (20, 48)).astype(np.float32)
    importance = drawn.uniform(0.1, 2, 48).astype(np.float32)
    numbers, most = matrix.reshape(20, -1, group or 48), 1 << (bits - 1)
    weights = importance.reshape(-1, group or 48)
    weight = packed(matrix, bits, group, importance)
    found = np.asarray(dequantized(jax.tree.map(jnp.asarray, weight)), np.float64)
    error = (weights * np.square(found.reshape(numbers.shape) - numbers)).sum(axis=2)

    def codes(scale):
        return np.clip(np.rint(numbers / scale), -most, most - 1)

    def errors(scale):
        return (weights * np.square(codes(scale) * scale - numbers)).sum(axis=2)

    whole = np.abs(numbers).max(axis=2, keepdims=True) / (most - 1)
    shares = 1 - 0.025 * np.arange(13) if bits == 4 else np.ones(1)
    tried = [
        (np.float32(share) * whole).astype(jnp.bfloat16).astype(np.float64)
        for share in (*shares, *(-shares if bits == 4 else ()))
    ]
    old = np.min([errors(scale) for scale in tried[: len(shares)]], axis=0)
    best = np.argmin([errors(scale) for scale in tried], axis=0)
    scale = np.take_along_axis(np.stack(tried), best[None, :, :, None], axis=0)[0]
    wanted = errors(scale)
    for _ in range(2 if bits == 4 else 0):
        made = codes(scale)
        sums = (weights * made * numbers).sum(axis=2), (weights * made**2).sum(axis=2)
        fitted = (sums[0] / sums[1])[:, :, None].astype(jnp.bfloat16).astype(np.float64)
        better = (errors(fitted) < wanted)[:, :, None]
        scale = np.where(better, fitted, scale)
        wanted = errors(scale)
    assert (error <= old * (1 + 1e-4)).all()  # of positive scales alone, none fitted
    np.testing.assert_allclose(error, wanted, rtol=1e-3)
    assert bits == 8 or error.sum() < 0.93 * old.sum()


def test_a_large_weight_may_be_cut_where_the_others_gain():
    matrix = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    most = np.abs(matrix).max(axis=1, keepdims=True)
    plain = np.clip(np.rint(matrix / (most / 7)), -8, 7) * (most / 7)
    found = np.asarray(dequantized(jax.tree.map(jnp.asarray, packed(matrix, 4))))
    assert ((found - matrix) ** 2).mean() < 0.95 * ((plain - matrix) ** 2).mean()


def test_groups_must_divide_the_inputs():
    with pytest.raises(ValueError, match="groups of 32 inputs in 4 bits do not divide 48 inputs"):
        packed(np.ones((4, 48), np.float32), 4, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_the_matrix_in_its_dtype(dtype):
    drawn = np.random.default_rng(1)
    weight = jax.tree.map(jnp.asarray, packed(drawn.standard_normal((24, 32)), 4, 16))
    x = jnp.asarray(drawn.standard_normal((32, 5)), jnp.float32)
    found = layers.linear(in_dtype(weight, dtype), x)
    wanted = layers.linear(dequantized(weight).astype(dtype), x)
    assert found.dtype == jnp.float32
    # The same products in another order: inputs of even places are added up first.
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(found, wanted)
    order = jnp.asarray(drawn.permutation(32), jnp.int32)
    found = layers.linear(replace(in_dtype(weight, dtype), order=order), x[jnp.argsort(order)])
    near(found, wanted)


@pytest.mark.parametrize("form", ["int", "fp8"])
def test_codes_of_8_bits_are_exact_in_16(form):
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    scale = jnp.asarray([[0.5], [3.0]])
    weight = PackedWeight(codes, scale, bits=8, form=form)
    numbers = np.arange(-128.0, 128) if form == "int" else np.arange(256, dtype=np.uint8).view(
        jnp.float8_e4m3fn
    ).astype(float)  # fmt: skip
    for dtype in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        found = weight.columns_from(0, dtype)
        assert found.dtype == dtype
        found = np.asarray(found, float)
        np.testing.assert_array_equal(found, numbers.reshape(2, 128))


def grouped(bits, kind, offset, shape=(24, 96)):
    """A matrix as GGUF's blocks have it: groups of 32, and offsets in some; and its numbers."""
    drawn = np.random.default_rng(bits)
    outputs, inputs = shape
    codes = drawn.integers(0, 1 << bits, shape).astype(np.uint8)
    scale = drawn.uniform(0.01, 0.1, (outputs, inputs // 32)).astype(kind)
    made: dict[str, np.ndarray] = {}
    wide = np.repeat(scale.astype(np.float32), 32, axis=1)
    numbers = wide * (codes.astype(np.float32) - (1 << (bits - 1)))
    if offset:
        made["offset"] = drawn.normal(size=scale.shape).astype(kind)
        numbers = wide * codes + np.repeat(made["offset"].astype(np.float32), 32, axis=1)
    return packed_weight(quantized.bytes_of(codes, bits), scale, bits, **made), numbers


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", ["float16", jnp.bfloat16, "float32"])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_groups_stand_for_their_numbers(bits, kind, offset, monkeypatch):
    """Alone, in products of all rows and of some, as a table, on a mesh, and in a stack."""
    held, numbers = grouped(bits, kind, offset)
    said = "a scale and an offset" if offset else "a scale"
    assert (held.shape, held.group) == ((24, 96), 32)
    assert held.name == f"int{bits}, {said} for each 32 inputs"
    weight = jax.tree.map(jnp.asarray, held)
    np.testing.assert_array_equal(weight.unpacked(), numbers)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(96, 5)), jnp.float32)
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for size in (layers._UNPACKED_BYTES, 4 * 96 * 6):
        monkeypatch.setattr(layers, "_UNPACKED_BYTES", size)
        for linear in (layers.linear, layers._packed_linear):
            near(linear(weight, x, np.dtype("float32")), numbers @ np.asarray(x))
    tokens = jnp.asarray([[3, 0, 23]])
    np.testing.assert_array_equal(layers.embed(weight, tokens), numbers[[3, 0, 23]].T)
    several = jax.tree.map(lambda part: jnp.stack([part, part]), weight)
    np.testing.assert_array_equal(jax.tree.map(lambda part: part[1], several).unpacked(), numbers)
    mesh = make_mesh()
    placed = Placement(tiny_config(), mesh, "model").put_packed("down", held, "bfloat16")
    assert placed.nbytes == held.nbytes
    assert {part.sharding.mesh for part in placed.rows.values()} == {mesh}
    np.testing.assert_array_equal(placed.unpacked(), numbers)


@pytest.mark.skipif(unable_here(1) is not None, reason="products are XLA's")
def test_matrices_in_bfloat16_stay_so_and_multiply_float32(tmp_path):
    """Half the bytes, and the same numbers."""
    save_model(varied_model(), tmp_path / "folder", dtype="bfloat16")
    whole, kept = (load_model(tmp_path / "folder", keeps_bfloat16=keeps) for keeps in (False, True))
    assert (quantized.quantized_as(kept), kept.embedding.dtype) == (None, jnp.float32)
    assert weight_bytes(kept) < 0.6 * weight_bytes(whole)
    assert huggingface.held_bytes(find(tmp_path / "folder"), "float32", True) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(kept)
    )
    jax.tree.map(np.testing.assert_array_equal, quantized.widened(kept), whole)
    for found, wanted in zip(
        *(jax.tree.leaves(in_dtype(each, jnp.bfloat16)) for each in (kept, whole)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 70)), jnp.float32)
    for columns in (1, 70):
        found = layers.linear(kept.layers[0].gate, x[:, :columns])
        wanted = layers.linear(whole.layers[0].gate, x[:, :columns])
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(generate(kept, None).tokens, generate(whole, None).tokens)
    save_model(kept, tmp_path / "again", dtype="bfloat16")
    written, first = (
        load_file(tmp_path / name / "model.safetensors") for name in ("again", "folder")
    )
    jax.tree.map(np.testing.assert_array_equal, written, first)
    inflate(kept, 2 * whole.config.num_parameters)
    assert (
        load_model(tmp_path / "folder", dtype="bfloat16", keeps_bfloat16=True).embedding.ndim == 2
    )


@pytest.mark.parametrize(("method", "table"), [("none", None), ("chain", 8)])
def test_a_quantized_target_and_draft_give_the_targets_own_text(method, table, tmp_path):
    save_model(varied_model(), tmp_path / "target", dtype="float32")
    quantize_folder(find(tmp_path / "target"), tmp_path / "small", 8, table=table)
    quantize_folder(find(tmp_path / "target"), tmp_path / "smaller", **GROUPED, table=table)
    target = load_model(tmp_path / "small")
    drafts = load_drafts(tmp_path / "smaller")
    drafter = None if method == "none" else ExpansionDrafter.of(drafts, (1, 1, 1))
    found = generate(target, drafter)
    plain = generate(unpacked(target), None)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert drafter is None or np.mean(found.tokens_per_step) > 1


@pytest.mark.parametrize("family", ["neox", "phi3_short", "qwen3"])
def test_matrices_of_every_packing_are_quantized_and_read(family, tmp_path):
    done = quantize_folder(find(GOLDEN / family), tmp_path / "made", 8)
    assert done.matrices > 0
    assert done.size < done.before
    before, after = load_model(GOLDEN / family), load_model(tmp_path / "made")
    for old, new in zip(before.layers, after.layers, strict=True):
        for name in ("query", "key", "value", "output", "up", "down"):
            matrix = np.asarray(getattr(old, name))
            wanted = dequantized(jax.tree.map(jnp.asarray, packed(matrix, 8)))
            np.testing.assert_array_equal(dequantized(getattr(new, name)), wanted)


def test_what_is_written_names_itself_and_takes_the_tokenizer_along(tmp_path, capsys):
    save_model(tiny_model(), tmp_path / "model", dtype="bfloat16")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model" / "notes.bin").write_text("left")
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/made", "--group", "16"]) == 0
    assert "14 matrices in int4, a scale for each 16 inputs" in capsys.readouterr().out
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    about = config["quantization_config"]
    assert about["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "group_size": 16, "strategy": "group",
    }  # fmt: skip
    assert {each.name for each in (tmp_path / "made").iterdir()} == {
        "config.json", "tokenizer_config.json", "model-00001.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    names = load_file(tmp_path / "made" / "model-00001.safetensors")
    assert names["model.layers.0.mlp.up_proj.weight_packed"].dtype == np.int32
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize_folder(find(tmp_path / "made"), tmp_path / "again")


def test_what_is_left_in_8_bits_is_named_and_read(tmp_path, capsys):
    save_model(tiny_model(**GROUPS_OF_32), tmp_path / "model", dtype="float32")
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/made"]) == 0
    said = capsys.readouterr().out
    assert "In 8 bits, as 4 cost these most: 1 down_proj, 2 k_proj, 2 q_proj, 2 v_proj." in said
    whole, model = load_model(tmp_path / "model"), load_model(tmp_path / "made")
    outside = whole.embedding.nbytes + whole.final_norm.nbytes
    table = whole.embedding.size + 2 * len(whole.embedding) + whole.final_norm.nbytes
    assert said.endswith(
        f"Embeddings and final norms stay as they are: {memory.readable(outside)}. With --table 8 "
        f"they take {memory.readable(table)}.\n"
    )
    plain = sum(each.nbytes for each in jax.tree.leaves(whole)) // 2
    assert f"(plain bfloat16 is {memory.readable(plain)})" in said
    for at, (old, new) in enumerate(zip(whole.layers, model.layers, strict=True)):
        for name in ("query", "key", "value", "output", "gate", "up", "down"):
            bits = 8 if name in ("query", "key", "value") or (name, at) == ("down", 0) else 4
            wanted = packed(np.asarray(getattr(old, name)), bits, None if bits == 8 else 32)
            found = getattr(new, name)
            assert found.bits == bits
            np.testing.assert_array_equal(found.values, wanted.values)
            np.testing.assert_array_equal(found.scale, wanted.scale.astype(np.float32))
    about = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    for name in (key.removesuffix(".weight") for key, _ in huggingface.named_tensors(whole)):
        groups = [
            each["weights"]["num_bits"]
            for each in about["config_groups"].values()
            if any(re.match(target.removeprefix("re:"), name) for target in each["targets"])
        ]
        layer = "_proj" in name
        eight = any(part in name for part in ("q_proj", "k_proj", "v_proj", "0.mlp.down_proj"))
        assert groups == ([8] if eight else [4] if layer else [])


def test_what_is_left_in_8_bits_is_no_more_than_its_share():
    config, family = huggingface.read_config(GOLDEN / "qwen3")
    matrices = {
        each.name: each for each in families.stored(family, config)
        if each.layer is not None and each.leaves[0] in MATRICES
    }  # fmt: skip
    whole = sum(np.prod(each.shape) for each in matrices.values())
    for share in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0):
        eight = _in_8_bits(matrices.values(), share)
        assert sum(np.prod(matrices[name].shape) for name in eight) <= share * whole
        for layer in range(config.num_layers):  # together, as servers multiply them as one
            fused = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            held = {f"model.layers.{layer}.{name}.weight" in eight for name in fused}
            assert len(held) == 1
    assert eight == matrices.keys()


@pytest.mark.parametrize("group", [16, None])
def test_calibrated_products_are_nearer_than_rounded_ones(group):
    drawn = np.random.default_rng(3)
    matrix = drawn.standard_normal((24, 48)).astype(np.float32)
    mixing = drawn.standard_normal((48, 48)) * drawn.uniform(0.05, 2, 48)
    mixing[:, 5] = 0  # an input that is never there
    seen, unseen = (drawn.standard_normal((400, 48)) @ mixing for _ in range(2))
    weight = gptq_rounding.calibrated(matrix, (seen.T @ seen).astype(np.float32), 4, group)
    assert (weight.bits, weight.group) == (4, group or 48)

    def off(weight):
        own = np.asarray(dequantized(jax.tree.map(jnp.asarray, weight)))
        return np.square(unseen @ (own - matrix).T).sum()

    assert off(weight) < 0.6 * off(packed(matrix, 4, group))
    nothing = gptq_rounding.calibrated(matrix, np.zeros((48, 48), np.float32), 4, group)
    np.testing.assert_array_equal(nothing.values, packed(matrix, 4, group).values)


def test_inputs_for_calibration_are_those_of_the_layers_before():
    model = varied_model()
    tokens = np.arange(3, 35, dtype=np.int32).reshape(4, 8)
    texts = Calibration(replace(model, layers=()), tokens)
    grams = [(texts.grams(each, at), texts.advance(each, at))[0]
             for at, each in enumerate(model.layers)]  # fmt: skip
    places = jnp.broadcast_to(jnp.arange(8), (4, 8))
    for at, layer in enumerate(model.layers):
        for name in ("query", "output", "up", "down"):
            width = getattr(layer, name).shape[1]
            assert grams[at][name].shape == (width, width)
    # The first layer's inputs are the normed embeddings, and the columns that leave are the pass's.
    entering = layers.normed("rms", model.layers[0].attention_norm, None,
                             layers.embed(model.embedding, jnp.asarray(tokens)),
                             model.config.norm_eps)  # fmt: skip
    np.testing.assert_allclose(grams[0]["query"], entering @ entering.T, rtol=1e-4, atol=1e-5)
    left = unembed(model, final_norm(model, texts.columns)).T.reshape(4, 8, -1)
    wanted = forward(model, jnp.asarray(tokens), places, None, None)[0]
    np.testing.assert_allclose(left, wanted, rtol=1e-4, atol=1e-4)


def test_rows_for_calibration_begin_as_texts_do():
    texts = ["def f(x):\n    return x\n" * 20, "import os", "x = 3"]
    tokenizer = load(dtype="float32")[1]
    whole = [token for text in texts for token in tokenizer(text).input_ids]
    plain = rows_of(texts, tokenizer, 16)
    assert plain.shape == (4 * (len(whole) // 64), 16)
    assert whole[:16] in plain.tolist()
    first = tokenizer.eos_token
    tokenizer.bos_token = first
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.eos_token_id)]
    )
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    rows = rows_of(texts, tokenizer, 16)
    assert rows.shape[1] == 16
    assert (rows[:, 0] == tokenizer.bos_token_id).all()
    assert rows[0, 1:].tolist() == whole[:15]
    assert not (rows[:, 1:] == tokenizer.bos_token_id).any()


def test_texts_calibrate_a_model(tmp_path, capsys):
    pair = load(dtype="float32")[1]
    model = tiny_model(**GROUPS_OF_32 | {"vocab_size": len(pair), "max_positions": 64})
    save_model(model, tmp_path / "model", tokenizer=pair, dtype="float32")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"id": n, "prompt": f"def f{n}(x):\n    return x * {n}\n"})
                             + "\n" for n in range(20)))  # fmt: skip
    flags = ["--group", "32", "--calibration", str(texts)]
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/made", *flags]) == 0
    assert re.search(r"Calibrated with \d\d\d tokens\.", capsys.readouterr().out)
    found, by_itself = load_model(tmp_path / "made"), packed(np.asarray(model.layers[0].up), 4, 32)
    assert {weight.bits for weight in (found.layers[0].query, found.layers[1].down)} == {4}
    assert (np.asarray(found.layers[0].up.values) != by_itself.values).any()
    texts.write_text('{"id": "none", "prompt": ""}\n')
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/again", *flags]) == 2
    assert "the texts for calibration have no tokens" in capsys.readouterr().err
    flags = ["--calibration", "self"]
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/own", *flags]) == 0
    assert re.search(r"Calibrated with \d[\d,]+ tokens\.", capsys.readouterr().out)
    values = [load_model(tmp_path / name).layers[0].up.values for name in ("made", "own")]
    assert (np.asarray(values[0]) != np.asarray(values[1])).any()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bits", "3"], "--bits is 3; it must be 8 or 4"),
        (["--group", "0"], "--group is 0; it must be at least 1"),
        (["--group", "9"], "groups of 9 inputs in 4 bits do not divide"),
        (["--kept", "1.5"], "--kept is 1.5; it must be from 0 to 1"),
        (["--bits", "8", "--kept", "0.5"], "--kept and --calibration are for 4 bits"),
        (["--bits", "8", "--calibration", "self"], "--kept and --calibration are for 4 bits"),
        (["--table", "4"], "--table is 4; it must be 8"),
    ],
)
def test_what_cannot_be_quantized_is_said_and_leaves_nothing(flags, said, folder, capsys):
    assert main(["quantize", str(folder), f"{folder}-made", *flags]) == 2
    assert said in capsys.readouterr().err
    assert [each.name for each in folder.parent.iterdir()] == ["model"]


def test_weights_that_are_no_numbers_are_not_quantized(folder, tmp_path):
    file = folder / "model.safetensors"
    held = load_file(file)
    held["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(held, file)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight .* NaN or infinity"):
        quantize_folder(find(folder), tmp_path / "made", bits=8)
    assert not (tmp_path / "made").exists()


def test_a_folder_with_a_model_is_not_written_to(folder, capsys):
    assert main(["quantize", str(folder), str(folder), "--group", "16"]) == 2
    assert "config.json exists already; name another folder" in capsys.readouterr().err
    assert main(["quantize", str(GOLDEN / "gpt2"), f"{folder}-made"]) == 2
    assert "matrices of gpt2 models are stored [in, out]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"quant_method": "exl2"}, "quantization 'exl2' is not supported; compressed-tensors,"),
        ({"bits": 4}, "it has no 'quant_method'"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits are not supported; 4 and 8 are"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' are not"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
         "format 'marlin-24' is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {},
          "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask' is not"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "transform_config": {"config_groups": {"R4": {}}}}, "transform_config has rotations of"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"},
         "checkpoint_format is 'gptq', and format 'gptq_v2'"),
    ],
)  # fmt: skip
def test_kinds_that_are_not_supported_are_refused_by_name(about, said, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": about}))
    with pytest.raises(CheckpointError, match=said):
        load_model(folder)


@pytest.mark.parametrize(
    ("layout", "part", "value", "said"),
    [
        ("awq", "scales", None, "lacks .*scales"),
        ("gptq 4 bits", "scales", np.full((2, 32), np.nan, np.float16), "a scale is NaN"),
        ("gptq_v2 4 bits shuffled", "g_idx", np.zeros(32, np.int32), "groups of 0 to 32 inputs"),
        ("words of 4 bits", "weight_shape", np.asarray([32, 99]), "bits are not supported|do not"),
        ("words of 4 bits", "weight_scale", np.ones((32, 5), np.float16), r"scales \(32, 5\) do"),
        ("words of 4 bits", "weight_scale", np.ones((32, 0), np.float16), r"\(32, 0\); it must be"),
        ("words of 4 bits", "weight_shape", np.asarray([32, 0]), "it must be two numbers above 0"),
        ("words of 4 bits", "weight_packed", np.ones((32, 8), np.int32), "8 bits .*num_bits is 4"),
        ("words with zeros", "weight_zero_point", None, "symmetric is false, but there is no"),
        ("words shuffled", "weight_g_idx", None, "actorder is group, but there is no"),
        ("int8", "weight_scale", np.ones((0, 2), np.float32), r"\(0, 2\) are not of 32 rows"),
        ("int8", "weight_zero_point", np.ones((32, 1), np.int8), "symmetric is true, but there is"),
        ("nf4", "weight.absmax", np.ones((), np.float32), r"\(\); the others ask for \(64,\)"),
        ("nf4 nested", "weight.nested_absmax", None, "weight.absmax is uint8; it is uint8 with"),
        ("nf4", "weight.quant_map", np.ones(16, np.float32), "other numbers than nf4"),
        ("gptq 4 bits", "qzeros", np.ones((2, 4), np.int64), "is int64; .* int32 or uint32"),
        ("awq", "qzeros", np.ones((2, 4), np.float32), "is float32; .* int32 or uint32"),
        ("awq", "qweight", np.ones((32, 4), np.int64), "is int64; .* int32 or uint32"),
        ("gptq_v2 4 bits shuffled", "g_idx", None, "there is no g_idx, and desc_act is not false"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(layout, part, value, said, folder):
    rewrite(folder, layout)
    file, name = folder / "model.safetensors", f"model.layers.0.self_attn.q_proj.{part}"
    held = load_file(file)
    held.pop(name, None)
    save_file(held if value is None else held | {name: value}, file)
    with pytest.raises(CheckpointError, match=said):
        load_model(folder)


@pytest.mark.parametrize(
    "layout", ["gptq 4 bits", "awq", "words shuffled", "int8", "blocks of fp8", "nf4 nested"]
)
def test_a_damaged_folder_is_read_rightly_or_refused_in_a_sentence(layout, tmp_path):
    """Each value of the configuration and each tensor in turn; a third of the ways, by turns."""
    model = tiny_model(tie_embeddings=False, num_layers=1)
    save_model(model, tmp_path / "model", dtype="float32")
    refused = 0
    for number, (what, expected) in enumerate(damaged(tmp_path / "model", layout)):
        if number % 3 == 0:
            refused += outcome(tmp_path / "model", expected, what) is not None
    assert refused > 20


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("gptq 4 bits", {"group_size": 128}, "group_size is 128, and scales are of 16 inputs"),
        ("gptq 4 bits", {"group_size": -1}, "group_size is -1, and scales are of 16 inputs"),
        ("awq", {"group_size": 64}, "group_size is 64, and scales are of 16 inputs"),
        ("gptq_v2 4 bits shuffled", {"desc_act": False}, "desc_act is false, and g_idx has groups"),
        ("gptq 4 bits", {"sym": True}, "sym is true, and qzeros are not the middle"),
    ],
)
def test_a_configuration_that_contradicts_its_files_gets_a_line(
    layout, changes, said, folder, caplog
):
    expected = rewrite(folder, layout)
    path = folder / "config.json"
    about = json.loads(path.read_text())
    about["quantization_config"] |= changes
    path.write_text(json.dumps(about))
    assert outcome(folder, expected, said) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{said}" in line
    assert "(14 matrices)" in line


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("words of 4 bits", {"group_size": 128}, "scales are of 16 inputs; config_groups say 128"),
        (
            "words of 4 bits",
            {"symmetric": False},
            "symmetric is false, but there is no weight_zero",
        ),
        ("words of 4 bits", {"num_bits": 8}, "hold 4 bits a weight; num_bits is 8"),
        ("words with zeros", {"symmetric": True}, "symmetric is true, but there is a weight_zero"),
        ("int8", {"symmetric": False}, "symmetric is false, but there is no weight_zero_point"),
        ("fp8", {"type": "int"}, "the weights are fp8; config_groups say int"),
    ],
)
def test_a_configuration_that_would_mean_other_numbers_is_refused(layout, changes, said, folder):
    rewrite(folder, layout)
    path = folder / "config.json"
    about = json.loads(path.read_text())
    about["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=said):
        load_model(folder)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (LAYOUTS["awq"][1], ["config.json says that weights are quantized (awq); none of the"]),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}}, []),
    ],
)
def test_a_configuration_of_quantized_weights_that_are_full_gets_a_line(
    about, said, folder, caplog
):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": about}))
    load_model(folder)
    assert len(caplog.messages) == len(said)
    assert all(part in caplog.text for part in said)


def test_weights_of_8_bits_without_a_configuration_are_refused(folder):
    rewrite(folder, "fp8")
    path = folder / "config.json"
    about = json.loads(path.read_text())
    del about["quantization_config"]
    path.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn; weights must be|of a quantized"):
        load_model(folder)


def test_blocks_must_be_those_of_the_configuration(folder):
    rewrite(folder, "blocks of fp8")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = [8, 16]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"blocks of \[8, 16\] do not divide"):
        load_model(folder)


TABLES = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    "layout", ["gptq_v2 4 bits shuffled", "words with zeros", "int8", "blocks of fp8", "nf4"]
)
def test_tables_of_a_layout_are_looked_up_and_multiplied(layout, folder):
    expected = rewrite(folder, layout, ends=TABLES)
    model = load_model(folder)
    table, head = expected["model.embed_tokens.weight"], expected["lm_head.weight"]
    for count in (7, layers._FEW_TOKENS + 1):
        tokens = np.arange(count)[None] % len(table)
        found = layers.embed(model.embedding, jnp.asarray(tokens))
        np.testing.assert_array_equal(found, table[tokens[0]].T)
    x = jnp.sin(jnp.arange(3.0 * head.shape[1])).reshape(-1, 3)
    np.testing.assert_allclose(unembed(model, x), head @ x, rtol=1e-4, atol=1e-4)
    assert quantized_as(model).startswith("embedding and unembedding in ")


@pytest.mark.parametrize("tied", [True, False])
def test_tables_in_8_bits_are_written_read_and_named(tied, tmp_path, capsys):
    whole = tiny_model(tie_embeddings=tied, **GROUPS_OF_32)
    save_model(whole, tmp_path / "model", dtype="float32")
    assert main(["quantize", f"{tmp_path}/model", f"{tmp_path}/made", "--table", "8"]) == 0
    model = load_model(tmp_path / "made")
    tables = {"embed_tokens": (whole.embedding, model.embedding)}
    if not tied:
        tables["lm_head"] = whole.unembedding, model.unembedding
    for old, new in tables.values():
        wanted = jax.tree.map(jnp.asarray, packed(np.asarray(old), 8))
        np.testing.assert_array_equal(dequantized(new), dequantized(wanted))
    assert (model.unembedding is None) == tied
    np.testing.assert_allclose(logits(model), logits(unpacked(model)), rtol=1e-4, atol=1e-4)
    named = "embedding" if tied else "embedding and unembedding"
    row = "int8, a scale for each row"
    assert quantized_as(model).endswith(f" and {row}; {named} in {row}")
    outside = sum(new.nbytes for _, new in tables.values()) + model.final_norm.nbytes
    before = sum(old.nbytes for old, _ in tables.values()) + model.final_norm.nbytes
    assert capsys.readouterr().out.endswith(
        f"Embeddings in 8 bits, a scale for each row, and norms: {memory.readable(outside)} of "
        f"{memory.readable(before)}.\n"
    )
    about = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    *_, group = about["config_groups"].values()
    assert group["targets"] == [f"re:.*{name}$" for name in tables]
    assert group["weights"]["strategy"] == "channel"
    assert about["ignore"] == (["lm_head"] if tied else [])
    shared = division(find(tmp_path / "made"), model.config, np.dtype("float32"), 10**9)
    assert shared.outer == outside
    assert load_offloaded(find(tmp_path / "made")).quantization == quantized_as(model)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert weight_bytes(model) == held - (0 if tied else whole.embedding.size + 2 * 64)
    assert memory.load_of(model).weights == held
    assert records.setting(model, [], 1, False) != records.setting(whole, [], 1, False)
    assert np.asarray(fitted(model, 70, 64).embedding.unpacked())[64:].max() == 0


def test_one_table_of_a_tied_model_is_enough_and_two_must_be_equal(tmp_path):
    save_model(tiny_model(), tmp_path / "model", dtype="float32")
    file = tmp_path / "model" / "model.safetensors"
    held, (table, head) = load_file(file), ("model.embed_tokens.weight", "lm_head.weight")
    matrix = held.pop(table)
    made = []
    for names in ((table,), (head,), (table, head)):
        save_file(held | dict.fromkeys(names, matrix), file)
        out = tmp_path / f"made{len(made)}"
        quantize_folder(find(tmp_path / "model"), out, 8, table=8)
        made.append(load_model(out).embedding)
        np.testing.assert_array_equal(made[-1].values, made[0].values)
        shared = division(find(out), tiny_model().config, np.dtype("float32"), 10**9)
        assert shared.outer == made[0].nbytes + tiny_model().final_norm.nbytes
    packs = load_file(out / "model-00001.safetensors")
    assert not any(name.startswith("lm_head") for name in packs)
    again = {name.replace("model.embed_tokens", "lm_head"): each for name, each in packs.items()
             if "embed_tokens" in name}  # fmt: skip
    save_file(packs | again, out / "model.safetensors")
    np.testing.assert_array_equal(load_model(out).embedding.values, made[0].values)
    again["lm_head.weight_scale"] = 2 * again["lm_head.weight_scale"]
    save_file(packs | again, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"its lm_head.weight differs from its model.embed_"):
        load_model(out)


def test_the_last_norm_says_the_dtype_where_the_table_is_packed(tmp_path):
    folder = tmp_path / "model"
    save_model(tiny_model(), folder, dtype="bfloat16")
    rewrite(folder, "int8", ends="embed_tokens.weight")
    assert dtype_of_layers(find(folder), None) == jnp.bfloat16


def test_a_quantized_table_of_positions_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "opt", tmp_path / "opt")
    rewrite(tmp_path / "opt", "int8", ends="embed_positions.weight")
    with pytest.raises(CheckpointError, match=r"positions.weight .* only the embedding and the"):
        load_model(tmp_path / "opt")


def test_a_quantized_model_is_neither_written_nor_grown(folder, tmp_path):
    rewrite(folder, "awq")
    model = load_model(folder)
    changes = (
        lambda: save_model(model, tmp_path / "made"),
        lambda: save_sharded(model, tmp_path / "made"),
        lambda: inflate(model, 10**6),
    )
    for change in changes:
        with pytest.raises(ValueError, match=r"weights are quantized .int4, a scale for each 16"):
            change()
    assert not (tmp_path / "made").exists()


def test_every_family_says_whether_its_matrices_can_be(tmp_path):
    for case in sorted(each.name for each in GOLDEN.iterdir() if (each / "config.json").is_file()):
        config, family = huggingface.read_config(GOLDEN / case)
        every = list(families.stored(family, config))
        inputs = {each.shape[-1] for each in every if each.leaves[0] in PACKABLE}
        out = tmp_path / case
        if any(each.turned or len(each.shape) > 2 for each in every):
            with pytest.raises(CheckpointError, match="stored"):
                quantize_folder(find(GOLDEN / case), out, 8)
        elif any(each % 4 for each in inputs):
            with pytest.raises(ValueError, match="inputs do not fill words of 32 bits"):
                quantize_folder(find(GOLDEN / case), out, 8)
        else:
            quantize_folder(find(GOLDEN / case), out, 8)
            assert quantized_as(load_model(out)) == "int8, a scale for each row"
            shutil.rmtree(out)
