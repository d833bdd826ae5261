"""Milliseconds of products with few columns on a CPU: `cpu_matmul`, XLA's, and the floor.

    python -m tests.cpu_matmul_bench --json matmul.json

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
import tyro

import pallas_kernels
from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.measure.timing import environment
from specjax.models import layers
from specjax.models.quantized import PackedWeight


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    shapes: tuple[str, ...] = ("1792x640", "14336x4096")
    """Outputs and inputs of the matrices."""
    columns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Of x."""
    kinds: tuple[str, ...] = ("float32", "bfloat16", "int8", "int4")
    """Of weights; codes are multiplied as bfloat16, those of 4 bits have groups of 64."""
    weights: float = 98e6
    """In all matrices together, about."""
    rounds: int = 9
    """How often each is timed."""
    json: str | None = None
    """Where the rows are written."""


def matrix(
    kind: str, outputs: int, inputs: int, seed: int, group: int = 64
) -> tuple[jax.Array | PackedWeight, int]:
    """A matrix, and its bytes; codes of 4 bits have a scale for each `group` inputs."""
    key = jax.random.key(seed)
    if kind in ("float32", "bfloat16"):
        made = jax.random.normal(key, (outputs, inputs), jnp.dtype(kind))
        return made, made.nbytes
    bits = 8 if kind == "int8" else 4
    codes = jax.random.bits(key, (outputs, inputs * bits // 8), jnp.uint8)
    groups = 1 if bits == 8 else inputs // group
    scale = jnp.full((outputs, groups), 0.01, jnp.bfloat16)
    made = PackedWeight(codes, scale, bits=bits, dtype=jnp.dtype("bfloat16"))
    return made, codes.nbytes + scale.nbytes


def program(name: str) -> Callable[..., jax.Array]:
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
    rows: list[dict[str, Any]] = []
    report = {"env": environment(), "config": dataclasses.asdict(bench), "rows": rows}
    print(report["env"], flush=True)
    for shape, kind in itertools.product(bench.shapes, bench.kinds):
        outputs, inputs = map(int, shape.split("x"))
        count = max(1, round(bench.weights / (outputs * inputs)))
        made = [matrix(kind, outputs, inputs, seed) for seed in range(count)]
        matrices, size = [each for each, _ in made], sum(nbytes for _, nbytes in made)
        for columns in bench.columns:
            row = row_of(matrices, size, inputs, columns, bench.rounds)
            rows.append({"shape": shape, "kind": kind, "matrices": count} | row)
            ours, xla, floor = (row[f"{name}_ms"] for name in ("cpu_matmul", "xla", "floor"))
            print(
                f"{shape:12} {kind:9} {columns:3} columns: cpu_matmul {ours:7.2f} ms, "
                f"xla {xla:7.2f}, floor {floor:6.2f}, over it {ours / floor:.2f}", flush=True,
            )  # fmt: skip
            if bench.json:
                write_json(bench.json, report)


if __name__ == "__main__":
    main()
