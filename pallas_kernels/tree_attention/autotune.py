"""Which implementation runs: the one that is named, or the fastest by what was measured.

On an accelerator what is fastest at a shape is measured when a program with it is first traced,
once a bucket of shapes, and kept (`kept`). `pallas_kernels.bench --write` measures what is shipped.
"""

import contextlib
import functools
import json
import math
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.cache import LockTimeoutError
from pallas_kernels.platform import at_hand, device_kind, platform
from pallas_kernels.tree_attention import kept, measuring
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from pallas_kernels.tree_attention.kept import Bucket, Entry
from pallas_kernels.tree_attention.operands import Operands

AUTO = "auto"
_KERNELS = ("tpu", "hopper", "triton")
"""Those of accelerators, the one that is taken first of those that can run."""
FILE = Path(__file__).with_name("measured.json")
NEAR = 1.0
"""The largest `distance` at which a measurement counts: one size off by a factor of two, others
not at all. Each implementation's time is about linear in each size or does not depend on it, so
that a time changes by no more than that factor, and those of others with it. What is fastest does
change from a row to eight and from a node to 16 (where the products begin to count beside the
cache), and a measurement is a few seconds once. Chosen and not measured: no accelerator was at
hand."""
_NO_ROOM = ("Out of memory while trying to allocate", "memory space hbm")
"""What jax says where the device's memory is full, which is no fault of an implementation."""
_SIZES = ("batch", "nodes", "slots", "groups")


class _Process:
    """What was decided in this process, by device and bucket."""

    def __init__(self) -> None:
        self.decided: dict[tuple[str, bool, Bucket], str] = {}
        self.lock = threading.Lock()


_process = _Process()


def use(name: str) -> None:
    """See `pallas_kernels.use`."""
    if name != AUTO:
        dispatch.check_known("tree_attention", name, IMPLEMENTATIONS)
        reason = dispatch.unable_here(IMPLEMENTATIONS[name])
        if reason is not None:
            raise dispatch.ImplementationError(
                f"tree_attention cannot run as {name!r} here: {reason}."
            )
    if dispatch.use(None if name == AUTO else name):
        jax.clear_caches()


def forget() -> None:
    """See `pallas_kernels.forget`."""
    if platform() == "cpu":
        return
    with _process.lock:
        kept.forget(device())
        _process.decided.clear()
    jax.clear_caches()


def choice(at: Operands) -> str:
    """The name of the fastest implementation for such operands, by what is measured.

    A measurement counts that is near (`NEAR`), shipped or kept; without one the implementations are
    measured now. Where that cannot be, the nearest that there is counts, or else it is "xla". On a
    CPU nothing is measured here: it is "cpu" where that can run. Of rows of several pages it is
    a kernel that reads them where they lie: XLA would copy all that a row may ever hold. Once
    chosen for a bucket it stays until the process ends.
    """
    if platform() == "cpu":
        return "cpu" if dispatch.unable(IMPLEMENTATIONS["cpu"], at) is None else _shipped(at)
    if _runs_elsewhere():
        return "xla"
    if at.prefix is not None and at.prefix.pages_a_row > 1:
        able = (name for name in _KERNELS if dispatch.unable(IMPLEMENTATIONS[name], at) is None)
        return next(able, "xla")
    bucket = bucket_of(at)
    place = device(), at_hand(), bucket
    with _process.lock:
        if place not in _process.decided:
            _process.decided[place] = _decided(at, bucket)
        return _process.decided[place]


def _shipped(at: Operands) -> str:
    """The fastest by the nearest of the shipped measurements, or "xla"."""
    found = [entry for entry in measured().get(device(), []) if entry["kind"] == kind_of(at)]
    if not found:
        return "xla"
    sizes = sizes_of(at)
    return min(found, key=lambda entry: distance(entry, sizes))["fastest"]


def device() -> str:
    """The kind of device that is traced for."""
    return device_kind()


@functools.cache
def measured() -> dict[str, list[dict[str, Any]]]:
    """By kind of device, what was measured on it."""
    return json.loads(FILE.read_text("utf-8"))


def kind_of(at: Operands) -> str:
    """What must be equal for a measurement to count."""
    cache = "none" if at.prefix is None else at.prefix.keys.dtype.name
    bounds = " window" * (at.first is not None) + " cap" * (at.soft_cap is not None)
    return f"{at.block_keys.dtype.name} {cache} {at.query.shape[-1]}{bounds}"


def sizes_of(at: Operands) -> dict[str, int]:
    """What may differ between a measurement and a call."""
    sizes = at.query.shape[0], at.query.shape[2], at.slots, at.groups
    return dict(zip(_SIZES, sizes, strict=True))


def bucket_of(at: Operands) -> Bucket:
    """The bucket of a call: its sizes, up to the next power of two."""

    def power(size: int) -> int:
        return 1 << (size - 1).bit_length() if size else 0

    sizes = {name: power(size) for name, size in sizes_of(at).items()}
    return Bucket(kind=kind_of(at), candidates=measuring.able(at), **sizes)


def distance(entry: dict[str, Any], sizes: dict[str, int]) -> float:
    """How far a measurement's sizes are from those of a call."""
    return sum(math.log2((entry[name] + 1) / (sizes[name] + 1)) ** 2 for name in _SIZES)


def _runs_elsewhere() -> bool:
    """Whether the program may run on another kind of device than it is traced for."""
    if not at_hand():
        return False
    chosen = jax.config.values["jax_default_device"]
    if chosen is not None and getattr(chosen, "platform", chosen) != platform():
        return True
    return len({each.device_kind for each in jax.local_devices()}) > 1


