"""Writes a folder's model with its layers' matrices packed, as compressed-tensors lays them out."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints import quantized
from specjax.checkpoints.files import CONFIG, INDEX, CheckpointError, Files, config_of, tensors
from specjax.checkpoints.huggingface import check_holds_no_model, check_numbers, read_config
from specjax.models import families
from specjax.models.config import MATRICES, ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.quantized import packed

_GROUP = 64
"""Inputs that share a scale in 4 bits."""
_SHARD = 2 * 2**30
"""Bytes of a file from which on another is begun; so much is held in memory."""
_COPIED = (".json", ".txt", ".model", ".jinja")
"""Files beside the weights that go along: tokenizers, and what texts end with."""


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
    group = _GROUP if group is None and bits == 4 else group
    if group is not None and group < 1:
        raise ValueError(f"--group is {group}; it must be at least 1.")
    described = config_of(files.folder)
    if quantized.layouts_of(described, files.folder):
        raise CheckpointError(f"{files.folder} is quantized already.")
    check_holds_no_model(out)
    config, family = read_config(files.folder)
    matrices = _matrices_of(files, config, family)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
    try:
        done = _write(files, made, family, matrices, bits, group, told)
        whole = described | {"quantization_config": _described(bits, group)}
        (made / CONFIG).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        _copy_others(files.folder, made)
        out.mkdir(exist_ok=True)
        for file in made.iterdir():
            file.rename(out / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return done


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
    folder: Path,
    family: Family,
    matrices: dict[str, Stored],
    bits: int,
    group: int | None,
    told: Callable[[int, int], object],
) -> Quantized:
    """Writes all tensors into files, and their index."""
    every = list(tensors(files))
    shard: dict[str, np.ndarray] = {}
    where: dict[str, str] = {}
    size = count = 0
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
        new = sum(part.nbytes for part in parts.values())
        if shard and sum(part.nbytes for part in shard.values()) + new > _SHARD:
            _save(shard, folder, where)
        shard |= {name: np.ascontiguousarray(part) for name, part in parts.items()}
        size += new
        told(number + 1, len(every))
    _save(shard, folder, where)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    before = sum(tensor.nbytes for _, _, tensor in every)
    return Quantized(count, " and ".join(sorted(names)), size, before)


def _parts(base: str, weight: Any) -> Iterator[tuple[str, np.ndarray]]:
    values = np.ascontiguousarray(weight.values)
    if values.shape[1] % 4:
        raise ValueError(f"{weight.shape[1]} inputs do not fill words of 32 bits.")
    yield f"{base}weight_packed", values.view(np.int32)
    yield f"{base}weight_scale", weight.scale
    yield f"{base}weight_shape", np.asarray(weight.shape, np.int64)


def _save(shard: dict[str, np.ndarray], folder: Path, where: dict[str, str]) -> None:
    """Writes a file of tensors, notes where they are, and empties the shard."""
    name = f"model-{len(set(where.values())) + 1:05}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    where |= dict.fromkeys(shard, name)
    shard.clear()


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


def _copy_others(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        known = file.name == CONFIG or file.name.endswith(".index.json")
        if file.suffix in _COPIED and not known and file.is_file():
            shutil.copyfile(file, folder / file.name)
