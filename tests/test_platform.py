"""What follows from the platform that a program is traced for, with no such device at hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.platform import DEVICES, at_hand, device_kind, platform, traced_for
from pallas_kernels.tree_attention import sequence, tree_attention, xla
from specjax.base import loops, sampling
from specjax.base.pytree import replace
from specjax.base.sampling import FULL, GREEDY, LIMITED, Sampling, process
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import prepare
from specjax.draft import ExpansionDrafter
from specjax.models import layers
from specjax.models.kv_cache import cache_dtype
from specjax.trees.construction import DISTINCT, DRAWN
from tests.cases import slow_but
from tests.pairs import KEY, NEW, PROMPTS, generate, near, varied_model

KINDS = {
    GREEDY: Sampling(0.0, top_k=3),
    FULL: Sampling(np.float32([0.0, 0.7, 1.0, 1.3]), min_p=0.02),
    LIMITED: Sampling(
        np.float32([0.0, 0.7, 1.0, 1.3]), top_k=np.int32([0, 5, 0, 3]),
        top_p=np.float32([0.5, 1.0, 0.8, 0.9]),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return varied_model()


@pytest.fixture
def known(monkeypatch):
    """Programs are compiled for what is known of their rows, as on accelerators."""
    monkeypatch.setattr(sampling, "platform", lambda: "tpu")


@pytest.mark.parametrize("name", DEVICES)
def test_a_trace_is_for_the_device_that_is_named(name):
    traces = []

    @jax.jit
    def traced(x):
        traces.append(platform())
        return x

    here = platform()
    traced(1)
    with traced_for(DEVICES[name]):
        assert platform() == DEVICES[name].platform
        assert device_kind() == DEVICES[name].device_kind
        assert at_hand() == (here == platform())
        assert cache_dtype(jnp.dtype("bfloat16")) == "bfloat16"
        traced.trace(1)
    traced(1)
    assert traces == [here, DEVICES[name].platform]
    assert (platform(), at_hand()) == (here, True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_rows_changes_no_distribution(kind, known):
    rows = KINDS[kind].rows(4)
    assert rows.kind == kind
    logits = 3 * jax.random.normal(jax.random.key(1), (4, 3, 50))
    expected = process(logits, replace(rows, kind=None))
    np.testing.assert_allclose(process(logits, rows), expected, rtol=0, atol=1e-6)
    assert not ((process(logits, rows) > 0) ^ (expected > 0)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", slow_but([(1, 1, 1), (3, 2)], (3, 2)))
def test_what_is_known_of_rows_changes_no_text(kind, widths, target, known):
    drafter = ExpansionDrafter.of([near(target, 1)], widths)
    found = generate(target, drafter, sampling=KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "platform", lambda: "cpu")
        expected = generate(target, drafter, sampling=KINDS[kind])
    for name in ("tokens", "lengths", "steps", "nodes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def lowered(target, drafter, **asked):
    """The text of the program that `generate` runs, which is traced once for both."""
    request = prepare(KEY, target, drafter, PROMPTS, max_new_tokens=NEW, stop_at_eos=False, **asked)
    return generate_jit.lower(**request._asdict()).as_text()


def branches(target, asked):
    """How many branches a program has before XLA leaves out any."""
    drafter = ExpansionDrafter.of([near(target, 1)], (1, 1, 1))
    return lowered(target, drafter, sampling=asked).count("stablehlo.case")


@pytest.mark.parametrize("kind", KINDS)
def test_no_branch_is_chosen_by_data(kind, target, known, monkeypatch):
    monkeypatch.setattr(layers, "_on_cpu", lambda: False)  # whose angles are a branch's
    jax.clear_caches()
    assert branches(target, KINDS[kind]) == 0


def test_where_nothing_is_known_branches_are(target):
    assert branches(target, KINDS[FULL]) > 0


@pytest.mark.parametrize(
    ("drafts", "widths", "verify"),
    [
        pytest.param(2, (1, 1, 1), "multi-step", marks=pytest.mark.slow),
        (1, (2, 1, 1), "naive"),
        pytest.param(1, (2, 2), "recursive", marks=pytest.mark.slow),
    ],
)
def test_loops_of_a_static_length_change_no_text(drafts, widths, verify, target):
    pool = [near(target, number) for number in range(drafts)]
    drafter = ExpansionDrafter.of(
        pool, widths, children=DISTINCT if verify == "recursive" else DRAWN
    )
    asked = {"sampling": Sampling(np.linspace(0, 1, len(PROMPTS), dtype=np.float32))}
    asked["verify"] = verify
    texts, whiles = [], []
    for name in ("cpu", "tpu"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops, "platform", lambda name=name: name)
            jax.clear_caches()
            texts.append(generate(target, drafter, **asked))
            whiles.append(lowered(target, drafter, **asked).count("stablehlo.while"))
    jax.clear_caches()
    for name in ("tokens", "lengths", "steps", "nodes"):
        np.testing.assert_array_equal(*(getattr(text, name) for text in texts))
    assert whiles[1] < whiles[0]
    assert texts[0].tokens_per_step.max() > 1


@pytest.mark.parametrize(
    ("tokens", "dim", "options"),
    [
        (128, 64, {}),
        (384, 128, {"window": 37}),
        (256, 64, {"soft_cap": 2.0}),
        (256, 64, {"window": 37, "sinks": jnp.array([[0, 1, -1, 4], [3, 0.5, 2, 9]])}),
    ],
)
def test_splash_attention_is_attention_of_plain_sequences(tokens, dim, options):
    drawn = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(drawn[0], (2, 4, tokens, dim))
    keys, values = (jax.random.normal(key, (2, 2, tokens, dim), jnp.bfloat16) for key in drawn[1:])
    assert sequence.can_splash(query, keys)
    found = sequence.splash(query, keys, values, interpret=True, **options)
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    expected = xla.causal(query, *wide, **{"soft_cap": None} | options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)
    if options:  # that they are not the same without is what makes the comparison one
        assert abs(found - xla.causal(query, *wide, None)).max() > 0.1


@pytest.mark.parametrize("window", [None, 37])
def test_fused_attention_is_attention_of_plain_sequences(window):
    drawn = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(drawn[0], (2, 4, 96, 64))
    keys, values = (jax.random.normal(key, (2, 2, 96, 64), jnp.bfloat16) for key in drawn[1:])
    found = sequence.fused(query, keys, values, window, implementation="xla")
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    expected = xla.causal(query, *wide, None, window)
    assert found.dtype == query.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)
    if window:
        assert abs(found - xla.causal(query, *wide, None)).max() > 0.1


@pytest.mark.parametrize(("tokens", "window"), [(768, None), (768, 1), (768, 130), (768, 511)])
def test_blocks_of_a_mask_are_those_that_the_whole_mask_has(tokens, window):
    mask = sequence.plain_mask(tokens, window)
    whole = xla.within(jnp.arange(tokens), jnp.arange(tokens), window)
    kinds = set()
    for row in range(0, tokens, 128):
        for column in range(0, tokens, 128):
            block = mask[slice(row, row + 128), slice(column, column + 128)]
            expected = whole[row : row + 128, column : column + 128]
            np.testing.assert_array_equal(np.broadcast_to(block, (128, 128)), expected)
            kinds.add(block.size)
    assert kinds == {1, 128 * 128}


@pytest.mark.parametrize("batched", [(0, 0), (0, None), (None, 0)])
def test_rows_of_several_tables_are_those_of_each(batched, monkeypatch):
    monkeypatch.setattr(layers, "platform", lambda: "tpu")
    tables = jax.random.normal(jax.random.key(0), (3, 7, 4))
    tokens = jnp.asarray([[0, 6, 3], [5, 5, 1], [2, -1, 9]])
    tables = tables if batched[0] == 0 else tables[1]
    tokens = tokens if batched[1] == 0 else tokens[2]

    def looked_up(table, tokens):
        return layers.embed(table, tokens[None])

    found = jax.vmap(looked_up, batched)(tables, tokens)
    for number in range(3):
        own = tables[number] if batched[0] == 0 else tables
        at = tokens[number] if batched[1] == 0 else tokens
        np.testing.assert_array_equal(found[number], own[at].T)


@pytest.mark.parametrize(
    ("tokens", "dtype", "kernel"),
    [(256, "bfloat16", True), (192, "bfloat16", False), (256, "float32", False)],
)
def test_a_tpu_runs_splash_attention_where_it_can(tokens, dtype, kernel):
    shape = jax.ShapeDtypeStruct((1, 2, tokens, 64), dtype)
    query = jax.ShapeDtypeStruct((1, 4, tokens, 64), "float32")
    with traced_for(DEVICES["v5e"]):
        traced = jax.jit(lambda q, k, v: tree_attention(q, k, v, None)).trace(query, shape, shape)
        lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in lowered) == kernel
