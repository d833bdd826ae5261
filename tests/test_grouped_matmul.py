"""Grouped products: rows in blocks, and every implementation against its definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.grouped_matmul import blocks_of, grouped_matmul

GROUPS = {
    "a few": [4, 0, 2, 2, 7, 4, -1, 1],
    "one": [3],
    "none": [-1, 5, 6],
    "all of one": [2] * 70,
    "many": [n * n % 7 for n in range(300)],
}
"""Groups of rows, of which there are five: others are none."""


def blocks_in(group, distinct=False):
    return jax.jit(blocks_of, static_argnums=(1, 2))(np.asarray(group, np.int32), 5, distinct)


@pytest.mark.parametrize("name", GROUPS)
def test_rows_are_in_blocks_of_their_groups(name):
    group = np.asarray(GROUPS[name], np.int32)
    blocks = blocks_in(group)
    is_placed = (group >= 0) & (group < 5)
    np.testing.assert_array_equal(np.asarray(blocks.is_placed), is_placed)
    place, row_of = np.asarray(blocks.place_of), np.asarray(blocks.row_of)
    for row in np.flatnonzero(is_placed):
        assert row_of[place[row]] == row
        assert blocks.group[place[row] // blocks.size] == group[row]
    used = sum(-(-int((group == own).sum()) // blocks.size) for own in range(5))
    np.testing.assert_array_equal(blocks.is_used, np.arange(len(blocks.group)) < used)
    assert (np.asarray(blocks.group[used:]) == blocks.group[max(used - 1, 0)]).all()


def products(weights, rows, group):
    """By their definition, in float64."""
    made = np.zeros((len(group), weights.shape[1]))
    for row, own in enumerate(group):
        if 0 <= own < len(weights):
            at = rows[row % len(rows)].astype(np.float64)
            made[row] = np.asarray(weights[own], np.float64) @ at
    return made


SHAPES = {"xla": [(7, 12), (128, 256)], "triton": [(7, 12), (48, 300), (128, 256)],
          "tpu": [(7, 12), (384, 256), (200, 72)]}  # fmt: skip


def run(implementation):
    return jax.jit(partial(grouped_matmul, implementation=implementation, interpret=True))


CASES = [
    ("a few", "float32"),
    ("many", "bfloat16"),
    ("all of one", "bfloat16"),
    ("none", "float32"),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    ("implementation", "shape"), [(name, one) for name, own in SHAPES.items() for one in own]
)
def test_products_are_those_of_the_definition(implementation, shape, name, dtype):
    """Of two matrices a group, of rows that come twice."""
    drawn, group = np.random.default_rng(0), np.asarray(GROUPS[name], np.int32)
    weights = jnp.asarray(drawn.normal(size=(2, 5, *shape)), dtype)
    count = len(group) // 2 or 1
    rows = jnp.asarray(drawn.normal(size=(len(group) // count * count, shape[1])), dtype)[:count]
    blocks = blocks_in(group[: len(group) // count * count])
    found = run(implementation)(list(weights), rows, blocks)
    for own, made in zip(weights, found, strict=True):
        assert made.dtype == jnp.float32
        wanted = products(
            np.asarray(own, np.float32), np.asarray(rows, np.float32), group[: len(made)]
        )
        np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("implementation", SHAPES)
def test_rows_of_groups_that_differ_have_a_block_each(implementation):
    drawn, group = np.random.default_rng(2), [4, 0, -1, 2]
    weights = jnp.asarray(drawn.normal(size=(5, 7, 12)), jnp.float32)
    rows = jnp.asarray(drawn.normal(size=(1, 12)), jnp.float32)
    blocks = blocks_in(group, distinct=True)
    (found,) = run(implementation)([weights], rows, blocks)
    wanted = products(np.asarray(weights), np.asarray(rows), group)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["triton", "tpu"])
def test_a_group_gives_the_same_whatever_others_have(implementation):
    """To the bit, in as many rows."""
    drawn = np.random.default_rng(1)
    weights = jnp.asarray(drawn.normal(size=(5, 128, 256)), jnp.bfloat16)
    rows = jnp.asarray(drawn.normal(size=(6, 256)), jnp.bfloat16)

    def of(group):
        blocks = blocks_in(group)
        found = grouped_matmul(
            [weights], rows, blocks, implementation=implementation, interpret=True
        )
        return np.asarray(found[0])

    first, second = of([1, 3, 3, 0, 1, 4]), of([1, 3, -1, 3, 2, 2])
    np.testing.assert_array_equal(first[:2], second[:2])


def test_what_cannot_run_is_refused():
    weights, rows = jnp.zeros((3, 200, 8200)), jnp.zeros((2, 8200))
    blocks = blocks_of(jnp.asarray([0, 1]), 3)
    for name, words in (("tpu", "8200 are too many"), ("mps", "no implementation 'mps'")):
        with pytest.raises(ImplementationError, match=words):
            grouped_matmul([weights], rows, blocks, implementation=name, interpret=True)
    with pytest.raises(ImplementationError, match="needs gpu, and this is cpu"):
        grouped_matmul([weights], rows, blocks, implementation="triton")
    large = jax.ShapeDtypeStruct((2**15, 2**8, 2**8), jnp.bfloat16)
    with pytest.raises(ImplementationError, match="counts to 2\\^31"):
        jax.eval_shape(
            lambda large: grouped_matmul(
                [large], jnp.zeros((2, 256)), blocks_of(jnp.asarray([0, 1]), 2**15),
                implementation="triton", interpret=True,
            ), large,
        )  # fmt: skip
