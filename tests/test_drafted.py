"""What a chain of a pair's draft gains, and the measurements that it goes by."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.checkpoints.acceptance import Acceptance, read_acceptance, write_acceptance
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.ngram_files import save_ngram
from specjax.checkpoints.pair import Pair, load_pair
from specjax.decoding import pass_times
from specjax.draft.ngram import NGram, pack
from specjax.methods import defaults, drafted, draftless, records
from specjax.methods.choice import Asked, choose
from specjax.methods.registry import build, setting_of
from specjax.methods.replay import Text
from specjax.models.pruning import with_rows
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder
from tests.pairs import block_draft, forward, head
from train.export import tell_acceptance
from train.heads import logits_after

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
    found = pass_times.overlaps(TARGET, draft, TOKENS, places, 0.0)
    np.testing.assert_array_equal(found, same[None, jnp.asarray(places)])
    shared = jnp.minimum(jax.nn.softmax(p / 0.8, 1), jax.nn.softmax(q / 0.8, 1)).sum(1)
    found = pass_times.overlaps(TARGET, draft, TOKENS, places, 0.8)
    np.testing.assert_allclose(found, shared[None, jnp.asarray(places)], rtol=1e-4)
    np.testing.assert_allclose(
        pass_times.overlaps(TARGET, TARGET, TOKENS, places, 0.8), 1, rtol=1e-4
    )


def test_tokens_per_step_are_those_of_chains_that_begin_anywhere(monkeypatch):
    right = np.array([1, 1, 0, 1, 1, 1, 0, 1], np.float32)
    monkeypatch.setattr(drafted, "overlaps", lambda *of: right[None])
    found = drafted.of_chains(Pair(TARGET, None, [DRAFT]), [Text(tuple(range(10)), 2)], 0.0, 3)
    # One deep 6 of 8 are right, two deep 3 of the 7 that are followed by another, three 1 of 6.
    assert found == pytest.approx((1 + 6 / 8, 1 + 6 / 8 + 3 / 7, 1 + 6 / 8 + 3 / 7 + 1 / 6))


def test_tokens_per_step_of_a_head_are_of_the_level_that_each_token_has(monkeypatch):
    right = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 0]], np.float32)
    monkeypatch.setattr(drafted, "overlaps", lambda *of: right)
    found = drafted.of_chains(Pair(TARGET, None, [DRAFT]), [Text(tuple(range(6)), 2)], 0.0, 3)
    # One deep 3 of 4 are right, two deep 2 of the 3 that are followed by another, three 1 of 2.
    assert found == pytest.approx((1 + 3 / 4, 1 + 3 / 4 + 2 / 3, 1 + 3 / 4 + 2 / 3 + 1 / 2))


def test_overlaps_of_a_head_are_those_of_what_it_says_at_each_level():
    draft, places = head(TARGET, 1, steps=1), range(7, 39, 4)
    p, tokens = logits(TARGET, TOKENS), jnp.asarray([TOKENS], jnp.int32)
    found = pass_times.overlaps(TARGET, draft, TOKENS, places, 0.8, 3)
    for own, said in zip(found, logits_after(draft, tokens, TARGET, 3), strict=True):
        q = jax.nn.softmax(said.T / 0.8, 1)
        shared = jnp.minimum(jax.nn.softmax(p / 0.8, 1), q).sum(1)
        np.testing.assert_allclose(own, shared[jnp.asarray(places)], rtol=1e-3)
    assert not np.allclose(found[0], found[1])


@pytest.mark.parametrize(("where", "taken"), [("cpu", {1: 7, 3: 9}), ("gpu", {1: 11, 3: 13})])
def test_starting_a_layers_program_is_no_part_of_a_pass_on_a_cpu(where, taken, monkeypatch):
    monkeypatch.setattr(pass_times, "platform", lambda: where)
    monkeypatch.setattr(pass_times, "_least_seconds", lambda clocks, runs: [10, 12, 1, 1, 4])
    assert pass_times.passes_seconds(tiny_model(4), (1, 3)) == taken


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
    (chain,) = found.found
    assert chain.is_written
    assert chain.num_tokens > 100
    assert len(found.step_seconds) == 1 + len(chain.tokens_per_step) == 8
    assert all(
        1 < less <= more
        for less, more in zip(chain.tokens_per_step, chain.tokens_per_step[1:], strict=False)
    )
    assert str(found) in taken.reason
    monkeypatch.setattr(drafted, "measure", None)  # it is known now
    assert choose(Asked(), pair, temperature) == taken


def test_a_model_drafts_right_for_itself(pair):
    found = drafted.measure(pair._replace(drafts=[pair.target]), 0.0, 1)
    assert found.found[0].tokens_per_step == pytest.approx([2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(("make", "longest"), [(head, 7), (block_draft, 3)])
def test_a_draft_that_reads_hidden_states_is_weighed(make, longest, pair):
    """Its passes are timed: one a level, or one for a whole block."""
    own = pair._replace(drafts=[make(pair.target, 1, steps=1)])
    (chain,) = drafted.measure(own, 0.0, 1).found
    assert len(chain.tokens_per_step) == len(chain.seconds) == longest
    ratio = chain.seconds[-1] / chain.seconds[0]
    assert ratio == pytest.approx(longest if make is head else 1)
    assert pass_times.draft_seconds(own.drafts[0]) == pytest.approx(chain.seconds[0])
    taken = choose(Asked(), own, 0.0)
    assert taken.setting.method in ("none", "chain")
    assert "times plain decoding" in taken.reason


def test_bundled_prompts_tell_where_no_text_was_written(pair, monkeypatch):
    monkeypatch.setattr(drafted, "texts_of", lambda pair, temperature: [])
    found = drafted.measure(pair, 0.0, 1)
    assert not found.found[0].is_written
    assert "of bundled prompts" in str(found)


def test_a_drafts_folder_says_what_its_chains_give(pair, monkeypatch, tmp_path):
    """As training leaves it there: nothing is written then, and passes alone are timed."""
    folder = Path(shutil.copytree(pair_folder(), tmp_path / "pair"))
    tell_acceptance(pair.target, folder / "two")
    known = read_acceptance(folder / "two")
    assert known.num_tokens > 100
    (chain,) = drafted.measure(pair, 0.0, 1).found
    assert known.at(0.0) == pytest.approx(chain.tokens_per_step, abs=1e-4)
    assert known.at(0.6) == known.tokens_per_step[0.8]
    assert known.at(2.0) == known.tokens_per_step[1.0]
    own = load_pair(f"{folder}/target", f"{folder}/two,{folder}/one")
    assert own.acceptance == known
    monkeypatch.setattr(drafted, "texts_of", None)
    (chain,) = drafted.findings(own, 0.0, 1).found
    assert chain.tokens_per_step == known.at(0.0)
    assert (chain.num_tokens, chain.is_written) == (known.num_tokens, True)
    assert len(drafted.findings(own, 0.9, 8).found[0].tokens_per_step) == 3
    # It is said of this target, and of no other.
    write_acceptance(folder / "two", known._replace(target_parameters=1))
    assert load_pair(f"{folder}/target", f"{folder}/two").acceptance is None


def table_of(texts: list[Text], size: int) -> NGram:
    """Trigrams of what was written."""
    tokens, log_q = np.zeros((size, 1), np.int32), np.full((size, 1), -1.0, np.float32)
    for text in texts:
        written = text.tokens[text.start - 1 :]
        tokens[list(written[:-1]), 0] = written[1:]
    return pack(np.zeros((0, 2), np.int32), tokens, log_q)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_ngram_model_is_weighed_beside_the_draft(pair, temperature, tmp_path):
    """What its trees give along the model's texts is what decoding gives that writes them."""
    texts = draftless.texts_of(pair, temperature)
    own = pair._replace(table=table_of(texts, pair.target.config.vocab_size))
    chain, trees = drafted.measure(own, temperature, 1).found
    assert (chain.method, trees.method) == ("chain", "ngram")
    assert trees.num_tokens == sum(text.written for text in texts)
    assert trees.tokens_per_step[0] > 1.2
    if not temperature:
        prompts = [list(text.tokens[: text.start]) for text in texts]
        for nodes in (1, 7):
            drafter = build(setting_of("ngram", budget=nodes), own)
            made = specjax.generate(
                jax.random.key(0), own.target, drafter, prompts,
                max_new_tokens=max(text.written for text in texts), stop_at_eos=False,
            )  # fmt: skip
            given = made.lengths.sum() / made.steps.sum()
            assert trees.tokens_per_step[nodes - 1] == pytest.approx(given, rel=0.02)
    # Told by its folder nothing is written, and the better of both is taken.
    few, many = ({0.0: (each,) * 7, 0.8: (each,) * 7} for each in (1.01, 30.0))
    told = own._replace(
        acceptance=Acceptance(1, 500, few), table_acceptance=Acceptance(1, 600, many)
    )
    taken = choose(Asked(), told, temperature)
    assert taken.setting.method == "ngram"
    assert "gives 30.00 tokens along 600 that the model wrote" in taken.reason
    swapped = own._replace(acceptance=told.table_acceptance, table_acceptance=told.acceptance)
    records.FINDINGS.file.unlink()
    assert choose(Asked(), swapped, temperature).setting.method == "chain"


