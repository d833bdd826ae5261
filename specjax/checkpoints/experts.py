"""Tensors of single experts, brought together to the leaves that hold all of a layer's."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
        if len(own) == config.experts.num_experts:
            del waiting[stored.layer, stored.leaves]
            first, last = own[0][0], own[len(own) - 1][0]
            whole = dataclasses.replace(
                first, name=f"{first.name} to {last.name}", shape=(len(own), *first.shape),
                expert=None,
            )  # fmt: skip
            yield whole, _stacked([own[expert] for expert in range(len(own))], folder)


def _stacked(parts: Sequence[tuple[Stored, Any]], folder: Path) -> Tensor:
    first, tensors = parts[0][1], [tensor for _, tensor in parts]
    for stored, tensor in parts:
        if _kind(tensor) != _kind(first):
            raise CheckpointError(
                f"{stored.name} in {folder} is stored otherwise than {parts[0][0].name}; experts "
                "of a layer are stored alike."
            )
    if not isinstance(first, PackedWeight):
        return _rows(tensors)
    if first.order is not None:
        raise CheckpointError(
            f"{parts[0][0].name} in {folder} has inputs in an order of its own (desc_act), which "
            "is not supported of experts."
        )
    return first.changed(
        **{name: _rows([each.rows[name] for each in tensors]) for name in first.rows}
    )


def _rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays as the rows of one, of a single one in the same memory."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _kind(tensor: Any) -> tuple[object, ...]:
    """What must be the same of the experts of a leaf."""
    if not isinstance(tensor, PackedWeight):
        return (tensor.dtype,)
    shapes = tuple((name, part.shape, part.dtype) for name, part in tensor.rows.items())
    return tensor.bits, tensor.form, tensor.order is None, shapes
