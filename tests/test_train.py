"""The tiny recipe from corpus to exported pool, and what a run must do when it is broken off."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

import jax
import numpy as np
import pytest

from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.decoding.generate import generate
from specjax.draft import ExpansionDrafter
from specjax.measure import prompts
from specjax.models.transformer import initialize
from tests.conftest import QUICKLY
from train import run
from train.collect import load_collected
from train.config import load_recipe
from train.export import export
from train.heldout import view
from train.loop import Log, finished, fit, steps_done
from train.pretrain import Batches, corpus_loss
from train.work import Work

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | QUICKLY  # compiled as here, so that bits are equal
CONFIG = str(ROOT / "configs" / "boost" / "tiny.py")
RECIPE = load_recipe(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished run of the tiny recipe."""
    made = tmp_path_factory.mktemp("run")
    assert run.main([CONFIG, "--folder", str(made)]) == 0
    return made


@pytest.fixture
def work(folder) -> Work:
    return Work(RECIPE, folder, Log(folder / "log.jsonl"), folder / "export")


def leaves_equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.mark.slow
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
    for name, trained in (("target", work.trained_target), ("drafts/2", work.draft(2))):
        exported = load_model(folder / "export" / name, dtype="bfloat16")
        assert leaves_equal(exported, jax.tree.map(lambda w: w.astype("bfloat16"), trained))


def test_collection_uses_the_exported_weights(folder, work):
    assert leaves_equal(work.target, load_model(folder / "export" / "target"))


@pytest.mark.parametrize("name", ["target", "drafts/0"])
def test_exported_tokenizer_is_the_trained_one(folder, work, name):
    text = "def f(x):\n\treturn 'é'  # λ\n"
    found = tokenizer_of(folder / "export" / name)
    assert found(text).input_ids == work.tokenizer.encode(text).ids
    assert found.decode(found(text).input_ids) == text
    assert found.eos_token_id == 0


def test_greedy_rows_hold_the_targets_most_likely_tokens(work):
    rows = load_collected("collect", work.collected("collected"), RECIPE.collect)
    greedy = rows.temperature == 0
    agree = rows.following == view(work.target, rows).top[..., 0]
    assert agree[greedy][rows.alive[greedy]].mean() > 0.99  # rounding may turn a near tie
    assert agree[~greedy][rows.alive[~greedy]].mean() < 0.9
    assert set(rows.temperature) == set(np.float32(RECIPE.collect.temperatures))
    ends = np.take_along_axis(rows.following, rows.length[:, None] - 1, axis=1)[:, 0]
    assert ((ends == 0) == (rows.length < rows.steps))[rows.length < rows.steps].all()


def test_report_says_what_was_made(folder, work):
    report = json.loads((folder / "export" / "report.json").read_text())
    target = report["target"]
    assert target["parameters"] == RECIPE.target.num_parameters
    rounded = target["exported_heldout_bits_per_byte"]
    assert rounded == pytest.approx(target["heldout_bits_per_byte"], rel=0.01)
    assert [draft["where"] for draft in report["drafts"]] == [
        work.drafted(n).name for n in range(3)
    ]
    assert len(report["marked"]) == 2
    assert {"pretrain", "collect", "label", "warm 0", "draft 2"} <= report["stage_seconds"].keys()
    assert report["losses"].keys() >= {work.pretrained.name, work.drafted(2).name}
    assert report["machine"]["jax"]


