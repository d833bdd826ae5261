"""What `specjax tune` writes and `--config` reads: a setting for each kind of rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.setting import Setting, from_json, to_json


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


def write(path: str | Path, entries: Sequence[Entry], env: dict[str, Any]) -> None:
    """Writes entries and where they were measured."""
    settings = [entry._asdict() | {"setting": to_json(entry.setting)} for entry in entries]
    text = json.dumps({"env": env, "settings": settings}, indent=1) + "\n"
    Path(path).write_text(text, "utf-8")


def read(path: str | Path) -> list[Entry]:
    """The entries of a file.

    Raises:
      ValueError: there is no such file, or it is not one that tune wrote.
    """
    try:
        held = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--config is {path}, which cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"--config is {path}, which is no JSON: {error}.") from error
    listed = held.get("settings") if isinstance(held, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"--config is {path}, which holds no settings; write one with tune.")
    return [_entry(each, f"--config {path}, setting {n}") for n, each in enumerate(listed)]


def _entry(values: Any, where: str) -> Entry:
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {values!r}; it must be an object.")
    for name in ("temperature", "batch", "setting"):
        if name not in values:
            raise ValueError(f"{where} has no {name}.")
    try:
        temperature, batch = float(values["temperature"]), int(values["batch"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} has a temperature or batch that is no number.") from error
    return Entry(
        temperature,
        batch,
        from_json(values["setting"], where),
        values.get("expected", {}),
        values.get("measured", {}),
    )


def pick(entries: Sequence[Entry], temperature: float, batch: int = 1) -> Entry:
    """The entry for such rows: of the same kind (greedy or sampled) if there is one, then of the
    nearest batch size and temperature.
    """

    def distance(entry: Entry) -> tuple[bool, int, float]:
        other_kind = (entry.temperature > 0) != (temperature > 0)
        return other_kind, abs(entry.batch - batch), abs(entry.temperature - temperature)

    return min(entries, key=distance)
