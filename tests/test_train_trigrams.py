"""The stage that counts what a target says: what it counts, leaves, and says of itself."""

import dataclasses
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.ngram_files import load_ngram
from specjax.draft.ngram import NO_TOKEN, contexts_of, successors
from tests.rows import PROMPT, STEPS, rows_of, whole
from train.checks import check, check_for
from train.chunks import make_chunks
from train.config import Labels, Trigrams, load_recipe
from train.heldout import view
from train.labels import collected_texts, label, load_labels
from train.loop import Log
from train.trigrams import agreement, is_made, made_in, make_trigrams, target_occurrences

LABELS = Labels(top_k=3, tokens=8 * (PROMPT + STEPS), dtype="float32")
SETTINGS = Trigrams(contexts=400, width=6)


@pytest.fixture(scope="module")
def rows(target):
    return rows_of(target, 24, np.tile(np.float32([0, 0.8, 1]), 8))


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Log:
    return Log(tmp_path_factory.mktemp("log") / "log.jsonl")


@pytest.fixture(scope="module")
def labelled(target, rows, log, tmp_path_factory):
    collected, folder = (tmp_path_factory.mktemp(name) for name in ("collected", "labels"))
    parts = [rows.where(np.arange(24) // 12 == chunk)._asdict() for chunk in range(2)]
    for part in parts:
        del part["steps"]
    make_chunks("collect", collected, 2, parts.__getitem__, log)
    label(folder, target, partial(collected_texts, collected), 2, LABELS, log)
    return load_labels(folder, 2)[0]


@pytest.fixture(scope="module")
def said(rows, labelled):
    corpus = labelled.of(slice(2))
    return target_occurrences(rows, labelled, corpus)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run") / "trigrams-0123abcd"


@pytest.fixture(scope="module")
def table(folder, said, target, log):
    assert not is_made(folder)
    with pytest.raises(ValueError, match="run the stage 'trigrams' first"):
        made_in(folder)
    return make_trigrams(folder, said, target.config.vocab_size, SETTINGS, "tiny", log)


def test_own_text_and_likeliest_tokens_are_counted(target, rows, said):
    own, likeliest = rows.tokens[:, PROMPT:], view(target, rows).top[..., 0]
    count = own.size
    np.testing.assert_array_equal(said.token[:count], own.reshape(-1))
    np.testing.assert_array_equal(said.last[:count], rows.tokens[:, PROMPT - 1 : -1].reshape(-1))
    along = said.token[count:].reshape(-1)[: 24 * (PROMPT + STEPS - 1)].reshape(24, -1)
    np.testing.assert_array_equal(along[:, PROMPT - 1 :], likeliest)
    of_corpus = said.token[count + along.size :]
    assert len(of_corpus) == 2 * (PROMPT + STEPS)
    assert (said.before == NO_TOKEN).sum() == 24 + 2


def test_nothing_is_counted_after_a_row_has_ended(rows, labelled):
    short = rows._replace(length=np.full_like(rows.length, 2))
    none = labelled.of(slice(0))
    assert len(target_occurrences(short, labelled, none).token) == 24 * (2 + PROMPT + 1)


def test_the_table_left_behind_is_read_again(folder, table, log):
    assert is_made(folder)
    again = load_ngram(made_in(folder))
    np.testing.assert_array_equal(again.tokens, table.tokens)
    np.testing.assert_array_equal(again.log_q, table.log_q)
    assert table.width == 6
    assert '"kept": ' in log.file.read_text().splitlines()[-1]


def test_a_broken_off_stage_begins_anew(tmp_path, said, target, table, log):
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / "config.json").write_text("{")
    assert not is_made(tmp_path)
    made = make_trigrams(tmp_path, said, target.config.vocab_size, SETTINGS, "tiny", log)
    np.testing.assert_array_equal(made.slots, table.slots)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_agreement_counts_the_tables_likeliest_tokens(target, rows, table):
    found = agreement(table, target, rows)
    assert list(found) == [
        f"{n}{k}" for n in ("top", "drawn_top", "likeliest_top") for k in (1, 2, 4)
    ]
    for name, chosen, what in (
        ("top", rows.temperature == 0, rows.following),
        ("drawn_top", rows.temperature > 0, rows.following),
        ("likeliest_top", rows.temperature > 0, view(target, rows).top[..., 0]),
    ):
        hits = []
        for row in np.flatnonzero(chosen):
            for step, column in enumerate(rows.columns[row]):
                before, last = rows.tokens[row, column - 2 : column]
                guesses = successors(table, jnp.int32(before), jnp.int32(last))[1]
                hits.append(what[row, step] in np.asarray(guesses[:2]))
        assert found[f"{name}2"] == pytest.approx(np.mean(hits))
    assert found["top1"] > 0.5  # it was counted on these very rows


def test_a_prompt_of_one_token_has_nothing_before_it(target, table):
    rows = whole(np.tile(np.arange(1, 9, dtype=np.int32), (2, 1)), np.float32([0, 0.8]))
    rows = rows._replace(prompt=np.int32([1, 1]), length=np.int32([7, 7]), steps=7)
    assert 0 <= agreement(table, target, rows)["top4"] <= 1


def test_narrow_tables_have_fewer_figures(tmp_path, said, target, rows, log):
    narrow = make_trigrams(tmp_path, said, 64, Trigrams(contexts=5, width=2), "tiny", log)
    assert "top4" not in agreement(narrow, target, rows)
    assert len(contexts_of(narrow)) == 5


def test_impossible_settings_are_refused(target):
    recipe = load_recipe(str(Path(__file__).parent.parent / "configs" / "boost" / "tiny.py"))
    check(recipe)
    wide = dataclasses.replace(recipe, trigrams=Trigrams(contexts=1, width=600))
    with pytest.raises(ValueError, match="width is 600; the target has 512 tokens"):
        check_for(wide, recipe.target)
    with pytest.raises(ValueError, match="contexts is -1; it must be at least 0"):
        check(dataclasses.replace(recipe, trigrams=Trigrams(contexts=-1)))
