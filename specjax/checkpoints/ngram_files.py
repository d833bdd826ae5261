"""N-gram models in folders that look like those of other models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from specjax.checkpoints.files import (
    BUNDLED,
    CONFIG,
    WEIGHTS,
    CheckpointError,
    Files,
    config_of,
    tensors,
)
from specjax.draft import ngram

_NGRAM, _PER_NAT, _DEAREST = "ngram", 16, 255


def is_ngram(folder: str | Path) -> bool:
    """Whether a folder holds an n-gram model.

    Raises:
      CheckpointError: it holds no configuration.
    """
    return config_of(Path(folder)).get("kind") == _NGRAM


def load_ngram(name: str | Path = "bundled", vocab_size: int | None = None) -> ngram.NGram:
    """The n-gram model of a folder, or the bundled one.

    Raises:
      CheckpointError: a file or a tensor is missing, damaged, or not what the configuration says,
        or the model is not one of `vocab_size` tokens.
    """
    folder = BUNDLED / _NGRAM if name == "bundled" else Path(name)
    config = config_of(folder)
    size, width, contexts = _ngram_sizes(config, folder / CONFIG)
    if vocab_size not in (None, size):
        raise CheckpointError(
            f"the n-gram model in {folder} is one of {size} tokens; {vocab_size} are asked for."
        )
    rows = size + contexts, width
    found = _ngram_tensors(folder, {"contexts": (contexts, 2), "tokens": rows, "costs": rows})
    largest = max(int(found[each].max(initial=0)) for each in ("contexts", "tokens"))
    if largest >= size:
        raise CheckpointError(f"{folder} names token {largest}; {CONFIG} says {size} tokens.")
    wide = {name: tensor.astype(np.int32) for name, tensor in found.items()}
    log_q = wide["costs"].astype(np.float32) / -_PER_NAT
    return ngram.pack(wide["contexts"], wide["tokens"], log_q)


def save_ngram(table: ngram.NGram, folder: str | Path, **extras: Any) -> None:
    """Writes `table` as a folder that `load_ngram` reads; `extras` are added to `config.json`.

    Log probabilities are kept as `costs`, in sixteenths of a nat in a byte (at most 15.9 nats);
    the hash table is made anew when the folder is read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "kind": _NGRAM,
        "order": ngram.ORDER,
        "vocab_size": table.vocab_size,
        "width": table.width,
        "contexts": table.num_contexts,
    }
    (folder / CONFIG).write_text(json.dumps(config | extras, indent=2) + "\n", encoding="utf-8")
    small = np.min_scalar_type(table.vocab_size - 1)
    costs = np.round(-_PER_NAT * np.asarray(table.log_q))
    held = {
        "contexts": ngram.contexts_of(table).astype(small),
        "tokens": np.asarray(table.tokens).astype(small),
        "costs": np.minimum(costs, _DEAREST).astype(np.uint8),
    }
    (folder / WEIGHTS).write_bytes(save(held))


def _ngram_sizes(config: dict[str, Any], file: Path) -> tuple[int, int, int]:
    """Vocabulary, width and contexts of an n-gram model."""
    for name, expected in (("kind", _NGRAM), ("order", ngram.ORDER)):
        if config.get(name) != expected:
            raise CheckpointError(
                f"{file} says {name} {config.get(name)!r}; an n-gram model has {expected!r}."
            )
    for name, least in (("vocab_size", 1), ("width", 1), ("contexts", 0)):
        if type(config.get(name)) is not int or config[name] < least:
            raise CheckpointError(
                f"{file} says {name} {config.get(name)!r}; it must be at least {least}."
            )
    return config["vocab_size"], config["width"], config["contexts"]


def _ngram_tensors(folder: Path, missing: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """The tensors of an n-gram model, of the shapes given."""
    found = {}
    for name, file, tensor in tensors(Files(folder)):
        expected = missing.pop(name, None)
        if expected is None:
            raise CheckpointError(
                f"unexpected tensor {name} in {file}; an n-gram model has none of that name."
            )
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} in {file} has shape {tensor.shape}; {CONFIG} asks for {expected}."
            )
        found[name] = np.array(tensor)
    if missing:
        raise CheckpointError(f"{folder} has no tensor {', '.join(sorted(missing))}.")
    return found
