"""The compiled step's sampled distribution, in float32, against p from plain decoding: G-tests.

`generate_jit` runs on many rows of one prompt, each with its own key, and the first three tokens
of all rows are counted. Top-k leaves 3 tokens, hence 27 cells.
"""

import dataclasses
import functools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int32

from specjax.base import sampling
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, process
from specjax.decoding import stepping
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import NO_END, Limits, Rows
from specjax.draft import ExpansionDrafter, static
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.lookahead import LookaheadDrafter, LookaheadState, Window, kept
from specjax.draft.plain import PlainDrafter
from specjax.draft.retrieval import RetrievalDrafter, corpus_of
from specjax.draft.suffix import SuffixDrafter
from specjax.draft.token_recycling import RecycleDrafter
from specjax.measure.distribution_tests import g_test
from specjax.models.pruning import pruned
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, TOP_K
from specjax.trees.tree import TreeShape, root_only
from specjax.verify import rules, token_wise
from specjax.verify.rules import BLOCK, MULTI_STEP, NAIVE, ONE_HOT, RECURSIVE, TRAVERSAL
from tests.cases import slow_but
from tests.pairs import (
    alone,
    block_draft,
    broken,
    head,
    mtp_layer,
    near,
    varied_model,
    with_activations_of,
)

pytestmark = pytest.mark.long_running
PROMPT = [7, 41, 3, 19]
KEPT, TOKENS = 3, 3
ROWS, BATCHES = 8192, 12
FAMILY_WISE = 1e-6
BIAS = 0.02
UNKNOWN = 0  # of tokens modulo 3
SLOTS = 16  # prompt, tokens, and the window of one more step


def pool(target: Model) -> ExpansionDrafter:
    return ExpansionDrafter.of([near(target, 1, 0.3), near(target, 2, 0.3)], (1, 1))


def near_tree(target: Model, children: str) -> ExpansionDrafter:
    return alone(near(target, 1, 0.3), (2, 1), children=children)


def best_first(target: Model) -> BestFirstDrafter:
    growth = Growth(budget=4, beams=2, width=2, depth=2)
    return BestFirstDrafter(near(target, 1, 0.3), jnp.ones(2), growth)


def hybrid(target: Model) -> HybridDrafter:
    draft = replace(best_first(target), second=recycled(target))
    return HybridDrafter(draft, jnp.asarray([0.0, 0.3]), None, least=1)


def recycled(target: Model) -> RecycleDrafter:
    return RecycleDrafter(jnp.full(2, 0.4), TreeShape((2, (1, 0))), target.config.vocab_size)


@pytree
class Primed(LookaheadDrafter):
    """Lookahead decoding that has n-grams of likely texts, as after many steps.

    Of several equal siblings: a guess says what a candidate does.
    """

    grams: Int32[Array, "M N"]

    def init(self, *of) -> LookaheadState:
        state = super().init(*of)
        rows, (count, size) = state.newest.shape[0], self.grams.shape
        grams = jnp.broadcast_to(self.grams, (rows, count, size))
        guesses = state.guesses.at[:, :, 0].set(self.grams[0, 1:])
        return replace(kept(state, grams, jnp.ones((rows, count), bool)), guesses=guesses)


def lookahead(target: Model) -> LookaheadDrafter:
    likely = sorted(expected(), key=lambda text: -expected()[text])
    first = [[PROMPT[-1], *text[:2]] for text in likely[:2]]
    grams = jnp.asarray([*first, *(list(text) for text in likely[:4])], jnp.int32)
    return Primed(jnp.float32(0.5), Window(2, 3, 2), target.config.vocab_size, grams)


def retrieved(target: Model, kind=RetrievalDrafter) -> RetrievalDrafter:
    """From likely texts, and two that begin elsewhere."""
    likely = sorted(expected(), key=lambda text: -expected()[text])[:6]
    corpus = corpus_of([*([*PROMPT[2:], *text] for text in likely), [3, 19, 5], [1, 2]])
    growth = Growth(budget=4, beams=2, width=2, depth=2)
    return kind(corpus, jnp.asarray([0, 0.4, 0.6]), growth, target.config.vocab_size)


