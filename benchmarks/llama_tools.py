"""`generate` against llama.cpp's own tools: the same weights and prompts, in turns, in one run.

    python -m benchmarks.llama_tools --tools build/bin --inflate 100M --json llama.json

llama.cpp is measured by its `llama-bench` (plain) and `llama-speculative-simple`; its prompts are
not part of the time, and neither are those here. Weights in 8 bits are `q8_0` there and int8 with a
scale a row here. The cores must be free: llama.cpp's threads spin while they wait for each other.
"""

import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.export import write_gguf
from pallas_kernels.machine import read_bandwidth
from specjax.base.output import write_json
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.decoding.request import Request, prepare
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.models.config import MATRICES
from specjax.models.inflate import inflate
from specjax.models.quantized import in_dtype, packed
from specjax.models.transformer import Model

_TRIES = 20
_SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    tools: Path
    """A folder with llama-bench, llama-speculative-simple and llama-quantize."""
    inflate: str | None = None
    """Grow the target to so many parameters."""
    prompts: str | None = None
    """A file of prompts; by default those that come with the package."""
    limit: int = 10
    """Of the prompts."""
    new: int = 128
    """Tokens of a continuation."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")
    """Of the target's weights; drafts are as any command loads them."""
    methods: tuple[str, ...] = ("none", "chain", "specexec", "specexec:7")
    """That are measured here, some with a budget."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Of the texts."""
    drafted: tuple[int, ...] = (4, 8)
    """Tokens that llama.cpp drafts at a time."""
    turns: int = 3
    """How often each side runs."""
    json: str | None = None
    """Where all rows are written."""


class Chosen(NamedTuple):
    """The prompts, as tokens and as text."""

    tokens: list[list[int]]
    texts: list[str]


def in_kind(model: Model, dtype: str) -> Model:
    """A model whose weights are of a dtype; in int8 its layers' matrices are codes."""
    if dtype != "int8":
        return in_dtype(model, dtype)
    model = in_dtype(model, "bfloat16")
    layers = []
    for layer in model.layers:
        codes = {name: packed(np.asarray(getattr(layer, name), np.float32), 8) for name in MATRICES}
        codes = {name: replace(code, dtype=np.dtype(jnp.bfloat16)) for name, code in codes.items()}
        layers.append(replace(layer, **jax.tree.map(jnp.asarray, codes)))
    return replace(model, layers=tuple(layers))


def requests(
    bench: Bench, pair: Pair, method: str, temperature: float, texts: list[list[int]]
) -> list[tuple[Request, Request]]:
    """For each text the request, and the same for its first token alone, one program for both."""
    setting = registry.setting_of(method)
    drafter = None if method == "none" else registry.build(setting, pair)
    found = []
    for text in texts:
        whole, first = (
            prepare(jax.random.key(0), pair.target, drafter, [text], max_new_tokens=count,
                    sampling=Sampling(temperature=temperature), stop_at_eos=False)
            for count in (bench.new, 1)
        )  # fmt: skip
        found.append((whole, first._replace(outputs=whole.outputs, slots=whole.slots)))
    return found


def ours(work: list[tuple[Request, Request]]) -> tuple[float, float]:
    """Tokens a second after the first ones, and the tokens of a step."""
    seconds = tokens = steps = 0
    for whole, first in work:
        made, took = timing.timed(whole)
        seconds += took - timing.timed(first)[1]
        tokens += int(made.lengths.sum()) - 1
        steps += int(made.steps.sum()) - 1
    return tokens / seconds, tokens / max(1, steps)


def run(*command: str) -> str:
    """What a tool prints."""
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(
            f"{Path(command[0]).name} ended with {found.returncode}: {found.stderr[-400:]}"
        )
    return found.stdout + found.stderr


def theirs_plain(bench: Bench, file: Path) -> tuple[float, float]:
    """Tokens a second of plain decoding behind 128 tokens, and 1."""
    threads = str(os.cpu_count())
    said = run(str(bench.tools / "llama-bench"), "-m", str(file), "-p", "0", "-n", str(bench.new),
               "-d", "128", "-t", threads, "-r", "2", "-o", "json")  # fmt: skip
    return json.loads(said[said.index("[") : said.rindex("]") + 1])[0]["avg_ts"], 1.0


