"""What `specjax info` and `check-pair` say, and drafts whose tables are padded otherwise."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import memory, vocabulary
from specjax.__main__ import main
from specjax.checkpoint import load_model, save_model, tokenizer_of
from specjax.decode import generate
from specjax.draft import ExpansionDrafter
from specjax.folder import Files
from specjax.model import initialize, unembed
from specjax.pair import load_pair
from specjax.pytree import replace
from specjax.request import prepare
from specjax.sampling import Sampling
from tests.folders import VOCABULARY, pair_folder


@pytest.fixture
def folders(tmp_path):
    """A target, a draft as it is, one with a padded table, and one with other tokens."""
    model = load_model(pair_folder() / "target")
    tokenizer = tokenizer_of(pair_folder() / "target")
    save_model(model, tmp_path / "target", tokenizer, dtype="float32")
    save_model(model, tmp_path / "same", tokenizer, dtype="float32")
    table = jnp.pad(model.embedding, ((0, 16), (0, 0)), constant_values=9.0)
    config = dataclasses.replace(model.config, vocab_size=VOCABULARY + 16)
    padded = replace(model, embedding=table, config=config)
    save_model(padded, tmp_path / "padded", tokenizer, dtype="float32")
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    told = json.loads(file.read_text())
    vocab = told["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[5:7]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(told))
    return tmp_path


def checked(capsys, *names):
    code = main(["check-pair", *map(str, names), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_check_pair_tells_padding_from_other_tokens(folders, capsys):
    drafts = [folders / name for name in ("same", "padded", "other")]
    code, report = checked(capsys, folders / "target", *drafts)
    assert code == 1
    assert not report["works"]
    assert [one["works"] for one in report["drafts"]] == [True, True, False]
    said = [one["findings"][0]["said"] for one in report["drafts"]]
    assert said[0] == f"the same {VOCABULARY} tokens"
    assert said[1] == f"the same {VOCABULARY} tokens; tables padded to 272 and 288"
    assert said[2].startswith(f"2 of {VOCABULARY} tokens differ, such as 5 is ")
    code, report = checked(capsys, folders / "target", folders / "same", folders / "padded")
    assert (code, report["works"]) == (0, True)


def test_check_pair_reads_no_weights(folders, capsys):
    for name in ("target", "same"):
        (folders / name / "model.safetensors").unlink()
    assert main(["check-pair", str(folders / "target"), str(folders / "same")]) == 0
    printed = capsys.readouterr().out
    assert "  can draft for the model" in printed
    for what in ("vocabulary", "end tokens", "context", "memory"):
        assert f"  {what}: " in printed


def test_check_pair_names_tables_too_small_and_contexts_too_short(folders, capsys):
    changed = {"small": {"vocab_size": 250}, "short": {"max_position_embeddings": 9}}
    for name, changes in changed.items():
        shutil.copytree(folders / "same", folders / name)
        file = folders / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    _, report = checked(capsys, folders / "target", folders / "small", folders / "short")
    small, short = report["drafts"]
    assert not small["works"]
    assert small["findings"][0]["said"] == "272 tokens, and tables of 272 and 250"
    assert short["works"]
    assert "9 positions for 256: past them" in short["findings"][2]["said"]


@pytest.mark.parametrize("name", ["same", "padded"])
def test_padded_tables_draft_as_well_as_others(folders, name):
    pair = load_pair(str(folders / "target"), str(folders / name), "float32")
    drafter = ExpansionDrafter.of(pair.drafts, (1, 1, 1))
    prompts = [[3, 4, 5], [9, 9]]
    asked = {"max_new_tokens": 12, "stop_at_eos": False}
    plain = generate(jax.random.key(0), pair.target, None, prompts, **asked)
    made = generate(jax.random.key(0), pair.target, drafter, prompts, **asked)
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert made.steps.tolist() == [3, 3]  # the draft is the target: all is accepted


def test_tokens_that_only_pad_are_never_likely():
    model = initialize(jax.random.key(0), load_model(pair_folder() / "target").config)
    draft = vocabulary.fitted(model, 300, 270)
    logits = unembed(draft, jnp.full((model.config.hidden_size, 1), -50.0))[:, 0]
    assert logits.shape == (300,)
    np.testing.assert_array_equal(logits[:270], unembed(model, jnp.full((32, 1), -50.0))[:270, 0])
    assert float(jax.nn.softmax(logits)[270:].sum()) == 0
    assert vocabulary.fitted(model, 260, 250).embedding.shape[0] == 260


def test_a_draft_of_other_tokens_is_refused_when_it_is_loaded(folders):
    words = r"other\) has another vocabulary than the model: 2 of 272"
    with pytest.raises(ValueError, match=words):
        load_pair(str(folders / "target"), str(folders / "other"))


def test_a_tokenizer_that_cannot_be_read_is_named(folders, capsys):
    (folders / "other" / "tokenizer.json").write_text("{")
    assert main(["check-pair", str(folders / "target"), str(folders / "other")]) == 2
    assert "other/tokenizer.json cannot be read" in capsys.readouterr().err


def test_special_tokens_count():
    contents = vocabulary.contents_of(Files(pair_folder() / "target"))
    assert len(contents) == vocabulary.known(contents) == VOCABULARY
    assert vocabulary.contents_of(Files(pair_folder())) is None


def test_info_tells_the_plan_and_refuses_before_it_loads(capsys, monkeypatch):
    model = str(pair_folder() / "target")
    monkeypatch.setattr(memory, "available", lambda mesh: 1 << 20)
    assert main(["info", "--model", model, "--batch", "512", "--json"]) == 2
    printed = capsys.readouterr()
    assert "which has 1.0 MiB to spare" in printed.err
    assert main(["info", "--model", model, "--batch", "512"]) == 2
    printed = capsys.readouterr().out
    assert "caches: 16.0 MiB of each device" in printed
    assert "available: 1.0 MiB of each device" in printed
    assert "method" not in printed


def test_generate_refuses_with_numbers_what_cannot_fit(monkeypatch):
    target = load_model(pair_folder() / "target")
    monkeypatch.setattr(memory, "available", lambda mesh: 1 << 20)
    words = r"64 texts of 128 tokens in trees of 1 nodes would take .* MiB .* 1.0 MiB to spare"
    with pytest.raises(ValueError, match=words):
        prepare(jax.random.key(0), target, None, [[1, 2]] * 64, 20, Sampling(), "auto", True)


def test_a_plan_is_near_what_the_compiler_takes():
    """Temporaries and results of the whole program, at sizes where arrays outweigh the rest."""
    from specjax.decode import run

    target = load_model(pair_folder() / "target")
    prompts = [[1, 2, 3]] * 16
    request = prepare(jax.random.key(0), target, None, prompts, 200, Sampling(), "auto", True)
    compiled = run.lower(target, None, **request._asdict()).compile().memory_analysis()
    taken = compiled.temp_size_in_bytes + compiled.output_size_in_bytes
    rows, width = request.prompt.shape
    planned = memory.plan(memory.load_of(target), [], rows, width, request.slots, 1).beside_weights
    assert 0.5 < planned / taken < 2
