"""Corpus, tokenizer, batches, chunks, recipes and schedules."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from specjax.models.config import ModelConfig
from train.checks import check, check_for
from train.chunks import load_chunks, make_chunks
from train.config import Corpus, Schedule, load_recipe
from train.corpus import END, module_of, split_of, standard_library, train_tokenizer
from train.data import (
    Epochs,
    Mixture,
    Prompts,
    Stream,
    Streams,
    encode,
    evaluation_rows,
    evenly,
)
from train.distil import Shuffle, batches
from train.documents import SPLITS, Document
from train.labels import Labelled
from train.loop import Log
from train.report import losses, marked, stage_seconds
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
    streams = encode(
        documents, lambda texts: [found.ids for found in tokenizer.encode_batch(texts)], end=7
    )
    held = [d for d in documents if d.split == "heldout" and not d.is_test]
    assert len(streams.heldout.documents) == len(held)
    assert streams.heldout.num_bytes == sum(len(d.text.encode()) for d in held)
    assert all(tokens[-1] == 7 for tokens in streams.train.documents)


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


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 5))
def test_a_shuffle_takes_every_row_once_an_epoch_beside_rows_of_like_length(count, rows, seed):
    length = np.random.default_rng(seed).integers(1, 257, count)
    order = Shuffle(length, 256, rows, seed)
    steps, epochs = len(order._cut(0)), []
    for epoch in range(2):
        batches = [order.at(epoch * steps + step) for step in range(steps)]
        drawn = np.concatenate([chosen for chosen, _ in batches])
        assert set(drawn) == set(range(count))
        assert len(drawn) < count + rows  # those that fill up the last batch come again
        for chosen, width in batches:
            assert length[chosen].max() <= width
            assert width % 64 == 0
            assert len(chosen) == rows * 256 // width
        epochs.append(drawn.tolist())
    assert count < 30 or epochs[0] != epochs[1]
    for found, wanted in zip(Shuffle(length, 256, rows, seed).at(3), order.at(3), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_row_is_cut_behind_what_its_loss_reads():
    tokens = np.random.default_rng(0).integers(0, 9, (64, 256)).astype(np.int32)
    weight = np.zeros((64, 256), np.float32)
    weight[:, 5:62] = 1  # the last loss is that of token 62
    weight[0, 63] = 1
    labelled = Labelled(tokens, tokens[..., None], 0.0 * tokens[..., None], weight)
    at = batches([(labelled, 4)], seed=3)
    found = [at(step)[0] for step in range(5)]
    assert sorted(part.tokens.shape for part in found) == [(8, 128)] * 2 + [(16, 64)] * 3
    assert sum(part.weight[:, 63:].sum() for part in found) == 1


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
    chunk = tmp_path / "00002.npz"
    whole = chunk.read_bytes()
    for damaged in (b"", whole[:40], whole[:-30], b"PK" + whole[40:], whole[:80] + whole[120:]):
        chunk.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"00002\.npz is truncated or damaged.*stage 'toy' again"
        ):
            load_chunks("toy", tmp_path, 4)


def test_overrides_change_what_they_name():
    recipe = load_recipe(
        TINY,
        (
            "boost.keep=0.5",
            "collect.temperatures=0,1",
            "schedule.steps=7",
            "boost.own_start=yes",
            "corpus=a.txt",
            "b c.txt",
            "boost.rule=union",
            "target=there",
        ),
    )
    assert recipe.boost.keep == 0.5
    assert recipe.boost.own_start
    assert recipe.corpus.files == ("a.txt", "b c.txt")
    assert recipe.target == "there"
    assert recipe.collect.temperatures == (0.0, 1.0)
    assert recipe.schedule == dataclasses.replace(load_recipe(TINY).schedule, steps=7)


@pytest.mark.parametrize(
    ("override", "near"),
    [("boost.widow=3", "boost.window"), ("colect.prompts=3", "collect.prompts"),
     ("boost", "boost.rule"), ("name=other", "warm.seed"),
     ("boost.sizes=3", "boost.rule")],
)  # fmt: skip
def test_an_unknown_override_names_the_nearest(override, near):
    with pytest.raises(ValueError, match=rf"no setting '{override}'; .*, for example {near}="):
        load_recipe(TINY, (override,))


def test_a_file_without_recipe_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match="defines no RECIPE"):
        load_recipe(str(tmp_path / "none.py"))


def test_every_committed_recipe_loads():
    for file in (ROOT / "configs").rglob("*.py"):
        if file.name != "__init__.py":
            given = {
                "from_checkpoint": ("target=somewhere", "corpus=texts"),
                "messages": ("target=somewhere", "corpus=texts"),
                "smollm2": ("target=somewhere",),
            }.get(file.stem, ())
            recipe = load_recipe(str(file), given)
            check(recipe)
            assert f"configs/{file.relative_to(ROOT / 'configs')}" in file.read_text()
            if isinstance(recipe.target, ModelConfig):
                assert recipe.labels.top_k < recipe.target.vocab_size


def test_the_rate_warms_up_stays_and_falls_to_zero():
    rate = learning_rate(Schedule(steps=100, batch=1, warmup_steps=10, decay_steps=40), 2.0)
    values = [float(rate(step)) for step in range(101)]
    assert values[0] == pytest.approx(0.2)
    assert np.all(np.diff(values[:11]) > 0)
    assert values[10:61] == pytest.approx([2.0] * 51)
    assert np.all(np.diff(values[60:]) < 0)
    assert values[80] == pytest.approx(1.0)
    assert values[100] == pytest.approx(0.0, abs=1e-6)


def test_a_schedule_without_warm_up_begins_at_its_peak():
    rate = learning_rate(Schedule(steps=10, batch=1, warmup_steps=0, decay_steps=0), 2.0)
    assert [float(rate(step)) for step in (0, 5, 9)] == pytest.approx([2.0] * 3)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [("warm.steps=-1", "warm.warmup_steps and warm.decay_steps are 15 together; warm.steps is -1"),
     ("schedule.steps=14", "are 15 together; schedule.steps is 14"),
     ("schedule.batch=0", "schedule.batch is 0; it must be at least 1"),
     ("warm.dtype=float16", "warm.dtype is 'float16'; it must be one of float32, bfloat16"),
     ("labels.dtype=int8", "labels.dtype is 'int8'"),
     ("pretrain.long_steps=3", "pretrain.long_steps need a pretrain.long_length"),
     ("collect.batch=0", "collect.batch is 0; it must be at least 1"),
     ("collect.temperatures=", "there must be some, none below 0"),
     ("labels.corpus_length=1", "labels.corpus_length is 1; it must be at least 2"),
     ("labels.top_k=512", "labels.top_k is 512; the target has 512 tokens"),
     ("boost.window=33", "boost.window is 33; it must be at most 32, collect.new_tokens"),
     ("boost.window=0", "boost.window is 0; it must be at least 1"),
     ("boost.cover=6", "boost.cover is 6; it must be at most 5, the number of known ranks"),
     ("evaluation.depth=33", "evaluation.depth is 33; it must be at most 32"),
     ("collect.prompt_tokens=240", "make 272 tokens a row; the target's context is 256"),
     ("corpus.slices=0", "corpus.slices is 0; it must be at least 3"),
     ("draft.num_heads=3 draft.num_kv_heads=2", "num_heads (3) is not a multiple"),
     ("boost.rule=residual distil.loss=cross_entropy", "which distil.loss=cross_entropy ignores")],
)  # fmt: skip
def test_impossible_settings_are_refused_before_any_work(override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(load_recipe(TINY, tuple(override.split())))


def test_a_draft_needs_at_least_one_step_and_the_ranks_that_are_known():
    recipe = load_recipe(TINY, ("schedule.steps=0", "schedule.decay_steps=0"))
    with pytest.raises(ValueError, match=r"schedule\.steps is 0; a draft learns"):
        check(recipe)
    wide = dataclasses.replace(load_recipe(TINY).target, max_positions=32)
    with pytest.raises(ValueError, match="the target's context is 32"):
        check_for(load_recipe(TINY), wide)


def test_time_losses_and_marks_are_those_of_the_places_asked_for(tmp_path):
    lines = [
        {"stage": "run"},
        {"stage": "a", "where": "a-1", "seconds": 5.0, "loss": 3.0},
        {"stage": "a", "where": "a-1", "seconds": 4.0, "loss": 2.0},
        {"stage": "a", "where": "a-2", "seconds": 7.0, "loss": 1.0},
        {"stage": "b", "where": "b-1", "seconds": 0.0, "marked": 0.25},
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"half a line')
    assert stage_seconds(file, ["a-1", "b-1"]) == {"a": 9.0, "b": 0.0}
    assert losses(file, ["a-1", "b-1"]) == {"a-1": 2.0}
    assert marked(file, ["a-1", "b-1"]) == [0.25]


def test_prompts_are_continued_as_a_whole_and_texts_in_pieces():
    sizes = (2, 3, 8)
    prompts = tuple(np.array([99, *range(size)], np.int32) for size in sizes)
    given = Stream((np.arange(9, dtype=np.int32),), 9, prompts, (99,))
    drawn = Prompts(given, 5, seed=1)
    found = [[drawn.at(index) for index in range(at, at + 3)] for at in range(0, 30, 3)]
    whole = [[99, 0, 1], [99, 0, 1, 2], [99, 4, 5, 6, 7]]
    assert all(sorted(epoch) == whole for epoch in found)
    assert len({str(epoch) for epoch in found}) > 1  # an order of its own each
    pieces = Prompts(given._replace(prompts=()), 4, seed=1)
    assert all(len(pieces.at(index)) == 4 for index in range(6))


def test_pieces_are_taken_from_every_document_in_turn():
    found = evenly(stream(30, 41, 3), 5, 6, seed=0)
    assert [len(ids) for ids in found] == [5, 5, 2, 5, 5, 2]
    assert [ids[0] // 30 for ids in found[:2]] == [0, 1]
    assert all(np.diff(ids).tolist() == [1] * (len(ids) - 1) for ids in found)


def test_documents_begin_and_all_but_prompts_end():
    documents = [Document("a", "x", "train"), Document("b", "y", "train", is_prompt=True)]
    streams = encode(documents, lambda texts: [[5, 6] for _ in texts], end=0, begin=[1])
    assert [t.tolist() for t in streams.train.documents] == [[1, 5, 6, 0], [1, 5, 6]]
    assert [t.tolist() for t in streams.train.prompts] == [[1, 5, 6]]
    assert streams.train.begin == (1,)


def test_bytes_a_token_are_those_of_short_streams_too():
    assert evaluation_rows(stream(10), 40, 1)[1] == 1