def suffixes(target: Model) -> RetrievalDrafter:
    """After such texts."""
    return retrieved(target, SuffixDrafter)


def some_tokens(target: Model) -> Model:
    """A draft that knows two tokens of three; 0.77 of the target's texts have one of the others."""
    whole = near(target, 1, 0.3)
    return pruned(whole, np.flatnonzero(np.arange(target.config.vocab_size) % 3 != UNKNOWN))


CASES = {
    "plain": (lambda target: None, NAIVE),
    "naive": (lambda target: alone(near(target, 1, 0.3), (1, 1)), NAIVE),
    "tree": (lambda target: alone(near(target, 1, 0.3), (2, 1)), MULTI_STEP),
    "distinct": (lambda target: near_tree(target, DISTINCT), RECURSIVE),
    "from the leaves": (lambda target: near_tree(target, DISTINCT), TRAVERSAL),
    "a block": (lambda target: alone(near(target, 1, 0.3), (1, 1)), BLOCK),
    "chosen": (lambda target: near_tree(target, TOP_K), ONE_HOT),
    "best first": (best_first, ONE_HOT),
    "hybrid": (hybrid, ONE_HOT),
    "recycled": (recycled, NAIVE),
    "retrieved": (retrieved, ONE_HOT),
    "suffix": (suffixes, ONE_HOT),
    "lookahead": (lookahead, NAIVE),
    "lookahead, one-hot": (lookahead, ONE_HOT),
    "not a number": (lambda target: alone(broken(target, np.nan), (2, 1)), MULTI_STEP),
    "not a number, from the leaves": (
        lambda target: alone(broken(target, np.nan), (2, 1), children=DISTINCT),
        TRAVERSAL,
    ),
    "not a number, a block": (lambda target: alone(broken(target, np.nan), (1, 1)), BLOCK),
    "pool": (pool, MULTI_STEP),
    "pruned": (lambda target: alone(some_tokens(target), (1, 1)), NAIVE),
    "pruned, a tree": (lambda target: alone(some_tokens(target), (2, 1)), MULTI_STEP),
    "pruned, distinct": (
        lambda target: alone(some_tokens(target), (2, 1), children=DISTINCT),
        RECURSIVE,
    ),
    "pruned, from the leaves": (
        lambda target: alone(some_tokens(target), (2, 1), children=DISTINCT),
        TRAVERSAL,
    ),
    "pruned, a block": (lambda target: alone(some_tokens(target), (1, 1)), BLOCK),
    "pruned, chosen": (
        lambda target: replace(best_first(target), model=some_tokens(target)),
        ONE_HOT,
    ),
    "a head": (lambda target: alone(head(target, 3, 40), (1, 1)), BLOCK),
    "a block in one pass": (lambda target: alone(block_draft(target, 3), (1, 1)), BLOCK),
    "a block's tree": (lambda target: alone(block_draft(target, 3), (2, 1)), MULTI_STEP),
    "a block, best first": (
        lambda target: replace(best_first(target), model=block_draft(target, 3)),
        ONE_HOT,
    ),
    "multi-token prediction": (lambda target: alone(mtp_layer(target, 3), (1, 1)), BLOCK),
    "a head's tree": (lambda target: alone(head(target, 3), (2, 1)), MULTI_STEP),
    "a head's tree, from the leaves": (
        lambda target: alone(head(target, 3, 40), (2, 1), children=DISTINCT),
        TRAVERSAL,
    ),
    "a head, best first": (
        lambda target: replace(best_first(target), model=head(target, 3)),
        ONE_HOT,
    ),
    "a pool of heads": (
        lambda target: ExpansionDrafter.of([head(target, 3), head(target, 4, 40)], ((2, 1), (1,))),
        MULTI_STEP,
    ),
    "pruned beside a whole one": (
        lambda target: ExpansionDrafter.of([some_tokens(target), near(target, 2, 0.3)], (1, 1)),
        MULTI_STEP,
    ),
}
LEVEL = FAMILY_WISE / len(CASES)


