"""Logit bias and penalties, ahead of temperature: what they go by, and how they change logits.

The order is that of transformers and vLLM: bias, repetition penalty, frequency and presence
penalties; `specjax.base.sampling.process` makes a distribution of what they give.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling

LARGEST_BIAS = 100.0
"""The largest bias of a token, up or down, as in OpenAI's API."""


@pytree
class TokenCounts:
    """What bias and penalties of each row go by, the root's token included.

    `bias` is added to logits; `prompt` are the tokens of the prompt, `made` how often each token is
    in the continuation. A row that is not `used` has no bias and no penalty.
    """

    used: Bool[Array, " B"]
    bias: Float[Array, "B V"]
    prompt: Bool[Array, "B V"]
    made: Int32[Array, "B V"]

    def after(self, tokens: Int32[Array, "B W"], count: Int32[Array, " B"]) -> "TokenCounts":
        """The counts after the first `count` of `tokens`."""
        rows, vocabulary = self.made.shape
        there = jnp.arange(tokens.shape[1]) < count[:, None]
        at = jnp.where(there, tokens, vocabulary)
        made = self.made.at[jnp.arange(rows)[:, None], at].add(1, mode="drop")
        return replace(self, made=made)


def has_penalty(sampling: Sampling) -> bool:
    """Whether a sampling on the host has a penalty for any row."""
    off = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    return any(np.any(np.asarray(getattr(sampling, name)) != value) for name, value in off.items())


def counts_of(
    sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int
) -> TokenCounts | None:
    """The counts before anything is made; None where no row has a bias or a penalty.

    Raises:
      TypeError: a bias is not a number, or not that of a token id.
      ValueError: a bias is out of its range, or of a token outside the vocabulary; there are biases
        for another number of rows.
    """
    rows = len(prompts)
    biases = biases_of(sampling.logit_bias, rows)
    if not any(biases) and not has_penalty(sampling):
        return None
    bias, seen = np.zeros((rows, vocabulary), np.float32), np.zeros((rows, vocabulary), bool)
    for row, (own, prompt) in enumerate(zip(biases, prompts, strict=True)):
        for token, value in checked_bias(own, vocabulary).items():
            bias[row, token] = value
        seen[row, list(prompt)] = True
    used, made = np.ones(rows, bool), np.zeros((rows, vocabulary), np.int32)
    return TokenCounts(*map(jnp.asarray, (used, bias, seen, made)))


def biases_of(logit_bias: Any, rows: int) -> list[Mapping[Any, Any]]:
    """Each row's biases, from None, from one mapping for all or from one a row.

    Raises:
      TypeError: they are something else.
      ValueError: there are others than `rows` mappings.
    """
    if logit_bias is None:
        return [{}] * rows
    if isinstance(logit_bias, Mapping):
        return [logit_bias] * rows
    several = isinstance(logit_bias, Sequence) and not isinstance(logit_bias, str | bytes)
    if not several or not all(isinstance(each, Mapping) for each in logit_bias):
        raise TypeError(
            f"sampling.logit_bias is {logit_bias!r}; it must map token ids to numbers, for all "
            "rows or in a list with a mapping a row."
        )
    if len(logit_bias) != rows:
        raise ValueError(
            f"sampling.logit_bias has {len(logit_bias)} mappings; there are {rows} prompts."
        )
    return list(logit_bias)


def checked_bias(bias: Mapping[Any, Any], vocabulary: int) -> Mapping[int, float]:
    """The biases of a row.

    Raises:
      TypeError: a token is not an integer, or a bias not a number.
      ValueError: a token is outside the vocabulary, or a bias out of its range.
    """
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"logit_bias names token {token!r}; token ids are integers.")
        if not 0 <= token < vocabulary:
            raise ValueError(f"logit_bias names token {token}; the vocabulary has {vocabulary}.")
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"logit_bias of token {token} is {value!r}; it must be a number.")
        if not abs(value) <= LARGEST_BIAS:
            raise ValueError(
                f"logit_bias of token {token} is {value}; it must lie in "
                f"[-{LARGEST_BIAS:g}, {LARGEST_BIAS:g}]."
            )
    return bias


def penalized(
    logits: Float[Array, "B N V"],
    sampling: Sampling,
    counts: TokenCounts,
    tokens: Int32[Array, "B M"],
    path: Bool[Array, "B N M"],
) -> Float[Array, "B N V"]:
    """Logits of nodes with their rows' bias and penalties, each node's own path counted as made.

    `path[b, n, m]` says that token m of `tokens` is on the path from the root to node n, the root,
    which is counted already, left out. `sampling` holds arrays `[B]`.
    """
    rows, nodes = path.shape[:2]
    row, node = jnp.arange(rows)[:, None, None], jnp.arange(nodes)[:, None]
    made = jnp.broadcast_to(counts.made[:, None], logits.shape)
    made = made.at[row, node, tokens[:, None]].add(path.astype(jnp.int32))
    repetition, frequency, presence = (
        jnp.asarray(value)[:, None, None]
        for value in (
            sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
        )
    )  # fmt: skip
    biased = logits + counts.bias[:, None]
    turned = jnp.where(biased > 0, biased / repetition, biased * repetition)
    seen = (counts.prompt[:, None] | (made > 0)) & (repetition != 1)
    found = jnp.where(seen, turned, biased) - frequency * made - presence * (made > 0)
    return jnp.where(counts.used[:, None, None], found, logits)
