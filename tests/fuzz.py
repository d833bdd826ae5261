"""Damaged and hostile files: each is read, or refused in one sentence, and does nothing else.

    python -m tests.fuzz --count 10000 --seed 0

Case by case a checkpoint folder, an n-gram folder, a file for `--config`, `measured.json`, prompts
or a training chunk is mutated and read as the command line reads it. A case fails if it ends in
anything but a ValueError or an OSError of one sentence (which is all that the command line takes
for bad input), if it takes half a minute or a gigabyte, if it runs or loads anything that the files
name, or opens anything outside its folder. Opened files are seen by Python's audit events, and
those of libraries by inotify on a folder of bait that mutations point at.

A failing case is made again with `--case N`, its folder kept.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SECONDS, BYTES, LONGEST = 30, 1 << 30, 1000
ROOT = Path(__file__).parent.parent
BAIT, CANARY = "outside.safetensors", "canary"


class Outcome(NamedTuple):
    """What a case came to: `read`, `refused`, or the reason why it fails."""

    said: str
    failed: bool = False


class Guard:
    """Sees what a case opens, runs and leaves behind."""

    FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen",
                 "pickle.find_class", "socket.connect", "socket.getaddrinfo")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder, self.bait = folder, folder / "bait"
        self.bait.mkdir(parents=True)
        self.seen: list[str] = []
        self.armed = False
        self.readable = [folder / "case", ROOT, Path(sys.base_prefix), Path(sys.prefix)]
        self.readable += [Path(each) for each in ("/proc", "/sys", "/dev/null", "/dev/urandom")]
        self.watch = _watch(self.bait)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in self.FORBIDDEN:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = Path(os.path.abspath(os.fsdecode(arguments[0])))
            if not any(path.is_relative_to(each) for each in self.readable):
                self.seen.append(f"opened {path}")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "")
            if str(name).startswith(str(self.folder)):
                self.seen.append(f"ran {name}")

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Over one case."""
        self.seen.clear()
        with contextlib.suppress(BlockingIOError):
            os.read(self.watch, 1 << 16)  # of its making
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
            with contextlib.suppress(BlockingIOError):
                if os.read(self.watch, 1 << 16):
                    self.seen.append("opened the bait")
            if (self.bait / CANARY).exists():
                (self.bait / CANARY).unlink()
                self.seen.append("ran what a file holds")


