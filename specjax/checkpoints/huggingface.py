"""Checkpoints as Hugging Face folders: `config.json`, `*.safetensors`, tokenizer files."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array
from safetensors.numpy import save
from tokenizers import Tokenizer

from pallas_kernels.cpu import multiplies_bfloat16, unable_here
from pallas_kernels.platform import platform
from specjax.base.pytree import replace
from specjax.checkpoints import gguf, lora, orbax, pruned_vocabulary, quantized
from specjax.checkpoints.beside import Beside
from specjax.checkpoints.files import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    Extent,
    Files,
    config_of,
    described_by,
    extents,
    is_finite,
    tensors,
)
from specjax.checkpoints.generation_config import end_ids_in, union
from specjax.checkpoints.tokenizers import save_tokenizer
from specjax.models import families
from specjax.models.config import LATENT_PRODUCTS, PACKABLE, ROUTERS, ModelConfig
from specjax.models.families import Family, Stored
from specjax.models.families.eagle import NORMS
from specjax.models.placement import WIDE, Placement
from specjax.models.quantized import (
    TABLES,
    PackedWeight,
    kept,
    quantized_as,
    widened,
)
from specjax.models.stacking import as_stored
from specjax.models.transformer import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_MAY_BE_KEPT = frozenset((*PACKABLE, *ROUTERS, *TABLES))
"""Leaves that may stay in bfloat16 where float32 is computed in."""


def default_dtype() -> str:
    """The dtype of a target's weights where none is named."""
    return "float32" if platform() == "cpu" else "bfloat16"


def may_keep_bfloat16(dtype: Any) -> bool:
    """Whether matrices in bfloat16 are multiplied as they are where `dtype` is computed in."""
    return jnp.dtype(dtype) == jnp.float32 and unable_here(1) is None


def default_draft_dtype() -> str:
    """The dtype of a draft's weights where none is named: float32 on most CPUs, else bfloat16.

    Bfloat16 also on a CPU that multiplies it. It changes which tokens are drafted and how many are
    accepted, but not the distribution of the output.
    """
    return "bfloat16" if multiplies_bfloat16() else default_dtype()


def leaves_of(
    stored: Stored,
    tensor: np.ndarray | PackedWeight,
    placement: Placement,
    dtype: Any,
    folder: Path,
    *,
    copy: bool = True,
    keeps_bfloat16: bool = False,
) -> dict[str, Any]:
    """The leaves that a tensor of a file holds, on their devices.

    See `Placement.put` for `copy`, and `load_model` for `keeps_bfloat16`.

    Raises:
      CheckpointError: its groups cannot be spread over them.
    """
    if isinstance(tensor, PackedWeight) and {*stored.leaves} & {*LATENT_PRODUCTS}:
        tensor = _unpacked(tensor)  # as parts are multiplied turned
    if isinstance(tensor, PackedWeight):
        pairs = zip(stored.leaves, _split(stored, tensor), strict=True)
        return {
            leaf: _put_packed(placement, leaf, part, dtype, folder, copy) for leaf, part in pairs
        }
    made = {}
    for leaf, part in zip(stored.leaves, stored.split(tensor), strict=True):
        shapes = placement.config.outer_shapes
        rows = shapes[leaf][0] if stored.layer is None else len(part)
        if keeps_bfloat16 and _may_be_kept(leaf, part.dtype):
            made[leaf] = _put_packed(placement, leaf, kept(part[:rows]), dtype, folder, copy)
        else:
            made[leaf] = placement.put(leaf, part[:rows], dtype, copy=copy)
    return made


def _unpacked(weight: PackedWeight) -> np.ndarray:
    """The numbers of a matrix, or of one of each head."""
    if weight.values.ndim == 2:
        return np.asarray(jax.tree.map(jnp.asarray, weight).unpacked())
    heads = [weight.of_rows(lambda part, at=at: part[at]) for at in range(len(weight.values))]
    return np.stack([_unpacked(each) for each in heads])


def _may_be_kept(leaf: str, dtype: Any) -> bool:
    return leaf in _MAY_BE_KEPT and dtype == jnp.bfloat16


