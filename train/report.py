"""What a run says of itself: the machine, how fast it is, how long the stages took."""

import functools
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.measure.timing import environment
from specjax.models.config import ModelConfig

_PACKAGES = ("flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
_OPTIONS = ("GLIBC_TUNABLES", "XLA_FLAGS")
_SIDE = 2048


def machine() -> dict[str, Any]:
    """Device, cores, versions, and the environment variables that change speed."""
    return {
        **environment(),
        "devices": jax.device_count(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "environment": {name: os.environ[name] for name in _OPTIONS if name in os.environ},
    }


@functools.cache
def matmul_rate(dtype: str) -> float:
    """Operations a second of large matrix products in `dtype`, on all devices; measured once.

    The median of seven products of two square matrices of 2,048, which returns float32.
    """
    one = jnp.full((_SIDE, _SIDE), 0.5, dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    product(one, one).block_until_ready()
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        product(one, one).block_until_ready()
        seconds.append(time.perf_counter() - began)
    shared = jax.default_backend() == "cpu"  # virtual devices share one processor
    return 2 * _SIDE**3 / statistics.median(seconds) * (1 if shared else jax.device_count())


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of a training step a token, in sequences of `length`: forward and backward.

    Six a weight that is multiplied (of experts those that a token takes, the embedding only where
    it is tied), and six times the causal half of queries times keys and of weights times values.
    """
    is_looked_up = not config.tie_embeddings and "embedding" in config.outer_shapes
    lookup = config.vocab_size * config.hidden_size if is_looked_up else 0
    attention = config.num_layers * config.num_heads * config.head_dim * length
    return 6.0 * (config.num_active_parameters - lookup) + 6.0 * attention


def stage_seconds(log_file: Path, places: Collection[str]) -> dict[str, float]:
    """Seconds that each stage's work took, of the lines that name one of `places`."""
    spent: dict[str, float] = {}
    for line in _lines(log_file, places):
        spent[line["stage"]] = round(spent.get(line["stage"], 0.0) + line["seconds"], 1)
    return spent


def losses(log_file: Path, places: Collection[str]) -> dict[str, float]:
    """The last logged loss of each of `places`."""
    return {line["where"]: line["loss"] for line in _lines(log_file, places) if "loss" in line}


def marked(log_file: Path, places: Sequence[str]) -> list[float]:
    """The share that was marked before each of `places` was trained, where boosting made one."""
    found = {line["where"]: line["marked"] for line in _lines(log_file, places) if "marked" in line}
    return [found[place] for place in places if place in found]


def _lines(log_file: Path, places: Collection[str]) -> list[dict[str, Any]]:
    """The log's lines about one of `places`, oldest first."""
    found = []
    for text in log_file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a kill may leave half a line
            continue
        if line.get("where") in places:
            found.append(line)
    return found
