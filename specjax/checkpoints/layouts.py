"""How libraries' files hold quantized matrices, each layout read as packed ones.

Layouts are those that the libraries write: compressed-tensors (vLLM's llm-compressor), GPTQ
(AutoGPTQ and GPTQModel), AWQ (AutoAWQ), block-wise fp8 (DeepSeek), bitsandbytes, MXFP4 (gpt-oss).
What a configuration says must be of its kind, and tensors must have the shapes and dtypes of their
layout: numpy would make something of most others.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.checkpoints.layout_checks import (
    Json,
    Parts,
    Unfit,
    block_of,
    matrix_of,
    must_be,
    object_of,
    said_of,
    truth_of,
    whole_of,
)
from specjax.models.quantized import (
    FLOAT8,
    INTEGER,
    PackedWeight,
    bytes_of,
    mxfp4_weight,
    packed_weight,
)

Kinds = tuple[np.dtype[Any], ...]


def _dtypes(*names: Any) -> Kinds:
    return tuple(map(np.dtype, names))


_FLOATS = _dtypes(np.float16, ml_dtypes.bfloat16, np.float32)
_WORDS, _PLACES = _dtypes(np.int32, np.uint32), _dtypes(np.int32, np.int64)
_INT8, _UINT8, _FLOAT32 = _dtypes(np.int8), _dtypes(np.uint8), _dtypes(np.float32)
_FP8 = _dtypes(ml_dtypes.float8_e4m3fn)
_ANY: Kinds = ()

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word, from the lowest, an AWQ file has each of eight outputs."""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
            "mixed-precision", "dense")  # fmt: skip
"""Of compressed-tensors."""
_TABLES = {
    "nf4": (-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0,
            0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0),
    "fp4": (0.0, 0.00521, 0.66667, 1.0, 0.33333, 0.5, 0.16667, 0.25,
            -0.0, -0.00521, -0.66667, -1.0, -0.33333, -0.5, -0.16667, -0.25),
}  # fmt: skip
"""The numbers of bitsandbytes' codes to five places, with which it computes whatever a file has."""


class Layout(NamedTuple):
    """How a library's files hold a quantized matrix.

    Attributes:
      main: the tensor without which there is none.
      kinds: dtypes of `main` in which it is quantized; weights of other dtypes are left as they
        are.
      needed: others that belong to it, and their dtypes; any, where none is named.
      may: those that may be there.
      read: makes the packed matrix of them.
      joint: what lies between a matrix's name and those of its tensors.
      end: what the matrix's name ends with.
    """

    main: str
    kinds: Kinds
    needed: Mapping[str, Kinds]
    may: Mapping[str, Kinds]
    read: Callable[[Parts], PackedWeight]
    joint: str = "."
    end: str = ".weight"


def _packed(
    values: np.ndarray, scale: np.ndarray, bits: int, zero: np.ndarray | None = None,
    order: np.ndarray | None = None, table: np.ndarray | None = None, form: str = INTEGER,
) -> PackedWeight:  # fmt: skip
    """A packed matrix whose parts fit each other.

    Raises:
      Unfit: they do not, or a scale is no number.
    """
    outputs, inputs = values.shape[0], values.shape[1] * 8 // bits
    if scale.ndim != 2 or not scale.size or len(scale) != outputs or inputs % scale.shape[1]:
        raise Unfit(f"scales {scale.shape} do not divide a matrix of {outputs} × {inputs}.")
    if zero is not None and zero.shape != scale.shape:
        raise Unfit(f"there are zeros {zero.shape} for scales {scale.shape}.")
    if not np.isfinite(scale.astype(np.float32)).all():
        raise Unfit("a scale is NaN or infinite.")
    return packed_weight(values, scale, bits, zero=zero, order=order, table=table, form=form)


