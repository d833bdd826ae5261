"""One suite that every implementation of tree attention faces."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accelerator.operands import SHAPES, make, tolerance
from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.tree_attention import (
    Prefix,
    autotune,
    merge,
    reference,
    tree_attention,
    xla,
)
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from pallas_kernels.tree_attention.operands import Operands
from tests.cases import slow_but

PALLAS = ("tpu", "hopper", "triton")
NEW_JAX = jax.__version_info__ >= (0, 11)


def lower_triangular(at):
    """The operands of a plain sequence, spelled out."""
    rows, tokens = at.query.shape[0], at.query.shape[2]
    tree_mask = jnp.broadcast_to(jnp.tri(tokens, dtype=bool), (rows, tokens, tokens))
    return at._replace(tree_mask=tree_mask, prefix=None)


def away_from_home(implementation):
    """Whether a kernel's own platform is another one, so that it is interpreted."""
    found = IMPLEMENTATIONS.get(implementation)
    return bool(found and found.platforms and jax.default_backend() not in found.platforms)


def run(at, implementation=None, plain=False):
    """The implementation on such operands, Pallas kernels in their interpreter."""
    at = at._replace(tree_mask=None) if plain else at
    return compiled(at._replace(soft_cap=None), at.soft_cap, implementation)


@partial(jax.jit, static_argnums=(1, 2))
def compiled(at, soft_cap, implementation):
    return tree_attention(
        *at[:5], first=at.first, soft_cap=soft_cap, implementation=implementation,
        sinks=None if at.sinks is None else at.sinks[0], interpret=away_from_home(implementation),
    )  # fmt: skip


@partial(jax.jit, static_argnums=1)
def definition(at, soft_cap):
    return reference.tree_attention(at._replace(soft_cap=soft_cap))


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def attention(request):
    """`tree_attention` of one implementation; one that takes no such operands says why."""

    def call(at, plain=False):
        try:
            return run(at, request.param, plain)
        except ImplementationError as error:
            if request.param not in ("hopper", "cpu"):
                raise
            pytest.skip(str(error))

    return call


def assert_close(actual, at, dtype=None):
    expected = np.asarray(definition(at._replace(soft_cap=None), at.soft_cap), np.float32)
    keys = at.tree_mask.shape[-1] + at.slots
    share = tolerance(dtype or at.block_keys.dtype, at.query.shape[-1], keys)
    if at.soft_cap is not None:
        share *= 2  # the tangent is rounded too
    assert actual.dtype == at.query.dtype
    assert actual.shape == at.query.shape
    atol = share * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_definition(attention, name, dtype):
    at = make(SHAPES[name], jnp.dtype(dtype))
    assert_close(attention(at), at)


@pytest.mark.parametrize("name", ["several tiles", "head of 256", "more slots than a share"])
def test_a_tile_less_would_be_seen(name):
    at = make(SHAPES[name], jnp.bfloat16, [SHAPES[name][5]] * SHAPES[name][0])
    for start in range(0, at.slots, 64):
        assert at.prefix is not None
        kept = jnp.arange(at.slots) // 64 != start // 64
        without = at._replace(prefix=Prefix(
            at.prefix.keys[..., kept], at.prefix.values[:, :, kept], at.prefix.length - 64
        ))  # fmt: skip
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_close(reference.tree_attention(without), at)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["several tiles", "earlier levels", "head of 256", "more nodes than a mask has words"],
)
def test_windows_and_capped_scores(attention, name, dtype):
    at = make(SHAPES[name], jnp.dtype(dtype), first=True, soft_cap=3.0)
    assert_close(attention(at), at)


