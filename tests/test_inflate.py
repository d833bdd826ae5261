"""An inflated model computes what the small one computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import ModelConfig
from specjax.models.inflate import deepen, inflate, widen
from specjax.models.kv_cache import empty_cache
from specjax.models.transformer import forward, initialize
from tests.conftest import tiny_model


@partial(jax.jit, static_argnames="steps")
def greedy(model, prompt, steps=4):
    """Greedy continuations with a cache: tokens `[steps + 1, B]` and all logits."""
    rows, width = prompt.shape
    cache = empty_cache(model.config, rows, width + steps, model.embedding.dtype)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), prompt.shape)
    logits, new = forward(model, prompt, positions, None, None)
    cache = cache.keep(new, None, jnp.full(rows, width, jnp.int32))
    itself = jnp.ones((rows, 1, 1), bool)

    def step(carry, _):
        cache, last = carry
        logits, new = forward(model, last[:, None], cache.length[:, None], cache, itself)
        following = logits[:, 0].argmax(-1).astype(jnp.int32)
        return (cache.keep(new, None, jnp.ones(rows, jnp.int32)), following), (last, logits)

    first = logits[:, -1].argmax(-1).astype(jnp.int32)
    (_, last), (tokens, decoded) = jax.lax.scan(step, (cache, first), length=steps)
    return jnp.concatenate([tokens, last[None]]), (logits, decoded)


def assert_same_function(small, large):
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 7)), jnp.int32)
    (tokens, logits), (same, close) = greedy(small, prompt), greedy(large, prompt)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), close, logits)
    np.testing.assert_array_equal(same, tokens)


@pytest.mark.parametrize(
    ("factor", "extra", "changes"),
    [
        (2, 1, {"num_layers": 1}),
        (3, 0, {"num_layers": 1, "tie_embeddings": False}),
        (2, 2, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 6}),
    ],
)
def test_inflated_model_is_the_same_function(factor, extra, changes):
    model = tiny_model(**changes)
    wide = widen(model, factor)
    deeper = deepen(wide, wide.config.num_parameters)
    assert deeper.config == wide.config
    layer = sum(leaf.size for leaf in jax.tree.leaves(wide.layers[0]))
    large = inflate(model, wide.config.num_parameters + extra * layer)
    assert large.config.hidden_size == factor * model.config.hidden_size
    assert large.config.num_layers == model.config.num_layers + extra
    assert large.config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(large))
    assert_same_function(model, large)


def test_bfloat16_weights_are_copied_without_rounding():
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_model(num_layers=1))
    large = inflate(model, 5 * model.config.num_parameters)
    assert {leaf.dtype for leaf in jax.tree.leaves(large)} == {jnp.dtype("bfloat16")}
    exact, wide = (jax.tree.map(lambda x: x.astype(jnp.float32), m) for m in (model, large))
    assert_same_function(exact, wide)


def test_bundled_size_inflates_to_a_hundred_million():
    config = ModelConfig(4096, 640, 1536, 4, 10, 2, 64)
    shapes = jax.eval_shape(lambda: inflate(initialize(jax.random.key(0), config), 100_000_000))
    assert (shapes.config.hidden_size, shapes.config.num_layers) == (1280, 6)
    assert abs(shapes.config.num_parameters / 1e8 - 1) < 0.02


def test_added_layers_own_their_memory():
    model = tiny_model()
    deeper = deepen(model, 3 * model.config.num_parameters)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(deeper)]
    assert len(set(pointers)) == len(pointers)


def test_a_model_cannot_shrink():
    model = tiny_model()
    with pytest.raises(ValueError, match=f"{model.config.num_parameters} weights.*to 10"):
        inflate(model, 10)
