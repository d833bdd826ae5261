"""The planned memory of a generation beside what its compiled program takes, over many shapes.

    python -m benchmarks.programs.memory_plan

Programs are compiled for models of which there are only shapes, so that nothing is allocated.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.generate import generate_jit
from specjax.decoding.request import Room, room, rule_of
from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.plain import PlainDrafter
from specjax.measure.compile_ahead import Texts, abstract, abstract_draft, abstract_request
from specjax.models import memory
from specjax.models.config import Experts, Latent, ModelConfig
from specjax.models.memory import readable
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT

LLAMA_8B = ModelConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=3, num_heads=32,
    num_kv_heads=8, head_dim=128, max_positions=131_072, eos_ids=(0,),
)  # fmt: skip
"""Of its 32 layers three: temporaries do not depend on their number."""
THIN = dataclasses.replace(
    LLAMA_8B, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64,
)  # fmt: skip
SMALL = dataclasses.replace(THIN, vocab_size=4096)
MIXTURE = dataclasses.replace(
    SMALL, hidden_size=1024, num_heads=8, experts=Experts(32, 8, 384), intermediate_size=2048
)
LATENTS = dataclasses.replace(
    LLAMA_8B, hidden_size=2048, intermediate_size=10_944, num_layers=2, num_heads=16,
    num_kv_heads=1, head_dim=576, rotary_dim=64, latent=Latent(512, 128, 128),
)  # fmt: skip
"""As DeepSeek-V2-Lite has them, without experts."""
DRAFT = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 1, "num_heads": 2,
         "num_kv_heads": 1}  # fmt: skip


class Case(NamedTuple):
    """A target, a way of drafting for it, rows, tokens of the prompts and new ones."""

    config: ModelConfig
    method: str
    rows: int
    prompt: int
    new: int = 32
    rule: str = "auto"
    dtype: str = "float32"
    draft: Mapping[str, int] = DRAFT


CASES = {
    "prefill of 4,096": Case(LLAMA_8B, "none", 1, 4096),
    "prefill of 8,192": Case(LLAMA_8B, "none", 1, 8192),
    "prefill of 16,384": Case(LLAMA_8B, "none", 1, 16_384),
    "prefill of 24 layers": Case(dataclasses.replace(LLAMA_8B, num_layers=24), "none", 1, 16_384),
    "prefill of 8 rows": Case(LLAMA_8B, "none", 8, 1024),
    "prefill in bfloat16": Case(LLAMA_8B, "none", 1, 4096, dtype="bfloat16"),
    "long texts": Case(LLAMA_8B, "chain", 4, 512, 4000),
    "long texts of 12 layers": Case(
        dataclasses.replace(LLAMA_8B, num_layers=12), "none", 4, 32, 4000
    ),
    "long prompts, small": Case(SMALL, "chain", 32, 1024),
    "plain": Case(THIN, "none", 32, 32),
    "chain": Case(THIN, "chain", 32, 32),
    "chain, naive": Case(THIN, "chain", 32, 32, rule="naive"),
    "chain, multi-step": Case(THIN, "chain", 32, 32, rule="multi-step"),
    "tree": Case(THIN, "tree", 32, 32),
    "tree, recursive": Case(THIN, "tree", 32, 32, rule="recursive"),
    "tree, one row": Case(THIN, "tree", 1, 32),
    "tree in bfloat16": Case(THIN, "tree", 8, 32, dtype="bfloat16"),
    "pool": Case(THIN, "pool", 32, 32),
    "pool, naive": Case(THIN, "pool", 32, 32, rule="naive"),
    "specexec": Case(THIN, "specexec", 32, 32),
    "specexec, one-hot": Case(THIN, "specexec", 8, 32, rule="one-hot"),
    "specexec of 255": Case(THIN, "specexec:255", 1, 32),
    "prefill of a mixture": Case(MIXTURE, "none", 1, 4096),
    "prefill of a mixture in bfloat16": Case(MIXTURE, "none", 4, 512, dtype="bfloat16"),
    "tree of a mixture": Case(MIXTURE, "tree", 32, 128, 128),
    "tree of a wide mixture": Case(
        dataclasses.replace(MIXTURE, experts=Experts(8, 2, 2048)), "tree", 32, 64
    ),
    "prefill of latents": Case(LATENTS, "none", 1, 4096),
    "tree of latents": Case(LATENTS, "tree", 8, 512, 128),
    "small vocabulary": Case(SMALL, "tree", 32, 128, 128),
    "small vocabulary, specexec": Case(SMALL, "specexec", 32, 128, 128),
}


def drafter_of(case: Case) -> Any:
    """The drafter, of shapes alone."""
    plain = {"experts": None, "windows": (), "sinks": False, "latent": None, "rotary_dim": None}
    config = dataclasses.replace(case.config, **plain, query_scale=None, **case.draft)
    models = [abstract_draft(config, case.dtype)] * (3 if case.method == "pool" else 1)

    def made(models: list[Model]) -> Any:
        match case.method.split(":"):
            case ["chain"]:
                return ExpansionDrafter.of(models, (1,) * 7)
            case ["tree"]:
                return ExpansionDrafter.of(models, (2, 1, 1, 1, 1, 1, 1), children=DISTINCT)
            case ["pool"]:
                return ExpansionDrafter.of(models, (1,) * 5)
            case ["specexec", *budget]:
                nodes = int(budget[0]) if budget else 15
                growth = Growth(nodes, beams=1 if nodes < 31 else 4, width=8, depth=16)
                return BestFirstDrafter(models[0], jnp.ones(2), growth)
        raise ValueError(case.method)

    if case.method == "none":
        return PlainDrafter(case.config.vocab_size)
    return jax.eval_shape(made, models)


class Found(NamedTuple):
    """Bytes beside the weights."""

    planned: int
    compiled: int


def arguments(case: Case, drafter: Any, target: Model) -> tuple[Any, ...]:
    """Those of `generate_jit`, of shapes alone."""
    return tuple(abstract_request(target, drafter, texts_of(case), case.rule))


def texts_of(case: Case) -> Texts:
    """The texts that a case's program is for."""
    return Texts(case.rows, case.prompt, case.new)


def lowered(case: Case, drafter: Any) -> Any:
    """The whole program of a case, not yet compiled."""
    return generate_jit.lower(*arguments(case, drafter, abstract(case.config, case.dtype)))


def room_of(case: Case, drafter: Any) -> Room:
    """The sizes that the program of a case has."""
    return room(case.prompt, case.new, drafter.window, case.config.max_positions)


def plan_of(case: Case, drafter: Any) -> memory.Plan:
    """What the plan says."""
    width, _, slots = room_of(case, drafter)
    return memory.plan(
        memory.load_of(abstract(case.config, case.dtype)), memory.loads_in(drafter), case.rows,
        width, slots, drafter.num_slots, rule_of(case.rule, drafter).live_distributions,
    )  # fmt: skip


def found(case: Case) -> Found:
    """What the plan says, and what XLA will allocate for temporaries and results."""
    drafter = drafter_of(case)
    taken = lowered(case, drafter).compile().memory_analysis()
    planned = plan_of(case, drafter)
    compiled = taken.temp_size_in_bytes + taken.output_size_in_bytes
    return Found(planned.beside_weights, compiled)


def lines() -> Iterator[str]:
    """A line a shape."""
    for name, case in CASES.items():
        planned, compiled = found(case)
        yield (
            f"{name:28} planned {readable(planned):>10} compiled {readable(compiled):>10} "
            f"ratio {planned / compiled:.3f}"
        )


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
