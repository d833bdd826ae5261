"""Trees of a draft and of the text together, against dictionaries; and the draft after steps."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.staged import TableStage
from specjax.measure.distribution_tests import logits_after
from specjax.trees.tree import TreeShape
from tests.grown import (
    SLOTS,
    TEMPERATURES,
    check_best,
    children_of,
    commit,
    paths_of,
    plain_search,
    propose,
    scores_of,
    sharpness_of,
    start,
)
from tests.pairs import varied_model
from tests.test_growth import random_table
from tests.test_prompt_lookup import after_text

DRAFT = varied_model(1)
GROWTH = Growth(budget=14, beams=14, width=3, depth=6)


def expected_again() -> list[int]:
    """A text in which the draft finds likely what followed before: both propose the same token."""
    texts = [[20, 21, 22, token, 20, 21, 22] for token in range(64)]
    best = np.argsort(-logits_after(DRAFT, texts), axis=1)[:, :2]
    return next(text for text, likely in zip(texts, best, strict=True) if text[3] in likely)


TEXTS = [
    [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3, 4, 8, 1, 2, 3],
    expected_again(),
    [7] * 12,
    [63],
]
TRUSTS = {
    "shared": (0.0, 0.1, 0.5, 0.8),
    "all of the text's": (0.0, 1.0, 1.0, 1.0),
    "next to none": (0.0, 1e-9, 1e-9, 1e-9),
}
RESTS = (5, 8, 7, 60)


def hybrid(trust, table=None, least: int = 1, growth: Growth = GROWTH, stage=None) -> HybridDrafter:
    draft = BestFirstDrafter(DRAFT, jnp.asarray(TEMPERATURES), growth, stage)
    return HybridDrafter(draft, jnp.asarray(trust), table, least)


def of_either(of_draft, of_text):
    """What one or the other may put below a path."""

    def children(paths):
        found = zip(of_draft(paths), of_text(paths), strict=True)
        return [own | theirs for own, theirs in found]

    return children


def check(drafter: HybridDrafter, trust, tree, texts) -> tuple[int, int]:
    """A row's nodes are the best of the draft's tree and of the text's branches below any of it.

    The numbers of nodes of the draft and of the text.
    """
    counts = [0, 0]
    for row, text in enumerate(texts):
        of_draft = children_of(DRAFT, text, GROWTH, sharpness_of(row))
        of_text = after_text(text, trust, drafter.table, drafter.least, drafter.width)
        own = plain_search(of_draft, GROWTH)
        expected = plain_search(of_text, GROWTH, own)
        found = scores_of(tree, row, GROWTH)
        check_best(found, expected, of_either(of_draft, of_text))
        for path, node in paths_of(tree, row).items():
            if path:
                drafted = tree.drafter[row, node] == 0
                counts[0 if drafted else 1] += 1
                assert path in own if drafted else path[-1] in of_text([path[:-1]])[0]
                assert path not in own or drafted
    return counts[0], counts[1]


@pytest.mark.parametrize("name", TRUSTS)
def test_a_tree_holds_the_best_of_both(name):
    """No path twice, which `paths_of` sees to, and each under whose probability it has."""
    trust = TRUSTS[name]
    drafter = hybrid(trust)
    tree, _ = propose(drafter, start(drafter, TEXTS), TEXTS)
    drafted, texted = check(drafter, trust, tree, TEXTS)
    if name == "next to none":
        assert texted == 0
    else:
        assert min(drafted, texted) > 8


def test_a_table_joins_the_text():
    drafter = hybrid(TRUSTS["shared"], random_table(), least=2)
    tree, _ = propose(drafter, start(drafter, TEXTS), TEXTS)
    assert min(check(drafter, TRUSTS["shared"], tree, TEXTS)) > 8


def kinds_of(tree, row: int, path) -> str:
    """Who proposed the nodes of a path: d for the draft, t for the text."""
    nodes = paths_of(tree, row)
    numbers = [nodes[path[:n]] for n in range(1, len(path) + 1)]
    return "".join("dt"[int(tree.drafter[row, number])] for number in numbers)


def longest(nodes, key):
    """The longest path, the same one whatever the order of the nodes."""
    return max(sorted(nodes), key=key)


def along(tree, wish: str):
    """Picks a row's longest path of the draft (d), of the text (t), or of one, then the other."""
    fits = {"d": "d*", "t": "t*", "dt": "(d+t+)?"}[wish]
    rows = iter(range(len(TEXTS)))

    def pick(nodes, key):
        row = next(rows)
        return max((p for p in nodes if re.fullmatch(fits, kinds_of(tree, row, p))), key=key)

    return pick


