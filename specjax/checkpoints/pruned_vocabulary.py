"""The map from a draft's tokens to its target's in files, as EAGLE-3 has it.

`draft_vocab_size` of `config.json` says how many of `vocab_size` tokens a draft knows, and the
tensor `d2t` which: its token d is the target's token `d + d2t[d]`. Tables have one row more, for
all other tokens.
"""

import jax.numpy as jnp
import numpy as np

from specjax.base.pytree import replace
from specjax.checkpoints.files import CheckpointError, Files, tensors
from specjax.models import pruning
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model

OFFSETS, IS_KNOWN = "d2t", "t2d"


def is_map(name: str, config: ModelConfig) -> bool:
    """Whether a tensor of a draft's file is of its map, and no weight."""
    return config.draft_vocab_size is not None and name in (OFFSETS, IS_KNOWN)


def check_none(config: ModelConfig, what: str) -> None:
    """Checks that a model knows all tokens, where no map can be.

    Raises:
      CheckpointError: it does not; `what` begins the sentence.
    """
    if config.draft_vocab_size is not None:
        raise CheckpointError(
            f"{what}: it knows {config.draft_vocab_size} of {config.vocab_size} tokens, and only "
            "save_model's files say which."
        )


def _ids_in(files: Files, config: ModelConfig) -> np.ndarray:
    """The target's tokens that a draft knows, in its order, int64 [D].

    Raises:
      CheckpointError: the files have no map, or not one of so many tokens.
    """
    found = next((each for each in tensors(files) if each[0] == OFFSETS), None)
    if found is None:
        raise CheckpointError(
            f"{files.path} says draft_vocab_size {config.draft_vocab_size} of vocab_size "
            f"{config.vocab_size}, and has no tensor {OFFSETS} that says which tokens these are."
        )
    _, file, offsets = found
    if offsets.dtype.kind != "i" or offsets.shape != (config.draft_vocab_size,):
        raise CheckpointError(
            f"{OFFSETS} in {file} is {offsets.dtype} of shape {offsets.shape}; draft_vocab_size "
            f"asks for integers of shape {(config.draft_vocab_size,)}."
        )
    return np.arange(len(offsets)) + offsets.astype(np.int64)


def read(model: Model, files: Files) -> Model:
    """The draft with the map of its files.

    A head's tables have no row for what it does not know.

    Raises:
      CheckpointError: there is none, or it is not one of so many tokens.
    """
    ids, size = _ids_in(files, model.config), model.config.vocab_size
    try:
        if model.config.features is not None:
            return replace(model, row_of=jnp.asarray(pruning.rows_of(ids, size)))
        return pruning.with_rows(model, ids, size)
    except ValueError as error:
        raise CheckpointError(f"{OFFSETS} in {files.path}: {error}") from error


def written(model: Model) -> dict[str, np.ndarray]:
    """The map of a draft that has one, by its name in files."""
    if model.row_of is None or model.config.draft_vocab_size is None:
        return {}
    ids = pruning.ids_of(np.asarray(model.row_of), model.config.draft_vocab_size)
    made: dict[str, np.ndarray] = {OFFSETS: ids - np.arange(len(ids))}
    if model.config.features is not None:  # as others' programs read heads
        made[IS_KNOWN] = np.isin(np.arange(model.config.vocab_size), ids)
    return made
