"""Tiny models that every test may share."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
import time
from importlib.metadata import version

# Most of the suite's time is compilation. LLVM's first level takes a quarter off it, its lowest
# another third, at which what runs long takes twice as long; so only tests that are marked as
# `long_running` have the first (see below), and processes of their own. What is measured and
# certified (`specjax bench`, `specjax verify`) is compiled as usual. jax 0.10 can emit fusions in
# an older way too, which takes half the time (a loop of trees 2.4 s instead of 5.9); later ones
# know one way only. A program is compiled in one part, not in 32 for as many cores: two workers
# have none to spare, and the parts take a sixth more of what there is.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=1"
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jax").startswith("0.10.")
        else ""
    ),
)

# A GPU kernel's interpreter runs its three warpgroups as programs that wait for one another; with
# as many threads as two cores get, they may wait for ever. NPROC is how many XLA makes.
if version("jax") >= "0.11":  # before, nothing is interpreted so
    os.environ.setdefault("NPROC", "8")

# What a shell starts in the background, such as `pytest &`, ignores Ctrl-C, and so would processes
# that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs and measurements are kept in folders of the session's own, not in the user's. What is
# compiled is compiled once for all workers and the processes that tests start, and once in a
# worker, which forgets programs. With a folder that stays, a second run compiles what was changed.
if "SPECJAX_CACHE" not in os.environ:
    os.environ["SPECJAX_CACHE"] = tempfile.mkdtemp(prefix="specjax-tests-")
    atexit.register(shutil.rmtree, os.environ["SPECJAX_CACHE"], ignore_errors=True)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="specjax-programs-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

import tests.checker  # before specjax, whose functions it decorates
from specjax.base import progress
from specjax.measure import timing
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model, initialize

pytest_plugins = ["tests.where_time_goes"]

# Examples are the same in every run, and none has to be quick: two busy cores stall at times. To
# look for others: HYPOTHESIS_PROFILE=search pytest FILE.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
# Tracing makes hundreds of thousands of objects, few of them garbage in cycles: collecting that as
# often as usual takes an eighth of the time.
gc.set_threshold(20_000, 20, 20)
progress.EVERY_SECONDS = 3600.0  # a slow machine prints no line among those that tests compare


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--part`."""
    parser.addoption("--part", metavar="NUMBER/PARTS", help="run one of so many parts of the tests")


@pytest.hookimpl(trylast=True)  # when those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is in none of `--part`: of every file, each test that many places on."""
    if config.option.part is None:
        return
    try:
        number, parts = map(int, config.option.part.split("/"))
        if parts < 1:
            raise ValueError
    except ValueError:
        said = f"--part is {config.option.part!r}; it must be a number and parts, such as 2/4."
        raise pytest.UsageError(said) from None
    kept = [item for place, item in enumerate(items) if (place - number) % parts == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles at LLVM's lowest level, fixtures included, what does not run long.

    What was compiled at another level is forgotten: it may round differently.
    """
    tests.checker.begin(item.nodeid.partition("[")[0])
    quickly = item.get_closest_marker("long_running") is None
    if quickly != jax.config.values["jax_disable_most_optimizations"]:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", quickly)


def pytest_collection_finish() -> None:
    """Lets the garbage collector pass over what is there for good."""
    gc.collect()
    gc.freeze()


UNCACHED = {
    name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
}
"""The environment of a process that may not read the session's programs."""

QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""The same for a process of a test's own, which compiles more than it runs."""


_looked = [0.0]


def pytest_runtest_teardown() -> None:
    """Forgets compiled programs before a process maps more pieces of memory than Linux lets it.

    Past 65,530 a compilation ends in a segmentation fault, and every loop is thousands of them.
    To count them takes 20 ms; so they are counted once in a second of this process' work, in which
    no more than a loop is compiled.
    """
    if time.process_time() - _looked[0] > 1.0:
        timing.forget_programs()
        _looked[0] = time.process_time()


def tiny_config(**changes) -> ModelConfig:
    """A two-layer configuration with two query heads per key/value head, as changed."""
    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 128,
        "eos_ids": (0,),
    }
    return ModelConfig(**(base | changes))


def tiny_model(seed: int = 0, scale: float = 8.0, **changes) -> Model:
    """Random weights of `tiny_config`, `scale` times the usual so that logits tell things apart."""
    model = initialize(jax.random.key(seed), tiny_config(**changes))
    return jax.tree.map(lambda leaf: leaf * (scale if leaf.ndim > 1 else 1), model)


@pytest.fixture(scope="session")
def target() -> Model:
    """A tiny random model."""
    return tiny_model()