def _watch(folder: Path) -> int:
    """A descriptor that tells of every file of `folder` that anything opens."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    held = library.inotify_init1(os.O_NONBLOCK)
    opened = 0x20
    assert held >= 0
    assert library.inotify_add_watch(held, os.fsencode(folder), opened) >= 0
    return held


class Mutator:
    """Damages files; all that it does follows from its numbers."""

    def __init__(self, rng: np.random.Generator, bait: Path) -> None:
        self.rng, self.bait = rng, bait

    def hostile(self) -> Any:
        """A value that is seldom right, made anew, as it may be changed again."""
        touch, bait = f"open({str(self.bait / CANARY)!r}, 'w')", self.bait
        listed: list[Any] = [
            *(None, True, False, 0, -1, 1, 2, 3, 1.5, -0.0, 1e-60, 1e308, 10**12, 10**400, 2**63),
            *(float("nan"), float("inf"), -float("inf"), "", "0", "x" * 3000, "\ud800", "\0", "é"),
            *([], {}, [[]], [None], {"": None}, [1, 2, 3], ["llama"], nested(900), nested(5000)),
            *(str(bait / BAIT), f"../bait/{BAIT}", "..", ".", "/", "/dev/zero", "evil.py"),
            *(f"__import__('os').system({touch!r})", f"eval({touch!r})", "evil--evil.Evil"),
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(3) %}{{ i }}",
            *("default", "yarn", "longrope", "gemma3_text", "phi3", "gpt2", "opt", "int8", "U64"),
        ]
        return self.one_of(listed)

    def one_of(self, listed: Any) -> Any:
        """One of several."""
        return listed[int(self.rng.integers(len(listed)))]

    def mutated(self, path: str, held: bytes) -> bytes:
        """A file's bytes, changed by what it is."""
        if self.rng.random() < 0.15:
            return self.bytes(held)
        if path.endswith(".safetensors"):
            return self.safetensors(held)
        if path.endswith(".jsonl"):
            lines = held.split(b"\n")
            at = int(self.rng.integers(len(lines)))
            lines[at] = self.json(lines[at])
            return b"\n".join(lines)
        return self.json(held) if path.endswith((".json", "METADATA")) else self.bytes(held)

    def bytes(self, held: bytes) -> bytes:
        """Bytes with some cut off, turned, put in or left out."""
        kept, size = bytearray(held), max(1, len(held))
        at, to = sorted(int(n) for n in self.rng.integers(0, size, 2))
        match int(self.rng.integers(6)):
            case 0:
                return bytes(kept[:at])
            case 1:
                del kept[at:to]
            case 2:
                kept[at:at] = self.rng.bytes(int(self.rng.integers(1, 64)))
            case 3:
                kept[at:to] = kept[:at]
            case 4:
                return b"\xef\xbb\xbf" + held
            case _:
                for place in self.rng.integers(0, size, int(self.rng.integers(1, 9))):
                    kept[int(place) : int(place) + 1] = self.rng.bytes(1)
        return bytes(kept)

    def json(self, held: bytes) -> bytes:
        """JSON with values, keys or whole parts changed."""
        try:
            value = json.loads(held)
        except ValueError:
            return self.bytes(held)
        for _ in range(int(self.rng.integers(1, 4))):
            value = self.value(value)
        sys.setrecursionlimit(20_000)
        try:
            return json.dumps(value).encode()
        finally:
            sys.setrecursionlimit(1000)

    def value(self, value: Any) -> Any:
        """A value of JSON with one thing in it changed."""
        if not isinstance(value, dict | list) or not value or self.rng.random() < 0.03:
            return self.hostile()
        key = self.one_of(list(value) if isinstance(value, dict) else range(len(value)))
        if self.rng.random() < 0.4 and isinstance(value[key], dict | list):
            value[key] = self.value(value[key])
            return value
        match int(self.rng.integers(8)):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[self.one_of(["x", "", "\ud800", "auto_map", "kind", str(key) * 2])] = 1
            case 2 if isinstance(value, dict):
                value[self.one_of([*value, "y"])] = value.pop(key, None)
            case 3 if isinstance(value[key], int | float) and abs(value[key]) < 10**300:
                value[key] = value[key] * self.one_of([-1, 2, 0.5, 10**6, 10**9]) + 1
            case _:
                value[key] = self.hostile()
        return value

    def safetensors(self, held: bytes) -> bytes:
        """A safetensors file with another header or other numbers."""
        size = int.from_bytes(held[:8], "little")
        header, body = held[8 : 8 + size], bytearray(held[8 + size :])
        if self.rng.random() < 0.3:
            at = 4 * int(self.rng.integers(max(1, len(body) // 4)))
            body[at : at + 4] = self.one_of([b"\x00\x00\xc0\x7f", b"\xff" * 4, b"\x00\x00\x80\xff"])
            return held[: 8 + size] + bytes(body)
        header = self.json(header)
        told = self.one_of([len(header)] * 6 + [0, 1, size, 1 << 40, (1 << 64) - 1])
        return int(told).to_bytes(8, "little") + header + bytes(body)


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def run_case(number: int, seed: int, guard: Guard, kinds: "list[Kind]") -> tuple[str, Outcome]:
    """Makes and reads a case; its kind and what it came to."""
    rng = np.random.default_rng((seed, number))
    shares = np.array([kind.share for kind in kinds], float)
    kind = kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
    folder = guard.folder / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mutator = Mutator(rng, guard.bait)
    files = kind.files(rng, guard.bait)
    chosen = {mutator.one_of(sorted(files)) for _ in range(int(rng.integers(1, 3)))}
    for path, held in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(mutator.mutated(path, held) if path in chosen else held)
    before = _most_held()
    with guard.over():
        outcome = _read(kind.read, folder, rng)
    more = _most_held() - before
    if guard.seen:
        outcome = Outcome(f"{guard.seen[0]} ({outcome.said})", True)
    elif more > BYTES:
        outcome = Outcome(f"took {more >> 20} MiB ({outcome.said})", True)
    return kind.name, outcome


def _most_held() -> int:
    """The most bytes that this process has held; what its parent held does not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _read(read: Callable[[Path, np.random.Generator], None], folder: Path, rng: Any) -> Outcome:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            read(folder, rng)
        except (ValueError, OSError) as error:
            said = " ".join(str(error).split())
            return Outcome(said, not 0 < len(said) <= LONGEST)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)
            own = [each for each in where if "specjax" in each.filename or "train" in each.filename]
            at = own[-1] if own else where[-1]
            return Outcome(f"{type(error).__name__}: {str(error)[:300]} in {at}", True)
    return Outcome("read")


class Kind(NamedTuple):
    """A kind of case: the files that it starts from, and how they are read."""

    name: str
    share: float
    files: Callable[[np.random.Generator, Path], dict[str, bytes]]
    read: Callable[[Path, np.random.Generator], None]


def work(options: argparse.Namespace) -> None:
    """Runs every `jobs`-th case, a line of JSON each on standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where libraries may print
    with tempfile.TemporaryDirectory() as name:
        guard = Guard(Path(name).resolve())
        os.environ["SPECJAX_CACHE"] = str(guard.folder / "case")
        os.environ["HF_HUB_OFFLINE"] = "1"
        from tests.fuzzed import kinds

        all_kinds = kinds(guard)
        for number in range(options.first, options.count, options.jobs):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            began = time.monotonic()
            print(json.dumps({"begins": number}), file=out, flush=True)
            kind, outcome = run_case(number, options.seed, guard, all_kinds)
            line = {"case": number, "kind": kind, "seconds": time.monotonic() - began}
            print(json.dumps(line | outcome._asdict()), file=out, flush=True)
            faulthandler.cancel_dump_traceback_later()
            if options.case is not None:
                shutil.copytree(guard.folder / "case", options.keep, dirs_exist_ok=True)
                return


def lines_of(first: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a worker says; one that dies in a case is replaced by one that begins after it."""
    while first < options.count:
        command = [sys.executable, "-m", "tests.fuzz", "--work", "--count", str(options.count),
                   "--seed", str(options.seed), "--jobs", str(options.jobs),
                   "--first", str(first)]  # fmt: skip
        begun = None
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            worker = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert worker.stdout is not None
            for text in worker.stdout:
                line = json.loads(text)
                begun = line.get("begins", begun)
                if "case" in line:
                    yield line
            code = worker.wait()
            errors.seek(0)
            said = errors.read()[-2000:]
        if code == 0:
            return
        if begun is None:
            raise SystemExit(said)
        died = f"the process ended with {code}: {said}"
        yield {"case": begun, "kind": "?", "seconds": SECONDS, "said": died, "failed": True}
        first = begun + options.jobs


def main() -> int:
    """Runs the cases and prints what they came to; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, help="run this one alone and keep its folder")
    parser.add_argument("--keep", default="fuzz-case")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        options.first, options.count, options.jobs = options.case, options.case + 1, 1
    if options.work or options.case is not None:
        work(options)
        return 0
    return report(options)


def report(options: argparse.Namespace) -> int:
    """Runs all workers side by side and sums up."""
    from concurrent.futures import ThreadPoolExecutor

    began, counts, slowest, failures = time.monotonic(), Counter[str](), 0.0, []

    def follow(first: int) -> None:
        nonlocal slowest
        for line in lines_of(first, options):
            what = "failed" if line["failed"] else "read" if line["said"] == "read" else "refused"
            counts[f"{line['kind']}: {what}"] += 1
            slowest = max(slowest, line["seconds"])
            if line["failed"]:
                failures.append(line)
                print(f"case {line['case']} ({line['kind']}): {line['said']}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(follow, range(options.jobs)))
    for name in sorted(counts):
        print(f"{name} {counts[name]}")
    print(
        f"{counts.total()} cases of seed {options.seed}, {len(failures)} failed; the slowest took "
        f"{slowest:.1f} s, all {time.monotonic() - began:.0f} s."
    )
    return 1 if failures or counts.total() != options.count else 0


if __name__ == "__main__":
    sys.exit(main())
