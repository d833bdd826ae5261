"""How often the child of each rank is the accepted one, measured on texts of the target."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.model import Model, forward
from specjax.request import PROMPT_BUCKETS, bucket
from specjax.sampling import Sampling, most_likely, process


def positional(
    target: Model,
    draft: Model,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperature: float,
    ranks: int = 8,
) -> Float[np.ndarray, " k"]:
    """Positional acceptance (Sequoia, arXiv 2402.12374, section 3) at the tokens from `starts` on.

    Entry b is the probability that child b of a node on the target's path is the one accepted: at
    temperature 0 that the target's choice is the draft's token of rank b; above it, that
    multi-step sampling accepts the b-th of independent draws.
    """
    size = bucket(max(map(len, texts)), PROMPT_BUCKETS)
    total, count = np.zeros(ranks), 0
    for text, start in zip(texts, starts, strict=True):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(text)] = text
        tokens = jnp.asarray(padded)
        here = jnp.arange(size)
        wanted = (here >= start - 1) & (here < len(text) - 1)
        total += np.asarray(_accepted(target, draft, tokens, wanted, temperature, ranks))
        count += len(text) - start
    return total / max(count, 1)


@partial(jax.jit, static_argnames="ranks")
def _accepted(
    target: Model,
    draft: Model,
    tokens: Int32[Array, "1 T"],
    wanted: Array,
    temperature: Float[Array, ""] | float,
    ranks: int,
) -> Float[Array, " k"]:
    """Sums over the wanted positions of the probability that each rank is the accepted one."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    of_target = forward(target, tokens, positions, None, None)[0]
    of_draft = forward(draft, tokens, positions, None, None)[0]
    sampling = Sampling(jnp.asarray(temperature, jnp.float32)[None], *_off())
    greedy = _by_rank(of_target[0], of_draft[0], ranks)
    sampled = _by_trial(process(of_target, sampling)[0], process(of_draft, sampling)[0], ranks)
    chance = jnp.where(temperature <= 0, greedy, sampled)
    return jnp.where(wanted[:, None], chance, 0).sum(axis=0)


def _off() -> tuple[Array, Array, Array]:
    """Top-k, top-p and min-p of one row, all off."""
    return jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1)


def _by_rank(
    of_target: Float[Array, "T V"], of_draft: Float[Array, "T V"], ranks: int
) -> Float[Array, "T k"]:
    """Which rank the target's choice has in the draft's order."""
    choice = most_likely(of_target)[:, None]
    rank = (of_draft > jnp.take_along_axis(of_draft, choice, axis=1)).sum(axis=1)
    return (rank[:, None] == jnp.arange(ranks)).astype(jnp.float32)


def _by_trial(p: Float[Array, "T V"], q: Float[Array, "T V"], ranks: int) -> Float[Array, "T k"]:
    """How likely each of independent draws is accepted where those before it were not."""
    found, reached = [], jnp.ones(p.shape[0])
    for _ in range(ranks):
        accept = jnp.minimum(jnp.minimum(p, q).sum(axis=1), 1)
        found.append(reached * accept)
        reached = reached * jnp.maximum(1 - accept, 0)  # not below 0 by rounding
        left = jnp.maximum(p - q, 0)
        mass = left.sum(axis=1, keepdims=True)
        p = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), p)
    return jnp.stack(found, axis=1)