def with_sinks(at):
    """The operands with a sink for each head, some far below all scores and some above them."""
    rows, heads = at.query.shape[:2]
    own = jnp.linspace(-20.0, 6.0, heads)
    return at._replace(sinks=jnp.broadcast_to(own, (rows, heads)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "first"),
    [("several tiles", True), ("earlier levels", False), ("more slots than a share", False),
     ("more nodes than a mask has words", True)],
)  # fmt: skip
def test_sinks_take_their_share_and_give_nothing(attention, name, first, dtype):
    at = with_sinks(make(SHAPES[name], jnp.dtype(dtype), first=first))
    assert_close(attention(at), at)
    without = np.asarray(definition(at._replace(sinks=None), None), np.float32)
    moved = np.abs(np.asarray(definition(at, None), np.float32) - without).max()
    assert moved > 0.1 * np.abs(without).max()


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize(("tokens", "window"), [(40, None), (40, 7), (900, None), (900, 130)])
def test_sinks_of_a_plain_sequence_and_their_gradients(implementation, tokens, window):
    drawn = np.random.default_rng(0)
    query, keys, values = (
        jnp.asarray(drawn.normal(size=(1, heads, tokens, 16)), jnp.float32) for heads in (4, 2, 2)
    )
    sinks = jnp.asarray([-2.0, 0.0, 1.0, 3.0])

    def made(sinks):
        return tree_attention(
            query, keys, values, None, window=window, sinks=sinks, implementation=implementation
        )

    def wanted(sinks):
        at = np.arange(tokens)
        seen = jnp.asarray(xla.within(at, at, window))[None]
        own = Operands(query, keys, values, seen, sinks=sinks[None])
        return reference.tree_attention(own)

    np.testing.assert_allclose(made(sinks), wanted(sinks), rtol=0, atol=2e-5)
    found, expected = (
        jax.grad(lambda sinks, of=of: (of(sinks) ** 2).sum())(sinks) for of in (made, wanted)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", None), ("bfloat16", None), ("float32", 8)])
def test_rows_of_a_larger_cache_are_read_where_they_lie(attention, dtype, bits, mapped):
    """In any order, and whatever the other rows hold."""
    at = make(SHAPES["several tiles"], jnp.dtype(dtype), first=True, bits=bits)
    count = at.query.shape[0]
    rows = (2 * jnp.arange(count) + 1)[::-1]

    def spread(x):
        fill = 99 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.nan
        return jnp.full((2 * count + 1, *x.shape[1:]), fill, x.dtype).at[rows].set(x)

    assert at.prefix is not None
    held = jax.tree.map(spread, at.prefix._replace(length=None))
    larger = at._replace(prefix=held._replace(length=at.prefix.length, pages=rows[:, None]))
    if not mapped:
        assert_close(attention(larger), at)
        return
    both = jax.vmap(lambda query: attention(larger._replace(query=query)))(
        jnp.stack([at.query, -at.query])
    )
    for made, query in zip(both, (at.query, -at.query), strict=True):
        assert_close(made, at._replace(query=query))


def in_pages(at, size, shared=0):
    """The operands with pages of `size` slots in any order, and with contiguous rows.

    The last row has the first row's pages of the first `shared` slots. Other pages of the cache,
    and that of entries past a row's length, hold no numbers.
    """
    rows, count, prefix = at.query.shape[0], at.slots // size, at.prefix
    table = 1 + np.random.default_rng(0).permutation(rows * count + 3)[: rows * count]
    table = table.reshape(rows, count)
    table[-1, : shared // size] = table[0, : shared // size]
    table[np.arange(count) * size >= np.asarray(prefix.length)[:, None]] = 0

    def alike(x, axis):
        x = np.moveaxis(np.array(x), axis, 1)
        x[-1, :shared] = x[0, :shared]
        return np.moveaxis(x, 1, axis)

    def spread(x, axis):
        parts = np.split(x, count, axis)
        fill = 99 if jnp.issubdtype(x.dtype, jnp.integer) else np.nan
        held = np.full((rows * count + 4, *parts[0].shape[1:]), fill, x.dtype)
        for pages, part in zip(table.T, parts, strict=True):
            held[pages] = part
        held[0] = fill
        return held

    axes = {"keys": 3, "values": 2, "scales": prefix.scales and (2, 2)}
    arrays = {name: getattr(prefix, name) for name in axes}
    whole = jax.tree.map(alike, arrays, axes)
    held = jax.tree.map(spread, whole, axes) | {"pages": table.astype(np.int32)}
    return tuple(
        at._replace(prefix=prefix._replace(**jax.tree.map(jnp.asarray, each)))
        for each in (held, whole)
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [128, 384])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", None), ("bfloat16", None), ("float32", 8)])
def test_pages_are_read_where_they_lie(attention, dtype, bits, size, first):
    """Rows end in a page, at its end, before the first and at the end of all, and share some."""
    shape, lengths = (4, 4, 2, 5, 0, 768, 64), [500, 384, 0, 768]
    at = make(shape, jnp.dtype(dtype), lengths, first=first, bits=bits)
    paged, whole = in_pages(at, size, shared=384)
    assert_close(attention(paged), whole)


def test_pages_under_vmap(attention):
    at = make((2, 4, 2, 3, 0, 384, 64), jnp.bfloat16, [200, 384], first=True)
    paged, whole = in_pages(at, 128, shared=128)
    both = jax.vmap(lambda query: attention(paged._replace(query=query)))(
        jnp.stack([at.query, -at.query])
    )
    for made, query in zip(both, (at.query, -at.query), strict=True):
        assert_close(made, whole._replace(query=query))


@pytest.mark.parametrize("size", [24, 200, 600])
@pytest.mark.parametrize("name", [None, "xla", "reference"])
def test_pages_of_any_size(name, size):
    at = make((4, 4, 2, 5, 0, 600, 64), jnp.float32, [411, 400, 0, 600], first=True)
    paged, whole = in_pages(at, size)
    assert_close(run(paged, name), whole)


@pytest.mark.parametrize("name", ["tpu", "hopper", "triton"])
def test_pages_that_are_no_whole_tiles_are_refused(name):
    size, tile = (192, 128) if name == "tpu" else (96, 64)
    at = make((2, 4, 2, 3, 0, 2 * size, 64), jnp.bfloat16)
    paged, _ = in_pages(at, size)
    with pytest.raises(ImplementationError, match=f"a page has {size} slots, which {tile} does"):
        run(paged, name)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["several tiles", "one key/value head", "head of 96"])
def test_a_cache_of_8_bits(attention, name, first):
    at = make(SHAPES[name], jnp.float32, first=first, bits=8)
    assert_close(attention(at), at)


def test_8_bits_are_near_the_cache_they_were_made_of():
    at, exact = (make(SHAPES["several tiles"], jnp.float32, bits=bits) for bits in (8, 16))
    # An entry is off by half a step of 1/127 of a vector's largest entry, of about 3 deviations.
    assert_close(reference.tree_attention(at), exact, jnp.bfloat16)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [64, 64, 64], [1, 63, 2]])