def _can_measure() -> bool:
    """Whether the device that is traced for is here."""
    return at_hand() and jax.local_devices()[0].device_kind == device()


def _nearest(bucket: Bucket, entries: Iterable[Entry], most: float = math.inf) -> str | None:
    """The fastest by the nearest measurement, of those no farther than `most`; kept ones first."""
    found: list[tuple[float, str]] = []
    sizes = bucket.sizes
    for entry in entries:
        alike = entry.bucket.kind == bucket.kind and not entry.owed
        if alike and entry.bucket.candidates == bucket.candidates and entry.fastest is not None:
            found.append((distance(entry.bucket.sizes, sizes), entry.fastest))
    for shipped in measured().get(device(), []):
        if shipped["kind"] == bucket.kind and shipped["fastest"] in bucket.candidates:
            found.append((distance(shipped, sizes), shipped["fastest"]))
    near = [one for one in found if one[0] <= most]
    return min(near, key=lambda one: one[0])[1] if near else None


def _decided(at: Operands, bucket: Bucket) -> str:
    if jax.process_count() > 1:  # what each has kept may differ
        return _nearest(bucket, ()) or "xla"
    entries = kept.entries(device()).values()
    if (near := _nearest(bucket, entries, NEAR)) is not None:
        return near
    if len(bucket.candidates) > 1 and _can_measure():
        found = _measured_fastest(at, bucket, device())
        if found is not None:
            return found
    return _nearest(bucket, entries) or "xla"


def _measured_fastest(at: Operands, bucket: Bucket, device: str) -> str | None:
    """The implementation that is measured to be the fastest for such operands.

    Each is checked against XLA's form first. One that raises, computes something else or does not
    end is kept with its error, and so is one in the middle of which a process ended: none of them
    is tried again. A line says what came of it. None where nothing could be measured, which a
    line says too.
    """
    try:
        with kept.turn(measuring.PATIENCE) as noted:
            if noted:
                _blame_interrupted()
            entries = kept.entries(device)
            near = _nearest(bucket, entries.values(), NEAR)
            if near is not None:  # another process measured it while this one waited
                return near
            entry = entries.get(bucket, Entry(bucket, {}, {}))
            if entry.owed:
                entry = _tried(at, entry, device, noted)
            return entry.fastest
    except (LockTimeoutError, measuring.UnpreparedError) as error:
        kept.logger.warning(
            "Tree attention on %s could not be measured for %s: %s.", device, _call(at), error
        )
        return None


def _tried(at: Operands, entry: Entry, device: str, noted: bool) -> Entry:
    """The entry with what was owed in it, as far as that could be tried."""
    trial = measuring.prepared(at)
    bucket, seconds, errors = entry.bucket, dict(entry.seconds), dict(entry.errors)
    file = None
    for name in entry.owed:
        own = kept.trying(device, entry, name) if noted else contextlib.nullcontext()
        run, hangs = IMPLEMENTATIONS[name].run, False
        with own:
            try:
                work = partial(measuring.timed, run, trial)
                seconds[name] = measuring.apart(work, measuring.PATIENCE)
            except TimeoutError as error:
                errors[name], hangs = str(error), True
            except Exception as error:
                if any(words in str(error) for words in _NO_ROOM):
                    continue
                errors[name] = measuring.reason(error)
        entry = Entry(bucket, dict(seconds), dict(errors))
        file = kept.keep(device, entry)
        if hangs:  # what it left on the device may keep all others waiting
            break
    _say(at, entry, device, "kept in memory alone" if file is None else f"kept in {file}")
    return entry


def _blame_interrupted() -> None:
    """Keeps the end of another process as the error of what it tried."""
    found = kept.interrupted()
    if found is None:
        return
    device, entry, name = found
    entry = kept.entries(device).get(entry.bucket, entry)
    why = "the process that tried it ended"
    kept.keep(device, entry._replace(errors={**entry.errors, name: why}))
    sizes = entry.bucket.batch, entry.bucket.nodes, entry.bucket.slots
    kept.logger.warning(
        "Tree attention on %s: the process that tried %s ended, for up to %s; it is skipped until "
        "specjax tune or pallas_kernels.forget() forgets that.", device, name, _sizes(*sizes),
    )  # fmt: skip


def _say(at: Operands, entry: Entry, device: str, where: str) -> None:
    """The line about a measurement."""
    first, *others = sorted(entry.seconds, key=lambda name: entry.seconds[name]) or ["xla"]
    parts = [f"{_microseconds(entry.seconds, first)} µs"] if first in entry.seconds else []
    if others:
        times = (f"{name} {_microseconds(entry.seconds, name)}" for name in others)
        parts.append(", ".join(times))
    parts += [f"not {name}: {why}" for name, why in entry.errors.items()]
    kept.logger.info(
        "Tree attention on %s: %s (%s) for %s; %s.", device, first, "; ".join(parts), _call(at),
        where,
    )  # fmt: skip


def _microseconds(seconds: Mapping[str, float], name: str) -> str:
    return f"{seconds[name] * 1e6:,.0f}"


def _call(at: Operands) -> str:
    return _sizes(at.query.shape[0], at.query.shape[2], at.slots)


def _sizes(rows: int, nodes: int, slots: int) -> str:
    counts = {"row": rows, "node": nodes, "slot": slots}
    return ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in counts.items())
