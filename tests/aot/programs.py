"""Whole programs compiled for TPU and H100 on a machine that has neither.

    python -m tests.aot.programs v5e --models llama-3.2-1b --methods none chain

What is compiled are programs of shapes alone: nothing is allocated and nothing runs, so that it
says what a compiler refuses, how long it takes, what memory a program will take and what is in it,
never how fast it is. A TPU needs the package libtpu, an H100 those of `CUDA_WHEELS`.
"""

import collections
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.platform import DEVICES, traced_for
from specjax.base.pytree import unchecked
from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate_jit, prefill_jit, step_jit
from specjax.decoding.request import Limits, Room, Rows, room
from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.plain import PlainDrafter
from specjax.models.config import ModelConfig
from specjax.models.stacking import stacked
from specjax.models.transformer import Model, initialize
from specjax.verify.rules import NAIVE, Rule, find_rule

MODELS = {
    "llama-3.2-1b": ModelConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
        num_kv_heads=8, head_dim=64, max_positions=131_072, eos_ids=(0,),
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_positions=131_072, eos_ids=(0,),
    ),
}  # fmt: skip
METHODS = ("none", "chain", "specexec", "pool")
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
H100 = Path(__file__).with_name("h100.textproto")


class Case(NamedTuple):
    """A program: of a device's kind, a model, what drafts, and the prompts' tokens."""

    device: str
    model: str
    method: str
    prompt: int = 2048
    rows: int = 1
    new: int = 128
    stack: bool = True


def topology(device: str) -> list[Any]:
    """The devices of a machine that is not here."""
    if device in TOPOLOGIES:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES[device]
        ).devices
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=H100.read_text()
    ).devices


def on(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes that lie so."""

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, tree)


def model_of(config: ModelConfig) -> Model:
    """A model of shapes alone, in bfloat16."""
    return jax.eval_shape(lambda: initialize(jax.random.key(0), config, jnp.dtype("bfloat16")))


def drafter_of(method: str, config: ModelConfig) -> Any:
    """What drafts: models of two layers."""
    small = dataclasses.replace(
        config, hidden_size=1024, intermediate_size=2816, num_layers=2, num_heads=16,
        num_kv_heads=8, head_dim=64,
    )  # fmt: skip
    models = [model_of(small)] * (3 if method == "pool" else 1)

    def made(models: list[Model]) -> Any:
        if method == "chain":
            return ExpansionDrafter.of(models, (1,) * 7)
        if method == "pool":
            return ExpansionDrafter.of(models, (1,) * 5)
        return BestFirstDrafter(models[0], jnp.ones(2), Growth(63, beams=4, width=8, depth=16))

    if method == "none":
        return PlainDrafter(config.vocab_size)
    return jax.eval_shape(made, models)


def room_of(case: Case, drafter: Any) -> Room:
    """The sizes that a case's program has."""
    most = MODELS[case.model].max_positions
    return room(case.prompt, case.new, drafter.window, most)


def rule_of(method: str, drafter: Any) -> Rule:
    """The rule that decides."""
    return NAIVE if method == "none" else find_rule("auto", drafter.construction)


def traced(case: Case, part: str = "generate") -> Any:
    """The trace of a case's program: "generate" as a whole, or its "prefill" or "step"."""
    config = MODELS[case.model]
    sharding = NamedSharding(Mesh(np.asarray(topology(case.device)[:1]), ("x",)), P())
    with traced_for(DEVICES[case.device]):
        whole = jax.eval_shape(stacked, model_of(config)) if case.stack else model_of(config)
        target, drafter = (
            on(whole, sharding),
            on(drafter_of(case.method, config), sharding),
        )
        width, outputs, slots = room_of(case, drafter)

        def array(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), case.rows))
        sampling = jax.eval_shape(lambda: Sampling(temperature=np.float32(0.8)).rows(case.rows))
        rows = unchecked(
            Rows, prompt=array(case.rows, width), length=array(case.rows), key=keys,
            sampling=sampling, counts=None,
            limits=unchecked(Limits, max_new_tokens=array(case.rows), end_ids=array(case.rows, 1)),
        )  # fmt: skip
        rows = on(rows, sharding)
        rule = rule_of(case.method, drafter)
        if part == "generate":
            return generate_jit.trace(target, drafter, rows, rule, outputs, slots)
        begun = prefill_jit.trace(target, drafter, rows, slots)
        if part == "prefill":
            return begun
        state = on(begun.out_info, sharding)
        return step_jit.trace(target, drafter, rule, state)


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


def compiled(case: Case, part: str = "generate") -> Compiled:
    """Compiles a case."""
    begin = time.perf_counter()
    trace = traced(case, part)
    after_trace = time.perf_counter()
    platform = DEVICES[case.device].platform
    with traced_for(DEVICES[case.device]):
        lowered = trace.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
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
    """v5e, v6e or h100."""
    models: tuple[str, ...] = tuple(MODELS)
    methods: tuple[str, ...] = METHODS
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
                case = Case(
                    asked.device, model, method, asked.prompt, asked.rows, stack=asked.stack
                )
                yield f"{asked.device} {model} {method} {part}", compiled(case, part)


def main() -> None:
    """Prints a line a program."""
    asked = tyro.cli(Asked)
    rows = {}
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
        with contextlib.suppress(FileNotFoundError):
            rows = json.loads(Path(asked.json).read_text(encoding="utf-8")) | rows
        Path(asked.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
