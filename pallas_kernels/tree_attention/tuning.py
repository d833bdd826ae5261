"""Which implementation runs: the one that is named, or the fastest by what was measured.

On an accelerator what is fastest at a shape is measured when a program with it is first traced,
once a bucket of shapes, and kept (`kept`). `pallas_kernels.bench --write` measures what is shipped.
"""

import functools
import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.platform import at_hand, device_kind, platform
from pallas_kernels.tree_attention import choosing, kept, measuring
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from pallas_kernels.tree_attention.kept import Bucket, Entry
from pallas_kernels.tree_attention.operands import Operands

AUTO = "auto"
FILE = Path(__file__).with_name("measured.json")
NEAR = 1.0
"""The largest `distance` at which a measurement counts: one size off by a factor of two, others
not at all. Each implementation's time is about linear in each size or does not depend on it, so
that a time changes by no more than that factor, and those of others with it. What is fastest does
change from a row to eight and from a node to 16 (where the products begin to count beside the
cache), and a measurement is a few seconds once. Chosen and not measured: no accelerator was at
hand."""
_SIZES = ("batch", "nodes", "slots", "groups")


class _Chosen:
    """The choices of this process: what is named, and by device and bucket what was decided."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.decided: dict[tuple[str, bool, Bucket], str] = {}
        self.lock = threading.Lock()


_chosen = _Chosen()


def use(name: str) -> None:
    """See `pallas_kernels.use`."""
    if name != AUTO:
        dispatch.check_known("tree_attention", name, IMPLEMENTATIONS)
        reason = dispatch.unable_here(IMPLEMENTATIONS[name])
        if reason is not None:
            raise dispatch.ImplementationError(
                f"tree_attention cannot run as {name!r} here: {reason}."
            )
    named = None if name == AUTO else name
    if named != _chosen.name:
        _chosen.name = named
        jax.clear_caches()


def named() -> str | None:
    """The implementation that `use` names for all calls, None for the fastest."""
    return _chosen.name


def forget() -> None:
    """See `pallas_kernels.forget`."""
    if platform() == "cpu":
        return
    with _chosen.lock:
        kept.forget(device())
        _chosen.decided.clear()
    jax.clear_caches()


def choice(at: Operands) -> str:
    """The name of the fastest implementation for such operands, by what is measured.

    A measurement counts that is near (`NEAR`), shipped or kept; without one the implementations are
    measured now. Where that cannot be, the nearest that there is counts, or else it is "xla". On a
    CPU nothing is measured here: it is "cpu" where that can run. Once chosen for a bucket it stays
    until the process ends.
    """
    if platform() == "cpu":
        return "cpu" if dispatch.unable(IMPLEMENTATIONS["cpu"], at) is None else _shipped(at)
    if _runs_elsewhere():
        return "xla"
    bucket = bucket_of(at)
    place = device(), at_hand(), bucket
    with _chosen.lock:
        if place not in _chosen.decided:
            _chosen.decided[place] = _decided(at, bucket)
        return _chosen.decided[place]


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

        def settled() -> str | None:
            return _nearest(bucket, kept.entries(device()).values(), NEAR)

        found = choosing.fastest(at, bucket, device(), settled)
        if found is not None:
            return found
    return _nearest(bucket, entries) or "xla"
