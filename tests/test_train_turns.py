"""Prompts that a chat model writes itself, and continuations from an engine's rows."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.load import load, load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.decoding.generate import generate
from specjax.models.pruning import ids_of
from tests.test_train_from_checkpoint import CONFIG, SMALL, TEXT, save_target, tokenizer
from train import export, labels, run
from train.collect import load_collected
from train.config import Turns, load_recipe
from train.corpus import split_of
from train.data import Prompts
from train.loop import Log
from train.served import EngineRows
from train.turns import WrittenTurns, opening, prompt_of
from train.vocabulary import most_frequent
from train.work import Work

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
OWN = (
    *(*SMALL, "turns.tokens=6", "turns.batch=16", "collect.rows=1", "collect.prompts=8"),
    *("collect.batch=8", "collect.prompt_tokens=32", "evaluation.prompts=2", "evaluation.batch=2"),
    *("evaluation.prompt_tokens=32", "corpus.slices=4", "labels.top_k=4", "labels.dtype=float32"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A chat model that ends most of its turns, as many of its tokens do."""
    there = tmp_path_factory.mktemp("target")
    save_target(there, eos_ids=tuple(range(0, 300, 8)))
    (there / "chat_template.jinja").write_text(TEMPLATE)
    return there


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    lines = [{"text": TEXT[at : at + 90]} for at in range(0, 1800, 60)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def work_of(target: Path, corpus: Path, folder: Path, *changes: str) -> Work:
    recipe = load_recipe(CONFIG, (f"target={target}", f"corpus={corpus}", *OWN, *changes))
    return Work(recipe, folder, Log(folder / "log.jsonl"), folder / "export")


@pytest.fixture(scope="module")
def work(tmp_path_factory, target, corpus) -> Work:
    """A finished collection."""
    found = work_of(target, corpus, tmp_path_factory.mktemp("run"))
    run.run_collect(found)
    return found


def test_the_target_answers_what_it_wrote(work, target):
    model, known = load_model(target), tokenizer_of(target)
    asked = dict[str, set[str]]()
    for name, settings in work.collections.items():
        rows = load_collected("collect", work.collected(name), settings)
        assert set(rows.temperature) <= set(np.float32(settings.temperatures))
        prompts = [row[:n].tolist() for row, n in zip(rows.tokens, rows.prompt, strict=True)]
        asked[name] = {known.decode(prompt) for prompt in prompts}
        assert all(text.startswith("<user>") and text.endswith("\n<a>") for text in asked[name])
        if name == "collected":
            greedy = np.flatnonzero(rows.temperature == 0)
            asked_of = [prompts[row] for row in greedy]
            plain = generate(jax.random.key(0), model, None, asked_of, max_new_tokens=16)
            np.testing.assert_array_equal(rows.following[greedy], plain.tokens)
            np.testing.assert_array_equal(rows.length[greedy], plain.lengths)
    assert len(asked["collected"]) == 8
    assert not asked["collected"] & asked["development"]


def test_more_prompts_go_on_from_what_there_is(tmp_path, work, target, corpus):
    shutil.copytree(work.folder, tmp_path / "again")
    more = work_of(target, corpus, tmp_path / "again", "collect.prompts=24")
    vars(more)["engine"] = work.engine  # it was compiled
    first, second, _ = (more.collected("collected") / f"0000{n}.npz" for n in range(3))
    kept = dict(np.load(first))
    run.run_collect(more)
    rows = load_collected("collect", more.collected("collected"), more.recipe.collect)
    assert len({row[:n].tobytes() for row, n in zip(rows.tokens, rows.prompt, strict=True)}) == 24
    wanted = dict(np.load(second))
    second.unlink()
    run.run_collect(more)
    for found, own in ((np.load(first), kept), (np.load(second), wanted)):
        assert all(np.array_equal(found[name], own[name]) for name in own)


def test_the_corpus_prompts_are_messages_in_the_chat_template(tmp_path, target):
    """Those that fit, which are what goes with the pair as text."""
    asked = [f"x = {n}" for n in range(40)] + ["y" * 80]
    file, known = tmp_path / "asked.jsonl", tokenizer_of(target)
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    made = work_of(target, file, tmp_path / "run", "turns.tokens=0", "collect.chat=True")
    run.run_collect(made)
    for name, split in (("collected", "train"), ("development", "dev")):
        rows = load_collected("collect", made.collected(name), made.collections[name])
        own = {text for text in asked[:40] if text in made.messages(split, 32)}
        said = {known.decode(row[:n]) for row, n in zip(rows.tokens, rows.prompt, strict=True)}
        assert said <= {f"<user>{text}\n<a>" for text in own}
        assert len(said) == min(len(own), len(rows.prompt))
    assert set(export._prompts(made, "dev")) == set(made.messages("dev", 32)) < set(asked)
    with pytest.raises(ValueError, match="prompts of the corpus for dev none has at most 3 tokens"):
        made.messages("dev", 3)


def written(folder: Path, texts: list[str], ends: bool = True) -> None:
    """A batch of turns as a target would have left it."""
    tokens = np.zeros((len(texts), 40), np.int32)
    own = [tokenizer().encode(text).ids for text in texts]
    for row, ids in enumerate(own):
        tokens[row, : len(ids)] = ids
        tokens[row, len(ids)] = 0 if ends else 1
    folder.mkdir(exist_ok=True)
    length = np.array([len(ids) + 1 for ids in own], np.int32)
    np.savez(folder / "00000.npz", tokens=tokens, length=length)


def unneeded() -> EngineRows:
    raise AssertionError("all turns are there, so no engine is started")


def turns_in(folder: Path, target: Path, batch: int) -> WrittenTurns:
    return WrittenTurns(folder, load(target)[1], Turns(tokens=40, batch=batch), (0,), 4, 32)


def test_turns_are_each_kept_once_in_the_split_of_their_text(tmp_path, target):
    texts = [f"x = {n}" for n in range(30)] + ["x = 3", " ", "y" * 36]
    written(tmp_path, texts)
    wanted = [text for text in texts[:30] if split_of(text, 4) == "train"]
    known, log = tokenizer_of(target), Log(tmp_path / "log.jsonl")
    stream = turns_in(tmp_path, target, len(texts)).of("train", len(wanted), unneeded, log)
    assert [known.decode(ids) for ids in stream.prompts] == [f"<user>{t}\n<a>" for t in wanted]
    prompts = Prompts(stream, 32, seed=5)
    assert [prompts.at(n) for n in range(3)] == [ids.tolist() for ids in stream.prompts[:3]]


@pytest.mark.slow
def test_turns_go_on_from_their_beginnings_behind_the_free_batches(tmp_path, target):
    """What the target writes after a beginning is what it writes after the same text."""
    model, known = load(target)
    settings = Turns(tokens=12, temperatures=(0.0,), batch=8, free=1, beginnings=("x =", "for a"))
    log = Log(tmp_path / "log.jsonl")
    turns = WrittenTurns(tmp_path, known, settings, model.config.eos_ids, 4, 64)
    turns.of("train", 1, lambda: EngineRows(model, 2, 64), log)
    while not (tmp_path / "00001.npz").is_file():
        turns.of("train", len(turns.texts("train", 99)) + 1, lambda: EngineRows(model, 2, 64), log)
    free, begun = (dict(np.load(tmp_path / f"0000{n}.npz")) for n in range(2))
    for arrays, words in ((free, ("", "")), (begun, settings.beginnings)):
        asked = [opening(known, each) for each in words]
        plain = generate(jax.random.key(0), model, None, asked, max_new_tokens=12)
        for row, text in enumerate(arrays["tokens"]):
            np.testing.assert_array_equal(text, plain.tokens[row % 2])
    assert any(text.startswith(settings.beginnings) for text in turns.texts("train", 99))


def test_a_target_that_ends_no_turn_is_refused(tmp_path, target):
    written(tmp_path, [f"x = {n}" for n in range(60)], ends=False)
    with pytest.raises(ValueError, match="of 60 turns that the target wrote 0 ended and differ"):
        turns_in(tmp_path, target, 60).of("train", 1, unneeded, Log(tmp_path / "log.jsonl"))


def test_the_template_is_split_where_the_users_text_begins(target):
    known = tokenizer_of(target)
    assert known.decode(opening(known)) == "<user>"
    assert known.decode(prompt_of(known, "x = 1")) == "<user>x = 1\n<a>"
    known.chat_template = "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="shows a user's text 2 times"):
        opening(known)
    known.chat_template = None
    with pytest.raises(ValueError, match="has no chat template; turns"):
        opening(known)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("collect.rows=0", "turns.tokens is 6 and collect.rows is 0"),
        ("collect.chat=True", "turns.tokens is 6 and collect.chat is True"),
        ("head.start=smollm2-eagle3", "head.start is 'smollm2-eagle3' and head.levels 0"),
        ("collect.rows=-1", "collect.rows is -1; it must be at least 0"),
        ("collect.dtype=int8", "collect.dtype is 'int8'; it must be one of float32, bfloat16"),
        ("turns.temperatures=", "turns.temperatures are (); there must be some"),
        ("turns.batch=0", "turns.batch is 0; it must be at least 1"),
        ("turns.free=-1", "turns.free is -1; it must be at least 0"),
    ],
)
def test_settings_are_checked(tmp_path, target, corpus, capfd, change, sentence):
    command = [CONFIG, f"target={target}", f"corpus={corpus}", *OWN, change]
    assert run.main([*command, "--folder", str(tmp_path), "--stages", "collect"]) == 2
    assert sentence in capfd.readouterr().err


