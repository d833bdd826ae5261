"""Files of the cache folder that hold one JSON object, which processes read and change in turn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.cache import cache_folder, locked
from specjax.base.output import read_json, write_json


class Store(NamedTuple):
    """A file of the cache folder by its name."""

    name: str

    @property
    def file(self) -> Path | None:
        """Where it is, if there is a cache folder."""
        folder = cache_folder()
        return None if folder is None else folder / self.name

    def read(self) -> dict[str, Any]:
        """What it holds; nothing where it cannot be read, as it is only a cache."""
        file = self.file
        try:
            held = None if file is None else read_json(file)
        except (OSError, ValueError):
            return {}
        return held if isinstance(held, dict) else {}

    def change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
        """Writes what `change` makes of what it holds; gives the file. Other processes wait.

        Raises:
          OSError: there is no cache folder, or it cannot be written.
        """
        file = self.file
        if file is None:
            raise OSError("there is no home folder; name one with SPECJAX_CACHE")
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock")):
            write_json(file, change(self.read()))
        return file
