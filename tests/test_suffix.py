"""Drafting from the text itself and from earlier answers: trees, what is kept, and engines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.draft.growth import Growth
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.retrieval import Corpus, RetrievalDrafter, corpus_of
from specjax.draft.suffix import SuffixDrafter, earlier
from specjax.draft.switching import SwitchingDrafter
from specjax.engine.earlier import EarlierTexts
from specjax.engine.request import Request
from specjax.goodput.policy import PLAIN
from tests.cases import slow_among
from tests.engines import ids_of, running, served
from tests.grown import paths_of, propose, start
from tests.pairs import generate, varied_model
from tests.scripted_engine import until
from tests.test_retrieval import CORPUS, TEXTS

V, SIZE = 64, 512
TRUST = jnp.asarray((0.0, 0.3, 0.6, 0.8))
GROWTH = Growth(budget=12, beams=12, width=3, depth=5)


def drafter_of(texts, growth: Growth = GROWTH, size: int = SIZE) -> SuffixDrafter:
    return SuffixDrafter(jax.tree.map(jnp.asarray, earlier(texts, size)), TRUST, growth, V, 1)


def trees_of(drafter, texts) -> list[set[tuple[int, ...]]]:
    """The paths of each row's tree."""
    tree, _ = propose(drafter, start(drafter, texts), texts, Sampling())
    return [set(paths_of(tree, row)) - {()} for row in range(len(texts))]


def test_without_earlier_texts_trees_are_those_of_the_text():
    text = TextDrafter(TRUST, None, GROWTH, V, 1)
    texts = [[1, 2, 3, 9, 1, 2], [7, 7, 7], [5], [0, 1, 2, 0, 1, 0]]
    assert trees_of(drafter_of([]), texts) == trees_of(text, texts)


def test_where_the_text_says_nothing_trees_are_those_of_earlier_texts():
    retrieval = RetrievalDrafter(corpus_of(CORPUS), TRUST, GROWTH, V, 1)
    texts = [text for text in TEXTS if len(set(text)) == len(text)]
    assert texts
    assert trees_of(drafter_of(CORPUS), texts) == trees_of(retrieval, texts)


def test_both_are_in_one_tree():
    """Earlier texts say 3 after 1, 2; this one said 9."""
    (paths,) = trees_of(drafter_of([[1, 2, 3, 4]]), [[1, 2, 9, 8, 1, 2]])
    assert {(3,), (3, 4), (9,), (9, 8)} <= paths


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        (8, [[4, 5, 6], [7, 8]]),
        (5, [[4], [7, 8]]),
        (2, [[7]]),
        (100, [[1, 2], [4, 5, 6], [7, 8]]),
    ],
)
def test_the_last_texts_are_kept_and_sizes_stay(size, kept):
    found = earlier([[1, 2], [4, 5, 6], [7, 8]], size)
    assert found.order.shape == (size,)
    joined = [x for text in kept for x in (*text, -1)]
    assert found.tokens[: len(joined)].tolist() == joined
    assert (found.tokens[len(joined) :] == -1).all()
    assert sorted(found.order.tolist()) == list(range(size))


def test_answers_are_kept_while_there_is_room():
    texts = EarlierTexts(64)

    def made() -> Corpus:
        found: list[Corpus] = []
        until(lambda: (own := texts.made()) is not None and (found.append(own) or True))
        return found[0]

    assert texts.made() is None
    texts.add([])
    texts.add([1, 2, 3])
    assert made().tokens[:4].tolist() == [1, 2, 3, -1]
    assert texts.made() is None, "it is as it was"
    for number in range(40):
        texts.add([number] * 9)
    until(lambda: 39 in made().tokens, 60)
    texts.add(list(range(200)))
    until(lambda: made().tokens[:63].tolist() == list(range(137, 200)), 60)


@pytest.mark.parametrize("switching", slow_among([False, True], True))
def test_an_engine_drafts_from_what_it_answered(switching):
    """The same text again takes fewer steps, without a program more; texts stay plain."""
    target = varied_model()
    drafter = drafter_of([])
    if switching:
        drafter = SwitchingDrafter.of({PLAIN: PlainDrafter(V), "suffix:12": drafter})
        assert drafter.remembers == SIZE
    asked = [Request(prompt=[5, 9, 2], max_new_tokens=24, ignore_eos=True),
             Request(prompt=[7, 41, 3], max_new_tokens=24, ignore_eos=True, temperature=1.0,
                     seed=3)]  # fmt: skip
    with running(target, drafter, rows=2) as engine:
        if switching:
            engine.fix("suffix:12")
        counts, texts = [], []
        for _ in range(3):
            before = engine.statistics().steps
            texts.append([ids_of(events) for events in served(engine, asked)])
            counts.append(engine.statistics().steps - before)
            until(lambda: not engine._earlier.is_ordering, 60)
    plain = generate(target, None, [asked[0].prompt], max_new_tokens=24).tokens.tolist()
    assert [each[0] for each in texts] == plain * 3
    assert texts[0] == texts[1] == texts[2]
    assert counts[2] < 0.6 * counts[0]


def test_texts_are_those_of_plain_decoding():
    target = varied_model()
    plain = generate(target, None)
    drafter = drafter_of([row.tolist() for row in np.asarray(plain.tokens)])
    found = generate(target, drafter)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.steps.sum() < 0.6 * plain.steps.sum()
