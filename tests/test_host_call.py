"""Questions that a program asks Python, and their answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels
from pallas_kernels.cpu.host_call import answer_host_calls, host_call, host_call_unable
from specjax.base import grammars

pytestmark = pytest.mark.skipif(
    host_call_unable() is not None, reason=f"it cannot run here: {host_call_unable()}"
)


def times(question: str, given, shape, found) -> None:
    """Each row's sum times the number that is asked for."""
    sums = np.frombuffer(given, np.int32).reshape(shape).sum(axis=1)
    if sums.max() > 100:
        raise ValueError(f"{sums.max()} is too much")
    np.frombuffer(found, np.int32).reshape(shape[0], -1)[:] = int(question) * sums[:, None]


@pytest.fixture(autouse=True)
def answering():
    answer_host_calls(times)
    yield
    grammars._answer_host_calls.cache_clear()  # whoever asks next hands over anew


def test_answers_within_loops_and_under_vmap():
    @jax.jit
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, own: own + host_call("2", own, (2, 3)), x)

    x = jnp.asarray([[1, 0, 0], [0, 1, 1]], jnp.int32)
    expected = np.asarray(x)
    for _ in range(3):
        expected = expected + 2 * expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(loop(x), expected)
    whole = jax.jit(jax.vmap(lambda own: host_call("3", own, (2, 1))))(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(whole[..., 0], [[3, 6], [6, 12]])


def test_who_cannot_answer_ends_the_program_with_the_reason():
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: 101 is too much"):
        jax.jit(lambda x: host_call("1", x, (1, 1)))(jnp.full((1, 1), 101)).block_until_ready()


def test_a_program_names_no_address():
    asks = jax.jit(lambda x: host_call("7", x, (1, 1))).lower(jnp.ones((1, 4), jnp.int32)).as_text()
    assert "specjax_host_call" in asks
    assert 'question = "7"' in asks


def test_with_xlas_forms_jax_calls_back():
    rows = grammars.none_of(2, 4)
    none = jnp.zeros((2, 0), jnp.int32)
    asked = jax.jit(lambda own: own.masks(none, none, jnp.full((2, 1), grammars.ROOT), 40))
    assert "specjax_host_call" in asked.lower(rows).as_text()
    pallas_kernels.use("xla")
    try:
        with pytest.raises(ValueError, match="host_call cannot run here: XLA's forms"):
            host_call("1", none, (2, 1))
        found = asked(rows)
        np.testing.assert_array_equal(found, np.full((2, 1, 2), grammars.ALL))
    finally:
        pallas_kernels.use("auto")