def theirs_drafted(
    bench: Bench, files: tuple[Path, Path], texts: list[str], temperature: float, drafted: int
) -> tuple[float, float]:
    """Tokens a second of speculative decoding over all texts, and 0: it says nothing of steps."""
    tokens = seconds = 0.0
    threads = str(os.cpu_count())
    for text in texts:
        command = [str(bench.tools / "llama-speculative-simple"), "-m", str(files[0]), "-md",
                   str(files[1]), "-p", text, "-n", str(bench.new), "-c", "2048", "-t", threads,
                   "--temp", str(temperature), "--spec-type", "draft-simple", "--spec-draft-n-max",
                   str(drafted), "--spec-draft-p-min", "0", "--seed", "1",
                   "--ignore-eos", *([] if temperature else ["--top-k", "1"])]  # fmt: skip
        own, taken = speed_of(command)
        tokens, seconds = tokens + own, seconds + taken
    return tokens / seconds, 0.0


def speed_of(command: list[str]) -> tuple[int, float]:
    """The tokens and seconds that a tool says; now and then it ends before its log is written."""
    said = ""
    for _ in range(_TRIES):
        said = run(*command)
        if (found := _SPEED.search(said)) is not None:
            return int(found[1]), float(found[2])
    raise SystemExit(f"llama-speculative-simple says no speed: {said[-400:]}")


def exported(bench: Bench, pair: Pair, folder: Path) -> dict[tuple[str, str], Path]:
    """The target and the draft in every dtype, as llama.cpp reads them."""
    files = {}
    for what, model in (("target", pair.target), ("draft", pair.drafts[0])):
        for dtype in ("float32", "bfloat16"):
            files[what, dtype] = folder / f"{what}-{dtype}.gguf"
            write_gguf(in_dtype(model, dtype), pair.tokenizer, files[what, dtype])
        files[what, "int8"] = folder / f"{what}-q8_0.gguf"
        run(str(bench.tools / "llama-quantize"), str(files[what, "float32"]),
            str(files[what, "int8"]), "q8_0")  # fmt: skip
    return files


def sides(
    bench: Bench, pair: Pair, files: dict[tuple[str, str], Path], chosen: Chosen, temperature: float
) -> dict[tuple[str, str, str], Callable[[], tuple[float, float]]]:
    """What is measured at a temperature, by system, dtype and method; all of it is warm."""
    found: dict[tuple[str, str, str], Callable[[], tuple[float, float]]] = {}
    for dtype in bench.dtypes:
        kind = pair._replace(target=in_kind(pair.target, dtype))
        for method in bench.methods:
            work = requests(bench, kind, method, temperature, chosen.tokens)
            for each in itertools.chain(*work):
                timing.warm_up(each)
            found["specjax", dtype, method] = partial(ours, work)
        both = files["target", dtype], files["draft", dtype]
        if not temperature:
            found["llama.cpp", dtype, "none"] = partial(theirs_plain, bench, both[0])
        for count in bench.drafted:
            drafted = partial(theirs_drafted, bench, both, chosen.texts, temperature, count)
            found["llama.cpp", dtype, f"draft of {count}"] = drafted
    return found


def main() -> None:
    """Measures, prints and writes it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    pair = load_pair("bundled", dtype="float32")
    pair = pair._replace(drafts=pair.drafts[:1])
    if bench.inflate:
        pair = pair._replace(target=inflate(pair.target, count_of(bench.inflate)))
    listed = prompts.read(bench.prompts)
    longest = pair.target.config.max_positions
    fitting = prompts.fitting(listed, pair.tokenizer, longest, bench.new)[0][: bench.limit]
    texts = dict(listed)
    chosen = Chosen([each.tokens for each in fitting], [texts[each.name] for each in fitting])
    rows: list[dict[str, Any]] = []
    report = {
        "env": timing.environment(), "read_gb_per_second": read_bandwidth() / 1e9,
        "config": dataclasses.asdict(bench) | {"tools": bench.tools.name}, "rows": rows,
    }  # fmt: skip
    print(json.dumps(report["env"]), f"reads {report['read_gb_per_second']:.1f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as name:
        files = exported(bench, pair, Path(name))
        for temperature in bench.temperatures:
            work = sides(bench, pair, files, chosen, temperature)
            turns = [{at: side() for at, side in work.items()} for _ in range(bench.turns)]
            for at in work:
                runs = [turn[at][0] for turn in turns]
                step, speed = turns[0][at][1], statistics.median(runs)
                keys = "system", "dtype", "method"
                rows.append({"temperature": temperature, **dict(zip(keys, at, strict=True)),
                             "tokens_per_second": speed, "tokens_per_step": step,
                             "runs": runs})  # fmt: skip
                print(f"T={temperature} {at[0]:10} {at[1]:9} {at[2]:12} {speed:8.1f} tokens/s"
                      + (f", {step:.2f} a step" if step else ""), flush=True)  # fmt: skip
            if bench.json:
                write_json(bench.json, report)


if __name__ == "__main__":
    main()
