"""From logits to the distribution p of the next token, and draws from a distribution.

One processor serves plain decoding, drafting and verification, so that p means the same
everywhere. Its order is transformers': bias and penalties (`specjax.base.penalties`), temperature,
top-k, top-p, min-p.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.platform import platform
from specjax.base.axes import Key, KeyArray, UInt32
from specjax.base.pytree import pytree, static

_BLOCK = 128
"""Tokens of the second level of a draw. One level over 128k tokens in float32 gave a total
variation of 2.6e-3 and never drew 16,020 tokens of one distribution (2026-11-20)."""


_RANGES = {
    "temperature": (np.float32, 0.0, np.inf, "[0, inf]"),
    "top_k": (np.int32, 0, np.iinfo(np.int32).max, f"[0, {np.iinfo(np.int32).max}]"),
    "top_p": (np.float32, np.nextafter(np.float32(0), np.float32(1)), 1.0, "(0, 1]"),
    "min_p": (np.float32, 0.0, 1.0, "[0, 1]"),
    "presence_penalty": (np.float32, -100.0, 100.0, "[-100, 100]"),
    "frequency_penalty": (np.float32, -100.0, 100.0, "[-100, 100]"),
    "repetition_penalty": (np.float32, 0.01, 100.0, "[0.01, 100]"),
}
NUMBERS = tuple(_RANGES)
"""The names of the numbers of `Sampling`."""
_COLDEST = 1e-20
"""Lower temperatures give the same distribution, but would make logits infinite."""


_THREEFRY = "threefry2x32"


GREEDY, FULL, LIMITED = "greedy", "full", "limited"
"""What is known of a batch where its program is traced: all rows are greedy; some are sampled, none
of them with top-k or top-p; or some with."""


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key, so that no two uses share one."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TOKEN = 3


@pytree
class Sampling:
    """How to sample, per row: scalars, or arrays `[B]` where rows differ.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, presence and frequency penalties of
    0 and a repetition penalty of 1 are off. `logit_bias` maps token ids to what is added to their
    logits, or is a list of such mappings, one a row. Bias and penalties come first, in
    transformers' order, with every node of a tree penalized by its own path
    (`specjax.base.penalties`).

    `kind` is set by `rows` on accelerators, where programs are compiled for it, as branches that
    data decides are dear there; leave it out.
    """

    temperature: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 0.0
    top_k: Int[Array, "*B"] | Int[np.ndarray, "*B"] | int | np.integer = 0
    top_p: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 1.0
    min_p: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 0.0
    presence_penalty: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 0.0
    frequency_penalty: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 0.0
    repetition_penalty: Float[Array, "*B"] | Float[np.ndarray, "*B"] | float | np.floating = 1.0
    logit_bias: Any = None
    kind: str | None = static(default=None)

    def rows(self, count: int) -> "Sampling":
        """The same with every number an array `[count]`, checked; biases are left out.

        Raises:
          TypeError, ValueError: see `on_host`.
        """
        numbers = self.on_host(count)
        kind = None if platform() == "cpu" else _kind_of(numbers)
        return Sampling(**{name: jnp.asarray(own) for name, own in numbers.items()}, kind=kind)

    def on_host(self, count: int, prefix: str = "sampling.") -> dict[str, np.ndarray]:
        """Every number by its name as an array `[count]` of the host, checked; biases are left out.

        Raises:
          TypeError: a field does not hold numbers, or whole ones where it must.
          ValueError: a field is out of its range or has another number of rows, or a float32 makes
            nothing or infinity of a temperature. It calls the field by `prefix` and its name.
        """
        return {name: checked_number(name, getattr(self, name), count, prefix) for name in NUMBERS}


def checked_number(name: str, given: Any, count: int, prefix: str = "") -> np.ndarray:
    """A number of `Sampling` as an array `[count]` of the host.

    Raises:
      TypeError, ValueError: see `Sampling.on_host`.
    """
    dtype, low, high, interval = _RANGES[name]
    value = np.asarray(given)
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != count):
        raise ValueError(f"{prefix}{name} has shape {value.shape}; there are {count} prompts.")
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    if not whole and (dtype is np.int32 or not jnp.issubdtype(value.dtype, jnp.floating)):
        kind = "integers" if dtype is np.int32 else "numbers"
        raise TypeError(f"{prefix}{name} is {value.tolist()!r}; it must be {kind}.")
    if not np.all((value >= low) & (value <= high)):
        raise ValueError(f"{prefix}{name} is {value.tolist()}; it must lie in {interval}.")
    if name == "temperature":
        _check_float32(value, prefix)
    return np.broadcast_to(value, (count,)).astype(dtype)


def _kind_of(numbers: Mapping[str, np.ndarray]) -> str:
    """What is known of all rows."""
    if np.all(numbers["temperature"] <= 0):
        return GREEDY
    limited = (numbers["top_k"] > 0) | (numbers["top_p"] < 1)
    return LIMITED if np.any(limited & (numbers["temperature"] > 0)) else FULL


def _check_float32(temperature: np.ndarray, prefix: str) -> None:
    single = np.finfo(np.float32)
    within = (temperature >= single.tiny) & (temperature <= single.max)
    if not np.all(within | (temperature == 0) | np.isinf(temperature)):
        raise ValueError(
            f"{prefix}temperature is {temperature.tolist()}; a float32 holds 0, "
            f"{single.tiny:.3g} to {single.max:.3g}, and inf."
        )


def process(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """The distribution of the next token at each node, `sampling` holding arrays `[B]`.

    A temperature of 0 gives the one-hot distribution of the largest logit (the lowest id of a tie).
    Ties at the edge of top-k and top-p are kept.
    """
    greedy = is_greedy(sampling)[:, None, None]
    top = most_likely(logits)[..., None]
    one_hot = (jnp.arange(logits.shape[-1]) == top).astype(logits.dtype)
    if sampling.kind == GREEDY:
        return one_hot
    return jnp.where(greedy, one_hot, sampled_probs(logits, sampling, is_greedy(sampling)))


def sampled_probs(
    logits: Float[Array, "B N V"], sampling: Sampling, plain: Bool[Array, " B"]
) -> Float[Array, "B N V"]:
    """The distribution of the next token at each node of rows of a temperature above 0.

    That of `plain` rows is the softmax of their logits, whatever their sampling.
    """
    temperature = jnp.where(plain, 1, jnp.maximum(jnp.asarray(sampling.temperature), _COLDEST))
    temperature = temperature[:, None, None].astype(logits.dtype)
    wide = _Limits(
        top_k=jnp.where(plain, 0, sampling.top_k)[:, None, None],
        top_p=jnp.where(plain, 1, sampling.top_p)[:, None, None],
        min_p=jnp.where(plain, 0, sampling.min_p)[:, None, None],
    )
    scaled = logits / temperature
    if sampling.kind is None:
        limited = jnp.any((wide.top_k > 0) | (wide.top_p < 1))
        scaled = lax.cond(limited, _limit, lambda x, _: x, scaled, wide)
    elif sampling.kind == LIMITED:
        scaled = _of_top_p(_of_top_k(scaled, wide), wide)
    best = logits.max(axis=-1, keepdims=True) / temperature  # no limit takes a number away
    p = jnp.exp(scaled - best)  # over that of the likeliest
    p = jnp.where(p >= wide.min_p, p, 0)
    return p / p.sum(axis=-1, keepdims=True)


def most_likely(scores: Float[Array, "*B V"]) -> Int32[Array, "*B"]:
    """The token of the largest score, the lowest id of a tie; the last one if a score is NaN.

    Two plain reductions: XLA:CPU's argmax over 9 × 4096 scores took 100 µs, this 24.
    """
    token = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    best = scores == scores.max(axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, token, token[-1]), axis=-1)


def largest(
    scores: Float[Array, "*B V"], count: int
) -> tuple[Float[Array, "*B k"], Int32[Array, "*B k"]]:
    """The `count` largest scores, in descending order, and their tokens, as `lax.top_k`.

    They lie in as many blocks, those with the largest maxima: XLA:CPU's own top 15 of 4 × 4096
    takes 19 µs, this 9. A NaN may be passed over.
    """
    size = scores.shape[-1]
    width = 1 << max(0, (size // count).bit_length() // 2)
    blocks = -(-size // width)
    if blocks <= 2 * count:
        best, token = lax.top_k(scores, count)
        return best, token.astype(jnp.int32)
    spare = [(0, 0)] * (scores.ndim - 1) + [(0, blocks * width - size)]
    cut = jnp.pad(scores, spare, constant_values=-jnp.inf)
    cut = cut.reshape(*scores.shape[:-1], blocks, width)
    held = jnp.sort(lax.top_k(cut.max(axis=-1), count)[1], axis=-1)
    among = jnp.take_along_axis(cut, held[..., None], axis=-2)
    best, place = lax.top_k(among.reshape(*scores.shape[:-1], count * width), count)
    token = jnp.take_along_axis(held, place // width, axis=-1) * width + place % width
    return best, token.astype(jnp.int32)


class _Limits(NamedTuple):
    """What of a distribution is kept, as arrays `[B, 1, 1]`."""

    top_k: Array
    top_p: Array
    min_p: Array


def _limit(scaled: Float[Array, "B N V"], wide: _Limits) -> Float[Array, "B N V"]:
    """Logits with everything outside top-k, then outside top-p, at minus infinity."""
    scaled = lax.cond(jnp.any(wide.top_k > 0), _of_top_k, lambda x, _: x, scaled, wide)
    return lax.cond(jnp.any(wide.top_p < 1), _of_top_p, lambda x, _: x, scaled, wide)


def _of_top_k(scaled: Float[Array, "B N V"], wide: _Limits) -> Float[Array, "B N V"]:
    """Logits with everything outside top-k at minus infinity."""
    vocabulary = scaled.shape[-1]
    k = jnp.where(wide.top_k > 0, jnp.minimum(wide.top_k, vocabulary), vocabulary)
    return jnp.where(scaled >= _edge(scaled, jnp.int32(1), k), scaled, -jnp.inf)


def _of_top_p(scaled: Float[Array, "B N V"], wide: _Limits) -> Float[Array, "B N V"]:
    """Logits with everything outside top-p at minus infinity."""
    mass = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    share = wide.top_p * mass.sum(axis=-1, keepdims=True)
    share = jnp.maximum(share, jnp.finfo(mass.dtype).tiny)  # a CPU rounds what is less to nothing
    least = jnp.where(wide.top_p < 1, share, jnp.inf)
    return jnp.where(scaled >= _edge(scaled, mass, least), scaled, -jnp.inf)


def _edge(
    scores: Float[Array, "B N V"],
    weight: Float[Array, "B N V"] | Int32[Array, ""],
    least: Float[Array, "B #N 1"] | Int32[Array, "B #N 1"],
) -> Float[Array, "B N 1"]:
    """The largest number such that scores from it on weigh `least`; -inf if all weigh less.

    `least` is more than nothing.

    It is found digit by digit, from numbers in their order: a sum over all scores for each value of
    a digit. Digits are of one bit on a CPU, where sums cost: a sort of the scores of 17 nodes took
    12 ms for 4,096 tokens and 519 for 128,256, the distributions with top-p 0.6 and 26 (`python -m
    benchmarks.sampling_limits`; two cores of an AMD EPYC, jax 0.10.2, 2026-11-22). Elsewhere they
    are of four, as rounds cost: 32 of them took 1.1 ms on an H100, a sort 0.2 to 1.2 (jax 0.11.2,
    2026-11-26).
    """
    kind = jnp.dtype(f"int{8 * scores.dtype.itemsize}")
    ends = np.iinfo(kind)
    width = 1 if platform() == "cpu" else 4
    digits = jnp.arange(1, 1 << width, dtype=kind)
    counted = jnp.broadcast_to(weight, scores.shape)[..., None, :]

    def number(place: Int[Array, "B N d"]) -> Float[Array, "B N d"]:
        bits = jnp.where(place < 0, place ^ ends.max, place)
        return lax.bitcast_convert_type(bits, scores.dtype)

    def narrowed(turn: Int[Array, ""], place: Int[Array, "B N 1"]) -> Int[Array, "B N 1"]:
        shift = (ends.bits - width * (1 + turn)).astype(kind)
        past = scores[..., None, :] >= number(place + lax.shift_left(digits, shift))[..., None]
        above = jnp.where(past, counted, 0).sum(axis=-1)
        digit = jnp.sum(above >= least, axis=-1, keepdims=True, dtype=kind)
        return place + lax.shift_left(digit, shift)

    # Places past infinity's are no numbers, from which no score is on: none of them is passed, and
    # none overflows.
    infinity = lax.bitcast_convert_type(jnp.asarray(-jnp.inf, scores.dtype), kind) ^ ends.max
    start = jnp.full((*scores.shape[:-1], 1), infinity, kind)
    return number(lax.fori_loop(0, ends.bits // width, narrowed, start))


def threefry(key: Key[Array, "*B"] | UInt32[Array, "*B w"]) -> Key[Array, "*B"]:
    """`key` as one of threefry, which hashes all words of a key of another implementation.

    jax batches the generator behind `rbg` and `unsafe_rbg` by the first key alone: under `vmap` all
    rows would draw from the key and the position of row 0. Threefry's draws depend on each key.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if jax.random.key_impl(key) == _THREEFRY:
        return key
    words = jax.random.key_data(key)
    made = jax.random.key(0, impl=_THREEFRY)
    for index in range(words.shape[-1]):
        word = words[..., index]
        made = _folded(jnp.broadcast_to(made, word.shape), word)
    return made


