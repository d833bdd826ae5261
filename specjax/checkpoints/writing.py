"""Folders of safetensors files, written a tensor after the other."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints import gguf
from specjax.checkpoints.files import CONFIG, INDEX, CheckpointError
from specjax.checkpoints.huggingface import check_holds_no_model

_SHARD = 2 * 2**30
"""Bytes of a file from which on another is begun; so much is held in memory."""
_COPIED = (".json", ".txt", ".model", ".jinja")
"""Files beside the weights that go along: tokenizers, and what texts end with."""


class Shards:
    """Files of at most 2 GiB in a folder, and the index of their tensors.

    Args:
      folder: where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, np.ndarray] = {}
        self._where: dict[str, str] = {}
        self.size = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Takes a tensor, and writes those before it if a file is full."""
        if self._held and sum(each.nbytes for each in self._held.values()) + tensor.nbytes > _SHARD:
            self._write()
        self._held[name] = np.ascontiguousarray(tensor)
        self.size += tensor.nbytes

    def finish(self) -> None:
        """Writes what is left, and the index."""
        self._write()
        index = {"metadata": {"total_size": self.size}, "weight_map": self._where}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        name = f"model-{len(set(self._where.values())) + 1:05}.safetensors"
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self._where |= dict.fromkeys(self._held, name)
        self._held.clear()


@contextlib.contextmanager
def new_model(source: Path, out: Path, config: Mapping[str, Any]) -> Iterator[Shards]:
    """A model's folder that is there as a whole or not at all.

    Args:
      source: a model's folder, whose tokenizer goes along.
      out: a folder that holds no model yet.
      config: its `config.json`.

    Returns:
      Where to put the tensors.

    Raises:
      CheckpointError: `out` holds a model, or the source is a GGUF file.
    """
    if gguf.is_gguf(source):
        raise CheckpointError(f"{source} is a GGUF file; name a model's folder.")
    check_holds_no_model(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
    try:
        shards = Shards(made)
        yield shards
        shards.finish()
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _copy_others(source, made)
        out.mkdir(exist_ok=True)
        for file in made.iterdir():
            file.rename(out / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _copy_others(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        known = file.name == CONFIG or file.name.endswith(".index.json")
        if file.suffix in _COPIED and not known and file.is_file():
            shutil.copyfile(file, folder / file.name)
