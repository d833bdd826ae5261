"""Losses over feature-major logits `[V, C]`, each a pure function giving one value a column."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

_SMALLEST_TAIL = 1e-5
"""Lumped probabilities are at least this: half-precision labels may sum to slightly over 1."""


def cross_entropy(logits: Float[Array, "V C"], labels: Int32[Array, " C"]) -> Float[Array, " C"]:
    """Negative log-likelihood of `labels`, in nats."""
    chosen = jnp.take_along_axis(logits, labels[None], axis=0)[0]
    return jax.nn.logsumexp(logits, axis=0) - chosen


def forward_kl(logits: Float[Array, "V C"], teacher: Float[Array, "V C"]) -> Float[Array, " C"]:
    """KL(teacher ‖ student) of two sets of logits, in nats (Hinton et al. 2015; DistillSpec)."""
    p = jax.nn.softmax(teacher, axis=0)
    gap = jax.nn.log_softmax(teacher, axis=0) - jax.nn.log_softmax(logits, axis=0)
    return jnp.sum(p * gap, axis=0)


def top_k_forward_kl(
    logits: Float[Array, "V C"], ids: Int[Array, "k C"], log_p: Float[Array, "k C"]
) -> Float[Array, " C"]:
    """KL(teacher ‖ student) with every token outside the teacher's `ids` lumped into one, in nats.

    `log_p` holds the teacher's log probabilities of `ids`. The value is at most that of
    `forward_kl`, by the law of data processing.
    """
    log_q = jnp.take_along_axis(logits, ids, axis=0) - jax.nn.logsumexp(logits, axis=0)
    p = jnp.exp(log_p)
    tail_p = jnp.maximum(1 - p.sum(axis=0), _SMALLEST_TAIL)
    tail_q = jnp.maximum(1 - jnp.exp(log_q).sum(axis=0), _SMALLEST_TAIL)
    tail = tail_p * (jnp.log(tail_p) - jnp.log(tail_q))
    return jnp.sum(p * (log_p - log_q), axis=0) + tail
