"""How often children are accepted, by rank and by depth, measured on texts of the target."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.base.sampling import Sampling, most_likely, process
from specjax.decoding.logits import logits_at
from specjax.decoding.pass_times import said_by_level
from specjax.decoding.request import PROMPT_BUCKETS, bucket
from specjax.models.transformer import Model, forward

_SMALL = 1e-30
_CHAIN = 7  # how far a step may go where it is asked where the next one begins


class Measured(NamedTuple):
    """Positional acceptance by rank, and how likely the first path survives to each depth."""

    by_rank: Float[np.ndarray, " k"]
    survival: Float[np.ndarray, " d"]

    @property
    def by_depth(self) -> Float[np.ndarray, "d k"]:
        """Positional acceptance of trees that are verified as a whole, a row a depth.

        The first child of a row is as likely as the path is to go on there; the other ranks share
        what it leaves as they do in `by_rank`.
        """
        before = np.concatenate([[1.0], self.survival[:-1]])
        first = np.where(before > 0, self.survival / np.where(before > 0, before, 1), 0)
        left = (1 - first) / max(1 - self.by_rank[0], _SMALL)
        others = self.by_rank[None, 1:] * np.minimum(left, 1)[:, None]
        return np.concatenate([first[:, None], others], axis=1)


def measured(
    target: Model,
    draft: Model,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperature: float,
    levels: int,
    ranks: int = 8,
) -> Measured:
    """Acceptance at the tokens from `starts` on, of texts that the target drew at `temperature`.

    Entry b of `by_rank` is the positional acceptance of Sequoia (arXiv 2402.12374, section 3): the
    probability that child b of a node on the target's path is the one accepted; at temperature 0
    that the target's choice is the draft's token of rank b; above it, that multi-step sampling
    accepts the b-th of independent draws.

    Entry d of `survival` is the probability that a drawn path keeps at least d + 1 of its tokens
    where they are verified together, as block verification (arXiv 2403.10444) and, on trees,
    traversal do. Block verification keeps i tokens x of the draft with probability
    w(x) = min(w(x before its last) p/q, 1); over texts of the target instead of the draft's, whose
    weights are q/p, this is the least q/p of all beginnings of the text, and at most 1. At
    temperature 0 it is that the draft's first choice is right so many times. Every place of a
    text counts as often as a step of a chain would begin there, which is seldom within what it
    keeps; from one depth to the next those places count that have so many tokens after them
    (Kaplan and Meier's estimate). Depths that no text has survive with probability 0.
    """
    size = bucket(max(map(len, texts)), PROMPT_BUCKETS)
    ranked, kept, reached = np.zeros(ranks), np.zeros(levels), np.zeros(levels)
    count, every = 0, jnp.arange(size, dtype=jnp.int32)[None]
    for text, start in zip(texts, starts, strict=True):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(text)] = text
        tokens = jnp.asarray(padded)
        of_target = logits_at(target, tokens, every)
        found = [
            _accepted(of_target, of_draft, tokens, temperature, ranks)
            for of_draft in _said(draft, target, tokens, levels)
        ]
        wanted = slice(start - 1, len(text) - 1)
        ranked += np.asarray(found[0][0])[wanted].sum(axis=0)
        count += len(text) - start
        survival = _survival([np.asarray(ratio, float)[wanted] for _, ratio in found], levels)
        begins = _begins(survival[:, :_CHAIN])[:, None] * np.isfinite(survival)
        kept += np.nansum(begins * survival, axis=0)
        one_less = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        reached += np.nansum(begins * one_less, axis=0)
    going_on = kept / np.where(reached > 0, reached, 1)
    return Measured(ranked / max(count, 1), np.cumprod(going_on))


def _said(
    draft: Model, target: Model, tokens: Int32[Array, "1 T"], levels: int
) -> Iterator[Float[Array, "1 T V"]]:
    """A draft's logits after every token, of one that reads hidden states those at each level."""
    if draft.config.features is None:
        yield _forward(draft, tokens)
        return
    for logits in said_by_level(draft, target, tokens, levels):
        yield logits[None]


def _survival(ratio: Sequence[Float[np.ndarray, " T"]], levels: int) -> Float[np.ndarray, "T d"]:
    """The least product of ratios along so many tokens from every place; NaN past the end.

    Those of a token further down are the next ones, or the last.
    """
    with np.errstate(divide="ignore"):  # what the draft cannot say survives with probability 0
        log = [np.log(own) for own in ratio]
    ahead = np.full((len(log[0]), levels), np.nan)
    for depth in range(min(levels, len(log[0]))):
        ahead[: len(log[0]) - depth, depth] = log[min(depth, len(log) - 1)][depth:]
    return np.exp(np.minimum.accumulate(np.cumsum(ahead, axis=1), axis=1).clip(max=0))


def _begins(survival: Float[np.ndarray, "T d"]) -> Float[np.ndarray, " T"]:
    """How likely a step begins at every place of a text, where the first begins at its start."""
    found = np.zeros(len(survival))
    found[:1] = 1
    for place, least in enumerate(np.nan_to_num(survival)):
        reached = np.concatenate([[1.0], least, [0.0]])
        for kept, share in enumerate(reached[:-1] - reached[1:]):
            if place + kept + 1 < len(found):
                found[place + kept + 1] += found[place] * share
    return found


@jax.jit
def _forward(model: Model, tokens: Int32[Array, "1 T"]) -> Float[Array, "1 T V"]:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return forward(model, tokens, positions, None, None)[0]


@partial(jax.jit, static_argnames="ranks")
def _accepted(
    of_target: Float[Array, "1 T V"],
    of_draft: Float[Array, "1 T V"],
    tokens: Int32[Array, "1 T"],
    temperature: Float[Array, ""] | float,
    ranks: int,
) -> tuple[Float[Array, "T k"], Float[Array, " T"]]:
    """At every position, how likely each rank is the accepted one, and q/p of the next token.

    At temperature 0 the ratio is 1 where the draft's first choice is the target's, else 0.
    """
    sampling = Sampling(jnp.asarray(temperature, jnp.float32)[None], *_off())
    p, q = process(of_target, sampling)[0], process(of_draft, sampling)[0]
    greedy, sampled = _by_rank(of_target[0], of_draft[0], ranks), _by_trial(p, q, ranks)
    following = jnp.roll(tokens[0], -1)[:, None]
    of_next = [jnp.take_along_axis(probs, following, axis=1)[:, 0] for probs in (p, q)]
    ratio = of_next[1] / jnp.maximum(of_next[0], _SMALL)
    at_zero = temperature <= 0
    return jnp.where(at_zero, greedy, sampled), jnp.where(at_zero, greedy[:, 0], ratio)


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
