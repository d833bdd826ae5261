"""Kernels and programs compiled for TPUs, which a machine without one can with the package libtpu.

pip install 'libtpu==0.0.42.*'  # that goes with jax 0.10.2
JAX_PLATFORMS=cpu pytest tests/aot -m "slow or not slow"
"""

import importlib.util
import os

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import shapes
from pallas_kernels.platform import DEVICES, traced_for
from pallas_kernels.tree_attention import tpu
from specjax.models import memory
from specjax.models.stacking import stacked
from tests.aot.programs import (
    MODELS,
    TOPOLOGIES,
    Case,
    compiled,
    drafter_of,
    model_of,
    on,
    room_of,
    rule_of,
    topology,
)

REASON = (
    "the package libtpu is not installed, which compiles for TPUs"
    if importlib.util.find_spec("libtpu") is None
    else "JAX_PLATFORMS is not cpu"
    if os.environ.get("JAX_PLATFORMS") != "cpu"
    else ""
)
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.slow]
SMALL = "llama-3.2-1b"


@pytest.mark.parametrize("device", TOPOLOGIES)
@pytest.mark.parametrize("model", shapes.MODELS)
def test_every_named_shape_of_the_kernel_compiles(device, model):
    sharding = NamedSharding(Mesh(topology(device)[:1], ("x",)), P())
    own = [shape for shape in shapes.named() if shape.model == model]
    assert len(own) > 20
    for shape in own:
        with traced_for(DEVICES[device]):
            traced = jax.jit(tpu.tree_attention).trace(on(shapes.abstract(shape), sharding))
            assert "custom-call" in traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize("method", ["none", "chain"])
def test_a_step_has_no_branch_and_copies_no_cache(method):
    case = Case("v5e", SMALL, method)
    made = compiled(case, "step")
    assert made.operations.get("conditional", 0) == 0
    # Layers; of a tree also the ancestors of its nodes, and a gather that is compiled as a loop.
    assert made.operations["while"] <= 1 + 2 * (method != "none")
    with traced_for(DEVICES["v5e"]):
        drafter, config = drafter_of(method, MODELS[SMALL]), MODELS[SMALL]
        width, _, slots = room_of(case, drafter)
        planned = memory.plan(
            memory.load_of(jax.eval_shape(stacked, model_of(config))), memory.loads_in(drafter),
            case.rows, width, slots, drafter.num_slots, rule_of(method, drafter).live_distributions,
        )  # fmt: skip
    assert made.temporary_bytes <= 1.25 * planned.trees
    assert made.aliased_bytes >= planned.caches + planned.draft_caches


def test_prompts_go_through_splash_attention():
    made = compiled(Case("v5e", SMALL, "none"), "prefill")
    assert made.operations["custom-call"] >= 1
    assert made.operations["while"] == 1
    assert made.operations.get("conditional", 0) == 0
