"""Tensor types of GGUF files: blocks of weights as numpy dtypes, and what each stands for.

A tensor is an array of such blocks, mapped from the file, so its dtype alone says how it is read.
Matrices of whole numbers stay so; those of codes become packed weights (`packed_blocks`). Vectors
of codes are dequantized to float32, by the package `gguf`.
"""

import collections
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf.header import Tensor, header_of
from specjax.checkpoints.gguf.packed_blocks import KINDS, bytes_of_block, packed
from specjax.models.quantized import PackedWeight

_WHOLE = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
TYPES = (*_WHOLE, *KINDS)
"""Names of the tensor types that are read."""


def package() -> Any:
    """The package `gguf`, with its types and its arithmetic.

    Raises:
      CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError(
            "a GGUF file is read with the package gguf; install it, or specjax[gguf]."
        ) from error


@functools.cache
def _forms() -> dict[int, tuple[str, np.dtype, int]]:
    """Of each type by its number: its name, its blocks, and how many weights one has."""
    known: ModuleType = package()
    found = {}
    for name in TYPES:
        number = known.GGMLQuantizationType[name]
        weights, _ = known.GGML_QUANT_SIZES[number]
        form = KINDS[name].form if name in KINDS else _WHOLE[name]
        found[int(number)] = name, form, weights
    return found


def form_of(tensor: Tensor) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and the shape of a tensor's blocks.

    Raises:
      CheckpointError: its type is not supported, or its rows are not of whole blocks.
    """
    if tensor.kind not in _forms():
        kinds = {int(kind): kind.name for kind in package().GGMLQuantizationType}
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} is {kinds.get(tensor.kind, f'of type {tensor.kind}')}"
            f", which is not supported; {', '.join(TYPES)} are."
        )
    name, form, weights = _forms()[tensor.kind]
    if tensor.shape[-1] % weights:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has rows of {tensor.shape[-1]}; {name} has blocks of "
            f"{weights}."
        )
    return form, (*tensor.shape[:-1], tensor.shape[-1] // weights)


def types_in(file: Path) -> dict[str, str]:
    """How many tensors of a file are of each type, and what becomes of those, as people read it.

    Raises:
      CheckpointError: the file is damaged, or a type is not supported.
    """
    found = collections.Counter(
        _name_of(form_of(each)[0]) for each in header_of(file).tensors.values()
    )
    return {
        name: f"{count} packed" if name in KINDS else str(count)
        for name, count in found.most_common()
    }


def _name_of(form: np.dtype) -> str:
    """The name of the type that a tensor's dtype is of."""
    return next(name for name, own, _ in _forms().values() if own == form)


def is_packed(form: np.dtype) -> bool:
    """Whether tensors of a dtype stay packed."""
    return form.names is not None


def bytes_packed(form: np.dtype, blocks: int) -> int:
    """Bytes in memory of so many blocks of a type that stays packed."""
    return blocks * bytes_of_block(KINDS[_name_of(form)])


def weights_of(form: np.dtype, blocks: int) -> int:
    """How many weights so many blocks have."""
    return blocks * next(weights for _, own, weights in _forms().values() if own == form)


def matrix_of(name: str, tensor: np.ndarray) -> np.ndarray | PackedWeight:
    """What a tensor of blocks stands for: packed where that is exact, else in float32.

    Args:
      name: of it, for errors.
      tensor: `[O, blocks of a row]`, or such of each expert, in a dtype of `form_of`.

    Raises:
      CheckpointError: a scale is no number.
    """
    if not is_packed(tensor.dtype):
        return tensor
    if tensor.ndim > 1:
        return packed(name, KINDS[_name_of(tensor.dtype)], tensor)
    kind = package().GGMLQuantizationType[_name_of(tensor.dtype)]
    raw = np.ascontiguousarray(tensor).view(np.uint8).reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # of numbers that are then looked at
        return package().quants.dequantize(raw, kind)
