"""The README's Python runs, and its commands are those of `.ci/run`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code):
    exec(compile(code, "README.md", "exec"), {})


def test_the_test_command_is_what_ci_runs():
    commands = "\n".join(blocks("sh"))
    test_command = "pip install -e '.[test]' && pytest"
    assert test_command in commands
    assert test_command in (ROOT / ".ci" / "run").read_text()


def test_every_file_named_exists():
    named = re.findall(r"`((?:specjax|pallas_kernels|train|configs|tests)/[\w./]*)`", README)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_first_command_needs_no_extra():
    """Nothing that only the extras bring is imported on the way to a first text."""
    extras = ("absl", "flax", "optax", "orbax", "matplotlib", "beartype")
    code = f"""import sys
sys.modules |= dict.fromkeys({extras})
from specjax.__main__ import main
sys.exit(main(["generate", "def f", "--max-new-tokens", "2"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
