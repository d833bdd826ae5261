"""Losses and their gradients against float64 twins in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import layers
from tests.cases import slow_but
from tests.conftest import tiny_model
from train.distil import distillation_loss
from train.labels import Labelled, _top_of_probs
from train.loss import (
    DIVERGENCES,
    LOSSES,
    cross_entropy,
    forward_kl,
    lumped,
    reverse_kl,
    total_variation,
    with_tail,
)
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


TWINS = {
    "forward_kl": lambda p, q: p * np.log(p / q),
    "reverse_kl": lambda p, q: q * np.log(q / p),
    "total_variation": lambda p, q: np.abs(p - q) / 2,
}


def cells(logits: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    """Probabilities of every token; or of the listed ones, and of all others as one."""
    probs = np.exp(log_softmax(logits))
    if ids is None:
        return probs
    listed = np.take_along_axis(probs, ids, axis=0)
    return np.concatenate([listed, 1 - listed.sum(axis=0, keepdims=True)])


def labels_of(teacher: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-teacher, axis=0)[:k]
    return ids, np.take_along_axis(log_softmax(teacher), ids, axis=0)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_over_the_whole_vocabulary(rng, name):
    teacher = rng.normal(size=(V, C))
    log_p = jax.nn.log_softmax(jnp.float32(teacher), axis=0)
    check(
        lambda x: DIVERGENCES[name](log_p, jax.nn.log_softmax(x, axis=0)),
        lambda x: TWINS[name](cells(teacher, None), cells(x, None)).sum(axis=0),
        rng.normal(size=(V, C)),
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_over_the_most_likely_tokens(rng, name):
    teacher = rng.normal(size=(V, C))
    ids, log_p = labels_of(teacher, K)
    check(
        lambda x: DIVERGENCES[name](with_tail(jnp.float32(log_p)), lumped(x, jnp.asarray(ids))),
        lambda x: TWINS[name](cells(teacher, ids), cells(x, ids)).sum(axis=0),
        rng.normal(size=(V, C)),
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_lumping_never_adds_divergence_and_vanishes_with_all_tokens(rng, name):
    teacher, logits = (jnp.float32(x) for x in rng.normal(size=(2, V, C)))
    distributions = (jax.nn.log_softmax(teacher, axis=0), jax.nn.log_softmax(logits, axis=0))
    whole = np.asarray(DIVERGENCES[name](*distributions))
    found = []
    for k in (1, K, V - 1):
        ids, log_p = labels_of(np.asarray(teacher), k)
        labels = with_tail(jnp.float32(log_p))
        found.append(DIVERGENCES[name](labels, lumped(logits, jnp.asarray(ids))))
    assert np.all(np.diff([*found, whole], axis=0) >= -1e-5)
    np.testing.assert_allclose(found[-1], whole, rtol=1e-4, atol=1e-5)


def test_total_variation_is_what_verification_rejects(rng):
    p, q = (cells(x, None) for x in rng.normal(size=(2, V, C)))
    found = total_variation(jnp.float32(np.log(p)), jnp.float32(np.log(q)))
    np.testing.assert_allclose(found, 1 - np.minimum(p, q).sum(axis=0), atol=1e-6)


def test_the_two_directions_of_kl_differ_and_both_vanish_at_equality(rng):
    p, q = (jax.nn.log_softmax(jnp.float32(x), axis=0) for x in rng.normal(size=(2, V, C)))
    assert not np.allclose(forward_kl(p, q), reverse_kl(p, q), rtol=0.1)
    np.testing.assert_allclose(forward_kl(p, q), reverse_kl(q, p), rtol=1e-5)
    np.testing.assert_allclose(forward_kl(p, p), 0, atol=1e-7)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_labels_that_sum_to_more_than_one_stay_finite(name):
    logits = jnp.float32([[40.0], [-40.0], [-40.0]])
    ids, log_p = jnp.int32([[0], [1]]), with_tail(jnp.float32([[1e-3], [-12.0]]))
    value, gradient = jax.value_and_grad(lambda x: DIVERGENCES[name](log_p, lumped(x, ids)).sum())(
        logits
    )
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_stored_distributions_are_the_models(rng):
    model = tiny_model()
    rows = rng.integers(0, 64, (2, 9)).astype(np.int32)
    ids, log_p, own = _top_of_probs(model, rows, np.float32([0, 0.8]), 5, "float32")
    probs = log_softmax(np.asarray(sequence_logits(model, jnp.asarray(rows), jnp.dtype("float32"))))
    probs = probs.T.reshape(2, 9, -1)
    np.testing.assert_allclose(np.take_along_axis(probs, np.asarray(ids), -1), log_p, atol=2e-5)
    np.testing.assert_allclose(-np.sort(-probs, axis=-1)[..., :5], log_p, atol=2e-5)
    for row, scale in ((0, 1.0), (1, 0.8)):
        tempered = log_softmax(probs[row].T / scale).T
        chosen = tempered[np.arange(8), rows[row, 1:]]
        np.testing.assert_allclose(own[row, :-1], chosen, atol=2e-5)
    assert (own[:, -1] == 0).all()


def labelled(rng, rows: int, length: int) -> Labelled:
    tokens = rng.integers(0, 64, (rows, length)).astype(np.int32)
    ids, log_p, _ = _top_of_probs(
        tiny_model(seed=5), tokens, np.ones(rows, np.float32), 6, "float32"
    )
    weight = rng.random((rows, length)).astype(np.float32)
    return Labelled(tokens, np.asarray(ids).astype(np.uint8), np.asarray(log_p), weight)


@pytest.mark.parametrize("name", slow_but(LOSSES, "forward_kl"))
def test_distillation_loss_is_the_weighted_mean_over_all_parts(rng, name):
    model, parts = tiny_model(), (labelled(rng, 2, 8), labelled(rng, 1, 12))
    total, positions = 0.0, 0
    for part in parts:
        logits = sequence_logits(model, jnp.asarray(part.tokens), jnp.dtype("float32"))
        log_q = log_softmax(np.asarray(logits)).T.reshape(*part.tokens.shape, -1)
        for n, t in np.ndindex(part.tokens.shape):
            listed = np.exp(log_q[n, t])[part.ids[n, t]]
            p = np.exp(np.float64(part.log_p[n, t]))
            if name == "cross_entropy":
                last = t + 1 == part.tokens.shape[1]
                value = 0.0 if last else -log_q[n, t, part.tokens[n, t + 1]]
            else:
                pairs = np.append(p, 1 - p.sum()), np.append(listed, 1 - listed.sum())
                value = TWINS[name](*pairs).sum()
            total, positions = total + value * part.weight[n, t], positions + 1
    found = distillation_loss(model, parts, loss=name, dtype="float32")
    assert float(found) == pytest.approx(total / positions, rel=1e-4)


@pytest.mark.parametrize("name", slow_but(LOSSES, "forward_kl"))
def test_a_position_of_weight_zero_teaches_nothing(rng, name):
    part = labelled(rng, 2, 8)
    part.weight[:, 4:] = 0
    other = part._replace(log_p=part.log_p.copy(), ids=part.ids.copy(), tokens=part.tokens.copy())
    other.ids[:, 4:], other.log_p[:, 4:], other.tokens[:, 5:] = 0, -1.0, 1
    gradients = [
        jax.grad(lambda m, p=p: distillation_loss(m, (p,), loss=name, dtype="float32"))(
            tiny_model()
        )
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
    probs = log_softmax(np.asarray(logits))
    wanted = -probs[rows[:, 1:].reshape(-1), np.arange(16)].mean()
    found = next_token_loss(tiny_model(), jnp.asarray(rows), dtype=jnp.dtype("float32"))
    assert float(found) == pytest.approx(wanted, rel=1e-5)
