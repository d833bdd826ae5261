"""The tiny recipe from corpus to exported pool, and what a run must do when it is broken off.

The whole run took 62 s of processor time with compilation, of which 5 s were training
(2026-11-21, 2-core Zen 5 CPU, jax 0.10.2).
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoint import load_model, tokenizer_of
from specjax.decode import generate
from specjax.draft import ExpansionDrafter
from specjax.model import initialize
from train import run
from train.collect import load_collected
from train.config import load_recipe
from train.heldout import following, view
from train.loop import Log, finished, fit, steps_done
from train.pretrain import Batches, corpus_loss
from train.work import Work

CONFIG = str(Path(__file__).parent.parent / "configs" / "boost" / "tiny.py")
RECIPE = load_recipe(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished run of the tiny recipe."""
    made = tmp_path_factory.mktemp("run")
    assert run.main([CONFIG, "--folder", str(made)]) == 0
    return made


@pytest.fixture
def work(folder) -> Work:
    return Work(RECIPE, folder, Log(folder / "log.jsonl"))


def leaves_equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def test_exported_pool_is_lossless_for_the_exported_target(folder):
    target = load_model(folder / "export" / "target")
    drafts = [load_model(folder / "export" / "drafts" / str(n)) for n in range(3)]
    prompts = [[1, 2, 3, 40], [50, 60, 7]]
    key = jax.random.key(0)
    plain = generate(key, target, None, prompts, max_new_tokens=24, stop_at_eos=False)
    pool = ExpansionDrafter.of(drafts, (1, 1))
    tree = generate(key, target, pool, prompts, max_new_tokens=24, stop_at_eos=False)
    np.testing.assert_array_equal(tree.tokens, plain.tokens)
    assert (tree.steps < plain.steps).all()


def test_exported_weights_are_the_trained_ones_rounded(folder, work):
    for name, trained in (("target", work.trained_target), ("drafts/2", work.drafts[2])):
        exported = load_model(folder / "export" / name, "bfloat16")
        assert leaves_equal(exported, jax.tree.map(lambda w: w.astype("bfloat16"), trained))


def test_collection_uses_the_exported_weights(folder, work):
    assert leaves_equal(work.target, load_model(folder / "export" / "target"))


@pytest.mark.parametrize("name", ["target", "drafts/0"])
def test_exported_tokenizer_is_the_trained_one(folder, work, name):
    text = "def f(x):\n\treturn 'é'  # λ\n"
    found = tokenizer_of(folder / "export" / name)
    assert found(text).input_ids == work.corpus[0].encode(text).ids
    assert found.decode(found(text).input_ids) == text
    assert found.eos_token_id == 0


def test_greedy_rows_hold_the_targets_most_likely_tokens(folder, work):
    rows = load_collected("collect", folder / "collected", RECIPE.collect)
    greedy = rows.temperature == 0
    agree = following(rows) == view(work.target, rows).top[..., 0]
    assert agree[greedy].mean() > 0.99  # rounding may turn a near tie
    assert agree[~greedy].mean() < 0.9
    assert set(rows.temperature) == set(np.float32(RECIPE.collect.temperatures))


def test_report_says_what_was_made(folder):
    report = json.loads((folder / "report.json").read_text())
    target = report["target"]
    assert target["parameters"] == RECIPE.target.num_parameters
    rounded = target["exported_heldout_bits_per_byte"]
    assert rounded == pytest.approx(target["heldout_bits_per_byte"], rel=0.01)
    assert len(report["drafts"]) == 3
    assert len(report["marked"]) == 2
    assert {"pretrain", "collect", "label", "warm"} <= report["stage_seconds"].keys()
    assert report["machine"]["versions"]["jax"]


def test_the_pool_is_worth_more_than_its_best_member(folder):
    *_, last = json.loads((folder / "report.json").read_text())["drafts"]
    assert last["pool_agreement"] >= last["agreement"]
    assert last["pool_tokens_per_step"] >= last["tokens_per_step"]
    assert last["top2"] <= last["top3"] <= last["top4"] <= last["top5"]


def test_a_finished_run_is_left_as_it_is(folder, work):
    before = work.drafts
    assert run.main([CONFIG, "--folder", str(folder), "--stages", "boost,warm,pretrain"]) == 0
    again = Work(RECIPE, folder, Log(folder / "log.jsonl")).drafts
    assert all(leaves_equal(a, b) for a, b in zip(again, before, strict=True))


def warm_up(folder: Path, work: Work, stop_at: int | None = None):
    """The warm-up of the tiny recipe in `folder`, broken off at step `stop_at`."""
    batches = Batches(RECIPE.warm, work.streams, RECIPE.corpus.test_share)

    def batch(step: int) -> np.ndarray:
        if step == stop_at:
            raise KeyboardInterrupt
        return batches.at(step)

    first = initialize(jax.random.key(RECIPE.warm.seed), RECIPE.draft)
    loss = corpus_loss(RECIPE.warm.dtype)
    return fit("warm", folder, first, RECIPE.warm, batch, loss, lambda _: {}, work.log)


def test_a_resumed_training_gives_the_same_bits(tmp_path, folder, work):
    with pytest.raises(KeyboardInterrupt):
        warm_up(tmp_path / "broken", work, stop_at=RECIPE.warm.save_every + 4)
    assert steps_done(tmp_path / "broken") == RECIPE.warm.save_every
    first = initialize(jax.random.key(0), RECIPE.draft)
    with pytest.raises(ValueError, match="15 of 30 steps; run the stage 'warm' first"):
        finished("warm", tmp_path / "broken", first, RECIPE.warm)
    assert leaves_equal(warm_up(tmp_path / "broken", work), work.warm)


def test_a_resumed_collection_and_labelling_give_the_same_bits(tmp_path, folder):
    again = tmp_path / "again"
    shutil.copytree(folder, again, ignore=shutil.ignore_patterns("warm", "drafts", "export"))
    for lost in ("collected/00001.npz", "labels/collected/00002.npz", "labels/corpus/00000.npz"):
        (again / lost).unlink()
    assert run.main([CONFIG, "--folder", str(again), "--stages", "collect,label"]) == 0
    for file in again.glob("**/*.npz"):
        made, kept = np.load(file), np.load(folder / file.relative_to(again))
        assert all(np.array_equal(made[name], kept[name]) for name in kept.files)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stages", "bost"], "there is no stage 'bost'"),
        (["--stages", "boost"], "run the stage 'collect' first"),
        (["--stages", "label"], "run the stage 'collect' first"),
        (["--stages", "export"], "holds 0 of 60 steps; run the stage 'pretrain' first"),
        (["boost.windw=3"], "for example boost.window=..."),
        (["boost.window=x"], "boost.window is 'x'; it must be of type int."),
        (["target.num_heads=3"], "num_heads (3) is not a multiple"),
    ],
)
def test_a_wrong_input_gets_one_sentence(tmp_path, capsys, arguments, sentence):
    assert run.main([CONFIG, *arguments, "--folder", str(tmp_path)]) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("train.run: ")
    assert sentence in printed


def test_a_missing_configuration_gets_one_sentence(tmp_path, capsys):
    assert run.main(["configs/none.py", "--folder", str(tmp_path)]) == 2
    assert "there is no configuration file 'configs/none.py'." in capsys.readouterr().err


def test_results_made_with_other_settings_are_refused(folder, capsys):
    stages = ["--folder", str(folder), "--stages", "boost"]
    assert run.main([CONFIG, "boost.window=3", *stages]) == 2
    assert "was made with other settings" in capsys.readouterr().err
