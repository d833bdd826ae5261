"""Drafts that read hidden states of their target, from files: EAGLE-3's heads and DFlash.

Such a draft is nothing without its target: that says how many layers there are, where the file
names none, and mostly has the embedding and the unembedding.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.checkpoints import pruned_vocabulary
from specjax.checkpoints.files import CONFIG, CheckpointError, Files, config_of, tensors
from specjax.checkpoints.huggingface import checked, default_draft_dtype, leaves_of, read_config
from specjax.models import families
from specjax.models.config import CONTEXT, Features, ModelConfig
from specjax.models.families import Family
from specjax.models.families.dflash import is_dflash
from specjax.models.families.eagle import EAGLE3, NORMS, is_eagle3
from specjax.models.placement import placement
from specjax.models.stacking import leaves_of_layers
from specjax.models.transformer import Model, assemble


def is_feature_draft(files: Files) -> bool:
    """Whether a folder is of such a draft, by its configuration or, as EAGLE writes it, its
    tensors; of one without weights its configuration alone tells.

    Raises:
      CheckpointError: it is of no model.
    """
    config = config_of(files.path)
    if is_eagle3(config) or is_dflash(config):
        return True
    if config.get("num_hidden_layers") != 1 or config.get("model_type") != "llama":
        return False
    try:
        return EAGLE3.outer["feature_projection"] in _names(files)
    except CheckpointError:  # which reading the weights says, if they are read
        return False


def layers_read(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads where its file does not say."""
    return (2, num_layers // 2, num_layers - 3)


def load_feature_draft(
    files: Files, target: Model, *, dtype: str | None = None, mesh: Mesh | None = None
) -> Model:
    """The draft of a folder for a target, whole on every device.

    Raises:
      CheckpointError: a file, tensor or key is missing or not supported.
      ValueError: it is of another target: by its vocabulary, its hidden size or its layers.
    """
    config = config_for(files, target.config)
    family = families.FAMILIES[config.family]
    return loaded(files, config, family, target, dtype=dtype, mesh=mesh)


def loaded(
    files: Files,
    config: ModelConfig,
    family: Family,
    target: Model,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """A draft of such a configuration and table, with what it shares with its target.

    Raises:
      CheckpointError: a file, tensor or key is missing or not supported.
    """
    kind, placed = jnp.dtype(dtype or default_draft_dtype()), placement(config, mesh, split=False)
    outer: dict[str, Any] = {}
    read = config.features
    assert read is not None
    # Of a text that is all that a draft sees, keys and values alone are made.
    layers = leaves_of_layers(placed, fuse=read.way != CONTEXT)
    for stored, tensor in checked(files, config, family):
        leaves = leaves_of(stored, tensor, placed, kind, files.path)
        if stored.layer is None:
            outer |= leaves
        else:
            layers.add(stored.layer, leaves)
    if read.norms == "each":
        outer["feature_norms"] = placed.put("feature_norms", _norms(files, read), kind)
    if read.shares_embedding:
        outer["embedding"] = _whole(target.embedding, target, mesh)
    if read.shares_unembedding and target.unembedding is not None:
        outer["unembedding"] = _whole(target.unembedding, target, mesh)
    model = assemble(config, outer, layers.found)
    return model if config.draft_vocab_size is None else pruned_vocabulary.read(model, files)


def _norms(files: Files, read: Features) -> np.ndarray:
    """The norms of each hidden state.

    Raises:
      CheckpointError: they are not as many, or not as large.
    """
    names = [f"{NORMS}{number}.weight" for number in range(len(read.layers))]
    found = {name.removeprefix("model."): tensor for name, _, tensor in tensors(files)}
    held = [found.pop(name, None) for name in names]
    others = [name for name in found if name.startswith(NORMS)]
    wrong = [name for name, part in zip(names, held, strict=True)
             if part is None or part.shape != (read.size,)]  # fmt: skip
    if wrong or others:
        raise CheckpointError(
            f"{files.path} has to have {', '.join(names)} of shape {(read.size,)}, as it reads so "
            f"many hidden states; wrong are {', '.join((*wrong, *others))}."
        )
    return np.stack([part for part in held if part is not None])


def _names(files: Files) -> set[str]:
    return {name.removeprefix("model.") for name, _, _ in tensors(files)}


def draft_config(files: Files, target: ModelConfig) -> ModelConfig:
    """The configuration of a draft's folder, whether it reads hidden states of a target or not.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
      ValueError: it is a head of another target.
    """
    return config_for(files, target) if is_feature_draft(files) else read_config(files.path)[0]


def config_for(files: Files, target: ModelConfig) -> ModelConfig:
    """The configuration of such a draft beside a target's.

    Raises:
      CheckpointError: a file or key is missing or not supported.
      ValueError: it is of another target: by its vocabulary, its hidden size or its layers.
    """
    config = config_alone(files)
    assert config.features is not None
    if config.block_levels is not None:
        named = config_of(files.path).get("num_target_layers")
        if named not in (None, target.num_layers):
            raise ValueError(
                f"{files.path}: the draft is for a target of {named} layers; the model has "
                f"{target.num_layers}."
            )
        _check(files.path, config, config.features, target)
        return dataclasses.replace(config, vocab_size=target.vocab_size, eos_ids=())
    names = _names(files)
    norms = "each" if any(name.startswith(NORMS) for name in names) else config.features.norms
    if EAGLE3.outer["feature_input_norm"] in names:
        norms = "whole"
    read = dataclasses.replace(
        config.features,
        layers=config.features.layers or layers_read(target.num_layers),
        norms=norms,
        shares_embedding=EAGLE3.outer["embedding"] not in names,
    )
    _check(files.path, config, read, target)
    size, own = target.vocab_size, config.draft_vocab_size
    if own is None and config.vocab_size < size:  # the target's tables have rows to spare
        own = config.vocab_size
    return dataclasses.replace(
        config, features=read, vocab_size=size, draft_vocab_size=own, eos_ids=()
    )


def described_in(files: Files) -> tuple[ModelConfig, Family]:
    """The configuration of a folder of any model, and the family of its files.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
    """
    if not is_feature_draft(files):
        return read_config(files.path)
    config = config_alone(files)
    return config, families.FAMILIES[config.family]


def config_alone(files: Files) -> ModelConfig:
    """The configuration of such a draft without a target's, which may not say what it reads.

    Raises:
      CheckpointError: a file or key is missing or not supported.
    """
    described = config_of(files.path)
    if not is_dflash(described):
        described = {**described, "architectures": [EAGLE3.architecture]}
    try:
        return families.read_config(described)
    except (ValueError, TypeError, AttributeError, ArithmeticError, KeyError) as error:
        raise CheckpointError(f"{files.path / CONFIG}: {error}") from error


def _check(folder: Path, config: ModelConfig, read: Features, target: ModelConfig) -> None:
    """Checks that a draft is of such a target.

    Raises:
      ValueError: it is not.
    """
    if config.vocab_size > target.vocab_size:
        raise ValueError(
            f"{folder}: the draft is for a target of {config.vocab_size} tokens; the model has "
            f"{target.vocab_size}."
        )
    if read.size != target.hidden_size:
        raise ValueError(
            f"{folder}: the draft reads hidden states of {read.size} numbers; the model's have "
            f"{target.hidden_size}."
        )
    if read.shares_embedding and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"{folder}: the draft has no embedding of its own, and its hidden size is "
            f"{config.hidden_size}; the model's is {target.hidden_size}."
        )
    wrong = [layer for layer in read.layers if not 0 <= layer <= target.num_layers]
    if wrong or not read.layers:
        layers = ", ".join(map(str, read.layers))
        raise ValueError(
            f"{folder}: the draft reads the hidden states after {layers} layers; the model has "
            f"{target.num_layers}."
        )


def _whole(table: Any, target: Model, mesh: Mesh | None) -> Any:
    """A table of the target, whole on every device."""
    if mesh is None or target.axis is None:
        return table
    return jax.device_put(table, NamedSharding(mesh, P()))
