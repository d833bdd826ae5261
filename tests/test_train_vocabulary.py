"""Drafts that learn some of their target's tokens: which, in what rows, from what distributions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.transformer import initialize
from tests.conftest import tiny_model
from tests.rows import rows_of
from tests.test_train_losses import log_softmax
from train.chunks import make_chunks
from train.collect import Collected
from train.config import Labels
from train.distil import distillation_loss
from train.labels import NEVER, Labelled, collected_texts, label, load_labels, passes
from train.loop import Log
from train.loss import LOSSES
from train.step import next_token_loss, sequence_logits
from train.vocabulary import Rows, in_training, most_frequent

V, KNOWN = 64, 20
F32 = jnp.dtype("float32")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def ids(rng) -> np.ndarray:
    return np.sort(rng.permutation(V)[:KNOWN])


def draft_of(seed: int = 3):
    return initialize(jax.random.key(seed), in_training(tiny_model().config, KNOWN))


def test_the_tokens_that_the_target_took_most_often_are_known():
    tokens = np.array([[9, 9, 9, 5, 5, 5], [9, 9, 7, 7, 0, 0]], np.int32)
    rows = Collected(tokens, np.array([2, 2]), np.array([4, 2]), np.zeros(2, np.float32), 4)
    np.testing.assert_array_equal(most_frequent(rows, 2, V), [5, 7])  # 5, 5, 5; 7, 7; then 9
    np.testing.assert_array_equal(most_frequent(rows, 4, V), [0, 5, 7, 9])  # 0: the lowest unseen


def test_a_draft_says_in_training_what_it_says_of_its_targets_tokens(rng, ids):
    rows, draft = Rows(ids, V), draft_of()
    tokens = rng.integers(0, V, (2, 9)).astype(np.int32)
    dtype = jnp.dtype("float32")
    own = np.asarray(sequence_logits(draft, jnp.asarray(rows.tokens(tokens)), dtype))
    said = np.asarray(sequence_logits(rows.whole(draft), jnp.asarray(tokens), dtype))
    np.testing.assert_allclose(said[ids], own[:KNOWN], rtol=1e-6)
    assert (np.delete(said, ids, axis=0) == np.finfo(np.float32).min).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_draft_is_taught_the_targets_distribution_of_known_tokens(rng, ids, name):
    """Against the definition, in the target's tokens: P(known) times the divergence within them."""
    k, rows, draft = 12, Rows(ids, V), draft_of()
    logits = 3 * rng.normal(size=(2, 7, V))
    probs = np.exp(log_softmax(logits.reshape(-1, V).T).T.reshape(2, 7, V))
    top = np.argsort(-probs, axis=-1)[..., :k]
    tokens = rng.integers(0, V, (2, 7)).astype(np.int32)
    weight = rng.random((2, 7)).astype(np.float32)
    part = Labelled(tokens, top, np.log(np.take_along_axis(probs, top, -1)), weight)
    said = np.asarray(sequence_logits(rows.whole(draft), jnp.asarray(tokens), F32))
    said = np.exp(log_softmax(said.astype(np.float64)).T.reshape(2, 7, V))
    total = 0.0
    for at in np.ndindex(2, 7):
        listed = [t for t in top[at] if t in ids]
        share = 1 - sum(probs[at][t] for t in top[at] if t not in ids)
        p = np.append(probs[at][listed], share - probs[at][listed].sum()) / share
        q = np.append(said[at][listed], 1 - said[at][listed].sum())
        following = tokens[at[0], at[1] + 1] if at[1] < 6 else -1
        value = {
            "forward_kl": lambda p=p, q=q: (p * np.log(p / q)).sum(),
            "reverse_kl": lambda p=p, q=q: (q * np.log(q / p)).sum(),
            "total_variation": lambda p=p, q=q: 0.5 * np.abs(p - q).sum(),
            "cross_entropy": lambda at=at, f=following: -np.log(said[at][f]) if f in ids else 0.0,
        }[name]()
        total += value * weight[at] * share
    taught = rows.labelled(part)
    found = distillation_loss(draft, (taught,), loss=name, dtype="float32")
    assert float(found) == pytest.approx(total / 14, rel=1e-4)
    gradient = jax.grad(lambda m: distillation_loss(m, (taught,), loss=name, dtype="float32"))(
        draft
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_tokens_that_are_never_foreseen_are_no_part_of_the_loss(rng, ids):
    rows, draft = Rows(ids, V), draft_of()
    tokens = rng.integers(0, V, (3, 8)).astype(np.int32)
    said = np.asarray(sequence_logits(rows.whole(draft), jnp.asarray(tokens[:, :-1]), F32))
    losses = -log_softmax(said).T.reshape(3, 7, V)
    wanted = [
        losses[n, t, tokens[n, t + 1]] for n, t in np.ndindex(3, 7) if tokens[n, t + 1] in ids
    ]
    assert 0 < len(wanted) < 21
    found = next_token_loss(draft, jnp.asarray(rows.tokens(tokens)), dtype=F32)
    assert float(found) == pytest.approx(np.mean(wanted), rel=1e-5)


def test_passes_hold_every_row_once_in_few_widths(rng):
    length = rng.integers(1, 513, 128)
    found = list(passes(length, 512, 4096))
    np.testing.assert_array_equal(np.sort(np.concatenate([each[0] for each in found])), range(128))
    for chosen, size, width in found:
        assert len(chosen) <= size == 4096 // width
        assert length[chosen].max() <= width <= 512
        assert width % 64 == 0
    padded = sum(size * width for _, size, width in found)
    assert padded < 1.35 * length.sum()  # 1.95 where all rows have the longest width
    assert [each[2] for each in passes(np.array([3, 5]), 24, 100)] == [24]


@pytest.mark.slow
def test_labels_of_rows_of_other_lengths_are_those_of_each_row_alone(tmp_path):
    target, log = tiny_model(), Log(tmp_path / "log.jsonl")
    rows = rows_of(target, 6, np.tile(np.float32([0, 1]), 3))
    short = rows._replace(length=np.array([1, 2, 5, 9, 11, 12], np.int32))
    held = short._asdict()
    del held["steps"]
    make_chunks("collect", tmp_path / "collected", 1, lambda _: held, log)
    settings = Labels(top_k=4, tokens=40, dtype="float32")
    texts = partial(collected_texts, tmp_path / "collected")
    label(tmp_path / "labels", target, texts, 1, settings, log)
    labels, own = load_labels(tmp_path / "labels", 1)
    for row in range(6):
        end = int(short.prompt[row] + short.length[row])
        logits = sequence_logits(
            target, jnp.asarray(rows.tokens[row : row + 1, :end]), jnp.dtype("float32")
        )
        log_p = log_softmax(np.asarray(logits)).T
        chosen = np.take_along_axis(log_p, np.asarray(labels.ids[row, :end], np.int64), -1)
        np.testing.assert_allclose(chosen, labels.log_p[row, :end], atol=5e-3)
        np.testing.assert_allclose(-np.sort(-log_p)[:, :4], labels.log_p[row, :end], atol=5e-3)
        following = rows.tokens[row, 1:end]
        np.testing.assert_allclose(
            own[row, : end - 1], log_p[np.arange(end - 1), following], atol=2e-5
        )
    total = np.exp(labels.log_p.astype(np.float32)).sum(axis=-1)
    assert (total < 1.01).all()
    assert np.float16(NEVER) == NEVER
