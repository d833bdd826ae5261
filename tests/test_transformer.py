"""The decoder against itself: any way to cut a text into passes gives the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.models import layers
from specjax.models.kv_cache import empty_cache
from specjax.models.transformer import Model, forward
from tests.conftest import tiny_config, tiny_model

SLOTS, ATOL = 24, 2e-5
run = jax.jit(forward)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 64, (3, 12)), jnp.int32)


def sequence_logits(model: Model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(model, tokens, positions, None, None)


def prefilled(model: Model, tokens, lengths):
    """A cache holding the first `lengths[b]` tokens of each row, with garbage behind them."""
    _, new = sequence_logits(model, tokens)
    cache = empty_cache(model.config, tokens.shape[0], SLOTS, jnp.dtype("float32"))
    return cache.keep(new, None, jnp.asarray(lengths, jnp.int32))


def causal(rows: int, width: int):
    return jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (rows, width, width))


def tree_attention_mask(parents) -> np.ndarray:
    """`[N, N]`: column is the row's node or an ancestor of it."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def path_to(node: int, parents) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6]


def tree_inputs(lengths, seed=1):
    """Tokens, positions and visibility of one random tree of shape PARENTS per row."""
    rng, depth = np.random.default_rng(seed), [len(path_to(n, PARENTS)) - 1 for n in range(8)]
    nodes = jnp.asarray(rng.integers(0, 64, (len(lengths), 8)), jnp.int32)
    positions = jnp.asarray(lengths, jnp.int32)[:, None] + jnp.asarray(depth, jnp.int32)
    tree_mask = jnp.broadcast_to(jnp.asarray(tree_attention_mask(PARENTS)), (len(lengths), 8, 8))
    return nodes, positions, tree_mask


@pytest.mark.parametrize("width", [1, 3])
def test_prefill_and_decode_equal_one_pass(target, tokens, width):
    whole, _ = sequence_logits(target, tokens)
    lengths = np.array([5, 8, 0])
    cache = prefilled(target, tokens, lengths)
    while lengths.max() + width <= tokens.shape[1]:
        at = lengths[:, None] + np.arange(width)
        window = jnp.take_along_axis(tokens, jnp.asarray(at), axis=1)
        positions = jnp.asarray(at, jnp.int32)
        logits, new = run(target, window, positions, cache, causal(3, width))
        np.testing.assert_allclose(
            logits, np.take_along_axis(np.asarray(whole), at[..., None], axis=1), atol=ATOL
        )
        cache = cache.keep(new, None, jnp.full(3, width, jnp.int32))
        lengths = lengths + width
    np.testing.assert_array_equal(cache.length, lengths)


def test_tree_pass_equals_a_pass_over_each_path(target, tokens):
    lengths = [5, 8, 0]
    cache = prefilled(target, tokens, lengths)
    nodes, positions, tree_mask = tree_inputs(lengths)
    logits, _ = run(target, nodes, positions, cache, tree_mask)
    for row, length in enumerate(lengths):
        for node in range(8):
            path = nodes[row, jnp.asarray(path_to(node, PARENTS))]
            text = jnp.concatenate([tokens[row, :length], path])
            padded = jnp.zeros((1, 16), jnp.int32).at[0, : text.size].set(text)
            expected = sequence_logits(target, padded)[0][0, text.size - 1]
            np.testing.assert_allclose(logits[row, node], expected, atol=ATOL)


def test_kept_path_continues_like_its_text(target, tokens):
    lengths = np.array([5, 8, 0])
    cache = prefilled(target, tokens, lengths)
    nodes, positions, tree_mask = tree_inputs(lengths)
    _, new = run(target, nodes, positions, cache, tree_mask)
    path = jnp.asarray([[0, 1, 3, 6], [0, 2, 5, 5], [0, 0, 0, 0]], jnp.int32)
    count = jnp.asarray([4, 3, 1], jnp.int32)
    cache = cache.keep(new, path, count)
    last = jnp.full((3, 1), 7, jnp.int32)
    logits, _ = run(target, last, cache.length[:, None], cache, causal(3, 1))
    for row in range(3):
        text = [*tokens[row, : lengths[row]], *nodes[row, path[row, : count[row]]], 7]
        padded = jnp.zeros((1, 16), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
        expected = sequence_logits(target, padded)[0][0, len(text) - 1]
        np.testing.assert_allclose(logits[row, 0], expected, atol=ATOL)


def test_tree_in_two_passes_equals_one(target, tokens):
    lengths, first = [5, 8, 0], 3
    cache = prefilled(target, tokens, lengths)
    nodes, positions, tree_mask = tree_inputs(lengths)
    whole, made = run(target, nodes, positions, cache, tree_mask)
    head, block = run(
        target, nodes[:, :first], positions[:, :first], cache, tree_mask[:, :first, :first]
    )
    tail, rest = run(
        target, nodes[:, first:], positions[:, first:], cache, tree_mask[:, first:], block
    )
    np.testing.assert_allclose(jnp.concatenate([head, tail], 1), whole, atol=ATOL)
    joined = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 2), block, rest)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=ATOL), joined, made)


def test_nan_at_and_past_length_changes_nothing(target, tokens):
    lengths = [5, 8, 0]
    cache = prefilled(target, tokens, lengths)
    dead = jnp.arange(SLOTS) >= cache.length[:, None, None, None]
    spoiled = replace(
        cache,
        keys=tuple(jnp.where(dead, jnp.nan, x) for x in cache.keys),
        values=tuple(jnp.where(dead.swapaxes(2, 3), jnp.nan, x) for x in cache.values),
    )
    inputs = tree_inputs(lengths)
    clean, _ = run(target, *inputs[:2], cache, inputs[2])
    dirty, _ = run(target, *inputs[:2], spoiled, inputs[2])
    np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("count", [1, 5, 64, 65])
