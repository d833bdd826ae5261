"""llama.cpp over a mapped file that is larger than the memory it may have.

    pip install gguf        # and llama-bench, built from llama.cpp's or llama-cpp-python's source
    python -m benchmarks.offload.llama_mmap FOLDER --bench build/bin/llama-bench --memory 1100MiB

The model of a folder, written in llama.cpp's form, is mapped (its default), and plain tokens are
timed within a control group of so much memory (version 1, as root), whose pages of files count as
well: what it read before is gone when it comes round again. `--memory` is what `specjax info
--offload disk` plans, or what its process was seen to take.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import tyro

import specjax
from benchmarks.export import write_gguf
from benchmarks.system import forget
from specjax.cli.values import bytes_of
from specjax.models.quantized import in_dtype

_GROUPS = Path("/sys/fs/cgroup/memory")


@dataclasses.dataclass(frozen=True)
class Offload:
    """What is run."""

    folder: tyro.conf.Positional[str]
    """Of a model of LLaMA's form in bfloat16."""
    bench: str
    """The program llama-bench."""
    memory: str = "1100MiB"
    """That the process may have."""
    tokens: int = 4
    """Of each repetition."""
    repetitions: int = 3
    """Of the measurement."""
    threads: int = 2
    """Of the program."""


def main() -> None:
    """Prints the seconds of each token, and those with no limit."""
    asked = tyro.cli(Offload)
    file = Path(asked.folder) / "model.gguf"
    if not file.exists():
        model, tokenizer = specjax.load(asked.folder)
        write_gguf(in_dtype(model, jnp.bfloat16), tokenizer, file)
    limit = bytes_of("--memory", asked.memory)
    group = _GROUPS / f"specjax-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        for name, own in ((asked.memory, group), ("no limit", None)):
            forget([file])  # pages that another group has count as its own
            print(name, json.dumps(_seconds(asked, file, own)), flush=True)
    finally:
        group.rmdir()


def _seconds(asked: Offload, file: Path, group: Path | None) -> list[float]:
    """Seconds a token, of each repetition."""
    command = [
        asked.bench, "-m", str(file), "-p", "0", "-n", str(asked.tokens), "-t", str(asked.threads),
        "-r", str(asked.repetitions), "--load-mode", "mmap", "--repack", "0", "-o", "json",
    ]  # fmt: skip
    if group is not None:
        enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        command = ["sh", "-c", enter, "sh", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama-bench ended with {done.returncode}: {done.stderr[-1000:]}")
    return [1 / each for each in json.loads(done.stdout)[0]["samples_ts"]]


if __name__ == "__main__":
    main()
