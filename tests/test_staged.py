"""Stages that guess for a draft: the tree is the draft's own, and takes fewer passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.draft import Wants, best_first
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth, ScoredNodes, no_nodes
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.ngram import NGram, pack
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.staged import TableStage
from specjax.draft.token_recycling import RecycleDrafter
from specjax.measure.distribution_tests import logits_after
from specjax.models.transformer import Model
from specjax.trees.construction import TOP_K
from specjax.trees.tree import TreeShape
from tests.grown import (
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
from tests.pairs import PROMPTS, alone, near, varied_model
from tests.test_growth import listed, random_table

V = 64
GENERAL = TreeShape((3, (2, 0, 1)))
# Every node that waits is expanded: then the tree is that of the best nodes, whatever is guessed.
GROWTHS = {
    "small": Growth(budget=10, beams=10, width=3, depth=5),
    "deep": Growth(budget=8, beams=8, width=2, depth=8, decay=0.9999),
    "wide": Growth(budget=30, beams=30, width=8, depth=3, decay=0.5),
    "one level": Growth(budget=5, beams=5, width=9, depth=1),
}
TRUST = jnp.asarray([0.0, 0.3, 0.6])


def of_last(model: Model, mask: float = 0.0) -> Model:
    """A model that looks at the last token alone: its distribution is a table; with some `mask`,
    nearly.
    """
    dim = tuple(replace(layer, output=mask * layer.output) for layer in model.layers)
    return replace(model, layers=dim)


DRAFT = of_last(varied_model(1), mask=0.5)  # so that a table may be right, and attention counts


def exact_table(model: Model, sharpness: float, width: int, worst: bool = False) -> NGram:
    """What a model that looks at the last token alone will find likely; or the least likely."""
    logits = np.asarray(logits_after(model, [[token] for token in range(V)]), float) / sharpness
    log_q = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(log_q if worst else -log_q, axis=1, kind="stable")[:, :width]
    return pack(np.zeros((0, 2), int), best, np.take_along_axis(log_q, best, axis=1))


def blind_table() -> NGram:
    """What the draft would find likely if it saw the last token alone."""
    return exact_table(of_last(DRAFT), 1.0, 4)


def best_first_of(model: Model, growth: Growth, **stages) -> BestFirstDrafter:
    return BestFirstDrafter(model, jnp.asarray(TEMPERATURES), growth, **stages)


def other(growth: Growth, **stages) -> BestFirstDrafter:
    """A smaller best-first tree of another draft."""
    return best_first_of(near(DRAFT, 2, 0.4), growth, **stages)


def hybrid() -> HybridDrafter:
    return HybridDrafter(other(Growth(budget=7, beams=2, width=3, depth=4)), TRUST, None, 1)


STAGES = {
    "table": lambda: {"table": TableStage(blind_table(), TreeShape((3, 2, (2, 0, 1, 0, 0, 1))), 4)},
    "more fans than beams": lambda: {"table": TableStage(blind_table(), GENERAL, fan=99)},
    "itself": lambda: {"second": best_first_of(DRAFT, GROWTHS["small"])},
    "expansion": lambda: {"second": alone(near(DRAFT, 1), GENERAL.widths, children=TOP_K)},
    "text": lambda: {"second": TextDrafter(TRUST, random_table(), Growth(9, width=2, depth=4), V)},
    "best first": lambda: {"second": other(Growth(budget=7, beams=2, width=3, depth=4))},
    "hybrid": lambda: {"second": hybrid()},
    "both": lambda: {
        "table": TableStage(blind_table(), GENERAL, fan=3),
        "second": other(
            Growth(budget=6, depth=9, width=2),
            second=RecycleDrafter(jnp.full(2, 0.2), TreeShape((2, 1)), V),
        ),
    },
}
CASES = [
    *(
        pytest.param("small", stage, marks=pytest.mark.slow)
        for stage in STAGES
        if stage != "more fans than beams"
    ),
    pytest.param("deep", "both", marks=pytest.mark.slow),
    ("wide", "more fans than beams"),
    pytest.param("one level", "expansion", marks=pytest.mark.slow),
]


def trees_equal(one, others):
    """As sets of paths, each with the same probability."""
    for row in range(len(PROMPTS)):
        mine, theirs = paths_of(one, row), paths_of(others, row)
        assert mine.keys() == theirs.keys()
        for path, node in mine.items():
            assert one.chance[row, node] == pytest.approx(
                others.chance[row, theirs[path]], rel=1e-3
            )


def held_alike(state, fresh):
    """Drafts that have read the same."""
    np.testing.assert_array_equal(state.held.cache.length, fresh.held.cache.length)
    np.testing.assert_allclose(state.held.logits, fresh.held.logits, atol=3e-4)


@pytest.mark.parametrize(("growth", "stage"), CASES)
def test_stages_do_not_change_the_tree(growth, stage):
    """Nor do steps along it: afterwards all is as after reading the whole text."""
    plain, staged = (best_first_of(DRAFT, GROWTHS[growth], **own) for own in ({}, STAGES[stage]()))
    texts, state = PROMPTS, start(staged, PROMPTS)
    counts = [(1, 2, 3, 9), (9, 9, 1, 0)] if growth in ("small", "deep") else []
    for step in (*counts, None):
        fresh = start(plain, texts)
        held_alike(state, fresh)
        expected, _ = propose(plain, fresh, texts)
        tree, state = propose(staged, state, texts)
        trees_equal(tree, expected)
        if step is not None:
            state, texts = commit(staged, state, tree, texts, step, (5, 9, 33, 60))


@pytest.mark.slow
def test_a_second_stage_reads_what_the_draft_reads():
    """Even where it has a tree of its own: the step's path is not in that one."""
    staged = best_first_of(DRAFT, GROWTHS["small"], **STAGES["hybrid"]())
    texts, state = PROMPTS, start(staged, PROMPTS)
    for counts in ((1, 2, 3, 9), (9, 9, 1, 0)):
        tree, state = propose(staged, state, texts)
        state, texts = commit(staged, state, tree, texts, counts, (5, 9, 33, 60))
    fresh = start(staged.second, texts)
    held_alike(state.second.draft, fresh.draft)
    got, expected = (propose(staged.second, at, texts)[0] for at in (state.second, fresh))
    trees_equal(got, expected)


