"""Tensors of single experts, brought together to the leaves that hold all of a layer's."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.models.config import ModelConfig
from specjax.models.families import Stored
from specjax.models.quantized import PackedWeight

Tensor = np.ndarray | PackedWeight


def gathered(
    found: Iterable[tuple[Stored, Tensor]], config: ModelConfig, folder: Path
) -> Iterator[tuple[Stored, Tensor]]:
    """Tensors as they come; those of single experts together, when the last of them has come.

    Until then they are what they were, as a rule views of files.

    Raises:
      CheckpointError: experts are packed in ways that differ.
    """
    waiting: dict[tuple[int | None, tuple[str, ...]], dict[int, tuple[Stored, Tensor]]] = {}
    for stored, tensor in found:
        if stored.expert is None or config.experts is None:
            yield stored, tensor
            continue
        own = waiting.setdefault((stored.layer, stored.leaves), {})
        own[stored.expert] = stored, tensor
        if len(own) == config.experts.count:
            del waiting[stored.layer, stored.leaves]
            first, last = own[0][0], own[len(own) - 1][0]
            whole = dataclasses.replace(
                first, name=f"{first.name} to {last.name}", shape=(len(own), *first.shape),
                expert=None,
            )  # fmt: skip
            yield whole, _stacked([own[expert] for expert in range(len(own))], folder)


def _stacked(parts: Sequence[tuple[Stored, Tensor]], folder: Path) -> Tensor:
    tensors = [tensor for _, tensor in parts]
    first = tensors[0]
    if isinstance(first, np.ndarray):
        for stored, tensor in parts:
            if not isinstance(tensor, np.ndarray):
                raise _mixed(stored, parts[0][0], folder)
        return np.stack([tensor for tensor in tensors if isinstance(tensor, np.ndarray)])
    packed = [tensor for tensor in tensors if isinstance(tensor, PackedWeight)]
    for stored, tensor in parts:
        if not isinstance(tensor, PackedWeight) or _kind(tensor) != _kind(first):
            raise _mixed(stored, parts[0][0], folder)
    if first.order is not None:
        raise CheckpointError(
            f"{parts[0][0].name} in {folder} has inputs in an order of its own (desc_act), which "
            "is not supported of experts."
        )
    rows = {name: np.stack([each.rows[name] for each in packed]) for name in first.rows}
    return first.changed(**rows)


def _kind(packed: PackedWeight) -> tuple[object, ...]:
    """What must be the same of the experts of a leaf."""
    shapes = tuple((name, part.shape, part.dtype) for name, part in packed.rows.items())
    table = None if packed.table is None else tuple(np.asarray(packed.table).tolist())
    return packed.bits, packed.form, packed.order is None, table, shapes


def _mixed(stored: Stored, first: Stored, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{stored.name} in {folder} is stored otherwise than {first.name}; experts of a layer are "
        "stored alike."
    )
