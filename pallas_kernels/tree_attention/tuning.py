"""Which implementation is the fastest, by what `pallas_kernels.bench --write` measured."""

import functools
import json
import math
from pathlib import Path
from typing import Any

from pallas_kernels.platform import device_kind
from pallas_kernels.tree_attention.operands import Operands

FILE = Path(__file__).with_name("measured.json")
_SIZES = ("batch", "nodes", "slots", "groups")


def choice(at: Operands) -> str:
    """The fastest implementation measured on this kind of device at the nearest shape, or "xla".

    Shapes are near by the logarithms of batch, nodes, cache slots and query heads a key/value head.
    Dtypes of block and cache and the head's features are the same, or it was not measured.
    """
    found = [entry for entry in measured().get(device(), []) if entry["kind"] == kind_of(at)]
    if not found:
        return "xla"
    sizes = sizes_of(at)
    return min(found, key=lambda entry: distance(entry, sizes))["fastest"]


def device() -> str:
    """The kind of device that is traced for."""
    return device_kind()


@functools.cache
def measured() -> dict[str, list[dict[str, Any]]]:
    """By kind of device, what was measured on it."""
    return json.loads(FILE.read_text("utf-8"))


def kind_of(at: Operands) -> str:
    """What must be equal for a measurement to count."""
    cache = "none" if at.prefix is None else at.prefix.keys.dtype.name
    return f"{at.block_keys.dtype.name} {cache} {at.query.shape[-1]}"


def sizes_of(at: Operands) -> dict[str, int]:
    """What may differ between a measurement and a call."""
    sizes = at.query.shape[0], at.query.shape[2], at.slots, at.groups
    return dict(zip(_SIZES, sizes, strict=True))


def distance(entry: dict[str, Any], sizes: dict[str, int]) -> float:
    """How far a measurement's sizes are from those of a call."""
    return sum(math.log2((entry[name] + 1) / (sizes[name] + 1)) ** 2 for name in _SIZES)
