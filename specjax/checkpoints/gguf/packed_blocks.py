"""Blocks of GGUF files that become packed weights, to the bit what the file holds.

What a block is follows llama.cpp's `ggml-common.h`: a scale, perhaps an offset, and codes of 32
weights; or of 256 weights whose groups have scales that are integers times those of the block.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.models.quantized import PackedWeight, bytes_of, mxfp4_weight, packed_weight

Blocks = np.ndarray
Numbers = dict[str, np.ndarray]
"""Scales, and perhaps offsets, of the groups of blocks: `[..., blocks, groups]`."""

_GROUP, _GROUPS = 32, 8
"""Weights of a group, and groups of a large block."""
_NORMAL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL stand for."""


class Kind(NamedTuple):
    """A type of blocks: its fields, the codes in the order of their weights, a byte each, of which
    `bits` are held, and the scales and offsets of groups.
    """

    form: np.dtype
    codes: Callable[[Blocks], np.ndarray]
    bits: int
    numbers: Callable[[Blocks], Numbers]
    table: tuple[int, ...] | None = None


def packed(name: str, kind: Kind, blocks: Blocks) -> PackedWeight:
    """The matrix, or the matrices, of blocks `[..., O, blocks of a row]`.

    Raises:
      CheckpointError: a scale or an offset is NaN or infinite.
    """
    *whole, _ = blocks.shape  # of matrices, rows
    codes = kind.codes(blocks)
    values = (codes if kind.bits == 8 else bytes_of(codes, 4)).reshape(*whole, -1)
    if "exponent" in (kind.form.names or ()):
        try:
            return mxfp4_weight(values, np.ascontiguousarray(blocks["exponent"]))
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
    with np.errstate(all="ignore"):  # of numbers that are then looked at
        parts = {part: own.reshape(*whole, -1) for part, own in kind.numbers(blocks).items()}
    for part, numbers in parts.items():
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{name} holds a {part} that is NaN or infinity.")
    if kind.table is not None:
        table = np.asarray(kind.table, np.float32)
        return packed_weight(values, parts["scale"], 4, table=table, form="iq4_nl")
    return packed_weight(values, parts.pop("scale"), kind.bits, **parts)


def bytes_of_block(kind: Kind) -> int:
    """Bytes in memory of a block, without the table that a matrix has once."""
    made = packed("", kind, np.zeros((1, 1), kind.form))
    return made.nbytes - (0 if made.table is None else made.table.nbytes)


def _whole(blocks: Blocks) -> np.ndarray:
    """Signed codes of 8 bits, where 128 stands for 0."""
    return blocks["codes"] ^ 0x80


