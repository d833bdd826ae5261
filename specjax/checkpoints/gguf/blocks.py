"""Tensor types of GGUF files: blocks of weights as numpy dtypes, and what each stands for.

A tensor is an array of such blocks, mapped from the file, so its dtype alone says how it is read:
Q8_0, Q4_0, Q4_1 and MXFP4 become packed weights of groups of 32, to the bit what the file holds;
other blocks are dequantized to float32, by the package `gguf`.
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
from specjax.models.quantized import PackedWeight, bytes_of, mxfp4_weight, packed_weight

_GROUP = 32
_HALF = "<f2"
_PACKED = {
    "Q8_0": np.dtype([("scale", _HALF), ("codes", "u1", _GROUP)]),
    "Q4_0": np.dtype([("scale", _HALF), ("codes", "u1", _GROUP // 2)]),
    "Q4_1": np.dtype([("scale", _HALF), ("offset", _HALF), ("codes", "u1", _GROUP // 2)]),
    "MXFP4": np.dtype([("exponent", "u1"), ("codes", "u1", _GROUP // 2)]),
}
"""Blocks that a packed weight holds as they are."""
_WHOLE = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype(_HALF),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHERS = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
TYPES = (*_WHOLE, *_PACKED, *_OTHERS)
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
        weights, size = known.GGML_QUANT_SIZES[number]
        form = _WHOLE.get(name) or _PACKED.get(name) or np.dtype([(name, "u1", size)])
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
    fates = {**dict.fromkeys(_PACKED, " packed"), **dict.fromkeys(_OTHERS, " dequantized")}
    return {name: f"{count}{fates.get(name, '')}" for name, count in found.most_common()}


def _name_of(form: np.dtype) -> str:
    """The name of the type that a tensor's dtype is of."""
    return next(name for name, own, _ in _forms().values() if own == form)


def is_packed(form: np.dtype) -> bool:
    """Whether tensors of a dtype stay packed."""
    return form in _PACKED.values()


def bytes_packed(form: np.dtype, blocks: int) -> int:
    """Bytes in memory of so many blocks of a type that stays packed: exponents get 16 bits."""
    return blocks * (form.itemsize + ("exponent" in (form.names or ())))


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
    if tensor.dtype.names is None:
        return tensor
    if is_packed(tensor.dtype) and tensor.ndim > 1:
        return _packed(name, tensor)
    kind = package().GGMLQuantizationType[_name_of(tensor.dtype)]
    raw = np.ascontiguousarray(tensor).view(np.uint8).reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # of numbers that are then looked at
        return package().quants.dequantize(raw, kind)


def _packed(name: str, blocks: np.ndarray) -> PackedWeight:
    *whole, _ = blocks.shape  # of matrices, rows
    codes = blocks["codes"]
    parts = {}
    for part in ("scale", "offset"):
        if part in (blocks.dtype.names or ()):
            parts[part] = np.ascontiguousarray(blocks[part])
            if not np.isfinite(parts[part]).all():
                raise CheckpointError(f"{name} holds a {part} that is NaN or infinity.")
    if codes.shape[-1] == _GROUP:  # signed, where 128 stands for 0
        return packed_weight((codes ^ 0x80).reshape(*whole, -1), parts.pop("scale"), 8, **parts)
    first, second = codes & 15, codes >> 4  # of inputs 0 to 15, and 16 to 31
    values = bytes_of(np.concatenate([first, second], axis=-1), 4).reshape(*whole, -1)
    if "scale" in parts:
        return packed_weight(values, parts.pop("scale"), 4, **parts)
    try:
        return mxfp4_weight(values, np.ascontiguousarray(blocks["exponent"]))
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
