"""Every kernel is lowered for its platform, in every named shape, with no device at hand."""

import contextlib

import jax
import pytest

from pallas_kernels import shapes
from pallas_kernels.platform import DEVICES, traced_for
from pallas_kernels.tree_attention import hopper, tpu, triton
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from tests.cases import slow_among

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
KERNELS = {"tpu": ("tpu", tpu), "hopper": ("cuda", hopper), "triton": ("cuda", triton)}


@contextlib.contextmanager
def a_device(platform):
    """Newer versions of jax lower for a GPU only where one is named."""
    if platform != "cuda" or jax.__version_info__ < (0, 11):
        yield
        return
    with traced_for(DEVICES["h100"]):
        yield


def lowered(name, at):
    """A kernel lowered for its platform."""
    platform, module = KERNELS[name]
    with a_device(platform):
        return jax.jit(module.tree_attention).trace(at).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("name", slow_among(KERNELS, "hopper"))
@pytest.mark.parametrize("model", slow_among(shapes.MODELS, "llama-3.2-1b", "bundled"))
def test_every_named_shape_is_lowered(name, model):
    own = [shape for shape in shapes.named() if shape.model == model]
    assert len(own) > 20
    for shape in own:
        assert "custom_call" in lowered(name, shapes.abstract(shape)).as_text()


@pytest.mark.parametrize("name", ["tpu", "triton"])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 8)])
def test_other_dtypes_are_lowered(name, dtype, bits):
    shape = shapes.Shape("llama-3.2-1b", 8, 64, 4096, dtype, bits)
    assert "custom_call" in lowered(name, shapes.abstract(shape)).as_text()


@pytest.mark.parametrize("name", KERNELS)
def test_windows_and_caps_are_lowered(name):
    shape = shapes.Shape("llama-3.1-8b", 8, 64, 4096)
    at = shapes.abstract(shape)._replace(first=jax.ShapeDtypeStruct((8, 64), "int32"))
    platform, module = KERNELS[name]
    with a_device(platform):
        traced = jax.jit(lambda at: module.tree_attention(at._replace(soft_cap=30.0))).trace(at)
        assert "custom_call" in traced.lower(lowering_platforms=(platform,)).as_text()


def in_pages(at, size):
    """The shapes of operands whose rows have pages of `size` slots of a cache of twice as many."""
    rows, count = at.query.shape[0], at.slots // size
    kv_heads, dim = at.prefix.keys.shape[1:3]
    held = [(kv_heads, dim, size), (kv_heads, size, dim)]
    keys, values = (
        jax.ShapeDtypeStruct((2 * rows * count, *each), at.prefix.keys.dtype) for each in held
    )
    pages = jax.ShapeDtypeStruct((rows, count), "int32")
    return at._replace(prefix=at.prefix._replace(keys=keys, values=values, pages=pages))


@pytest.mark.parametrize("size", [128, 1024])
@pytest.mark.parametrize("name", KERNELS)
def test_pages_are_lowered(name, size):
    at = in_pages(shapes.abstract(shapes.Shape("llama-3.1-8b", 8, 64, 4096)), size)
    assert "custom_call" in lowered(name, at).as_text()


@pytest.mark.parametrize("name", KERNELS)
def test_sixteen_layers_hold_a_kernel_once(name):
    """It is traced and lowered once for a shape: the second copy is that of the first layer's."""
    at, run = shapes.abstract(shapes.Shape("llama-3.1-8b", 1, 16, 512)), IMPLEMENTATIONS[name].run

    def held(layers):
        def program(at):
            query = at.query
            for _ in range(layers):
                query = run(at._replace(query=query))
            return query

        platform, _ = KERNELS[name]
        with a_device(platform):
            traced = jax.jit(program).trace(at).lower(lowering_platforms=(platform,))
        return traced.as_text().count("tpu_custom_call" if platform == "tpu" else "custom_call @")

    assert 1 <= held(16) <= 2 * held(1)
