"""Milliseconds of products with few columns on a CPU: `cpu_matmul`, XLA's, and the floor.

    python -m benchmarks.kernels.cpu_matmul --json matmul.json
    taskset -c 0 python -m benchmarks.kernels.cpu_matmul --shapes 8192x2048 --group 32 \
        --columns 1 4 8 16 32 64 --kinds float32 int8:float32 int8 int8:int8 --form avx512_bf16

As many matrices are multiplied one after the other as hold about 98M weights; each product waits
for the one before, as in a model. Both sides take turns, and figures are medians. The floor reads
the weights once, at the bandwidth that the same run measured.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import pallas_kernels
from pallas_kernels.cpu import library
from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.measure.timing import environment
from specjax.models import layers
from specjax.models.quantized import FLOAT, INT8, PackedWeight, kept


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    shapes: tuple[str, ...] = ("1792x640", "14336x4096")
    """Outputs and inputs of the matrices."""
    columns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Of x."""
    kinds: tuple[str, ...] = ("float32", "bfloat16", "int8", "int4")
    """Of weights; behind a colon what x is where it is not bfloat16: bfloat16:float32,
    int4:float32 and int4:int8."""
    group: int | None = None
    """Inputs that share a scale; by default all of a row with 8 bits and 64 with 4."""
    form: str | None = None
    """Of `cpu_matmul`, such as avx2; by default the best that the processor has."""
    weights: float = 98e6
    """In all matrices together, about."""
    rounds: int = 9
    """How often each is timed."""
    json: str | None = None
    """Where the rows are written."""


def matrix(
    kind: str, outputs: int, inputs: int, seed: int, group: int | None = None
) -> tuple[jax.Array | PackedWeight, int]:
    """A matrix, and its bytes; codes have a scale for each `group` inputs."""
    key, (weights, _, columns) = jax.random.key(seed), kind.partition(":")
    if weights in ("float32", "bfloat16"):
        made = jax.random.normal(key, (outputs, inputs), jnp.dtype(weights))
        held = jax.tree.map(jnp.asarray, kept(np.asarray(made))) if columns else made
        return held, made.nbytes
    bits = 8 if weights == "int8" else 4
    codes = jax.random.bits(key, (outputs, inputs * bits // 8), jnp.uint8)
    groups = inputs // (group or (inputs if bits == 8 else 64))
    scale = jnp.full((outputs, groups), 0.01, jnp.bfloat16)
    dtype = jnp.dtype("float32" if columns == "float32" else "bfloat16")
    activations = INT8 if columns == "int8" else FLOAT
    made = PackedWeight(codes, scale, bits=bits, dtype=dtype, activations=activations)
    return made, codes.nbytes + scale.nbytes


def program(name: str) -> jax.stages.Wrapped:
    """The products of one side, each of which waits for the one before."""
    pallas_kernels.use(name)

    def work(matrices: list[Any], x: jax.Array) -> jax.Array:
        for weight in matrices:
            x = x.at[0, 0].add(1e-9 * layers.linear(weight, x)[0, 0])
        return x

    return jax.jit(work)


def timed(work: Callable[[], jax.Array]) -> float:
    """Milliseconds of a call."""
    begin = time.perf_counter()
    work().block_until_ready()
    return 1e3 * (time.perf_counter() - begin)


def row_of(
    matrices: list[Any], size: int, inputs: int, columns: int, rounds: int
) -> dict[str, Any]:
    """Both sides in turns, and the floor of as many bytes."""
    x = jax.random.normal(jax.random.key(columns), (inputs, columns))
    compiled = {name: program(name).lower(matrices, x).compile() for name in ("auto", "xla")}
    sides = {name: partial(each, matrices, x) for name, each in compiled.items()}
    runs = [{name: timed(side) for name, side in sides.items()} for _ in range(rounds + 1)][1:]
    ours, xla = (statistics.median(run[name] for run in runs) for name in ("auto", "xla"))
    return {"columns": columns, "cpu_matmul_ms": ours, "xla_ms": xla,
            "floor_ms": 1e3 * size / read_bandwidth()}  # fmt: skip


def main() -> None:
    """Measures, prints and writes it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    library.select(bench.form)
    rows: list[dict[str, Any]] = []
    report = {"env": environment(), "config": dataclasses.asdict(bench), "rows": rows}
    print(report["env"], flush=True)
    for shape, kind in itertools.product(bench.shapes, bench.kinds):
        outputs, inputs = map(int, shape.split("x"))
        count = max(1, round(bench.weights / (outputs * inputs)))
        made = [matrix(kind, outputs, inputs, seed, bench.group) for seed in range(count)]
        matrices, size = [each for each, _ in made], sum(nbytes for _, nbytes in made)
        for columns in bench.columns:
            row = row_of(matrices, size, inputs, columns, bench.rounds)
            rows.append({"shape": shape, "kind": kind, "matrices": count} | row)
            ours, xla, floor = (row[f"{name}_ms"] for name in ("cpu_matmul", "xla", "floor"))
            rate = count * outputs * inputs / ours / 1e6
            print(
                f"{shape:12} {kind:16} {columns:3} columns: cpu_matmul {ours:7.2f} ms "
                f"({rate:.1f}e9 weights/s), xla {xla:7.2f}, floor {floor:6.2f}, "
                f"over it {ours / floor:.2f}", flush=True,
            )  # fmt: skip
            if bench.json:
                write_json(bench.json, report)


if __name__ == "__main__":
    main()
