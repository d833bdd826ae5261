"""Products of a layer with weights in 16, 8 and 4 bits, as `layers.linear` computes them.

    python -m benchmarks.accelerator.packed --json packed.json

Each row is a matrix of a named shape's feed-forward layer, several of them one after the other so
that none is in the device's cache. Floors are the bytes of the matrices at the bandwidth that is
read in the same run.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.cpu_matmul import matrix
from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.measure.roofline import SHAPES, spent
from specjax.measure.timing import environment
from specjax.models.layers import linear
from specjax.models.quantized import PackedWeight

_MOST_BYTES, _MOST_MATRICES, _GROUP = 2**30, 6, 128
_FORMS = ("bfloat16", "int8", "int4")


@jax.jit
def _products(weights: tuple[jax.Array | PackedWeight, ...], x: jax.Array) -> list[jax.Array]:
    return [linear(weight, x, jnp.dtype(jnp.bfloat16)) for weight in weights]


def rows(shape: str, columns: list[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row for each matrix, form and number of columns."""
    hidden, inner = SHAPES[shape].hidden_size, SHAPES[shape].intermediate_size
    for outputs, inputs in ((inner, hidden), (hidden, inner)):
        count = max(1, min(_MOST_MATRICES, _MOST_BYTES // (2 * outputs * inputs)))
        for form in _FORMS:
            made = [matrix(form, outputs, inputs, seed, _GROUP) for seed in range(count)]
            weights, (held, *_) = zip(*made, strict=True)
            for many in columns:
                x = jax.random.normal(jax.random.key(1), (inputs, many))
                taken = spent(partial(_products, weights, x)) / count
                yield {
                    "outputs": outputs, "inputs": inputs, "columns": many, "form": form,
                    "microseconds": 1e6 * taken, "over_floor": taken / (held / bandwidth),
                }  # fmt: skip


def main() -> None:
    """Prints a row a measurement, and writes all that are made after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.packed")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--columns", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    report: dict[str, Any] = {"complete": False, "env": environment(), "rows": []}
    report["read_gb_per_second"] = bandwidth / 1e9
    for row in rows(options.shape, options.columns, bandwidth):
        report["rows"].append(row)
        print(row, flush=True)
        write_json(options.json, report)
    write_json(options.json, report | {"complete": True})


if __name__ == "__main__":
    main()