def test_labels_made_while_collecting_are_those_of_a_pass(tmp_path, work):
    target, count = work.target, work.recipe.collect.prompts // work.recipe.collect.batch
    collected, settings = work.collected("collected"), work.recipe.labels
    labels.label(
        tmp_path, target, partial(labels.collected_texts, collected), count, settings, work.log
    )
    rows = load_collected("collect", collected, work.recipe.collect)
    (own, along), (passed, wanted) = (
        labels.load_labels(folder, count) for folder in (work.collected_labels, tmp_path)
    )
    np.testing.assert_array_equal(own.weight == 0, np.arange(48) < rows.prompt[:, None] - 1)
    assert (passed.weight == 1).all()
    exact = 0
    for row, at in np.argwhere(rows.alive):
        place = row, rows.columns[row, at] - 1
        np.testing.assert_allclose(own.log_p[place], passed.log_p[place], atol=4e-3)
        assert set(own.ids[place]) == set(passed.ids[place])
        if rows.temperature[row] in (0, 1):
            exact += 1
            assert along[place] == pytest.approx(wanted[place], abs=1e-4)
        else:  # what is not among the likeliest four counts as one token
            assert wanted[place] - 0.5 < along[place] < wanted[place] + 1e-4
    assert exact
    rest = np.take_along_axis(along, rows.columns - 1, axis=1)[~rows.alive]
    assert (rest == 0).all()


