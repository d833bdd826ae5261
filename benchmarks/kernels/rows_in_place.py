"""Attention to rows of a larger cache where they lie, against dots over all of their slots.

    python -m benchmarks.kernels.rows_in_place

Each figure is the median of the milliseconds of a layer, of runs of both forms in turn; twelve
layers with caches of their own, 10 heads of 64 features, 2 of keys and values, float32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import Prefix, tree_attention
from specjax.measure.timing import clocked

LAYERS, HEADS, KV_HEADS, FEATURES, TURNS = 12, 10, 2, 64, 15
CASES = (
    (1, 8, 320, 300),
    (1, 8, 2112, 300),
    (8, 8, 320, 300),
    (8, 8, 2112, 300),
    (8, 8, 2112, 1500),
)
"""Rows, nodes of each, slots of the cache, tokens in it."""


class Drawn(NamedTuple):
    """What attention is given: a block of nodes, and a cache for each layer."""

    query: jax.Array
    block: tuple[jax.Array, jax.Array]
    caches: list[tuple[jax.Array, jax.Array]]
    tree_mask: jax.Array
    length: jax.Array


def drawn(rows: int, nodes: int, slots: int, tokens: int) -> Drawn:
    """Random numbers of these shapes."""
    noise = np.random.default_rng(0)

    def of(*shape: int) -> jax.Array:
        return jnp.asarray(noise.standard_normal(shape), jnp.float32)

    own = rows, KV_HEADS
    return Drawn(
        of(rows, HEADS, nodes, FEATURES),
        (of(*own, nodes, FEATURES), of(*own, nodes, FEATURES)),
        [(of(*own, FEATURES, slots), of(*own, slots, FEATURES)) for _ in range(LAYERS)],
        jnp.tril(jnp.ones((rows, nodes, nodes), bool)),
        jnp.full(rows, tokens, jnp.int32),
    )


@jax.jit
def layers_of(at: Drawn, pages: jax.Array | None) -> jax.Array:
    """All layers, one after the other; `pages` of the caches are read in place."""
    query = at.query
    for keys, values in at.caches:
        prefix = Prefix(keys, values, at.length, pages=pages)
        query = query + tree_attention(query, *at.block, at.tree_mask, prefix)
    return query


def main() -> None:
    """Measures every case and prints it."""
    print(jax.devices()[0].device_kind, jax.__version__)
    for rows, nodes, slots, tokens in CASES:
        at = drawn(rows, nodes, slots, tokens)
        forms = jnp.arange(rows, dtype=jnp.int32)[:, None], None
        in_place, dense = (np.asarray(layers_of(at, form)) for form in forms)
        np.testing.assert_allclose(in_place, dense, rtol=1e-4, atol=1e-4)
        found = []
        for _ in range(TURNS):
            found.append([clocked(partial(layers_of, at, form))[1] for form in forms])
        medians = 1e3 * np.median(found, axis=0) / LAYERS
        print(
            f"{rows} rows of {nodes} nodes, {tokens} tokens in {slots} slots: in place "
            f"{medians[0]:.2f} ms a layer, over all slots {medians[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
