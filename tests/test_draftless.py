"""What auto takes for a model without a draft, and the measurements that it goes by."""

import json

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints.pair import Pair, load_pair, with_own_draft
from specjax.draft import ExpansionDrafter
from specjax.methods import choice, defaults, draftless, records, registry, replay
from specjax.methods.choice import Asked, choose
from specjax.methods.draftless import Candidate, Findings
from specjax.methods.method import Setting
from specjax.methods.records import Measured, Run
from specjax.methods.replay import Text
from specjax.methods.setting import from_json, to_json
from specjax.models.quantized import quantized_as
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]
NEW = 40


@pytest.fixture
def alone(monkeypatch) -> Pair:
    """A small model with its tokenizer and no draft, of which passes are timed all the same."""
    monkeypatch.setattr(defaults, "LEAST_TIMED", 0)
    return load_pair(f"{pair_folder()}/target", "none")


def costing(monkeypatch, node: float) -> None:
    """A plain pass takes ten seconds, and every further column so many."""
    monkeypatch.setattr(
        draftless, "passes_seconds",
        lambda model, columns, text: {count: 10 + node * (count - 1) for count in columns},
    )  # fmt: skip


def test_a_text_is_written_as_decoding_does_and_looked_up_in_its_steps():
    pair = Pair(tiny_model(), None, [])
    prompts = [[5, 9, 2], list(range(3, 15)), [7, 8] * 6]
    texts = replay.write(pair.target, prompts, 0.0, NEW, 60.0)
    drafter = registry.build(registry.setting_of("lookup", budget=7), pair)
    nothing = replay.likeliest_along(pair.target, texts, drafter.wants.top_tokens)
    replayed = replay.replay(drafter, texts, nothing, (3, 7), rows=2)
    for budget in (3, 7):  # the tree of the first is a part of those that are replayed
        own = registry.build(registry.setting_of("lookup", budget=budget), pair)
        made = specjax.generate(jax.random.key(0), pair.target, own, prompts, max_new_tokens=NEW)
        assert [text.tokens[text.start :] for text in texts] == [*map(tuple, made.tokens.tolist())]
        assert replayed.tokens[budget] == pytest.approx(made.tokens_per_step)
    assert max(replayed.tokens[7]) > 1.5
    assert replayed.draft_seconds > 0


def test_recycling_knows_what_was_read_before_and_not_what_follows():
    """Texts in which 3, 4, 5, 6 follow each other; the target is right about each of them."""
    pair = Pair(tiny_model(), None, [])
    drafter = registry.build(registry.setting_of("recycle", budget=3), pair)
    cycle = tuple([3, 4, 5, 6] * 9)
    right = np.zeros((64, drafter.wants.top_tokens), np.int32)
    right[:36, 0] = [*cycle[1:], 3]
    replayed = replay.replay(drafter, [Text(cycle, 4), Text(cycle, 1)], [right, right], (1, 3))
    # The prompt of the first has all but what follows 6, which the first step's token says.
    assert replayed.tokens[3] == pytest.approx((32 / 9, 35 / 12))
    assert replayed.tokens[1] == pytest.approx((32 / 17, 35 / 20))


def findings(*tokens: float, seconds: float = 1.1, prompt: float = 0.0) -> Findings:
    one = Candidate(registry.setting_of("lookup", budget=3), seconds, prompt, tokens)
    return Findings("2026-11-27", 1.0, 1.05, (50,) * len(tokens), (one,))


@pytest.mark.parametrize(
    ("known", "pays"),
    [
        (findings(1.3, 1.5), True),
        (findings(1.05, 4.0), False),  # the first text would become slower
        (findings(1.15, 1.2), False),  # too little to be sure of
        (findings(1.3, 1.5, prompt=0.2), False),  # prompts take as long as it saves
        (findings(), False),
        (findings(seconds=1.01), True),
        (findings(seconds=1.01, prompt=0.01), False),
    ],
)
def test_what_is_taken_is_faster_on_every_text(known, pays):
    assert (known.best(known.found) is not None) == pays
    assert (" that the model wrote on 2026-11-27" in known.described(known.found[0])) == bool(
        known.written
    )


@pytest.mark.slow
def test_a_model_that_repeats_itself_looks_up_where_nodes_are_cheap(alone, monkeypatch):
    costing(monkeypatch, 0.01)
    taken = choose(Asked(), alone, 0.0)
    assert taken.setting.method in ("lookup", "recycle")
    assert taken.setting.nodes == 15  # each node costs a thousandth of a pass
    assert "times plain decoding" in taken.reason
    known = draftless.findings(alone, 0.0, 1)
    assert len(known.written) >= 4
    assert max(known.found[2].tokens) > 3
    monkeypatch.setattr(draftless, "measure", None)  # it is known now
    assert choose(Asked(), alone, 0.0) == taken
    refused = choose(Asked(verify="block"), alone, 0.0)
    assert refused.setting == Setting()
    assert refused.reason.startswith("there is no draft model, and block is for trees of one")


def test_nothing_is_drafted_nor_written_where_nodes_are_dear(alone, monkeypatch):
    costing(monkeypatch, 0.5)  # of 10; three take 1.5
    monkeypatch.setattr(draftless, "write", None)
    taken = choose(Asked(), alone, 0.0)
    assert taken.setting == Setting()
    assert "a step with 3 nodes took 1.15 times as long as a plain one of 1e+04 ms" in taken.reason
    assert "run specjax bench" in taken.reason
    # Three nodes of each of eight rows are 24 columns, and the texts are not written for them.
    costing(monkeypatch, 0.06)
    monkeypatch.setattr(choice, "findings", lambda pair, temperature, batch: draftless.measure(
        pair, temperature, batch))  # fmt: skip
    assert "took 1.14 times" in choose(Asked(), alone, 0.0, 8).reason


def test_the_model_itself_drafts_in_fewer_bits_where_that_was_measured_as_faster():
    pair = load_pair(f"{pair_folder()}/target")
    own = Setting("chain", (1, 1), draft="self:8bit")
    assert own.label == "chain:2 of self:8bit"
    assert from_json(json.loads(json.dumps(to_json(own))), "here") == own
    with pytest.raises(ValueError, match="here: there is no draft self:2bit"):
        from_json(to_json(own) | {"draft": "self:2bit"}, "here")
    drafter = registry.build(own, pair)
    assert isinstance(drafter, ExpansionDrafter)
    assert [quantized_as(draft) for draft in drafter.groups] == ["int8, a scale for each row"]
    assert (
        with_own_draft(pair, "self:8bit").drafts[0] is with_own_draft(pair, "self:8bit").drafts[0]
    )
    alone = load_pair(f"{pair_folder()}/target", "none")  # nothing is to draft
    with pytest.raises(ValueError, match="the setting drafts with self:8bit, and the model is"):
        registry.build(own, alone)
    ran = Measured(Setting(), 10.0, (1.0,) * 8), Measured(own, 20.0, (2.0,) * 8)
    name = records.setting(pair.target, [], 1, False)
    records.remember(name, Run("2026-11-27T00:00:00", 0.0, 8, ran))
    assert choose(Asked(), pair, 0.0).setting == own
    assert choose(Asked(verify="block"), pair, 0.0).setting == own
    assert choose(Asked(), alone, 0.0).setting == Setting()
