"""Plain decoding of GGUF files, one row: specjax beside llama.cpp on the same file, in one process.

pip install llama-cpp-python   # built by the compiler that is here
python -m benchmarks.gguf_speed FILE.gguf...

Runs of both alternate; the figures are medians and the fastest, in tokens a second.
"""

import dataclasses
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import tyro

from specjax.checkpoints.load import load
from specjax.decoding.generate import generate_jit, on_host
from specjax.decoding.request import prepare


@dataclasses.dataclass(frozen=True)
class Speed:
    """What is compared."""

    files: tyro.conf.Positional[tuple[str, ...]]
    prompt: str = "Once upon a time in a small village there lived"
    new_tokens: int = 96
    runs: int = 7
    kinds: tuple[str, ...] = ("default", "float", "int8", "bfloat16")
    """Activations of specjax's: the default, float32, or int8; or all of it in bfloat16."""


def loaded(file: str, kind: str) -> tuple[Any, Any]:
    """A file's model as one of the kinds, and its tokenizer."""
    if kind == "bfloat16":
        return load(file, dtype=kind)
    return load(file, activations=None if kind == "default" else kind)


def ours(file: str, kind: str, asked: Speed) -> Callable[[], float]:
    """A run of specjax, which gives its seconds."""
    model, tokenizer = loaded(file, kind)
    ids = tokenizer(asked.prompt).input_ids
    many = {"max_new_tokens": asked.new_tokens, "stop_at_eos": False}
    request = prepare(jax.random.key(0), model, None, [ids], **many)._asdict()

    def run() -> float:
        begin = time.perf_counter()
        on_host(generate_jit(**request), asked.new_tokens)
        return time.perf_counter() - begin

    run()  # compiles
    return run


def llama(file: str, asked: Speed) -> Callable[[], float]:
    """The same of llama.cpp: the prompt, then a token at a time."""
    llama_cpp = importlib.import_module("llama_cpp")
    cores = os.cpu_count()
    model = llama_cpp.Llama(file, n_ctx=512, n_threads=cores, n_threads_batch=cores, verbose=False)
    ids = model.tokenize(asked.prompt.encode())

    def run() -> float:
        model.reset()
        begin = time.perf_counter()
        model.eval(ids)
        for _ in range(asked.new_tokens):
            model.eval([model.sample(temp=0.0)])
        return time.perf_counter() - begin

    run()
    return run


def main() -> None:
    """Prints a line a file: the median and the fastest of each side."""
    asked = tyro.cli(Speed)
    for file in asked.files:
        runs = {kind: ours(file, kind, asked) for kind in asked.kinds}
        runs["llama.cpp"] = llama(file, asked)
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(asked.runs):
            for name, run in runs.items():
                speeds[name].append(asked.new_tokens / run())
        found = {
            name: [round(statistics.median(own), 1), round(max(own), 1)]
            for name, own in speeds.items()
        }
        print(json.dumps({"file": file} | found), flush=True)


if __name__ == "__main__":
    main()
