"""Measurements that are kept as they are made: a killed run goes on with what is missing."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from specjax.base.output import read_json, write_json

Json: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cells:
    """A folder with a JSON file for each finished cell.

    Attributes:
      folder: where they are.
      common: what every cell depends on: models, machine, versions.
      after: called when a cell was written.
      dates: of the cells that were read or made, by table.
    """

    folder: Path
    common: Json
    after: Callable[[], object] = lambda: None
    dates: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def held(self, table: str, key: Json) -> Any | None:
        """The value of a cell; None where it is missing, or its file is not whole.

        Args:
          table: its table.
          key: what it depends on, beside `common`.
        """
        try:
            found = read_json(self._file(table, key))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("key") != self._key(table, key):
            return None
        self.dates.setdefault(table, []).append(str(found.get("date")))
        return found.get("value")

    def keep(self, table: str, key: Json, value: Any) -> Any:
        """Writes a cell, and gives its value as JSON holds it.

        Raises:
          OSError: it cannot be written.
        """
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        file = self._file(table, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"key": self._key(table, key), "date": date, "value": value})
        self.after()
        return self.held(table, key)

    def get(self, table: str, key: Json, work: Callable[[], Any]) -> Any:
        """The value of a cell, which `work` makes if it is missing.

        Raises:
          OSError: it cannot be written.
        """
        found = self.held(table, key)
        return self.keep(table, key, work()) if found is None else found

    def _key(self, table: str, key: Json) -> Json:
        return json.loads(json.dumps({"table": table} | self.common | key))

    def _file(self, table: str, key: Json) -> Path:
        named = json.dumps(self._key(table, key), sort_keys=True)
        return self.folder / f"{table}-{hashlib.sha256(named.encode()).hexdigest()[:20]}.json"