@functools.cache
def target() -> Model:
    return varied_model(hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)


def warm(rows: int) -> Sampling:
    return Sampling(temperature=1.3, top_k=KEPT).rows(rows)


def rows_of(prompt, length, keys) -> Rows:
    """Rows that draw three tokens each, whatever these are."""
    count = prompt.shape[0]
    limits = Limits(jnp.full(count, TOKENS, jnp.int32), jnp.full((count, 1), NO_END, jnp.int32))
    return Rows(prompt, length, keys, warm(count), limits)


def probs_after(texts: list[list[int]]) -> np.ndarray:
    """p after whole texts, as plain decoding computes it."""
    model, length = target(), jnp.asarray([len(text) for text in texts], jnp.int32)
    padded = np.zeros((len(texts), len(PROMPT) + TOKENS), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text

    @jax.jit
    def probs(prompt, length):
        keys = jax.random.split(jax.random.key(0), len(texts))
        rows = rows_of(prompt, length, keys)
        state = stepping.prefill(model, PlainDrafter(model.config.vocab_size), rows, SLOTS)
        tree = root_only(state.last, model.config.vocab_size)
        return process(stepping.score_tree(model, tree, state).logits, warm(len(texts)))[:, 0]

    return np.asarray(probs(jnp.asarray(padded), length), float)


@functools.cache
def expected() -> dict[tuple[int, ...], float]:
    """The probability of every text of three tokens that p allows."""
    found = {(): 1.0}
    for _ in range(TOKENS):
        distributions = probs_after([PROMPT + list(text) for text in found])
        found = {
            (*text, int(token)): mass * probs[token]
            for (text, mass), probs in zip(found.items(), distributions, strict=True)
            for token in np.flatnonzero(probs)
        }
    return found


def texts_of(
    drafter, rule, run=generate_jit, batches=BATCHES, model=None, impl="threefry2x32"
) -> tuple[np.ndarray, float]:
    """The cell of each row's text among `expected`, and the mean of tokens per step."""
    model = target() if model is None else model
    prompt = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (ROWS, 1))
    length = jnp.full(ROWS, len(PROMPT), jnp.int32)
    drafter = PlainDrafter(model.config.vocab_size) if drafter is None else drafter
    cells = {text: cell for cell, text in enumerate(expected())}
    found, passes = [], 0
    for batch in range(batches):
        keys = jax.random.split(jax.random.key(batch, impl=impl), ROWS)
        rows = rows_of(prompt, length, keys)
        made = run(model, drafter, rows, rule=rule, outputs=TOKENS, slots=SLOTS)
        assert (made.lengths == TOKENS).all()
        found += [cells[tuple(text)] for text in np.asarray(made.tokens).tolist()]
        passes += int(made.steps.sum())
    return np.array(found), len(found) * TOKENS / passes


def planted(p: np.ndarray) -> np.ndarray:
    """p with a total variation of BIAS moved where it shows least: in proportion to p itself."""
    up = np.zeros(len(p), bool)
    for cell in np.argsort(-p):
        up[cell] = p[up].sum() <= p.sum() / 2 - p[cell] / 2
    biased = np.where(up, p * (1 + BIAS / p[up].sum()), p * (1 - BIAS / p[~up].sum()))
    assert np.abs(biased - p).sum() / 2 == pytest.approx(BIAS)
    return biased


def distributions() -> np.ndarray:
    return np.array(list(expected().values()))


