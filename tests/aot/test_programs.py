"""Kernels and programs compiled for hardware that is not here.

pip install -e '.[tpu]'   # and '.[cuda]', 4 GB
JAX_PLATFORMS=cpu pytest tests/aot -m "slow or not slow"
"""

import importlib.util
import json
import os
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels
from benchmarks.accelerator.operands import SHAPES, make
from benchmarks.programs.ahead import case_of, layer_kernels, made
from benchmarks.programs.memory_plan import drafter_of, plan_of
from pallas_kernels import shapes
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from specjax.checkpoints.huggingface import save_model
from specjax.cli.main import main
from specjax.engine import programs
from specjax.engine.ahead import engine_of_shapes
from specjax.goodput.bursts import BURST
from specjax.measure.compile_ahead import KINDS, abstract, compiled, hardware, on
from specjax.models.config import Experts, ModelConfig
from specjax.models.experts import mixture
from specjax.models.kv_cache import KVCache
from tests.conftest import tiny_model
from tests.pairs import near
from tests.test_lowering import in_pages

SMALL = "llama-3.2-1b"
HAND = "JAX_PLATFORMS is not cpu" if os.environ.get("JAX_PLATFORMS") != "cpu" else None


def missing(kind):
    """Why nothing is compiled for a kind of device here."""
    package = KINDS[kind].package
    found = importlib.util.find_spec(package) is not None
    return HAND if found else f"the package {package} is not installed, which compiles for {kind}"


def of_kind(kind, *more):
    reason = missing(kind)
    return pytest.param(kind, *more, marks=() if reason is None else pytest.mark.skip(reason))


pytestmark = pytest.mark.slow
EVERY = [of_kind(kind) for kind in KINDS]
NAMED = [
    of_kind(kind, name, model)
    for kind, names in {"v5e": ["tpu"], "v6e": ["tpu"], "h100": ["hopper", "triton"]}.items()
    for name in names
    for model in shapes.MODELS
]


@pytest.mark.parametrize(("kind", "implementation", "model"), NAMED)
def test_every_named_shape_of_the_kernel_compiles(kind, implementation, model):
    own = [shape for shape in shapes.named() if shape.model == model]
    assert len(own) > 20
    found = hardware(kind)
    kernel = jax.jit(IMPLEMENTATIONS[implementation].run)
    for shape in own:
        made = compiled(found, kernel, on(shapes.abstract(shape), found.mesh()))
        assert made.operations["custom-call"]
        if shape.slots == max(shapes.SLOTS):  # of fewer, what few rows' shares leave may be more
            assert made.temporary_bytes < shape.cache_bytes


@pytest.mark.parametrize("size", [128, 1024])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        of_kind("v5e", "tpu"),
        of_kind("v6e", "tpu"),
        of_kind("h100", "hopper"),
        of_kind("h100", "triton"),
    ],
)
def test_pages_are_read_where_they_lie(kind, name, size):
    shape = shapes.Shape("llama-3.1-8b", 8, 64, 4096)
    found = hardware(kind)
    at = on(in_pages(shapes.abstract(shape), size), found.mesh())
    made = compiled(found, jax.jit(IMPLEMENTATIONS[name].run), at)
    assert made.operations["custom-call"]
    assert made.temporary_bytes < shape.cache_bytes / 2


@pytest.mark.parametrize(
    ("kind", "name"), [of_kind("v5e", "tpu"), of_kind("v6e", "tpu"), of_kind("h100", "triton")]
)
def test_heads_with_sinks_compile(kind, name):
    """As gpt-oss has them, whose heads have 64 features."""
    at = shapes.abstract(shapes.Shape(SMALL, 8, 64, 4096))
    sinks = jax.ShapeDtypeStruct(at.query.shape[:2], jnp.float32)
    found = hardware(kind)
    made = compiled(
        found, jax.jit(IMPLEMENTATIONS[name].run), on(at._replace(sinks=sinks), found.mesh())
    )
    assert made.operations["custom-call"]


MIXTURE = ModelConfig(
    vocab_size=1024, hidden_size=2048, intermediate_size=6144, num_layers=1, num_heads=32,
    num_kv_heads=4, head_dim=128, experts=Experts(128, 8, 768),
)  # fmt: skip
"""A layer of Qwen3-30B-A3B."""