def held_alike(state, fresh):
    """The draft and the text of one that was stepped, and of one that read everything."""
    length = np.asarray(fresh.draft.held.cache.length)
    np.testing.assert_array_equal(state.draft.held.cache.length, length)
    np.testing.assert_allclose(state.draft.held.logits, fresh.draft.held.logits, atol=3e-4)
    np.testing.assert_array_equal(state.text.length, fresh.text.length)
    pairs = list(zip(state.draft.held.cache.keys, fresh.draft.held.cache.keys, strict=True))
    for row, count in enumerate(length):
        for got, expected in pairs:
            np.testing.assert_allclose(got[row, ..., :count], expected[row, ..., :count], atol=1e-4)
        np.testing.assert_array_equal(
            state.text.tokens[row, :count], fresh.text.tokens[row, :count]
        )


@pytest.mark.parametrize("wish", ["d", "t", "dt"])
@pytest.mark.parametrize("counts", [(3, 2, 3, 9), (9, 9, 9, 0), (4, 1, 9, 3)])
def test_the_draft_after_steps_is_one_that_read_the_text(wish, counts):
    """Along its own nodes, along the text's and from one to the other, of any count."""
    drafter, taken = hybrid(TRUSTS["shared"], random_table(), least=2), set()
    texts, state = TEXTS, start(drafter, TEXTS)
    for _ in range(2):
        tree, state = propose(drafter, state, texts)
        before = texts
        pick = along(tree, wish)
        state, texts = commit(drafter, state, tree, texts, counts, RESTS, pick)
        for row, (old, new) in enumerate(zip(before, texts, strict=True)):
            path = tuple(new[len(old) : -1])
            taken.add(kinds_of(tree, row, path))
        held_alike(state, start(drafter, texts))
    assert any(("dt" if wish == "dt" else 2 * wish) in kinds for kinds in taken), taken
    again, anew = (propose(drafter, at, texts)[0] for at in (state, start(drafter, texts)))
    for row in range(len(texts)):
        assert paths_of(again, row).keys() == paths_of(anew, row).keys()


@pytest.mark.slow
def test_nothing_moves_at_the_end_of_the_cache():
    """A step needs room for its window alone; writes past the last slot would be shifted."""
    drafter = hybrid(TRUSTS["shared"], random_table(), least=2)
    slots = SLOTS - 17
    states = [start(drafter, TEXTS, slots), start(drafter, TEXTS)]
    texts, counts = TEXTS, [1] * 4
    while any(counts):  # the last of these steps gives nothing, as rows do that are done
        counts = [min(slots - drafter.window - len(text), drafter.window) for text in texts]
        texts = both_step(drafter, states, texts, counts)
    assert {len(text) for text in texts} == {slots - drafter.window}
    texts = both_step(drafter, states, texts, [drafter.window] * 4)
    assert max(map(len, texts)) >= slots - 1
    held_alike(*states)


def both_step(drafter, states, texts, counts):
    """The texts after one step of two states that must do the same."""
    after = []
    for n, state in enumerate(states):
        tree, state = propose(drafter, state, texts)
        states[n], made = commit(drafter, state, tree, texts, counts, RESTS, longest)
        after.append(made)
    assert after[0] == after[1]
    return after[0]


def test_a_staged_draft_grows_the_same_tree():
    """And is the same after steps along it."""
    table = TableStage(random_table(), TreeShape((3, (2, 0, 1))), fan=3)
    drafters = [hybrid(TRUSTS["shared"], random_table(), 2, stage=each) for each in (None, table)]
    texts, states = TEXTS, [start(each, TEXTS) for each in drafters]
    for counts in ((9, 9, 1, 0), (2, 3, 9, 1)):
        made = [propose(each, at, texts) for each, at in zip(drafters, states, strict=True)]
        trees, states = [tree for tree, _ in made], [state for _, state in made]
        paths = [[paths_of(tree, row) for row in range(len(texts))] for tree in trees]
        assert [own.keys() for own in paths[0]] == [own.keys() for own in paths[1]]
        after = [
            commit(each, state, tree, texts, counts, RESTS, longest)
            for each, state, tree in zip(drafters, states, trees, strict=True)
        ]
        states, texts = [state for state, _ in after], after[0][1]
        assert after[1][1] == texts
        held_alike(states[1], states[0])
