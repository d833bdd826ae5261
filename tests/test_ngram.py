"""The trigram model against dictionaries, its hash table, its folder, and the bundled one."""

import json
import shutil
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checkpoints.files import BUNDLED, CheckpointError
from specjax.checkpoints.load import load_drafts
from specjax.checkpoints.ngram_files import load_ngram, save_ngram
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.decoding.generate import generate
from specjax.draft.ngram import NO_TOKEN, contexts_of, pack, successors
from specjax.measure import prompts
from train.ngram import Counts, Katz, Successors, back_off, joined, materialize, occurrences_after

V, W = 13, 5


def occurrences_in(rows):
    """Every token of whole rows after the first."""
    return joined([occurrences_after(row[None, :-1], row[None, 1:]) for row in rows])


def texts(count: int = 30, length: int = 25, seed: int = 0) -> list[np.ndarray]:
    """Sequences with a likeliest successor, so that some trigrams are frequent and most unseen."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = [int(rng.integers(V))]
        while len(row) < length:
            row.append((3 * row[-1] + len(row) % 2) % V if rng.random() < 0.6 else rng.integers(V))
        rows.append(np.array(row))
    return rows


class Twin:
    """Katz's model on dictionaries: sums over the vocabulary, no arrays."""

    def __init__(self, rows) -> None:
        self.pairs, self.singles = defaultdict(Counter), defaultdict(Counter)
        self.alone = Counter()
        for row in (list(map(int, row)) for row in rows):
            for at in range(1, len(row)):
                self.alone[row[at]] += 1
                self.singles[row[at - 1]][row[at]] += 1
                if at > 1:
                    self.pairs[row[at - 2], row[at - 1]][row[at]] += 1

    @staticmethod
    def discount(counters) -> float:
        ones, twos = (sum(n == r for c in counters for n in c.values()) for r in (1, 2))
        return ones / (ones + 2 * twos) if ones and twos else 0.5

    def probs(self, before, last) -> dict:
        uniform = dict.fromkeys(range(V), 1 / V)
        probs = self.over(uniform, self.alone, [self.alone])
        if last in self.singles:
            probs = self.over(probs, self.singles[last], self.singles.values())
        if (before, last) in self.pairs:
            probs = self.over(probs, self.pairs[before, last], self.pairs.values())
        return probs

    def over(self, lower, seen, order) -> dict:
        total, missing = sum(seen.values()), sum(q for t, q in lower.items() if t not in seen)
        lost = self.discount(order) if missing > 1e-9 else 0.0
        weight = lost * len(seen) / total / max(missing, 1e-9)
        return {t: (seen[t] - lost) / total if t in seen else weight * lower[t] for t in range(V)}


@pytest.fixture(scope="module")
def rows():
    return texts()


@pytest.fixture(scope="module")
def katz(rows) -> Katz:
    return Katz(occurrences_in(rows), V)


@pytest.fixture(scope="module")
def table(katz):
    return materialize(katz, W, 1000)


def every_context(least: int = NO_TOKEN) -> np.ndarray:
    return np.array([(a, b) for a in range(least, V) for b in range(V)], np.int32)


def look(table, contexts):
    found = jax.jit(successors)(table, jnp.asarray(contexts[:, 0]), jnp.asarray(contexts[:, 1]))
    return [np.asarray(each) for each in found]


def test_distributions_are_normalised_and_those_of_dictionaries(rows, katz):
    twin = Twin(rows)
    assert 0 < len(katz.pairs.contexts) < V * V
    for before, last in every_context().tolist():
        probs = katz.trigram(before, last)
        assert probs.sum() == pytest.approx(1, abs=1e-12)
        expected = twin.probs(before, last)
        np.testing.assert_allclose(probs, [expected[t] for t in range(V)], atol=1e-12)


def test_a_lookup_gives_the_likeliest_of_the_distribution_for_every_context(rows, table):
    twin, contexts = Twin(rows), every_context()
    log_q, tokens = look(table, contexts)
    for (before, last), found, chosen in zip(contexts.tolist(), log_q, tokens, strict=True):
        probs = twin.probs(before, last)
        assert len(set(chosen.tolist())) == W
        np.testing.assert_allclose(np.exp(found), [probs[t] for t in chosen.tolist()], rtol=1e-5)
        np.testing.assert_allclose(np.exp(found), sorted(probs.values())[: -W - 1 : -1], rtol=1e-5)


