"""Runs pieces one after the other, each in a process of its own, and keeps what came of them.

A process gives the device's memory back when it ends, however it ends, and only one has it at a
time: this module never touches the device.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accelerator.pieces import Piece
from specjax.base.machine import cpu_model
from specjax.base.output import read_json, write_json

Record = dict[str, Any]
DONE, OWED, FAILED, SKIPPED, RUNNING = "done", "owed", "failed", "skipped", "running"
_ROOT = Path(__file__).parent.parent.parent
_MOST_TRIES = 2
MARGIN_SECONDS, _PATIENCE_SECONDS, _PROBE_SECONDS = 20.0, 5.0, 120.0
_TAIL = 3000
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b|Check failed|RESOURCE_EXHAUSTED")
_PROMPTS = (0, 1, 3, 5, 6, 10)
"""Of the bundled prompts, which are of one compiled size."""
_PROBE = """
import importlib.metadata, json, jax
device = jax.devices()[0]
print(json.dumps({
    "platform": jax.default_backend(), "device": device.device_kind, "jax": jax.__version__,
    "jaxlib": importlib.metadata.version("jaxlib"),
    "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
}))
"""


class Ended(NamedTuple):
    """How a process ended: its exit code, None if it was ended, and what it printed."""

    code: int | None
    printed: str
    stderr: str

    @property
    def error(self) -> str:
        """The last line that names an error, else the last one."""
        lines = [line.strip() for line in (self.stderr or self.printed).splitlines()]
        named = [line for line in lines if _ERROR.search(line)]
        return (named or list(filter(None, lines)) or [""])[-1][:500]


class Place(NamedTuple):
    """Where pieces run.

    Attributes:
      state: what the JSON file holds.
      file: that file.
      cache: a folder for compiled programs, if they are kept.
      small: only to show that they work.
      clock: seconds.
    """

    state: dict[str, Any]
    file: Path
    cache: Path | None
    small: bool = False
    clock: Callable[[], float] = time.monotonic

    def save(self) -> None:
        """Writes the file, which is whole at any time."""
        write_json(self.file, self.state)


def order(pieces: Sequence[Piece], records: Mapping[str, Record], call: int) -> list[Piece]:
    """What is to be run in a call: first what is owed, as it is listed, then what failed before.

    A piece that failed twice, or failed in this very call, is not there. One that goes on where it
    stopped and has had its time waits with those that failed.
    """
    first, again = [], []
    for piece in pieces:
        record = records.get(piece.name, {})
        status = record.get("status", OWED)
        if status == FAILED and record["tries"] < _MOST_TRIES and record["call"] != call:
            again.append(piece)
        elif status in (OWED, SKIPPED):
            late = record.get("seconds", 0.0) >= piece.most - 2 * MARGIN_SECONDS
            (again if late else first).append(piece)
    return first + again


def next_piece(pieces: Sequence[Piece], left: float) -> Piece | None:
    """The first piece whose time is there."""
    return next((piece for piece in pieces if piece.fits_in <= left), None)


def unable(piece: Piece, platform: str) -> str | None:
    """Why a piece cannot run on this machine."""
    if piece.platforms and platform not in piece.platforms:
        return f"it needs {' or '.join(piece.platforms)}, and this is {platform}"
    missing = [name for name in piece.needs if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def machine() -> Record:
    """The device at hand, as a process that ends says.

    Raises:
      ValueError: there is none, or it does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = run([sys.executable, "-c", _PROBE], dict(os.environ), _PROBE_SECONDS, Path(folder))
    if ended.code != 0:
        raise ValueError(f"no device answers: {ended.error}")
    found = json.loads(ended.printed.splitlines()[-1])
    return found | {"driver": _driver(), "cpu": cpu_model(), "cpu_count": os.cpu_count(),
                    "python": sys.version.split()[0]}  # fmt: skip


