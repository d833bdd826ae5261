"""Lookup in the text, with and without a table, against searches over lists and dictionaries."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.draft import Wants
from specjax.draft.growth import Growth
from specjax.draft.ngram import NO_TOKEN, NGram
from specjax.draft.prompt_lookup import TextDrafter
from specjax.verify.rules import find_rule
from tests.cases import slow_among
from tests.grown import (
    check_best,
    commit,
    paths_of,
    plain_search,
    propose,
    scores_of,
    start,
)
from tests.test_growth import listed, random_table

V = 64
TRUST = (0.0, 0.3, 0.6, 0.8, 0.9)
GROWTH = Growth(budget=24, beams=24, width=3, depth=6)
RNG = np.random.default_rng(0)
TEXTS = [
    [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3, 4, 8, 1, 2, 3],  # matches of every length, several followers
    [7] * 20,  # everything matches everything
    RNG.integers(0, 3, 40).tolist(),  # many followers, many ties
    [63],  # shorter than any match
    [5, 6],
    [9, 8, 9],
]
CASES = {
    "lookup": (None, 1, TRUST),
    "least 2": (None, 2, TRUST),
    "at the table's mercy": (0, 1, (0.0,)),
    "backed off": (0, 1, TRUST),
    "backed off, least 2": (0, 2, TRUST),
    "no trust to spare": (0, 1, (0.0, 0.5, 1.0)),
}


def longest_suffix(before: list[int], whole: list[int]) -> int:
    """How many tokens two lists share at their ends."""
    count = 0
    while count < min(len(before), len(whole)) and before[-1 - count] == whole[-1 - count]:
        count += 1
    return count


def followers(text: list[int], path, trust, least: int, width: int) -> dict[int, float]:
    """What followed earlier matches of a text that goes on along a path, and how likely it is.

    A match weighs 8 times one that is a token shorter. Followers are taken from the weightiest
    place on, the latest of equal ones first, up to `width`.
    """
    whole = [*text, *path]
    places = []
    for at in range(1, len(text)):  # the follower
        count = min(longest_suffix(text[:at], whole), len(trust) - 1)
        if count >= max(least, 1):
            places.append((count, at, text[at]))
    if not places:
        return {}
    longest = max(places)[0]
    total = sum(8.0 ** (count - longest) for count, _, _ in places)
    found = {}
    for _, _, token in sorted(places, reverse=True):
        if token not in found and len(found) < width:
            own = sum(8.0 ** (count - longest) for count, _, other in places if other == token)
            found[token] = own / total * trust[longest]
    return found


def sure_of(text: list[int], path, trust, least: int) -> float:
    """How much the text's followers count beside the table's."""
    whole = [*text, *path]
    counts = [min(longest_suffix(text[:at], whole), len(trust) - 1) for at in range(1, len(text))]
    longest = max(counts, default=0)
    return trust[longest] if longest >= max(least, 1) else 0.0


def after_text(text: list[int], trust, table: NGram | None, least: int, width: int):
    """The children by the text, mixed with those of the table."""
    rows = {} if table is None else listed(table)

    def of_one(path) -> dict[int, float]:
        found = followers(text, path, trust, least, width)
        if table is not None:
            before, last = [NO_TOKEN, *text, *path][-2:]
            rest = 1 - sure_of(text, path, trust, least)
            for token, log_q in rows[before, last].items():
                found[token] = found.get(token, 0.0) + rest * np.exp(log_q)
        return {token: float(np.log(chance)) for token, chance in found.items() if chance > 0}

    return lambda paths: [of_one(path) for path in paths]


def drafter_of(case: str) -> TextDrafter:
    seed, least, trust = CASES[case]
    table = None if seed is None else random_table(seed)
    return TextDrafter(jnp.asarray(trust), table, GROWTH, V, least)


def check(drafter: TextDrafter, tree, texts):
    trust = tuple(np.asarray(drafter.trust, float).tolist())
    nodes = 0
    for row, text in enumerate(texts):
        children = after_text(text, trust, drafter.table, drafter.least, GROWTH.width)
        expected = plain_search(children, GROWTH)
        check_best(scores_of(tree, row, GROWTH), expected, children)
        distributions = {path: children([path])[0] for path in [(), *expected]}
        for path, node in paths_of(tree, row).items():
            if path in expected:
                chance = np.exp(distributions[path[:-1]][path[-1]])
                assert tree.chance[row, node] == pytest.approx(chance, rel=1e-4)
        nodes += len(expected)
    return nodes


@pytest.mark.parametrize(
    "case", slow_among(CASES, "least 2", "at the table's mercy", "no trust to spare")
)
def test_trees_are_those_of_a_plain_search_before_and_after_steps(case):
    """A step gives 0 to all of the window's tokens, along the tree's deepest path or none."""
    drafter = drafter_of(case)
    texts, state = TEXTS, start(drafter, TEXTS)
    tree, state = propose(drafter, state, texts, Sampling())
    assert check(drafter, tree, texts) > 2 * len(texts)
    for counts in ((0, 1, 2, 3, 4, 7), (7, 7, 7, 1, 1, 0)):
        state, texts = commit(drafter, state, tree, texts, counts, (3, 7, 1, 63, 5, 9))
        held = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), state.length.tolist(),
                                                   strict=True)]  # fmt: skip
        assert held == texts
        tree, state = propose(drafter, state, texts, Sampling())
        check(drafter, tree, texts)


def test_a_repeated_text_is_continued():
    """The tree holds what followed before, to its full depth; without a repeat it is empty."""
    drafter = drafter_of("least 2")
    passage = [10, 20, 30, 40, 50, 60, 11, 21]
    texts = [[1, *passage, 2, *passage[:2]], passage]
    tree, _ = propose(drafter, start(drafter, texts), texts, Sampling())
    deepest = max(paths_of(tree, 0), key=len)
    assert deepest == tuple(passage[2:8])
    assert len(deepest) == drafter.window - 1
    assert paths_of(tree, 1).keys() == {()}


def test_the_latest_of_equal_matches_comes_first():
    drafter = TextDrafter(jnp.asarray(TRUST), None, Growth(budget=1, width=1, depth=1), V)
    texts = [[4, 1, 4, 2, 4, 3, 4], [4, 3, 4, 2, 4, 1, 4]]
    tree, _ = propose(drafter, start(drafter, texts), texts, Sampling())
    assert tree.tokens[:, 1].tolist() == [3, 1]
    np.testing.assert_allclose(tree.chance[:, 1], TRUST[1] / 3, rtol=1e-5)


def test_its_trees_are_chosen():
    drafter = drafter_of("lookup")
    assert (drafter.window, drafter.num_slots, drafter.wants) == (7, 25, Wants())
    assert find_rule("auto", drafter.construction).name == "naive"
    with pytest.raises(ValueError, match="multi-step rule is not lossless"):
        find_rule("multi-step", drafter.construction)
