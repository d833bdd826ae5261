"""Lookahead decoding against a slow twin, written from the paper's description."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.decoding.generate import prefill_jit, step_jit
from specjax.decoding.request import NO_END, Limits, Rows
from specjax.draft.lookahead import LookaheadDrafter, LookaheadState, Window, _home, kept
from specjax.verify.rules import find_rule
from tests.cases import slow_but
from tests.pairs import NEW, PROMPTS, forward, generate, nothing_seen, varied_model

V = 64
WINDOWS = {"general": Window(3, 4, 3), "bigrams": Window(4, 2, 2), "guesses": Window(2, 3, 0)}


@pytest.fixture(scope="module")
def target():
    return varied_model()


def drafter_of(window: Window) -> LookaheadDrafter:
    return LookaheadDrafter(jnp.float32(0.5), window, V)


def likeliest(target, text: list[int]) -> int:
    """The target's likeliest token after a text."""
    tokens = jnp.asarray([text], jnp.int32)
    at = jnp.arange(len(text), dtype=jnp.int32)[None]
    return int(forward(target, tokens, at, None, None)[0][0, -1].argmax())


class Twin:
    """One row: its guesses, and the last n-grams by their first token's home."""

    def __init__(self, window: Window, prompt: list[int]) -> None:
        self.window, self.homes = window, {}
        number = np.arange(window.rows * window.columns).reshape(window.rows, window.columns)
        self.guesses = np.asarray(prompt)[number * 31 % len(prompt)].tolist()
        for at in range(len(prompt) - window.tokens + 1):
            self.keep(prompt[at : at + window.tokens])

    def keep(self, gram: list[int]) -> None:
        own = self.homes.setdefault(int(_home(jnp.int32(gram[0]), 1024)), [])
        if gram not in own:
            own.append(gram)
            del own[: -self.window.candidates or len(own)]

    def candidates(self, last: int) -> set[tuple[int, ...]]:
        """The paths of the verification branch."""
        own = self.homes.get(int(_home(jnp.int32(last), 1024)), [])
        tails = [tuple(gram[1:]) for gram in own if gram[0] == last]
        return {tail[:count] for tail in tails for count in range(1, len(tail) + 1)}

    def step(self, target, text: list[int], accepted: int) -> None:
        """The guesses a token longer: each sees the first tokens of those before it."""
        new = []
        for column in range(self.window.columns):
            path = self.guesses[0][: column + 1] + [row[column] for row in self.guesses[1:]]
            new.append(likeliest(target, text + path))
        rows = [*self.guesses, new]
        for column in range(self.window.columns):
            self.keep([row[column] for row in rows])
        count = self.window.columns
        self.guesses = [
            [row[(column + accepted) % count] for column in range(count)] for row in rows[1:]
        ]


@pytest.mark.parametrize("name", slow_but(WINDOWS, "general", "guesses"))
def test_trees_and_guesses_are_those_of_the_published_algorithm(name, target):
    window = WINDOWS[name]
    drafter = drafter_of(window)
    prompts = [[5, 9, 2, 5, 9, 7, 5, 9], [1, 4]]
    twins = [Twin(window, prompt) for prompt in prompts]
    rows, texts = len(prompts), [list(prompt) for prompt in prompts]
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    tokens = jnp.asarray([prompt + [0] * (8 - len(prompt)) for prompt in prompts], jnp.int32)
    limits = Limits(jnp.full(rows, 99, jnp.int32), jnp.full((rows, 1), NO_END, jnp.int32))
    keys = jax.random.split(jax.random.key(0), rows)
    asked = Rows(tokens, lengths, keys, Sampling().rows(rows), limits)
    state = prefill_jit(target, drafter, asked, slots=64)
    rule = find_rule("auto", drafter.construction)
    for _ in range(4):
        own: LookaheadState = state.draft
        np.testing.assert_array_equal(own.guesses, [twin.guesses for twin in twins])
        last = jnp.asarray([text[-1] for text in texts], jnp.int32)
        tree, _ = drafter.propose(keys, lengths, own, last, Sampling().rows(rows))
        for row, twin in enumerate(twins):
            assert candidates_in(tree, row, window) == twin.candidates(texts[row][-1])
        before = texts
        state, step = step_jit(target, drafter, rule, state)
        counts = np.asarray(step.count)
        texts = [
            text + np.asarray(step.tokens[row])[: counts[row]].tolist()
            for row, text in enumerate(texts)
        ]
        for row, twin in enumerate(twins):
            twin.step(target, before[row], int(counts[row]) - 1)
    for text, prompt in zip(texts, prompts, strict=True):
        for at in range(len(prompt), len(text)):
            assert text[at] == likeliest(target, text[:at])


def candidates_in(tree, row: int, window: Window) -> set[tuple[int, ...]]:
    """The paths below the root that are no guesses."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, 1 + window.rows * window.candidates):
        if tree.valid[row, node]:
            above = paths[int(tree.parents[row, node])]
            paths[node] = (*above, int(tree.tokens[row, node]))
    assert len(set(paths.values())) == len(paths), "equal paths stand once"
    return set(paths.values()) - {()}


@pytest.mark.parametrize("name", slow_but(WINDOWS, "general"))
def test_texts_are_those_of_plain_decoding(name, target):
    drafter = drafter_of(WINDOWS[name])
    found = generate(target, drafter, PROMPTS, max_new_tokens=NEW)
    np.testing.assert_array_equal(found.tokens, generate(target, None).tokens)


def test_the_last_ngrams_of_many_are_kept_and_none_twice():
    window = Window(2, 3, 2)
    state = drafter_of(window).init(
        jnp.asarray([[7, 1, 2, 7, 3, 4, 7, 5, 6, 7]], jnp.int32), jnp.asarray([9], jnp.int32), 9,
        nothing_seen((1, 10)),
    )  # fmt: skip
    home = int(_home(jnp.int32(7), 1024))
    held = {tuple(gram) for gram in np.asarray(state.grams[0, home]).tolist()}
    assert held == {(7, 3, 4), (7, 5, 6)}
    again = jnp.asarray([[[7, 5, 6], [7, 8, 8], [7, 8, 8], [7, 9, 9]]], jnp.int32)
    there = jnp.asarray([[True, True, True, False]])
    state = kept(state, again, there)
    held = {tuple(gram) for gram in np.asarray(state.grams[0, home]).tolist()}
    assert held == {(7, 5, 6), (7, 8, 8)}
