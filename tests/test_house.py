"""The rules of the house, enforced: who imports whom, how large things get, and the linters."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("specjax", "pallas_kernels", "train")
TOP_LEVEL = (
    *("specjax", "pallas_kernels", "train", "configs", "tests"),
    *("README.md", "pyproject.toml", "LICENSE", "CHANGELOG.md", ".ci/run"),
)
# A file of specjax imports files of lower rank only; those of one package may import each other.
RANKS = {
    "pytree": 0,
    "arrays": 0,
    "rope": 0,
    "config": 1,
    "prompts": 0,
    "widths": 0,
    "options": 1,
    "values": 1,
    "distributed": 3,
    "report": 10,
    "sharding": 2,
    "sharded": 5,
    "memory": 5,
    "sampling": 1,
    "tree": 1,
    "quant": 1,
    "shape": 2,
    "layers": 2,
    "walk": 2,
    "traversal": 3,
    "block": 3,
    "verify": 4,
    "cache": 3,
    "model": 4,
    "families": 5,
    "folder": 0,
    "ngram_folder": 6,
    "offload": 5,
    "draft": 5,
    "inflate": 5,
    "records": 7,
    "request": 6,
    "checkpoint": 6,
    "stepping": 7,
    "decode": 8,
    "methods": 8,
    "measure": 9,
    "profile": 9,
    "law": 9,
    "bench": 11,
    "certify": 11,
    "console": 11,
    "about": 11,
    "reshard": 11,
    "vocabulary": 5,
    "serve": 11,
    "setting": 6,
    "pair": 7,
    "choice": 9,
    "tuned": 7,
    "acceptance": 7,
    "plan": 9,
    "curves": 1,
    "output": 0,
    "evidence": 8,
    "outcome": 10,
    "peer": 7,
    "tune": 12,
    "roofline": 12,
    "__main__": 13,
    "__init__": 14,
}
MAX_FUNCTION, P90_FUNCTION, MEDIAN_FUNCTION = 60, 40, 12
MAX_KERNEL_FUNCTION = 120  # a device kernel's body is one schedule and is not cut up
MAX_FILE, MEDIAN_FILE = 400, 200
MIN_TEST_SHARE = 0.5


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    """The name under which RANKS knows a file of specjax."""
    first, *rest = path.relative_to(ROOT / "specjax").parts
    return first if rest else path.stem


def function_lengths() -> dict[str, int]:
    """Lines of every function, signature and docstring included."""
    lengths = {}
    for path in python_files(*SOURCES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                lengths[name] = (node.end_lineno or node.lineno) - node.lineno + 1
    return lengths


def file_lengths(*folders: str) -> dict[str, int]:
    """Lines of every file that has any."""
    counted = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in python_files(*folders)}
    return {str(path.relative_to(ROOT)): lines for path, lines in counted.items() if lines}


def test_every_file_of_specjax_has_a_rank():
    unranked = {module_of(path) for path in python_files("specjax")} - RANKS.keys()
    assert not unranked, f"give {sorted(unranked)} a rank in RANKS."


def test_files_import_lower_ranks_only():
    wrong = []
    for path in python_files("specjax"):
        importer = module_of(path)
        for name in imported(path):
            package, _, rest = name.partition(".")
            module = rest.partition(".")[0]
            if package != "specjax" or module == importer:
                continue
            if module not in RANKS or RANKS[module] >= RANKS[importer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("folder", "refused"), [("specjax", {"train", "tests", "configs"}), ("train", {"tests"})]
)
def test_packages_do_not_import_what_is_above_them(folder, refused):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(folder)
        for name in imported(path)
        if name.partition(".")[0] in refused
    ]
    assert not wrong, wrong


def test_kernels_import_jax_only():
    allowed = {"jax", "jaxtyping", "pallas_kernels", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("pallas_kernels")
        for name in imported(path)
        if name.partition(".")[0] not in allowed
    ]
    assert not wrong, wrong


def test_functions_are_small():
    lengths = function_lengths()
    kernels = ("hopper.py:", "triton.py:", "tpu.py:")
    long = {
        name: lines
        for name, lines in lengths.items()
        if lines > (MAX_KERNEL_FUNCTION if any(k in name for k in kernels) else MAX_FUNCTION)
    }
    assert not long, f"over {MAX_FUNCTION} lines: {long}"
    values = sorted(lengths.values())
    assert values[int(0.9 * len(values))] <= P90_FUNCTION
    assert statistics.median(values) <= MEDIAN_FUNCTION


def test_files_are_small():
    lengths = file_lengths(*SOURCES, "configs", "tests")
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE}
    assert not long, f"over {MAX_FILE} lines: {long}"
    assert statistics.median(file_lengths(*SOURCES).values()) <= MEDIAN_FILE


def test_there_is_half_a_line_of_test_to_a_line_of_source():
    tests, source = (sum(file_lengths(*f).values()) for f in (("tests",), SOURCES))
    assert tests >= MIN_TEST_SHARE * source, f"{tests} lines of tests, {source} of source."


def test_top_level_is_complete():
    missing = [name for name in TOP_LEVEL if not (ROOT / name).exists()]
    assert not missing, f"the top level lacks {missing}."


@pytest.mark.parametrize(
    "command", ["ruff check .", "ruff format --check .", "pyright --pythonpath {python}"]
)
def test_linters_pass(command):
    arguments = [sys.executable, "-m", *command.format(python=sys.executable).split()]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
