"""Tensor types of GGUF files: blocks of weights as numpy dtypes, and what each stands for.

A tensor is an array of such blocks, mapped from the file, so its dtype alone says how it is read.
All but Q6_K, whose groups are of 16, become packed weights of groups of 32, to the bit what the
file holds: codes of 5 bits in 8, and the scales of Q4_K and Q5_K, which are themselves quantized,
as float32. Q6_K is dequantized to float32, by the package `gguf`.
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

_GROUP, _GROUPS = 32, 8
"""Weights of a group, and groups of a large block."""
_SCALE, _OFFSET = ("scale", "<f2"), ("offset", "<f2")
_HALVES = ("codes", "u1", _GROUP // 2)
_FIFTH = ("fifth", "u1", _GROUP // 8)
_OF_GROUPS = ("of_groups", "u1", 12)
_LARGE = ("codes", "u1", _GROUPS * _GROUP // 2)
_PACKED = {
    "Q8_0": np.dtype([_SCALE, ("codes", "u1", _GROUP)]),
    "Q4_0": np.dtype([_SCALE, _HALVES]),
    "Q4_1": np.dtype([_SCALE, _OFFSET, _HALVES]),
    "MXFP4": np.dtype([("exponent", "u1"), _HALVES]),
    "IQ4_NL": np.dtype([_SCALE, ("places", "u1", _GROUP // 2)]),
    "Q5_0": np.dtype([_SCALE, _FIFTH, _HALVES]),
    "Q5_1": np.dtype([_SCALE, _OFFSET, _FIFTH, _HALVES]),
    "Q4_K": np.dtype([_SCALE, _OFFSET, _OF_GROUPS, _LARGE]),
    "Q5_K": np.dtype([_SCALE, _OFFSET, _OF_GROUPS, ("fifths", "u1", _GROUP), _LARGE]),
}
"""Blocks that a packed weight holds: a scale and perhaps an offset, codes of 4 or 8 bits, of those
of 5 bits the fifth apart, and in large blocks what scales and offsets of groups are times those.
"""
_BYTES = {"MXFP4": 18, "Q5_0": 34, "Q5_1": 36, "Q4_K": 192, "Q5_K": 320}
"""Bytes in memory of a block that becomes larger."""
_NORMAL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL stand for, in llama.cpp's ggml-common.h."""
_WHOLE = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHERS = ("Q6_K",)
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
    """Bytes in memory of so many blocks of a type that stays packed."""
    return blocks * _BYTES.get(_name_of(form), form.itemsize)


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
    fields = blocks.dtype.names or ()
    parts = {
        part: np.ascontiguousarray(blocks[part]) for part in ("scale", "offset") if part in fields
    }
    if "of_groups" in fields:
        parts = _of_groups(blocks["of_groups"], **parts)
    for part, numbers in parts.items():
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{name} holds a {part} that is NaN or infinity.")
        parts[part] = numbers.reshape(*whole, -1)
    if "exponent" in fields:
        values = bytes_of(_in_order(blocks["codes"]), 4).reshape(*whole, -1)
        try:
            return mxfp4_weight(values, np.ascontiguousarray(blocks["exponent"]))
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
    if "places" in fields:
        values = bytes_of(_in_order(blocks["places"]), 4).reshape(*whole, -1)
        table = np.asarray(_NORMAL, np.float32)
        return packed_weight(values, parts["scale"], 4, table=table, form="iq4_nl")
    codes = blocks["codes"]
    if codes.shape[-1] == _GROUP:  # signed, where 128 stands for 0
        codes, bits = codes ^ 0x80, 8
    else:
        codes, bits = _in_order(codes), 4
    if "fifth" in fields:
        fifth = np.unpackbits(blocks["fifth"], axis=-1, bitorder="little")
        codes, bits = codes | fifth << 4, 8
        codes = codes if "offset" in parts else codes + np.uint8(128 - 16)
    elif "fifths" in fields:
        fifth = np.unpackbits(blocks["fifths"][..., None], axis=-1, bitorder="little")
        codes, bits = codes | fifth.swapaxes(-1, -2).reshape(codes.shape) << 4, 8
    values = codes if bits == 8 else bytes_of(codes, 4)
    return packed_weight(values.reshape(*whole, -1), parts.pop("scale"), bits, **parts)


def _in_order(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, a byte each, in the order of their inputs.

    In the lower halves of a group's 16 bytes, or of two groups' 32, are the first of them.
    """
    held = codes.reshape(*codes.shape[:-1], -1, 1, min(codes.shape[-1], _GROUP))
    return (held >> np.array([[0], [4]], np.uint8) & 15).reshape(*codes.shape[:-1], -1)


def _of_groups(held: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> dict[str, np.ndarray]:
    """Scales and offsets of a large block's groups, of which `held` are 6 bits each.

    The first 4 bytes hold the scales of as many groups and the upper bits of the other four, the
    next 4 those of the offsets, the last the lower bits of the others' scales and offsets.
    """
    first, second, rest = np.moveaxis(held.reshape(*held.shape[:-1], 3, _GROUPS // 2), -2, 0)
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=-1)
    offsets = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=-1)
    with np.errstate(all="ignore"):  # of numbers that are then looked at
        return {
            "scale": scale[..., None].astype(np.float32) * scales.astype(np.float32),
            "offset": -(offset[..., None].astype(np.float32) * offsets.astype(np.float32)),
        }
