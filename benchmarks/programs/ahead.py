"""Whole programs compiled for TPUs and GPUs on a machine that has none, or for what is here.

    python -m benchmarks.programs.ahead v5e --models llama-3.2-1b --methods none chain
    python -m benchmarks.programs.ahead h100 --models llama-3.1-8b --methods none head-eagle
    python -m benchmarks.programs.ahead h100 --models llama-3.1-8b --methods none --layer-kernels
    python -m benchmarks.programs.ahead here

What is compiled are programs of shapes alone: nothing is allocated and nothing runs, so that it
says what a compiler refuses, how long it takes, what memory a program will take and what is in it,
never how fast it is. See `specjax.measure.compile_ahead` for what it needs.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import tyro
from jax.sharding import Mesh

import pallas_kernels
from benchmarks.programs.memory_plan import Case, drafter_of, plan_of, texts_of
from specjax.base.output import write_json
from specjax.checkpoints.feature_drafts import layers_read
from specjax.decoding.generate import generate_jit, prefill_jit, step_jit
from specjax.draft.drafter import Drafter
from specjax.measure.compile_ahead import (
    Compiled,
    Hardware,
    abstract_pair,
    abstract_request,
    abstract_target,
    compiled,
    hardware,
    on,
)
from specjax.measure.roofline import SHAPES
from specjax.methods.registry import build, setting_of
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from train.config import Size

METHODS = {"none": "none", "chain": "chain", "specexec": "specexec:63", "pool": "pool"}
HEADS = {"head-chain": "chain:7", "head-eagle": "eagle:60", "head-specexec": "specexec:15"}
"""Of a random EAGLE-3 head, as named in `specjax.methods`."""
_DRAFT = {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 2, "num_heads": 16,
          "num_kv_heads": 8, "head_dim": 64}  # fmt: skip


def head_of(target: ModelConfig) -> ModelConfig:
    """An EAGLE-3 head of the published size for a target: a layer of its shape, 32,000 tokens."""
    layer = dataclasses.asdict(target)
    size = Size(**{field.name: layer[field.name] for field in dataclasses.fields(Size)})
    own = dataclasses.replace(size, num_layers=1)
    return own.reading(target, layers_read(target.num_layers), 32_000)


def case_of(model: str, method: str, rows: int = 1, prompt: int = 2048) -> Case:
    """A program of a model in bfloat16, with drafts of two layers."""
    own = METHODS.get(method, method)
    return Case(SHAPES[model], own, rows, prompt, new=128, dtype="bfloat16", draft=_DRAFT)


def built(case: Case, found: Hardware, mesh: Mesh) -> Drafter:
    """The drafter of a case, of shapes alone."""
    if case.method not in HEADS:
        return drafter_of(case)
    pair = abstract_pair(found, mesh, case.config, [head_of(case.config)], case.dtype)[1]
    setting = setting_of(HEADS[case.method], batch=case.rows)

    def own(target: Model, drafts: list[Model]) -> Drafter:
        return build(setting, pair._replace(target=target, drafts=drafts))

    return jax.eval_shape(own, pair.target, pair.drafts)


def made(name: str, case: Case, part: str = "generate", data: int = 1, model: int = 1) -> Compiled:
    """A case's program compiled for hardware: "generate" as a whole, or its "prefill" or "step"."""
    found = hardware(name)
    mesh = found.mesh(data=data, model=model)
    with found.traced():
        target = abstract_target(case.config, case.dtype, mesh)
        drafter = on(built(case, found, mesh), mesh)
        asked = abstract_request(target, drafter, texts_of(case), case.rule)
    if part == "generate":
        return compiled(found, generate_jit, *asked)
    begun = target, drafter, asked.rows, asked.slots, asked.layout
    if part == "prefill":
        return compiled(found, prefill_jit, *begun)
    with found.traced():
        state = prefill_jit.trace(*begun).out_info
    return compiled(found, step_jit, target, drafter, asked.rule, state, asked.layout)


