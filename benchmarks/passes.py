"""Passes of models by the nodes of a tree, and their plain steps.

    python -m benchmarks.passes smollm2 --activations float bfloat16 int8

Medians of seven rounds, each of the models and activations in turn.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, TypeVar

import tyro

from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.checkpoints.load import load
from specjax.measure.roofline import passes, plain_step
from specjax.measure.timing import environment
from specjax.methods.records import use_compilation_cache
from specjax.models.transformer import Model

_Name = TypeVar("_Name", bound=Hashable)


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
    found = measured(models, options.nodes, options.slots, options.rounds, bandwidth)
    rows: list[dict[str, Any]] = []
    for (name, activations), own in found.items():
        told = {_named(nodes): round(1e3 * taken, 2) for nodes, taken in own.items()}
        rows.append({"model": name, "activations": activations, "milliseconds": told})
        print(rows[-1], flush=True)
    if options.json:
        write_json(options.json, {"env": env, "config": dataclasses.asdict(options), "rows": rows})


def _named(nodes: int) -> str:
    return f"{nodes} nodes" if nodes else "plain step"


def measured(
    models: Mapping[_Name, Model], nodes: tuple[int, ...], slots: int, rounds: int, bandwidth: float
) -> dict[_Name, dict[int, float]]:
    """Median seconds of each model's passes by their nodes, 0 for a plain step; they take turns."""
    seconds: dict[_Name, dict[int, list[float]]] = {each: defaultdict(list) for each in models}
    for _ in range(rounds):
        for each, model in models.items():
            seconds[each][0].append(plain_step(model, slots, bandwidth).seconds)
            for row in passes(model, nodes, slots, bandwidth):
                seconds[each][row.nodes].append(row.seconds)
    return {
        each: {count: statistics.median(taken) for count, taken in own.items()}
        for each, own in seconds.items()
    }


if __name__ == "__main__":
    main()
