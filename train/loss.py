"""Losses of a draft against its target, each a pure function giving one value a column.

The divergences take log probabilities `[cells, C]` over the same cells of the vocabulary: every
token for itself (`jax.nn.log_softmax`), or the teacher's most likely ones and one cell for all
others (`lumped`, `with_tail`), which never makes a divergence larger (data processing).
DistillSpec (arXiv 2310.08461, section 3) compares them; half the L1 distance is one minus the
probability that a drafted token is accepted (Leviathan et al., arXiv 2211.17192, corollary 3.6).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Integer

_SMALLEST_TAIL = 1e-5
"""Lumped probabilities are at least this: half-precision labels may sum to slightly over 1."""


def cross_entropy(logits: Float[Array, "V C"], labels: Int32[Array, " C"]) -> Float[Array, " C"]:
    """Negative log-likelihood of `labels`, in nats."""
    chosen = jnp.take_along_axis(logits, labels[None], axis=0)[0]
    return jax.nn.logsumexp(logits, axis=0) - chosen


def forward_kl(log_p: Float[Array, "K C"], log_q: Float[Array, "K C"]) -> Float[Array, " C"]:
    """KL(teacher ‖ student), in nats: the student is to cover all that the teacher may say."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=0)


def reverse_kl(log_p: Float[Array, "K C"], log_q: Float[Array, "K C"]) -> Float[Array, " C"]:
    """KL(student ‖ teacher), in nats: the student is to say nothing that the teacher would not."""
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=0)


def total_variation(log_p: Float[Array, "K C"], log_q: Float[Array, "K C"]) -> Float[Array, " C"]:
    """Half the L1 distance: the probability that one drafted token is rejected."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=0)


Divergence = Callable[[Float[Array, "K C"], Float[Array, "K C"]], Float[Array, " C"]]

HARD, FORWARD = "cross_entropy", "forward_kl"
DIVERGENCES: dict[str, Divergence] = {
    FORWARD: forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}
LOSSES = (*DIVERGENCES, HARD)


def lumped(logits: Float[Array, "V C"], ids: Int[Array, "k C"]) -> Float[Array, "k1 C"]:
    """Log probabilities of the tokens `ids`, and, last, of all others together.

    A token past those that there are logits of is never foreseen.
    """
    lowest = jnp.finfo(logits.dtype).min
    chosen = jnp.take_along_axis(logits, ids, axis=0, mode="fill", fill_value=lowest)
    return with_tail(chosen - jax.nn.logsumexp(logits, axis=0))


def with_tail(log_p: Float[Array, "k C"]) -> Float[Array, "k1 C"]:
    """`log_p` with the log of what is missing to 1 as a last row."""
    tail = jnp.maximum(1 - jnp.exp(log_p).sum(axis=0), _SMALLEST_TAIL)
    return jnp.concatenate([log_p, jnp.log(tail)[None]])


def divergence(
    loss: str,
    logits: Float[Array, "V C"],
    ids: Integer[Array, "B T k"] | Integer[np.ndarray, "B T k"],
    log_p: Float[Array, "B T k"] | Float[np.ndarray, "B T k"],
) -> Float[Array, " C"]:
    """The divergence of such a name from the teacher's likeliest tokens, `C = B·T` columns."""
    k = ids.shape[-1]
    own = jnp.asarray(ids, jnp.int32).reshape(-1, k).T
    teacher = with_tail(jnp.asarray(log_p, jnp.float32).reshape(-1, k).T)
    return DIVERGENCES[loss](teacher, lumped(logits, own))
