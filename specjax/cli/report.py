"""What verbs that measure write with `--json FILE`: rows, and what they were measured on.

The file is `{"complete": ..., "env": {...}, "rows": [...]}`. A row is what `report` gives of a
record in `specjax.measure.rows`, whose attributes are its keys; `env` is
`specjax.measure.timing.environment` with the command, its options and what the verb adds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from specjax.base.output import is_stream, tried, write_json
from specjax.measure import timing

Json = dict[str, Any]


def env_of(command: str, options: Any) -> Json:
    """The hardware, the versions, the verb and its options: what every report says first."""
    return timing.environment() | {"command": command, "config": dataclasses.asdict(options)}


@dataclasses.dataclass
class Report:
    """A report in the making, and the file that it is kept in while it grows.

    The file is whole and valid at any time; its `complete` says whether all rows are there.

    Attributes:
      file: where to keep it, if anywhere.
      env: what was measured, and on what (see `env_of`).
      every: the least seconds between two writes.
      written: when it was last written, by a clock that only goes on.
      refused: whether the file could not be written; it is not tried again before the end.
    """

    file: str | None
    env: Json
    every: float = 0.0
    written: float = float("-inf")
    refused: bool = False

    def whole(self, rows: Sequence[Json], complete: bool = True) -> Json:
        """The report with these rows."""
        return {"complete": complete, "env": self.env, "rows": rows}

    def keep(self, rows: Callable[[], Sequence[Json]]) -> None:
        """Writes the rows so far, which are asked for where it is time to."""
        if not self.file or self.refused or is_stream(self.file):
            return
        if time.monotonic() - self.written >= self.every:
            self.refused = not self._write(rows(), complete=False)
            self.written = time.monotonic()

    def finish(self, rows: Sequence[Json]) -> bool:
        """Writes the whole report; whether it could."""
        return not self.file or self._write(rows, complete=True)

    def _write(self, rows: Sequence[Json], complete: bool) -> bool:
        file = self.file
        assert file is not None
        whole = self.whole(rows, complete)
        return tried(f"{file} cannot be written", lambda: write_json(file, whole))


def rows_kept(file: str | None, written: bool) -> str:
    """What Ctrl-C leaves of a measurement that writes its rows to a file as they come."""
    if file is None or is_stream(file):
        return "nothing is kept; with --json FILE rows are, as they come"
    if written:
        return f'rows so far are in {file}, with "complete": false; the same command begins anew'
    return f"{file} has no row yet; the same command begins anew"
