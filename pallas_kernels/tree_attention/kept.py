"""What was measured on this machine, kept in the cache folder; and what is being tried.

The file holds, by kind of device and then by versions, the entries of buckets. Beside it a second
file names the implementation that is being tried, for as long as it is: where a process ended or
was ended in the middle, the next one finds it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.cache import cache_folder, locked, locked_within, replace_file

_FILE, _TRYING = "kernels.json", "kernels.trying.json"
_LOCK, _TURNS = "kernels.lock", "kernels.turns.lock"

logger = logging.getLogger("pallas_kernels")


class Bucket(NamedTuple):
    """Calls that share a measurement: sizes up to these, and what else has to be equal.

    Attributes:
      kind: dtypes of block and cache, features of a head, whether there are windows and caps.
      batch: rows, as all sizes the least power of two that is not smaller.
      nodes: nodes of a row's tree.
      slots: slots of a row's cache.
      groups: query heads a key/value head.
      candidates: names of what can run.
    """

    kind: str
    batch: int
    nodes: int
    slots: int
    groups: int
    candidates: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """What may differ between a measurement that counts and a call, by name."""
        names = ("batch", "nodes", "slots", "groups")
        return {name: getattr(self, name) for name in names}


class Entry(NamedTuple):
    """What came of a bucket: seconds of a call by implementation, and why others have none."""

    bucket: Bucket
    seconds: Mapping[str, float]
    errors: Mapping[str, str]

    @property
    def owed(self) -> tuple[str, ...]:
        """What was not tried yet."""
        done = self.seconds.keys() | self.errors.keys()
        return tuple(name for name in self.bucket.candidates if name not in done)

    @property
    def fastest(self) -> str | None:
        """The implementation that takes the least time, if any ran."""
        return min(self.seconds, key=lambda name: self.seconds[name], default=None)


class _Process:
    """What this process knows beside the file: entries by device, and what it warned of."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[Bucket, Entry]] = {}
        self.warned: set[str] = set()


_process = _Process()


def entries(device: str) -> dict[Bucket, Entry]:
    """What is kept of a kind of device, with these versions; of this process too, if unwritten."""
    found = filter(None, map(_entry, _own(_read(), device)))
    return {entry.bucket: entry for entry in found} | _process.entries.get(device, {})


def keep(device: str, entry: Entry) -> Path | None:
    """Keeps an entry in place of an earlier one of its bucket; gives the file.

    None where it cannot be written, which is warned of once: it is kept for this process then.
    """
    _process.entries.setdefault(device, {})[entry.bucket] = entry
    file = _file()
    if file is None:
        return None

    def changed(held: dict[str, Any]) -> None:
        others = [own for own in _own(held, device) if _bucket(own) != entry.bucket]
        held[device] = {**_versions_of(held, device), versions(): [*others, _written(entry)]}

    return file if _changed(file, changed) else None


def forget(device: str) -> None:
    """Forgets all of a kind of device, whatever the versions."""
    _process.entries.pop(device, None)
    file = _file()
    if file is not None and file.exists():
        _changed(file, lambda held: held.pop(device, None))


def _changed(file: Path, change: Any) -> bool:
    """Whether the file could be changed; other processes wait."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent / _LOCK):
            held = _read()
            change(held)
            replace_file(file, json.dumps(held, indent=1) + "\n")
    except OSError as error:
        _warn(f"{file} cannot be written ({error.strerror}): this process alone knows how fast "
              "kernels are.")  # fmt: skip
        return False
    return True


@contextlib.contextmanager
def turn(patience: float) -> Iterator[bool]:
    """Lets one process measure at a time; it gives whether what is tried can be noted.

    That takes a lock that the system takes back from a process which ends.

    Raises:
      LockTimeoutError: another process measures for longer than `patience` seconds.
    """
    file = _file()
    with contextlib.ExitStack() as stack:
        held = False
        if file is not None:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(locked_within(file.parent / _TURNS, patience))
        yield held


@contextlib.contextmanager
def trying(device: str, entry: Entry, name: str) -> Iterator[None]:
    """Notes for the time inside that an implementation is being tried."""
    file = _file()
    assert file is not None
    note = file.with_name(_TRYING)
    text = json.dumps({"device": device, "versions": versions(), "name": name, **_written(entry)})
    try:
        with contextlib.suppress(OSError):
            replace_file(note, text)
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)


def interrupted() -> tuple[str, Entry, str] | None:
    """The device, entry and name of what a process tried that then ended, which is forgotten.

    Only in a `turn` in which it can be noted: else another process may be trying it now.
    """
    file = _file()
    assert file is not None
    note = file.with_name(_TRYING)
    try:
        found = json.loads(note.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    match found, _entry(found):
        case {"device": str(device), "versions": str(of), "name": str(name)}, Entry() as entry:
            return (device, entry, name) if of == versions() else None
    return None


@functools.cache
def versions() -> str:
    """Of jax and of the kernels, by which entries are kept."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return f"jax {jax.__version__}, kernels {digest.hexdigest()[:8]}"


def _file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / _FILE


def _read() -> dict[str, Any]:
    """What the file holds; nothing, and a warning, where it cannot be read."""
    file = _file()
    if file is None:
        return {}
    try:
        held = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn(f"{file} cannot be read ({error.strerror}): kernels are measured anew.")
        return {}
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict):
        _warn(f"{file} is damaged: kernels are measured anew.")
        return {}
    return held


def _versions_of(held: dict[str, Any], device: str) -> dict[str, Any]:
    found = held.get(device)
    return found if isinstance(found, dict) else {}


def _own(held: dict[str, Any], device: str) -> list[Any]:
    """The entries of a device with these versions, as they were written."""
    found = _versions_of(held, device).get(versions())
    return found if isinstance(found, list) else []


def _written(entry: Entry) -> dict[str, Any]:
    return {**entry.bucket._asdict(), "seconds": dict(entry.seconds), "errors": dict(entry.errors)}


def _bucket(values: Any) -> Bucket | None:
    match values:
        case {
            "kind": str(kind),
            "batch": int(batch),
            "nodes": int(nodes),
            "slots": int(slots),
            "groups": int(groups),
            "candidates": [*names],
        } if all(isinstance(name, str) for name in names) and min(batch, nodes, slots, groups) >= 0:
            return Bucket(kind, batch, nodes, slots, groups, tuple(names))
    return None


def _entry(values: Any) -> Entry | None:
    """An entry as it was written; None if it is anything else."""
    bucket = _bucket(values)
    match values:
        case {"seconds": {**seconds}, "errors": {**errors}} if bucket is not None:
            known = all(map(_is_time, seconds.values()))
            if known and all(isinstance(why, str) for why in errors.values()):
                return Entry(bucket, seconds, errors)
    return None


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _warn(sentence: str) -> None:
    """Warns, once in a process."""
    if sentence not in _process.warned:
        _process.warned.add(sentence)
        logger.warning(sentence)
