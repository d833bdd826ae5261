"""What is fastest for a bucket of calls, measured now on the device that is here, and kept."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from pallas_kernels.cache import LockTimeoutError
from pallas_kernels.tree_attention import kept, measuring
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from pallas_kernels.tree_attention.kept import Bucket, Entry
from pallas_kernels.tree_attention.operands import Operands

_NO_ROOM = ("Out of memory while trying to allocate", "memory space hbm")
"""What jax says where the device's memory is full, which is no fault of an implementation."""


def fastest(
    at: Operands, bucket: Bucket, device: str, settled: Callable[[], str | None]
) -> str | None:
    """The implementation that is measured to be the fastest for such operands.

    Each is checked against XLA's form first. One that raises, computes something else or does not
    end is kept with its error, and so is one in the middle of which a process ended: none of them
    is tried again. A line says what came of it.

    Args:
      at: the operands of a call; only their shapes and dtypes count.
      bucket: the bucket that they are in.
      device: the kind of device.
      settled: gives what another process has measured while this one waited for its turn, if any.

    Returns:
      Its name; None where nothing could be measured, which a line says too.
    """
    try:
        with kept.turn(measuring.PATIENCE) as noted:
            if noted:
                _blame_interrupted()
            if (found := settled()) is not None:
                return found
            entry = kept.entries(device).get(bucket, Entry(bucket, {}, {}))
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
