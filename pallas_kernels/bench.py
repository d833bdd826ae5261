"""`python -m pallas_kernels.bench`: tree attention over the shapes of real models.

Every implementation that runs on this machine, and cuDNN's attention where there is one: time,
the fewest bytes that must be moved over the time, their share of the bandwidth that the same run
measured, and the ratio to the best of XLA and cuDNN. Several caches take turns, so that none
stays in the last cache of the chip. With --json a run goes on where an earlier one stopped.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels.cache import replace_file
from pallas_kernels.machine import read_bandwidth
from pallas_kernels.shapes import MODELS, Shape, abstract, make, named
from pallas_kernels.tree_attention import autotune, measuring, xla
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from pallas_kernels.tree_attention.operands import Operands

_PEERS = ("xla", "cudnn")
_MOST_COPIES = 32
_MOST_HANGS = 2

Row = dict[str, Any]


class Joined(NamedTuple):
    """Queries `[B, H, T, D]`, and a cache and its block as cuDNN wants them."""

    query: Float[jax.Array, "B H T D"]
    keys: Float[jax.Array, "B M K D"]
    values: Float[jax.Array, "B M K D"]
    mask: Bool[jax.Array, "B 1 T M"]


def joined(at: Operands) -> Joined:
    """The operands in cuDNN's layout, which is no part of what is timed."""
    assert at.prefix is not None
    keys = jnp.concatenate([at.prefix.keys.swapaxes(2, 3), at.block_keys], axis=2)
    values = jnp.concatenate([at.prefix.values, at.block_values], axis=2)
    past = jnp.ones((*at.tree_mask.shape[:2], at.slots), bool)
    mask = jnp.concatenate([past, at.tree_mask], axis=-1)[:, None]
    return Joined(at.query, keys.swapaxes(1, 2), values.swapaxes(1, 2), mask)


def cudnn(at: Joined) -> Float[jax.Array, "B H T D"]:
    """The fused attention of cuDNN, with a mask."""
    out = jax.nn.dot_product_attention(
        at.query.swapaxes(1, 2), at.keys, at.values, mask=at.mask, implementation="cudnn"
    )
    return out.swapaxes(1, 2)