def test_ragged_lengths_share_one_program(attention, lengths):
    at = make(SHAPES["equal heads"], jnp.bfloat16, lengths)
    assert_close(attention(at), at)


def test_bfloat16_queries_give_bfloat16(attention):
    at = make(SHAPES["groups of five"], jnp.bfloat16, query_dtype=jnp.bfloat16)
    assert_close(attention(at), at)


def test_tree_without_prefix(attention):
    at = make(SHAPES["earlier levels"], jnp.bfloat16)._replace(prefix=None)
    assert_close(attention(at), at)


def test_empty_prefix_equals_no_prefix(attention):
    at = make(SHAPES["equal heads"], jnp.bfloat16, [0, 0, 0])
    np.testing.assert_allclose(attention(at), attention(at._replace(prefix=None)), atol=1e-6)


def test_large_scores_do_not_overflow(attention):
    at = make(SHAPES["groups of five"], jnp.bfloat16)
    assert bool(jnp.isfinite(attention(at._replace(query=1e4 * at.query))).all())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, 7, 128, 131, 259])
def test_plain_sequence_is_lower_triangular(attention, tokens, dtype):
    at = lower_triangular(make((2, 4, 2, tokens, 0, 1, 64), jnp.dtype(dtype)))
    assert_close(attention(at, plain=True), at)


def test_plain_sequence_with_capped_scores(attention):
    at = lower_triangular(make((1, 4, 2, 131, 0, 1, 64), jnp.bfloat16, soft_cap=2.0))
    assert_close(attention(at, plain=True), at)


