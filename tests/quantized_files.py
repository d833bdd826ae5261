"""Quantized checkpoints written from the formats' definitions, a code at a time, and their numbers.

Each writer makes the tensors of one matrix of random codes, and the matrix that they stand for.
Nothing here is shared with what reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Made = tuple[dict[str, np.ndarray], np.ndarray]
GROUP = 16
FP8 = ml_dtypes.float8_e4m3fn


def along(codes: np.ndarray, bits: int, axis: int, order: Any = None) -> np.ndarray:
    """Words of 32 bits, each of which holds codes that follow each other along an axis.

    `order[k]` says which of them the k-th place from the lowest has.
    """
    each = 32 // bits
    order = range(each) if order is None else order
    codes = np.moveaxis(codes, axis, 0).astype(np.uint64)
    made = np.zeros((-(-len(codes) // each), *codes.shape[1:]), np.uint64)
    for word in range(len(made)):
        for place, which in enumerate(order):
            if word * each + which < len(codes):
                made[word] |= codes[word * each + which] << np.uint64(bits * place)
    return np.ascontiguousarray(np.moveaxis(made, 0, axis).astype(np.uint32).view(np.int32))


def numbers(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, group: Any) -> np.ndarray:
    """Scale times code less zero, by the group of each input."""
    found = np.empty(codes.shape, np.float32)
    for place in range(codes.shape[1]):
        own = group[place]
        found[:, place] = scale[:, own].astype(np.float32) * (
            codes[:, place].astype(np.float32) - zero[:, own].astype(np.float32)
        )
    return found


def some(drawn: np.random.Generator, shape: Any, bits: int, group: int = GROUP) -> Any:
    """Random codes, scales and zeros of a matrix."""
    outputs, inputs = shape
    groups = inputs // group
    codes = drawn.integers(0, 1 << bits, shape).astype(np.uint8)
    scale = drawn.uniform(0.01, 0.05, (outputs, groups)).astype(np.float16)
    zero = drawn.integers(0, 1 << bits, (outputs, groups)).astype(np.uint8)
    return codes, scale, zero, np.arange(inputs) // group


def gptq(version: str, bits: int, shuffled: bool) -> Callable[..., Made]:
    """qweight [I / 8, O], qzeros [G, O / 8] (less 1 in the first version), scales [G, O], g_idx."""

    def write(base: str, shape: Any, drawn: np.random.Generator) -> Made:
        codes, scale, zero, group = some(drawn, shape, bits)
        if shuffled:
            group = drawn.permutation(group)
        if version == "gptq":  # from 1; of 4 bits 16 may be
            zero = zero.astype(int) + 1 if bits == 4 else zero.clip(1, 255)
        stored = zero.astype(int) - (version == "gptq")
        return {
            f"{base}.qweight": along(codes.T, bits, 0),
            f"{base}.qzeros": along(stored.T, bits, 1),
            f"{base}.scales": np.ascontiguousarray(scale.T),
            f"{base}.g_idx": group.astype(np.int32),
        }, numbers(codes, zero, scale, group)

    return write


def awq(base: str, shape: Any, drawn: np.random.Generator) -> Made:
    """qweight [I, O / 8] and qzeros [G, O / 8]: outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest."""
    codes, scale, zero, group = some(drawn, shape, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{base}.qweight": along(codes.T, 4, 1, order),
        f"{base}.qzeros": along(zero.T, 4, 1, order),
        f"{base}.scales": np.ascontiguousarray(scale.T),
    }, numbers(codes, zero, scale, group)


def compressed(bits: int, symmetric: bool, shuffled: bool = False) -> Callable[..., Made]:
    """weight_packed [O, I / 8], weight_scale [O, G], zeros packed along the outputs, g_idx."""

    def write(base: str, shape: Any, drawn: np.random.Generator) -> Made:
        codes, scale, zero, group = some(drawn, shape, bits)
        if symmetric:
            zero = np.full_like(zero, 1 << (bits - 1))
        if shuffled:
            group = drawn.permutation(group)
        made = {
            f"{base}.weight_packed": along(codes, bits, 1),
            f"{base}.weight_scale": scale,
            f"{base}.weight_shape": np.asarray(shape, np.int64),
        }
        if not symmetric:
            made[f"{base}.weight_zero_point"] = along(zero, bits, 0)
        if shuffled:
            made[f"{base}.weight_g_idx"] = group.astype(np.int32)
        return made, numbers(codes, zero, scale, group)

    return write


def whole_int8(base: str, shape: Any, drawn: np.random.Generator) -> Made:
    """compressed-tensors' int-quantized: int8 as it is, a scale for each row."""
    codes, scale, zero, group = some(drawn, shape, 8, shape[1])
    zero[:] = 128
    made = {
        f"{base}.weight": (codes.astype(int) - 128).astype(np.int8),
        f"{base}.weight_scale": scale,
    }
    return made, numbers(codes, zero, scale, group)


def some_fp8(drawn: np.random.Generator, shape: Any) -> np.ndarray:
    return drawn.uniform(-400, 400, shape).astype(np.float32).astype(FP8)


def whole_fp8(base: str, shape: Any, drawn: np.random.Generator) -> Made:
    """compressed-tensors' float-quantized: one scale for the matrix."""
    codes, scale = some_fp8(drawn, shape), np.asarray([1 / 512], ml_dtypes.bfloat16)
    return {f"{base}.weight": codes, f"{base}.weight_scale": scale}, codes.astype(np.float32) / 512


