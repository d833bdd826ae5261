"""Writes a folder's model with its layers' matrices packed, as compressed-tensors lays them out."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints import quantized
from specjax.checkpoints.files import CONFIG, CheckpointError, Files, config_of, tensors
from specjax.checkpoints.huggingface import check_numbers, read_config
from specjax.checkpoints.writing import Shards, new_model
from specjax.models import families
from specjax.models.config import MATRICES, ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.quantized import GROUP_OF_4_BITS, packed


class Quantized(NamedTuple):
    """What was written: matrices, how each is quantized, bytes of weights, and bytes before."""

    matrices: int
    name: str
    size: int
    before: int


def quantize_folder(
    files: Files,
    out: Path,
    bits: int = 4,
    group: int | None = None,
    told: Callable[[int, int], object] = lambda count, of: None,
) -> Quantized:
    """Writes a model with symmetric integers for its layers' matrices; the rest stays as it is.

    `load` and transformers (with compressed-tensors installed) read the folder. One matrix at a
    time is in memory, and a file of at most 2 GiB. Nothing is left where it fails.

    Args:
      files: the model.
      out: a folder that holds no model yet.
      bits: of a weight, 8 or 4.
      group: inputs that share a scale; by default 64 in 4 bits, and all of a row in 8.
      told: is told how many tensors of how many are done.

    Raises:
      CheckpointError: the model is missing, damaged, not finite, quantized already or of a family
        whose matrices cannot be, or `out` holds one.
      ValueError: there are no such bits, or groups do not divide a matrix.
    """
    if bits not in (8, 4):
        raise ValueError(f"--bits is {bits}; it must be 8 or 4.")
    group = GROUP_OF_4_BITS if group is None and bits == 4 else group
    if group is not None and group < 1:
        raise ValueError(f"--group is {group}; it must be at least 1.")
    described = config_of(files.folder)
    if quantized.layouts_of(described, files.folder):
        raise CheckpointError(f"{files.folder} is quantized already.")
    config, family = read_config(files.folder)
    matrices = _matrices_of(files, config, family)
    whole = described | {"quantization_config": _described(bits, group)}
    with new_model(files.folder, out, whole) as shards:
        return _write(files, shards, family, matrices, bits, group, told)


def _matrices_of(files: Files, config: ModelConfig, family: Family) -> dict[str, Stored]:
    """The tensors that hold matrices of layers, by their names.

    Raises:
      CheckpointError: they are of a kind that readers of packed ones do not know.
    """
    found = {
        stored.name: stored
        for stored in families.stored(family, config)
        if stored.layer is not None and stored.leaves[0] in MATRICES
    }
    if any(stored.turned for stored in found.values()):
        raise CheckpointError(
            f"{files.folder}: matrices of {family.model_type} models are stored [in, out], which "
            "has no packed form."
        )
    return found


def _write(
    files: Files,
    shards: Shards,
    family: Family,
    matrices: dict[str, Stored],
    bits: int,
    group: int | None,
    told: Callable[[int, int], object],
) -> Quantized:
    """Writes all tensors."""
    every = list(tensors(files))
    count = 0
    names: set[str] = set()
    for number, (found, file, tensor) in enumerate(every):
        check_numbers(found, file, tensor)
        stored = matrices.get(family.name_of(found, matrices))
        if stored is None:
            parts = {found: tensor}
        else:
            if tensor.shape != stored.shape:
                raise CheckpointError(
                    f"{found} in {file} has shape {tensor.shape}; {CONFIG} asks for {stored.shape}."
                )
            try:
                weight = packed(tensor, bits, group)
                parts = dict(_parts(found.removesuffix("weight"), weight))
            except ValueError as error:
                raise ValueError(f"{found}: {error}") from error
            names.add(weight.name)
            count += 1
        for name, part in parts.items():
            shards.add(name, part)
        told(number + 1, len(every))
    before = sum(tensor.nbytes for _, _, tensor in every)
    return Quantized(count, " and ".join(sorted(names)), shards.size, before)


def _parts(base: str, weight: Any) -> Iterator[tuple[str, np.ndarray]]:
    values = np.ascontiguousarray(weight.values)
    if values.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs do not fill words of 32 bits.")
    yield f"{base}weight_packed", values.view(np.int32)
    yield f"{base}weight_scale", weight.scale
    yield f"{base}weight_shape", np.asarray(weight.shape, np.int64)


def _described(bits: int, group: int | None) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | strategy,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }
