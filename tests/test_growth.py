"""How trees grow: every option of a growth against a plain search over a table's successors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax.base.pytree import pytree
from specjax.base.sampling import Sampling
from specjax.draft.growth import Growth, Likely, Source, grow, join, no_nodes, roots, tree_of
from specjax.draft.ngram import NO_TOKEN, NGram, pack
from specjax.draft.prompt_lookup import TextDrafter
from tests.grown import check_best, paths_of, plain_search, propose, scores_of, start
from tests.pairs import PROMPTS

V, W = 64, 6
# the width is of no account here: it is that of what follows in the text
GROWTHS = {
    "all that wait": Growth(budget=30, width=1, beams=30, depth=6),
    "few beams": Growth(budget=30, width=1, beams=3, depth=6),
    "one beam": Growth(budget=9, width=1, beams=1, depth=9, decay=0.9999),
    "by level": Growth(budget=30, width=1, beams=3, depth=6, by_level=True),
    "by level, one beam": Growth(budget=12, width=1, beams=1, depth=8, by_level=True),
    "least gain": Growth(budget=40, width=1, beams=40, depth=9, least_gain=0.3),
    "both": Growth(budget=40, width=1, beams=4, depth=9, least_gain=0.1, by_level=True),
    "one level": Growth(budget=30, width=1, beams=4, depth=1),
    "more slots than nodes": Growth(budget=70, width=1, beams=70, depth=2),
}


def random_table(seed: int = 0, sure: float = 1.0) -> NGram:
    """Successors of every token and of a third of all pairs, the larger `sure` the more peaked."""
    rng = np.random.default_rng(seed)
    contexts = np.argwhere(rng.random((V, V)) < 1 / 3)
    rows = V + len(contexts)
    tokens = np.argsort(rng.random((rows, V)), axis=1)[:, :W]
    noise = sure * rng.gumbel(size=(rows, W + 1))  # the last one is what the table leaves out
    log_q = noise - np.log(np.exp(noise).sum(axis=1, keepdims=True))
    return pack(contexts, tokens, np.sort(log_q[:, :W], axis=1)[:, ::-1])


def listed(table: NGram) -> dict[tuple[int, int], dict[int, float]]:
    """What a table says after every context, without its hash function."""
    slots, tokens, log_q = (np.asarray(x) for x in (table.slots, table.tokens, table.log_q))
    rows = {(int(a), int(b)): int(row) for a, b, row in slots if b != NO_TOKEN}
    found = {}
    for a in range(NO_TOKEN, V):
        for b in range(V):
            row = rows.get((a, b), b)
            found[a, b] = dict(zip(tokens[row].tolist(), log_q[row].tolist(), strict=True))
    return found


def after_table(table: NGram, text: list[int]):
    """The children that a table alone gives."""
    rows = listed(table)

    def children(paths):
        ends = [[NO_TOKEN, *text, *path][-2:] for path in paths]
        return [rows[before, last] for before, last in ends]

    return children


def by_table(table: NGram, growth: Growth) -> TextDrafter:
    return TextDrafter(jnp.zeros(1), table, growth, V)


@pytest.mark.parametrize("sure", [1.0, 4.0])
@pytest.mark.parametrize("name", GROWTHS)
def test_a_tree_is_that_of_a_plain_search(name, sure):
    growth, table = GROWTHS[name], random_table(sure=sure)
    drafter = by_table(table, growth)
    tree, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    for row, text in enumerate(PROMPTS):
        children = after_table(table, text)
        expected = plain_search(children, growth)
        assert len(expected) >= W
        check_best(scores_of(tree, row, growth), expected, children)


@pytest.mark.parametrize("name", ["by level", "least gain", "both", "few beams"])
def test_an_option_makes_a_difference(name):
    """Or the test above would pass without it."""
    growth, table = GROWTHS[name], random_table()
    whole = Growth(budget=growth.budget, width=1, beams=growth.budget, depth=growth.depth)
    other = Growth(growth.budget, growth.beams, 1, depth=growth.depth)
    plain = whole if name in ("few beams", "least gain") else other
    found = [
        [plain_search(after_table(table, text), each).keys() for text in PROMPTS]
        for each in (growth, plain)
    ]
    assert found[0] != found[1]


def halves() -> NGram:
    """Tokens below 32 are followed by such tokens, any of them; the others nearly surely by one."""
    tokens = (np.arange(V)[:, None] * 3 + 5 * np.arange(W)) % 32 + 32 * (np.arange(V)[:, None] > 31)
    flat, peaked = -2.0 - 0.1 * np.arange(W), -0.02 - 4.0 * np.arange(W)
    log_q = np.where(np.arange(V)[:, None] > 31, peaked, flat)
    return pack(np.zeros((0, 2), int), tokens, log_q)


@pytest.mark.parametrize(
    "growth",
    [
        GROWTHS["few beams"],
        Growth(budget=100, width=1, beams=4, depth=9, least_gain=0.1, by_level=True),
    ],
    ids=["few beams", "room left"],
)
def test_a_row_has_the_tree_that_it_has_alone(growth):
    """Rows stop at different rounds; what the others do then is nothing to them."""
    drafter = by_table(halves(), growth)
    batch, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    depths = batch.depth.max(axis=1)
    assert depths[2] > max(depths[0], depths[1], depths[3])
    for row, text in enumerate(PROMPTS):
        alone, _ = propose(drafter, start(drafter, [text]), [text], Sampling())
        for name_of in ("tokens", "parents", "depth", "valid", "chance", "trial_node"):
            got, mine = getattr(alone, name_of)[0], getattr(batch, name_of)[row]
            np.testing.assert_array_equal(got, mine)


def test_growth_goes_on_where_float32_shows_no_gain():
    """Next to a certain chain even many unlikely nodes are nothing; they are still the best."""
    growth = Growth(budget=40, width=1, beams=40, depth=5, decay=0.9999)
    log_q = np.tile([-1e-6, -20.0, -21.5], (V, 1))
    tokens = (np.arange(V)[:, None] * 3 + np.array([1, 2, 5])) % V
    table = pack(np.zeros((0, 2), int), tokens, log_q)
    drafter = by_table(table, growth)
    tree, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    for row, text in enumerate(PROMPTS):
        children = after_table(table, text)
        expected = plain_search(children, growth)
        assert len(paths_of(tree, row)) == growth.budget + 1
        check_best(scores_of(tree, row, growth), expected, children)


def test_impossible_tokens_are_no_nodes():
    table = pack(np.zeros((0, 2), int), np.tile([1, 2], (V, 1)), np.tile([-0.1, -np.inf], (V, 1)))
    drafter = by_table(table, Growth(budget=7, width=1, depth=4))
    tree, _ = propose(drafter, start(drafter, PROMPTS), PROMPTS)
    for row in range(len(PROMPTS)):
        assert paths_of(tree, row).keys() == {(1,) * n for n in range(5)}


@pytree
class Successors(Source):
    """A row of tokens and log probabilities for every token, whatever they are."""

    tokens: Array
    log_q: Array

    def of(self, last):
        return Likely(self.tokens[last], self.log_q[last])

    def after(self, nodes, scored, carry):
        return self.of(jnp.take_along_axis(nodes.tokens, scored.slots, axis=1)), carry

    def hold(self, carry, made, slots):
        return carry


def far(seed: int) -> Successors:
    """A token is followed by one surely, and by others hardly: many equals far from 0."""
    drawn = np.random.default_rng(seed)
    tokens = np.argsort(drawn.random((V, V)), axis=1)[:, :W]
    log_q = -drawn.choice(FAR, (V, W)).astype(np.float32)
    log_q[:, 0] = 0
    return Successors(jnp.asarray(tokens, jnp.int32), jnp.asarray(np.sort(log_q)[:, ::-1]))


@partial(jax.jit, static_argnums=2)
def trees_of(source, last, growth):
    rows = last.shape[0]
    nodes = no_nodes(rows, growth.budget)
    nodes, _, growing = join(nodes, roots(rows), source.of(last[:, None]), growth)
    return tree_of(grow(source, growth, nodes, (), growing)[0], last, V)[0]


FAR = [0.0, 40_000.0, 40_000.0, 40_000.5, 50_000.0, 70_000.0]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [2, 3])
def test_a_child_scores_below_its_parent_however_low_both_are(beams):
    """Where a float32 has no room for log(decay), a tie could push out a parent, not its child.

    The child then hung below whatever came into its parent's slot.
    """
    growth = Growth(budget=12, beams=beams, width=W, depth=8, decay=0.999)
    for seed in range(30):
        source, last = far(seed), jnp.arange(V, dtype=jnp.int32)
        tree = jax.tree.map(np.asarray, trees_of(source, last, growth))
        for row in range(V):
            for *above, token in filter(None, paths_of(tree, row)):
                assert token in source.tokens[above[-1] if above else row]
