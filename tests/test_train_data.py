"""Corpus, tokenizer, batches, chunks, recipes and schedules."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from train.chunks import claim, load_chunks, make_chunks
from train.config import Boost, Collect, Corpus, Schedule, load_recipe
from train.corpus import END, SPLITS, module_of, split_of, standard_library, train_tokenizer
from train.data import Epochs, Mixture, Stream, Streams, encode, evaluation_rows
from train.distil import Shuffle
from train.loop import Log
from train.report import stage_seconds
from train.step import learning_rate

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "boost" / "tiny.py")


@pytest.fixture(scope="module")
def documents():
    return standard_library(Corpus(max_files=8))


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer([d.text for d in documents], 320)


@pytest.mark.parametrize(
    ("file", "module"),
    [("json/decoder.py", "json"), ("test/test_json/test_fail.py", "json"),
     ("test/test_heapq.py", "heapq"), ("_pydecimal.py", "pydecimal"),
     ("test/support.py", "support"),
     ("unittest/test/test_case.py", "unittest"), ("__future__.py", "_future__")],
)  # fmt: skip
def test_a_test_belongs_to_the_module_it_tests(file, module):
    assert module_of(Path(file)) == module


def test_no_module_is_in_two_splits():
    found = standard_library(Corpus())
    assert {d.split for d in found} == set(SPLITS)
    splits: dict[str, set[str]] = {}
    for document in found:
        splits.setdefault(document.module, set()).add(document.split)
        assert document.split == split_of(document.module, 20)
    assert all(len(s) == 1 for s in splits.values())
    assert any(d.is_test for d in found)


def test_the_number_of_files_is_bounded_in_every_split(documents):
    kinds = [(d.split, d.is_test) for d in documents]
    assert {split for split, _ in kinds} == set(SPLITS)
    assert max(kinds.count(kind) for kind in kinds) <= 8


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer):
    assert tokenizer.token_to_id(END) == 0
    assert all(tokenizer.token_to_id(b) is not None for b in pre_tokenizers.ByteLevel.alphabet())


def test_encoding_keeps_splits_apart_and_ends_documents(documents, tokenizer):
    streams = encode(documents, tokenizer)
    held = [d for d in documents if d.split == "heldout" and not d.is_test]
    assert len(streams.heldout.documents) == len(held)
    assert streams.heldout.num_bytes == sum(len(d.text.encode()) for d in held)
    assert all(tokens[-1] == 0 for tokens in streams.train.documents)


def stream(*sizes: int) -> Stream:
    """Documents of the given sizes, every token another number."""
    ends = np.cumsum(sizes)
    documents = [np.arange(e - s, e, dtype=np.int32) for s, e in zip(sizes, ends, strict=True)]
    return Stream(tuple(documents), int(ends[-1]))


def negative(size: int) -> Stream:
    """One document of negative numbers, to tell it from a `stream`."""
    return Stream((np.arange(-size, 0, dtype=np.int32),), size)


def test_an_epoch_covers_the_stream_once():
    epochs = Epochs(stream(30, 41, 30), 10, seed=0)
    rows = np.stack([epochs.at(i) for i in range(10)])
    assert rows.shape == (10, 11)
    assert len(np.unique(rows[:, :-1])) == 100
    later = np.stack([epochs.at(i) for i in range(10, 20)])
    assert not np.array_equal(np.sort(rows, axis=0), np.sort(later, axis=0))


def test_a_batch_depends_on_its_step_alone():
    streams = Streams(stream(300), negative(200), stream(10), stream(10))

    def mixture() -> Mixture:
        return Mixture(streams, 0.25, 16, 8, seed=4)

    forward = mixture()
    ahead = [forward.batch(step) for step in range(9)]
    for step in (8, 0, 5):
        np.testing.assert_array_equal(mixture().batch(step), ahead[step])
    assert not np.array_equal(ahead[0], ahead[1])
    assert all((batch[:6] >= 0).all() and (batch[6:] < 0).all() for batch in ahead)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 5))
def test_a_shuffle_takes_every_row_once_an_epoch(count, rows, seed):
    order = Shuffle(count, rows, seed)
    drawn = np.concatenate([order.at(step) for step in range(2 * count)])
    for epoch in range(len(drawn) // count):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))
    np.testing.assert_array_equal(Shuffle(count, rows, seed).at(3), order.at(3))


def test_evaluation_rows_are_evenly_spaced():
    rows, bytes_per_token = evaluation_rows(stream(101), 10, 5)
    assert rows.shape == (5, 11)
    assert rows[0, 0] == 0
    assert rows[-1, -1] == 100
    assert bytes_per_token == 1


def test_empty_streams_are_refused():
    with pytest.raises(ValueError, match="holds no document"):
        Epochs(Stream((), 0), 4, 0)
    with pytest.raises(ValueError, match="holds no document"):
        evaluation_rows(Stream((), 0), 4, 1)


def test_chunks_are_made_once_and_survive_a_kill(tmp_path):
    made, log = [], Log(tmp_path / "log.jsonl")

    def make(index: int, fail_at: int = -1) -> dict[str, np.ndarray]:
        if index == fail_at:
            raise KeyboardInterrupt
        made.append(index)
        return {"tokens": np.full((2, 3), index)}

    with pytest.raises(KeyboardInterrupt):
        make_chunks("toy", tmp_path, 4, lambda i: make(i, 2), log)
    (tmp_path / "00002.npz.part").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"00002\.npz is missing; run the stage 'toy' first"):
        load_chunks("toy", tmp_path, 4)
    make_chunks("toy", tmp_path, 4, make, log)
    assert made == [0, 1, 2, 3]
    assert load_chunks("toy", tmp_path, 4)["tokens"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_folder_belongs_to_its_settings(tmp_path):
    claim(tmp_path / "a", Collect(), Boost())
    claim(tmp_path / "a", Collect(), Boost())
    with pytest.raises(ValueError, match="was made with other settings"):
        claim(tmp_path / "a", Collect(), Boost(window=5))


def test_overrides_change_what_they_name():
    recipe = load_recipe(
        TINY, ("boost.keep=0.5", "collect.temperatures=0,1", "schedule.steps=7", "distil.hard=0.1")
    )
    assert recipe.boost.keep == 0.5
    assert recipe.collect.temperatures == (0.0, 1.0)
    assert recipe.schedule == dataclasses.replace(load_recipe(TINY).schedule, steps=7)


@pytest.mark.parametrize(
    ("override", "near"),
    [("boost.widow=3", "boost.window"), ("colect.prompts=3", "collect.prompts"),
     ("boost", "boost.keep"), ("name=other", "target.num_heads")],
)  # fmt: skip
def test_an_unknown_override_names_the_nearest(override, near):
    with pytest.raises(ValueError, match="no setting") as caught:
        load_recipe(TINY, (override,))
    if "." in override:
        assert near in str(caught.value)


def test_a_file_without_recipe_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match="defines no RECIPE"):
        load_recipe(str(tmp_path / "none.py"))


def test_every_committed_recipe_loads():
    for file in (ROOT / "configs").rglob("*.py"):
        if file.name != "__init__.py":
            recipe = load_recipe(str(file))
            assert recipe.target.vocab_size == recipe.draft.vocab_size
            assert {0.0} < set(recipe.evaluation.temperatures)
            assert recipe.labels.top_k < recipe.target.vocab_size


def test_the_rate_warms_up_stays_and_falls_to_zero():
    rate = learning_rate(
        Schedule(steps=100, batch=1, length=1, warmup_steps=10, decay_steps=40), 2.0
    )
    values = [float(rate(step)) for step in range(101)]
    assert values[0] == pytest.approx(0.2)
    assert np.all(np.diff(values[:11]) > 0)
    assert values[10:61] == pytest.approx([2.0] * 51)
    assert np.all(np.diff(values[60:]) < 0)
    assert values[80] == pytest.approx(1.0)
    assert values[100] == pytest.approx(0.0, abs=1e-6)


def test_wall_time_is_that_of_the_log(tmp_path):
    times = [("run", 0), ("a", 5), ("a", 9), ("b", 10), ("run", 100), ("b", 103)]
    lines = [json.dumps({"stage": stage, "time": time}) for stage, time in times]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert stage_seconds(tmp_path / "log.jsonl") == {"a": 9.0, "b": 4.0}
