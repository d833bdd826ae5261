"""Texts under grammars: their distribution through trees, and texts that match."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.base import grammars
from specjax.base.grammars import Grammars, allowed, allows, masked, none_of, registered
from specjax.base.sampling import Sampling
from specjax.decoding import stepping
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.static import ExpansionDrafter
from specjax.grammar import GrammarCompiler
from specjax.measure.distribution_tests import g_test
from specjax.methods.registry import build, names_of, setting_of
from specjax.trees.construction import DISTINCT
from tests.cases import slow_but
from tests.pairs import alone, generate, head, near, varied_model

VOCABULARY, END, TOKENS, ROWS, BATCHES = 12, 0, 3, 512, 4
LEVEL = 1e-6
PROMPT = [7, 3, 9]


def may_follow(text: tuple[int, ...]) -> set[int]:
    """A made-up grammar: no token is a multiple of its place, and none is the one before; a text
    that came to 5 ends there.
    """
    if text and text[-1] == 5:
        return {END}
    own = {t for t in range(1, VOCABULARY) if t % (2 + len(text)) and (not text or t != text[-1])}
    return own | ({END} if len(text) > 1 else set())


class Table:
    """Follows `may_follow`, and says when it is asked for what it may not be."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def words(self) -> np.ndarray:
        bits = np.zeros(32, np.uint8)
        bits[list(may_follow(tuple(self.text)))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, tokens) -> int:
        for number, token in enumerate(tokens):
            assert token != END
            if token not in may_follow(tuple(self.text)):
                return number
            self.text.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[-count:]

    def is_end(self, token: int) -> bool:
        return token == END

    def error(self) -> str:
        return ""

    def matcher(self) -> "Table":
        return Table()


@functools.cache
def target() -> specjax.Model:
    return varied_model(
        vocab_size=VOCABULARY, eos_ids=(END,), hidden_size=16, intermediate_size=16, num_heads=2,
        num_kv_heads=1,
    )  # fmt: skip


def probs_after(texts: list[tuple[int, ...]]) -> np.ndarray:
    """The target's distribution among the allowed tokens after texts, by one pass of each."""
    tokens = jnp.asarray([PROMPT + list(text) for text in texts], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    logits = np.asarray(
        stepping.unembed(target(), stepping.trunk(target(), tokens, at, None, None).x)
    )
    logits = logits.T.reshape(*tokens.shape, -1)[:, -1].astype(float) / 1.3
    for own, text in zip(logits, texts, strict=True):
        own[[t for t in range(VOCABULARY) if t not in may_follow(text)]] = -np.inf
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@functools.cache
def expected() -> dict[tuple[int, ...], float]:
    """The probability of every text, of three tokens or ended before."""
    whole, open_texts = {}, {(): 1.0}
    for place in range(TOKENS):
        found = {}
        for text, probs in zip(open_texts, probs_after([*open_texts]), strict=True):
            for token in may_follow(text):
                longer = (*text, token)
                ended = token == END or place == TOKENS - 1
                (whole if ended else found)[longer] = open_texts[text] * probs[token]
        open_texts = found
    return whole


def best_first(budget: int = 3) -> BestFirstDrafter:
    return BestFirstDrafter(near(target(), 1, 0.4), jnp.ones(2), Growth(budget, 1, 2, 2, 0.9))


CASES = {
    "plain": (lambda: None, "auto"),
    "chain, block": (lambda: alone(near(target(), 1, 0.4), (1, 1)), "block"),
    "chain, naive": (lambda: alone(near(target(), 1, 0.4), (1, 1)), "naive"),
    "drawn, multi-step": (lambda: alone(near(target(), 1, 0.4), (2, 1)), "multi-step"),
    "distinct, recursive": (
        lambda: alone(near(target(), 1, 0.4), (3, 1), children=DISTINCT), "recursive"
    ),
    "distinct, traversal": (
        lambda: alone(near(target(), 1, 0.4), (3, 2), children=DISTINCT), "traversal"
    ),
    "pool, multi-step": (
        lambda: ExpansionDrafter.of([near(target(), 1, 0.4), near(target(), 2, 0.8)], (1, 1)),
        "multi-step",
    ),
    "stacked pool": (
        lambda: ExpansionDrafter.of(
            [near(target(), 1, 0.4), near(target(), 2, 0.8)], (1, 1), stack=True
        ),
        "multi-step",
    ),
    "best first, naive": (best_first, "naive"),
    "best first, one-hot": (best_first, "one-hot"),
    "a head": (lambda: alone(head(target(), 3), (2, 1)), "multi-step"),
}  # fmt: skip


def found_texts(drafter, rule: str, seed: int) -> tuple[list[tuple[int, ...]], float]:
    made = generate(
        target(), drafter, [PROMPT] * ROWS, key=jax.random.key(seed), max_new_tokens=TOKENS,
        sampling=Sampling(temperature=1.3), verify=rule, grammar=Table(), stop_at_eos=False,
    )  # fmt: skip
    texts = zip(made.tokens.tolist(), made.lengths, strict=True)
    return [tuple(own[:length]) for own, length in texts], made.tokens_per_step.mean()


@pytest.mark.parametrize("name", slow_but(CASES, "drawn, multi-step", "best first, one-hot"))
def test_texts_are_distributed_as_the_targets_among_the_allowed_tokens(name):
    make, rule = CASES[name]
    cells = {text: cell for cell, text in enumerate(expected())}
    found, rates = [], []
    for seed in range(BATCHES):
        texts, rate = found_texts(make(), rule, seed)
        found += [cells[text] for text in texts]
        rates.append(rate)
    p = np.array([*expected().values()])
    assert p.sum() == pytest.approx(1)
    assert g_test(np.array(found), p).p_value > LEVEL
    assert (np.mean(rates) > 1.1) == (name != "plain")
    assert grammars.num_rows() == 0