_folded = jnp.vectorize(jax.random.fold_in)


def fold(key: KeyArray, *numbers: int | Int[Array, ""]) -> KeyArray:
    """`key`, as threefry's, folded with each number in turn."""
    key = threefry(key)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def draw(p: Float[Array, " V"], uniform: Float[Array, "2"]) -> Int32[Array, ""]:
    """A token of distribution `p` (any positive scale) from two uniforms in [0, 1).

    Inverse distribution function on two levels: a block of 128 tokens, then a token of it. A token
    of probability zero is never drawn; a distribution of nothing (NaN or all zero) gives some
    token.
    """
    blocks = jnp.pad(p, (0, -p.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
    block = _first_past(blocks.sum(axis=-1), uniform[0])
    within = _first_past(blocks[block], uniform[1])
    return jnp.minimum(block * _BLOCK + within, p.shape[0] - 1).astype(jnp.int32)


def draw_distinct(p: Float[Array, "*B V"], key: KeyArray, count: int) -> Int32[Array, "*B count"]:
    """`count` draws without replacement from each distribution of `p`, in the order of drawing.

    The largest of log p and Gumbel noise. Tokens of probability zero come after all others, the
    lowest first. The noise is of full precision: with 2^-23 steps of its uniforms a token of
    nearly no probability would be drawn once in 2^23 times the vocabulary.
    """
    noise = jax.random.gumbel(key, p.shape, p.dtype, mode="high")
    return largest(jnp.log(p) + noise, count)[1]


def _first_past(weight: Float[Array, " n"], uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """The first positive entry whose running sum exceeds the uniform's share of the total."""
    running = jnp.cumsum(weight)
    past = (running > uniform * running[-1]) & (weight > 0)
    last = weight.shape[0] - 1 - jnp.argmax(weight[::-1] > 0)
    return jnp.where(past.any(), jnp.argmax(past), last).astype(jnp.int32)


def is_greedy(sampling: Sampling) -> Bool[Array, "*B"]:
    """Which rows take the most likely token."""
    return jnp.asarray(sampling.temperature) <= 0