def block_fp8(base: str, shape: Any, drawn: np.random.Generator) -> Made:
    """DeepSeek's: a scale for each block of 32 rows and 16 inputs; the last rows may be fewer."""
    codes = some_fp8(drawn, shape)
    scale = drawn.uniform(0.001, 0.002, (-(-shape[0] // 32), shape[1] // 16)).astype(np.float32)
    found = codes.astype(np.float32)
    for row in range(shape[0]):
        for place in range(shape[1]):
            found[row, place] *= scale[row // 32, place // 16]
    return {f"{base}.weight": codes, f"{base}.weight_scale_inv": scale}, found


NF4 = np.asarray(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)  # fmt: skip


def nf4(nested: bool) -> Callable[..., Made]:
    """bitsandbytes: two codes a byte, the first in the upper half; blocks of 16 (64 there)."""

    def write(base: str, shape: Any, drawn: np.random.Generator) -> Made:
        codes = drawn.integers(0, 16, shape[0] * shape[1]).astype(np.uint8)
        blocks = codes.size // GROUP
        most = drawn.uniform(0.05, 0.2, blocks).astype(np.float32)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32"}
        state["shape"] = list(shape)
        made = {
            f"{base}.weight": (codes[0::2] << 4 | codes[1::2])[:, None],
            f"{base}.weight.quant_map": NF4,
        }
        if nested:
            own = drawn.integers(0, 256, blocks).astype(np.uint8)
            table = np.linspace(-1, 1, 256).astype(np.float32)
            above = drawn.uniform(0.05, 0.1, -(-blocks // 8)).astype(np.float32)
            state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.125}
            for block in range(blocks):
                most[block] = table[own[block]] * above[block // 8] + np.float32(0.125)
            made |= {
                f"{base}.weight.absmax": own,
                f"{base}.weight.nested_absmax": above,
                f"{base}.weight.nested_quant_map": table,
            }
        else:
            made[f"{base}.weight.absmax"] = most
        text = json.dumps(state).encode()
        made[f"{base}.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
        found = np.empty(codes.size, np.float32)
        for place, code in enumerate(codes.tolist()):
            found[place] = NF4[code] * most[place // GROUP]
        return made, found.reshape(shape)

    return write


def rows_int8(base: str, shape: Any, drawn: np.random.Generator) -> Made:
    """bitsandbytes' int8: SCB is the largest value of each row, which 127 stands for."""
    codes = drawn.integers(-127, 128, shape).astype(np.int8)
    most = drawn.uniform(0.5, 2, shape[0]).astype(np.float32)
    made = {
        f"{base}.weight": codes, f"{base}.SCB": most,
        f"{base}.weight_format": np.zeros((), np.uint8),
    }  # fmt: skip
    return made, codes.astype(np.float32) * (most[:, None] / np.float32(127))


def _ct(name: str, bits: int, group: int | None = None, **more: Any) -> dict[str, Any]:
    """A configuration as llm-compressor writes it: groups of `group` inputs, None for rows."""
    weights = {
        "num_bits": bits, "type": "float" if name[0] == "f" else "int", "symmetric": True,
        "strategy": "channel" if group is None else "group", "group_size": group,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | more}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def _bnb(**more: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes"} | more


LAYOUTS: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    **{
        f"{version} {bits} bits{' shuffled' * shuffled}": (
            gptq(version, bits, shuffled),
            {"quant_method": "gptq", "bits": bits, "checkpoint_format": version, "sym": False,
             "group_size": GROUP, "desc_act": shuffled},
        )
        for version, bits, shuffled in (
            ("gptq", 4, False), ("gptq_v2", 4, True), ("gptq", 8, True), ("gptq_v2", 8, False),
        )
    },
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP,
                  "zero_point": True}),
    "words of 4 bits": (compressed(4, True), _ct("pack-quantized", 4, GROUP)),
    "words of 8 bits": (compressed(8, True), _ct("pack-quantized", 8, GROUP)),
    "words with zeros": (
        compressed(4, False), _ct("pack-quantized", 4, GROUP, symmetric=False),
    ),
    "words shuffled": (
        compressed(4, False, True),
        _ct("pack-quantized", 4, GROUP, symmetric=False, actorder="group"),
    ),
    "int8": (whole_int8, _ct("int-quantized", 8)),
    "fp8": (whole_fp8, _ct("float-quantized", 8, strategy="tensor")),
    "blocks of fp8": (block_fp8, {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    "nf4": (nf4(False), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "nf4 nested": (nf4(True), _bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "int8 of bitsandbytes": (rows_int8, _bnb(load_in_8bit=True)),
}  # fmt: skip
"""Writers by the names of their layouts, and what `config.json` says of each."""


def rewrite(
    folder: Path, layout: str, seed: int = 0, ends: str | tuple[str, ...] = "_proj.weight"
) -> dict[str, np.ndarray]:
    """Puts random quantized matrices where names end so, the layers'; gives what they stand for."""
    write, about = LAYOUTS[layout]
    file, config = folder / "model.safetensors", folder / "config.json"
    held, drawn = load_file(file), np.random.default_rng(seed)
    expected = {}
    for name in [name for name in held if name.endswith(ends)]:
        base = name.removesuffix(".weight")
        shape = held.pop(name).shape
        tensors, expected[name] = write(base, shape, drawn)
        held |= tensors
    save_file(held, file)
    described = json.loads(config.read_text()) | {"quantization_config": about}
    config.write_text(json.dumps(described))
    return expected
