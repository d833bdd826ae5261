"""Passes of models by the nodes of a tree, and their plain steps.

    python -m benchmarks.passes smollm2 --activations int8

Medians; models come one after the other, so compare within one.
"""

import dataclasses
from typing import Annotated, Any

import tyro

from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.checkpoints.huggingface import load
from specjax.measure.roofline import passes, plain_step
from specjax.measure.timing import environment
from specjax.methods.records import use_compilation_cache


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Short names, folders, GGUF files or a hub's ids."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Of a pass."""
    slots: int = 128
    """Tokens in the cache before them."""
    dtype: str | None = None
    """float32 or bfloat16; see `specjax.load`."""
    activations: str | None = None
    """int8 or float; see `specjax.load`."""
    json: str | None = None
    """Where the rows are written."""


def main() -> None:
    """Measures, prints and writes it."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    use_compilation_cache()
    rows: list[dict[str, Any]] = []
    report = {"env": environment(), "config": dataclasses.asdict(options), "rows": rows}
    print(report["env"], flush=True)
    bandwidth = read_bandwidth()
    for name in options.models:
        model, _ = load(name, dtype=options.dtype, activations=options.activations)
        measured = passes(model, options.nodes, options.slots, bandwidth)
        for row in (*measured, plain_step(model, options.slots, bandwidth)):
            rows.append({"model": name} | dataclasses.asdict(row))
            print(rows[-1], flush=True)
        if options.json:
            write_json(options.json, report)


if __name__ == "__main__":
    main()
