"""The resident memory and the seconds of an engine's programs, one after the other.

    python -m benchmarks.programs.engine_memory --settings all --rows 8

Programs come from the cache folder where they are there; name an empty one (`SPECJAX_CACHE`) to
compile them all.
"""

import ctypes
import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tyro

import specjax
from specjax.checkpoints.pair import load_pair
from specjax.engine.device import Device
from specjax.methods import records
from specjax.methods.method import listed
from specjax.methods.switch import switching


@dataclasses.dataclass(frozen=True)
class Programs:
    """Whose programs."""

    settings: str = "all"
    """That the engine chooses from, separated by commas."""
    rows: int = 8
    """Of it."""


def resident() -> float:
    """MiB of this process in memory, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def one_by_one(device: Device, calls: Any, _: int) -> Iterator[str]:
    """In place of several at a time."""
    for call in calls:
        before, start = resident(), time.perf_counter()
        device._programs[call.program] = device._compiled(call)
        seconds = time.perf_counter() - start
        name = " ".join([call.function.__name__, str(call.size), *map(str, call.static.values())])
        print(f"{name}: {resident() - before:.0f} MiB, {seconds:.1f} s", flush=True)
        yield name


def main() -> None:
    """Prints each program's, and their sums."""
    asked = tyro.cli(Programs, config=(tyro.conf.FlagCreatePairsOff,))
    records.use_compilation_cache()
    pair = load_pair("bundled")
    settings = () if asked.settings == "all" else listed(asked.settings)
    engine = specjax.Engine(pair.target, switching(pair, settings), rows=asked.rows)
    before, start = resident(), time.perf_counter()
    with mock.patch.object(Device, "_compiled_at_once", one_by_one):
        engine.start()
    print(f"all: {resident() - before:.0f} MiB, {time.perf_counter() - start:.1f} s")
    engine.close()


if __name__ == "__main__":
    main()