def test_a_table_guesses_below_the_likeliest_nodes_in_its_shape():
    """Every guess is what the table says after the two tokens up to it, in the order of ranks."""
    table, rows = random_table(), listed(random_table())
    none = no_nodes(1, 5)
    nodes = replace(none, tokens=jnp.asarray([[8, 30, 41, 7, 0]], jnp.int32),
                    parents=jnp.asarray([[-1, 0, 1, -1, -1]], jnp.int32))  # fmt: skip
    paths = {0: [5, 8], 1: [5, 8, 30], 2: [5, 8, 30, 41], 3: [5, 7]}
    slots, score = jnp.asarray([[2, 3, 1, 0]], jnp.int32), jnp.zeros((1, 4))
    scored = ScoredNodes(
        slots, score, jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), jnp.int32), 0
    )
    made = TableStage(table, GENERAL, fan=3).guess(nodes, scored, jnp.asarray([5], jnp.int32))
    texts = [paths[slot] for slot in (2, 3, 1, 0)]
    for guess, above in zip(made.guesses[0].tolist(), made.above[0].tolist(), strict=True):
        texts.append([*texts[above], guess])
    hung = [[text for text in texts[4:] if text[:-1] == above] for above in texts]
    for above, below in zip(texts, hung, strict=True):
        expected = list(rows[above[-2], above[-1]])[: len(below)]
        assert [text[-1] for text in below] == expected
    assert [len(below) for below in hung] == [3, 3, 3, 0, *([2, 0, 1] * 3), *([0] * 9)]
    assert (made.levels, made.guesses.shape) == (2, (1, 18))


