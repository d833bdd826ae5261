"""A disk that fails while layers are read, a file that is cut, Ctrl-C: each in a real process."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from specjax.checkpoints.files import find
from specjax.checkpoints.offload import memory
from tests.conftest import QUICKLY
from tests.folders import target_folder

LAYERS, READS = 12, 400

_FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

/* From the FAIL_AFTER-th read on, vectored reads at a place fail with FAIL_WITH. */
static int fails(void) {
  static int count;
  return __sync_fetch_and_add(&count, 1) >= atoi(getenv("FAIL_AFTER"));
}
#define READ(name, type, ...)                                                       \
  ssize_t name(int fd, const struct iovec *v, int n, type at __VA_ARGS__) {         \
    if (fails()) { errno = atoi(getenv("FAIL_WITH")); return -1; }                  \
    return preadv_(fd, v, n, at);                                                   \
  }
static ssize_t preadv_(int fd, const struct iovec *v, int n, off64_t at) {
  static ssize_t (*real)(int, const struct iovec *, int, off64_t);
  if (!real) real = dlsym(RTLD_NEXT, "preadv64");
  return real(fd, v, n, at);
}
#define FLAGS , int flags
READ(preadv, off_t)
READ(preadv64, off64_t)
READ(preadv2, off_t, FLAGS)
READ(preadv64v2, off64_t, FLAGS)
"""

_GENERATE = """
import sys
from specjax.__main__ import main
from specjax.checkpoints.offload import memory
memory._ring_bytes = lambda *_: 1  # there are fewer layers than a ring is worth
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("faults") / "target"
    return target_folder(made, 4, max_positions=2048, num_layers=LAYERS)


@pytest.fixture(scope="module")
def command(folder):
    """Generates for some seconds, a layer in memory."""
    config, _ = memory.read_config(folder)
    least = memory.division(find(folder), config, np.dtype("float32"), 10**9)
    return [
        sys.executable, "-c", _GENERATE, "generate", "def add(a", "--model", str(folder),
        "--method", "none", "--draft", "none", "--max-new-tokens", "1500", "--dtype", "float32",
        "--offload", "disk", "--memory", str(least.outer + least.layers[0] + 4096),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A library that lets reads fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C compiler for a library that lets reads fail")
    folder = tmp_path_factory.mktemp("failing")
    (folder / "failing.c").write_text(_FAILING)
    library = folder / "failing.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "failing.c", "-ldl"], check=True
    )
    return library


def ended(process, seconds=120):
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def started(command, **env):
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | QUICKLY | env,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "said"),
    [(5, "Input/output error"), pytest.param(110, "timed out", marks=pytest.mark.slow)],
)
def test_a_disk_that_fails_in_the_middle_is_said(number, said, command, failing):
    code, out, error = ended(
        started(command, LD_PRELOAD=str(failing), FAIL_AFTER=str(READS), FAIL_WITH=str(number))
    )
    assert code == 2
    assert out  # what was generated before stays
    last = error.strip().splitlines()[-1]
    assert last.startswith("specjax: ")
    assert "model.safetensors cannot be read: " in last
    assert said in last
    assert "Traceback" not in error


def test_a_file_cut_in_the_middle_is_said(command, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    process = started([part.replace(str(folder), str(copy)) for part in command])
    assert process.stdout is not None
    process.stdout.read(9)  # it generates
    os.truncate(weights, weights.stat().st_size // 2)
    code, _, error = ended(process)
    assert code == 2
    assert "its weights go on to byte" in error.strip().splitlines()[-1]
    assert "Traceback" not in error


def test_an_interrupt_in_the_middle_ends_it_at_once(command):
    process = started(command)
    assert process.stdout is not None
    process.stdout.read(9)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _, error = ended(process, 30)
    assert code == 130
    assert "Traceback" not in error
    assert "FATAL" not in error
    assert time.monotonic() - began < 20
