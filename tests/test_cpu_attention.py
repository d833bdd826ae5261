"""Tree attention in C++, in every form that this processor has. It is in the suite of all, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels
from benchmarks.accelerator.operands import SHAPES, make
from pallas_kernels.cpu import library
from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.tree_attention import autotune, cpu, sequence, tree_attention, xla
from tests.test_cpu_matmul import form, needs_it
from tests.test_tree_attention import assert_close, in_pages, run

__all__ = ["form"]
MORE = {
    "slots that fill no vector": (2, 4, 2, 3, 1, 37, 32),
    "more slots than a strip, and some": (1, 5, 1, 2, 0, 150, 48),
    "more queries than a unit": (2, 12, 2, 9, 2, 65, 16),
    "as many rows as threads and more": (7, 2, 1, 4, 0, 33, 64),
    "many nodes": (2, 6, 2, 65, 0, 130, 16),
    "many nodes, more blocks, and earlier levels": (1, 3, 1, 131, 9, 200, 80),
}

TAKEN = {name: shape for name, shape in (SHAPES | MORE).items() if shape[-1] % 16 == 0}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_equals_the_definition(form, name, first):
    at = make(TAKEN[name], jnp.float32, first=first)
    assert_close(run(at, "cpu"), at)
    if not first:
        at = at._replace(prefix=None)
        assert_close(run(at, "cpu"), at)


@pytest.mark.parametrize("lengths", [[0, 0], [37, 37], [1, 36], [32, 33]])
def test_what_lies_past_a_rows_length_is_not_read(form, lengths):
    """`make` puts NaN there."""
    at = make((2, 4, 2, 3, 1, 37, 32), jnp.float32, lengths)
    assert_close(run(at, "cpu"), at)


def test_a_node_does_not_depend_on_the_others(form):
    """To the bit; nor do rows."""
    at = make((2, 10, 2, 9, 2, 150, 64), jnp.float32, [150, 97])
    whole = np.asarray(run(at, "cpu"))
    for node in (0, 4, 8):
        own = at._replace(query=at.query[:, :, [node]], tree_mask=at.tree_mask[:, [node]])
        np.testing.assert_array_equal(np.asarray(run(own, "cpu"))[:, :, 0], whole[:, :, node])
    second = jax.tree.map(lambda x: x[1:], at)
    np.testing.assert_array_equal(np.asarray(run(second, "cpu")), whole[1:])


def test_of_many_nodes_none_depends_on_the_others(form):
    """To the bit, as long as they are many."""
    at = make((2, 6, 2, 140, 0, 150, 32), jnp.float32, [150, 97], first=True)
    whole = np.asarray(run(at, "cpu"))
    own = slice(70, 139)
    part = at._replace(
        query=at.query[:, :, own], tree_mask=at.tree_mask[:, own], first=at.first[:, own]
    )
    np.testing.assert_array_equal(np.asarray(run(part, "cpu")), whole[:, :, own])


@pytest.mark.parametrize("nodes", [3, 70])
def test_rows_of_a_larger_cache_are_read_where_they_lie(form, nodes):
    """`make` puts NaN past a row's length, and the row that is not asked for is all NaN."""
    at = make((2, 4, 2, nodes, 0, 70, 32), jnp.float32, [70, 33], first=True)
    keys, values = (jnp.stack([x[1], x[0] * jnp.nan, x[0]]) for x in at.prefix[:2])
    rows = jnp.array([2, 0], jnp.int32)
    of_more = at._replace(prefix=at.prefix._replace(keys=keys, values=values, pages=rows[:, None]))
    np.testing.assert_array_equal(np.asarray(run(of_more, "cpu")), np.asarray(run(at, "cpu")))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [64, 192])
