"""The product of weights with few columns on a CPU, in every form that this processor has."""

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels.cpu import (
    MOST_COLUMNS,
    cpu_experts,
    cpu_matmul,
    cpu_matmuls,
    library,
    reference,
    unable,
)
from pallas_kernels.cpu.library import Status
from specjax.models import layers
from specjax.models.quantized import packed, with_activations

FORMS = (
    "portable", "neon", "neon_dotprod", "avx2", "avx512", "avx512_vnni", "avx512_bf16",
)  # fmt: skip
SOURCES = Path(library.__file__).parent / "src"
KINDS = {
    "float32": (32, False, None, False), "bfloat16": (16, True, None, False),
    "bfloat16 times float32": (16, False, None, False),
    "int8": (8, False, None, False), "int8 times bfloat16": (8, True, None, False),
    "int8 of groups of 32": (8, False, 32, False),
    "int8 of groups of 32 times bfloat16": (8, True, 32, False),
    "int8 of groups of 16": (8, False, 16, False),
    "int8 of groups of 16 times bfloat16": (8, True, 16, False),
    "int8 of groups of 48 with offsets": (8, False, 48, True),
    "int8 of groups of 48 with offsets times bfloat16": (8, True, 48, True),
    "int8 with offsets": (8, False, None, True),
    "int8 of groups of 96 with offsets times bfloat16": (8, True, 96, True),
    "int4": (4, False, None, False), "int4 times bfloat16": (4, True, None, False),
    "int4 of groups of 32": (4, False, 32, False),
    "int4 of groups of 32 times bfloat16": (4, True, 32, False),
    "int4 of groups of 64": (4, False, 64, False),
    "int4 of groups of 64 times bfloat16": (4, True, 64, False),
    "int4 of groups of 32 with offsets": (4, False, 32, True),
    "int4 of groups of 32 with offsets times bfloat16": (4, True, 32, True),
}  # fmt: skip
"""Bits of a weight, whether x is rounded, the inputs of a group where it is not a row, and whether
groups have an offset."""
PLAIN = {"rounded": False, "quantized": False, "has_table": False}
SCALES = jnp.bfloat16, jnp.float32, jnp.float16
_NONE = library.status().form is None
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
needs_it = pytest.mark.skipif(_NONE, reason=library.status().line)


def here() -> list[str]:
    found = []
    for form in () if _NONE else FORMS:
        try:
            library.select(form)
        except ValueError:
            continue
        finally:
            library.select(None)
        found.append(form)
    return found


@pytest.fixture(params=here() or [pytest.param("none", marks=needs_it)])
def form(request):
    library.select(request.param)
    yield request.param
    library.select(None)


