"""A part of `python -m tests.fuzz`, and that it sees what it is there to see."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import UNCACHED

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PLANTED = """
import json, os, sys, tempfile
from pathlib import Path
from safetensors import safe_open
from safetensors.numpy import save
from tests.fuzz import BAIT, CANARY, Guard, Kind, run_case
import numpy as np, pickle

folder = Path(tempfile.mkdtemp()).resolve()
guard = Guard(folder)
bait = guard.bait
(bait / BAIT).write_bytes(save({"x": np.zeros(2)}))

def read(case, rng):
    PLANT

held = {"config.json": b"{}"}
print(run_case(0, 0, guard, [Kind("planted", 1, lambda *_: dict(held), read)])[1].said)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=UNCACHED, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_damaged_and_hostile_files_are_read_or_refused():
    done = python("-m", "tests.fuzz", "--count", "400", "--seed", "20", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400 cases of seed 20, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        ("pass", "read"),
        ("raise ValueError('one sentence')", "one sentence"),
        ("{}['x']", "KeyError: 'x' in"),
        ("raise ValueError('x' * 2000)", "xxxx"),
        ("safe_open(bait / BAIT, 'np').__enter__()", "opened the bait (read)"),
        ("(bait / BAIT).open()", "opened "),
        ("os.system('true')", "os.system "),
        ("eval(f'open({str(bait / CANARY)!r}, \\'w\\')')", "opened "),
        ("pickle.loads(pickle.dumps(print))", "pickle.find_class "),
        ("Path('/etc/hostname').open()", "opened /etc/hostname (read)"),
        ("np.ones(1 << 28)", "MiB (read)"),
    ],
)
def test_what_a_case_does_is_seen(plant, seen):
    done = python("-c", PLANTED.replace("PLANT", plant))
    assert seen in done.stdout, done.stdout + done.stderr