@pytest.mark.parametrize("window", [1, 37, 128, 500])
def test_plain_sequence_sees_its_window(window):
    near = np.tri(300, dtype=bool) & ~np.tri(300, k=-window, dtype=bool)
    at = lower_triangular(make((1, 4, 2, 300, 0, 1, 8), jnp.float32))
    at = at._replace(tree_mask=jnp.asarray(near)[None])
    for name in (None, "reference"):
        assert_close(tree_attention(*at[:3], None, window=window, implementation=name), at)
    with pytest.raises(ValueError, match="`window` is for plain sequences"):
        tree_attention(*at[:4], window=window)


@pytest.mark.parametrize("tokens", slow_but([900, 1024, 1300], 1300))
@pytest.mark.parametrize("window", slow_but([None, 1, 37, 700], None))
def test_long_sequences_are_a_loop_over_chunks(window, tokens):
    """In value and gradient, with queries that only fill up the last chunk, and windows."""
    at = make((2, 2, 1, tokens, 0, 1, 4), jnp.float32)._replace(prefix=None)
    weight = jnp.cos(jnp.arange(at.query.size, dtype=jnp.float32)).reshape(at.query.shape)
    seen = np.tri(tokens, dtype=bool) & ~np.tri(tokens, k=-(window or tokens), dtype=bool)
    at = at._replace(tree_mask=jnp.broadcast_to(jnp.asarray(seen), (2, tokens, tokens)))
    assert_close(tree_attention(*at[:3], None, window=window), at)
    actual = gradients(lambda *x: tree_attention(*x, None, window=window), weight, at)
    expected = gradients(lambda *x: reference.tree_attention(at._replace(**named(x))), weight, at)
    for ours, plain in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5 * float(jnp.abs(plain).max() + 1))


def named(x):
    return dict(zip(("query", "block_keys", "block_values"), x, strict=True))


def gradients(function, weight, at):
    return jax.jit(jax.grad(lambda *x: (function(*x) * weight).sum(), (0, 1, 2)))(*at[:3])


def test_plain_sequence_has_the_gradient_of_the_definition():
    at = make((1, 4, 2, 131, 0, 1, 8), jnp.float32)._replace(prefix=None)
    weight = jnp.cos(jnp.arange(at.query.size, dtype=jnp.float32)).reshape(at.query.shape)
    at = at._replace(tree_mask=jnp.tri(131, dtype=bool)[None])
    ours = gradients(lambda *x: tree_attention(*x, None), weight, at)
    plain = gradients(lambda *x: reference.tree_attention(at._replace(**named(x))), weight, at)
    for actual, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_unseen_tokens_have_no_part(attention):
    at = make(SHAPES["groups of five"], jnp.bfloat16)
    others = jnp.arange(at.query.shape[2]) != 3
    at = at._replace(
        tree_mask=at.tree_mask & (others | ~others[:, None])
    )  # only node 3 sees node 3
    before = attention(at)
    changed = at._replace(
        block_keys=at.block_keys.at[:, :, 3].add(5.0),
        block_values=at.block_values.at[:, :, 3].add(5.0),
    )
    after = attention(changed)
    np.testing.assert_array_equal(before[:, :, others], after[:, :, others])
    assert bool((before[:, :, 3] != after[:, :, 3]).any())


@pytest.mark.parametrize("name", ["reference", *PALLAS])
def test_columns_that_nobody_sees_may_hold_anything(name):
    at = make(SHAPES["earlier levels"], jnp.bfloat16)
    at = at._replace(tree_mask=at.tree_mask.at[:, :, 2].set(False))
    spoiled = at._replace(
        block_keys=at.block_keys.at[:, :, 2].set(jnp.nan),
        block_values=at.block_values.at[:, :, 2].set(jnp.nan),
    )
    if name == "hopper" and not NEW_JAX:
        pytest.skip("jax 0.10 does not interpret it")
    np.testing.assert_array_equal(run(at, name), run(spoiled, name))


