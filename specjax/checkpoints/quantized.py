"""Quantized checkpoints of other libraries, each layout read as packed matrices.

Layouts are those that the libraries write: compressed-tensors (vLLM's llm-compressor), GPTQ
(AutoGPTQ and GPTQModel), AWQ (AutoAWQ), block-wise fp8 (DeepSeek), bitsandbytes. Activations are
never rounded, also where a file says that its library would.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.checkpoints.files import CONFIG, CheckpointError, config_of
from specjax.models.quantized import FLOAT8, INTEGER, PackedWeight, bytes_of, packed_weight

Parts = Mapping[str, np.ndarray]
Found = tuple[str, Path, "np.ndarray | PackedWeight"]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word, from the lowest, an AWQ file has each of eight outputs."""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
            "mixed-precision", "dense")  # fmt: skip
"""Of compressed-tensors."""


class Layout(NamedTuple):
    """How a library's files hold a quantized matrix.

    Attributes:
      main: the tensor without which there is none.
      needed: others that belong to it.
      may: those that may be there.
      read: makes the packed matrix of them.
      kinds: dtypes of `main` in which it is quantized; those of other dtypes are left as they are.
    """

    main: str
    needed: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Parts], PackedWeight]
    kinds: tuple[Any, ...]


def layouts_of(config: Mapping[str, Any], folder: Path) -> list[Layout]:
    """How the files of a `config.json` may hold matrices; none where nothing is quantized.

    Raises:
      CheckpointError: the quantization is of a kind that is not supported.
    """
    about = config.get("quantization_config") or config.get("compression_config")
    if about is None:
        return []
    try:
        method = about["quant_method"]
        if method not in _METHODS:
            raise ValueError(
                f"quantization {method!r} is not supported; {', '.join(_METHODS)} are."
            )
        return _METHODS[method](about)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{folder / CONFIG}: quantization_config: {said}") from error


def layouts_in(folder: Path) -> list[Layout]:
    """The same of a folder's configuration.

    Raises:
      CheckpointError: see `layouts_of`, or there is none.
    """
    return layouts_of(config_of(folder), folder)


def read(found: Iterable[tuple[str, Path, np.ndarray]], layouts: list[Layout]) -> Iterator[Found]:
    """The tensors of files, those of each quantized matrix as one, called `….weight`.

    Raises:
      CheckpointError: one of them is missing or is not of its layout.
    """
    if not layouts:
        yield from found
        return
    held = {name: (file, tensor) for name, file, tensor in found}
    taken: set[str] = set()
    packed: dict[str, tuple[str, Layout, Parts]] = {}
    for layout in layouts:
        for name, (file, tensor) in held.items():
            base = name.removesuffix("." + layout.main)
            if base == name or name in taken or tensor.dtype not in layout.kinds:
                continue
            parts = {layout.main: tensor}
            for part in (*layout.needed, *layout.may):
                if (whole := f"{base}.{part}") in held:
                    parts[part] = held[whole][1]
                elif part in layout.needed:
                    raise CheckpointError(f"{name} in {file} lacks {whole}.")
            packed[name] = base, layout, parts
            taken |= {f"{base}.{part}" for part in parts}
    for name, (file, tensor) in held.items():
        if name in packed:
            base, layout, parts = packed[name]
            try:
                made = layout.read(parts)
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                raise CheckpointError(f"{name} in {file}: {error}") from error
            yield f"{base}.weight", file, made
        elif name not in taken:
            yield name, file, tensor


