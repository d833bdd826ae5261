"""The Python of README and docs runs, and their commands are those of `.ci/run`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints import tokenizers
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.methods import registry
from specjax.methods.method import METHODS
from specjax.models.families import FAMILIES
from specjax.models.transformer import initialize
from specjax.verify import rules
from specjax.verify.rules import RULES
from tests.cases import slow_but
from tests.folders import pair_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


EXAMPLES = {
    f"{page.stem}-{number}": code
    for page in PAGES
    for number, code in enumerate(blocks("python", page.read_text()))
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Small folders for the hub's names: their vocabularies padded as those models' are."""
    at = tmp_path_factory.mktemp("hub")
    tokenizer = tokenizer_of(pair_folder() / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    target = load_model(pair_folder() / "target")
    small = initialize(jax.random.key(1), dataclasses.replace(target.config, num_layers=2))
    folders = {}
    for size, model, rows in (("7B", target, 288), ("0.5B", target, 272), ("1.5B", small, 280)):
        folders[f"Qwen/Qwen2.5-{size}-Instruct"] = at / size
        padded = tokenizers.fitted(model, rows, 272)
        config = dataclasses.replace(padded.config, num_known=None)
        save_model(replace(padded, config=config), at / size, tokenizer=tokenizer)
    return folders


def stood_in(code, folders):
    for name, folder in folders.items():
        code = code.replace(name, str(folder))
    return code


@pytest.fixture
def _registries():
    """What an example registers is forgotten after it."""
    kept = [(records, dict(records)) for records in (METHODS, RULES, FAMILIES, IMPLEMENTATIONS)]
    yield
    for records, before in kept:
        records.clear()
        records.update(before)


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("example", slow_but(EXAMPLES, "README-0", "kernels-0"))
def test_python_blocks_run(example, stand_ins):
    exec(compile(stood_in(EXAMPLES[example], stand_ins), example, "exec"), {})


def test_tables_are_those_of_the_records():
    readme, methods = (page.read_text() for page in (ROOT / "README.md", ROOT / "docs/methods.md"))
    assert registry.table() in readme
    assert registry.table() in methods
    assert rules.table() in readme


def test_the_pair_of_the_second_example_is_checked_first(stand_ins, capsys):
    line = next(line for line in blocks("sh") if line.startswith("specjax check-pair"))
    assert main(stood_in(line, stand_ins).split()[1:]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  can draft for the model") == 2
    assert "tables of 288 and 272 rows" in printed


def test_the_test_command_is_what_ci_runs():
    commands = "\n".join(blocks("sh"))
    test_command = "pip install -e '.[test]' && pytest"
    assert test_command in commands
    assert test_command in (ROOT / ".ci" / "run").read_text()


def test_every_file_named_exists():
    named = re.findall(
        r"`((?:specjax|pallas_kernels|train|configs|benchmarks|tests)/[\w./]*)`", TEXT
    )
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_first_command_needs_no_extra():
    """Nothing that only the extras bring is imported on the way to a first text.

    It is compiled as for a user, not as the tests are, and so is a tree under all limits, whose
    tokens are those of plain decoding with the same noise.
    """
    extras = ("absl", "flax", "optax", "orbax", "matplotlib", "beartype")
    code = f"""import sys
sys.modules |= dict.fromkeys({extras})
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from specjax.__main__ import main
sampled = "--max-new-tokens 12 --temperature 0.9 --top-k 50 --top-p 0.9 --min-p 0.01 --verify naive"
for own in ("--max-new-tokens 2", sampled + " --method none", sampled + " --method tree"):
    assert main(["generate", "def f", "--json", *own.split()]) == 0
"""
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    _, plain, tree = map(json.loads, done.stdout.splitlines())
    assert plain["text"] == tree["text"]
    assert tree["target_steps"] < plain["target_steps"]
