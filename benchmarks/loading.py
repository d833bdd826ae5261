"""Loads a sharded checkpoint of random weights: peak memory and time, against the disk's own rate.

  python -m benchmarks.loading [--gib 2.0] [--folder FOLDER] [--dtype bfloat16] [--rounds 4]

Memory is what the process has for itself (anonymous; mapped file pages are not counted),
sampled every two milliseconds. The disk's rate is that of reading the same files once from the
start to the end, after the system was asked to forget them (`posix_fadvise`), as it is before each
load. Reads and loads take turns; a virtual machine is slow to give memory the first time, which is
why the first round stands apart. The peak is that of the first load: later ones find memory that
the process kept. Prints one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.system import Peak, forget
from specjax.checkpoints.load import load_model
from specjax.models import families
from specjax.models.config import ModelConfig

BLOCK = 16 << 20
SHARD = 400 << 20
_POLL_SECONDS = 0.002


def config_of(size: int) -> ModelConfig:
    """A model of about `size` bytes in bfloat16, with a large vocabulary as real ones have."""
    width = 2048 if size >= 1 << 30 else 256
    config = ModelConfig(
        vocab_size=16 * width, hidden_size=width, intermediate_size=3 * width, num_layers=1,
        num_heads=width // 64, num_kv_heads=width // 256, head_dim=64, tie_embeddings=False,
    )  # fmt: skip
    layer = sum(int(np.prod(shape)) for shape in config.layer_shapes(0).values())
    outer = config.num_parameters - layer
    layers = max(1, round((size / 2 - outer) / layer))
    return dataclasses.replace(config, num_layers=layers)


def write(folder: Path, config: ModelConfig) -> int:
    """Writes random weights in shards of 400 MiB; gives their bytes."""
    rng, shards, held, total = np.random.default_rng(0), [], {}, 0

    def flush() -> None:
        shards.append(dict.fromkeys(held, f"model-{len(shards):05d}.safetensors"))
        save_file(held, folder / next(iter(shards[-1].values())), metadata={"format": "pt"})
        held.clear()

    for stored in families.stored(families.FAMILIES[config.family], config):
        values = rng.standard_normal(stored.shape, np.float32)
        held[stored.name] = (0.02 * values).astype(ml_dtypes.bfloat16)
        total += held[stored.name].nbytes
        if sum(tensor.nbytes for tensor in held.values()) > SHARD:
            flush()
    if held:
        flush()
    index = {"weight_map": {name: file for shard in shards for name, file in shard.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(families.write_config(config)))
    return total


def read_through(folder: Path) -> float:
    """Seconds to read the files once."""
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK):
                pass
    return time.perf_counter() - start


def measured(folder: Path, dtype: str) -> dict[str, float]:
    """One load: seconds, bytes of the model and of its largest tensor, and the peak."""
    jax.block_until_ready(jax.numpy.zeros(8))  # the client is there before the clock starts
    with Peak(_POLL_SECONDS) as peak:
        start = time.perf_counter()
        model = load_model(folder, dtype=dtype)
        seconds = time.perf_counter() - start
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(model)]
    above = peak.bytes - peak.before
    return {
        "seconds": seconds,
        "model_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "peak_bytes": above,
        "beside_model_over_largest": (above - sum(sizes)) / max(sizes),
    }


def main() -> None:
    """Prints the figures as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = write(folder, config_of(int(options.gib * 2**30)))
        reads, loads = [], []
        for _ in range(options.rounds):
            forget(folder.glob("*.safetensors"))
            reads.append(read_through(folder))
            forget(folder.glob("*.safetensors"))
            loads.append(measured(folder, options.dtype))
    seconds = [load["seconds"] for load in loads]
    report = {
        "file_bytes": size,
        "model_bytes": loads[0]["model_bytes"],
        "largest_bytes": loads[0]["largest_bytes"],
        "peak_beside_model_over_largest": loads[0]["beside_model_over_largest"],
        "read_seconds": reads,
        "load_seconds": seconds,
        "median_of_later_loads_over_reads": statistics.median(seconds[1:])
        / statistics.median(reads[1:]),
        "disk_mb_per_s": size / statistics.median(reads[1:]) / 1e6,
        "load_mb_per_s": size / statistics.median(seconds[1:]) / 1e6,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
