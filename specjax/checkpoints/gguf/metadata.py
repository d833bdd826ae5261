"""Keys of GGUF's metadata as a `config.json` says them."""

import math
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf.blocks import form_of
from specjax.checkpoints.gguf.header import Header, shown

Json = dict[str, Any]

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_FACTORS = 1 << 16


def one(header: Header, key: str) -> int | None:
    """A whole number, which may be there once for each layer.

    Raises:
      CheckpointError: it differs between layers, or is no whole number.
    """
    value = header.metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        each = sorted(set(value.tolist()))
        if len(each) != 1:
            raise CheckpointError(
                f"{header.file}: {key} is {shown(each)}; layers that differ are not supported."
            )
        return each[0]
    return header.get(key, int)


def rotary(header: Header, config: Json) -> Json:
    """The base of rotary embeddings and how they are stretched."""
    name, whole = header.architecture, config.get("max_position_embeddings")
    made: Json = {"rope_theta": header.get(f"{name}.rope.freq_base", float, 10_000.0)}
    turned, size = one(header, f"{name}.rope.dimension_count"), head_size(header)
    if turned is not None and size and turned != size:
        made["partial_rotary_factor"] = turned / size
    named = _stretch(header)
    if FREQUENCIES in header.tensors:
        if named is not None:
            raise CheckpointError(
                f"{header.file} has {FREQUENCIES} and {name}.rope.scaling.factor; one of them is "
                "supported."
            )
        factors = numbers(header, FREQUENCIES)
        stretch: Json = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
                         "original_max_position_embeddings": whole,
                         "short_factor": factors, "long_factor": factors}  # fmt: skip
        return config | made | {"rope_scaling": stretch}
    if named is not None:
        made["rope_scaling"] = named
    return config | made


def _stretch(header: Header) -> Json | None:
    """The stretch that metadata names."""
    start = f"{header.architecture}.rope."
    factor = header.get(f"{start}scaling.factor", float, 0.0)
    factor = factor or header.get(f"{start}scale_linear", float, 0.0)  # as of 2023
    kind = header.get(f"{start}scaling.type", str, "linear")
    if kind == "none" or not factor or (kind == "linear" and factor == 1):
        return None
    if kind == "longrope" and LONG in header.tensors:
        return None  # whose factors are tensors
    if not 0 < factor < math.inf:
        raise CheckpointError(
            f"{header.file}: {start}scaling.factor is {factor}; it must be a number above 0."
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{header.file}: {start}scaling.type is {shown(kind)}; linear and yarn are supported."
        )
    made: Json = {"rope_type": "yarn", "factor": factor}
    if (original := one(header, f"{start}scaling.original_context_length")) is not None:
        made["original_max_position_embeddings"] = original
    for own in ("beta_fast", "beta_slow"):
        if (value := header.get(f"{start}scaling.yarn_{own}", float)) is not None:
            made[own] = value
    if (grown := header.get(f"{start}scaling.attn_factor", float, 1.0)) != 1:
        made["attention_factor"] = grown * (1 + 0.1 * math.log(factor))
    return made


def numbers(header: Header, name: str) -> list[float]:
    """The numbers of a small tensor.

    Raises:
      CheckpointError: it is not one row of floats, or the file ends before.
    """
    tensor = header.tensors[name]
    form, shape = form_of(tensor)
    if form.names is not None or len(shape) != 1:
        raise CheckpointError(f"{name} in {tensor.file} must be a row of floats.")
    size = form.itemsize * shape[0]
    if tensor.start + size > tensor.file.stat().st_size or shape[0] > _MOST_FACTORS:
        raise CheckpointError(
            f"{tensor.file} is truncated or damaged: {name} has {shape[0]:,} numbers."
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        held = opened.read(size)
    return [float(str(each)) for each in np.frombuffer(held, form).astype(np.float32)]


def head_size(header: Header) -> int | None:
    """Features of a head, if that is said."""
    name = header.architecture
    own, heads = (one(header, f"{name}.attention.{key}") for key in ("key_length", "head_count"))
    whole = one(header, f"{name}.embedding_length")
    return own or (whole // heads if whole and heads else None)


def without_windows(header: Header, config: Json) -> Json:
    """`rotary`, of what has no windows.

    Raises:
      CheckpointError: it has.
    """
    window = one(header, f"{header.architecture}.attention.sliding_window")
    if window:
        raise CheckpointError(
            f"{header.file}: {header.architecture}.attention.sliding_window is {window}, which is "
            "not supported here."
        )
    return rotary(header, config)


def with_share(header: Header, config: Json) -> Json:
    """The share of a head that is rotated, where absence would not mean all of it."""
    turned, size = one(header, f"{header.architecture}.rope.dimension_count"), head_size(header)
    return config | ({"partial_rotary_factor": turned / size} if turned and size else {})