def held_bytes(files: Files, dtype: Any, keeps_bfloat16: bool = False) -> int | None:
    """Bytes that weights take in memory; None where none is quantized or kept in bfloat16.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    if not quantized.is_quantized(files.path):
        return _narrow_bytes(files, dtype) if keeps_bfloat16 else None
    size = jnp.dtype(dtype).itemsize
    if gguf.is_gguf(files.path):
        return sum(
            _bytes_of(each, size)
            if keeps_bfloat16 and _is_narrow(each)
            else quantized.bytes_of_blocks(each, size)
            for each in extents(files)
        )
    every = [tensor for _, _, tensor in tensors(files)]
    codes = [each.nbytes for each in every if each.dtype.kind in "iu" or each.itemsize == 1]
    numbers = [each.size * size for each in every if each.dtype.kind in "fV" and each.itemsize > 1]
    return sum(codes) + sum(numbers)


def _narrow_bytes(files: Files, dtype: Any) -> int | None:
    """Bytes of weights of which matrices in bfloat16 stay so; None where none are found."""
    try:
        every = list(extents(files))
    except CheckpointError:  # which reading them says, if they are read
        return None
    found = [_bytes_of(each, jnp.dtype(dtype).itemsize) for each in every]
    return sum(found) if any(map(_is_narrow, every)) else None


def _is_narrow(tensor: Extent) -> bool:
    """Whether a tensor is a matrix of bfloat16, or one of each expert."""
    return tensor.dtype == jnp.bfloat16 and len(tensor.shape) in (2, 3)


def _bytes_of(tensor: Extent, size: int) -> int:
    """Bytes of a tensor of `size` a number, or of a matrix that stays in bfloat16."""
    return (
        2 * math.prod(tensor.shape[:-1]) + tensor.size
        if _is_narrow(tensor)
        else size * math.prod(tensor.shape)
    )


def _split(stored: Stored, packed: PackedWeight) -> list[PackedWeight]:
    """The leaves of a tensor that is quantized."""
    return [
        packed.of_rows(lambda rows, at=at: stored.split_rows(rows)[at])
        for at in range(len(stored.leaves))
    ]


def _put_packed(
    placement: Placement, leaf: str, part: PackedWeight, dtype: Any, folder: Path, copy: bool
) -> PackedWeight:
    try:
        return placement.put_packed(leaf, part, dtype, copy=copy)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def save_model(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: "Tokenizer | PreTrainedTokenizerFast | None" = None,
    dtype: str = "bfloat16",
    **extras: Any,
) -> None:
    """Writes `model` as a folder that `load` and transformers' `from_pretrained` read.

    Args:
      model: the model, on one device or a mesh.
      folder: where to write; it is made if it is not there.
      tokenizer: written beside the weights. A bare `tokenizers.Tokenizer` is wrapped so that it
        adds no special tokens and decodes byte for byte.
      dtype: what weights are rounded to, but for those of `placement.WIDE`.
      **extras: further keys of `config.json`.

    Raises:
      ValueError: the family's `config.json` has no keys for what the model is, or its weights are
        quantized.
    """
    model = widened(_own(model))
    _check_written(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = orbax.once(model)
    config = families.write_config(model.config) | {"dtype": dtype, "torch_dtype": dtype} | extras
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    kind = jnp.dtype(dtype)
    wide = _wide_names(model.config)
    held = {
        name: np.asarray(tensor) if name in wide else np.asarray(tensor).astype(kind)
        for name, tensor in named_tensors(model)
    }
    held |= pruned_vocabulary.written(model)
    (folder / WEIGHTS).write_bytes(save(held, metadata={"format": "pt"}))
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder, model.config)


def _wide_names(config: ModelConfig) -> set[str]:
    """Tensors of a model's files that are not rounded."""
    every = families.stored(families.FAMILIES[config.family], config)
    return {each.name for each in every if each.leaves[0] in WIDE}


def _own(model: Model) -> Model:
    """A draft without the tables of its target, which are not written and may be quantized."""
    read = model.config.features
    if read is not None and read.shares_embedding:
        model = replace(model, embedding=jnp.zeros((1, model.config.hidden_size)))
    if read is not None and read.shares_unembedding:
        model = replace(model, unembedding=None)
    return model


