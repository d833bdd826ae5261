"""Attention to rows of a larger cache where they lie, against dots over all of their slots.

    python -m tests.rows_in_place

Each figure is the median of the milliseconds of a layer, of runs of both forms in turn; twelve
layers with caches of their own, 10 heads of 64 features, 2 of keys and values, float32.
"""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import Prefix, tree_attention

LAYERS, HEADS, KV_HEADS, FEATURES, TURNS = 12, 10, 2, 64, 15
CASES = (
    (1, 8, 320, 300),
    (1, 8, 2112, 300),
    (8, 8, 320, 300),
    (8, 8, 2112, 300),
    (8, 8, 2112, 1500),
)
"""Rows, nodes of each, slots of the cache, tokens in it."""


def main() -> None:
    """Measures every case and prints it."""
    print(jax.devices()[0].device_kind, jax.__version__)
    for rows, nodes, slots, tokens in CASES:
        noise = np.random.default_rng(0)

        def drawn(*shape: int) -> jax.Array:
            return jnp.asarray(noise.standard_normal(shape), jnp.float32)  # noqa: B023

        query = drawn(rows, HEADS, nodes, FEATURES)
        block = [drawn(rows, KV_HEADS, nodes, FEATURES) for _ in range(2)]
        caches = [
            (drawn(rows, KV_HEADS, FEATURES, slots), drawn(rows, KV_HEADS, slots, FEATURES))
            for _ in range(LAYERS)
        ]
        tree_mask = jnp.tril(jnp.ones((rows, nodes, nodes), bool))
        length, every = jnp.full(rows, tokens, jnp.int32), jnp.arange(rows, dtype=jnp.int32)

        def passed(own: jax.Array | None, query: jax.Array, caches: list) -> jax.Array:
            for keys, values in caches:
                prefix = Prefix(keys, values, length, rows=own)  # noqa: B023
                query = query + tree_attention(query, *block, tree_mask, prefix)  # noqa: B023
            return query

        forms = [jax.jit(partial(passed, own)) for own in (every, None)]
        in_place, dense = (np.asarray(form(query, caches)) for form in forms)
        np.testing.assert_allclose(in_place, dense, rtol=1e-4, atol=1e-4)
        found: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for form, times in zip(forms, found, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(form(query, caches))
                times.append(1e3 * (time.perf_counter() - start) / LAYERS)
        medians = [statistics.median(times) for times in found]
        print(
            f"{rows} rows of {nodes} nodes, {tokens} tokens in {slots} slots: in place "
            f"{medians[0]:.2f} ms a layer, over all slots {medians[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
