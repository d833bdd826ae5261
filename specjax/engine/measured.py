"""How long an engine's programs take, kept from one start to the next in the cache folder."""

import contextlib
import datetime
import hashlib
import math
import os
from typing import Any

import jax

from pallas_kernels.dispatch import named
from specjax.base.machine import cpu_digest
from specjax.base.store import Store
from specjax.engine.device import Measured, Plan
from specjax.engine.sizes import Sizes
from specjax.goodput.costs import Cost
from specjax.goodput.policy import StepShape
from specjax.trees.widths import is_number

_STORE = Store("step_costs.json")
_MOST = 32
"""Engines whose costs are kept, those last measured."""


def name_of(models: Any, plan: Plan, sizes: Sizes) -> str:
    """The name under which the costs of an engine are kept.

    That of the machine, of the models' shapes and of the programs: not of their weights.
    """
    shapes = [f"{leaf.shape}{leaf.dtype}" for leaf in jax.tree.leaves(models)]
    parts = (
        jax.devices()[0].device_kind, cpu_digest(), f"{os.cpu_count()} cores",
        f"jax {jax.__version__}", *shapes, str(jax.tree.structure(models)), repr(plan), repr(sizes),
    )  # fmt: skip
    if (kernels := named()) is not None:
        parts += (f"kernels {kernels}",)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def recall(name: str, plan: Plan) -> Measured | None:
    """What was kept under a name, of the programs of a plan and of further steps; None if one of
    the plan's is not there.
    """
    found = _measured(_STORE.read().get(name))
    if found is None:
        return None
    if not found.step_costs.keys() >= set(plan.steps):
        return None
    try:
        return Measured(
            {size: found.chunk_seconds[size] for size in plan.chunks},
            found.step_costs,
            {size: found.catch_up_seconds[size] for rows, size in plan.catch_ups if rows == 1},
            found.batch_seconds,
            {shape: found.mixed_seconds[shape] for shape in plan.mixed_steps},
        )
    except KeyError:
        return None


def _measured(values: Any) -> Measured | None:
    """What was written of an engine; None if it is anything else."""
    match values:
        case {
            "date": str(_),
            "chunks": [*chunks],
            "steps": [*steps],
            "catch_ups": [*reads],
            "batch": batch,
            "mixed": [*mixed],
            **others,
        } if not others:
            entries = (*chunks, *steps, *reads)
            lengths = (3,) * len(chunks) + (5,) * len(steps) + (2,) * len(reads)
            if not all(map(_is_mixed, mixed)):
                return None
            if not all(map(_is_entry, entries, lengths)):
                return None
            if batch is not None and not (is_number(batch) and batch > 0):
                return None
            return Measured(
                {int(size): (float(alone), float(more)) for size, alone, more in chunks},
                {
                    StepShape(str(name), int(rows), int(width)): Cost(float(own), float(more))
                    for name, rows, width, own, more in steps
                },
                {int(size): float(seconds) for size, seconds in reads},
                math.inf if batch is None else float(batch),
                {
                    StepShape(str(name), int(rows), int(width)): float(more)
                    for name, rows, width, more in mixed
                },
            )
    return None


def _is_mixed(entry: Any) -> bool:
    """Whether this says what prompts add to a step: seconds, which may be 0."""
    match entry:
        case [str(_), int(_), int(_), _]:
            return all(map(is_number, entry[1:])) and min(entry[1:]) >= 0
    return False


def _is_entry(entry: Any, length: int) -> bool:
    """Whether this is a program's entry: numbers, of which seconds are not 0 and none is below."""
    match entry:
        case [int(_), seconds] | [int(_), seconds, _] | [str(_), int(_), int(_), seconds, _]:
            numbers = entry[isinstance(entry[0], str) :]
            known = len(entry) == length and all(map(is_number, numbers))
            return known and min(numbers) >= 0 and seconds > 0
    return False


def remember(name: str, found: Measured) -> None:
    """Keeps costs under a name, unless there is no folder to keep them in."""

    def changed(held: dict[str, Any]) -> dict[str, Any]:
        held.pop(name, None)
        kept = [(key, own) for key, own in held.items() if _measured(own) is not None]
        return {**dict(kept[1 - _MOST :]), name: _written(found)}

    with contextlib.suppress(OSError):
        _STORE.change(changed)


def _written(found: Measured) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "chunks": [[size, *own] for size, own in found.chunk_seconds.items()],
        "steps": [[*shape, *cost] for shape, cost in found.step_costs.items()],
        "catch_ups": [[size, own] for size, own in found.catch_up_seconds.items()],
        "batch": None if math.isinf(found.batch_seconds) else found.batch_seconds,
        "mixed": [[*shape, more] for shape, more in found.mixed_seconds.items()],
    }
