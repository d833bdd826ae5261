"""Draws from the compiled decoder, and tests of them against the target's distribution."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float, Int

from specjax.base.axes import Key
from specjax.base.progress import counted
from specjax.base.pytree import replace
from specjax.base.sampling import Purpose, Sampling, fold, process
from specjax.decoding.generate import begin
from specjax.decoding.generate import steps as steps_of
from specjax.decoding.logits import logits_at
from specjax.decoding.request import PROMPT_BUCKETS, bucket, prepare, row_keys
from specjax.draft import Drafter
from specjax.models.transformer import Model
from specjax.parallel.mesh import ROWS, laid_out

_ROWS = 128
_STEPS = 4
_LEAST_EXPECTED = 5.0
_EARLY = 4
"""Every how manieth row is done early."""
_TESTED, _PASS_ROWS = 768, 32
"""Texts whose steps are tested for independence, and how many a plain pass reads."""
_SIDE, _PER_CELL = 4, 10
"""Most cells along a side of the unit square, and the least points expected in one."""
_BLOCK = 128


class GTest(NamedTuple):
    """A likelihood-ratio test: probability of so large a statistic by chance, and its make-up."""

    p_value: float
    statistic: float
    cells: int
    draws: int


class Texts(NamedTuple):
    """Drawn continuations of one prompt: row i's first `length[i]` tokens, zeros after them.

    Its step s emitted its tokens from `starts[i, s]` on; -1 where the row took no such step.
    """

    tokens: Int[np.ndarray, "n L"]
    length: Int[np.ndarray, " n"]
    starts: Int[np.ndarray, "n S"]


def logits_within(
    model: Model, texts: list[list[int]], columns: Int[np.ndarray, "B n"]
) -> Float[np.ndarray, "B n V"]:
    """The target's logits after tokens `columns` of whole texts, by a plain pass."""
    size = bucket(max(map(len, texts)), PROMPT_BUCKETS)
    padded = np.zeros((len(texts), size), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return np.asarray(logits_at(model, jnp.asarray(padded), jnp.asarray(columns, jnp.int32)))


def logits_after(model: Model, prefixes: list[list[int]]) -> Float[np.ndarray, "B V"]:
    """The target's logits after whole prefixes, by a plain pass without cache or tree."""
    last = np.asarray([[len(prefix) - 1] for prefix in prefixes])
    return logits_within(model, prefixes, last)[:, 0]


def draw_texts(
    key: Key[Array, ""],
    target: Model,
    drafter: Drafter,
    prompt: list[int],
    sampling: Sampling,
    rule: str,
    samples: int,
) -> Texts:
    """`samples` continuations of one prompt, of at least two tokens each; sample i has key i.

    They come from the step that every generation runs; the prompt is read once. Rows of a batch
    end at different times, as those of users do: one of four, the first among them, is done after
    two steps, the others after four (after two where the context has no room for four). Noise that
    hangs on a row that is done would repeat itself in the others.
    """
    window = drafter.window
    room = target.config.max_positions - len(prompt)
    sure = -(-room // window)  # steps that every row has room for, whatever the others drew
    steps = _STEPS if sure >= _STEPS else _STEPS // 2
    most = max(min(room, steps * window), 2)
    keys = row_keys(key, -(-samples // _ROWS) * _ROWS)
    asked = prepare(
        keys[:_ROWS], target, drafter, [prompt] * _ROWS, max_new_tokens=most, sampling=sampling,
        verify=rule, stop_at_eos=False,
    )  # fmt: skip
    start = begin(asked)
    first = np.arange(_ROWS) % _EARLY == 0
    early = laid_out(asked.layout, jnp.asarray(first), ROWS)
    found = []
    for chunk in _told("texts drawn", len(keys), _ROWS):
        own = laid_out(asked.layout, keys[chunk : chunk + _ROWS], ROWS)
        state = replace(jax.tree.map(jnp.copy, start), key=own)  # whose buffers are given away
        tokens, starts = np.zeros((_ROWS, most), np.int64), np.full((_ROWS, steps), -1)
        made, done, taken = np.zeros(_ROWS, np.int32), np.zeros(_ROWS, bool), 0
        for several in (_STEPS // 2, steps - _STEPS // 2):
            for after, gave in itertools.islice(steps_of(asked, state), several):
                state = after
                starts[:, taken] = np.where(done | (taken >= sure), -1, made)
                count = np.asarray(gave.count)
                _append(tokens, made, np.asarray(gave.tokens), count)
                made, done, taken = made + count, np.asarray(gave.done), taken + 1
            state = replace(state, done=state.done | early)
            done = done | first
        found.append(Texts(tokens, made, starts))
    return Texts(*(np.concatenate(each)[:samples] for each in zip(*found, strict=True)))


def _told(what: str, count: int, size: int) -> Iterator[int]:
    """The starts of pieces of `size`, as a task."""
    with counted(what) as progress:
        for start in range(0, count, size):
            progress(start, count)
            yield start


def _append(tokens: np.ndarray, made: np.ndarray, new: np.ndarray, count: np.ndarray) -> None:
    """Writes each row's new tokens after those it had."""
    for row in range(len(tokens)):
        tokens[row, made[row] : made[row] + count[row]] = new[row, : count[row]]


def independence(
    model: Model, prompt: list[int], drawn: Texts, sampling: Sampling, seed: int
) -> GTest:
    """Tests that what a step draws knows nothing of what the step before it drew.

    The first token of a step has a place in the distribution function of its distribution; that of
    two steps is a uniform point of the unit square, whatever the texts are (Rosenblatt 1952). The
    last two steps are counted in square cells: noise that repeats itself puts points on the
    diagonal. `sampling` holds scalars.
    """
    steps = drawn.starts.shape[1]
    tested = np.flatnonzero(drawn.starts[:, -1] >= 0)[:_TESTED]
    texts = Texts(*(each[tested] for each in drawn))
    noise, points = np.random.default_rng(seed), [np.zeros((0, 2))]
    for first in _told("texts tested", len(tested), _PASS_ROWS):
        part = Texts(*(each[first : first + _PASS_ROWS] for each in texts))
        at = part.starts[:, steps - 2 :]
        points.append(_places(model, prompt, part, at, sampling, noise))
    pairs = np.concatenate(points)
    side = int(np.clip(np.sqrt(len(pairs) / _PER_CELL), 1, _SIDE))
    row, column = np.clip(pairs * side, 0, side - 1).astype(int).T
    return g_test(row * side + column, np.full(side**2, 1 / side**2))


def _places(
    model: Model,
    prompt: list[int],
    part: Texts,
    at: Int[np.ndarray, "n k"],
    sampling: Sampling,
    noise: np.random.Generator,
) -> Float[np.ndarray, "n k"]:
    """The places of the tokens `at` in the distribution functions of their distributions."""
    rows = len(part.tokens)
    texts = [
        [*prompt, *text[:n]] for text, n in zip(part.tokens.tolist(), part.length, strict=True)
    ]
    texts += [texts[0]] * (_PASS_ROWS - rows)  # one compiled size
    columns = np.zeros((_PASS_ROWS, at.shape[1]), int)
    columns[:rows] = at
    logits = logits_within(model, texts, columns + len(prompt) - 1)[:rows]
    probs = np.asarray(process(jnp.asarray(logits), sampling.rows(rows)), np.float64)
    token = np.take_along_axis(part.tokens, at, axis=1)[..., None]
    upto = np.take_along_axis(np.cumsum(probs, axis=-1), token, axis=-1)[..., 0]
    own = np.take_along_axis(probs, token, axis=-1)[..., 0]
    return (upto - own * noise.uniform(size=own.shape)) / probs.sum(axis=-1)


def g_test(drawn: Int[np.ndarray, " n"], p: Float[np.ndarray, " V"]) -> GTest:
    """Tests that `drawn` tokens follow the distribution `p`.

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
    first for a block of tokens and the second inside it; a rounding of the distribution can only
    move a draw across a threshold that its uniform nearly meets. Infinite if no threshold separates
    the tokens, so that no rounding explains them.
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