@pytest.mark.parametrize("nodes", [3, 70])
def test_pages_equal_contiguous_rows(form, nodes, size, first):
    """To the bit."""
    at = make((4, 4, 2, nodes, 0, 384, 32), jnp.float32, [300, 192, 0, 384], first=first)
    paged, whole = in_pages(at, size, shared=192)
    assert_close(run(paged, "cpu"), whole)
    np.testing.assert_array_equal(np.asarray(run(paged, "cpu")), np.asarray(run(whole, "cpu")))


@pytest.mark.parametrize("nodes", [3, 70])
def test_a_page_that_does_not_exist_is_the_nearest(form, nodes):
    at = make((1, 4, 2, nodes, 0, 192, 32), jnp.float32, [192])
    pages = jnp.asarray([[0, 2, 1]], jnp.int32)
    parts = jnp.stack(jnp.split(at.prefix.keys[0], 3, axis=2))
    prefix = at.prefix._replace(keys=parts, values=parts.swapaxes(2, 3))
    found, other = (
        run(at._replace(prefix=prefix._replace(pages=jnp.where(pages == n, to, pages))), "cpu")
        for n, to in ((0, -7), (2, 2**30))
    )
    expected = run(at._replace(prefix=prefix._replace(pages=pages)), "cpu")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_plain_sequences_equal_xlas_form(form, tokens, window):
    noise = np.random.default_rng(tokens)
    query, keys, values = (
        jnp.asarray(noise.standard_normal((2, heads, tokens, 48)), jnp.float32)
        for heads in (6, 2, 2)
    )
    expected = xla.causal(query, keys, values, None, window)
    found = sequence.causal(query, keys, values, None, window)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@needs_it
def test_gradients_of_plain_sequences_are_those_of_xlas_form():
    noise = np.random.default_rng(0)
    given = [
        jnp.asarray(noise.standard_normal((2, heads, 20, 16)), jnp.float32) for heads in (4, 2, 2)
    ]

    def grads(call):
        return jax.grad(lambda *at: jnp.square(call(*at, None, 7)).sum(), (0, 1, 2))(*given)

    for found, expected in zip(grads(sequence.causal), grads(xla.causal), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    stacked = [jnp.stack([x, 2 * x]) for x in given]
    twice = jax.vmap(lambda *at: sequence.causal(*at))(*stacked)
    np.testing.assert_array_equal(twice[1], sequence.causal(*(2 * x for x in given)))


def test_what_is_no_number_stays_with_those_who_see_it(form):
    at = make(SHAPES["groups of five"], jnp.float32, [128, 128, 128])
    keys = at.block_keys.at[:, :, 3].set(jnp.nan)
    values = at.block_values.at[:, :, 5].set(jnp.nan)
    out = np.asarray(run(at._replace(block_keys=keys, block_values=values), "cpu"))
    sees = np.asarray(at.tree_mask[..., 3] | at.tree_mask[..., 5])
    assert sees.any()
    assert not sees.all()
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 3)), sees)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 3)), sees)
    cached = at.prefix._replace(keys=at.prefix.keys.at[1, :, :, 7].set(jnp.nan))
    out = np.asarray(run(at._replace(prefix=cached), "cpu"))
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 2, 3)), [False, True, False])


def test_large_and_far_scores_overflow_nothing(form):
    at = make(SHAPES["one node"], jnp.float32, [64, 64])
    for size in (1e3, 1e15):
        assert_close(
            run(at._replace(query=at.query * size), "cpu"), at._replace(query=at.query * size)
        )


@needs_it
def test_it_runs_in_loops_and_vmap():
    at = make(SHAPES["earlier levels"], jnp.float32)
    several = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), at)

    def call(at):
        return tree_attention(*at[:5], implementation="cpu")

    expected = np.stack([run(at, "cpu"), run(jax.tree.map(lambda x: x[::-1], at), "cpu")])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(several), expected)
    np.testing.assert_array_equal(jax.jit(lambda at: jax.lax.map(call, at))(several), expected)


