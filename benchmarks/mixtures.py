"""Passes of a mixture of experts by the nodes of a tree, and its plain steps, against bytes.

    python -m benchmarks.mixtures --kinds bfloat16 int4

Weights are random, so that experts are chosen as if drawn: a pass over n nodes takes
`expected_experts` of them, more than nodes of a text do, which choose alike. The floor of a time is
the bytes of what it reads over the machine's bandwidth. Medians of the rounds.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import tyro

from benchmarks.passes import measured
from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.measure.timing import environment, weight_bytes
from specjax.methods.records import use_compilation_cache
from specjax.models.config import PACKABLE, Experts, ModelConfig
from specjax.models.experts import expected_experts
from specjax.models.placement import placement
from specjax.models.quantized import kept, packed, with_activations
from specjax.models.transformer import Model, assemble

CONFIG = ModelConfig(
    vocab_size=32_768, hidden_size=1024, intermediate_size=2048, num_layers=16, num_heads=16,
    num_kv_heads=4, head_dim=64, head_norms="head", family="qwen3_moe",
    experts=Experts(num_experts=40, experts_per_token=4, intermediate_size=512),
)  # fmt: skip
"""1.08B parameters, of which a token reads 0.18B."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    kinds: tuple[str, ...] = ("bfloat16", "int4")
    """How weights are held: bfloat16, int8 or int4 (with a scale for each 64 inputs)."""
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Of a pass."""
    slots: int = 128
    """Tokens in the cache before them."""
    layers: int = 16
    """Of the model."""
    rounds: int = 7
    """Of all."""
    json: str | None = None
    """Where the rows are written."""


def main() -> None:
    """Measures, prints and writes it."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    use_compilation_cache()
    env, bandwidth = environment(), read_bandwidth()
    config = dataclasses.replace(CONFIG, num_layers=options.layers)
    print(env, f"{bandwidth / 1e9:.1f} GB/s", config.num_parameters, config.num_active_parameters)
    models = {kind: random_mixture(config, kind) for kind in options.kinds}
    found = measured(models, options.nodes, options.slots, options.rounds, bandwidth)
    rows = [
        _row(kind, models[kind], nodes, taken, bandwidth)
        for kind, own in found.items()
        for nodes, taken in own.items()
    ]
    for row in rows:
        print(row)
    if options.json is not None:
        write_json(options.json, {"env": env, "bandwidth": bandwidth, "rows": rows})


def _row(kind: str, model: Model, nodes: int, seconds: float, bandwidth: float) -> dict[str, Any]:
    assert model.config.experts is not None
    read = weight_bytes(model, max(nodes, 1))
    return {
        "kind": kind,
        "nodes": nodes or "plain step",
        "ms": round(1e3 * seconds, 2),
        "expected_experts": round(expected_experts(model.config.experts, max(nodes, 1)), 1),
        "read_mb": round(read / 1e6),
        "over_floor": round(seconds * bandwidth / read, 2),
    }


def random_mixture(config: ModelConfig, kind: str) -> Model:
    """A mixture of random weights that are held in such a way."""
    drawn, placed = np.random.default_rng(0), placement(config, None)

    def leaf(name: str, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return placed.put(name, np.ones(shape, np.float32), "float32")
        scale = shape[-1] ** -0.5
        number = (scale * drawn.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
        if kind == "bfloat16" or name not in PACKABLE:
            return placed.put_packed(name, kept(number), "float32")
        bits = {"int8": 8, "int4": 4}[kind]
        return placed.put_packed(name, packed(number, bits, None if bits == 8 else 64), "float32")

    layers = [
        {name: leaf(name, shape) for name, shape in config.layer_shapes(number).items()}
        for number in range(config.num_layers)
    ]
    outer = {name: leaf(name, shape) for name, shape in config.outer_shapes.items()}
    model = assemble(config, outer, layers)
    return model if kind == "bfloat16" else with_activations(model, None)


if __name__ == "__main__":
    main()