def test_few_rows_are_split_and_merged():
    at = make(SHAPES["more slots than a share"], jnp.bfloat16, [900])
    assert merge.splits_of(1, at.slots, 132) == 4
    assert merge.splits_of(300, at.slots, 132) == merge.splits_of(1, 128, 132) == 1
    assert_close(run(at, "triton"), at)
    if NEW_JAX:
        assert_close(run(at, "hopper"), at)


def test_shares_in_which_nothing_is_seen_have_no_part():
    mixed = jnp.asarray([[[[[1.0]], [[7.0]]]]])
    only = merge.merged(mixed, jnp.asarray([[[[2.0], [-jnp.inf]]]]))
    both = merge.merged(mixed, jnp.asarray([[[[2.0], [2.0]]]]))
    none = merge.merged(mixed, jnp.full((1, 1, 2, 1), -jnp.inf))
    assert [float(x[0, 0, 0, 0]) for x in (only, both, none)] == [1.0, 4.0, 0.0]


def test_hopper_says_what_it_does_not_take():
    at = make(SHAPES["several tiles"], jnp.bfloat16)
    reasons = {
        "it multiplies 16-bit keys, not float32": make(SHAPES["several tiles"], jnp.float32),
        "the cache is int8, the block bfloat16": make(
            SHAPES["several tiles"], jnp.bfloat16, bits=8
        ),
        "a head has 96 features": make(SHAPES["head of 96"], jnp.bfloat16),
        "the cache has 70 slots": make((1, 2, 1, 3, 0, 70, 64), jnp.bfloat16),
    }
    for reason, refused in reasons.items():
        with pytest.raises(ImplementationError, match=f"cannot run as 'hopper' here: .*{reason}"):
            run(refused, "hopper")
    if NEW_JAX:
        assert_close(run(at, "hopper"), at)


@pytest.mark.parametrize("name", PALLAS)
def test_a_kernel_for_another_platform_says_so(name):
    at = make(SHAPES["several tiles"], jnp.bfloat16)
    if not away_from_home(name):
        pytest.skip("this is its platform")
    with pytest.raises(ImplementationError, match=r"needs (tpu|gpu), and this is "):
        tree_attention(*at[:5], implementation=name)


def test_unknown_implementation_is_refused_with_the_choice():
    at = make(SHAPES["one node"], jnp.float32)
    with pytest.raises(ImplementationError, match=r"no implementation 'abacus'; there are .*xla"):
        run(at, "abacus")


def test_plain_sequence_takes_no_prefix_and_no_earlier_block():
    at = make(SHAPES["earlier levels"], jnp.float32)
    with pytest.raises(ValueError, match=r"tree_mask=None takes no prefix.*\(11\).*\(6\)"):
        tree_attention(*at[:3], None)
    with pytest.raises(ValueError, match="tree_mask=None takes no prefix"):
        tree_attention(
            at.query, at.block_keys[:, :, :6], at.block_values[:, :, :6], None, at.prefix
        )
    with pytest.raises(ValueError, match="`first` bounds a prefix, and there is none"):
        tree_attention(*at[:4], first=jnp.zeros((3, 6), jnp.int32))


def test_default_runs_without_being_named():
    at = make(SHAPES["one node"], jnp.float32)
    assert_close(run(at), at)


def test_the_fastest_measured_is_taken_where_it_can_run(monkeypatch):
    at = make(SHAPES["several tiles"], jnp.bfloat16)
    near, far = ({"kind": autotune.kind_of(at), **autotune.sizes_of(at)} for _ in range(2))
    far["slots"] *= 64
    table = {autotune.device(): [near | {"fastest": "reference"}, far | {"fastest": "triton"}]}
    monkeypatch.setattr(autotune, "measured", lambda: table)
    assert autotune.choice(at) == "reference"
    assert autotune.choice(make(SHAPES["one key/value head"], jnp.float32)) == "xla"  # not measured
    table[autotune.device()].reverse()
    near["fastest"] = "triton"
    table[autotune.device()] = [near]
    assert autotune.choice(at) == "triton"
    assert_close(tree_attention(*at[:5]), at)  # it cannot run here, and nobody forced it
