"""All measurements that are owed on a GPU or TPU, in calls of nine minutes.

    python -m benchmarks.accelerator gpu.json            # the same command goes on where it stopped
    python -m benchmarks.accelerator gpu.json --list     # what is done, owed or failed
    python -m benchmarks.accelerator gpu.json --tables   # as Markdown
    python -m benchmarks.accelerator gpu.json --write    # lets the dispatcher of kernels go by them

Nothing else may run on the device. Each piece is a process of its own with a time limit; what fails
or hangs is noted, and tried once more in a later call after all that was never tried. The file is
whole after each piece. It needs jax, transformers and tyro; with torch, transformers'
generation is measured too.

Compiled programs are kept in a folder beside the file (`--cache`, `--no-cache`) for the next call.
Programs compiled beforehand on a machine without the device are not taken. XLA can compile for a
GPU that is not there (openxla/xla#16913), but then it times nothing on it, and chooses other
algorithms for products than it does where programs run; and an executable loads only with the same
jaxlib on the same kind of device (both are part of the cache's key). It would be another program
that was measured.
"""

import argparse
import datetime
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accelerator.pieces import CALL_SECONDS, PIECES, Piece
from benchmarks.accelerator.running import (
    FAILED,
    OWED,
    RUNNING,
    Place,
    line_of,
    machine,
    work,
)
from benchmarks.accelerator.tables import tables
from specjax.base.output import check_writable, read_json

_SAME = ("device", "jax", "jaxlib")


def read(file: Path) -> dict[str, Any]:
    """What a file holds; an empty state if there is none.

    What was running when the machine or this command was ended counts as failed.
    """
    if not file.exists():
        return {"machine": None, "calls": [], "pieces": {}, "results": {}}
    state = read_json(file)
    for record in state["pieces"].values():
        if record["status"] == RUNNING:
            record |= {"status": FAILED, "error": "everything was ended while it ran"}
    return state


def listed(state: dict[str, Any], pieces: Sequence[Piece] = PIECES) -> str:
    """A line a piece."""
    found = []
    for piece in pieces:
        record = state["pieces"].get(piece.name, {"status": OWED})
        found.append(f"{piece.name:18} about {piece.seconds:3.0f} s  {line_of(record)}")
    return "\n".join(found)


def chosen(only: str | None, pieces: Sequence[Piece] = PIECES) -> list[Piece]:
    """The pieces of these names, separated by commas; all if there are none.

    Raises:
      ValueError: there is no such piece.
    """
    if only is None:
        return list(pieces)
    by_name = {piece.name: piece for piece in pieces}
    for name in only.split(","):
        if name not in by_name:
            raise ValueError(f"no piece {name!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in only.split(",")]


def measure(options: argparse.Namespace, file: Path) -> None:
    """Runs what there is time for.

    Raises:
      ValueError: the file is of another machine, or no device answers.
    """
    begin = time.monotonic()
    pieces, state = chosen(options.only), read(file)
    check_writable(file)
    here = machine()
    before = state["machine"]
    for key in _SAME if before else ():
        if here[key] != before[key]:
            raise ValueError(f"{file} is of {key} {before[key]}, and this is {here[key]}")
    state["machine"] = here
    state["calls"].append({"date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
                           "small": options.small})  # fmt: skip
    cache = None if options.no_cache else (options.cache or file.with_suffix(".cache")).absolute()
    place = Place(state, file.absolute(), cache, options.small)
    try:
        work(place, pieces, begin + options.seconds, again=options.only is not None)
    finally:
        state["calls"][-1]["seconds"] = time.monotonic() - begin
        place.save()
    print(listed(state))


def write(file: Path) -> None:
    """Puts the fastest kernels into the dispatcher's table."""
    from pallas_kernels import bench

    state = read(file)
    for name in ("attention", "attention of 8 bits"):
        if held := state["results"].get(name):
            bench.write(held["rows"], held["env"]["device"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="where everything is kept")
    parser.add_argument("--list", action="store_true", help="print what is done, owed or failed")
    parser.add_argument("--tables", action="store_true", help="print the tables")
    parser.add_argument("--write", action="store_true", help="fill the dispatcher's table")
    parser.add_argument("--only", help="run these pieces, whatever came of them before")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="of this call")
    parser.add_argument("--cache", type=Path, help="for compiled programs; by default beside")
    parser.add_argument("--no-cache", action="store_true", help="keep no compiled programs")
    parser.add_argument("--small", action="store_true", help="only show that all of it works")
    return parser.parse_args()


def main() -> int:
    """Runs the command line; gives the exit code."""
    options = _options()
    file = options.file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended and noted
    try:
        if options.list:
            print(listed(read(file)))
        elif options.tables:
            print(tables(read(file)))
        elif options.write:
            write(file)
        else:
            measure(options, file)
    except (OSError, ValueError) as error:
        print(f"benchmarks.accelerator: {error}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