def _driver() -> str | None:
    """The version of NVIDIA's driver, if there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.split("\n")[0].strip()


def run(command: Sequence[str], env: dict[str, str], seconds: float, folder: Path) -> Ended:
    """Runs a process to its end, or ends it and what it started after so long."""
    files = [folder / name for name in ("stdout", "stderr")]
    with files[0].open("wb") as out, files[1].open("wb") as error:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=error, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            _end(process)
    printed, said = (file.read_text("utf-8", errors="replace") for file in files)
    return Ended(code, printed, said)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it started, politely at first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)


def work(place: Place, pieces: Sequence[Piece], left_at: float, again: bool = False) -> None:
    """Runs pieces until the clock says `left_at`; with `again` also what is done or failed twice.

    The file is written before and after each piece, so that one that ends the machine is not tried
    for ever.
    """
    records, call = place.state["pieces"], len(place.state["calls"])
    able, ran = [], set()
    for piece in pieces:
        reason = unable(piece, place.state["machine"]["platform"])
        if reason is None:
            able.append(piece)
        elif records.get(piece.name, {}).get("status") != DONE:
            records[piece.name] = {"status": SKIPPED, "error": reason}
    while True:
        named = [piece for piece in able if piece.name not in ran]
        waiting = named if again else order(able, records, call)
        piece = next_piece(waiting, left_at - place.clock())
        if piece is None:
            return
        ran.add(piece.name)
        records[piece.name] = _piece(place, piece, left_at)
        place.save()
        print(f"  {line_of(records[piece.name])}", flush=True)


def _piece(place: Place, piece: Piece, left_at: float) -> Record:
    """Runs a piece; gives its record, and keeps its result."""
    before = place.state["pieces"].get(piece.name, {})
    results = place.state["results"]
    had = results.get(piece.key)
    left = left_at - place.clock()
    seconds = min(piece.most, left)
    with tempfile.TemporaryDirectory(prefix="specjax-") as name:
        folder = Path(name)
        command = _command(place, piece, folder, seconds)
        record = {
            "status": RUNNING, "tries": before.get("tries", 0) + 1,
            "call": len(place.state["calls"]), "seconds": before.get("seconds", 0.0),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", *command]), "result": piece.key,
            **{key: place.state["machine"][key] for key in ("device", "driver", "jax", "jaxlib")},
        }  # fmt: skip
        place.state["pieces"][piece.name] = record
        place.save()
        with _kept(place, record):
            print(f"{piece.name}: about {piece.seconds:.0f} s", flush=True)
            begin = place.clock()
            command = [sys.executable, "-m", *command]
            ended = run(command, _env(place, piece, folder), seconds, folder)
            record["seconds"] += place.clock() - begin
        found = _result(folder, ended)
    if found is not None and (_whole(found) or not _whole(had)):
        results[piece.key] = found
    cut = ended.code is None and seconds < piece.most
    record |= _judged(piece, ended, found, found != had, cut)
    record["tries"] -= cut
    return record | ({"stderr": ended.stderr[-_TAIL:]} if record["status"] == FAILED else {})


@contextlib.contextmanager
def _kept(place: Place, record: Record) -> Iterator[None]:
    """What an interrupt leaves: the piece is owed, and has not been tried."""
    try:
        yield
    except BaseException:
        record |= {"status": OWED, "tries": record["tries"] - 1, "error": "it was interrupted"}
        place.save()
        raise


def _whole(result: Any) -> bool:
    """Whether a result is there, and says nothing else of itself."""
    return result is not None and (not isinstance(result, dict) or result.get("complete", True))


def _judged(piece: Piece, ended: Ended, found: Any, moved: bool, cut: bool) -> dict[str, Any]:
    """The status of a piece that ended, and its error.

    What goes on where it stopped is owed as long as it gets anywhere. What was ended because the
    call was over is owed and has not been tried.
    """
    held = found if isinstance(found, dict) else {}
    owed = bool(held.get("owed"))
    if ended.code == 0 and _whole(found) and not owed:
        return {"status": DONE}
    if piece.goes_on and moved and (owed or cut):
        return {"status": OWED, "error": f"it goes on; {ended.error}" if ended.code else None}
    if cut:
        return {"status": OWED, "error": "the time of the call was over"}
    if ended.code is None:
        return {"status": FAILED, "error": f"it did not end in {piece.most:g} seconds"}
    if ended.code == 1 and "passed" in held:  # a certificate that fails is a result
        return {"status": DONE, "error": "it did not pass"}
    if piece.goes_on and ended.code == 0 and owed:
        return {"status": OWED}
    return {"status": FAILED, "error": ended.error or f"it ended with exit code {ended.code}"}


def _command(place: Place, piece: Piece, folder: Path, seconds: float) -> list[str]:
    """The module of a piece and its arguments, files without their folder.

    The files that it reads are written into the folder.
    """
    results = place.state["results"]
    files = {"json": "json.json", "prompts": "prompts.jsonl"}
    if piece.goes_on and piece.key in results:
        write_json(folder / files["json"], results[piece.key])
    bundled = (_ROOT / "specjax" / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / files["prompts"]).write_text("".join(bundled[line] for line in _PROMPTS), "utf-8")
    filled = files | {"seconds": f"{max(1.0, seconds - MARGIN_SECONDS):.0f}"}
    arguments = piece.small if place.small else piece.command
    return [part.format_map(filled) for part in arguments]


def _env(place: Place, piece: Piece, folder: Path) -> dict[str, str]:
    """The environment of a piece, with a cache for compiled programs if there is one."""
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    env["JAX_TRACEBACK_FILTERING"] = "off"  # else the last line is about that
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
    if place.small:
        env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if place.cache is None:
        env |= {"SPECJAX_CACHE": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    else:
        env |= {
            "SPECJAX_CACHE": str(place.cache), "JAX_COMPILATION_CACHE_DIR": str(place.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
    return env | dict(piece.env)


def _result(folder: Path, ended: Ended) -> Any:
    """What a piece wrote, or printed as its last line; None if that is no JSON."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / "json.json")
    with contextlib.suppress(IndexError, ValueError):
        return json.loads(ended.printed.splitlines()[-1])
    return None


def line_of(record: Record) -> str:
    """A record as text."""
    taken = f" after {record['seconds']:.0f} s" if "seconds" in record else ""
    why = f": {record['error']}" if record.get("error") else ""
    return f"{record['status']}{taken}{why}"
