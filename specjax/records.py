"""What was measured on this machine, kept in the user's cache folder."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.model import Model
from specjax.setting import from_json
from specjax.sharding import mesh_of

_FILE = "measured.json"
_ENTRY = {"setting", "temperature", "tokens_per_second"}


def cache_folder() -> Path:
    """`$SPECJAX_CACHE`, else `specjax` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specjax"


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache folder, unless the user has named another place."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def setting(target: Model, drafts: Sequence[Model], batch: int, sampled: bool) -> str:
    """The name under which measurements of a pair are kept: machine, versions, models, rows.

    On a mesh also its axes: what is fastest on one device need not be on several.
    """
    models = hashlib.sha256()
    for model in (target, *drafts):
        models.update(repr(model.config).encode())
        models.update(np.asarray(model.final_norm).tobytes())
        models.update(np.asarray(model.embedding[:8], np.float32).tobytes())
    parts = (
        jax.devices()[0].device_kind,
        f"{os.cpu_count()} cores",
        f"jax {jax.__version__}",
        models.hexdigest()[:16],
        str(target.embedding.dtype),
        f"batch {batch}",
        "sampled" if sampled else "greedy",
    )
    if (mesh := mesh_of(target)) is not None:
        parts += tuple(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return ", ".join(parts)


def recall(name: str) -> list[dict[str, Any]]:
    """What was measured under `name`; may be empty.

    Each entry holds at least a setting (see `setting.to_json`), temperature and
    tokens_per_second.

    A file that cannot be read counts as empty, and so does an entry that another version wrote:
    it is only a cache.
    """
    return [entry for entry in _read().get(name, []) if _is_known(entry)]


def _is_known(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY:
        return False
    try:
        from_json(entry["setting"], "a measurement")
    except ValueError:
        return False
    return True


def remember(name: str, measured: Sequence[dict[str, Any]]) -> Path:
    """Writes what was measured under `name`, in place of what was there; gives the file."""
    path = cache_folder() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(_read() | {name: list(measured)}, indent=1) + "\n", "utf-8")
    unfinished.replace(path)
    return path


def _read() -> dict[str, Any]:
    try:
        held = json.loads((cache_folder() / _FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