def test_only_the_most_frequent_contexts_are_kept(katz):
    few = materialize(katz, W, 7)
    kept, totals = contexts_of(few), dict(zip(katz.pairs.contexts, katz.pairs.totals, strict=True))
    assert few.num_contexts == len(kept) == 7
    count = [totals[a * V + b] for a, b in kept.tolist()]
    assert sum(count) == sum(sorted(totals.values())[-7:])
    others = np.array([c for c in every_context().tolist() if c not in kept.tolist()], np.int32)
    log_q, _ = look(few, others)
    expected = [np.sort(katz.bigram(last))[: -W - 1 : -1] for last in others[:, 1].tolist()]
    np.testing.assert_allclose(np.exp(log_q), expected, rtol=1e-5)


@pytest.mark.parametrize("homes", [None, 1, 2, 16, 64])
def test_contexts_that_collide_are_all_found(homes):
    contexts = every_context(0)[::3]
    count = len(contexts)
    log_q = -1.0 * np.arange(V + count)[:, None] - np.arange(3)
    tokens = (np.arange(V + count)[:, None] + np.arange(3)) % V
    table = pack(contexts, tokens, log_q, homes)
    assert (contexts_of(table) == contexts).all()
    assert table.probes > 1
    found, _ = look(table, every_context())
    rows = {tuple(c): V + n for n, c in enumerate(contexts.tolist())}
    expected = [-rows.get((a, b), b) for a, b in every_context().tolist()]
    np.testing.assert_array_equal(found[:, 0], expected)


def test_large_vocabularies_do_not_overflow():
    size, rng = 256_000, np.random.default_rng(0)
    contexts = np.unique(rng.integers(size, size=(500, 2)), axis=0)
    tokens = np.arange(size + len(contexts))[:, None]
    table = pack(contexts, tokens, np.zeros(tokens.shape))
    assert table.probes <= 8
    swapped = contexts[:, ::-1]
    np.testing.assert_array_equal(look(table, contexts)[1], tokens[size:])
    np.testing.assert_array_equal(look(table, swapped)[1][:, 0], swapped[:, 1])


def test_lookups_take_any_batch_shape(table):
    before, last = jnp.full((2, 1, 3), NO_TOKEN), jnp.arange(6).reshape(2, 1, 3)
    log_q, tokens = successors(table, before, last)
    assert log_q.shape == tokens.shape == (2, 1, 3, W)
    empty = pack(np.zeros((0, 2), int), np.asarray(table.tokens[:V]), np.asarray(table.log_q[:V]))
    np.testing.assert_array_equal(successors(empty, before, last)[1], tokens)


def test_a_lookup_compiles_to_gathers_only(table):
    arguments = table, jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32)
    names = str(jax.make_jaxpr(successors)(*arguments))
    assert names.count("gather[") == 3
    assert not any(word in names for word in (" while", " scan", " sort", "top_k"))


def test_what_labels_say_is_counted_beside_texts():
    tokens, labels = np.array([[1, 2, 3, 4]]), np.array([[5, 6, -1, 7]])
    occurrences = joined([occurrences_after(tokens, labels), occurrences_in([np.array([1, 2])])])
    found = list(zip(*(each.tolist() for each in occurrences), strict=True))
    assert found == [(NO_TOKEN, 1, 5), (1, 2, 6), (3, 4, 7), (NO_TOKEN, 1, 2)]


@pytest.mark.parametrize(
    ("counts", "discount"),
    [((1, 2), 1 / 3), ((1, 1, 2, 5), 1 / 2), ((1, 1), 0.5), ((2, 3), 0.5), ((7,), 0.5)],
)
def test_a_discount_is_a_fraction_whatever_the_counts(counts, discount):
    context = np.repeat(np.arange(len(counts)), counts)
    made = Counts(context, np.zeros_like(context), 4)
    assert made.discount == pytest.approx(discount)
    assert made.totals.tolist() == list(counts)