@needs_it
def test_gradients_are_those_of_xlas_form():
    at = make(SHAPES["earlier levels"], jnp.float32, [64, 64, 64])

    def grads(implementation, vmapped=False):
        def loss(query, keys, values):
            own = at._replace(query=query, block_keys=keys, block_values=values)
            return jnp.square(tree_attention(*own[:5], implementation=implementation)).sum()

        grad = jax.grad(loss, (0, 1, 2))
        if not vmapped:
            return jax.jit(grad)(*at[:3])
        several = [jnp.stack([x, 2 * x]) for x in at[:3]]
        return [x[0] for x in jax.jit(jax.vmap(grad))(*several)]

    for vmapped in (False, True):
        for found, expected in zip(grads("cpu", vmapped), grads("xla"), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@needs_it
def test_it_runs_on_a_mesh():
    """Of the devices that there are; `tests.on_mesh` runs whole texts on eight."""
    at = make((2, 4, 2, 3, 0, 64, 64), jnp.float32, [64, 10])
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    call = jax.shard_map(
        lambda at: tree_attention(*at[:5], implementation="cpu"), mesh=mesh, in_specs=P("data"),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(call)(at), run(at, "cpu"))


@needs_it
def test_it_runs_where_it_can_unless_another_is_named():
    at = make(SHAPES["one node"], jnp.float32)
    others = {
        "of bfloat16": make(SHAPES["one node"], jnp.bfloat16),
        "of 8 bits": make(SHAPES["one node"], jnp.float32, bits=8),
        "capped": at._replace(soft_cap=3.0),
        "of 8 features": make(SHAPES["one key/value head"], jnp.float32),
        "in pages of 96": in_pages(make((2, 4, 2, 3, 0, 192, 64), jnp.float32), 96)[0],
    }
    assert autotune.choice(at) == "cpu"
    assert {name: autotune.choice(other) for name, other in others.items()} == dict.fromkeys(
        others, "xla"
    )

    def text():
        return jax.jit(lambda at: tree_attention(*at[:5])).lower(at).as_text()

    assert library.ATTENTION in text()
    pallas_kernels.use("xla")
    try:
        assert library.ATTENTION not in text()
    finally:
        pallas_kernels.use("auto")
    with pytest.raises(
        ImplementationError, match="it takes heads of multiples of 16 features, not 8"
    ):
        tree_attention(*others["of 8 features"][:5], implementation="cpu")
    with pytest.raises(ImplementationError, match="a page has 96 slots, which 64 does not divide"):
        tree_attention(*others["in pages of 96"][:5], implementation="cpu")


@needs_it
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("the block does not fit", lambda at: at._replace(block_values=at.block_values[:, :, 1:])),
        ("the block does not fit", lambda at: at._replace(tree_mask=at.tree_mask[:, :, 1:])),
        ("the prefix does not fit", lambda at: at._replace(
            prefix=at.prefix._replace(values=at.prefix.values[:, :, 1:]))),
        ("`pages` does not fit", lambda at: at._replace(
            prefix=at.prefix._replace(pages=jnp.zeros((1, 2), jnp.int32)))),
        ("a page has 48 slots, which 64 does not divide", lambda at: at._replace(
            prefix=at.prefix._replace(
                keys=at.prefix.keys[..., :48], values=at.prefix.values[:, :, :48],
                pages=jnp.zeros((2, 2), jnp.int32)))),
        ("`first` does not fit", lambda at: at._replace(first=jnp.zeros((2, 2), jnp.int32))),
        ("their heads do not divide", lambda at: at._replace(query=at.query[:, :3])),
    ],
)  # fmt: skip
def test_a_call_of_other_shapes_is_refused_before_anything_is_read(name, change):
    at = change(make(SHAPES["one node"], jnp.float32))
    with pytest.raises(Exception, match=f"cpu_attention: queries of .*: {name}"):
        jax.block_until_ready(jax.jit(cpu.tree_attention)(at))