def _halves(blocks: Blocks, bytes_of_group: int = _GROUP // 2, field: str = "codes") -> np.ndarray:
    """Codes of 4 bits: in so many bytes the lower halves come first, then the upper ones."""
    codes = blocks[field]
    held = codes.reshape(*codes.shape[:-1], -1, 1, bytes_of_group)
    return (held >> np.array([[0], [4]], np.uint8) & 15).reshape(*codes.shape[:-1], -1)


def _with_fifth(blocks: Blocks) -> np.ndarray:
    """Codes of 5 bits, of which the fifth lies apart, a bit for each weight."""
    return _halves(blocks) | np.unpackbits(blocks["upper"], axis=-1, bitorder="little") << 4


def _large(blocks: Blocks) -> np.ndarray:
    return _halves(blocks, _GROUP)


def _large_with_fifth(blocks: Blocks) -> np.ndarray:
    """The same of large blocks: bit g of a byte is of group g."""
    bits = np.unpackbits(blocks["upper"][..., None], axis=-1, bitorder="little")
    codes = _large(blocks)
    return codes | bits.swapaxes(-1, -2).reshape(codes.shape) << 4


def _of_6_bits(blocks: Blocks) -> np.ndarray:
    """Codes of 6 bits, of which two lie apart: of halves of a block, four groups in each byte."""
    codes, upper = _halves(blocks, 2 * _GROUP), blocks["upper"]
    held = upper.reshape(*upper.shape[:-1], -1, 1, _GROUP)
    upper = held >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    return (codes | upper.reshape(codes.shape) << 4) + np.uint8(128 - 32)


def _own(blocks: Blocks) -> Numbers:
    """The scale of each block, and its offset if it has one."""
    fields = blocks.dtype.names or ()
    return {
        part: np.ascontiguousarray(blocks[part]) for part in ("scale", "offset") if part in fields
    }


def _of_groups(blocks: Blocks) -> Numbers:
    """Scales and offsets of a large block's groups, which are 6 bits each times the block's.

    The first 4 bytes hold the scales of as many groups and the upper bits of the other four, the
    next 4 those of the offsets, the last the lower bits of the others' scales and offsets.
    """
    held = blocks["of_groups"]
    first, second, rest = np.moveaxis(held.reshape(*held.shape[:-1], 3, _GROUPS // 2), -2, 0)
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=-1)
    offsets = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=-1)
    return {"scale": _times(blocks["scale"], scales), "offset": -_times(blocks["offset"], offsets)}


def _of_halved_groups(blocks: Blocks) -> Numbers:
    """Scales of groups of 16, which are 8 bits each times the block's."""
    return {"scale": _times(blocks["scale"], blocks["of_groups"])}


def _times(of_block: np.ndarray, of_groups: np.ndarray) -> np.ndarray:
    """Exact in float32."""
    return of_block[..., None].astype(np.float32) * of_groups.astype(np.float32)


def _kind(
    codes: Callable[[Blocks], np.ndarray],
    bits: int,
    *fields: tuple,
    numbers: Callable[[Blocks], Numbers] = _own,
    table: tuple[int, ...] | None = None,
) -> Kind:
    return Kind(np.dtype(list(fields)), codes, bits, numbers, table)


_SCALE, _OFFSET = ("scale", "<f2"), ("offset", "<f2")
_CODES, _FIFTH = ("codes", "u1", _GROUP // 2), ("upper", "u1", _GROUP // 8)
_SIXTHS, _LARGE = ("of_groups", "u1", 12), ("codes", "u1", _GROUPS * _GROUP // 2)

KINDS = {
    "Q8_0": _kind(_whole, 8, _SCALE, ("codes", "u1", _GROUP)),
    "Q4_0": _kind(_halves, 4, _SCALE, _CODES),
    "Q4_1": _kind(_halves, 4, _SCALE, _OFFSET, _CODES),
    "MXFP4": _kind(_halves, 4, ("exponent", "u1"), _CODES),
    "IQ4_NL": _kind(
        partial(_halves, field="places"), 4, _SCALE, ("places", "u1", _GROUP // 2),
        table=_NORMAL,
    ),
    "Q5_0": _kind(
        lambda blocks: _with_fifth(blocks) + np.uint8(128 - 16), 8, _SCALE, _FIFTH, _CODES
    ),
    "Q5_1": _kind(_with_fifth, 8, _SCALE, _OFFSET, _FIFTH, _CODES),
    "Q4_K": _kind(_large, 4, _SCALE, _OFFSET, _SIXTHS, _LARGE, numbers=_of_groups),
    "Q5_K": _kind(
        _large_with_fifth, 8, _SCALE, _OFFSET, _SIXTHS, ("upper", "u1", _GROUP), _LARGE,
        numbers=_of_groups,
    ),
    "Q6_K": _kind(
        _of_6_bits, 8, _LARGE, ("upper", "u1", 2 * _GROUP),
        ("of_groups", "i1", 2 * _GROUPS), _SCALE, numbers=_of_halved_groups,
    ),
}  # fmt: skip
"""By the names of types. No two have the same fields, by which a tensor's type is told."""