@pytest.mark.parametrize("kind", EVERY)
def test_experts_are_read_where_they_lie(kind):
    """Those of a layer, 1.2 GB, by one node and by 64."""
    found = hardware(kind)
    model = on(abstract(MIXTURE, "bfloat16"), found.mesh())
    layer = model.layer(0)
    for columns in (1, 64):
        x = on(jax.ShapeDtypeStruct((2048, columns), jnp.float32), found.mesh())
        program = jax.jit(lambda layer, x: mixture(MIXTURE, layer, x))
        made = compiled(found, program, layer, x)
        assert made.operations["custom-call"] >= 2
        assert made.temporary_bytes < 30e6
        if kind == "h100":  # 8 of one node, 21 of 64 in jax 0.10.2
            assert sum(made.kernels.values()) <= (10 if columns == 1 else 24)


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_experts_in_a_stack_are_read_where_they_lie(kind):
    """Of 48 layers, over four devices: of a slice a kernel was given a copy, 97 MB each."""
    found = made(f"{kind}:2x2", case_of("qwen3-30b-a3b", "none"), "step", model=4)
    assert found.operations["while"] == 1
    assert found.temporary_bytes < 10e6
    assert found.collectives["all-reduce"] <= 4


@pytest.mark.parametrize("kind", [of_kind("h100")])
def test_wide_heads_of_float32_fit_in_shared_memory(kind):
    at = make(SHAPES["head of 256"], jnp.float32)
    found = hardware(kind)
    assert compiled(found, jax.jit(IMPLEMENTATIONS["triton"].run), on(at, found.mesh()))


def planned(kind, case):
    with hardware(kind).traced():
        return plan_of(case, drafter_of(case))


LOOPS = {"none": 0, "chain": 0, "specexec": 1, "pool": 0}
"""Of a step that the data ends: growth."""
COUNTED = {"none": 1, "chain": 2, "specexec": 4, "pool": 6}
"""More loops of a step on a TPU, whose text does not say which are counted: layers, the walk of a
pool's rule, and gathers that are compiled as loops."""


@pytest.mark.parametrize("method", LOOPS)
@pytest.mark.parametrize("kind", EVERY)
def test_a_step_has_no_branch_and_copies_no_cache(kind, method):
    case = case_of(SMALL, method)
    found = made(kind, case, "step")
    assert found.operations.get("conditional", 0) == 0
    loops = found.operations.get("while", 0)
    if kind == "h100":
        assert loops - found.counted_loops == LOOPS[method]
    else:
        assert loops <= LOOPS[method] + COUNTED[method]
    plan = planned(kind, case)
    assert found.temporary_bytes <= 1.25 * plan.trees
    assert found.aliased_bytes >= plan.caches + plan.draft_caches


@pytest.mark.parametrize(
    ("kind", "model", "method", "most"),
    [
        of_kind("h100", "llama-3.1-8b", "none", 17),
        of_kind("h100", "llama-3.1-8b", "specexec", 17),
        of_kind("h100", "llama-3.2-1b", "chain", 17),
        of_kind("h100", "llama-3.2-1b", "specexec", 18),
    ],
)
def test_a_layer_is_no_more_kernels(kind, model, method, most):
    assert layer_kernels(kind, case_of(model, method)) <= most


@pytest.mark.parametrize(
    ("kind", "name"),
    [of_kind("v5e", "tpu"), of_kind("h100", "hopper"), of_kind("h100", "triton")],
)
def test_a_step_with_kernels_has_one_a_layer(kind, name):
    case = case_of(SMALL, "none")
    plain = made(kind, case, "step")
    with hardware(kind).traced():
        pallas_kernels.use(name)
    try:
        found = made(kind, case, "step")
    finally:
        pallas_kernels.use("auto")
    layers = case.config.num_layers if kind == "h100" else 1  # in a loop
    more = found.operations["custom-call"] - plain.operations.get("custom-call", 0)
    assert more == layers
    assert found.operations.get("conditional", 0) == 0
    plan = planned(kind, case)
    assert found.temporary_bytes <= 1.25 * plan.trees
    assert found.aliased_bytes >= plan.caches


@pytest.mark.parametrize("kind", EVERY)
def test_a_prefill_takes_what_is_planned(kind):
    case = case_of(SMALL, "none")
    found = made(kind, case, "prefill")
    # A TPU runs layers as a loop.
    assert found.operations.get("while", 0) == (kind != "h100")
    assert found.operations.get("conditional", 0) == 0
    plan = planned(kind, case)
    assert found.temporary_bytes <= 1.25 * plan.prompts