def layer_kernels(name: str, case: Case) -> float:
    """Kernels that a layer of the target adds to a step, its writes to the cache too.

    What the layers share is in one kernel more or less as there are more of them: it is the mean
    of four.
    """
    counts = []
    for layers in (4, 8):
        own = case._replace(config=dataclasses.replace(case.config, num_layers=layers))
        counts.append(sum(made(name, own, "step").kernels.values()))
    return (counts[1] - counts[0]) / 4


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is compiled."""

    hardware: tyro.conf.Positional[str]
    """v5e, v5e:2x2, v6e, h100, or here for the device at hand."""
    models: tuple[str, ...] = ("llama-3.2-1b", "llama-3.1-8b")
    methods: tuple[str, ...] = tuple(METHODS)
    parts: tuple[str, ...] = ("generate",)
    """generate, prefill or step."""
    prompt: int = 2048
    rows: int = 1
    data: int = 1
    """Devices that share rows."""
    model: int = 1
    """Devices that share layers."""
    kernels: str = "auto"
    """The implementation of tree attention; auto is XLA's where nothing is measured."""
    layer_kernels: bool = False
    """Prints how many kernels one more layer adds to a step of each model and method, alone."""
    json: str | None = None
    """Where the figures go."""


def over_plan(name: str, case: Case, found: Compiled) -> float:
    """What a whole generate takes beside the weights over what is planned, of one device."""
    at = hardware(name)
    with at.traced():
        planned = plan_of(case, built(case, at, at.mesh())).beside_weights
    return (found.temporary_bytes + found.output_bytes) / planned


def lines(asked: Asked) -> Iterator[tuple[str, Case, Compiled | str]]:
    """A name, its case and what came of it, or the error where it is refused, one after another."""
    for model in asked.models:
        for method in asked.methods:
            for part in asked.parts:
                case = case_of(model, method, asked.rows, asked.prompt)
                name = f"{asked.hardware} {model} {method} {part} {asked.prompt} x {asked.rows}"
                try:
                    yield name, case, made(asked.hardware, case, part, asked.data, asked.model)
                except Exception as error:  # of a compiler, of whatever kind
                    yield name, case, str(error).splitlines()[0]


def main() -> None:
    """Prints a line a program."""
    asked = tyro.cli(Asked)
    with hardware(asked.hardware).traced():
        pallas_kernels.use(asked.kernels)
    if asked.layer_kernels:
        for model, method in itertools.product(asked.models, asked.methods):
            case = case_of(model, method, asked.rows, asked.prompt)
            count = layer_kernels(asked.hardware, case)
            print(f"{asked.hardware} {model} {method}: {count:g} kernels a layer", flush=True)
        return
    rows: dict[str, Any] = {}
    if asked.json is not None:
        with contextlib.suppress(FileNotFoundError):
            rows = json.loads(Path(asked.json).read_text(encoding="utf-8"))
    for name, case, found in lines(asked):
        if isinstance(found, str):
            print(f"{name}: {found[:300]}", flush=True)
            continue
        rows[name] = dataclasses.asdict(found)
        beside = ""
        if " generate " in name and asked.data == asked.model == 1:
            rows[name]["over_plan"] = over_plan(asked.hardware, case, found)
            beside = f", {rows[name]['over_plan']:.2f} of the plan"
        print(
            f"{name}: trace {found.trace_seconds:.1f} s, lower {found.lower_seconds:.1f} s, "
            f"compile {found.compile_seconds:.1f} s, temporaries "
            f"{found.temporary_bytes / 2**20:.0f} MiB{beside}, aliased "
            f"{found.aliased_bytes / 2**20:.0f} MiB, {found.counted_loops} counted loops, "
            f"{found.operations}, kernels {found.kernels}",
            flush=True,
        )
        if asked.json is not None:
            write_json(asked.json, rows)


if __name__ == "__main__":
    main()