def test_counts_are_kept_whole_where_nothing_is_left_for_others():
    lower, seen = np.array([0.5, 0.5, 0, 0]), Successors(np.array([0, 1]), np.array([3, 1]))
    np.testing.assert_allclose(back_off(lower, seen, 0.5), [0.75, 0.25, 0, 0])
    np.testing.assert_allclose(back_off(lower, Successors(*2 * [np.zeros(0, int)]), 0.5), lower)


@pytest.fixture(scope="module")
def written(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    save_ngram(table, folder, trained_on="random texts")
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(written, tmp_path / "copy")


def test_a_folder_gives_back_the_tables(table, written):
    found = load_ngram(written, vocab_size=V)
    np.testing.assert_array_equal(found.slots, table.slots)
    np.testing.assert_array_equal(found.tokens, table.tokens)
    np.testing.assert_allclose(found.log_q, table.log_q, atol=1 / 32 + 1e-6)
    assert (found.vocab_size, found.homes, found.probes) == (V, table.homes, table.probes)
    assert (np.diff(found.log_q, axis=1) <= 0).all()
    assert json.loads((written / "config.json").read_text())["trained_on"] == "random texts"
    kinds = {name: each.dtype for name, each in load_file(written / "model.safetensors").items()}
    assert kinds == {"contexts": np.uint8, "tokens": np.uint8, "costs": np.uint8}


def test_impossible_tokens_are_dearest(tmp_path):
    save_ngram(pack(np.zeros((0, 2), int), np.zeros((3, 2), int), np.full((3, 2), -60.0)), tmp_path)
    np.testing.assert_array_equal(load_ngram(tmp_path).log_q, -255 / 16)


@pytest.mark.parametrize(
    ("changes", "occurrences"),
    [
        ({"kind": "llama"}, "says kind 'llama'; an n-gram model has 'ngram'"),
        ({"order": 2}, "says order 2; an n-gram model has 3"),
        ({"width": 0}, "says width 0; it must be at least 1"),
        ({"contexts": "many"}, "says contexts 'many'"),
        ({"width": 4}, r"has shape \(\d+, 5\); config.json asks for \(\d+, 4\)"),
        ({"vocab_size": V - 1}, "config.json asks for"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(folder, changes, occurrences):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=occurrences):
        load_ngram(folder)


def test_tensors_that_do_not_fit_are_refused(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"weights": np.zeros(3)}, file)
    with pytest.raises(CheckpointError, match="unexpected tensor weights in"):
        load_ngram(folder)
    save_file({"costs": tensors["costs"]}, file)
    with pytest.raises(CheckpointError, match="has no tensor contexts, tokens"):
        load_ngram(folder)
    save_file(tensors | {"tokens": tensors["tokens"] + np.uint8(V)}, file)
    with pytest.raises(CheckpointError, match=f"names token {2 * V - 1}; .* says {V} tokens"):
        load_ngram(folder)
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_ngram(folder)


def test_another_vocabulary_and_a_missing_folder_are_refused(written, tmp_path):
    with pytest.raises(CheckpointError, match=f"is one of {V} tokens; 64 are asked for"):
        load_ngram(written, vocab_size=64)
    with pytest.raises(CheckpointError, match="no model folder at"):
        load_ngram(tmp_path / "nowhere")


def test_the_bundled_table_foresees_what_the_bundled_draft_says():
    draft = load_drafts("bundled/0", dtype="float32")[0]
    bundled, tokenizer = (
        load_ngram(vocab_size=draft.config.vocab_size),
        tokenizer_of(BUNDLED / "target"),
    )
    listed = prompts.read(str(BUNDLED / "dev.jsonl"))[:8]
    texts = [tokenizer(text).input_ids for _, text in listed]
    made = generate(jax.random.key(0), draft, None, texts, max_new_tokens=48, stop_at_eos=False)
    pairs = [
        [*text[-2:], *row.tolist()]
        for text, row in zip(texts, np.asarray(made.tokens), strict=True)
    ]
    rows = np.array([row[:50] for row in pairs], np.int32)
    _, tokens = successors(bundled, jnp.asarray(rows[:, :-2]), jnp.asarray(rows[:, 1:-1]))
    hit = np.asarray(tokens) == rows[:, 2:, None]
    assert hit[..., 0].mean() > 0.45
    assert hit[..., :4].any(axis=-1).mean() > 0.7
    assert (np.diff(np.sort(np.asarray(tokens)), axis=-1) > 0).all()
