"""Retrieval from a corpus against searches over lists."""

import collections
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.checkpoints.corpus_files import load_corpus
from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.pair import load_pair
from specjax.draft.growth import Growth
from specjax.draft.retrieval import COMPARED, RetrievalDrafter, all_of, corpus_of, narrowed
from specjax.methods.registry import build, lacking, setting_of
from tests.folders import target_folder
from tests.grown import check_best, commit, plain_search, propose, scores_of, start
from tests.pairs import PROMPTS, generate, varied_model

V = 64
TRUST = (0.0, 0.3, 0.6, 0.8)
GROWTH = Growth(budget=12, beams=12, width=3, depth=5)
RNG = np.random.default_rng(0)
CORPUS = [
    [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3, 4, 8, 1, 2, 3],
    [7] * 40,  # more places than are looked at
    RNG.integers(0, 3, 60).tolist(),
    [],
    [63],
    [1, 2, 3, 4],
]
TEXTS = [[9, 9, 1, 2, 3], [7, 7, 7], [0, 1, 2, 0], [63], [40, 2, 3]]


def drafter_of(least: int = 1) -> RetrievalDrafter:
    return RetrievalDrafter(corpus_of(CORPUS), jnp.asarray(TRUST), GROWTH, V, least)


def followers(text: list[int], path, least: int) -> dict[int, float]:
    """What follows in the corpus where it matches a text's longest end and a path."""
    longest = min(len(TRUST) - 1, len(text))
    for size in range(longest, least - 1, -1):
        if places(text[-size:]):
            whole = [*text[-size:], *path]
            every = sorted(places(whole))
            found = [every[len(every) * at // 32] for at in range(32)] if every else []
            counted = collections.Counter(found)
            most = [x for x in sorted(counted, key=lambda x: (-counted[x], x)) if x >= 0][:3]
            trust = TRUST[min(len(whole), len(TRUST) - 1)]
            return {x: float(np.log(trust * counted[x] / len(found))) for x in most}
    return {}


def places(wanted: list[int]) -> list[int]:
    """What follows each place that matches; -1 at the end of a text."""
    found = []
    for text in CORPUS:
        ended = [*text, -1]
        found += [ended[at + len(wanted)] for at in range(len(text) - len(wanted) + 1)
                  if text[at : at + len(wanted)] == wanted]  # fmt: skip
    return found


def test_suffixes_are_in_order():
    corpus = corpus_of(CORPUS)
    tokens = np.asarray(corpus.tokens)
    suffixes = [tuple(tokens[at : at + COMPARED]) for at in np.asarray(corpus.order)]
    assert suffixes == sorted(suffixes)
    assert sorted(np.asarray(corpus.order)) == list(range(sum(len(t) + 1 for t in CORPUS if t)))


@pytest.mark.parametrize("wanted", [[1, 2, 3], [7, 7], [2], [63], [5, 5], [8, 1, 2, 3, 4]])
def test_all_places_that_match_are_found(wanted):
    corpus = corpus_of(CORPUS)
    matches = all_of(corpus, (1,))
    for token in wanted:
        matches = narrowed(corpus, matches, jnp.asarray([token], jnp.int32))
    order = np.asarray(corpus.order)[int(matches.first[0]) : int(matches.end[0])]
    tokens = np.asarray(corpus.tokens)
    expected = {at for at in range(len(tokens)) if tokens[at : at + len(wanted)].tolist() == wanted}
    assert set(order.tolist()) == expected
    assert int(matches.tokens[0]) == len(wanted)


@pytest.mark.parametrize("least", [1, 2])
def test_trees_are_the_likeliest_paths_of_the_corpus(least):
    drafter, texts = drafter_of(least), TEXTS
    state = start(drafter, texts)
    for number in range(3):
        tree, state = propose(drafter, state, texts, Sampling())
        for row, text in enumerate(texts):

            def children(paths, text=text):
                return [followers(text, path, least) for path in paths]

            check_best(scores_of(tree, row, GROWTH), plain_search(children, GROWTH), children)
        counts, rests = [2, 1, 3, 1, 2], [int(x) for x in RNG.integers(0, V, len(texts))]
        state, texts = commit(drafter, state, tree, texts, counts, rests)
        assert number == 2 or max(map(len, texts)) < 48


def test_texts_are_those_of_plain_decoding():
    target = varied_model()
    plain = generate(target, None)
    corpus = corpus_of([row.tolist() for row in np.asarray(plain.tokens)])
    drafter = RetrievalDrafter(corpus, jnp.asarray(TRUST), GROWTH, V)
    found = generate(target, drafter)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.steps.sum() < 0.6 * plain.steps.sum(), "its own texts were in the corpus"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("own") / "target", 3))


def test_texts_of_files_are_the_corpus(folder, tmp_path, capsys):
    lines = [{"text": "def f(x)"}, {"prompt": "abc"}, {"turns": ["ab", "cd"]}]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plain.txt").write_text("def f(x): return x")
    pair = load_pair(folder, stage=f"{file},{tmp_path / 'plain.txt'}")
    assert pair.corpus is not None
    tokens = np.asarray(pair.corpus.tokens)
    texts = ["def f(x)", "abc", "ab", "cd", "def f(x): return x"]
    ids = [pair.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    joined = [x for text in ids for x in (*text, -1)]
    assert tokens[: len(joined)].tolist() == joined
    assert (tokens[len(joined) :] == -1).all()
    drafter = build(setting_of("retrieve:4"), pair)
    prompt = pair.tokenizer("def f(x)", add_special_tokens=False).input_ids
    found = generate(pair.target, drafter, [prompt])
    np.testing.assert_array_equal(found.tokens, generate(pair.target, None, [prompt]).tokens)
    flags = ["--model", folder, "--stage", str(file), "--method", "retrieve", "--json"]
    assert main(["generate", "def f(x)", "--max-new-tokens", "4", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["name"] == "retrieve:15"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", "has no text"),
        ("a.jsonl", '{"text": 5}\n', "line 1 .* a text, a prompt or turns"),
        ("a.jsonl", "{\n", "line 1 .* is no JSON"),
        ("a.bin", b"\xff\xfe\x00", "is no text in UTF-8"),
    ],
)
def test_files_without_texts_are_refused(name, content, sentence, folder, tmp_path):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    pair = load_pair(folder)
    with pytest.raises(CheckpointError, match=sentence):
        load_corpus([file], pair.tokenizer, pair.target.config.vocab_size)


def test_without_a_corpus_it_is_said(folder):
    assert "texts" in (lacking("retrieve", load_pair(folder)) or "")
    assert PROMPTS
