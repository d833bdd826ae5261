"""The static expansion itself: each trial's distribution, token and place, against plain passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Purpose, Sampling, draw, fold, process
from specjax.draft import ExpansionDrafter, Step, reading
from specjax.measure import distribution_tests
from specjax.models.transformer import Model, trunk
from specjax.trees.accepted import Accepted
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K
from specjax.trees.tree import TokenTree, TreeShape, merge, unmerged
from tests import enumeration, oracles
from tests.conftest import tiny_model
from tests.pairs import PROMPTS, nothing_seen, varied_model

KEY = jax.random.key(11)
SHAPES = (TreeShape((2, 2)), TreeShape((2, 2)))
UNEQUAL = (TreeShape((2, 2)), TreeShape((3,)))
GENERAL = (TreeShape((3, (2, 0, 1), (0, 1, 2))), TreeShape((2, (0, 2), (1, 0))))
SAMPLING = Sampling(temperature=np.array([0.0, 0.8, 1.3, 0.0]), top_k=np.array([0, 0, 9, 5]))
SLOTS, WINDOW = 64, 3
NEW = [[8, 1, 30], [4, 4, 61], [2, 17, 9], [50, 3, 3]]
COUNTS = [1, 3, 2, 3]
DRAFTS = {
    "unrolled": (lambda: [varied_model(1), varied_model(2)], False),
    "stacked": (lambda: [varied_model(1), varied_model(2)], True),
    "unequal": (lambda: [varied_model(1), tiny_model(2, num_layers=2, scale=12.0)], True),
}


def proposed(drafts, shapes, stack, children, committed):
    """The trees of PROMPTS, before or after a commit of COUNTS of NEW; and what they continue."""
    widths = tuple(shape.widths for shape in shapes)
    drafter = ExpansionDrafter.of(drafts, widths, children, stack=stack)
    assert drafter.trees == shapes
    assert drafter.num_slots == 1 + sum(shape.num_nodes for shape in shapes)
    length = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
    padded = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    state, texts = (
        drafter.init(jnp.asarray(padded), length, SLOTS, nothing_seen(padded.shape)),
        PROMPTS,
    )
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(len(texts)))

    def propose(state, texts):
        position = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
        last = jnp.asarray([text[-1] for text in texts], jnp.int32)
        return drafter.propose(keys, position, state, last, SAMPLING.rows(len(texts)))

    tree, state = propose(state, texts)
    if committed:
        count = jnp.asarray(COUNTS)
        accepted = Accepted(jnp.zeros_like(jnp.asarray(NEW)), count, count)
        state = drafter.commit(
            state, Step(jnp.asarray(NEW), count, count < 0, tree, accepted, nothing_seen((4, 3)))
        )
        texts = [[*p, *new[:n]] for p, new, n in zip(PROMPTS, NEW, COUNTS, strict=True)]
        tree, _ = propose(state, texts)
    return jax.tree.map(np.asarray, tree), texts


def path_to(tree: TokenTree, row: int, node: int) -> list[int]:
    """The tokens from below the root down to `node`."""
    path = []
    while node:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path[::-1]


def expanded(shape):
    """For each level the numbers of children of those nodes of the level above that have any."""
    nodes = 1
    for width in shape.widths:
        counts = width if isinstance(width, tuple) else (width,) * nodes
        nodes = sum(counts)
        yield [count for count in counts if count]


def trial_places(shapes):
    """Per trial: which draft made it, its level, its parent among the expanded, its rank."""
    for draft, shape in enumerate(shapes):
        for level, counts in enumerate(expanded(shape)):
            for place, count in enumerate(counts):
                for rank in range(count):
                    yield draft, level, place, rank


def own_distributions(model: Model, prefixes, rows, certain):
    """The draft's logits after whole texts by a plain pass, and the distributions that trials must
    name.
    """
    logits = distribution_tests.logits_after(model, prefixes)
    every = SAMPLING.rows(len(PROMPTS))
    own = jax.tree.map(lambda field: field[np.asarray(rows)], every)
    processed = np.asarray(process(jnp.asarray(logits)[:, None], own)[:, 0])
    plain = np.asarray(jax.nn.softmax(logits, axis=-1))
    return logits, np.where(certain[rows][:, None], plain, processed)


@pytest.mark.slow
@pytest.mark.parametrize("committed", [False, True], ids=["prompt", "committed"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_every_trial_is_what_a_plain_pass_of_its_draft_says(kind, committed):
    check_trials(*DRAFTS[kind], "drawn", committed)


@pytest.mark.slow
@pytest.mark.parametrize("stack", [False, True])
def test_every_draft_may_have_a_tree_of_its_own(stack):
    check_trials(DRAFTS["stacked"][0], stack, "drawn", committed=True, shapes=UNEQUAL)


@pytest.mark.slow
@pytest.mark.parametrize("children", [DRAWN, DISTINCT, TOP_K])
def test_a_node_may_have_children_of_its_own_number(children):
    check_trials(DRAFTS["unrolled"][0], False, children, committed=True, shapes=GENERAL)


@pytest.mark.slow
def test_stacked_drafts_may_have_a_tree_whose_nodes_differ():
    check_trials(*DRAFTS["stacked"], DRAWN, committed=False, shapes=GENERAL[:1] * 2)


def test_a_pass_runs_only_the_nodes_that_have_children(monkeypatch):
    passes = []

    def counted(model, tokens, *rest, **more):
        passes.append(tokens.shape[1])
        return trunk(model, tokens, *rest, **more)

    monkeypatch.setattr(reading, "trunk", counted)
    drafter = ExpansionDrafter.of([tiny_model(1)], (3, (2, 0, 1), (0, 1, 2), (1, 0, 0)))
    one, own = jnp.ones(1, jnp.int32), Sampling().rows(1)

    def made():
        state = drafter.init(one[:, None], one, SLOTS, nothing_seen((one.shape[0], 1)))
        return drafter.propose(KEY[None], one, state, one, own)[0]

    tree = jax.eval_shape(made)
    assert passes == [1, 2, 2, 1]
    assert tree.q.shape[1] == 6


def test_a_first_width_makes_one_tree_for_every_draft():
    models = [tiny_model(1), tiny_model(2)]
    drafter = ExpansionDrafter.of(models, (2, (1, 0)))
    assert drafter.trees == (TreeShape((2, (1, 0))),) * 2
    assert not drafter.construction.chain
    assert ExpansionDrafter.of(models, (1, (1,))).construction.chain
    assert ExpansionDrafter.of(models, ((2, (0, 1)), (1,))).trees[0] == TreeShape((2, (0, 1)))


@pytest.mark.parametrize("widths", [((1,),), ((1,), (1,), (1,)), ((1,), 1)])
def test_trees_must_be_one_a_draft(widths):
    with pytest.raises(ValueError, match="trees are named for 2 drafts"):
        ExpansionDrafter.of([varied_model(1), varied_model(2)], widths)


@pytest.mark.slow
def test_top_k_trees_take_the_most_likely_children_of_sampled_rows_too():
    check_trials(*DRAFTS["unrolled"], TOP_K, committed=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unrolled", "unequal"])
def test_distinct_children_are_drawn_without_replacement(name):
    check_trials(*DRAFTS[name], DISTINCT, committed=True)


def check_trials(make, stack, children, committed, shapes=SHAPES):
    drafts = make()
    tree, texts = proposed(drafts, shapes, stack, children, committed)
    certain = (np.asarray(SAMPLING.temperature) == 0) | (children == TOP_K)
    np.testing.assert_array_equal(tree.certain, certain)
    places = list(trial_places(shapes))
    assert tree.trial_node.shape[1] == len(places) == sum(shape.num_nodes for shape in shapes)
    for draft, model in enumerate(drafts):
        trials = [
            (row, m) for row in range(len(texts)) for m, at in enumerate(places) if at[0] == draft
        ]
        above = [int(tree.parents[row, tree.trial_node[row, m]]) for row, m in trials]
        prefixes = [
            texts[row] + path_to(tree, row, node)
            for (row, _), node in zip(trials, above, strict=True)
        ]
        rows = [row for row, _ in trials]
        logits, distributions = own_distributions(model, prefixes, rows, certain)
        for number, (row, m) in enumerate(trials):
            got = tree.q[row, tree.trial_row[row, m]]
            np.testing.assert_allclose(got, distributions[number], atol=1e-5)
            token = tree.tokens[row, tree.trial_node[row, m]]
            _, level, place, rank = places[m]
            if certain[row]:
                assert token == np.argsort(-logits[number], kind="stable")[rank]
                continue
            key = fold(jax.random.fold_in(KEY, row), len(texts[row]) - 1, Purpose.DRAFT)
            counts = list(expanded(shapes[draft]))[level]
            nodes, width = len(counts), max(counts)
            if children == DISTINCT and width > 1:
                own = fold(key, draft, level)
                race = (
                    np.log(np.maximum(distributions[number], 1e-38))
                    + jax.random.gumbel(own, (nodes, len(got)), mode="high")[place]
                )
                assert token == np.argsort(-race, kind="stable")[rank]
                continue
            noise = jax.random.uniform(fold(key, draft, level), (nodes, width, 2))
            assert token == draw(jnp.asarray(got), noise[place, rank])


@pytest.mark.parametrize(
    "shapes",
    [
        (TreeShape((2, 1)),) * 2,
        (TreeShape((1, 1)), TreeShape((3,))),
        (TreeShape((2, (0, 2))), TreeShape((2, (1, 0)))),
    ],
)
def test_the_pool_merges_the_draws_that_the_enumeration_walks(shapes):
    """Parents, distributions and drafters of several drafts' draws, as `enumeration.Case` numbers
    them.
    """
    p, *qs = (enumeration.table(x) for x in oracles.random_distributions(0, 3, 3, 3))
    case = enumeration.Case(p, tuple(qs), shapes)
    tokens = case.every_draw()[::17]
    widths = tuple(shape.widths for shape in shapes)
    drafter = ExpansionDrafter.of([tiny_model(1), tiny_model(2)], widths, stack=False)
    for certain in (False, True):
        draws = case.draws(tokens, certain)
        root = jnp.zeros(len(tokens), jnp.int32)
        got = drafter._merged(jnp.asarray(tokens, jnp.int32), draws.q, root, draws.certain)
        expected = jax.vmap(lambda draw: merge(draw, jnp.int32(0), 2))(draws)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2), (3,), (2, (0, 2), (1, 0))])
def test_distinct_draws_need_no_merging(widths):
    """A tree made as it is drawn is the merged one, greedy rows and all."""
    distributions = [
        enumeration.table(probs) for probs in oracles.random_distributions(3, 3, len(widths) + 1, 2)
    ]
    case = enumeration.Case(distributions[0], (distributions[1],), TreeShape(widths), distinct=True)
    for certain in (False, True):
        draws = case.draws(case.every_draw()[:200], certain)
        root = jnp.full(draws.tokens.shape[0], 7, jnp.int32)
        expected = jax.vmap(lambda d, r: merge(d, r, len(widths)))(draws, root)
        jax.tree.map(np.testing.assert_array_equal, jax.vmap(unmerged)(draws, root), expected)