@pytest.mark.slow
def test_training_tells_both_folders(pair, tmp_path):
    folder = Path(shutil.copytree(pair_folder(), tmp_path / "pair"))
    texts = draftless.texts_of(pair, 0.0)
    save_ngram(
        table_of(texts, pair.target.config.vocab_size),
        folder / "ngram",
        trained_on="its own answers",
    )
    tell_acceptance(pair.target, folder / "two", folder / "ngram")
    own = load_pair(f"{folder}/target", f"{folder}/two", stage=f"{folder}/ngram")
    assert own.table_acceptance == read_acceptance(folder / "ngram")
    assert own.acceptance == read_acceptance(folder / "two") != own.table_acceptance


@pytest.mark.parametrize(
    "held",
    ["{", "[]", "{}", *(
        json.dumps({"target_parameters": 1, "num_tokens": 9, "tokens_per_step": tokens})
        for tokens in ({"0": [1.5]}, {"0": [1.5], "0.8": [0.5]}, {"0": [1.5], "warm": [1.5]})
    )],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_a_sentence(held, tmp_path):
    (tmp_path / "acceptance.json").write_text(held)
    with pytest.raises(CheckpointError, match=r"acceptance.json (cannot be read|must have)"):
        read_acceptance(tmp_path)


@pytest.mark.parametrize(
    "held", [{}, {"date": "2026"}, {"found": []}, {"found": [{}]}, [], {"step_seconds": [0.0]}]
)
def test_what_was_kept_in_another_way_is_measured_anew(pair, held, monkeypatch):
    first = drafted.findings(pair, 0.0, 1)
    path = records.FINDINGS.file
    kept = json.loads(path.read_text())
    (name,) = kept
    assert name.endswith("temperature 0, a chain")
    path.write_text(json.dumps({name: kept[name] | held if held and isinstance(held, dict) and
                                "date" not in held else held}))  # fmt: skip
    monkeypatch.setattr(drafted, "measure", lambda *asked: first._replace(date="2026-12-01"))
    assert drafted.findings(pair, 0.0, 1).date == "2026-12-01"
