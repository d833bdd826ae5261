"""A pool for a target that exists: its tokenizer, the user's texts, and what may be wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from specjax.base.sampling import Sampling
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_drafts, load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.decoding.generate import generate
from specjax.draft import ExpansionDrafter
from specjax.models.transformer import initialize
from tests.conftest import tiny_config
from train import estimate, evaluate, export, run
from train import work as work_module
from train.collect import load_collected
from train.config import load_recipe
from train.corpus import train_tokenizer
from train.loop import Log
from train.report import flops_per_token
from train.target import identity_of, lasting_name
from train.work import Work

CONFIG = str(Path(__file__).parent.parent / "configs" / "boost" / "from_checkpoint.py")
SMALL = (
    *("draft.hidden_size=32", "draft.intermediate_size=32", "draft.num_layers=1"),
    *("draft.num_heads=2", "draft.num_kv_heads=1", "draft.head_dim=16", "warm.steps=4"),
    *("warm.batch=4", "warm.length=32", "collect.prompts=32", "collect.prompt_tokens=8"),
    *("collect.new_tokens=16", "collect.batch=32", "labels.corpus_rows=8"),
    *("labels.corpus_length=24", "schedule.steps=4", "schedule.batch=4", "boost.drafts=2"),
    *("evaluation.prompts=32", "evaluation.prompt_tokens=8", "evaluation.new_tokens=16"),
    *("evaluation.batch=32", "evaluation.depth=3", "boost.window=2", "labels.tokens=512"),
    *("warm.warmup_steps=1", "warm.decay_steps=1", "schedule.warmup_steps=1"),
    *("schedule.decay_steps=1", "evaluation.tables=coverage"),
)
TEXT = "".join(f"def f{i}(x):\n    return x + {i} * {i * i}\n\n" for i in range(60))


def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], 300)


def save_target(folder: Path, **changes) -> Path:
    config = tiny_config(vocab_size=320, max_positions=64, **changes)
    model = initialize(jax.random.key(0), config)
    save_model(jax.tree.map(lambda w: 6 * w, model), folder, tokenizer=tokenizer(), dtype="float32")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """A text, a folder of code, and lines of both kinds; only the prompts are continued."""
    there = tmp_path_factory.mktemp("corpus")
    (there / "book.txt").write_text(TEXT)
    (there / "code").mkdir()
    for number in range(12):
        (there / "code" / f"n{number}.py").write_text(TEXT[number * 40 : number * 40 + 200])
    lines = [{"prompt": f"def f{i}("} for i in range(40)] + [{"text": "x = 1\n"}]
    (there / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [str(there / name) for name in ("book.txt", "code", "lines.jsonl")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, corpus) -> Path:
    """A finished run: the documented command, with everything small."""
    there = tmp_path_factory.mktemp("run")
    command = [CONFIG, f"target={target}", f"corpus={corpus[0]}", *corpus[1:], *SMALL]
    assert run.main([*command, "--folder", str(there)]) == 0
    return there


@pytest.mark.slow
def test_the_pool_is_lossless_for_the_given_target(folder, target):
    model = load_model(target)
    drafts = load_drafts([folder / "export" / "drafts" / str(n) for n in range(2)])
    assert all(d.config.vocab_size == model.config.vocab_size for d in drafts)
    assert not (folder / "export" / "target").exists()
    texts = [
        generate(
            jax.random.key(0), model, drafter, [[5, 6, 7], [9]], max_new_tokens=16,
            sampling=Sampling(temperature=0.8), verify="naive",
        ).tokens
        for drafter in (None, ExpansionDrafter.of(drafts, ((1, 1), (1,))))
    ]  # fmt: skip
    np.testing.assert_array_equal(*texts)


@pytest.mark.slow
def test_prompts_are_the_users_and_tokens_the_targets(folder, target, corpus):
    recipe = load_recipe(CONFIG, (f"target={target}", f"corpus={','.join(corpus)}", *SMALL))
    work = Work(recipe, folder, Log(folder / "log.jsonl"), folder / "export")
    rows = load_collected("collect", work.collected("collected"), recipe.collect)
    known = tokenizer_of(target)
    for row in range(len(rows.tokens)):
        prompt = known.decode(rows.tokens[row, : rows.prompt[row]])
        assert prompt.startswith("def f")
        assert prompt.endswith("(")
    assert rows.length.min() >= 1
    exported = tokenizer_of(folder / "export" / "drafts" / "0")
    assert exported(TEXT).input_ids == known(TEXT).input_ids


@pytest.mark.slow
def test_the_pool_can_be_evaluated_beside_its_target(folder, tmp_path):
    file = tmp_path / "tables.json"
    asked = ["--model", str(folder), "--limit", "3", "--max-new-tokens", "8", "--json", str(file)]
    assert evaluate.main([*asked, "--tables", "coverage"]) == 0
    assert {row["of"] for row in json.loads(file.read_text())["coverage"]} >= {"draft 1", "union"}


def refused(capsys, *arguments: str) -> str:
    assert run.main([CONFIG, *SMALL, *arguments]) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_wrong_targets_get_one_sentence(tmp_path, capsys, corpus):
    there = ("--folder", str(tmp_path / "run"), "--stages", "tokenizer,collect")
    text = f"corpus={corpus[0]}"
    assert "needs a target: write target=FOLDER" in refused(capsys, text, *there)
    assert "needs a corpus: write corpus=FILES" in refused(capsys, "target=here", *there)
    assert f"no model folder at {tmp_path / 'none'}" in refused(
        capsys, f"target={tmp_path / 'none'}", text, *there
    )
    endless = save_target(tmp_path / "endless", eos_ids=())
    assert "names no end token, so its texts would never end" in refused(
        capsys, f"target={endless}", text, *there
    )
    foreign = save_target(tmp_path / "foreign")
    train_tokenizer([TEXT], 400).save(str(foreign / "tokenizer.json"))
    printed = refused(capsys, f"target={foreign}", text, *there)
    size = len(tokenizer_of(foreign))
    assert f"has {size} tokens, the target's vocabulary is 320" in printed
    bare = save_target(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert f"no tokenizer in {bare}" in refused(capsys, f"target={bare}", text, *there)


def test_wrong_texts_get_one_sentence(tmp_path, capsys, target, corpus):
    there = ("--folder", str(tmp_path / "run"), "--stages", "tokenizer,collect")
    (tmp_path / "empty.txt").write_text("\n")
    printed = refused(capsys, f"target={target}", f"corpus={tmp_path / 'empty.txt'}", *there)
    assert "holds no text" in printed
    printed = refused(capsys, f"target={target}", "corpus=nowhere", *there)
    assert "'nowhere', which is neither a file nor a folder" in printed
    printed = refused(
        capsys, f"target={target}", f"corpus={corpus[0]}", "collect.new_tokens=60", *there
    )
    assert "make 68 tokens a row; the target's context is 64" in printed


def test_a_target_that_ends_nothing_is_said_to(tmp_path, capsys, corpus):
    """Its end token is never likely: the run goes on and says what the drafts will not learn."""
    config = tiny_config(vocab_size=320, max_positions=64)
    model = initialize(jax.random.key(0), config)
    quiet = model.embedding.at[0].set(0).at[0, 0].set(-50.0)
    final = jax.numpy.zeros_like(model.final_norm).at[0].set(1.0)
    loud = jax.numpy.abs(quiet[:, 0]).at[0].set(-50.0)
    model = type(model)(
        quiet.at[:, 0].set(loud), model.layers, final, model.unembedding, model.config
    )
    save_model(model, tmp_path / "target", tokenizer=tokenizer(), dtype="float32")
    arguments = [f"target={tmp_path / 'target'}", f"corpus={corpus[0]}", *SMALL]
    there = ["--folder", str(tmp_path / "run"), "--stages", "tokenizer,collect"]
    assert run.main([CONFIG, *arguments, *there]) == 0
    lines = [json.loads(t) for t in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    notes = [line["note"] for line in lines if "note" in line]
    assert notes == ["the target ended none of its continuations: the drafts learn nothing of "
                     "where to end."] * 2  # fmt: skip


def checkpoint(folder: Path, **files: bytes) -> Files:
    """A folder with such files; `.` in their names is spelled `__`."""
    for name, held in {"config__json": b"{}", **files}.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)
        os.utime(path, (1, 1))
    return Files(folder)


@pytest.mark.parametrize(
    "name", ["model__safetensors", "pytorch_model__bin", "weights__orbax___d___0"]
)
def test_targets_that_differ_in_their_weights_have_names_of_their_own(tmp_path, name):
    """In whatever form the weights are; what lies beside them and is not loaded does not count."""
    sizes = [
        identity_of(checkpoint(tmp_path / str(size), **{name: bytes(size)})) for size in (3, 4)
    ]
    assert sizes[0] != sizes[1]
    again = checkpoint(tmp_path / "again", **{name: bytes(3)})
    assert identity_of(again) == sizes[0]
    if name == "model__safetensors":
        assert identity_of(checkpoint(again.path, pytorch_model__bin=b"x")) == sizes[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no weights"):
        identity_of(checkpoint(tmp_path / "empty"))


def test_targets_of_a_hub_are_named_after_their_revision_and_what_they_hold(tmp_path, monkeypatch):
    """Files of its cache are links to others, named by their digests."""
    home = tmp_path / "models--org--tiny"
    (home / "blobs").mkdir(parents=True)
    found = []
    for revision, blob in (("a" * 40, "11"), ("b" * 40, "22"), ("c" * 40, "11")):
        snapshot = home / "snapshots" / revision
        (home / "blobs" / blob).write_bytes(bytes(7))
        os.utime(home / "blobs" / blob, (1, 1))
        checkpoint(snapshot)
        (snapshot / "pytorch_model.bin").symlink_to(Path("../../blobs") / blob)
        found.append(Files(snapshot))
    names = [identity_of(files) for files in found]
    assert names[0] == names[2] != names[1]
    assert lasting_name("org/tiny", found[1]) == f"org/tiny@{'b' * 40}"
    assert lasting_name("org/tiny@main", found[1]) == f"org/tiny@{'b' * 40}"
    assert lasting_name("bundled", found[1]) == "bundled"
    monkeypatch.chdir(tmp_path)
    own = home.name
    assert lasting_name(own, Files(Path(own))) == str(home.resolve())


def test_a_pair_names_a_hubs_target_as_it_is_found_again(tmp_path, target, corpus, monkeypatch):
    """By its name and revision, not by a path that there is not."""
    snapshot = tmp_path / "snapshots" / ("d" * 40)
    shutil.copytree(target, snapshot)
    monkeypatch.setattr(work_module, "find", lambda name: Files(snapshot))
    recipe = load_recipe(CONFIG, ("target=org/tiny", f"corpus={corpus[0]}", *SMALL))
    own = Work(recipe, tmp_path / "run", Log(tmp_path / "log.jsonl"), tmp_path / "pair")
    said = json.loads(export._made_from(own))
    assert said["target"] == f"org/tiny@{'d' * 40}"
    assert said["made_from"]["target"] == identity_of(Files(snapshot))
    assert own.target.config.vocab_size == 320


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("corpus=nowhere.jsonl",), "'nowhere.jsonl', which is neither a file nor a folder"),
        (("corpus={bad}",), 'bad.jsonl has neither a "text" nor a "prompt"'),
        (("corpus={corpus}", "warm.length=4096"), "the target's context is 64"),
        (("corpus={corpus}", "target={endless}"), "names no end token"),
        (("corpus={corpus}", "target={narrow}"), "the target's vocabulary is 200"),
    ],
)
def test_refusals_come_before_anything_is_loaded_or_measured(
    overrides, sentence, tmp_path, target, corpus, monkeypatch, capsys
):
    def slow(*_):
        raise AssertionError("it was loaded or measured")

    monkeypatch.setattr(work_module, "load", slow)
    monkeypatch.setattr(run, "matmul_rate", slow)
    (tmp_path / "bad.jsonl").write_text('{"question": "x"}\n')
    for name, change in (("endless", {"eos_token_id": None}), ("narrow", {"vocab_size": 200})):
        shutil.copytree(target, tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    named = {"bad": tmp_path / "bad.jsonl", "corpus": corpus[0], "endless": tmp_path / "endless",
             "narrow": tmp_path / "narrow"}  # fmt: skip
    given = (each.format(**named) for each in overrides)
    code = run.main([CONFIG, f"target={target}", *SMALL, *given, "--folder", str(tmp_path / "run")])
    assert code == 2
    assert sentence in capsys.readouterr().err


def test_before_it_starts_a_run_says_how_long_and_how_much_memory(
    tmp_path, target, corpus, monkeypatch, capsys
):
    monkeypatch.setattr(estimate, "matmul_rate", lambda dtype: 1e6)
    long = ("schedule.steps=4000", "collect.prompts=32", "evaluation.tables=coverage")
    recipe = load_recipe(CONFIG, (f"target={target}", f"corpus={corpus[0]}", *SMALL, *long))
    work = Work(recipe, tmp_path / "run", Log(tmp_path / "log.jsonl"), tmp_path / "pair")
    left = estimate.tell(work, ["collect", "label", "warm", "boost", "evaluate"])
    said = capsys.readouterr().err
    assert re.search(r"train.run: this takes about .* h.* \(collect .*, boost .* h.*\) on", said)
    assert re.search(r"about \d+.* MiB of memory, in the stage .* to spare\.\n", said)
    assert "its 1 tables (coverage) come on top" in said
    steps = 4000 * (4 * 24 + 2 * 24)  # tokens of a draft
    flops = flops_per_token(work.draft_config(0), 24)
    assert estimate.seconds_of(work)["boost"] == pytest.approx(2 * steps * flops / 0.4e6)
    chunk = work.collected("collected")
    before = estimate.seconds_of(work)["collect"]
    (chunk / "00000.npz").write_bytes(b"")
    assert estimate.seconds_of(work)["collect"] == pytest.approx(before / 2)
    whole = left.seconds
    for stage in ("collect", "label", "warm"):
        left.begin()
        left.end(stage)
    assert left.seconds < whole / 100  # those that ended took no time