@pytest.mark.parametrize("kind", [of_kind("h100")])
def test_layers_with_sinks_hold_nothing_of_a_prompt_but_its_cache(kind):
    """As gpt-oss has them: neither their queries nor what their attention is written to."""
    case = case_of("gpt-oss-20b", "none")

    def temporaries(layers: int) -> int:
        windows = case.config.windows[:layers]
        config = replace(case.config, num_layers=layers, windows=windows, experts=None)
        return made(kind, case._replace(config=config), "prefill").temporary_bytes

    assert temporaries(8) < temporaries(4) + 2**20  # 40 and 32 MiB a layer, before


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_a_layer_sums_twice_on_a_mesh(kind):
    found = made(f"{kind}:2x2", case_of(SMALL, "none"), "step", model=4)
    # Embeddings, and in the loop over layers attention and the MLP; logits are gathered.
    assert sum(found.collectives.values()) <= 4
    assert found.collectives["all-reduce"] + found.collectives.get("all-reduce-start", 0) >= 3


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_a_kernel_that_needs_too_much_memory_is_refused(kind):
    size = 2**14

    def kernel(x_ref, o_ref, held):
        held[...] = x_ref[...]
        o_ref[...] = held[...]

    @jax.jit
    def called(x):
        whole = pl.BlockSpec((size, 1024), lambda: (0, 0))
        return pl.pallas_call(
            kernel, out_shape=x, in_specs=[whole], out_specs=whole,
            scratch_shapes=[pltpu.VMEM((size, 1024), jnp.float32)],
        )(x)  # fmt: skip

    found = hardware(kind)
    x = jax.ShapeDtypeStruct((size, 1024), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem|memory"):
        compiled(found, called, on(x, found.mesh()))


def planted(kind, patch, rows=1):
    """A plain step of a program with a defect."""
    case = case_of(SMALL, "none", rows)
    jax.clear_caches()
    with patch:
        found = made(kind, case, "step")
    jax.clear_caches()
    return found, planned(kind, case)


@pytest.mark.parametrize("kind", EVERY)
def test_a_copy_of_the_cache_would_be_seen(kind):
    keep = KVCache.keep

    def copied(self, *rest):
        made = keep(self, *rest)
        return jax.tree.map(lambda x: x + jnp.flip(x) if x.ndim > 3 else x, made)

    found, plan = planted(kind, mock.patch.object(KVCache, "keep", copied), rows=8)
    assert found.temporary_bytes > 1.25 * plan.trees


@pytest.mark.parametrize("kind", EVERY)
def test_a_branch_would_be_seen(kind):
    keep = KVCache.keep

    def branched(self, new, path, count):
        def twice(cache):
            return jax.tree.map(lambda x: x * 2, cache)

        made = keep(self, new, path, count)
        return lax.cond(count.sum() > 3, twice, lambda cache: cache, made)

    found, _ = planted(kind, mock.patch.object(KVCache, "keep", branched))
    assert found.operations["conditional"] >= 1


@pytest.fixture
def pair(tmp_path):
    target = tiny_model(vocab_size=128)
    save_model(target, tmp_path / "target", dtype="float32")
    save_model(near(target, 1), tmp_path / "draft", dtype="float32")
    return tmp_path / "target", tmp_path / "draft"


def asked(capsys, *command):
    code = main([*map(str, command), "--compile-for", "v5e", "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_info_compiles_what_a_server_would_run(kind, pair, capsys):
    """Of 32 rows all nodes of their chains, and prompts: off a CPU columns are nearly free."""
    target, draft = pair
    command = "info", "--model", target, "--draft", draft, "--length", 100
    code, report = asked(capsys, *command, "--serve", "--rows", 32, "--settings", "chain:7")
    assert (code, report["hardware"]) == (0, kind)
    names = "setting", "rows", "columns", "prompt_columns"
    assert [tuple(map(each.get, names)) for each in report["programs"]] == [
        ("chain:7", 1, 8, 0), ("chain:7", 8, 64, 0), ("chain:7", 32, 256, 0),
        ("none", 1, 1, 0), ("none", 8, 8, 0), ("none", 32, 32, 0),
        ("chain:7", 32, 256, 256), ("none", 32, 32, 256),
    ]  # fmt: skip
    assert all(each["fits"] and each["aliased_bytes"] > 0 for each in report["programs"])


@pytest.mark.parametrize(
    ("kind", "data"), [of_kind("v5e", 1), of_kind("v5e", 2), of_kind("h100", 1)]
)
def test_no_program_of_a_server_copies_a_cache(kind, data):
    """Layers are stacked on a TPU; pages, and rows over several devices, are read and written where
    they lie, pages without a copy of a layer's.
    """
    found, rows = hardware(kind if kind == "h100" else f"{kind}:2x2"), 16
    mesh = found.mesh(data=data, model=len(found.devices) // data)
    model = tiny_model(num_layers=3, num_heads=8, num_kv_heads=4, head_dim=128, max_positions=2**15)
    own = engine_of_shapes(
        found, mesh, model.config, [tiny_model().config], "bfloat16",
        ["none", "chain:3"], rows, 20_000, 0.0,
    )  # fmt: skip
    cache = own.state.decode.cache
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((cache.keys, cache.values)))
    held //= len(found.devices)
    shapes_here = {str(x.sharding.shard_shape(x.shape))[1:-1].replace(" ", "")
                   for x in jax.tree.leaves((cache.keys, cache.values))}  # fmt: skip
    step = partial(programs.advance, width=16, setting="none")
    control = (rows, 3), (), (), (2, 2)
    cases = {
        "begin": (programs.begin, (2,)),
        "extend": (partial(programs.extend, columns=None, scored=False), (1, 2), (1, 8)),
        "step": (step, *control),
        "mixed": (step, *control, (BURST, 1, 10)),
    }
    if data == 1:  # of several devices rows take nothing over, and one prompt is read at a time
        several = partial(programs.extend, columns=16, scored=False)
        cases |= {"several": (several, (2, 2), (2, 8)), "copy": (programs.copy, (4,))}
    for name, (run, *given_as) in cases.items():

        def call(target, drafter, state, *given, run=run):
            return run(target, drafter, state, own.setup, *given)

        kinds = [jnp.int32] * len(given_as)
        if name in ("step", "mixed"):
            kinds[2:4] = jnp.bool_, jnp.float32
        given = (
            on(jax.ShapeDtypeStruct(*each), mesh) for each in zip(given_as, kinds, strict=True)
        )
        with found.traced():
            lowered = jax.jit(call, donate_argnums=2).lower(
                own.target, own.drafter, own.state, *given
            )
            program = lowered.compile()
        size = program.memory_analysis()
        assert size.alias_size_in_bytes >= held, name
        assert size.temp_size_in_bytes < held / (2 if own.setup.paging is None else 20), name
        copied = re.findall(r"\w+\[([\d,]+)\][^ ]* copy(?:-start)?\(", program.as_text())
        assert not shapes_here & {*copied}, name


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_info_compiles_what_a_pair_would_run(kind, pair, capsys, monkeypatch):
    target, draft = pair
    command = "info", "--model", target, "--draft", draft, "--length", 100
    code, report = asked(capsys, *command)
    assert code == 0
    assert (report["hardware"], report["devices"], report["dtype"]) == (kind, 1, "bfloat16")
    names = [one["name"] for one in report["programs"]]
    assert names[0] == "plain"
    assert [name.rsplit(" ", 1)[1] for name in names[1:]] == ["0", "0.8"]
    for one in report["programs"]:
        assert one["fits"]
        held = one["argument_bytes"] + one["temporary_bytes"]
        assert 0 < one["argument_bytes"] < one["total_bytes"] < held + 10_000
    small = KINDS[kind]._replace(memory_bytes=1000)
    monkeypatch.setitem(KINDS, kind, small)
    jax.clear_caches()  # as in another process, which finds those on the disk alone
    looked_up = []
    jax.monitoring.register_event_listener(lambda name, **_: looked_up.append(name))
    code, report = asked(capsys, *command[:3], "--length", 100)
    assert code == 1
    assert not report["programs"][0]["fits"]
    assert report["programs"][0]["compile_seconds"] > 0
    assert "/jax/compilation_cache/cache_hits" not in looked_up  # it was compiled anew


@pytest.mark.parametrize("kind", [of_kind("v5e")])
def test_check_pair_compiles_too(kind, pair, capsys):
    code, report = asked(capsys, "check-pair", *pair)
    found = report["drafts"][0]["findings"]
    assert code == 0
    assert [one["what"].split(",")[0] for one in found if "v5e" in one["what"]] == [kind] * 3
    assert not any(one["what"] == "memory" for one in found)