def test_drafts_of_some_tokens_are_trained_and_exported(tmp_path, work, target, corpus):
    """On what the target wrote alone: no corpus rows, no warm-up, prompts that it wrote."""
    shutil.copytree(work.folder, tmp_path / "again")
    changes = ("vocabulary.size=60", "labels.corpus_rows=0", "distil.corpus_rows=0", "warm.steps=0",
               "warm.warmup_steps=0", "warm.decay_steps=0", "boost.rule=residual")  # fmt: skip
    own = work_of(target, corpus, tmp_path / "again", *changes)
    for stage in ("label", "warm", "boost", "export", "report"):
        run.STAGES[stage](own)
    rows = load_collected("collect", own.collected("collected"), own.recipe.collect)
    ids = most_frequent(rows, 60, load_model(target).config.vocab_size)
    for member in range(2):
        draft = load_model(own.pair / "drafts" / str(member))
        assert draft.config.draft_vocab_size == 60
        np.testing.assert_array_equal(ids_of(np.asarray(draft.row_of), 60), ids)
        trained, first = own.draft(member).embedding, own.warm(member).embedding
        np.testing.assert_array_equal(draft.embedding, trained.astype(jnp.bfloat16))
        assert not np.array_equal(trained, first)
    figures = json.loads((own.pair / "report.json").read_text())
    assert figures["drafts"][1]["pool_top5"] > 0
    lines = [json.loads(line) for line in (own.pair / "dev.jsonl").read_text().splitlines()]
    assert lines
    assert all(split_of(line["prompt"], 4) == "dev" for line in lines)
