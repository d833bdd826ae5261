"""A target that is given: which files it is, and what names it among a run's inputs."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from specjax.checkpoints import orbax
from specjax.checkpoints.files import Files
from specjax.checkpoints.names import MODELS

_TEXTS = ("*.json", "tokenizer.model", "*.jinja", "*.txt")
_WEIGHTS = ("*.safetensors", f"{orbax.FOLDER}/**/*", "*.bin")
"""Patterns of weights; what the first of them that fits names is loaded."""


def identity_of(files: Files) -> str:
    """A digest of a checkpoint: its configuration and tokenizer, and of its weights' files the
    names, sizes and times, or in a hub's cache the digests that its files are named by.

    Raises:
      ValueError: there are no weights.
    """
    found = hashlib.sha256()
    if files.path.is_file():  # a GGUF file, which is all of it
        return f"target-{hashlib.sha256(_version_of(files.path).encode()).hexdigest()[:16]}"
    for pattern in _TEXTS:
        for file in sorted(files.path.glob(pattern)):
            found.update(file.name.encode() + file.read_bytes())
    weights = list(_weights(files))
    if not weights:
        raise ValueError(f"{files.path} holds no weights, so nothing tells it from others.")
    for file in weights:
        name = file.relative_to(files.path).as_posix()
        found.update(f"{name} {_version_of(file)}".encode())
    return f"target-{found.hexdigest()[:16]}"


def lasting_name(name: str, files: Files) -> str:
    """What names the same checkpoint from any folder, later: a hub's revision, or a whole path."""
    if name == "bundled" or name in MODELS:
        return name
    if Path(name).exists():
        return str(files.path.resolve())
    return f"{name.partition('@')[0]}@{files.path.name}"


def _weights(files: Files) -> Iterator[Path]:
    for pattern in _WEIGHTS:
        found = [file for file in sorted(files.path.glob(pattern)) if file.is_file()]
        if found:
            yield from found
            return


def _version_of(file: Path) -> str:
    held = file.resolve()
    if held.parent.name == "blobs":  # a hub's cache, whose files are named after what they hold
        return held.name
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
