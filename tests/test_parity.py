"""Logits equal to Hugging Face transformers' on checkpoints it wrote (golden/make.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import families
from specjax.checkpoint import load_model, save_model
from specjax.model import forward

GOLDEN = Path(__file__).parent / "golden"
CASES = ["grouped_tied", "single_kv_untied", "plain"]


def logits_of(model, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return jax.jit(forward)(model, tokens, positions, None, None)[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case):
    with np.load(GOLDEN / f"{case}.npz") as golden:
        tokens, expected = golden["tokens"], golden["logits"]
    logits = logits_of(load_model(GOLDEN / case), tokens)
    # About ten chained reductions of up to 60 terms; the logits' own size sets the scale.
    tolerance = 60 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_written_here_reads_back_the_same(case, tmp_path):
    model = load_model(GOLDEN / case)
    save_model(model, tmp_path, dtype="float32")
    again = load_model(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again, model)


def test_configurations_read_as_transformers_means_them():
    read = {
        c: families.read_config(json.loads((GOLDEN / c / "config.json").read_text())) for c in CASES
    }
    grouped, single, plain = (read[case] for case in CASES)
    assert (grouped.num_heads, grouped.num_kv_heads, grouped.head_dim) == (6, 2, 10)
    assert grouped.tie_embeddings
    assert grouped.norm_eps == 1e-5
    assert (single.rope_theta, single.eos_ids, single.num_kv_heads) == (500.0, (3, 7), 1)
    assert (plain.head_dim, plain.num_kv_heads, plain.tie_embeddings) == (8, 3, False)
