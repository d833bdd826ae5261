"""Experts: which ones a token takes, and what they give."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from specjax.models import layers
from specjax.models.config import Experts, ModelConfig
from specjax.models.expert_products import expert_linears
from specjax.models.layer_weights import LayerWeights

_LEAST_SUM = 1e-20
"""What is added to the sum of scores that are no probabilities, as DeepSeek-V3's code does."""


def expected_experts(experts: Experts, columns: int) -> float:
    """How many of a layer's experts so many columns take, if each takes any as likely as others.

    Columns of one text take fewer: neighbours choose alike.
    """
    missed = 1 - experts.experts_per_token / experts.num_experts
    return experts.num_experts * (1 - missed**columns)


class Routed(NamedTuple):
    """The experts of each column, and what each is weighed by."""

    chosen: Int32[Array, "K C"]
    shares: Float[Array, "K C"]


def route(
    experts: Experts, weights: LayerWeights, x: Float[Array, "E C"], dtype: jnp.dtype | None = None
) -> Routed:
    """The experts that a router chooses for columns `x`; of equal ones the first."""
    assert weights.router is not None
    logits = layers.linear(weights.router, x, dtype)
    if weights.router_bias is not None:
        logits = logits + weights.router_bias.astype(logits.dtype)[:, None]
    scores = jax.nn.sigmoid(logits) if experts.scores == "sigmoid" else logits
    choice = scores
    if weights.correction_bias is not None:
        choice = choice if experts.scores == "sigmoid" else _probabilities(logits)
        choice = choice + weights.correction_bias.astype(choice.dtype)[:, None]
    if experts.num_groups > 1:
        choice = _of_best_groups(experts, choice)
    _, best = lax.top_k(choice.T, experts.experts_per_token)
    shares = _weighed(experts, jnp.take_along_axis(scores, best.T, axis=0), logits)
    return Routed(best.T, shares * experts.routed_scale)


def _of_best_groups(experts: Experts, choice: Float[Array, "X C"]) -> Float[Array, "X C"]:
    """With the lowest value for experts that are not in the best groups."""
    by_group = choice.reshape(experts.num_groups, -1, choice.shape[1])
    best, _ = lax.top_k(jnp.moveaxis(by_group, 1, 2), experts.group_best)
    _, kept = lax.top_k(best.sum(axis=2).T, experts.topk_groups)
    is_kept = (jnp.arange(experts.num_groups)[:, None, None] == kept).any(axis=2)
    return jnp.where(is_kept[:, None], by_group, -jnp.inf).reshape(choice.shape)


def _probabilities(logits: Float[Array, "X C"]) -> Float[Array, "X C"]:
    """A softmax whose sums do not depend on how many columns there are."""
    terms = jnp.exp(logits - logits.max(axis=0))
    return terms / layers.total(terms, 0)


def _weighed(
    experts: Experts, found: Float[Array, "K C"], logits: Float[Array, "X C"]
) -> Float[Array, "K C"]:
    """What the chosen experts are weighed by, of their scores; of softmax these are logits."""
    if experts.scores == "sigmoid":
        return found / (_in_order(found) + _LEAST_SUM) if experts.norm_topk else found
    most = logits.max(axis=0)
    found = jnp.exp(found - most)
    every = _in_order(found) if experts.norm_topk else layers.total(jnp.exp(logits - most), 0)[0]
    return found / every


def _in_order(terms: Iterable[Float[Array, "*rest"]]) -> Float[Array, "*rest"]:
    """The sum of terms in the order of the choice, however many columns there are."""
    return functools.reduce(jnp.add, terms)


def mixture(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    dtype: jnp.dtype | None = None,
    axis: str | None = None,
) -> Float[Array, "E C"]:
    """What the experts of columns `x` give together.

    On the mesh axis `axis` a device gives what its own experts do, which is to be summed over it.
    """
    assert config.experts is not None
    chosen, shares = route(config.experts, weights, x, dtype)
    if axis is not None:
        chosen = chosen - _held(weights) * lax.axis_index(axis)
    return weighed(outputs(config, weights, x, chosen, dtype), shares)


def outputs(
    config: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    chosen: Int32[Array, "K C"],
    dtype: jnp.dtype | None = None,
) -> Float[Array, "E K C"]:
    """What each of the chosen experts gives; 0 where it is none of those in `weights`."""
    assert config.experts is not None
    names = ("expert_gate", "expert_up") if config.gated else ("expert_up",)
    first, *rest = _products(weights, names, x, chosen, dtype)
    if config.experts.swiglu is not None:
        gain, limit = config.experts.swiglu
        first = jnp.minimum(first, limit)
        hidden = first * jax.nn.sigmoid(gain * first) * (jnp.clip(rest[0], -limit, limit) + 1)
    else:
        hidden = layers.activated(config.activation, first)
        hidden = hidden * rest[0] if rest else hidden
    flat = hidden.reshape(hidden.shape[0], -1)
    (made,) = _products(weights, ("expert_down",), flat, chosen, dtype)
    return made


def weighed(made: Float[Array, "E K C"], shares: Float[Array, "K C"]) -> Float[Array, "E C"]:
    """What experts gave together."""
    return _in_order(made[:, k] * shares[k] for k in range(len(shares)))


def _products(
    weights: LayerWeights,
    names: Sequence[str],
    x: Float[Array, "I N"],
    chosen: Int32[Array, "K C"],
    dtype: jnp.dtype | None,
) -> list[Float[Array, "O K C"]]:
    """Matrices of the chosen experts times columns, with their biases; 0 of experts elsewhere."""
    found = []
    made = expert_linears([getattr(weights, name) for name in names], x, chosen, dtype)
    for name, own in zip(names, made, strict=True):
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            is_here = (chosen >= 0) & (chosen < len(bias))
            added = bias.astype(own.dtype)[jnp.where(is_here, chosen, 0)]
            own = own + jnp.moveaxis(jnp.where(is_here[..., None], added, 0), 2, 0)
        found.append(own)
    return found


def _held(weights: LayerWeights) -> int:
    """How many experts are here."""
    assert weights.expert_down is not None
    return weights.expert_down.shape[0]
