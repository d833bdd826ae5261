"""The closing figures of a run: what was made, how good it is, on what, and how long it took."""

import importlib.metadata
import itertools
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.model import Model
from train.collect import Collected
from train.heldout import View, estimates, hold_out, view
from train.loop import Metrics

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
_OPTIONS = ("GLIBC_TUNABLES", "XLA_FLAGS")


def machine() -> dict[str, Any]:
    """Device, cores, versions, and the environment variables that change speed."""
    return {
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "environment": {name: os.environ[name] for name in _OPTIONS if name in os.environ},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def stage_seconds(log_file: Path) -> dict[str, float]:
    """Wall time of each stage, from the log: a line's stage took the time since the line before.

    What passed between two runs is nobody's, and so is what a killed run did after its last line.
    """
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    spent: dict[str, float] = {}
    for before, after in itertools.pairwise(lines):
        if after["stage"] != "run":
            gap = after["time"] - before["time"]
            spent[after["stage"]] = round(spent.get(after["stage"], 0.0) + gap, 1)
    return spent


def pool_figures(
    target: Model, drafts: Sequence[Model], rows: Collected, depth: int
) -> list[Metrics]:
    """`heldout.estimates` of each draft, with the pool of it and those before it."""
    heldout, views, found = hold_out(target, rows), list[View](), list[Metrics]()
    for draft in drafts:
        own = view(draft, rows)
        found.append(estimates(heldout, own, views, depth))
        views.append(own)
    return found