def test_columns_are_the_rows_of_the_table(count):
    table = np.arange(90 * 7, dtype=np.float32).reshape(90, 7)
    tokens = np.random.default_rng(count).integers(0, 90, (2, count), np.int32)
    for rows in (tokens[:1], tokens):
        made = jax.jit(layers.embed)(jnp.asarray(table), jnp.asarray(rows))
        assert np.array_equal(made, table[rows.reshape(-1)].T)
    tables = np.stack([table, table[::-1]])  # as for a stacked pool
    each = jax.vmap(layers.embed, (0, None))(jnp.asarray(tables), jnp.asarray(tokens))
    assert np.array_equal(each, np.stack([t[tokens.reshape(-1)].T for t in tables]))


def test_bfloat16_pads_few_columns_without_changing_them(tokens):
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_model())
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), model)
    positions = jnp.zeros((1, 1), jnp.int32)
    logits, _ = run(model, tokens[:1, :1], positions, None, causal(1, 1))
    expected, _ = run(exact, tokens[:1, :1], positions, None, causal(1, 1))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=0.05 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_write_window_writes_each_row_at_its_start(rows, axis):
    rng = np.random.default_rng(rows)
    buffer = rng.normal(size=(rows, 6, 7, 8)).astype(np.float32)
    shape = list(buffer.shape)
    shape[axis] = 2
    window = rng.normal(size=shape).astype(np.float32)
    start = rng.integers(0, buffer.shape[axis] - 1, rows).astype(np.int32)
    expected = buffer.copy()
    for row in range(rows):
        at = [slice(None)] * 3
        at[axis - 1] = slice(start[row], start[row] + 2)
        expected[(row, *at)] = window[row]
    written = layers.write_window(*map(jnp.asarray, (buffer, window, start)), axis=axis)
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("axis", [2, 3])
def test_write_window_writes_chosen_rows(axis, lead, kind, monkeypatch):
    """One by one on a CPU, and as one scatter elsewhere; of stacked layers too."""
    monkeypatch.setattr(layers, "platform", lambda: kind)
    rng = np.random.default_rng(axis)
    buffer = rng.normal(size=(*(3,) * lead, 9, 6, 7, 8)).astype(np.float32)
    rows = np.asarray([7, 0, 4], np.int32)
    shape = list(buffer.shape)
    shape[lead], shape[lead + axis] = len(rows), 2
    window = rng.normal(size=shape).astype(np.float32)
    start = rng.integers(0, buffer.shape[lead + axis] - 1, len(rows)).astype(np.int32)
    expected = buffer.copy()
    for place, row in enumerate(rows):
        at = [slice(None)] * (lead + 4)
        at[lead], at[lead + axis] = row, slice(start[place], start[place] + 2)
        expected[tuple(at)] = np.take(window, place, axis=lead)
    written = layers.write_window(
        *map(jnp.asarray, (buffer, window, start)), lead + axis, jnp.asarray(rows)[:, None], lead
    )
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(("axis", "lead"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("width", [1, 3, 4, 11, 19])
def test_write_window_writes_to_pages(axis, lead, width, kind, monkeypatch):
    """Rows begin anywhere in pages of 4 slots; past their pages nothing is written but page 0."""
    monkeypatch.setattr(layers, "platform", lambda: kind)
    rng = np.random.default_rng(width)
    buffer = rng.normal(size=(*(2,) * lead, 20, 2, 4, 4)).astype(np.float32)
    pages = np.asarray([[7, 3, 9, 0, 0], [2, 0, 0, 0, 0], [15, 1, 8, 4, 10]], np.int32)
    shape = list(buffer.shape)
    shape[lead], shape[lead + axis] = 3, width
    window = rng.normal(size=shape).astype(np.float32)
    expected, start = buffer.copy(), np.asarray([5, 2, 13], np.int32)
    for row in range(3):
        for token, slot in enumerate(range(start[row], start[row] + width)):
            page = pages[row, slot // 4] if slot < 20 else 0
            at, own = ([slice(None)] * buffer.ndim for _ in range(2))
            at[lead], at[lead + axis] = page, slot % 4
            own[lead], own[lead + axis] = row, token
            expected[tuple(at)] = window[tuple(own)]
    written = layers.write_window(
        *map(jnp.asarray, (buffer, window, start)), lead + axis, jnp.asarray(pages), lead
    )
    own = np.arange(1, 20)
    np.testing.assert_array_equal(
        np.take(np.asarray(written), own, axis=lead), np.take(expected, own, axis=lead)
    )


def test_linear_has_the_gradient_of_a_product():
    rng = np.random.default_rng(2)
    weight, x, seen = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 3), (3, 4), (5, 4))
    )
    ours = jax.grad(lambda w, x: (layers.linear(w, x) * seen).sum(), (0, 1))(weight, x)
    plain = jax.grad(lambda w, x: (w @ x * seen).sum(), (0, 1))(weight, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, plain)


def test_model_has_as_many_weights_as_its_config_says():
    for tied in (True, False):
        model = tiny_model(tie_embeddings=tied, head_dim=6)
        counted = sum(leaf.size for leaf in jax.tree.leaves(model))
        assert counted == model.config.num_parameters


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, r"num_heads \(3\).*num_kv_heads \(2\)"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_impossible_configurations_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**changes)


def test_config_is_frozen_and_hashable():
    config = tiny_config()
    assert hash(config) == hash(tiny_config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1
