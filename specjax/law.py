"""Draws from the compiled decoder, and tests of them against the target's law."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from specjax import decode
from specjax.arrays import Key
from specjax.draft import Drafter
from specjax.model import Model, forward
from specjax.pytree import replace
from specjax.request import PROMPT_BUCKETS, bucket, prepare
from specjax.sampling import Purpose, Sampling, fold, process
from specjax.sharding import ROWS, Layout, laid_out, layout_of, spread

_ROWS = 128
_LEAST_EXPECTED = 5.0
_BLOCK = 128


class GTest(NamedTuple):
    """A likelihood-ratio test: probability of so large a statistic by chance, and its make-up."""

    p_value: float
    statistic: float
    cells: int
    draws: int


@partial(jax.jit, static_argnames=("size", "layout"))
def _logits_at(model: Model, tokens: Array, last: Array, size: int, layout: Layout | None) -> Array:
    def whole(model: Model, tokens: Array, last: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
        logits = forward(model, tokens, positions, None, None)[0]
        return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]

    return spread(layout, whole, (model,), (P(), P()), P())(model, tokens, last)


def logits_after(model: Model, prefixes: list[list[int]]) -> Float[np.ndarray, "B V"]:
    """The target's logits after whole prefixes, by a plain pass without cache or tree."""
    size = bucket(max(map(len, prefixes)), PROMPT_BUCKETS)
    padded = np.zeros((len(prefixes), size), np.int32)
    for row, prefix in enumerate(prefixes):
        padded[row, : len(prefix)] = prefix
    last = jnp.asarray([len(prefix) - 1 for prefix in prefixes], jnp.int32)
    return np.asarray(_logits_at(model, jnp.asarray(padded), last, size, layout_of(model)))


_step = jax.jit(decode.step_on, static_argnames=("rule", "layout"))


def first_tokens(
    key: Key[Array, ""],
    target: Model,
    drafter: Drafter | None,
    prompt: list[int],
    sampling: Sampling,
    rule: str,
    samples: int,
) -> Int[np.ndarray, "n 2"]:
    """The first two tokens of `samples` continuations of one prompt, sample i keyed by fold i.

    They come from the step that every generation runs; the prompt is read once.
    """
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(-(-samples // _ROWS) * _ROWS))
    many = [prompt] * _ROWS
    asked = prepare(keys[:_ROWS], target, drafter, many, 2, sampling, rule, False)
    layout = asked.layout
    start = decode.prefill_jit(
        target, drafter, asked.prompt, asked.length, asked.key, asked.slots, layout
    )
    drawn = []
    for chunk in range(0, len(keys), _ROWS):
        state = replace(start, key=laid_out(layout, keys[chunk : chunk + _ROWS], ROWS))
        tokens = np.zeros((_ROWS, 2), np.int64)
        made, done = np.zeros(_ROWS, np.int32), np.zeros(_ROWS, bool)
        while not done.all():
            so_far = laid_out(layout, (made, done), ROWS)
            state, gave, ended = _step(
                target, drafter, asked.rule, asked.sampling, asked.limits, state, *so_far, layout
            )
            _append(tokens, made, np.asarray(gave.tokens), np.asarray(gave.count))
            made, done = made + np.asarray(gave.count), np.asarray(ended)
        drawn.append(tokens)
    return np.concatenate(drawn)[:samples]


def _append(tokens: np.ndarray, made: np.ndarray, new: np.ndarray, count: np.ndarray) -> None:
    """Writes each row's new tokens after those it had."""
    for row in range(len(tokens)):
        tokens[row, made[row] : made[row] + count[row]] = new[row, : count[row]]


def g_test(drawn: Int[np.ndarray, " n"], p: Float[np.ndarray, " V"]) -> GTest:
    """Tests that `drawn` tokens follow the law `p`.

    Tokens of which fewer than five are expected are pooled into one cell (joined with the rarest
    other one if even that is small). A token of probability zero fails at once.
    """
    total = len(drawn)
    counts = np.bincount(drawn, minlength=len(p)).astype(np.float64)
    if np.any(counts[p == 0]):
        return GTest(0.0, float("inf"), len(p), total)
    expected = p / p.sum() * total
    own = expected >= _LEAST_EXPECTED
    cells = np.append(expected[own], expected[~own].sum())
    seen = np.append(counts[own], counts[~own].sum())
    if len(cells) > 1 and cells[-1] < _LEAST_EXPECTED:
        rarest = int(np.argmin(cells[:-1]))
        cells[rarest] += cells[-1]
        seen[rarest] += seen[-1]
        cells, seen = cells[:-1], seen[:-1]
    if len(cells) < 2:
        return GTest(1.0, 0.0, len(cells), total)
    some = seen > 0
    statistic = float(2 * np.sum(seen[some] * np.log(seen[some] / cells[some])))
    tail = gammaincc((len(cells) - 1) / 2, max(statistic, 0.0) / 2)
    return GTest(float(tail), statistic, len(cells), total)


def threshold_gap(
    logits: Float[np.ndarray, " V"],
    temperature: float,
    key: Key[Array, ""],
    position: int,
    tokens: tuple[int, int],
) -> float:
    """How far the plain draw at `position` is from falling on the other of two tokens.

    The naive rule and plain decoding draw by inverse distribution with the same two uniforms, the
    first for a block of tokens and the second inside it; a rounding of the law can only move a
    draw across a threshold that its uniform nearly meets. Infinite if no threshold separates the
    tokens, so that no rounding explains them.
    """
    p = np.asarray(process(jnp.asarray(logits)[None, None], Sampling(temperature).rows(1))[0, 0])
    noise = np.asarray(jax.random.uniform(fold(key, position, Purpose.TOKEN), (2,)), np.float64)
    blocks = np.pad(p.astype(np.float64), (0, -len(p) % _BLOCK)).reshape(-1, _BLOCK)
    first, second = sorted(token // _BLOCK for token in tokens)
    if first != second:
        return _distance(blocks.sum(axis=1), noise[0], first, second)
    low, high = sorted(token % _BLOCK for token in tokens)
    return _distance(blocks[first], noise[1], low, high)


def _distance(weight: np.ndarray, uniform: float, low: int, high: int) -> float:
    """The farthest threshold that a uniform must be moved over to pass from entry low to high."""
    running = np.cumsum(weight) / weight.sum()
    between = running[low:high]
    return float(np.max(np.abs(between - uniform))) if len(between) else float("inf")
