"""Targets whose layers wait in pinned host memory: the ring of layers against a scan in a program.

    python -m benchmarks.offload.host humaneval.jsonl --parameters 8B --json 8b.json
    python -m benchmarks.offload.host humaneval.jsonl --parameters 30B --no-scan --json 30b.json

For a GPU machine with twice the weights of host memory (the scan holds them a third time). The
bundled target is grown in the host's memory, so that its drafts fare as they do with it. Timed are
moving alone, plain steps, best-first trees at temperature 0 and drawn ones above it, and one pass
of all layers by the ring and by a scan over stacked layers in host memory. On a CPU it runs, and
only copies.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from benchmarks.offload.disk import Bench, read_seconds, settings_of, step_times
from pallas_kernels.tree_attention import Prefix
from specjax.base.output import write_json
from specjax.checkpoints.offload.host import HostLayers, on_host
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.decoding.streamed import run_layer
from specjax.measure import prompts, timing
from specjax.models.inflate import inflate
from specjax.models.kv_cache import cache_dtype, empty_cache
from specjax.models.layer_weights import LayerWeights
from specjax.models.quantized import in_dtype
from specjax.models.streamed import StreamedModel, by_layers
from specjax.models.transformer import Model, layer_of_pass

_SLOTS, _REPEATS = 256, 5


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is measured."""

    prompts: tyro.conf.Positional[str]
    """A file of prompts; the first is continued."""
    parameters: str = "8B"
    """That the bundled target is grown to."""
    layers: int = 0
    """On the device."""
    budgets: tuple[int, ...] = (15, 63, 255, 1023)
    """Of best-first trees at temperature 0."""
    new: int = 96
    """Tokens of each continuation."""
    columns: tuple[int, ...] = (1, 16, 64, 256)
    """Of a pass, by the ring and by the scan."""
    scan: bool = True
    """Also time the scan."""
    json: str | None = None
    """Where the figures go."""


def offloaded(whole: Model, resident: int) -> StreamedModel:
    """A model of which the first layers are on the device, and the others in the host's memory."""
    device = jax.devices()[0]
    outer = jax.device_put(dataclasses.replace(whole, layers=()), device)
    waiting = [hosted(layer) for layer in whole.layers[resident:]]
    first = tuple(jax.device_put(whole.layers[:resident], device))
    return by_layers(dataclasses.replace(outer, layers=first), HostLayers(waiting, resident))


def hosted(layer: LayerWeights) -> LayerWeights:
    """A layer in the host's memory."""
    leaves, form = jax.tree.flatten(layer)
    placed = on_host({str(number): leaf for number, leaf in enumerate(leaves)})
    return jax.tree.unflatten(form, [placed[str(number)] for number in range(len(leaves))])


def median_seconds(work: Callable[[], Any]) -> float:
    """The median of some runs, after one that compiles."""
    jax.block_until_ready(work())
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(work())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def passes(target: StreamedModel, scan: bool, columns: tuple[int, ...]) -> dict[str, float]:
    """Seconds of a pass of the layers that are not on the device, by the ring and by a scan."""
    outer, config, first = target.outer, target.config, len(target.layers)
    cache = empty_cache(config, 1, _SLOTS, cache_dtype(outer.embedding.dtype), config.num_kv_heads)
    held = cache.keys[0], cache.values[0], cache.length
    assert isinstance(target.source, HostLayers)
    stacked = None
    if scan:
        stacked = hosted(
            jax.tree.map(
                lambda *leaves: np.stack([np.asarray(each) for each in leaves]),
                *target.source._layers,
            )
        )

    @jax.jit
    def scanned(stacked: LayerWeights, x: jax.Array, positions: jax.Array, mask: jax.Array) -> Any:
        def body(x: jax.Array, layer: LayerWeights) -> Any:
            near = jax.device_put(layer, jax.memory.Space.Device)
            kind = config.kind_of(first)
            return layer_of_pass(outer, near, kind, x, positions, mask, Prefix(*held))

        return lax.scan(body, x, stacked)

    found = {}
    for count in columns:
        positions = jnp.zeros((1, count), jnp.int32)
        mask = jnp.eye(count, dtype=bool)[None]

        def start(count: int = count) -> jax.Array:
            return jnp.ones((config.hidden_size, count), jnp.float32)

        def ring(positions: jax.Array = positions, mask: jax.Array = mask) -> jax.Array:
            x = start()
            with target.in_pass():
                for number in range(first, config.num_layers):
                    weights = target.layer(number)
                    kind = config.kind_of(number)
                    x, _ = run_layer(outer, weights, x, positions, mask, held, kind=kind)
                return jax.block_until_ready(x)

        found[f"ring {count}"] = median_seconds(ring)
        if stacked is not None:
            found[f"scan {count}"] = median_seconds(
                lambda positions=positions, mask=mask: scanned(stacked, start(), positions, mask)
            )
    return found


def measured(asked: Asked, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """All figures; those so far are handed to `keep` again and again."""
    with jax.default_device(jax.devices("cpu")[0]):
        pair = load_pair("bundled", dtype="float32")
        whole = in_dtype(inflate(pair.target, count_of(asked.parameters)), jnp.bfloat16)
    target = offloaded(whole, asked.layers)
    del whole
    drafts = [in_dtype(jax.device_put(each, jax.devices()[0]), jnp.bfloat16)
              for each in pair.drafts]  # fmt: skip
    own = Pair(target, pair.tokenizer, drafts)
    chosen, _ = prompts.fitting(
        prompts.read(asked.prompts), pair.tokenizer, target.config.max_positions, asked.new
    )
    found: dict[str, Any] = timing.environment() | {
        "config": dataclasses.asdict(asked), "parameters": target.config.num_parameters,
        "layers": target.config.num_layers, "bytes_a_pass": target.bytes_a_pass,
        "read_seconds": read_seconds(target), "rows": {},
    }  # fmt: skip
    print(
        f"moving alone: {found['bytes_a_pass'] / found['read_seconds'] / 1e9:.1f} GB/s", flush=True
    )
    for temperature, budgets in ((0.0, asked.budgets), (0.8, asked.budgets[:3])):
        bench = Bench(model="", prompts="", budgets=budgets, temperature=temperature, new=asked.new)
        for name, setting in settings_of(bench, own):
            most = 8 if name == "plain" else None
            timed = partial(
                step_times, own, setting, chosen[0].tokens, asked.new, temperature, most
            )
            timed()  # compiles
            steps = timed()
            row = {
                "step_seconds": statistics.median(steps.seconds),
                "drafting_seconds": statistics.median(steps.drafting or [0.0]),
                "tokens_per_step": steps.tokens / len(steps.seconds),
                "tokens_per_second": steps.tokens / sum(steps.seconds),
            }
            found["rows"][f"T = {temperature:g} {name}"] = row
            plain = found["rows"][f"T = {temperature:g} plain"]["tokens_per_second"]
            row["over_plain"] = row["tokens_per_second"] / plain
            print(temperature, name, *(f"{each:.3f}" for each in row.values()), flush=True)
            keep(found | {"complete": False})
    found["passes"] = passes(target, asked.scan, asked.columns)
    print(*(f"{name}: {each:.4f} s" for name, each in found["passes"].items()), sep="\n")
    return found


def main() -> None:
    """Prints the figures, and writes them."""
    asked = tyro.cli(Asked)

    def keep(found: dict[str, Any]) -> None:
        if asked.json is not None:
            write_json(asked.json, found)

    keep(measured(asked, keep))


if __name__ == "__main__":
    main()
