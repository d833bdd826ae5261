"""Measurements in the cache folder: by several processes, without a home, and damaged."""

import json
import math
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_kernels.cache import cache_folder
from specjax.base import machine
from specjax.methods import records, registry
from specjax.methods.records import Measured, Run
from tests.conftest import UNCACHED
from tests.folders import own_cache

__all__ = ["own_cache"]
ROOT = Path(__file__).parent.parent
CHAIN = registry.setting_of("chain")
WRITER = """
import sys, time
from pathlib import Path
from specjax.methods.records import Run, remember

number, go = sys.argv[1], Path(sys.argv[2])
Path(f"{go}.{number}").touch()
while not go.exists():
    time.sleep(0.001)
for record in range(10):
    remember(f"{number} {record}", Run("2026-11-23", 0.0, 1, ()))
"""


def run(date: str = "2026-11-23T01:02:03+00:00", temperature: float = 0.0) -> Run:
    return Run(date, temperature, 24, (Measured(CHAIN, 12.5, (1.25, 1.5, 2.0)),))


def test_what_is_remembered_is_recalled():
    assert records.recall("pair") == []
    path = records.remember("pair", run())
    assert path == records.RUNS.file
    assert records.recall("pair") == [run()]
    written = json.loads(path.read_text())["pair"][0]
    assert (written["date"], written["prompts"]) == ("2026-11-23T01:02:03+00:00", 24)
    mean = math.log(1.25 * 1.5 * 2.0) / 3
    squares = sum((math.log(ratio) - mean) ** 2 for ratio in (1.25, 1.5, 2.0))
    assert written["measured"][0]["spread"] == pytest.approx(math.sqrt(squares / 2))
    assert records.spread([1.0]) is None


def test_of_each_temperature_the_newest_eight_runs_are_kept():
    records.remember("pair", run("2026-01-01", 0.5))
    for day in range(1, 11):
        records.remember("pair", run(f"2026-02-{day:02d}", 0.8))
    kept = records.recall("pair")
    assert [each.date[-2:] for each in kept] == ["01", *(f"{day:02d}" for day in range(3, 11))]
    assert [each.temperature for each in kept] == [0.5] + [0.8] * 8


@pytest.mark.slow
def test_processes_that_remember_at_once_lose_nothing(tmp_path):
    """Four write ten each, at once."""
    go = tmp_path / "go"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(number), str(go)], cwd=ROOT)
        for number in range(4)
    ]
    while not all(Path(f"{go}.{number}").exists() for number in range(4)):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    go.touch()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    held = json.loads(records.RUNS.file.read_text())
    assert held.keys() == {f"{number} {record}" for number in range(4) for record in range(10)}
    assert sorted(os.listdir(cache_folder())) == ["measured.json", "measured.lock"]


def test_where_there_are_no_locks_measurements_are_kept_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    records.remember("pair", run())
    assert records.recall("pair") == [run()]


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME whom no list of users knows."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "SPECJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_there_is_no_cache(homeless, monkeypatch):
    assert cache_folder() is None
    assert records.RUNS.file is None
    assert records.recall("pair") == []
    with pytest.raises(OSError, match="there is no home folder; name one with SPECJAX_CACHE"):
        records.remember("pair", run())
    monkeypatch.setenv("SPECJAX_CACHE", "~/cache")
    assert cache_folder() is None


USE = """
import jax, os, sys
from specjax.methods import records
records.use_compilation_cache()
print(jax.config.values["jax_compilation_cache_dir"])
"""


@pytest.mark.parametrize("cache", ["/proc/nope", "~nobody-of-that-name/cache"])
def test_programs_are_not_kept_where_no_folder_can_be_made(cache):
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=ROOT, env=UNCACHED | {"SPECJAX_CACHE": cache},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_programs_are_kept_by_processor(tmp_path, monkeypatch):
    """Those of another would lack its instructions, or have others."""
    digests, listing = [], tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_LISTING", listing)
    for flags in ("sse2 avx2", "avx2 sse2", "sse2 avx2 avx512f"):
        listing.write_text(
            f"processor\t: 0\nmodel name\t: CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        )
        machine.cpu_digest.cache_clear()
        digests.append(machine.cpu_digest())
    machine.cpu_digest.cache_clear()
    assert digests[0] == digests[1] != digests[2]
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=ROOT, env=UNCACHED | {"SPECJAX_CACHE": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    monkeypatch.undo()
    folder = tmp_path / "programs" / machine.cpu_digest()
    assert done.stdout == f"{folder}\n"


KNOWN = {"date": "2026-11-23", "temperature": 0, "prompts": 3}
ENTRY = {"setting": {}, "tokens_per_second": 1.5, "ratios": [1, 2.5]}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{", b"null", b"\xff", b"[" * 200_000, b"9" * 5000, b'{"pair": null}'),
        *(b'{"pair": 3}', b'{"pair": {"a": 1}}', b'{"pair": [null, 3, [], {}]}'),
        b'{"pair": ' + b"[" * 600 + b"]" * 600 + b"}",
    ],
)
def test_a_file_that_cannot_be_read_counts_as_empty(content):
    path = records.remember("else", run())
    path.write_bytes(content)
    assert records.recall("pair") == []
    records.remember("pair", run())
    assert records.recall("pair") == [run()]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"date": value} for value in (None, 3, "\x1b[31m", "today", "")),
        *({"temperature": value} for value in (None, "0", True, math.nan, math.inf, -1, 10**400)),
        *({"prompts": value} for value in (None, 1.5, "3")),
        *({"measured": value} for value in (None, {}, 3, "x")),
    ],
)
def test_a_run_of_other_values_counts_as_none(wrong):
    known = KNOWN | {"measured": [ENTRY]}
    kept = recalled(known)
    assert kept.temperature == 0.0
    assert kept.measured[0].ratios == (1.0, 2.5)
    assert recalled(known | wrong) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tokens_per_second": value} for value in (None, math.nan, math.inf, 0, True, "3")),
        *({"ratios": value} for value in (None, 3, [None], [math.inf], [0], [10**400], [[1]])),
        *({"setting": value} for value in (None, [], {"method": []}, {"widths": [1e300]})),
        {"setting": {"method": "tree", "widths": [10**9, 10**9]}},
    ],
)
def test_an_entry_of_other_values_counts_as_none(wrong):
    found = recalled(KNOWN | {"measured": [ENTRY | wrong, ENTRY]})
    assert len(found.measured) == 1


def recalled(written: dict) -> Run | None:
    path = records.RUNS.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pair": [written]}))
    return next(iter(records.recall("pair")), None)
