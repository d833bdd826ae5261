"""Token Recycling's table and trees against dictionaries, and what the target really shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.decoding.generate import prefill_jit, step_jit
from specjax.decoding.request import NO_END, Limits, Rows
from specjax.draft import Seen, Step, Wants
from specjax.draft.token_recycling import RecycleDrafter
from specjax.measure import distribution_tests
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TreeShape
from specjax.verify.rules import NAIVE, find_rule
from tests.grown import COMMIT, paths_of, propose, seen_after, start
from tests.pairs import PROMPTS, varied_model

V = 64
SHAPES = {
    "general": TreeShape((3, (2, 0, 1), (0, 2, 1))),
    "even": TreeShape((2, 2, 1)),
    "chain": TreeShape((1, 1, 1, 1)),
}
TEXTS = [[5, 9, 2], [3, 8, 3, 8, 3], [63], [7] * 9]


def drafter_of(shape: TreeShape) -> RecycleDrafter:
    return RecycleDrafter(0.5 ** jnp.arange(1.0, 1 + shape.widest), shape, V)


def plain_tree(table: dict[int, list[int]], last: int, shape: TreeShape):
    """The paths of the shape whose every token is known, and their ranks, level by level."""
    level, found = [()], {}
    for widths in shape.widths:
        counts = widths if isinstance(widths, tuple) else (widths,) * len(level)
        below = []
        for path, count in zip(level, counts, strict=True):
            for rank in range(count):
                after = None if path is None else (path[-1] if path else last)
                known = after in table
                below.append((*path, table[after][rank]) if known else None)
                if known:
                    found[below[-1]] = rank
        level = below
    return found


def shown(top_tokens):
    """What a drafter sees that wants to see likely tokens alone."""
    return Seen(jnp.asarray(top_tokens), jnp.zeros((*np.shape(top_tokens)[:2], 0)))


def noted(table, tokens, seen):
    """The table after some tokens in order, each followed by what was seen: the last one counts."""
    table = dict(table)
    for token, successors in zip(tokens, seen, strict=True):
        table[int(token)] = [int(x) for x in successors]
    return table


def check(drafter, tree, tables, texts):
    for row, text in enumerate(texts):
        expected = plain_tree(tables[row], text[-1], drafter.shape)
        found = paths_of(tree, row)
        assert found.keys() - {()} == expected.keys()
        for path, rank in expected.items():
            assert tree.chance[row, found[path]] == pytest.approx(0.5 ** (rank + 1))
        trials = tree.trial_node[row]
        assert sorted(trials[trials > 0]) == sorted(set(found.values()) - {0})


def tables_equal(state, tables):
    for row, own in enumerate(tables):
        for token in range(V):
            expected = own.get(token, [-1] * state.shape[2])
            assert state[row, token].tolist() == expected


@pytest.mark.parametrize("name", SHAPES)
def test_tables_and_trees_are_those_of_dictionaries(name):
    """After the prompt and after steps that show other successors than before, at every node."""
    shape = SHAPES[name]
    drafter = drafter_of(shape)
    texts, state = TEXTS, start(drafter, TEXTS)
    likely = [seen_after([text], shape.widest).top_tokens[0] for text in texts]
    tables = [noted({}, *both) for both in zip(texts, map(np.asarray, likely), strict=True)]
    sizes, rng = [], np.random.default_rng(0)
    for count in ([1, 2, 0, 2], [2, 0, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2]):
        tables_equal(state, tables)
        tree, state = propose(drafter, state, texts)
        check(drafter, tree, tables, texts)
        sizes.append(tree.valid.sum())
        nodes = tree.tokens.shape
        # of a few tokens, as those of the steps: the next trees know some of what they come to
        seen = np.argsort(rng.random((*nodes, 10)), axis=2)[..., : shape.widest].astype(np.int32)
        length = jnp.asarray(count, jnp.int32)
        known = [rng.choice(sorted(own), drafter.window) for own in tables]
        tokens = jnp.asarray(np.stack(known), jnp.int32)
        accepted = Accepted(jnp.zeros_like(tokens), length, tokens[:, 0])
        grown = jax.tree.map(jnp.asarray, tree)
        step = Step(tokens, length, length < 0, grown, accepted, shown(seen))
        state = COMMIT(drafter, state, step)
        for row, own in enumerate(count):
            there = tree.valid[row] & (own > 0)
            tables[row] = noted(tables[row], tree.tokens[row][there], seen[row][there])
        texts = [[*t, *new[:n]] for t, new, n in zip(texts, tokens.tolist(), count, strict=True)]
    assert min(sizes) > len(texts)


def test_the_last_of_equal_tokens_counts():
    """In a prompt, and among the nodes of a tree."""
    drafter = drafter_of(TreeShape((2, 1)))
    prompt = jnp.asarray([[1, 2, 1, 1]] * 2, jnp.int32)
    seen = jnp.asarray([[[10, 11], [20, 21], [30, 31], [1, 40]]] * 2, jnp.int32)
    state = drafter.init(prompt, jnp.asarray([4, 3], jnp.int32), 16, shown(seen))
    assert state[:, 1].tolist() == [[1, 40], [30, 31]]
    assert state[:, 2].tolist() == [[20, 21]] * 2
    assert (np.delete(np.asarray(state), [1, 2], axis=1) == -1).all()
    tree, state = propose(drafter, state, [[1, 2, 1, 1], [1, 2, 1]], Sampling())
    assert tree.tokens[0].tolist() == [1, 1, 40, 1, 0]
    assert tree.valid.tolist() == [[True, True, True, True, False], [True] * 3 + [False] * 2]


def test_nothing_is_known_of_what_was_not_seen():
    """Unknown successors give no node, and nothing below them, also where others are known."""
    drafter = drafter_of(SHAPES["general"])
    state = jnp.full((1, V, 3), -1, jnp.int32).at[0, 5].set(jnp.asarray([6, 7, 8]))
    tree, _ = propose(drafter, state, [[5]], Sampling())
    assert paths_of(tree, 0).keys() == {(), (6,), (7,), (8,)}
    for field in (tree.tokens, tree.parents, tree.depth, tree.chance, tree.trial_node):
        assert not field[0, -3:].any()
    empty, _ = propose(drafter, jnp.full((1, V, 3), -1, jnp.int32), [[5]], Sampling())
    assert paths_of(empty, 0).keys() == {()}


def target_after(target, texts, count):
    """The target's likeliest tokens after whole texts, by a plain pass."""
    padded = texts + [[0]] * (-len(texts) % 64)
    logits = distribution_tests.logits_after(target, padded)[: len(texts)]
    return np.argsort(-logits, axis=1, kind="stable")[:, :count]


