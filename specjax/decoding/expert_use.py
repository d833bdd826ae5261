"""How many of a mixture's experts the tokens of a text take together."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from specjax.models.config import LayerKind
from specjax.models.experts import route
from specjax.models.layer_weights import LayerWeights
from specjax.models.transformer import Model, embed, layer_of_pass


def experts_taken(target: Model, text: Sequence[int], columns: Sequence[int]) -> tuple[float, ...]:
    """How many experts of a layer so many tokens of a text take that follow one another.

    The mean over the layers that have experts and over windows beside each other, as a chain's
    nodes are; the last window may be shorter, and counts only if there is no other. 0 where no
    layer has experts.

    Args:
      target: a mixture.
      text: its tokens.
      columns: numbers of nodes, the root included.

    Raises:
      ValueError: a layer could not be read.
    """
    tokens = jnp.asarray(text, jnp.int32)[None]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    config, outer = target.config, target.outer
    x, by_layer = embed(outer, tokens, positions), []
    with target.in_pass():
        for index in range(config.num_layers):
            x, chosen = _layer(outer, target.layer(index), x, positions, config.kind_of(index))
            if chosen is not None:
                by_layer.append(np.asarray(chosen))
    if not by_layer:
        return (0.0,) * len(columns)
    return tuple(float(np.mean([_in_windows(own, size) for own in by_layer])) for size in columns)


def _in_windows(chosen: Int32[np.ndarray, "K T"], size: int) -> float:
    """The mean number of experts that windows of so many tokens take."""
    starts = range(0, max(1, chosen.shape[1] - size + 1), size)
    return float(np.mean([len(np.unique(chosen[:, start : start + size])) for start in starts]))


@partial(jax.jit, static_argnames="kind")
def _layer(
    outer: Model,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    positions: Int32[Array, "B T"],
    kind: LayerKind,
) -> tuple[Float[Array, "E C"], Int32[Array, "K C"] | None]:
    """What leaves a layer, and the experts of each column if it has some."""
    inputs: dict[str, Array] = {}
    x, _ = layer_of_pass(outer, weights, kind, x, positions, None, None, inputs)
    experts = outer.config.experts
    if experts is None or weights.router is None:
        return x, None
    return x, route(experts, weights, inputs["up"]).chosen