def test_the_log_says_how_fast_training_was(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines[0]["matmul_float32"] > 0
    steps = [line for line in lines if line["stage"] in ("pretrain", "warm 0", "draft 1")]
    assert steps
    for line in steps:
        assert line["tokens_per_second"] > 0
        assert 0 < line["matmul_share"] < 2
        assert line["seconds_left"] >= 0
    assert [line["seconds_left"] for line in steps if line["step"] in (30, 60)][-1] == 0


def test_a_run_ends_with_the_tables_that_its_recipe_names(folder):
    found = json.loads((folder / "export" / "tables.json").read_text())
    assert {row["of"] for row in found["coverage"]} == {"draft 0", "draft 1", "draft 2", "union"}
    assert (folder / "export" / "tables.png").is_file()


def test_prompts_to_measure_on_come_with_the_pair(folder, work):
    for name in ("dev", "heldout"):
        listed = prompts.read(str(folder / "export" / f"{name}.jsonl"))
        text = "".join(d.text for d in work.documents if d.split == name and not d.is_test)
        assert len(listed) >= 32
        assert sum(prompt in text for _, prompt in listed) > 0.9 * len(listed)


def test_the_pool_is_worth_more_than_its_best_member(folder):
    members = json.loads((folder / "export" / "report.json").read_text())["drafts"]
    for figure in ("agreement", "tokens_per_step"):
        assert members[-1][f"pool_{figure}"] > max(member[figure] for member in members)


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When every file of a run was written, and what is in it; not of the log and the picture."""
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file() and file.name not in ("log.jsonl", "tables.png")
    }


def test_a_finished_run_is_left_as_it_is(folder):
    before = files_of(folder)
    assert {"export/pair.json", "export/report.json", "export/tables.json"} <= before.keys()
    assert run.main([CONFIG, "--folder", str(folder)]) == 0
    assert files_of(folder) == before


def warm_up(folder: Path, work: Work, stop_at: int | None = None):
    """The warm-up of the tiny recipe in `folder`, broken off at step `stop_at`."""
    batches = Batches(RECIPE.warm, work.streams, RECIPE.corpus.test_share)

    def batch(step: int) -> np.ndarray:
        if step == stop_at:
            raise KeyboardInterrupt
        return batches.at(step)

    first = initialize(jax.random.key(RECIPE.warm.seed), work.draft_config(0))
    loss = corpus_loss(RECIPE.warm.dtype)
    return fit("warm", folder, first, RECIPE.warm, batch, loss, lambda _: {}, work.log)


def test_a_resumed_training_gives_the_same_bits(tmp_path, work):
    with pytest.raises(KeyboardInterrupt):
        warm_up(tmp_path / "broken", work, stop_at=RECIPE.warm.save_every + 4)
    assert steps_done(tmp_path / "broken") == RECIPE.warm.save_every
    first = initialize(jax.random.key(0), work.draft_config(0))
    with pytest.raises(ValueError, match="15 of 30 steps; run the stage 'warm' first"):
        finished("warm", tmp_path / "broken", first, RECIPE.warm)
    assert leaves_equal(warm_up(tmp_path / "broken", work), work.warm(0))


def begun(folder: Path, work: Work) -> list[tuple[str, Path]]:
    """What appears in the middle of every stage, in the order of the stages."""
    there = dataclasses.replace(work, folder=folder)
    names = [
        ("pretrain", there.pretrained / "20"),
        ("collect", there.collected("collected") / "00000.npz"),
        ("label", there.collected_labels / "00000.npz"),
        ("trigrams", there.counted / "inputs.json"),
        ("warm", there.warmed(0) / "15"),
        ("draft 0", there.drafted(0) / "10"),
        ("draft 2", there.drafted(2) / "20"),
        ("export", folder / ".export.new" / "target" / "model.safetensors"),
        ("report", folder / "export" / "pair.json"),
        ("evaluate", folder / "export" / "report.json"),
    ]
    shutil.rmtree(folder)  # naming results makes their folders
    return names


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_with_the_same_bits(tmp_path, folder, work):
    there = tmp_path / "killed"
    command = [sys.executable, "-m", "train.run", CONFIG, "--folder", str(there)]
    for stage, appears in begun(there, work):
        process = subprocess.Popen(command, cwd=ROOT, stderr=DEVNULL, env=ENVIRONMENT)
        while not appears.exists():
            assert process.poll() is None, f"the run ended before {stage}"
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, cwd=ROOT, stderr=DEVNULL, env=ENVIRONMENT, check=True)
    for name in ("target", "drafts/0", "drafts/1", "drafts/2", "ngram"):
        weights = f"export/{name}/model.safetensors"
        assert (there / weights).read_bytes() == (folder / weights).read_bytes(), name
    for name in ("dev.jsonl", "heldout.jsonl", "pair.json"):
        assert (there / "export" / name).read_bytes() == (folder / "export" / name).read_bytes()
    found, whole = (json.loads((f / "export" / "tables.json").read_text()) for f in (there, folder))
    assert found["coverage"] == whole["coverage"]


@pytest.mark.slow
def test_the_exported_pair_generates_from_the_command_line(folder):
    pair = folder / "export"
    names = ",".join(str(pair / "drafts" / str(n)) for n in range(3))
    texts = {}
    for method in ("none", "pool"):
        done = subprocess.run(
            [sys.executable, "-m", "specjax", "generate", "def f(x):", "--model",
             str(pair / "target"), "--draft", names, "--method", method, "--max-new-tokens", "16",
             "--temperature", "0.7", "--verify", "naive", "--json"],
            cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT, check=True,
        )  # fmt: skip
        texts[method] = json.loads(done.stdout)["text"]
    assert texts["pool"] == texts["none"]


@pytest.mark.slow
def test_devices_share_the_rows_of_a_batch(tmp_path, folder, work):
    """Four virtual devices, the same command: the same training but for rounding."""
    there = tmp_path / "spread"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    environment = ENVIRONMENT | {"XLA_FLAGS": flags}
    for name in (work.collected("collected"), work.collected("development"), work.collected_labels,
                 work.corpus_labels, work.pretrained):  # fmt: skip
        shutil.copytree(name, there / name.name)
    command = [sys.executable, "-m", "train.run", CONFIG, "boost.drafts=1", "--folder", str(there)]

    def run_stages(names: str) -> None:
        subprocess.run(
            [*command, "--stages", names], cwd=ROOT, env=environment, check=True, stderr=DEVNULL
        )

    run_stages("warm,boost")
    own = dataclasses.replace(work, folder=there)
    for one, other in ((own.warm(0), work.warm(0)), (own.draft(0), work.draft(0))):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        for spread, alone in pairs:
            difference = float(np.abs(np.asarray(spread) - np.asarray(alone)).max())
            assert difference < 0.02 * float(np.abs(alone).max())
    assert not leaves_equal(own.warm(0), work.warm(0))  # it was not computed on one device
    collected = work.collected("collected").name
    shutil.rmtree(there / collected)
    shutil.rmtree(there / work.collected_labels.name)
    run_stages("collect,label")
    for name in (collected, work.collected_labels.name):
        made, kept = (np.load(root / name / "00000.npz")["tokens"] for root in (there, folder))
        assert (made == kept).mean() > 0.95  # a near tie may turn, and the rest of its row with it


def test_a_resumed_collection_and_labelling_give_the_same_bits(tmp_path, folder, work):
    again = tmp_path / "again"
    shutil.copytree(folder, again, ignore=shutil.ignore_patterns("warm*", "draft*", "export"))
    lost = (work.collected("collected") / "00001.npz", work.collected_labels / "00001.npz",
            work.corpus_labels / "00000.npz")  # fmt: skip
    for file in lost:
        (again / file.relative_to(folder)).unlink()
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
        (["boost.rule=best"], "boost.rule is 'best'; it must be one of samples,"),
        (["distil.loss=kl"], "distil.loss is 'kl'; it must be one of forward_kl,"),
        (["evaluation.temperatures=0"], "they must hold 0 and one above"),
        (["pretrain.steps=-2"], "pretrain.steps is -2"),
        (["corpus=nowhere.txt", "--stages", "tokenizer"], "neither a file nor a folder"),
        (["--stages", "export"], "holds 0 of 60 steps; run the stage 'pretrain' first"),
        (["boost.windw=3"], "for example boost.window=..."),
        (["evaluation.tables=coverge"], "evaluation.tables is 'coverge'; it must be one of cov"),
        (["boost.strength=-1"], "boost.strength is -1.0; it must be a number of at least 0."),
        (["schedule.other_rate=nan"], "schedule.other_rate is nan; it must be a number"),
        (["boost.keep=2"], "boost.keep is 2.0; it must be between 0 and 1."),
        (["corpus.slices=2"], "corpus.slices is 2; it must be at least 3."),
        (["pretrain.length=512"], "pretrain.length make 512 tokens a row; the target's context"),
        (["corpus="], "corpus= names no file"),
        (["boost.window=x"], "boost.window is 'x'; it must be of type int."),
        (["target.num_heads=3"], "num_heads (3) is not a multiple"),
    ],
)
def test_a_wrong_input_gets_one_sentence(tmp_path, capsys, arguments, sentence):
    assert run.main([CONFIG, *arguments, "--folder", str(tmp_path)]) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("train.run: ")
    assert sentence in printed


def test_a_folder_that_is_a_file_gets_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run.main([CONFIG, "--folder", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("train.run: ")


@pytest.mark.slow
def test_what_is_not_an_export_is_never_replaced(tmp_path, folder, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    command = [CONFIG, "--folder", str(folder), "--stages", "export", "--out"]
    assert run.main([*command, str(tmp_path)]) == 2
    assert "holds notes.txt, which is no part of an export" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert run.main([*command, str(tmp_path / "pair")]) == 0
    assert run.main([*command, str(tmp_path / "pair")]) == 0
    (tmp_path / "pair").rename(tmp_path / ".pair.old")  # killed between two exports
    (tmp_path / "pair.old").mkdir()
    assert run.main([*command, str(tmp_path / "pair")]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "pair", "pair.old"]


@pytest.mark.slow
def test_an_export_of_the_same_results_stays_and_of_others_goes(tmp_path, folder, work):
    pair = tmp_path / "pair"
    there = dataclasses.replace(work, pair=pair)
    export(there)
    (pair / "tables.json.part").write_text("{")  # a kill while tables were written
    (pair / "tables.json").write_text("{}")
    assert (
        run.main([CONFIG, "--folder", str(folder), "--out", str(pair), "--stages", "export"]) == 0
    )
    assert (pair / "tables.json").read_text() == "{}"
    two = dataclasses.replace(RECIPE, boost=dataclasses.replace(RECIPE.boost, drafts=2))
    export(dataclasses.replace(there, recipe=two))
    assert sorted(each.name for each in (pair / "drafts").iterdir()) == ["0", "1"]
    assert not (pair / "tables.json").exists()


def test_a_pair_is_no_part_of_the_corpus_that_it_lies_in(tmp_path, work):
    (tmp_path / "text.txt").write_text("".join(f"line {n}\n" for n in range(99)))
    recipe = dataclasses.replace(
        RECIPE, corpus=dataclasses.replace(RECIPE.corpus, files=(str(tmp_path),))
    )

    def corpus_id() -> str:
        return Work(recipe, tmp_path / "runs", work.log, tmp_path / "pair").corpus_id

    before = corpus_id()
    export(dataclasses.replace(work, pair=tmp_path / "pair"))
    shutil.copytree(tmp_path / "pair", tmp_path / ".pair.new")
    assert corpus_id() == before
    (tmp_path / "more.txt").write_text("more\n")
    assert corpus_id() != before


def test_a_missing_configuration_gets_one_sentence(tmp_path, capsys):
    assert run.main(["README.md", "--folder", str(tmp_path)]) == 2
    assert "README.md is no Python file" in capsys.readouterr().err
    assert run.main(["configs/none.py", "--folder", str(tmp_path)]) == 2
    assert "there is no configuration file 'configs/none.py'." in capsys.readouterr().err


def test_results_made_with_other_settings_are_neither_used_nor_lost(folder, work, capsys):
    stages = ["--folder", str(folder), "--stages", "export"]
    assert run.main([CONFIG, "boost.window=3", *stages]) == 2
    assert "holds 0 of 30 steps; run the stage 'boost' first" in capsys.readouterr().err
    assert run.main([CONFIG, "pretrain.seed=9", *stages]) == 2
    assert "run the stage 'pretrain' first" in capsys.readouterr().err
    assert leaves_equal(work.draft(1), dataclasses.replace(work).draft(1))


def test_variants_share_what_they_have_in_common(folder, work):
    other = dataclasses.replace(RECIPE, boost=dataclasses.replace(RECIPE.boost, rule="alike"))
    there = dataclasses.replace(work, recipe=other)
    assert there.drafted(0) == work.drafted(0)
    assert there.drafted(1) != work.drafted(1)
    assert there.warmed(2) == work.warmed(0)
    cosmetic = dataclasses.replace(RECIPE.pretrain, save_every=7)
    there = dataclasses.replace(work, recipe=dataclasses.replace(RECIPE, pretrain=cosmetic))
    assert there.pretrained == work.pretrained
    own = dataclasses.replace(RECIPE.boost, own_start=True)
    there = dataclasses.replace(work, recipe=dataclasses.replace(RECIPE, boost=own))
    assert there.warmed(0) == work.warmed(0)
    assert len({there.warmed(n) for n in range(3)}) == 3