@pytest.mark.parametrize("name", slow_but(CASES, "a block"))
def test_sampled_distribution_is_that_of_plain_decoding(name):
    """And some drafts are rejected, some accepted: a distribution of one step alone would show
    little.
    """
    make, rule = CASES[name]
    found, per_step = texts_of(make(target()), rule)
    assert g_test(found, distributions()).p_value > LEVEL
    assert g_test(found, planted(distributions())).p_value < LEVEL, "no power on these draws"
    if name == "plain" or name.startswith("not a number"):
        assert per_step == 1
    else:
        assert 1.1 < per_step < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "tree", "from the leaves", "a block", "pool"])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_sampled_distribution_is_that_of_plain_decoding_whatever_the_keys(impl, name):
    make, rule = CASES[name]
    found, per_step = texts_of(make(target()), rule, batches=4, impl=impl)
    assert g_test(found, distributions()).p_value > LEVEL
    assert 1.1 < per_step < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "from the leaves", "a block"])
def test_trees_cut_off_by_the_context_keep_the_distribution(name):
    """A first tree has positions for its first level, those after it have none."""
    config = dataclasses.replace(target().config, max_positions=len(PROMPT) + 1)
    make, rule = CASES[name]
    found, per_step = texts_of(
        make(target()), rule, batches=4, model=replace(target(), config=config)
    )
    assert g_test(found, distributions()).p_value > LEVEL
    assert 1.1 < per_step < texts_of(make(target()), rule, batches=1)[1] - 0.05


def keep_p(probs, q, token):
    """A trial that hands the distribution on as it was."""
    return token_wise.multi_step(probs, q, token)._replace(residual=probs)


def forget_position(key, *numbers):
    """Keys that are the same at every step."""
    return sampling.fold(key, *numbers[1:])


def forget_drafter(key, *numbers):
    """Keys that are the same for every draft: its number is the only traced one alone."""
    alone = len(numbers) == 1 and not isinstance(numbers[0], int)
    return key if alone else sampling.fold(key, *numbers)


WRONG = {
    "noise reused across steps": (rules, "fold", forget_position, "tree"),
    "noise of a block reused": (rules, "fold", forget_position, "a block"),
    "one key for all drafters": (static, "fold", forget_drafter, "pool"),
    "residual not taken": (rules, "walk", partial(rules.walk, rule=keep_p), "tree"),
}


@pytest.mark.slow
def test_activations_in_8_bits_keep_the_distribution(monkeypatch):
    """That of the model that multiplies them."""
    whole = target()
    model = with_activations_of(whole, "int8")
    make, rule = CASES["tree"]
    monkeypatch.setattr(sys.modules[__name__], "target", lambda: model)
    try:
        expected.cache_clear()
        found, per_step = texts_of(make(whole), rule, batches=2)
        assert g_test(found, distributions()).p_value > LEVEL
        assert 1.1 < per_step < 2.2
    finally:
        expected.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_caught(name, monkeypatch):
    module, attribute, wrong, case = WRONG[name]
    monkeypatch.setattr(module, attribute, wrong)
    make, rule = CASES[case]

    def afresh(*models, **options):  # a function of its own, or jax would take the right program
        return generate_jit.__wrapped__(*models, **options)

    wrong = jax.jit(afresh, static_argnames=("rule", "outputs", "slots"))
    found, _ = texts_of(make(target()), rule, wrong, batches=4)
    assert g_test(found, distributions()).p_value < LEVEL


def test_power_on_draws_of_a_biased_distribution():
    """A distribution off by BIAS is caught for every one of 200 seeds, a fair one for none."""
    p = distributions() / distributions().sum()
    draw = partial(np.random.default_rng(0).choice, len(p), ROWS * BATCHES)
    found = [g_test(draw(p=planted(p)), p).p_value for _ in range(200)]
    assert max(found) < LEVEL
    assert min(g_test(draw(p=p), p).p_value for _ in range(200)) > 1e-4


def test_the_tested_distribution_is_neither_flat_nor_sure():
    first: dict[int, float] = {}
    for text, mass in expected().items():
        first[text[0]] = first.get(text[0], 0) + mass
    assert len(distributions()) == KEPT**TOKENS
    assert distributions().sum() == pytest.approx(1, abs=1e-5)
    assert min(first.values()) > 0.05
    assert max(first.values()) < 0.8
