"""What `specjax tune` writes and `--config` reads: a setting for each kind of rows."""

import dataclasses
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.base.output import is_stream, read_json, reason, tried, write_json
from specjax.methods.method import Setting
from specjax.methods.setting import from_json, to_json
from specjax.trees.widths import is_number


class Entry(NamedTuple):
    """The setting for rows of a temperature in batches of a size, and what is known of it.

    `expected` is what tune foresaw and `measured` what its check run gave: tokens per step,
    tokens per second and speed-up over plain decoding.
    """

    temperature: float
    batch: int
    setting: Setting
    expected: dict[str, float]
    measured: dict[str, float]


def write(
    path: str | Path, entries: Sequence[Entry], env: dict[str, Any], complete: bool = True
) -> None:
    """Writes entries and where they were measured; `complete` says that no entry is missing.

    Raises:
      OSError: the file cannot be written.
    """
    settings = [entry._asdict() | {"setting": to_json(entry.setting)} for entry in entries]
    write_json(path, {"complete": complete, "env": env, "settings": settings})


@dataclasses.dataclass
class Unfinished:
    """What a run of tune has found so far, in a file beside the one that it will write.

    So nothing is lost when it is ended, and the file that an earlier run wrote stays until a whole
    one takes its place. `read` refuses what is not whole.
    """

    file: str
    refused: bool = False

    @property
    def beside(self) -> Path:
        """The file's name with `.partial` after it."""
        return Path(f"{self.file}.partial")

    def keep(self, entries: Sequence[Entry], env: dict[str, Any]) -> None:
        """Writes what there is; a folder that refuses is reported once and not tried again."""
        if not self.refused and not is_stream(self.file):
            self.refused = not tried(
                f"{self.beside} cannot be written",
                lambda: write(self.beside, entries, env, complete=False),
            )

    def remove(self) -> None:
        """Removes it: the whole is written."""
        if not self.refused and not is_stream(self.file):
            tried(f"{self.beside} cannot be removed", lambda: self.beside.unlink(missing_ok=True))


def read(path: str | Path) -> list[Entry]:
    """The entries of a file.

    Raises:
      ValueError: there is no such file, or it is not one that tune wrote to its end.
    """
    try:
        held = read_json(path)
    except OSError as error:
        raise ValueError(f"--config is {path}, which cannot be read: {reason(error)}.") from error
    except ValueError as error:
        raise ValueError(f"--config is {path}, which is not JSON: {error}.") from error
    listed = held.get("settings") if isinstance(held, dict) else None
    if isinstance(held, dict) and held.get("complete", True) is not True:
        raise ValueError(f"--config is {path}, of a run of tune that did not end; run it again.")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"--config is {path}, which holds no settings; write one with tune.")
    return [_entry(each, f"--config {path}, setting {n}") for n, each in enumerate(listed)]


def _entry(values: Any, where: str) -> Entry:
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {reprlib.repr(values)}; it must be an object.")
    for name in ("temperature", "batch", "setting"):
        if name not in values:
            raise ValueError(f"{where} has no {name}.")
    temperature, batch = values["temperature"], values["batch"]
    if not is_number(temperature) or temperature < 0:
        raise ValueError(
            f"{where} has the temperature {reprlib.repr(temperature)}; it must be a number of at "
            "least 0."
        )
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(
            f"{where} has the batch {reprlib.repr(batch)}; it must be an integer of at least 1."
        )
    known = {name: values.get(name) or {} for name in ("expected", "measured")}
    for name, figures in known.items():
        if not isinstance(figures, dict) or not all(map(is_number, figures.values())):
            raise ValueError(f"{where}: {name} must be an object of numbers.")
    return Entry(float(temperature), batch, from_json(values["setting"], where), **known)


def pick(entries: Sequence[Entry], temperature: float, batch: int = 1) -> Entry:
    """The entry for such rows: of the same kind (greedy or sampled) if there is one, then of the
    nearest batch size and temperature.
    """

    def distance(entry: Entry) -> tuple[bool, int, float]:
        other_kind = (entry.temperature > 0) != (temperature > 0)
        return other_kind, abs(entry.batch - batch), abs(entry.temperature - temperature)

    return min(entries, key=distance)
