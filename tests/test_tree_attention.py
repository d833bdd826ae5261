"""One suite that every implementation of tree attention faces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.tree_attention import reference, tree_attention
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS

ALWAYS_RUN = ("reference", "xla")
# Rows, heads, key/value heads, nodes, earlier block columns, prefix slots, head dimension.
SHAPES = {
    "one node": (2, 4, 2, 1, 0, 9, 8),
    "equal heads": (3, 3, 3, 5, 0, 17, 16),
    "one key/value head": (2, 6, 1, 8, 0, 5, 8),
    "groups of five": (3, 10, 2, 7, 0, 33, 64),
    "earlier levels": (3, 4, 2, 6, 5, 12, 16),
    "past a tile of 128": (1, 2, 1, 33, 0, 131, 32),
}


def unit_roundoff(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def tolerance(dtype, *reductions: int) -> float:
    """Independent roundings of unit-variance operands add up as the root of their number.

    Factor 4 because the largest of some thousand outputs is compared, not a typical one.
    """
    return 4 * unit_roundoff(dtype) * (1 + sum(reductions) ** 0.5)


def random_ancestors(rng, nodes: int, earlier: int) -> np.ndarray:
    """`[nodes, earlier + nodes]` of a random tree whose first `earlier` columns come first."""
    total = earlier + nodes
    seen = np.eye(total, dtype=bool)
    for node in range(1, total):
        seen[node] |= seen[rng.integers(0, node)]
    return seen[earlier:]


def make(shape, dtype, lengths=None, query_dtype=jnp.float32):
    """Arguments of `tree_attention`, with NaN in every slot at or past its row's length."""
    rows, heads, kv_heads, nodes, earlier, slots, dim = shape
    rng = np.random.default_rng(sum(shape))

    def normal(*size):
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    if lengths is None:  # empty, full, and in between
        lengths = np.resize([0, slots, slots // 2], rows)
    length = jnp.asarray(lengths, jnp.int32)
    dead = jnp.arange(slots) >= length[:, None, None, None]
    keys = jnp.where(dead, jnp.nan, normal(rows, kv_heads, dim, slots))
    values = jnp.where(dead.swapaxes(2, 3), jnp.nan, normal(rows, kv_heads, slots, dim))
    visible = np.stack([random_ancestors(rng, nodes, earlier) for _ in range(rows)])
    return (
        normal(rows, heads, nodes, dim).astype(query_dtype),
        normal(rows, kv_heads, earlier + nodes, dim).astype(dtype),
        normal(rows, kv_heads, earlier + nodes, dim).astype(dtype),
        jnp.asarray(visible),
        keys.astype(dtype),
        values.astype(dtype),
        length,
    )


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def attention(request):
    """`tree_attention` of one implementation; one that cannot run here says why."""
    run = jax.jit(tree_attention, static_argnames="implementation")

    def call(*args):
        try:
            return run(*args, implementation=request.param)
        except ImplementationError as error:
            if request.param in ALWAYS_RUN:
                raise
            pytest.skip(str(error))

    return call


def without_prefix(query, block_keys, block_values, visible):
    """The definition over a prefix of no slots."""
    rows, kv_heads, _, dim = block_keys.shape
    keys = jnp.zeros((rows, kv_heads, dim, 0), block_keys.dtype)
    length = jnp.zeros(rows, jnp.int32)
    return reference.tree_attention(
        query, block_keys, block_values, visible, keys, keys.swapaxes(2, 3), length
    )


def assert_close(actual, args, expected=None, dtype=None):
    expected = reference.tree_attention(*args) if expected is None else expected
    slots = args[4].shape[-1] if len(args) > 4 else 0
    atol = tolerance(dtype or args[1].dtype, args[1].shape[-1], args[1].shape[2] + slots)
    assert actual.dtype == args[0].dtype
    assert actual.shape == args[0].shape
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0, atol=atol
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_definition(attention, name, dtype):
    args = make(SHAPES[name], jnp.dtype(dtype))
    assert_close(attention(*args), args)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [17, 17, 17], [1, 16, 2]])
def test_ragged_lengths_share_one_program(attention, lengths):
    args = make(SHAPES["equal heads"], jnp.float32, lengths)
    assert_close(attention(*args), args)


def test_bfloat16_queries_give_bfloat16(attention):
    args = make(SHAPES["groups of five"], jnp.bfloat16, query_dtype=jnp.bfloat16)
    assert_close(attention(*args), args)


def test_tree_without_prefix(attention):
    args = make(SHAPES["earlier levels"], jnp.float32)[:4]
    assert_close(attention(*args), args, without_prefix(*args))


def test_empty_prefix_equals_no_prefix(attention):
    args = make(SHAPES["equal heads"], jnp.float32, [0, 0, 0])
    np.testing.assert_allclose(attention(*args), attention(*args[:4]), atol=1e-6)


def test_large_scores_do_not_overflow(attention):
    query, *rest = make(SHAPES["groups of five"], jnp.float32)
    args = (1e4 * query, *rest)
    actual = attention(*args)
    assert bool(jnp.isfinite(actual).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 7, 128, 131, 259])
def test_plain_sequence_is_lower_triangular(attention, tokens, dtype):
    args = make((2, 4, 2, tokens, 0, 1, 8), jnp.dtype(dtype))[:3]
    tril = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool)), (2, tokens, tokens))
    assert_close(attention(*args, None), args, without_prefix(*args, tril))


def test_plain_sequence_has_the_gradient_of_the_definition(attention):
    query, keys, values = make((1, 4, 2, 131, 0, 1, 8), jnp.float32)[:3]
    weight = jnp.cos(jnp.arange(query.size, dtype=jnp.float32)).reshape(query.shape)
    tril = jnp.tril(jnp.ones((1, 131, 131), bool))
    ours = jax.grad(lambda *a: (attention(*a, None) * weight).sum(), (0, 1, 2))
    plain = jax.grad(lambda *a: (without_prefix(*a, tril) * weight).sum(), (0, 1, 2))
    for actual, expected in zip(ours(query, keys, values), plain(query, keys, values), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_unseen_tokens_have_no_part(attention):
    query, keys, values, visible, *prefix = make(SHAPES["groups of five"], jnp.float32)
    others = jnp.arange(query.shape[2]) != 3
    visible = visible & (others | ~others[:, None])  # nobody but node 3 itself sees node 3
    before = attention(query, keys, values, visible, *prefix)
    changed = keys.at[:, :, 3].add(5.0), values.at[:, :, 3].add(5.0)
    after = attention(query, *changed, visible, *prefix)
    np.testing.assert_array_equal(before[:, :, others], after[:, :, others])
    assert bool((before[:, :, 3] != after[:, :, 3]).any())


def test_unknown_implementation_is_refused_with_the_choice():
    args = make(SHAPES["one node"], jnp.float32)
    with pytest.raises(ImplementationError, match=r"no implementation 'abacus'; there are .*xla"):
        tree_attention(*args, implementation="abacus")


def test_plain_sequence_takes_no_prefix_and_no_earlier_block():
    query, keys, values, _, *prefix = make(SHAPES["earlier levels"], jnp.float32)
    with pytest.raises(ValueError, match=r"visible=None takes no prefix.*\(11\).*\(6\)"):
        tree_attention(query, keys, values, None)
    with pytest.raises(ValueError, match="visible=None takes no prefix"):
        tree_attention(query, keys[:, :, :6], values[:, :, :6], None, *prefix)


def test_default_runs_without_being_named():
    args = make(SHAPES["one node"], jnp.float32)
    assert_close(tree_attention(*args), args)