@pytest.mark.slow
def test_few_beams_may_find_another_tree_but_of_the_same_draft():
    """A search that stops short stops elsewhere when it sees more; no probability is made up."""
    growth = Growth(budget=10, beams=1, width=3, depth=6)
    staged = best_first_of(DRAFT, growth, **STAGES["both"]())
    tree, _ = propose(staged, start(staged, PROMPTS), PROMPTS)
    whole = Growth(budget=10, beams=10, width=3, depth=6)
    for row, text in enumerate(PROMPTS):
        children = children_of(DRAFT, text, growth, sharpness_of(row))
        found = scores_of(tree, row, growth)
        assert len(found) == growth.budget
        check_best(found, found, children)
        for path, score in found.items():
            log_q = children([path[:-1]])[0][path[-1]]
            above = found.get(path[:-1], 0.0)
            assert score == pytest.approx(above + log_q + np.log(growth.decay), abs=1e-3)
        best = plain_search(children, whole)
        assert sum(found.values()) <= sum(best.values()) + 1e-3


def passes_of(drafter: BestFirstDrafter, monkeypatch, texts=PROMPTS) -> tuple[int, list]:
    """How often `propose` runs the draft, and the trees."""
    ran = []
    real = best_first.run

    def counted(*arguments):
        jax.debug.callback(lambda: ran.append(1))
        return real(*arguments)

    monkeypatch.setattr(best_first, "run", counted)
    through = jax.jit(lambda drafter, *rest: drafter.propose(*rest))  # its own: traced afresh
    tree, _ = propose(drafter, start(drafter, texts), texts, Sampling(temperature=0.0), through)
    jax.effects_barrier()
    monkeypatch.undo()
    return len(ran), [paths_of(tree, row).keys() for row in range(len(texts))]


CHAIN = Growth(budget=6, beams=6, width=1, depth=6)


@pytest.mark.slow
def test_guesses_that_are_right_save_passes_of_a_chain(monkeypatch):
    """A pass covers the node that stands and as many levels as the table's stage has.

    The second stage has one pass, and then the draft goes on alone.
    """
    blind = of_last(DRAFT)
    table = exact_table(blind, TEMPERATURES[0], 3)
    stages = [
        ({"table": TableStage(table, TreeShape((1, 1)))}, 2),
        ({"second": alone(blind, (1, 1, 1), children=TOP_K)}, 3),
        ({"second": alone(blind, (1,) * 6, children=TOP_K)}, 1),
    ]
    plain = passes_of(best_first_of(blind, CHAIN), monkeypatch)
    assert plain[0] == 5
    for own, passes in stages:
        found = passes_of(best_first_of(blind, CHAIN, **own), monkeypatch)
        assert found == (passes, plain[1])


@pytest.mark.slow
def test_guesses_of_the_whole_distribution_save_passes_of_a_tree_and_wrong_ones_cost_none(
    monkeypatch,
):
    blind, growth = of_last(DRAFT), GROWTHS["small"]
    plain = passes_of(best_first_of(blind, growth), monkeypatch)
    assert plain[0] > 2
    for worst in (False, True):
        table = exact_table(blind, TEMPERATURES[0], 3, worst)
        stage = TableStage(table, TreeShape((3, 3)), fan=10)
        passes, paths = passes_of(best_first_of(blind, growth, table=stage), monkeypatch)
        assert paths == plain[1]
        assert passes == plain[0] if worst else passes < plain[0]


def test_a_broken_second_stage_changes_nothing():
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, np.nan), varied_model(2))
    growth = GROWTHS["small"]
    plain = best_first_of(DRAFT, growth)
    staged = best_first_of(DRAFT, growth, second=best_first_of(broken, growth))
    trees = [propose(each, start(each, PROMPTS), PROMPTS)[0] for each in (plain, staged)]
    trees_equal(*trees)


def test_stages_that_cannot_be_are_refused():
    stage = TableStage(random_table(), TreeShape((6,)))
    with pytest.raises(ValueError, match="has 7 children; the table lists 6 successors"):
        replace(stage, shape=TreeShape((1, 7)))
    with pytest.raises(ValueError, match="fan is 0; it must be at least 1"):
        replace(stage, fan=0)
    by_level = Growth(budget=6, by_level=True)
    for own in ({"table": stage}, {"second": alone(DRAFT)}):
        with pytest.raises(ValueError, match="growth by level takes no second stage"):
            best_first_of(DRAFT, by_level, **own)
    assert best_first_of(DRAFT, by_level).wants == Wants()
    assert best_first_of(DRAFT, GROWTHS["small"], **STAGES["both"]()).wants == Wants(top_tokens=2)