def measure(
    shape: Shape,
    peak: float,
    keep: Callable[[Row], Any],
    done: Collection[str] = (),
    patience: float = measuring.PATIENCE,
) -> None:
    """Hands to `keep` a row for every implementation that runs and is not `done`, or its failure.

    One that takes more than `patience` seconds ends the process, after `keep` has had its row: a
    kernel that waits for ever can be stopped in no other way.
    """
    copies = max(1, min(_MOST_COPIES, measuring.ROTATED_BYTES // shape.cache_bytes))
    keys = jax.random.split(jax.random.key(1), copies)
    caches = [jax.jit(functools.partial(make, shape))(key) for key in keys]
    runs: dict[str, tuple[Callable[[Any], jax.Array], Sequence[Any]]] = {
        name: (run, caches) for name, run in measuring.candidates(caches[0]).items()
    }
    if jax.default_backend() == "gpu" and shape.bits != 8:
        runs["cudnn"] = cudnn, [jax.jit(joined)(at) for at in caches]
    ragged = jax.block_until_ready(measuring.ragged(caches[0]))
    with _watched(shape, "xla", keep, patience):
        expected = jax.block_until_ready(jax.jit(xla.tree_attention)(ragged))
    for name in [name for name in runs if name not in done]:
        row: Row = {**shape._asdict(), "implementation": name}
        run, operands = runs[name]
        try:
            with _watched(shape, name, keep, patience):
                if name in IMPLEMENTATIONS:
                    measuring.check(jax.jit(run)(ragged), expected)
                taken = measuring.seconds(run, operands)
        except Exception as error:
            keep(row | {"error": measuring.reason(error)})
            continue
        rate = shape.moved_bytes / taken
        keep(row | {"seconds": taken, "gb_per_second": rate / 1e9, "of_peak": rate / peak})


@contextlib.contextmanager
def _watched(
    shape: Shape, name: str, keep: Callable[[Row], Any], patience: float
) -> Iterator[None]:
    """Ends the process if an implementation takes longer than `patience` seconds inside."""
    row: Row = {**shape._asdict(), "implementation": name, "hangs": True,
                "error": f"it did not end in {patience:g} seconds"}  # fmt: skip
    watch = threading.Timer(patience, _end, (keep, row))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _end(keep: Callable[[Row], Any], row: Row) -> None:
    print(f"{row}\nThe same command goes on with the others.", file=sys.stderr, flush=True)
    try:
        keep(row)
    finally:
        os._exit(3)


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the time of the best of XLA and cuDNN on its shape over its own."""
    best: dict[Shape, float] = {}
    for row in rows:
        if row["implementation"] in _PEERS and "seconds" in row:
            shape = shape_of(row)
            best[shape] = min(row["seconds"], best.get(shape, row["seconds"]))
    return [
        row | {"best_peer_over_it": best[shape_of(row)] / row["seconds"]}
        if "seconds" in row and shape_of(row) in best
        else row
        for row in rows
    ]


def shape_of(row: Row) -> Shape:
    """The shape a row was measured at."""
    return Shape(*(row[name] for name in Shape._fields))


def environment(peak: float) -> dict[str, Any]:
    """Where the rows were measured."""
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": sys.version.split()[0],
        "read_gb_per_second": peak / 1e9,
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'model':13} {'batch':>5} {'nodes':>5} {'slots':>6} {'dtype':9} {'bits':>4} "
        f"{'implementation':14} {'µs':>10} {'GB/s':>8} {'of peak':>8} {'best peer / it':>14}"
    ]
    for row in rows:
        left = (
            f"{row['model']:13} {row['batch']:5} {row['nodes']:5} {row['slots']:6} "
            f"{row['dtype']:9} {row['bits']:4} {row['implementation']:14} "
        )
        if "error" in row:
            lines.append(left + row["error"][:60])
            continue
        ratio = f"{row['best_peer_over_it']:.2f}" if "best_peer_over_it" in row else ""
        lines.append(
            f"{left}{row['seconds'] * 1e6:10.1f} {row['gb_per_second']:8.1f} "
            f"{row['of_peak']:8.1%} {ratio:>14}"
        )
    return "\n".join(lines)


def fastest(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """An entry of the dispatcher's table for every shape: what was the fastest at it."""
    entries = []
    for shape in dict.fromkeys(map(shape_of, rows)):
        own = [row for row in rows if shape_of(row) == shape]
        timed = [r for r in own if "seconds" in r and r["implementation"] in IMPLEMENTATIONS]
        if timed:
            name = min(timed, key=lambda row: row["seconds"])["implementation"]
            at = abstract(shape)
            entries.append({"kind": autotune.kind_of(at), **autotune.sizes_of(at), "fastest": name})
    return entries


def write(rows: Sequence[Row], device: str | None = None) -> None:
    """Puts the fastest implementation of every shape into the table that the dispatcher reads.

    `device` is the kind of device that the rows are of, by default the one at hand.
    """
    device, entries = device or autotune.device(), fastest(rows)
    new = {_place(entry) for entry in entries}
    table = dict(autotune.measured())
    kept = [entry for entry in table.get(device, []) if _place(entry) not in new]
    table[device] = kept + entries
    autotune.FILE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    autotune.measured.cache_clear()


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an entry was measured at."""
    return tuple(value for name, value in sorted(entry.items()) if name != "fastest")


def _hopeless(rows: Sequence[Row]) -> set[str]:
    """Implementations that hung at two shapes; at more they are not tried."""
    hung = [row["implementation"] for row in rows if "hangs" in row]
    return {name for name in hung if hung.count(name) >= _MOST_HANGS}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    for name in ("batches", "nodes", "slots"):
        parser.add_argument(f"--{name}", type=_numbers, help="only these, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--bits", type=int, default=16, choices=(8, 16), help="of the cache")
    parser.add_argument("--seconds", type=float, default=540, help="stop after so long")
    parser.add_argument("--patience", type=float, default=measuring.PATIENCE,
                        help="seconds of one implementation at one shape")  # fmt: skip
    parser.add_argument("--json", help="write rows here; those that it holds are not run again")
    parser.add_argument("--write", action="store_true", help="let the dispatcher go by the rows")
    return parser.parse_args()


def _wanted(options: argparse.Namespace) -> list[Shape]:
    """The shapes asked for, models of one attention once."""
    unknown = set(options.models.split(",")) - set(MODELS)
    if unknown:
        raise SystemExit(f"no model {unknown.pop()!r}; there are {', '.join(MODELS)}.")
    heads = {MODELS[name]: name for name in reversed(options.models.split(","))}
    bounds = {"batch": options.batches, "nodes": options.nodes, "slots": options.slots}
    return [
        shape._replace(dtype=options.dtype, bits=options.bits)
        for shape in named()
        if shape.model in heads.values()
        and all(b is None or getattr(shape, name) in b for name, b in bounds.items())
    ]


def _held(file: Path) -> tuple[list[Row], set[Shape]]:
    """The rows that a file holds of this device and jax, and the shapes that are still owed."""
    held = json.loads(file.read_text("utf-8"))
    of, here = (held["env"]["device"], held["env"]["jax"]), (autotune.device(), jax.__version__)
    if of != here:
        raise SystemExit(f"{file} is of {', jax '.join(of)}, and this is {', jax '.join(here)}.")
    return held["rows"], {Shape(*each) for each in held["owed"]}


def main() -> int:
    """Runs the bench; gives the exit code."""
    options, begin = _options(), time.monotonic()
    left, peak = _wanted(options), read_bandwidth()
    file = Path(options.json) if options.json else None
    rows: list[Row] = []
    if file and file.exists():
        rows, owed = _held(file)
        known = set(map(shape_of, rows))
        left = [shape for shape in left if shape in owed or shape not in known]

    def keep(row: Row) -> None:
        place = shape_of(row), row["implementation"]
        rows[:] = [each for each in rows if (shape_of(each), each["implementation"]) != place]
        rows.append(row)
        save()

    def save() -> None:
        if file:
            report = {"env": environment(peak), "rows": compared(rows),
                      "owed": [list(shape) for shape in left]}  # fmt: skip
            replace_file(file, json.dumps(report, indent=1) + "\n")

    while left and time.monotonic() - begin < options.seconds:
        own = [row for row in rows if shape_of(row) == left[0]]
        done = {row["implementation"] for row in own if "seconds" in row or "hangs" in row}
        done |= _hopeless(rows)
        if not any("hangs" in row for row in own if row["implementation"] == "xla"):
            measure(left[0], peak, keep, done, options.patience)  # all are checked against XLA's
        del left[0]
        save()
    save()
    print(table(compared(rows)))
    if left:
        print(f"{len(left)} shapes are still owed; run the same command again.")
    if options.write:
        write(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
