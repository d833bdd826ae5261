"""Operands of tree attention that are hard to get right, and how near a result has to be.

The suite of its implementations runs on them, and so does what is run on a device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import Prefix, quantized
from pallas_kernels.tree_attention.operands import Operands

Shape = tuple[int, int, int, int, int, int, int]
"""Rows, heads, key/value heads, nodes, earlier block columns, prefix slots, head dimension."""

SHAPES: dict[str, Shape] = {
    "one node": (2, 4, 2, 1, 0, 64, 64),
    "equal heads": (3, 3, 3, 5, 0, 64, 64),
    "one key/value head": (2, 6, 1, 8, 0, 5, 8),
    "groups of five": (3, 10, 2, 7, 0, 128, 64),
    "earlier levels": (3, 4, 2, 6, 5, 64, 64),
    "past a tile of 128": (1, 2, 1, 33, 0, 131, 32),
    "several tiles": (3, 8, 2, 70, 0, 640, 128),
    "head of 96": (2, 4, 2, 20, 0, 200, 96),
    "head of 256": (2, 2, 1, 5, 3, 128, 256),
    "more slots than a share": (1, 2, 1, 3, 0, 1024, 64),
    "more nodes than a mask has words": (1, 2, 2, 300, 0, 64, 64),
}


def tolerance(dtype: Any, dim: int, keys: int) -> float:
    """The largest error to expect, as a share of the largest entry.

    Queries and weights are rounded to the dtype once each; sums are float32, and independent
    roundings add up as the root of their number. Factor 4 because the largest of some thousand
    outputs is compared, not a typical one.
    """
    return 4 * (2 * _unit_roundoff(dtype) + _unit_roundoff(jnp.float32) * (dim**0.5 + keys**0.5))


def _unit_roundoff(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def make(
    shape: Shape,
    dtype: Any,
    lengths: Sequence[int] | None = None,
    query_dtype: Any = jnp.float32,
    first: bool = False,
    soft_cap: float | None = None,
    bits: int = 16,
) -> Operands:
    """Operands of `tree_attention`, with NaN in every slot at or past its row's length.

    A cache of 8 `bits` holds NaN in the scales there.

    Args:
      shape: theirs.
      dtype: of keys and values.
      lengths: of the rows; by default empty, full, and in between.
      query_dtype: of queries.
      first: whether nodes see the prefix from a slot of their own on.
      soft_cap: of the scores.
      bits: of the cache: 16, whatever the dtype, or 8.
    """
    rows, heads, kv_heads, nodes, earlier, slots, dim = shape
    rng = np.random.default_rng(sum(shape))

    def normal(*size: int) -> np.ndarray:  # NumPy compiles nothing for each new shape
        return rng.normal(size=size).astype(np.float32)

    if lengths is None:
        lengths = np.resize([slots // 2 + 1, 0, slots], rows).tolist()
    length = np.asarray(lengths, np.int32)
    dead = np.arange(slots) >= length[:, None, None]
    keys, values = normal(rows, kv_heads, dim, slots), normal(rows, kv_heads, slots, dim)
    if bits == 8:
        (keys, of_keys), (values, of_values) = _in_8_bits(keys, 2), _in_8_bits(values, 3)
        of_keys, of_values = (np.where(dead, np.nan, scale) for scale in (of_keys, of_values))
        held: tuple[Any, ...] = keys, values, length, (of_keys, of_values)
    else:
        keys = np.where(dead[:, :, None], np.nan, keys).astype(dtype)
        held = keys, np.where(dead[..., None], np.nan, values).astype(dtype), length
    tree_mask = np.stack([_random_ancestors(rng, nodes, earlier) for _ in range(rows)])
    parts: tuple[Any, ...] = (
        normal(rows, heads, nodes, dim).astype(query_dtype),
        normal(rows, kv_heads, earlier + nodes, dim).astype(dtype),
        normal(rows, kv_heads, earlier + nodes, dim).astype(dtype),
        tree_mask,
        Prefix(*held),
        rng.integers(0, slots, (rows, nodes)).astype(np.int32) if first else None,
    )
    return jax.tree.map(jnp.asarray, Operands(*parts))._replace(soft_cap=soft_cap)


_in_8_bits = jax.jit(quantized, static_argnums=1)


def _random_ancestors(rng: np.random.Generator, nodes: int, earlier: int) -> np.ndarray:
    """`[nodes, earlier + nodes]` of a random tree whose first `earlier` columns come first."""
    total = earlier + nodes
    seen = np.eye(total, dtype=bool)
    for node in range(1, total):
        seen[node] |= seen[rng.integers(0, node)]
    return seen[earlier:]
