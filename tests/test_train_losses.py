"""Losses and their gradients against float64 twins in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import layers
from tests.conftest import tiny_model
from train.distil import distillation_loss
from train.labels import Labelled, _top_of_law
from train.loss import cross_entropy, forward_kl, top_k_forward_kl
from train.step import next_token_loss, sequence_logits

V, C, K = 11, 7, 4


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=0)
    return x - np.log(np.exp(x).sum(axis=0))


def numeric_gradient(f, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        move = np.zeros_like(x)
        move[at] = step
        found[at] = (f(x + move) - f(x - move)) / (2 * step)
    return found


def check(loss, twin, logits: np.ndarray) -> None:
    """Values and gradients of `loss` against `twin`, which is float64."""
    np.testing.assert_allclose(loss(jnp.float32(logits)), twin(logits), rtol=2e-5, atol=2e-6)
    gradient = jax.grad(lambda x: loss(x).sum())(jnp.float32(logits))
    np.testing.assert_allclose(
        gradient, numeric_gradient(lambda x: twin(x).sum(), logits), rtol=1e-4, atol=1e-5
    )


def test_cross_entropy(rng):
    labels = rng.integers(0, V, C).astype(np.int32)
    check(
        lambda x: cross_entropy(x, jnp.asarray(labels)),
        lambda x: -log_softmax(x)[labels, np.arange(C)],
        3 * rng.normal(size=(V, C)),
    )


def full_kl(teacher: np.ndarray, x: np.ndarray) -> np.ndarray:
    log_p = log_softmax(teacher)
    return (np.exp(log_p) * (log_p - log_softmax(x))).sum(axis=0)


def test_forward_kl(rng):
    teacher = 3 * rng.normal(size=(V, C))
    check(
        lambda x: forward_kl(x, jnp.float32(teacher)),
        lambda x: full_kl(teacher, x),
        3 * rng.normal(size=(V, C)),
    )


def lumped_kl(teacher: np.ndarray, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The same, token by token: the listed ones and one for all others."""
    p, q = np.exp(log_softmax(teacher)), np.exp(log_softmax(x))
    found = np.zeros(C)
    for c in range(C):
        listed = ids[:, c]
        rest = np.setdiff1d(np.arange(V), listed)
        pairs = [(p[i, c], q[i, c]) for i in listed] + [(p[rest, c].sum(), q[rest, c].sum())]
        found[c] = sum(a * np.log(a / b) for a, b in pairs)
    return found


def labels_of(teacher: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-teacher, axis=0)[:k]
    return ids, np.take_along_axis(log_softmax(teacher), ids, axis=0)


def test_top_k_forward_kl(rng):
    teacher = rng.normal(size=(V, C))
    ids, log_p = labels_of(teacher, K)
    check(
        lambda x: top_k_forward_kl(x, jnp.asarray(ids), jnp.float32(log_p)),
        lambda x: lumped_kl(teacher, ids, x),
        rng.normal(size=(V, C)),
    )


def test_lumping_never_adds_divergence_and_vanishes_with_all_tokens(rng):
    teacher, logits = rng.normal(size=(2, V, C))
    whole = np.asarray(forward_kl(jnp.float32(logits), jnp.float32(teacher)))
    lumped = []
    for k in (1, K, V - 1):
        ids, log_p = labels_of(teacher, k)
        lumped.append(top_k_forward_kl(jnp.float32(logits), jnp.asarray(ids), jnp.float32(log_p)))
    assert np.all(np.diff([*lumped, whole], axis=0) >= -1e-5)
    np.testing.assert_allclose(lumped[-1], whole, rtol=1e-4, atol=1e-5)