def _packed(
    values: np.ndarray, scale: np.ndarray, bits: int, zero: np.ndarray | None = None,
    order: np.ndarray | None = None, table: np.ndarray | None = None, form: str = INTEGER,
) -> PackedWeight:  # fmt: skip
    """A packed matrix whose parts fit each other.

    Raises:
      ValueError: they do not, or a scale is no number.
    """
    outputs, inputs = values.shape[0], values.shape[1] * 8 // bits
    if scale.ndim != 2 or not scale.size or len(scale) != outputs or inputs % scale.shape[1]:
        raise ValueError(f"scales {scale.shape} do not divide a matrix of {outputs} × {inputs}.")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"there are zeros {zero.shape} for scales {scale.shape}.")
    if not np.isfinite(scale.astype(np.float32)).all():
        raise ValueError("a scale is NaN or infinite.")
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
      ValueError: groups are not equally long.
    """
    if groups is None or not groups.size or (groups < 0).all():
        return codes, None
    size = codes.shape[1] // count
    if (groups == np.arange(groups.size) // size).all():
        return codes, None
    counts = np.bincount(groups, minlength=count)
    if groups.min() < 0 or len(counts) != count or (counts != size).any():
        raise ValueError(f"g_idx has groups of {counts.min()} to {counts.max()} inputs.")
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return codes[:, order], order


def _check_bits(bits: Any) -> int:
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits are not supported; 4 and 8 are.")
    return bits


def _compressed(about: Mapping[str, Any]) -> list[Layout]:
    """compressed-tensors: `pack-quantized` words of 4 or 8 bits, or int8 or fp8 as they are."""
    formats = [about.get("format", "dense")]
    formats += [each.get("format") or formats[0] for each in about["config_groups"].values()]
    for name in formats:
        if name not in _FORMATS:
            raise ValueError(f"format {name!r} is not supported; {', '.join(_FORMATS)} are.")
    sparse = (about.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise ValueError(f"sparsity format {sparse!r} is not supported.")
    kinds = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
    return [
        Layout("weight_packed", ("weight_scale", "weight_shape"),
               ("weight_zero_point", "weight_g_idx"), _compressed_words, (np.dtype(np.int32),)),
        Layout("weight", ("weight_scale",),
               ("weight_zero_point", "input_scale", "input_zero_point"), _compressed_whole, kinds),
    ]  # fmt: skip


def _compressed_words(parts: Parts) -> PackedWeight:
    words, scale = parts["weight_packed"], parts["weight_scale"]
    outputs, inputs = parts["weight_shape"].tolist()
    bits = _check_bits(32 * words.shape[1] // inputs)
    if words.shape != (outputs, inputs * bits // 32) or inputs * bits % 32:
        raise ValueError(f"{words.shape} words do not hold {outputs} × {inputs} codes.")
    zero = parts.get("weight_zero_point")
    if zero is not None:
        zero = _nibbles(zero.T, bits)[:, :outputs].T
    codes, order = np.ascontiguousarray(words).view(np.uint8), None
    if "weight_g_idx" in parts:
        codes, order = _sorted(parts["weight_g_idx"], _nibbles(words, bits), scale.shape[1])
        codes = bytes_of(codes, bits)
    return _packed(codes, scale, bits, zero, order)


def _compressed_whole(parts: Parts) -> PackedWeight:
    weight, scale, zero = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
    scale = _of_rows(scale, weight.shape)
    if weight.dtype == np.int8:
        if zero is not None:
            zero = _of_rows(zero, weight.shape).view(np.uint8) ^ 128
        return _packed(weight.view(np.uint8) ^ 128, scale, 8, zero)
    return _float8(weight, scale)


def _of_rows(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scales `[O, G]` of those of the whole matrix, of each row, each group, or each block.

    Raises:
      ValueError: blocks do not divide the rows.
    """
    outputs = shape[0]
    if scale.size == 1:
        return np.full((outputs, 1), scale.reshape(-1)[0])
    if scale.ndim == 1:
        scale = scale[:, None]
    if outputs % scale.shape[0]:
        raise ValueError(f"scales {scale.shape} do not divide {outputs} rows.")
    return np.repeat(scale, outputs // scale.shape[0], axis=0)


def _float8(weight: np.ndarray, scale: np.ndarray) -> PackedWeight:
    codes = weight.view(np.uint8)
    if ((codes & 127) == 127).any():
        raise ValueError("it holds NaN.")
    return _packed(codes, scale, 8, form=FLOAT8)


def _gptq(about: Mapping[str, Any]) -> list[Layout]:
    """GPTQ: words along the inputs; the first version's zeros are stored less 1.

    Of 4 bits they may be 16 then, as AutoGPTQ and vLLM have it. Some writers name the first version
    and store symmetric zeros as the second does: the middle itself.
    """
    bits, version = _check_bits(about["bits"]), about.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {version!r} is not supported; gptq and gptq_v2 are.")
    middle = 1 << (bits - 1)

    def matrix(parts: Parts) -> PackedWeight:
        scale = np.ascontiguousarray(parts["scales"].T)
        codes = _nibbles(parts["qweight"].T, bits)
        zero = _nibbles(parts["qzeros"], bits)[:, : len(codes)].T
        as_they_are = version == "gptq_v2" or (about.get("sym") is True and (zero == middle).all())
        if not as_they_are:
            if zero.max(initial=0) == 255:
                raise ValueError("a zero of 256 is not supported.")
            zero = zero + np.uint8(1)
        codes, order = _sorted(parts.get("g_idx"), codes, scale.shape[1])
        return _packed(bytes_of(codes, bits), scale, bits, np.ascontiguousarray(zero), order)

    words = (np.dtype(np.int32), np.dtype(np.uint32))
    return [Layout("qweight", ("qzeros", "scales"), ("g_idx",), matrix, words)]


def _awq(about: Mapping[str, Any]) -> list[Layout]:
    """AWQ: words of eight outputs, in an order of their own."""
    bits, version = about.get("bits", about.get("w_bit")), about.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise ValueError(f"{bits} bits of version {version!r} are not supported; 4 of gemm are.")

    def codes(words: np.ndarray) -> np.ndarray:
        found = _nibbles(words, 4)
        return found.reshape(len(found), -1, 8)[:, :, _AWQ_ORDER].reshape(found.shape).T

    def matrix(parts: Parts) -> PackedWeight:
        scale = np.ascontiguousarray(parts["scales"].T)
        zero = np.ascontiguousarray(codes(parts["qzeros"]))
        return _packed(bytes_of(codes(parts["qweight"]), 4), scale, 4, zero)

    return [Layout("qweight", ("qzeros", "scales"), (), matrix, (np.dtype(np.int32),))]


def _blocks(about: Mapping[str, Any]) -> list[Layout]:
    """fp8 with a scale for each block of rows and inputs, or for the whole matrix."""
    block = about.get("weight_block_size")
    scale = "weight_scale" if block is None else "weight_scale_inv"

    def matrix(parts: Parts) -> PackedWeight:
        weight, found = parts["weight"], parts[scale]
        if block is not None:
            blocks = tuple(-(-n // each) for n, each in zip(weight.shape, block, strict=True))
            if found.shape != blocks or weight.shape[1] % block[1]:
                raise ValueError(
                    f"blocks of {block} do not divide {weight.shape}, or not into {found.shape}."
                )
            found = np.repeat(found, block[0], axis=0)[: len(weight)]
        return _float8(weight, _of_rows(found, weight.shape))

    kinds = (np.dtype(ml_dtypes.float8_e4m3fn),)
    return [Layout("weight", (scale,), ("input_scale", "activation_scale"), matrix, kinds)]


def _bitsandbytes(about: Mapping[str, Any]) -> list[Layout]:
    """bitsandbytes: 4 bits in a table of numbers, or int8 with the largest value of each row."""
    if about.get("load_in_8bit"):
        kinds = (np.dtype(np.int8),)
        return [Layout("weight", ("SCB",), ("weight_format",), _rows_of_int8, kinds)]
    kind = about.get("bnb_4bit_quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"bnb_4bit_quant_type {kind!r} is not supported; nf4 and fp4 are.")
    state = f"weight.quant_state.bitsandbytes__{kind}"
    nested = ("weight.nested_absmax", "weight.nested_quant_map")
    needed, kinds = ("weight.absmax", "weight.quant_map", state), (np.dtype(np.uint8),)
    return [Layout("weight", needed, nested, _table_of(kind, state), kinds)]


def _rows_of_int8(parts: Parts) -> PackedWeight:
    scale = parts["SCB"].astype(np.float32)[:, None] / np.float32(127)
    return _packed(parts["weight"].view(np.uint8) ^ 128, scale, 8)


def _table_of(kind: str, about: str) -> Callable[[Parts], PackedWeight]:
    def matrix(parts: Parts) -> PackedWeight:
        state = json.loads(parts[about].tobytes())
        (outputs, inputs), block = state["shape"], state["blocksize"]
        if inputs % block or inputs % 2:
            raise ValueError(f"blocks of {block} do not divide {inputs} inputs.")
        scale = parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            wide = np.repeat(parts["weight.nested_absmax"], state["nested_blocksize"])[: scale.size]
            numbers = parts["weight.nested_quant_map"][scale]
            scale = numbers * wide + np.float32(state["nested_offset"])
        found = parts["weight"].reshape(outputs, inputs // 2)
        values = found >> 4 | found << 4  # its first input has the upper bits
        scale = scale.astype(np.float32).reshape(outputs, inputs // block)
        table = parts["weight.quant_map"].astype(np.float32)
        return _packed(values, scale, 4, table=table, form=kind)

    return matrix


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], list[Layout]]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _blocks,
    "bitsandbytes": _bitsandbytes,
}