def _nibbles(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes within words along the last axis, the lowest bits first: uint8."""
    found = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return found
    return np.stack([found & 15, found >> 4], axis=-1).reshape(*found.shape[:-1], -1)


def _sorted(groups: np.ndarray | None, codes: np.ndarray, count: int) -> Any:
    """Codes `[O, I]` with the inputs of each group side by side, and the order that they have.

    Raises:
      Unfit: not every input has a group, or groups are not equally long.
    """
    if groups is None:
        return codes, None
    if groups.shape != codes.shape[1:]:
        raise Unfit(f"g_idx has shape {groups.shape}; there are {codes.shape[1]} inputs.")
    size = codes.shape[1] // count
    if (groups == np.arange(groups.size) // max(size, 1)).all():
        return codes, None
    if groups.min() < 0 or groups.max() >= count:
        raise Unfit(
            f"g_idx has groups {groups.min()} to {groups.max()}; there are scales of {count}."
        )
    counts = np.bincount(groups, minlength=count)
    if (counts != size).any():
        raise Unfit(f"g_idx has groups of {counts.min()} to {counts.max()} inputs.")
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return codes[:, order], order


def _check_bits(bits: Any) -> int:
    if type(bits) is not int or bits not in (4, 8):
        raise Unfit(f"{bits!r} bits are not supported; 4 and 8 are.")
    return bits


def specs_of(about: Json) -> list[Json]:
    """What the groups of a compressed-tensors configuration say of their weights.

    Raises:
      Unfit: a value is not of its kind.
    """
    found = []
    groups = object_of(about, "config_groups")
    for name in groups:
        spec = object_of(object_of(groups, name), "weights")
        whole_of(spec, "num_bits")
        whole_of(spec, "group_size", but=-1)
        truth_of(spec, "symmetric")
        if spec.get("type") not in (None, "int", "float"):
            raise Unfit(f"type {spec['type']!r} of weights is not supported; int and float are.")
        if spec.get("strategy") not in (None, "tensor", "channel", "group", "block"):
            raise Unfit(f"strategy {spec['strategy']!r} of weights is not supported.")
        block = spec.get("block_structure")
        if block is not None or spec.get("strategy") == "block":
            block_of(spec, "block_structure")
        if spec:
            found.append(spec)
    return found


def _compressed(about: Json) -> list[Layout]:
    """compressed-tensors: `pack-quantized` words of 4 or 8 bits, or int8 or fp8 as they are."""
    specs, groups = specs_of(about), object_of(about, "config_groups")
    formats = [about.get("format", "dense")]
    formats += [object_of(groups, name).get("format") or formats[0] for name in groups]
    for name in formats:
        if name not in _FORMATS:
            raise Unfit(f"format {name!r} is not supported; {', '.join(_FORMATS)} are.")
    sparse = object_of(about, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise Unfit(f"sparsity format {sparse!r} is not supported.")
    if object_of(about, "transform_config").get("config_groups"):
        raise Unfit("transform_config has rotations of activations, which are not supported.")
    blocks = [
        block_of(each, "block_structure") for each in specs if each.get("strategy") == "block"
    ]
    bits: set[int] = {spec["num_bits"] for spec in specs if spec.get("num_bits") is not None}

    def words(parts: Parts) -> PackedWeight:
        return _compressed_words(parts, bits, specs)

    def whole(parts: Parts) -> PackedWeight:
        rows = {spec.get("strategy") for spec in specs} <= {"channel", "group"} and bool(specs)
        if rows and parts["weight_scale"].size == 1 < len(parts["weight"]):
            raise Unfit("weight_scale is one number; config_groups say that each row has its own.")
        return _compressed_whole(parts, blocks)

    return [
        Layout("weight_packed", _dtypes(np.int32),
               {"weight_scale": _FLOATS, "weight_shape": _PLACES},
               {"weight_zero_point": _dtypes(np.int32), "weight_g_idx": _PLACES}, words),
        Layout("weight", (*_INT8, *_FP8), {"weight_scale": _FLOATS},
               {"weight_zero_point": (*_INT8, *_FP8), "weight_g_idx": _PLACES,
                "input_scale": _ANY, "input_zero_point": _ANY}, whole),
    ]  # fmt: skip


def _compressed_words(parts: Parts, said: set[int], specs: list[Json]) -> PackedWeight:
    words, scale = matrix_of(parts, "weight_packed"), matrix_of(parts, "weight_scale")
    shape = must_be(parts, "weight_shape", (2,)).tolist()
    if min(shape) < 1:
        raise Unfit(f"weight_shape is {shape}; it must be two numbers above 0.")
    outputs, inputs = shape
    bits = _check_bits(32 * words.shape[1] // inputs)
    if words.shape != (outputs, inputs * bits // 32) or inputs * bits % 32:
        raise Unfit(f"{words.shape} words do not hold {outputs} × {inputs} codes.")
    if bits not in said:
        named = " or ".join(map(str, sorted(said))) or "none"
        raise Unfit(f"{words.shape} words hold {bits} bits a weight; num_bits is {named}.")
    zero = parts.get("weight_zero_point")
    if zero is not None:
        must_be(parts, "weight_zero_point", (-(-outputs * bits // 32), scale.shape[1]))
        zero = _nibbles(zero.T, bits)[:, :outputs].T
    codes, order, groups = np.ascontiguousarray(words).view(np.uint8), None, _groups_of(parts)
    if groups is not None:
        codes, order = _sorted(groups, _nibbles(words, bits), scale.shape[1])
        codes = bytes_of(codes, bits)
    elif specs and all(spec.get("actorder") in ("group", True) for spec in specs):
        raise Unfit("actorder is group, but there is no weight_g_idx.")
    return _packed(codes, scale, bits, zero, order)


def _groups_of(parts: Parts) -> np.ndarray | None:
    """The groups of inputs of compressed-tensors; -1 everywhere stands for none."""
    found = parts.get("weight_g_idx")
    return None if found is None or (found == -1).all() else found


def _compressed_whole(parts: Parts, blocks: list[tuple[int, int]]) -> PackedWeight:
    weight, zero = matrix_of(parts, "weight"), parts.get("weight_zero_point")
    if _groups_of(parts) is not None:
        raise Unfit("weight_g_idx is not supported beside codes that are not packed in words.")
    if weight.dtype == np.int8:
        scale = _of_rows(parts["weight_scale"], weight.shape)
        if zero is not None:
            if zero.dtype != np.int8:
                raise Unfit(f"weight_zero_point is {zero.dtype}; the weights are int8.")
            zero = _of_rows(zero, weight.shape).view(np.uint8) ^ 128
        return _packed(weight.view(np.uint8) ^ 128, scale, 8, zero)
    if zero is not None and zero.astype(np.float32).any():
        raise Unfit("weight_zero_point of fp8 is not zero.")
    scale = parts["weight_scale"]
    for block in blocks:
        if scale.shape == _blocks_in(weight.shape, block):
            return _float8(weight, _of_blocks(scale, weight.shape, block))
    return _float8(weight, _of_rows(scale, weight.shape))


def _of_rows(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scales `[O, G]` of those of the whole matrix, of each row or of each group.

    Raises:
      Unfit: there are none for each row.
    """
    outputs = shape[0]
    if scale.size == 1:
        return np.full((outputs, 1), scale.reshape(-1)[0])
    found = scale[:, None] if scale.ndim == 1 else scale
    if found.ndim != 2 or len(found) != outputs:
        raise Unfit(f"scales {scale.shape} are not of {outputs} rows.")
    return np.ascontiguousarray(found)


def _blocks_in(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // each) for n, each in zip(shape, block, strict=True))


def _of_blocks(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Scales `[O, G]` of those of blocks of rows and inputs.

    Raises:
      Unfit: blocks do not divide the matrix so.
    """
    if scale.shape != _blocks_in(shape, block) or shape[1] % min(block[1], shape[1]):
        raise Unfit(f"blocks of {list(block)} do not divide {shape}, or not into {scale.shape}.")
    return scale[np.arange(shape[0]) // block[0]]


def _float8(weight: np.ndarray, scale: np.ndarray) -> PackedWeight:
    codes = weight.view(np.uint8)
    if ((codes & 127) == 127).any():
        raise Unfit("it holds NaN.")
    return _packed(codes, scale, 8, form=FLOAT8)


def _gptq(about: Json) -> list[Layout]:
    """GPTQ: words along the inputs; the first version's zeros are stored less 1.

    Of 4 bits they may be 16 then, as AutoGPTQ and vLLM have it. Some writers name the first version
    and store symmetric zeros as the second does: the middle itself.
    """
    bits, own = _check_bits(about.get("bits")), said_of(about, "format", "gptq")
    version = said_of(about, "checkpoint_format", own)
    if about.get("format") not in (None, version):
        raise Unfit(f"checkpoint_format is {version!r}, and format {own!r}.")
    if version not in ("gptq", "gptq_v2"):
        raise Unfit(f"checkpoint_format {version!r} is not supported; gptq and gptq_v2 are.")
    symmetric, sorts = truth_of(about, "sym"), truth_of(about, "desc_act")
    whole_of(about, "group_size", but=-1)
    middle, each = 1 << (bits - 1), 32 // bits

    def matrix(parts: Parts) -> PackedWeight:
        words, scale = matrix_of(parts, "qweight"), matrix_of(parts, "scales")
        outputs, count = words.shape[1], len(scale)
        must_be(parts, "scales", (count, outputs))
        must_be(parts, "qzeros", (count, -(-outputs // each)))
        codes = _nibbles(words.T, bits)
        zero = _nibbles(parts["qzeros"], bits)[:, :outputs].T
        as_they_are = version == "gptq_v2" or (symmetric is True and (zero == middle).all())
        if not as_they_are:
            if zero.max(initial=0) == 255:
                raise Unfit("a zero of 256 is not supported.")
            zero = zero + np.uint8(1)
        if "g_idx" not in parts and sorts is not False and count > 1:
            raise Unfit("there is no g_idx, and desc_act is not false.")
        codes, order = _sorted(parts.get("g_idx"), codes, count)
        scale = np.ascontiguousarray(scale.T)
        return _packed(bytes_of(codes, bits), scale, bits, np.ascontiguousarray(zero), order)

    return [Layout("qweight", _WORDS, {"qzeros": _WORDS, "scales": _FLOATS}, {"g_idx": _PLACES},
                   matrix)]  # fmt: skip


def _awq(about: Json) -> list[Layout]:
    """AWQ: words of eight outputs, in an order of their own."""
    bits, version = about.get("bits", about.get("w_bit")), said_of(about, "version", "gemm")
    if type(bits) is not int or bits != 4 or str(version).lower() != "gemm":
        raise Unfit(f"{bits!r} bits of version {version!r} are not supported; 4 of gemm are.")
    if truth_of(about, "zero_point") is False:
        raise Unfit("zero_point is false, which is not supported; qzeros are read as they are.")
    for key in ("group_size", "q_group_size"):
        whole_of(about, key, but=-1)

    def codes(words: np.ndarray) -> np.ndarray:
        found = _nibbles(words, 4)
        return found.reshape(len(found), -1, 8)[:, :, _AWQ_ORDER].reshape(found.shape).T

    def matrix(parts: Parts) -> PackedWeight:
        words, scale = matrix_of(parts, "qweight"), matrix_of(parts, "scales")
        must_be(parts, "scales", (len(scale), 8 * words.shape[1]))
        zeros = must_be(parts, "qzeros", (len(scale), words.shape[1]))
        scale = np.ascontiguousarray(scale.T)
        return _packed(bytes_of(codes(words), 4), scale, 4, np.ascontiguousarray(codes(zeros)))

    return [Layout("qweight", _WORDS, {"qzeros": _WORDS, "scales": _FLOATS}, {}, matrix)]


def _blocks(about: Json) -> list[Layout]:
    """fp8 with a scale for each block of rows and inputs, or for the whole matrix."""
    scaled = about.get("weight_block_size") is not None
    block = block_of(about, "weight_block_size") if scaled else None
    if about.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise Unfit(f"fmt {about['fmt']!r} is not supported; 'e4m3' is.")
    scale = "weight_scale" if block is None else "weight_scale_inv"

    def matrix(parts: Parts) -> PackedWeight:
        weight, found = matrix_of(parts, "weight"), parts[scale]
        if block is None:
            return _float8(weight, _of_rows(found, weight.shape))
        return _float8(weight, _of_blocks(found, weight.shape, block))

    may = {"input_scale": _ANY, "activation_scale": _ANY}
    return [Layout("weight", _FP8, {scale: _FLOATS}, may, matrix)]


def _bitsandbytes(about: Json) -> list[Layout]:
    """bitsandbytes: 4 bits in a table of numbers, or int8 with the largest value of each row."""
    whole, half = truth_of(about, "load_in_8bit"), truth_of(about, "load_in_4bit")
    if bool(whole) == bool(half) and not (whole is None and half is None):
        raise Unfit(
            f"load_in_8bit is {whole!r} and load_in_4bit {half!r}; one of them must be true."
        )
    if whole:
        may = {"weight_format": _UINT8}
        return [Layout("weight", _INT8, {"SCB": _FLOAT32}, may, _rows_of_int8)]
    kind = said_of(about, "bnb_4bit_quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise Unfit(f"bnb_4bit_quant_type {kind!r} is not supported; nf4 and fp4 are.")
    state = f"weight.quant_state.bitsandbytes__{kind}"
    needed = {"weight.absmax": (*_FLOAT32, *_UINT8), "weight.quant_map": _FLOAT32, state: _UINT8}
    nested = {"weight.nested_absmax": _FLOAT32, "weight.nested_quant_map": _FLOAT32}
    return [Layout("weight", _UINT8, needed, nested, _table_of(kind, state))]


def _rows_of_int8(parts: Parts) -> PackedWeight:
    weight = matrix_of(parts, "weight")
    if "weight_format" in parts and parts["weight_format"].any():
        raise Unfit("weight_format is not 0; only rows as they are are supported.")
    scale = must_be(parts, "SCB", weight.shape[:1])[:, None] / np.float32(127)
    return _packed(weight.view(np.uint8) ^ 128, scale, 8)


def _table_of(kind: str, about: str) -> Callable[[Parts], PackedWeight]:
    def matrix(parts: Parts) -> PackedWeight:
        state = _state_of(parts[about], kind)
        (outputs, inputs), block = state["shape"], state["blocksize"]
        if inputs % block or inputs % 2:
            raise Unfit(f"blocks of {block} do not divide {inputs} inputs.")
        codes = parts["weight"]
        if codes.size != outputs * inputs // 2:
            raise Unfit(f"{codes.shape} bytes do not hold {outputs} × {inputs} codes.")
        found = codes.reshape(outputs, inputs // 2)
        values = found >> 4 | found << 4  # its first input has the upper bits
        scale = _absmax(parts, outputs * inputs // block, state).reshape(outputs, inputs // block)
        table = must_be(parts, "weight.quant_map", (16,))
        if not np.allclose(table, _TABLES[kind], rtol=0, atol=1e-4):
            raise Unfit(f"quant_map has other numbers than {kind}.")
        return _packed(values, scale, 4, table=table, form=kind)

    return matrix


def _state_of(data: np.ndarray, kind: str) -> Json:
    """What bitsandbytes says of a matrix.

    Raises:
      Unfit: it is no object, or says something that cannot be.
    """
    try:
        state = json.loads(data.tobytes())
    except (ValueError, RecursionError) as error:
        raise Unfit("its quant_state is not valid JSON.") from error
    if not isinstance(state, dict):
        raise Unfit(f"its quant_state is {state!r}; it must be an object.")
    if state.get("quant_type", kind) != kind:
        raise Unfit(f"its quant_state says {state['quant_type']!r}, and its name {kind}.")
    if whole_of(state, "blocksize") is None:
        raise Unfit("its quant_state has no blocksize.")
    block_of(state, "shape")
    return state


def _absmax(parts: Parts, count: int, state: Json) -> np.ndarray:
    """The largest value of each block, which may be codes of 8 bits themselves.

    Raises:
      Unfit: there are not so many, or they lack what they are codes of.
    """
    found = must_be(parts, "weight.absmax", (count,))
    nested = ("weight.nested_absmax" in parts, "weight.nested_quant_map" in parts)
    if (found.dtype == np.uint8) != any(nested) or any(nested) != all(nested):
        raise Unfit(
            f"weight.absmax is {found.dtype}; it is uint8 with nested_absmax and "
            "nested_quant_map, and else float32."
        )
    if not any(nested):
        return found
    size, offset = whole_of(state, "nested_blocksize"), state.get("nested_offset")
    if size is None or type(offset) not in (int, float):
        raise Unfit(f"its quant_state has nested_blocksize {size} and nested_offset {offset!r}.")
    wide = must_be(parts, "weight.nested_absmax", (-(-count // size),))[np.arange(count) // size]
    numbers = must_be(parts, "weight.nested_quant_map", (256,))[found]
    return (numbers * wide + np.float32(offset)).astype(np.float32)


def _mxfp4(about: Json) -> list[Layout]:
    """gpt-oss: experts `[X, O, G, 16]` bytes of 4-bit floats, with a power of two for each 32."""
    del about

    def experts(parts: Parts) -> PackedWeight:
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise Unfit(f"blocks {blocks.shape} and scales {scales.shape} do not fit each other.")
        try:
            return mxfp4_weight(blocks.reshape(*blocks.shape[:2], -1), scales)
        except ValueError as error:
            raise Unfit(str(error)) from error

    return [Layout("blocks", _UINT8, {"scales": _UINT8}, {}, experts, "_", "")]


METHODS: Mapping[str, Callable[[Json], list[Layout]]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _blocks,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
"""What gives the layouts of each `quant_method`."""