def test_labels_that_sum_to_more_than_one_stay_finite():
    logits = jnp.float32([[40.0], [-40.0], [-40.0]])
    ids, log_p = jnp.int32([[0], [1]]), jnp.float32([[1e-3], [-12.0]])
    value, gradient = jax.value_and_grad(lambda x: top_k_forward_kl(x, ids, log_p).sum())(logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_stored_laws_are_the_models(rng):
    model = tiny_model()
    rows = rng.integers(0, 64, (2, 9)).astype(np.int32)
    ids, log_p = _top_of_law(model, rows, 5, "float32")
    law = log_softmax(np.asarray(sequence_logits(model, jnp.asarray(rows), jnp.dtype("float32"))))
    law = law.T.reshape(2, 9, -1)
    np.testing.assert_allclose(np.take_along_axis(law, np.asarray(ids), -1), log_p, atol=2e-5)
    np.testing.assert_allclose(-np.sort(-law, axis=-1)[..., :5], log_p, atol=2e-5)


def labelled(rng, rows: int, length: int) -> Labelled:
    tokens = rng.integers(0, 64, (rows, length)).astype(np.int32)
    ids, log_p = _top_of_law(tiny_model(seed=5), tokens, 6, "float32")
    weight = rng.random((rows, length)).astype(np.float32)
    return Labelled(tokens, np.asarray(ids).astype(np.uint8), np.asarray(log_p), weight)


@pytest.mark.parametrize("hard", [0.0, 0.3])
def test_distillation_loss_is_the_weighted_mean_over_all_parts(rng, hard):
    model, parts = tiny_model(), (labelled(rng, 2, 8), labelled(rng, 1, 12))
    total, positions = 0.0, 0
    for part in parts:
        logits = sequence_logits(model, jnp.asarray(part.tokens), jnp.dtype("float32"))
        log_q = log_softmax(np.asarray(logits)).T.reshape(*part.tokens.shape, -1)
        for n, t in np.ndindex(part.tokens.shape):
            q = np.exp(log_q[n, t])
            p, chosen = np.exp(np.float64(part.log_p[n, t])), part.ids[n, t]
            pairs = [*zip(p, q[chosen], strict=True), (1 - p.sum(), 1 - q[chosen].sum())]
            value = (1 - hard) * sum(a * np.log(a / b) for a, b in pairs)
            if t + 1 < part.tokens.shape[1]:
                value -= hard * log_q[n, t, part.tokens[n, t + 1]]
            total, positions = total + value * part.weight[n, t], positions + 1
    found = distillation_loss(model, parts, hard=hard)
    assert float(found) == pytest.approx(total / positions, rel=1e-4)


def test_a_position_of_weight_zero_teaches_nothing(rng):
    part = labelled(rng, 2, 8)
    part.weight[:, 4:] = 0
    other = part._replace(log_p=part.log_p.copy(), ids=part.ids.copy())
    other.ids[:, 4:], other.log_p[:, 4:] = 0, -1.0
    gradients = [
        jax.grad(lambda m, p=p: distillation_loss(m, (p,), hard=0.0))(tiny_model())
        for p in (part, other)
    ]
    for one, two in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_gradients_of_linear_are_those_of_a_dot(rng, dtype, tolerance):
    weight, x, seed = (
        jnp.float32(rng.normal(size=shape)) for shape in ((6, 16), (16, 10), (6, 10))
    )
    own = jax.vjp(lambda w, x: layers.linear(w, x, jnp.dtype(dtype)), weight, x)
    plain = jax.vjp(jnp.dot, weight, x)
    for found, wanted in zip((own[0], *own[1](seed)), (plain[0], *plain[1](seed)), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, atol=tolerance * float(jnp.abs(wanted).max()))


def test_next_token_loss_is_the_mean_over_predicted_tokens(rng):
    rows = rng.integers(0, 64, (2, 9)).astype(np.int32)
    logits = sequence_logits(tiny_model(), jnp.asarray(rows[:, :-1]), jnp.dtype("float32"))
    law = log_softmax(np.asarray(logits))
    wanted = -law[rows[:, 1:].reshape(-1), np.arange(16)].mean()
    found = next_token_loss(tiny_model(), jnp.asarray(rows), dtype=jnp.dtype("float32"))
    assert float(found) == pytest.approx(wanted, rel=1e-5)
