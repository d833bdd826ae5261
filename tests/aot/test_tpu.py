"""Kernels and programs compiled for TPUs, which a machine without one can with the package libtpu.

pip install 'libtpu==0.0.42.*'  # that goes with jax 0.10.2
JAX_PLATFORMS=cpu pytest tests/aot -m "slow or not slow"
"""

import importlib.util
import os

import jax
import pytest

from pallas_kernels import shapes
from pallas_kernels.platform import DEVICES, traced_for
from pallas_kernels.tree_attention import tpu
from tests.aot.programs import TOPOLOGIES, case_of, compiled, on
from tests.memory_table import drafter_of, plan_of

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
    own = [shape for shape in shapes.named() if shape.model == model]
    assert len(own) > 20
    for shape in own:
        with traced_for(DEVICES[device]):
            traced = jax.jit(tpu.tree_attention).trace(on(shapes.abstract(shape), device))
            assert "custom-call" in traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize("method", ["none", "chain"])
def test_a_step_has_no_branch_and_copies_no_cache(method):
    case = case_of(SMALL, method)
    made = compiled("v5e", case, "step")
    assert made.operations.get("conditional", 0) == 0
    # Layers; of a tree also the ancestors of its nodes, and a gather that is compiled as a loop.
    assert made.operations["while"] <= 1 + 2 * (method != "none")
    with traced_for(DEVICES["v5e"]):
        planned = plan_of(case, drafter_of(case))
    assert made.temporary_bytes <= 1.25 * planned.trees
    assert made.aliased_bytes >= planned.caches + planned.draft_caches


def test_a_prefill_is_a_loop_over_layers_and_takes_what_is_planned():
    case = case_of(SMALL, "none")
    made = compiled("v5e", case, "prefill")
    assert made.operations["while"] == 1
    assert made.operations.get("conditional", 0) == 0
    with traced_for(DEVICES["v5e"]):
        planned = plan_of(case, drafter_of(case))
    assert made.temporary_bytes <= 1.25 * planned.prompts
