"""What a chain of a pair's draft gains, and the measurements that it goes by."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.checkpoints.acceptance import read_acceptance, write_acceptance
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.pair import Pair, load_pair
from specjax.decoding import link
from specjax.methods import defaults, drafted, records
from specjax.methods.choice import Asked, choose
from specjax.methods.replay import Text
from specjax.models.pruning import with_rows
from specjax.models.transformer import forward
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder
from train.export import tell_acceptance

__all__ = ["own_cache"]
TARGET, DRAFT = tiny_model(), tiny_model(1, num_layers=1)
TOKENS = tuple(np.random.default_rng(0).integers(0, TARGET.config.vocab_size, 40).tolist())


def logits(model: specjax.Model, tokens: tuple[int, ...]) -> jax.Array:
    """Those after every token, by one pass of the whole model."""
    at = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, len(tokens), len(tokens)), bool))
    return forward(model, jnp.asarray([tokens], jnp.int32), at, None, mask)[0][0]


@pytest.mark.parametrize("is_pruned", [False, True])
def test_overlaps_are_those_of_the_two_distributions(is_pruned):
    draft = DRAFT
    if is_pruned:  # of rows for half of the tokens, and one for the others
        known = np.arange(0, TARGET.config.vocab_size, 2)
        draft = with_rows(tiny_model(1, vocab_size=len(known) + 1), known, TARGET.config.vocab_size)
    p, q = logits(TARGET, TOKENS), logits(draft, TOKENS)
    places = range(7, 39, 4)
    same = p.argmax(1) == q.argmax(1)
    found = link.overlaps(TARGET, draft, TOKENS, places, 0.0)
    np.testing.assert_array_equal(found, same[jnp.asarray(places)])
    shared = jnp.minimum(jax.nn.softmax(p / 0.8, 1), jax.nn.softmax(q / 0.8, 1)).sum(1)
    found = link.overlaps(TARGET, draft, TOKENS, places, 0.8)
    np.testing.assert_allclose(found, shared[jnp.asarray(places)], rtol=1e-4)
    np.testing.assert_allclose(link.overlaps(TARGET, TARGET, TOKENS, places, 0.8), 1, rtol=1e-4)


def test_tokens_per_step_are_those_of_chains_that_begin_anywhere(monkeypatch):
    right = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)
    monkeypatch.setattr(drafted, "overlaps", lambda target, draft, text, columns, t: right)
    found = drafted._tokens(Pair(TARGET, None, [DRAFT]), [Text(tuple(range(10)), 2)], 0.0, 3)
    # One deep 6 of 8 are right, two deep 3 of the 7 that are followed by another, three 1 of 6.
    assert found == pytest.approx((1 + 6 / 8, 1 + 6 / 8 + 3 / 7, 1 + 6 / 8 + 3 / 7 + 1 / 6))


@pytest.mark.parametrize(("where", "taken"), [("cpu", {1: 7, 3: 9}), ("gpu", {1: 11, 3: 13})])
def test_starting_a_layers_program_is_no_part_of_a_pass_on_a_cpu(where, taken, monkeypatch):
    monkeypatch.setattr(link, "platform", lambda: where)
    monkeypatch.setattr(link, "_least_seconds", lambda clocks, runs: [10, 12, 1, 1, 4])
    assert link.passes_seconds(tiny_model(4), (1, 3)) == taken


@pytest.fixture
def pair(monkeypatch) -> Pair:
    """A small pair with a tokenizer, which is weighed all the same."""
    monkeypatch.setattr(defaults, "LEAST_TIMED", 0)
    monkeypatch.setattr(defaults, "LEAST_WEIGHED", 0)
    return load_pair(f"{pair_folder()}/target", f"{pair_folder()}/two")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_is_measured_once_along_what_the_model_writes(pair, temperature, monkeypatch):
    taken = choose(Asked(), pair, temperature)
    assert taken.setting.method in ("none", "chain")
    found = drafted.findings(pair, temperature, 1)
    assert found.written
    assert found.along > 100
    assert len(found.steps) == 1 + len(found.tokens) == 8
    assert all(1 < less <= more for less, more in zip(found.tokens, found.tokens[1:], strict=False))
    assert str(found) in taken.reason
    monkeypatch.setattr(drafted, "measure", None)  # it is known now
    assert choose(Asked(), pair, temperature) == taken


def test_a_model_drafts_right_for_itself(pair):
    found = drafted.measure(pair._replace(drafts=[pair.target]), 0.0, 1)
    assert found.tokens == pytest.approx([2, 3, 4, 5, 6, 7, 8])


def test_bundled_prompts_tell_where_no_text_was_written(pair, monkeypatch):
    monkeypatch.setattr(drafted, "texts_of", lambda pair, temperature: [])
    found = drafted.measure(pair, 0.0, 1)
    assert not found.written
    assert "of bundled prompts" in str(found)


def test_a_drafts_folder_says_what_its_chains_give(pair, monkeypatch, tmp_path):
    """As training leaves it there: nothing is written then, and passes alone are timed."""
    folder = Path(shutil.copytree(pair_folder(), tmp_path / "pair"))
    tell_acceptance(pair.target, folder / "two")
    known = read_acceptance(folder / "two")
    assert known.along > 100
    assert known.at(0.0) == pytest.approx(drafted.measure(pair, 0.0, 1).tokens, abs=1e-4)
    assert known.at(0.6) == known.tokens[0.8]
    assert known.at(2.0) == known.tokens[1.0]
    own = load_pair(f"{folder}/target", f"{folder}/two,{folder}/one")
    assert own.acceptance == known
    monkeypatch.setattr(drafted, "texts_of", None)
    found = drafted.findings(own, 0.0, 1)
    assert (found.tokens, found.along, found.written) == (known.at(0.0), known.along, True)
    assert len(drafted.findings(own, 0.9, 8).tokens) == 3
    # It is said of this target, and of no other.
    write_acceptance(folder / "two", known._replace(parameters=1))
    assert load_pair(f"{folder}/target", f"{folder}/two").acceptance is None


@pytest.mark.parametrize(
    "held", ["{", "[]", "{}", '{"parameters": 1, "along": 9, "tokens": {"0": [1.5]}}',
             '{"parameters": 1, "along": 9, "tokens": {"0": [1.5], "0.8": [0.5]}}',
             '{"parameters": 1, "along": 9, "tokens": {"0": [1.5], "warm": [1.5]}}']
)  # fmt: skip
def test_a_damaged_file_is_refused_in_a_sentence(held, tmp_path):
    (tmp_path / "acceptance.json").write_text(held)
    with pytest.raises(CheckpointError, match=r"acceptance.json (cannot be read|must have)"):
        read_acceptance(tmp_path)


@pytest.mark.parametrize("held", [{}, {"date": "2026"}, {"tokens": [1.0]}, [], {"steps": [0.0]}])
def test_what_was_kept_in_another_way_is_measured_anew(pair, held, monkeypatch):
    first = drafted.findings(pair, 0.0, 1)
    path = records.file_of_findings()
    kept = json.loads(path.read_text())
    (name,) = kept
    assert name.endswith("temperature 0, a chain")
    path.write_text(json.dumps({name: kept[name] | held if held and isinstance(held, dict) and
                                "date" not in held else held}))  # fmt: skip
    monkeypatch.setattr(drafted, "measure", lambda *asked: first._replace(date="2026-12-01"))
    assert drafted.findings(pair, 0.0, 1).date == "2026-12-01"
