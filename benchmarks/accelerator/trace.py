"""Where the time of a target's pass goes on the device: its kernels, and products by themselves.

    python -m benchmarks.accelerator.trace --json trace.json

Passes are of random weights of a named shape over a chain of nodes, below a full cache of one row.
Products are of weights of bfloat16 and columns of a layer's sizes, in both orientations.
"""

import argparse
import collections
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.base.pytree import replace
from specjax.measure.roofline import SHAPES, spent
from specjax.measure.timing import environment
from specjax.models.kv_cache import cache_dtype, empty_cache
from specjax.models.transformer import Model, forward, initialize

_CALLS, _MOST_KERNELS, _MOST_BYTES = 10, 22, 2**30
_LINES = {"gpu": "Stream", "tpu": "XLA Ops"}


def kernels(work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Milliseconds and launches of a call by kernel, the longest first; none of a CPU's."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([work() for _ in range(_CALLS)])
        (file,) = Path(folder).glob("**/*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    wanted = _LINES.get(jax.default_backend())
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for line in itertools.chain.from_iterable(plane.lines for plane in planes):
        for event in line.events if wanted and wanted in line.name else ():
            took = (event.end_ns - event.start_ns) * 1e-6
            of_kernel = found[event.name[:90]]
            of_kernel[:] = of_kernel[0] + took / _CALLS, of_kernel[1] + 1 / _CALLS
    longest = sorted(found.items(), key=lambda one: -one[1][0])[:_MOST_KERNELS]
    return [{"kernel": name, "ms": ms, "launches": count} for name, (ms, count) in longest]


def a_pass(model: Model, nodes: int, slots: int) -> dict[str, Any]:
    """A pass's time, and its kernels."""
    cache = empty_cache(model.config, 1, slots, cache_dtype(model.embedding.dtype))
    cache = replace(cache, length=jnp.full(1, slots, jnp.int32))
    positions = slots + jnp.arange(nodes, dtype=jnp.int32)[None]
    tokens, tree_mask = jnp.ones((1, nodes), jnp.int32), jnp.tri(nodes, dtype=bool)[None]
    looked = jax.jit(forward)

    def work() -> jax.Array:
        return looked(model, tokens, positions, cache, tree_mask)[0]

    return {"nodes": nodes, "slots": slots, "ms": 1e3 * spent(work), "kernels": kernels(work)}


def _product(weights: list[jax.Array], x: jax.Array, weights_first: bool) -> list[jax.Array]:
    x = x.astype(jnp.bfloat16)
    dot = partial(lax.dot_general, preferred_element_type=jnp.float32)
    if weights_first:
        return [dot(weight, x, (((1,), (0,)), ((), ()))) for weight in weights]
    return [dot(x.T, weight, (((1,), (1,)), ((), ()))) for weight in weights]


def a_product(outputs: int, inputs: int, columns: int) -> dict[str, Any]:
    """GB/s at which weights are read, weights [out, in] first and columns [N, in] first."""
    count = max(1, min(6, _MOST_BYTES // (2 * outputs * inputs)))
    keys = jax.random.split(jax.random.key(0), count)
    weights = [jax.random.normal(key, (outputs, inputs), jnp.bfloat16) for key in keys]
    x = jax.random.normal(jax.random.key(1), (inputs, columns))
    row: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "columns": columns}
    for name, first in (("weights_first", True), ("columns_first", False)):
        run = jax.jit(partial(_product, weights_first=first))
        taken = spent(partial(run, weights, x))
        row[f"{name}_gb_per_second"] = 2e-9 * outputs * inputs * count / taken
    return row


def main() -> None:
    """Measures, prints and writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.trace")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="so many instead of its own")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    config = SHAPES[options.shape]
    config = replace(config, num_layers=options.layers or config.num_layers)
    report: dict[str, Any] = {"complete": False, "env": environment(), "passes": [], "products": []}
    report["read_gb_per_second"] = read_bandwidth() / 1e9
    hidden, inner = config.hidden_size, config.intermediate_size
    for outputs, inputs in ((inner, hidden), (hidden, inner), (hidden, hidden)):
        for columns in options.nodes:
            report["products"].append(a_product(outputs, inputs, columns))
            print(report["products"][-1], flush=True)
    model = initialize(jax.random.key(0), config, jnp.dtype(jnp.bfloat16))
    for nodes in options.nodes:
        report["passes"].append(a_pass(model, nodes, options.slots))
        print(report["passes"][-1], flush=True)
        write_json(options.json, report)
    write_json(options.json, report | {"complete": True})


if __name__ == "__main__":
    main()
