"""Whole programs compiled for TPUs on a machine that has none, or for the device that is here.

    python -m tests.aot.programs v5e --models llama-3.2-1b --methods none chain
    python -m tests.aot.programs here --no-stack

What is compiled are programs of shapes alone: nothing is allocated and nothing runs, so that it
says what a compiler refuses, how long it takes, what memory a program will take and what is in it,
never how fast it is. For a TPU it needs the package libtpu.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.platform import DEVICES, traced_for
from specjax.base.output import write_json
from specjax.decoding.generate import generate_jit, prefill_jit, step_jit
from specjax.measure.roofline import SHAPES
from specjax.models.stacking import stacked
from tests.memory_table import Case, abstract, arguments, drafter_of

METHODS = {"none": "none", "chain": "chain", "specexec": "specexec 63", "pool": "pool"}
HERE = "here"
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
_DRAFT = {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 2, "num_heads": 16,
          "num_kv_heads": 8, "head_dim": 64}  # fmt: skip


def case_of(model: str, method: str, rows: int = 1, prompt: int = 2048) -> Case:
    """A program of a model in bfloat16, with drafts of two layers."""
    return Case(
        SHAPES[model], METHODS[method], rows, prompt, new=128, dtype="bfloat16", draft=_DRAFT
    )


@functools.cache
def alone_on(device: str) -> NamedSharding:
    """Lying on a device which is not here; two descriptions of it are not the same to jax."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[device])
    return NamedSharding(Mesh(np.asarray(found.devices[:1]), ("x",)), P())


def on(tree: Any, device: str) -> Any:
    """Shapes that lie on such a device."""
    if device == HERE:
        return tree
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=alone_on(device)), tree
    )


def meant_for(device: str) -> contextlib.AbstractContextManager[None]:
    """Traces for a device of that name, or for the one that is here."""
    return contextlib.nullcontext() if device == HERE else traced_for(DEVICES[device])


def traced(device: str, case: Case, part: str = "generate", stack: bool = True) -> Any:
    """The trace of a case's program: "generate" as a whole, or its "prefill" or "step"."""
    with meant_for(device):
        target = abstract(case.config, case.dtype)
        target = jax.eval_shape(stacked, target) if stack else target
        target, drafter, rows, rule, outputs, slots = arguments(case, drafter_of(case), target)
        target, drafter, rows = on((target, drafter, rows), device)
        if part == "generate":
            return generate_jit.trace(target, drafter, rows, rule, outputs, slots)
        begun = prefill_jit.trace(target, drafter, rows, slots)
        if part == "prefill":
            return begun
        return step_jit.trace(target, drafter, rule, on(begun.out_info, device))


@dataclasses.dataclass
class Compiled:
    """What compiling gave: seconds, bytes, and how often each kind of operation is in it."""

    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    temporary_bytes: int
    aliased_bytes: int
    output_bytes: int
    operations: dict[str, int]


def compiled(device: str, case: Case, part: str = "generate", stack: bool = True) -> Compiled:
    """Compiles a case for a kind of TPU, or for the device that is here."""
    begin = time.perf_counter()
    trace = traced(device, case, part, stack)
    after_trace = time.perf_counter()
    with meant_for(device):
        lowered = trace.lower(lowering_platforms=None if device == HERE else ("tpu",))
    after_lower = time.perf_counter()
    made = lowered.compile()
    end = time.perf_counter()
    memory = made.memory_analysis()
    return Compiled(
        after_trace - begin, after_lower - after_trace, end - after_lower,
        memory.temp_size_in_bytes, memory.alias_size_in_bytes, memory.output_size_in_bytes,
        dict(operations_of(made.as_text())),
    )  # fmt: skip


_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][\w\-]*)\(", re.MULTILINE)
COUNTED = ("while", "conditional", "custom-call", "fusion", "copy", "all-reduce", "all-gather")


def operations_of(text: str) -> collections.Counter[str]:
    """How often each operation is in an optimized program."""
    found = collections.Counter(_OPERATION.findall(text))
    return collections.Counter({name: found[name] for name in COUNTED if found[name]})


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is compiled."""

    device: tyro.conf.Positional[str]
    """v5e, v6e or here, whatever that is."""
    models: tuple[str, ...] = ("llama-3.2-1b", "llama-3.1-8b")
    methods: tuple[str, ...] = tuple(METHODS)
    parts: tuple[str, ...] = ("generate",)
    """generate, prefill or step."""
    prompt: int = 2048
    rows: int = 1
    stack: bool = True
    """Layers of the target in a loop."""
    json: str | None = None
    """Where the figures go."""


def lines(asked: Asked) -> Iterator[tuple[str, Compiled]]:
    """A name and what came of it, a program after the other."""
    for model in asked.models:
        for method in asked.methods:
            for part in asked.parts:
                case = case_of(model, method, asked.rows, asked.prompt)
                found = compiled(asked.device, case, part, asked.stack)
                yield f"{asked.device} {model} {method} {part}", found


def main() -> None:
    """Prints a line a program."""
    asked = tyro.cli(Asked)
    rows: dict[str, Any] = {}
    if asked.json is not None:
        with contextlib.suppress(FileNotFoundError):
            rows = json.loads(Path(asked.json).read_text(encoding="utf-8"))
    for name, found in lines(asked):
        rows[name] = dataclasses.asdict(found)
        print(
            f"{name}: trace {found.trace_seconds:.1f} s, lower {found.lower_seconds:.1f} s, "
            f"compile {found.compile_seconds:.1f} s, temporaries "
            f"{found.temporary_bytes / 2**20:.0f} MiB, aliased "
            f"{found.aliased_bytes / 2**20:.0f} MiB, {found.operations}",
            flush=True,
        )
        if asked.json is not None:
            write_json(asked.json, rows)


if __name__ == "__main__":
    main()
