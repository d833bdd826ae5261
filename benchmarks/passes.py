"""Passes of models by the nodes of a tree, and their plain steps.

    python -m benchmarks.passes smollm2 --activations float bfloat16 int8

Medians of seven rounds, each of the models and activations in turn.
"""

import dataclasses
import statistics
from collections import defaultdict
from typing import Annotated, Any

import tyro

from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.checkpoints.load import load
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
    activations: tuple[str, ...] = ()
    """float, bfloat16 and int8, each a model of its own; see `specjax.load`."""
    rounds: int = 7
    """Of all."""
    json: str | None = None
    """Where the rows are written."""


def main() -> None:
    """Measures, prints and writes it."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    use_compilation_cache()
    env, bandwidth = environment(), read_bandwidth()
    print(env, flush=True)
    models = {
        (name, each): load(name, dtype=options.dtype, activations=each)[0]
        for name in options.models
        for each in options.activations or (None,)
    }
    seconds: dict[tuple[str, str | None], dict[str, list[float]]] = {
        each: defaultdict(list) for each in models
    }
    for _ in range(options.rounds):
        for each, model in models.items():
            own = seconds[each]
            own["plain step"].append(plain_step(model, options.slots, bandwidth).seconds)
            for row in passes(model, options.nodes, options.slots, bandwidth):
                own[f"{row.nodes} nodes"].append(row.seconds)
    rows: list[dict[str, Any]] = []
    for (name, activations), own in seconds.items():
        told = {what: round(1e3 * statistics.median(each), 2) for what, each in own.items()}
        rows.append({"model": name, "activations": activations, "milliseconds": told})
        print(rows[-1], flush=True)
    if options.json:
        write_json(options.json, {"env": env, "config": dataclasses.asdict(options), "rows": rows})


if __name__ == "__main__":
    main()