def test_what_is_shown_is_what_the_target_thinks_likely():
    """After every token of the prompts and every node of trees, accepted or not."""
    target, shape = varied_model(), SHAPES["general"]
    drafter, rows = drafter_of(shape), len(PROMPTS)
    length = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
    padded = np.zeros((rows, 40), np.int32)  # more columns than one block of unembedding
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(0), rows)
    limits = Limits(jnp.full(rows, 99, jnp.int32), jnp.full((rows, 1), NO_END, jnp.int32))
    asked = Rows(jnp.asarray(padded), length, keys, Sampling().rows(rows), limits)
    state = prefill_jit(target, drafter, asked, slots=64)
    state = replace(state, done=jnp.asarray([False, False, True, False]))
    tables = []
    for prompt in PROMPTS:
        heads = [prompt[: n + 1] for n in range(len(prompt))]
        tables.append(noted({}, prompt, target_after(target, heads, shape.widest)))
    texts, steps = PROMPTS, 0
    for _ in range(3):
        tables_equal(np.asarray(state.draft), tables)
        state, gave = step_jit(target, drafter, NAIVE, state)
        tree = jax.tree.map(np.asarray, gave.tree)
        check(drafter, tree, tables, texts)
        for row in (0, 1, 3):
            nodes = {node: path for path, node in paths_of(tree, row).items()}
            heads = [[*texts[row], *nodes[node]] for node in sorted(nodes)]
            seen = target_after(target, heads, shape.widest)
            tokens = [head[-1] for head in heads]
            found = np.asarray(gave.seen.top_tokens)[row]
            np.testing.assert_array_equal(found[sorted(nodes)], seen)
            tables[row] = noted(tables[row], tokens, seen)
        count = np.asarray(gave.count).tolist()
        assert count[2] == 0
        steps += sum(count)
        news = np.asarray(gave.tokens).tolist()
        texts = [[*t, *new[:n]] for t, new, n in zip(texts, news, count, strict=True)]
    assert steps > 9  # of 3 rows and 3 steps: a tree was right at least once
    tables_equal(np.asarray(state.draft), tables)


def test_its_trees_are_chosen():
    for name, shape in SHAPES.items():
        drafter = drafter_of(shape)
        assert drafter.wants == Wants(top_tokens=shape.widest)
        assert drafter.window == shape.depth + 1
        assert drafter.num_slots == shape.num_nodes + 1
        assert drafter.construction.chain == (name == "chain")
        assert find_rule("auto", drafter.construction).name == "naive"