def save_sharded(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: "Tokenizer | PreTrainedTokenizerFast | None" = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes `model` with Orbax, every process its own shards; `load` reads it onto any mesh.

    Args:
      model: the model, on one device or a mesh.
      folder: where to write; it must hold no model.
      tokenizer: written beside the weights.
      config: the `config.json` to write; by default what the model knows of itself, which of
        LongRoPE is one set of factors.

    Raises:
      CheckpointError: the folder has a model already.
      ValueError: the family cannot say what the model is, or its weights are quantized.
    """
    model = widened(model)
    _check_written(model)
    pruned_vocabulary.check_none(model.config, "the model is not written by shards")
    folder, model = Path(folder), orbax.once(model)
    check_free(folder)
    written = families.write_config(model.config) if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:  # before one writes, all have looked
        multihost_utils.sync_global_devices(f"{folder} is free")
    orbax.save(model, folder)
    if jax.process_index() == 0:  # last, as a folder without it can be written to again
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder, model.config)
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def check_free(folder: Path) -> None:
    """Checks that a model can be written into a folder: it holds none, and Orbax is installed.

    Raises:
      CheckpointError: it does.
      ValueError: Orbax is not installed.
    """
    orbax.orbax()
    check_holds_no_model(folder)


def check_holds_no_model(folder: Path) -> None:
    """Checks that a folder holds no model.

    Raises:
      CheckpointError: it does.
    """
    there = [*folder.glob(CONFIG), *folder.glob(orbax.FOLDER), *folder.glob("*.safetensors")]
    if there:
        raise CheckpointError(f"{there[0]} exists already; name another folder.")


def _check_written(model: Model) -> None:
    if (name := quantized_as(model)) is not None:
        raise ValueError(f"the model's weights are quantized ({name}) and cannot be written again.")


def named_tensors(model: Model) -> Iterator[tuple[str, Array | np.ndarray]]:
    """The weights as Hugging Face's files name and pack them; the arrays themselves where whole.

    Raises:
      ValueError: they are quantized.
    """
    _check_written(model)
    model = as_stored(model)
    for stored in families.stored(families.FAMILIES[model.config.family], model.config):
        holder = model if stored.layer is None else model.layers[stored.layer]
        leaves = [getattr(holder, leaf) for leaf in stored.leaves]
        if stored.is_leaf:
            yield stored.name, leaves[0]
        else:
            yield stored.name, np.ascontiguousarray(stored.join(list(map(np.asarray, leaves))))
    if model.feature_norms is not None:
        for number, norm in enumerate(np.asarray(model.feature_norms)):
            yield f"{NORMS}{number}.weight", norm


def described(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`, with the end tokens of its `generation_config.json` too.

    Raises:
      CheckpointError: one is missing, damaged or not supported.
    """
    found, ends = config_of(folder), read_config(folder)[0].eos_ids
    own = families.read_config(found).eos_ids
    return found if ends == own else found | {"eos_token_id": list(ends)}


def read_config(folder: Path, positions: int | None = None) -> tuple[ModelConfig, Family]:
    """The configuration of a folder, and the family of its files.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
    """
    found = config_of(folder)
    quantized.layouts_of(found, folder)
    try:
        config, family = families.read_config(found, positions), families.family_of(found)
    except (ValueError, TypeError, AttributeError, ArithmeticError, KeyError) as error:
        where = folder if gguf.is_gguf(folder) else folder / CONFIG
        raise CheckpointError(f"{where}: {error}") from error
    if gguf.is_gguf(folder):
        family = gguf.family_of(folder)
    ends = union(config.vocab_size, end_ids_in(folder), config.eos_ids)
    return dataclasses.replace(config, eos_ids=ends), family


def checked(
    files: Files,
    config: ModelConfig,
    family: Family,
    looks: Callable[[Stored], bool] = lambda stored: True,
    *,
    tells: bool = True,
) -> Iterator[tuple[Stored, np.ndarray | PackedWeight]]:
    """Every tensor of the files, as a view, with what it holds: all that is needed, and no other.

    An unembedding that a tied model's file repeats must equal its embedding. `looks` says which
    tensors are read to see that they are finite. A LoRA adapter is merged. `tells` is whether a
    line says what is left out, and where the configuration contradicts the files.

    Raises:
      CheckpointError: something is missing, of another shape, or no number.
    """
    expected = {stored.name: stored for stored in families.stored(family, config)}
    missing, tied = dict(expected), {}
    repeated = config.tie_embeddings and (family.outer["embedding"], family.outer["unembedding"])
    described = config_of(files.path)
    layouts = quantized.layouts_of(described, files.path)
    beside = Beside(files.path, config, family, described)
    against = quantized.Contradictions(described, files.path)
    adapter = None
    if files.lora is not None:
        adapter = lora.Adapter(files.lora, files.path, config, family, expected, tells=tells)
    for found, file, tensor in quantized.read(tensors(files), layouts):
        if found.endswith(family.ignored) or found.startswith(family.ignored):
            continue
        if pruned_vocabulary.is_map(found, config):
            continue
        name = family.name_of(found, expected)
        if isinstance(tensor, PackedWeight):
            place = expected.get(repeated[0] if repeated and name in repeated else name)
            tensor = _quantized(name, file, tensor, place)
            against.look(found, file, tensor)
        if repeated and name in repeated:
            tied[name] = tensor
        stored = missing.pop(name, None)
        shape = expected[repeated[0]].shape if repeated and name == repeated[1] else None
        if stored is not None:
            is_packed = isinstance(tensor, PackedWeight)
            shape = stored.shape_as_rows if is_packed else stored.shape
        elif name in expected:
            raise CheckpointError(f"{found} in {file} is there twice.")
        if shape is None:
            beside.leaves_out(name, found, file, tensor)
            continue
        if tensor.shape != shape:
            raise CheckpointError(
                f"{found} in {file} has shape {tensor.shape}; {described_by(files.path)} asks for "
                f"{shape}."
            )
        if stored is not None:
            check_numbers(found, file, tensor, looks(stored))
            yield stored, tensor if adapter is None else adapter.merged(stored, tensor)
    if repeated and repeated[0] in missing and repeated[1] in tied:  # safetensors keeps one name
        stored, tensor = missing.pop(repeated[0]), tied[repeated[1]]
        check_numbers(repeated[1], files.path, tensor, looks(stored))
        yield stored, tensor if adapter is None else adapter.merged(stored, tensor)
    if missing:
        raise CheckpointError(f"{files.path} has no tensor {', '.join(sorted(missing))}.")
    if repeated and len(tied) == 2:
        check_tied(tied[repeated[0]], tied[repeated[1]], family, files.path)
    if tells:
        beside.tell()
        against.tell()
        lora.tell_of_another(files)


def _quantized(name: str, file: Path, packed: PackedWeight, stored: Stored | None) -> Any:
    """A packed matrix, where one may be packed.

    Raises:
      CheckpointError: it may not.
    """
    if stored is None or not (_is_turned(stored) or _is_outside(stored)):
        return packed
    what = "a matrix of this family cannot be"
    if _is_outside(stored):
        what = "outside the layers only the embedding and the unembedding can be"
    raise CheckpointError(f"{name} in {file} is quantized; {what}.")


def _is_turned(stored: Stored) -> bool:
    """Whether a tensor is turned also where it is packed; experts of all layouts are not."""
    return stored.turned and not stored.axis


def _is_outside(stored: Stored) -> bool:
    """Whether a tensor is neither of a layer nor a table of tokens."""
    return stored.layer is None and stored.leaves[0] not in TABLES


def check_numbers(
    name: str, file: Path, tensor: np.ndarray | PackedWeight, looks: bool = True
) -> None:
    """Checks that a tensor holds numbers, and if it is looked at that they are finite.

    Raises:
      CheckpointError: it does not.
    """
    if isinstance(tensor, PackedWeight):
        return  # its scales were looked at
    if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.itemsize == 1:
        raise CheckpointError(
            f"{name} in {file} is {tensor.dtype}; weights must be floating-point numbers of 16 "
            "bits or more, or quantized as quantization_config says."
        )
    if looks and not is_finite(tensor):
        raise CheckpointError(f"{name} in {file} holds NaN or infinity.")


def check_tied(
    first: np.ndarray | PackedWeight, second: np.ndarray | PackedWeight, family: Family,
    folder: Path,
) -> None:  # fmt: skip
    """Checks that a tied model's embedding and the unembedding beside it are one, and packed alike.

    Raises:
      CheckpointError: they are not.
    """
    alike = jax.tree.structure(first) == jax.tree.structure(second)
    parts = list(zip(*map(jax.tree.leaves, (first, second)), strict=True)) if alike else []
    blocks = ((*pair, at) for pair in parts for at in range(0, len(pair[0]), 4096))
    if not alike or not all(
        np.array_equal(one[at : at + 4096], other[at : at + 4096]) for one, other, at in blocks
    ):
        raise CheckpointError(
            f"{folder} says tie_word_embeddings, but its {family.outer['unembedding']} differs "
            f"from its {family.outer['embedding']}: take it out, or set tie_word_embeddings to "
            "false to use it."
        )
