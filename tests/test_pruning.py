"""Drafts that know a part of their target's tokens: what they compute, and how files say which."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, process
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.huggingface import save_model, save_sharded
from specjax.checkpoints.load import load, load_draft, load_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.checkpoints.tokenizers import fitted
from specjax.draft import ExpansionDrafter
from specjax.models.placement import placement
from specjax.models.pruning import ids_of, pruned, rows_of
from specjax.models.transformer import Model, initialize
from tests.conftest import tiny_config, tiny_model
from tests.folders import pair_folder
from tests.pairs import forward

IDS = np.array([40, 3, 7, 63, 0, 12, 21, 5, 30])
OTHERS = np.setdiff1d(np.arange(64), IDS)


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    at = jnp.arange(len(tokens))[None]
    return np.asarray(forward(model, jnp.asarray([tokens]), at, None, None)[0][0])


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_known_tokens_are_the_whole_drafts_and_the_others_the_lowest(tied):
    whole = tiny_model(tie_embeddings=tied)
    found = logits(pruned(whole, IDS), [40, 7, 12])
    np.testing.assert_allclose(found[:, IDS], logits(whole, [40, 7, 12])[:, IDS], atol=1e-5)
    assert (found[:, OTHERS] == np.finfo(np.float32).min).all()
    q = process(jnp.asarray(found)[None], Sampling(temperature=1.5, top_p=0.99).rows(1))[0]
    assert (np.asarray(q)[:, OTHERS] == 0).all()
    np.testing.assert_allclose(np.asarray(q)[:, IDS].sum(axis=1), 1, rtol=1e-5)


def test_tokens_that_are_not_known_are_read_as_one():
    whole = tiny_model(tie_embeddings=False)
    assert 1 not in IDS
    table = whole.embedding.at[1].set(whole.embedding[OTHERS].mean(axis=0))
    wanted = logits(replace(whole, embedding=table), [40, 1, 1, 7])[:, IDS]
    for token in (1, 2, 62):
        found = logits(pruned(whole, IDS), [40, token, token, 7])
        np.testing.assert_allclose(found[:, IDS], wanted, atol=1e-4)


def test_a_fresh_draft_of_some_tokens_knows_the_first():
    config = tiny_config(draft_vocab_size=9)
    model = initialize(jax.random.key(0), config)
    assert model.embedding.shape == (10, 32)
    assert config.num_parameters == sum(w.size for w in jax.tree.leaves(model)) - 64
    assert np.asarray(model.row_of)[:12].tolist() == [*range(9), 9, 9, 9]


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([3, 64], "names tokens from 3 to 64; the vocabulary has 64"),
        ([-1, 3], "names tokens from -1 to 3"),
        ([3, 5, 3], "names 3 tokens, of which 2 differ"),
    ],
)
def test_tokens_are_those_of_the_vocabulary_each_once(ids, sentence):
    with pytest.raises(ValueError, match=sentence):
        rows_of(np.array(ids), 64)


def test_a_draft_that_knows_all_is_not_pruned():
    with pytest.raises(ValueError, match="all 64 tokens are known"):
        pruned(tiny_model(), np.arange(64))
    with pytest.raises(ValueError, match="draft_vocab_size is 64 and vocab_size 64"):
        tiny_config(draft_vocab_size=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("pruned")
    save_model(pruned(tiny_model(), IDS), there, dtype="float32")
    return there


def test_files_hold_the_map_as_offsets(folder):
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, len(IDS))
    held = load_file(folder / "model.safetensors")
    assert held["d2t"].dtype == np.int64
    assert (np.arange(len(IDS)) + held["d2t"]).tolist() == IDS.tolist()
    assert held["model.embed_tokens.weight"].shape == (len(IDS) + 1, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_gives_the_draft_back(folder, dtype):
    found = load_model(folder, dtype=dtype)
    assert found.config == pruned(tiny_model(), IDS).config
    assert found.row_of.dtype == np.int32
    assert ids_of(np.asarray(found.row_of), len(IDS)).tolist() == IDS.tolist()
    if dtype == "float32":
        own = logits(pruned(tiny_model(), IDS), [40, 1, 7])
        np.testing.assert_allclose(logits(found, [40, 1, 7]), own, atol=1e-5)


def changed(folder, there, **tensors):
    shutil.copytree(folder, there)
    held = {**load_file(there / "model.safetensors"), **tensors}
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(held, there / "model.safetensors", metadata={"format": "pt"})
    return there


def test_eagles_mask_of_known_tokens_changes_nothing(folder, tmp_path):
    there = changed(folder, tmp_path / "masked", t2d=np.isin(np.arange(64), IDS))
    assert (load_model(there).row_of == load_model(folder).row_of).all()


@pytest.mark.parametrize(
    ("offsets", "sentence"),
    [
        (None, "says draft_vocab_size 9 of vocab_size 64, and has no tensor d2t"),
        (np.zeros(8, np.int64), r"is int64 of shape \(8,\); draft_vocab_size asks for .* \(9,\)"),
        (np.zeros(9, np.float32), r"is float32 of shape \(9,\)"),
        (np.full(9, 60), "d2t in .* names tokens from 60 to 68; the vocabulary has 64"),
        (-np.arange(9), "names 9 tokens, of which 1 differ"),
    ],
)
def test_a_damaged_map_is_one_sentence(folder, tmp_path, offsets, sentence):
    there = changed(folder, tmp_path / "damaged", d2t=offsets)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(there)


@pytest.mark.parametrize("size", [True, 0, -3, 9.0, "9", 65])
def test_a_size_that_is_none_is_one_sentence(folder, tmp_path, size):
    shutil.copytree(folder, tmp_path / "sized")
    file = tmp_path / "sized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"draft_vocab_size": size}))
    with pytest.raises(CheckpointError, match="draft_vocab_size"):
        load_model(tmp_path / "sized")


def test_what_has_no_place_for_a_map_is_refused(folder, tmp_path):
    model = load_model(folder)
    with pytest.raises(CheckpointError, match="not written by shards: it knows 9 of 64 tokens"):
        save_sharded(model, tmp_path / "sharded")
    with pytest.raises(CheckpointError, match="is not offloaded: it knows 9 of 64 tokens"):
        load(folder, offload="disk")
    with pytest.raises(ValueError, match="knows 9 of 64 tokens is not split over mesh axis"):
        placement(model.config, Mesh(np.array(jax.devices() * 2), ("model",)))


def test_eight_bits_keep_the_map(folder, tmp_path):
    quantize_folder(Files(folder), tmp_path / "small", bits=8, table=8)
    found, own = load_draft(tmp_path / "small", dtype="float32"), load_model(folder)
    assert (found.row_of == own.row_of).all()
    wanted = logits(own, [40, 1, 7])[:, IDS]
    assert np.abs(logits(found, [40, 1, 7])[:, IDS] - wanted).max() < 0.05 * np.abs(wanted).max()


def test_a_longer_table_of_the_target_has_tokens_that_no_draft_knows(folder):
    own = load_model(folder)
    for size, known in ((80, 64), (60, 60)):
        found = fitted(own, size, known)
        made = logits(found, [40, 1, 7])
        held = IDS[known > IDS]
        assert made.shape == (3, size)
        np.testing.assert_allclose(made[:, held], logits(own, [40, 1, 7])[:, held], atol=1e-5)
        assert (np.delete(made, held, axis=1) == np.finfo(np.float32).min).all()


def test_a_draft_without_a_tokenizer_is_its_targets_if_it_says_the_targets_size(tmp_path):
    target = str(pair_folder() / "target")
    whole = load_model(target)
    ids = np.flatnonzero(np.arange(whole.config.vocab_size) % 3 > 0)
    save_model(pruned(whole, ids), tmp_path / "draft", dtype="float32")
    pair = load_pair(target, str(tmp_path / "draft"), dtype="float32")
    assert ExpansionDrafter.of(pair.drafts, (2, 1)).vocab_size == pair.target.config.vocab_size
    assert pair.drafts[0].embedding.shape[0] == len(ids) + 1
