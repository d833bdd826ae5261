"""Models by name: a target with its tokenizer, drafts, or weights alone, in memory or offloaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.checkpoints import orbax, pruned_vocabulary
from specjax.checkpoints.end_tokens import with_end_tokens
from specjax.checkpoints.experts import gathered
from specjax.checkpoints.files import CheckpointError, Files, Name, find
from specjax.checkpoints.huggingface import (
    checked,
    default_draft_dtype,
    default_dtype,
    held_bytes,
    leaves_of,
    may_keep_bfloat16,
    read_config,
)
from specjax.checkpoints.names import shipped_for
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.models import memory
from specjax.models.placement import placement
from specjax.models.quantized import BFLOAT16, INT8, check_activations, with_activations
from specjax.models.stacking import leaves_of_layers, stacks
from specjax.models.transformer import Model, assemble

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STAGES = ("ngram", "stage2")
"""Folders of what drafts for the first of the drafts that come with the package."""


def load(
    name: Name | Sequence[Name] = "bundled",
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    positions: int | None = None,
    offload: str | None = None,
    memory: int | None = None,
    lora: Name | None = None,
    activations: str | None = None,
) -> "tuple[Model, PreTrainedTokenizerFast]":
    """The model and the tokenizer of a folder, of a hub's id, or of the bundled target.

    Args:
      name: a Hugging Face folder, a hub's org/name or org/name@revision, a list of safetensors
        files of one folder, or "bundled".
      dtype: "float32" or "bfloat16"; None takes float32 on a CPU and bfloat16 elsewhere. Matrices
        that files hold in bfloat16 stay so on a CPU and multiply float32 (see `load_model`).
      mesh: each weight is read straight into its shards on it (see `specjax.models.placement`).
      positions: how many of the model's are used, by default all; of a LongRoPE model those of its
        short factors, more take the long ones. Where a file stretches a context that it names, all
        of that may be used.
      offload: "disk" keeps only the first layers in memory, as many as fit; the others are read in
        every pass (see `specjax.models.streamed`). "host" keeps the first on the device, the others
        in the host's memory, from which they move in every pass.
      memory: bytes for the weights of an offloaded model; None is half of what there is.
      lora: a folder or a hub's id of a LoRA adapter that peft wrote; it is merged into the weights
        in float32, before they are rounded.
      activations: "float", "bfloat16" or "int8", what multiplies weights of 8 and 4 bits on a CPU,
        and by default what is best there (see `specjax.models.quantized.with_activations`).

    Returns:
      The model, and the tokenizer of its folder.

    Raises:
      CheckpointError: the folder, a file or a tensor is missing or not supported.
      ValueError: a model cannot be offloaded so, or its activations cannot be so.
    """
    check_activations_for(activations, is_offloaded=(offload, memory) != (None, None))
    found = find(name, lora)
    return load_target(
        found, dtype=dtype, mesh=mesh, positions=positions, offload=offload, memory=memory,
        activations=activations,
    )  # fmt: skip


def load_target(
    files: Files,
    *,
    dtype: str | None,
    mesh: Mesh | None,
    positions: int | None,
    offload: str | None,
    memory: int | None,
    activations: str | None,
) -> "tuple[Model, PreTrainedTokenizerFast]":
    """What `load` gives, of files that were found.

    Raises:
      CheckpointError: as `load`.
      ValueError: it cannot be offloaded so.
    """
    if (offload, memory) != (None, None):
        made = load_offloaded(files, offload, memory, dtype=dtype, mesh=mesh, positions=positions)
    else:
        made = load_model(files, dtype=dtype, mesh=mesh, positions=positions, keeps_bfloat16=True)
        made = with_activations(made, activations)
    tokenizer = tokenizer_of(files.path, made.config.vocab_size)
    return with_end_tokens(made, tokenizer, files), tokenizer


def check_activations_for(activations: str | None, is_offloaded: bool) -> None:
    """Checks activations before anything is read.

    Raises:
      ValueError: there is no such choice, or it cannot be made here.
    """
    check_activations(activations)
    if activations in (BFLOAT16, INT8) and is_offloaded:
        raise ValueError(
            f"activations in {activations} are for models that are in memory, not offloaded."
        )


def load_drafts(
    names: Name | Sequence[Name] = "bundled",
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> list[Model]:
    """The models of a folder or of several, or the whole bundled pool in numeric order.

    Args:
      names: a folder or several; "bundled" and "smollm2" are the drafts that come with the package
        for these targets, "bundled/0" is the first of them alone.
      dtype: "float32" or "bfloat16"; None takes bfloat16, and float32 on a CPU that does not
        multiply bfloat16 itself.
      mesh: every device of it holds the drafts whole.

    Returns:
      The drafts, in order.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
    """
    shipped = shipped_for(names) if isinstance(names, str | Path) else None
    if shipped is not None:
        return load_pool(shipped / "drafts", dtype, mesh)
    several = [names] if isinstance(names, str | Path) else names
    return [load_draft(folder_of(name, "drafts"), dtype=dtype, mesh=mesh) for name in several]


def load_pool(folder: Path, dtype: str | None = None, mesh: Mesh | None = None) -> list[Model]:
    """The models of the folders 0, 1, ... in `folder`, in numeric order.

    Raises:
      CheckpointError: there is none, or one is not supported.
    """
    return [load_draft(each, dtype=dtype, mesh=mesh) for each in pool_in(folder)]


def load_draft(name: Files | Name, *, dtype: str | None = None, mesh: Mesh | None = None) -> Model:
    """The model of a folder as a draft: whole on every device, in a dtype that drafts have.

    Raises:
      CheckpointError: as `load_model`.
    """
    return load_model(name, dtype=dtype or default_draft_dtype(), mesh=mesh, split=False)


def pool_in(folder: Path) -> list[Path]:
    """The folders 0, 1, ... in `folder`, in numeric order.

    Raises:
      CheckpointError: there is none.
    """
    found = [each for each in folder.glob("*") if each.name.isdigit()]
    if not found:
        raise CheckpointError(f"there are no drafts in {folder}: it needs folders 0, 1, ...")
    return sorted(found, key=lambda each: int(each.name))


def load_model(
    name: Files | Name | Sequence[Name],
    *,
    dtype: str | None = "float32",
    mesh: Mesh | None = None,
    positions: int | None = None,
    split: bool = True,
    keeps_bfloat16: bool = False,
) -> Model:
    """The model of a folder, without a tokenizer.

    Files are mapped, and a tensor at a time is rounded and placed: no more than the largest is
    held beside what stays.

    Args:
      name: see `load`.
      dtype: what weights are rounded to; None as `load` does.
      mesh: the devices to lie on.
      positions: see `load`.
      split: whether a mesh's `model` axis shares each layer; else every device holds it whole.
      keeps_bfloat16: whether matrices that files hold in bfloat16 stay so where float32 is computed
        in and the products are ours (see `cpu_matmul`): half the bytes, and the same numbers. They
        are no arrays then (see `specjax.models.quantized.widened`).

    Returns:
      The model.

    Raises:
      CheckpointError: a file is missing or damaged, a tensor is unused, a parameter unfilled, a
        shape differs from what the configuration says, or the configuration is not supported.
    """
    files = name if isinstance(name, Files) else find(name)
    config, family = read_config(files.path, positions)
    if config.features is not None:
        raise CheckpointError(
            f"{files.path} ({family.model_type}) reads hidden states of a target: name it with "
            "--draft, and the target with --model."
        )
    # Of a table of positions the file has all.
    whole = config if positions is None else read_config(files.path)[0]
    kind = jnp.dtype(dtype or default_dtype())
    keeps = keeps_bfloat16 and may_keep_bfloat16(kind)
    try:
        placed = placement(config, mesh, split)
        memory.check(
            memory.Load(placed, kind, held=held_bytes(files, kind, keeps)).weights,
            memory.available(placed.mesh),
            f"its weights in {kind}",
        )
    except ValueError as error:
        raise CheckpointError(f"{files.path}: {error}") from error
    stack = split and stacks(config)
    if (files.path / orbax.FOLDER).is_dir() and not files.weights:
        pruned_vocabulary.check_none(config, f"{files.path / orbax.FOLDER} is not read")
        if any(files.path.glob("*.safetensors")):
            raise CheckpointError(
                f"{files.path} holds weights twice, {orbax.FOLDER} and safetensors files."
            )
        if files.lora is not None:
            raise CheckpointError(
                f"{files.path} holds {orbax.FOLDER}, which no LoRA adapter is merged into; "
                "merge it before the model is written so."
            )
        try:
            return orbax.restore(files.path, whole, placed, kind, stack)
        except (ValueError, KeyError, OSError) as error:
            message = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{files.path / orbax.FOLDER} cannot be read: {message}"
            ) from error
    outer: dict[str, Any] = {}
    layers = leaves_of_layers(placed, stack)
    for stored, tensor in gathered(checked(files, whole, family), whole, files.path):
        leaves = leaves_of(stored, tensor, placed, kind, files.path, keeps_bfloat16=keeps)
        if stored.layer is None:
            outer |= leaves
        else:
            layers.add(stored.layer, leaves)
    model = assemble(placed.config, outer, layers.found, placed.axis, placed.repeats)
    return model if config.draft_vocab_size is None else pruned_vocabulary.read(model, files)


def folder_of(name: str | Path, *within: str) -> Path:
    """The folder that a name means.

    `bundled/...`, and `smollm2/...` of a model with a short name, come with the package, there
    under `within`.
    """
    first, *rest = Path(name).parts
    shipped = shipped_for(first) if rest else None
    return Path(name) if shipped is None else shipped.joinpath(*within, *rest)