def operands(kind, outputs, inputs, columns, seed=0):
    """Weights, x, scales and offsets if there are any; and whether x is rounded."""
    bits, rounded, group, has_offset = KINDS[kind]
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.normal(size=(inputs, columns)), jnp.float32)
    if bits >= 16:
        dtype = jnp.float32 if bits == 32 else jnp.bfloat16
        return jnp.asarray(random.normal(size=(outputs, inputs)), dtype), x, None, None, rounded
    codes = random.integers(0, 256, (outputs, inputs * bits // 8))
    scale = 0.01 + 0.01 * random.random((outputs, inputs // (group or inputs)))
    scale[::3] *= 1e-5  # a float16 of less digits
    dtype = SCALES[seed % 3]
    offset = jnp.asarray(random.normal(size=scale.shape) * scale, dtype) if has_offset else None
    return jnp.asarray(codes, jnp.uint8), x, jnp.asarray(scale, dtype), offset, rounded


def exact(weights, x, scale, offset, rounded):
    """The product in float64, and for each of its entries the sum of the terms' sizes."""
    x, after = np.asarray(x), 1.0
    if scale is None:
        numbers = np.asarray(weights.astype(jnp.float32))
    else:
        codes, groups = np.asarray(weights), scale.shape[1]
        if codes.shape[1] < len(x):
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        middle = 128 if codes.shape[1] == weights.shape[1] else 8
        wide, more = (
            np.repeat(np.asarray(part, np.float64), len(x) // groups, axis=1)
            for part in (
                scale,
                -middle * np.asarray(scale, np.float64) if offset is None else offset,
            )
        )
        if offset is None and groups == 1 and middle == 128:
            numbers, after = codes - 128.0, wide[:, :1]
        else:
            numbers = (wide * codes + more).astype(np.float32)
    if rounded:
        numbers, x = (np.asarray(each, jnp.bfloat16) for each in (numbers, x))
    numbers, x = (np.asarray(each, np.float64) for each in (numbers, x))
    return after * (numbers @ x), after * (np.abs(numbers) @ np.abs(x))


def product(weights, x, scale, offset, rounded):
    return cpu_matmul(weights, x, scale, offset, rounded=rounded)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_product(form, kind):
    """Odd numbers of rows and inputs: rows begin at any byte, and end in the middle of a block."""
    group = KINDS[kind][2] or 2
    for outputs, inputs, columns in (
        (1, 2, 1), (7, 66, 2), (24, 64, 3), (61, 130, 4), (50, 258, 5), (33, 320, 8), (13, 98, 9),
        (130, 192, 16), (25, 1026, 31), (10, 64, MOST_COLUMNS),
    ):  # fmt: skip
        inputs = -(-inputs // group) * group
        at = operands(kind, outputs, inputs, columns, seed=columns)
        found = product(*at)
        expected, size = exact(*at)
        assert found.dtype == jnp.float32
        assert found.shape == expected.shape
        assert np.all(np.abs(np.asarray(found) - expected) <= 1e-6 * size)
        if columns == 9:
            found = reference.matmul(*at[:-1], rounded=at[-1])
            assert np.all(np.abs(np.asarray(found) - expected) <= 1e-6 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_does_not_depend_on_the_others(form, kind):
    """To the bit: a tree's root gives what plain decoding gives. Large enough for two threads."""
    inputs = 576 if KINDS[kind][2] in (48, 96) else 512
    weights, x, *rest = operands(kind, 1500, inputs, MOST_COLUMNS)
    whole = np.asarray(product(weights, x, *rest))
    for first, columns in ((0, 1), (5, 2), (7, 3), (10, 4), (20, 7), (32, 16), (3, 40)):
        own = product(weights, x[:, first : first + columns], *rest)
        np.testing.assert_array_equal(whole[:, first : first + columns], np.asarray(own))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row_and_column(form, kind):
    inputs = 70 if KINDS[kind][2] is None else 4 * KINDS[kind][2]
    weights, x, scale, offset, rounded = operands(kind, 30, inputs, 6)
    x = x.at[3, 2].set(jnp.nan).at[-1, 4].set(jnp.inf)
    rows = [11] if scale is None else []
    for row in rows:
        weights = weights.at[row, -1].set(jnp.nan)
    found = np.asarray(product(weights, x, scale, offset, rounded))
    expected = np.asarray(reference.matmul(weights, x, scale, offset, rounded=rounded))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))
    assert np.isnan(found[:, 2]).all()
    assert np.isfinite(np.delete(found, rows, axis=0)[:, [0, 1, 3, 5]]).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_tiny_numbers_are_kept_or_are_zero(form, kind):
    """Some processors take denormal numbers of bfloat16 for 0."""
    weights, x, *rest = operands(kind, 9, 64, 5)
    for size in (1e-39, 1e-30, 1e-20):
        found = np.asarray(product(weights, size * x, *rest))
        expected, terms = exact(weights, size * x, *rest)
        assert np.all(np.abs(found - expected) <= 1e-6 * terms + 64 * 1.2e-38)
    assert not np.asarray(product(weights, 0 * x, *rest)).any()


def exact_of_8_bits(codes, x, scale, offset):
    """The product with columns in 8 bits, in float64 but for what these become; and its size."""
    codes, x = np.asarray(codes, np.int64), np.asarray(x)
    inputs, columns = x.shape
    middle = 0 if offset is not None else 128 if codes.shape[1] == inputs else 8
    if codes.shape[1] < inputs:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    whole = ((0, 0), (0, -inputs % 32))
    units = np.pad(x.T, whole).reshape(columns, -1, 32)
    most = np.abs(units).max(axis=2, keepdims=True)
    numbers = np.rint(units * (np.float32(127) / np.maximum(most, 1e-30)))
    codes = np.pad(codes - middle, whole).reshape(len(codes), -1, 32)
    sums = np.einsum("oui,cui->ouc", codes, numbers.astype(np.int64))
    first = 32 * np.arange(codes.shape[1]) // (inputs // scale.shape[1])
    of_units = (most[:, :, 0] / np.float32(127)).T.astype(np.float64)
    sizes = np.einsum("oui,cui->ouc", np.abs(codes), np.abs(numbers).astype(np.int64))
    wide = np.asarray(scale, np.float64)[:, first, None] * of_units
    expected, size = (sums * wide).sum(axis=1), (sizes * wide).sum(axis=1)
    if offset is not None:
        wide = np.asarray(offset, np.float64)[:, first, None] * of_units
        expected += (wide * numbers.sum(axis=2).T).sum(axis=1)
        size += (np.abs(wide) * np.abs(numbers).sum(axis=2).T).sum(axis=1)
    return expected, size


@pytest.mark.parametrize("rounded", [False, True])
def test_codes_of_a_table_stand_for_its_numbers(form, rounded):
    """Also those of experts; a column depends on no other, to the bit."""
    random = np.random.default_rng(1)
    table = jnp.asarray(random.normal(size=16), jnp.float32)
    for outputs, inputs, columns, group in (
        (1, 32, 1, 32), (7, 64, 2, 32), (61, 192, 4, 64), (50, 320, 9, 32), (1500, 512, 64, 32),
    ):  # fmt: skip
        weights = jnp.asarray(random.integers(0, 256, (outputs, inputs // 2)), jnp.uint8)
        scale = jnp.asarray(random.random((outputs, inputs // group)), jnp.bfloat16)
        x = jnp.asarray(random.normal(size=(inputs, columns)), jnp.float32)
        found = np.asarray(cpu_matmul(weights, x, scale, rounded=rounded, table=table))
        codes = np.stack([weights & 15, weights >> 4], axis=-1).reshape(outputs, inputs)
        numbers = np.asarray(table)[codes] * np.repeat(np.asarray(scale, np.float32), group, axis=1)
        wide = np.asarray(x)
        if rounded:
            numbers, wide = (np.asarray(each, jnp.bfloat16) for each in (numbers, wide))
        numbers, wide = (np.asarray(each, np.float64) for each in (numbers, wide))
        size = np.abs(numbers) @ np.abs(wide)
        assert np.all(np.abs(found - numbers @ wide) <= 1e-6 * size)
        own = cpu_matmul(weights, x[:, -1:], scale, rounded=rounded, table=table)
        np.testing.assert_array_equal(found[:, -1:], np.asarray(own))
        chosen = jnp.zeros((1, columns), jnp.int32)
        (alone,) = cpu_experts(
            [weights[None]], x, chosen, [scale[None]], rounded=rounded, table=table
        )
        np.testing.assert_array_equal(np.asarray(alone[:, 0]), found)


@needs_it
def test_a_table_goes_with_codes_of_4_bits_alone():
    weights, x, scale, offset, _ = operands("int4 of groups of 32 with offsets", 8, 64, 3)
    table = jnp.zeros(16)
    for more in ({"offset": offset}, {"quantized": True}):
        with pytest.raises(ValueError, match="tables for codes without offsets"):
            cpu_matmul(weights, x, scale, **more, table=table)
    several = jax.vmap(lambda table: cpu_matmul(weights, x, scale, table=table))
    made = several(jnp.stack([table, jnp.ones(16)]))
    assert not np.asarray(made[0]).any()
    assert np.asarray(made[1]).any()
    eight, x, scale, *_ = operands("int8", 8, 64, 3)
    with pytest.raises(Exception, match="codes of 4 bits alone"):
        jax.block_until_ready(cpu_matmul(eight, x, scale, table=table))


CODED = (
    "int8", "int8 of groups of 32", "int8 with offsets", "int4 of groups of 32",
    "int4 of groups of 64", "int4 of groups of 32 with offsets",
)  # fmt: skip


@pytest.mark.parametrize("kind", CODED)
def test_columns_in_8_bits_are_multiplied_as_integers(kind):
    """Every form gives the same bits."""
    group = KINDS[kind][2] or 2
    for outputs, inputs, columns in ((1, 2, 1), (7, 66, 3), (50, 258, 5), (130, 1090, 15)):
        inputs = -(-inputs // group) * group
        weights, x, scale, offset, _ = operands(kind, outputs, inputs, columns, seed=columns)
        expected, size = exact_of_8_bits(weights, x, scale, offset)
        found = {
            name: np.asarray(cpu_matmul(weights, x, scale, offset, quantized=True))
            for name in here()
            if library.select(name) is None
        }
        library.select(None)
        several = list(found.values())
        if columns == 5:
            several.append(
                np.asarray(reference.matmul(weights, reference.quantized(x), scale, offset))
            )
        for own in several:
            assert np.all(np.abs(own - expected) <= 1e-6 * size)
        for own in found.values():
            np.testing.assert_array_equal(own, found["portable"])


@pytest.mark.parametrize("kind", CODED)
def test_a_column_in_8_bits_does_not_depend_on_the_others(form, kind):
    weights, x, scale, offset, _ = operands(kind, 1500, 512, MOST_COLUMNS)
    call = partial(cpu_matmul, weights, scale=scale, offset=offset, quantized=True)
    whole = np.asarray(call(x))
    for first, columns in ((0, 1), (7, 3), (20, 7), (32, 16)):
        own = call(x[:, first : first + columns])
        np.testing.assert_array_equal(whole[:, first : first + columns], np.asarray(own))


def test_what_is_no_number_in_8_bits_stays_in_its_column(form):
    weights, x, scale, *_ = operands("int8 of groups of 32", 30, 128, 6)
    x = x.at[3, 2].set(jnp.nan).at[-1, 4].set(jnp.inf).at[:32, 1].set(0).at[32:64, 1].set(1e-36)
    for found in (
        cpu_matmul(weights, x, scale, quantized=True),
        reference.matmul(weights, reference.quantized(x), scale),
    ):
        assert np.isnan(found[:, [2, 4]]).all()
        assert np.isfinite(found[:, [0, 1, 3, 5]]).all()


@pytest.mark.parametrize("product", ["auto", "xla"])
@pytest.mark.parametrize("columns", [1, MOST_COLUMNS + 3])
@pytest.mark.parametrize(("activations", "said"), [("int8", "8 bits"), ("bfloat16", "bfloat16")])
def test_linear_multiplies_rounded_activations(activations, said, columns, product):
    """However many there are, and also where the product is XLA's."""
    random = np.random.default_rng(0)
    weight = jax.tree.map(jnp.asarray, packed(random.normal(size=(40, 96)), 4, 32))
    x = jnp.asarray(random.normal(size=(96, columns)), jnp.float32)
    chosen = with_activations(weight, activations)
    assert (chosen.name, weight.name) == (
        f"int4, a scale for each 32 inputs, activations in {said}",
        "int4, a scale for each 32 inputs",
    )
    numbers, rounded = weight.unpacked(), reference.quantized(x)
    if activations == "bfloat16":
        numbers, rounded = (
            each.astype(jnp.bfloat16).astype(jnp.float32) for each in (weight.unpacked(), x)
        )
    expected = np.asarray(numbers @ rounded)
    try:
        pallas_kernels.use(product)
        found = np.asarray(layers.linear(chosen, x, jnp.dtype(jnp.float32)))
        pair = layers.linears([chosen, chosen], x)
        back = jax.grad(lambda x: layers.linear(chosen, x).sum())(x)
    finally:
        pallas_kernels.use("auto")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(found - np.asarray(weight.unpacked() @ x)).max() > 1e-3
    for each in pair:
        np.testing.assert_array_equal(np.asarray(each), found)
    wanted = np.broadcast_to(np.asarray(numbers).sum(axis=0)[:, None], x.shape)
    np.testing.assert_allclose(np.asarray(back), wanted, rtol=1e-4, atol=1e-4)


@needs_it
@pytest.mark.parametrize(
    "kind",
    ["float32", "bfloat16", "int8", "int4 of groups of 64", "int4 of groups of 32 with offsets"],
)
def test_it_runs_in_jit_loops_and_vmap(kind):
    weights, x, *scale, rounded = operands(kind, 40, 64, 3)

    def call(weights, scale, x):
        return product(weights, x, *scale, rounded)

    once = np.asarray(call(weights, scale, x))
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(weights, scale, x)), once)
    looped = lax.fori_loop(0, 3, lambda i, made: made + call(weights, scale, x + 0 * made[0]), once)
    np.testing.assert_allclose(np.asarray(looped), 4 * once, rtol=1e-6)
    several = jnp.stack([x, 2 * x, -x])
    by_x = jax.vmap(call, (None, None, 0))(weights, scale, several)
    np.testing.assert_array_equal(np.asarray(by_x[2]), np.asarray(call(weights, scale, -x)))
    twice = jax.vmap(jax.vmap(call, (None, None, 0)), (None, None, 1))(
        weights, scale, several[:, None]
    )
    np.testing.assert_array_equal(np.asarray(twice[0]), np.asarray(by_x))
    many = jnp.stack([x] * 30)  # more columns than it takes at a time
    wide = jax.vmap(call, (None, None, 0))(weights, scale, many)
    np.testing.assert_array_equal(np.asarray(wide[7]), once)
    pool = [operands(kind, 40, 64, 3, seed=2 * n) for n in range(3)]
    stacked = [None if part[0] is None else jnp.stack(part) for part in zip(*pool, strict=True)]
    axes = [None if part is None else 0 for part in scale]
    of_each = jax.vmap(call, (0, axes, 0))(stacked[0], stacked[2:4], stacked[1])
    of_same = jax.vmap(call, (0, axes, None))(stacked[0], stacked[2:4], x)
    for n, own in enumerate(pool):
        np.testing.assert_array_equal(np.asarray(of_each[n]), np.asarray(product(*own)))
        wanted = call(own[0], own[2:4], x)
        np.testing.assert_array_equal(np.asarray(of_same[n]), np.asarray(wanted))


@needs_it
def test_it_runs_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    weights, x, *_ = operands("float32", 64, 96, 5)

    def call(weights, x):
        return cpu_matmul(weights, x)

    spread = jax.shard_map(
        call, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"), check_vma=False
    )
    held = jax.device_put(weights, NamedSharding(mesh, P("model")))
    np.testing.assert_array_equal(
        np.asarray(jax.jit(spread)(held, x)), np.asarray(call(weights, x))
    )


@needs_it
def test_linear_is_it_unless_xla_is_asked_for():
    weight, x = jnp.ones((32, 64)), jnp.ones((64, 4))

    def program():
        return jax.jit(lambda weight, x: layers.linear(weight, x)).lower(weight, x).as_text()

    try:
        assert "specjax_cpu_matmul" in program()
        pallas_kernels.use("xla")
        assert "specjax_cpu_matmul" not in program()
    finally:
        pallas_kernels.use("auto")
    more = jnp.ones((64, MOST_COLUMNS + 1))
    text = jax.jit(lambda weight, x: layers.linear(weight, x)).lower(weight, more).as_text()
    assert "specjax_cpu_matmul" not in text


@needs_it
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (8, 16), (4, None), (4, 32)])
def test_packed_weights_are_multiplied_as_they_are(bits, group):
    matrix = np.random.default_rng(bits).normal(size=(48, 64)).astype(np.float32)
    weight = jax.tree.map(jnp.asarray, packed(matrix, bits, group))
    x = jax.random.normal(jax.random.key(0), (64, 5))
    expected = np.asarray(weight.unpacked() @ x)
    assert "specjax_cpu_matmul" in jax.jit(layers.linear).lower(weight, x).as_text()
    np.testing.assert_allclose(np.asarray(layers.linear(weight, x)), expected, rtol=1e-4, atol=1e-4)
    ordered = weight.changed(order=jnp.arange(63, -1, -1, dtype=jnp.int32))
    turned = layers.linear(ordered, x[::-1])
    np.testing.assert_allclose(np.asarray(turned), expected, rtol=1e-4, atol=1e-4)

    def total(x):
        return jnp.sum(jnp.sin(layers.linear(weight, x)))

    by_hand = np.asarray(weight.unpacked().T @ jnp.cos(jnp.asarray(expected)))
    np.testing.assert_allclose(np.asarray(jax.grad(total)(x)), by_hand, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kinds", ["float32", "mixed", "int8", "int8 and float32", "int8 ordered"])
def test_several_matrices_are_as_each_of_them(kinds):
    """Products and gradients, in one call or in as many as it takes."""
    random = np.random.default_rng(0)
    first, second = (jnp.asarray(random.normal(size=(rows, 64)), jnp.float32) for rows in (48, 10))
    x = jnp.asarray(random.normal(size=(64, 5)), jnp.float32)
    codes, others = (
        jax.tree.map(jnp.asarray, packed(np.asarray(matrix), 8)) for matrix in (first, second)
    )
    turned = others.changed(order=jnp.arange(63, -1, -1, dtype=jnp.int32))
    weights = {
        "float32": (first, second), "mixed": (first, second.astype(jnp.bfloat16)),
        "int8": (codes, others), "int8 and float32": (codes, second),
        "int8 ordered": (codes, turned),
    }[kinds]  # fmt: skip
    text = jax.jit(layers.linears).lower(weights, x).as_text()
    calls = 1 if kinds in ("float32", "int8") else 2
    assert _NONE or text.count("@specjax_cpu_matmul") == calls

    def total(product, x):
        a, b = product(x)
        return jnp.sin(a).sum() + jnp.cos(b).sum()

    def together(x):
        return layers.linears(weights, x)

    def apart(x):
        return tuple(layers.linear(weight, x) for weight in weights)

    for found, wanted in zip(together(x), apart(x), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    found, wanted = (jax.grad(partial(total, product))(x) for product in (together, apart))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)
    if kinds == "float32":

        def of_weights(weights):
            return total(lambda x: layers.linears(weights, x), x)

        for found, wanted in zip(
            jax.grad(of_weights)(weights),
            jax.grad(lambda each: total(lambda x: tuple(w @ x for w in each), x))(weights),
            strict=True,
        ):
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-3)


def test_what_it_does_not_take_is_said():
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    if _NONE:
        assert unable(shape(8, 64), 64, 1) == library.status().reason
        return
    codes = shape(8, 64, dtype=jnp.uint8)
    assert unable(shape(8, 64), 64, 1) is None
    assert unable(shape(8, 64), 64, 65) == "it takes 1 to 64 columns, not 65"
    assert "not float16" in (unable(shape(8, 64, dtype=jnp.float16), 64, 1) or "")
    assert unable(codes, 64, 1, shape(8, 1)) is None
    assert unable(codes, 64, 1, shape(8, 2), shape(8, 2)) is None
    assert unable(codes, 64, 1, shape(8, 4)) is None
    said = "groups are of multiples of 32 inputs"
    assert unable(codes, 64, 1, shape(8, 4), quantized=True) == said
    assert unable(codes, 64, 1, shape(8, 8)) == "groups are of multiples of 16 inputs"
    assert unable(codes, 128, 1, shape(8, 4)) is None
    assert unable(codes, 128, 1, shape(8, 8)) == said  # of 4 bits
    assert unable(codes, 64, 1, shape(8, 1, dtype=jnp.float16)) is None
    assert "scales are" in (unable(codes, 64, 1, shape(8, 1, dtype=np.float64)) or "")
    said = unable(codes, 64, 1, shape(8, 1), shape(8, 1, dtype=jnp.float16))
    assert said == "offsets are as scales are, float32[8, 1]"
    assert "codes are bytes" in (unable(codes, 100, 1, shape(8, 1)) or "")
    with pytest.raises(ValueError, match="cpu_matmul cannot run here: it takes 1 to 64 columns"):
        cpu_matmul(jnp.ones((8, 64)), jnp.ones((64, 65)))
    with pytest.raises(ValueError, match="rounds no weights of float32"):
        cpu_matmul(jnp.ones((8, 64)), jnp.ones((64, 1)), rounded=True)
    with pytest.raises(ValueError, match="quantizes x for codes alone, and does not round it too"):
        cpu_matmul(jnp.ones((8, 64)), jnp.ones((64, 1)), quantized=True)
    with pytest.raises(ValueError, match="this processor has no form 'moon' of cpu_matmul"):
        library.select("moon")


@needs_it
@pytest.mark.parametrize(
    ("shapes", "made", "error"),
    [
        (((63, 2), (8, 64)), [(8, 2)], "a row has other inputs"),
        (((64, 2), (8, 64)), [(9, 2)], "the result has another shape"),
        (((64, 65), (8, 64)), [(8, 65)], "more than 64 columns"),
        (((3, 64, 2), (8, 64)), [(8, 2)], "they differ in their dimensions"),
        (((3, 64, 2), (2, 8, 64)), [(2, 8, 2)], "differ in their first dimensions"),
        (((64, 2), (8, 64), (8, 1)), [(8, 2)], "codes have scales"),
        (((64, 2), (8, 64), (7, 64)), [(8, 2), (8, 2)], "the result has another shape"),
        (((64, 2), (8, 64), (8, 64), (8, 64)), [(8, 2), (8, 2)], "another number of matrices"),
        (((64, 2), (8, 64), (8, 1), (8, 1), (8, 1)), [(8, 2)], "another number of matrices"),
    ],
)
def test_a_call_of_other_shapes_is_refused_before_anything_is_read(shapes, made, error):
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in made]
    call = jax.ffi.ffi_call(library.MATMUL, results)
    with pytest.raises(Exception, match=error):
        jax.block_until_ready(call(*map(jnp.ones, shapes), **PLAIN))


@needs_it
def test_a_call_of_two_kinds_is_refused():
    kinds = jnp.ones((8, 64)), jnp.ones((8, 64), jnp.bfloat16)
    results = [jax.ShapeDtypeStruct((8, 2), jnp.float32)] * 2
    call = jax.ffi.ffi_call(library.MATMUL, results)
    with pytest.raises(Exception, match="have one dtype and as many scales a row"):
        jax.block_until_ready(call(jnp.ones((64, 2)), *kinds, **PLAIN))
    with pytest.raises(ValueError, match=r"not float32\[8, 64\] and bfloat16\[8, 64\]"):
        cpu_matmuls(kinds, jnp.ones((64, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_several_matrices_give_what_each_gives(form, kind):
    """To the bit, also where a thread's share ends within one of them; and under `vmap`."""
    rows, inputs = (1500, 3, 0, 130), 576 if KINDS[kind][2] in (48, 96) else 512
    whole, x, *of_groups, rounded = operands(kind, sum(rows), inputs, 5)
    ends = np.cumsum(rows)[:-1]
    several = tuple(jnp.split(whole, ends))
    parts = [None if part is None else tuple(jnp.split(part, ends)) for part in of_groups]

    def together(x):
        return cpu_matmuls(several, x, *parts, rounded=rounded)

    expected = np.split(np.asarray(product(whole, x, *of_groups, rounded)), ends)
    for columns in (1, 5):
        for found, wanted in zip(together(x[:, :columns]), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(found), wanted[:, :columns])
    for found, wanted in zip(jax.vmap(together)(jnp.stack([0 * x, x])), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[1], wanted)


def test_whatever_is_wrong_with_the_library_xlas_product_runs(monkeypatch, tmp_path):
    def status_of(folder) -> Status:
        library._library.cache_clear()
        monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
        return library.status()

    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    kept = library._library
    try:
        missing = status_of(tmp_path)
        assert missing.form is None
        assert missing.line.startswith("XLA's: cpu_matmul was not built")
        (tmp_path / f"_native{suffix}").write_text("no library")
        broken = status_of(tmp_path)
        assert "cpu_matmul does not load" in broken.line
        assert "pip install --no-build-isolation specjax builds it" in broken.line
        assert unable(jnp.ones((8, 64)), 64, 1) == broken.reason
        ones = layers.linear(jnp.ones((8, 64)), jnp.ones((64, 1)))
        np.testing.assert_array_equal(np.asarray(ones), np.full((8, 1), 64.0))
        if not _NONE:
            monkeypatch.undo()
            version = library._VERSION
            monkeypatch.setattr(library, "_VERSION", 0)
            library._library.cache_clear()
            assert f"it is of version {version}, and 0 is needed" in library.status().line
            monkeypatch.undo()

            def refuse(*_, **__):
                raise RuntimeError("API version 9.9 is incompatible with 0.3.\nmore")

            monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
            library._library.cache_clear()
            assert "(API version 9.9 is incompatible with 0.3)" in library.status().line
    finally:
        monkeypatch.undo()
        kept.cache_clear()
    assert library.status().form is None if _NONE else library.status().reason is None


def test_where_there_is_a_compiler_it_was_built():
    if sys.platform != "win32" and COMPILER is not None:
        assert library.status().form is not None, library.status().line


_SAYS = """
import jax, jax.numpy as jnp
from pallas_kernels.cpu import status, unable
print(status().line)
assert unable(jnp.ones((8, 64)), 64, 1) == status().reason
assert jnp.ones((8, 64))[0].sum() == 64 and jax.default_backend() == "cpu"
"""


_RATIO = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before there are threads
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.cpu import cpu_matmul

@jax.jit
def products(weights, x):
    return jax.lax.fori_loop(0, 200, lambda _, x: cpu_matmul(weights, x), x)

def seconds(weights):
    start = time.perf_counter()
    products(weights, x).block_until_ready()
    return time.perf_counter() - start

x = jnp.ones((320, 16))
kinds = [jnp.zeros((320, 320), dtype) for dtype in (jnp.float32, jnp.bfloat16)]
plain, widened = np.min([[seconds(weights) for weights in kinds] for _ in range(50)], axis=0)
print(plain / widened)
"""


@pytest.mark.slow
@needs_it
def test_sums_of_several_columns_stay_in_registers():
    """Weights that are multiplied as they are take no longer than those that are widened first.

    With AVX-512 16 columns took 1.4 times as long where sums did not stay there; 0.9 times now. On
    one core, as threads that wait for one another measure what else runs.
    """
    made = subprocess.run([sys.executable, "-c", _RATIO], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    assert float(made.stdout) < 1.3


@pytest.mark.slow
@needs_compiler
def test_a_library_for_a_later_jax_is_left_alone(tmp_path):
    """jax refuses its handlers: before its CPUs are known that would leave none of them."""
    headers = tmp_path / "include"
    shutil.copytree(jax.ffi.include_dir(), headers)
    version = headers / "xla/ffi/api/c_api.h"
    text, changed = re.subn(
        r"(?m)^#define XLA_FFI_API_MINOR \d+$", "#define XLA_FFI_API_MINOR 99", version.read_text()
    )
    assert changed == 1
    version.write_text(text)
    package = tmp_path / "pallas_kernels"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(pallas_kernels.__file__).parent, package, ignore=ignored)
    library_file = package / f"cpu/_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", f"-I{headers}"]
    files = map(str, sorted(SOURCES.glob("*.cc")))
    subprocess.run([COMPILER, *flags, *files, "-o", str(library_file)], check=True)
    made = subprocess.run(
        [sys.executable, "-c", _SAYS], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    assert "the handler's API version (0.99) is incompatible" in made.stdout
    assert "pip install --no-build-isolation specjax builds it" in made.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    """Every form that this processor has, in a program of its own."""
    files = [Path(__file__).parent / "cpu_matmul_check.cc"]
    files += [file for file in sorted(SOURCES.glob("*.cc")) if file.name != "ffi.cc"]
    program = tmp_path / "check"
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-pthread"]
    command = [COMPILER, "-std=c++17", "-O1", "-w", *flags, f"-I{SOURCES}", *map(str, files)]
    subprocess.run([*command, "-o", str(program)], check=True)
    made = subprocess.run([str(program)], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr[-3000:]
    assert made.stdout == f"{len(here())} forms agree\n"
