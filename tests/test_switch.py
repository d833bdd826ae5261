"""The settings that a server chooses from: their names, and which a pair and a rule allow."""

import re

import numpy as np
import pytest

from specjax.checkpoints.pair import Pair
from specjax.draft.ngram import pack
from specjax.draft.retrieval import corpus_of
from specjax.methods.method import METHODS
from specjax.methods.registry import setting_of
from specjax.methods.switch import SETTINGS, read, switching
from specjax.trees.construction import TOP_K
from specjax.trees.tree import TreeShape
from specjax.verify.rules import AUTO, RULES
from tests.conftest import tiny_model

TARGET, DRAFTS = tiny_model(), [tiny_model(1, num_layers=1), tiny_model(2, num_layers=1)]
ALONE = Pair(TARGET, None, [])
PAIR = Pair(TARGET, None, DRAFTS[:1])
TABLE = pack(np.zeros((0, 2), int), np.arange(128).reshape(64, 2) % 64, np.full((64, 2), -0.7))


EVERY = ("tree:2,1,1", "tree:3/2,1,0", "pool:2,1", "staged:15", "recycle:7", "hybrid:7")
"""One setting or more of each method that is not among those by default."""


@pytest.mark.parametrize(
    "name", [*SETTINGS, *EVERY, "chain:128", "specexec:128", "lookup:1", "ngram:31"]
)
def test_a_name_says_what_is_drafted(name):
    pair = PAIR._replace(table=TABLE)
    drafter = switching(pair, [name])
    own = drafter.of_setting(name)
    assert own.num_slots - 1 == setting_of(name).nodes
    assert own.window - 1 <= own.num_slots - 1
    assert drafter.settings == tuple(dict.fromkeys(["none", name]))


def test_every_registered_method_can_be_among_the_settings():
    pair = PAIR._replace(drafts=DRAFTS, table=TABLE, corpus=corpus_of([[1, 2, 3]]))
    names = tuple(setting_of(method).name for method in METHODS)
    found = switching(pair, names)
    assert found.settings == names
    own = {name for name, shares in zip(names, found.share, strict=True) if not shares}
    assert {name.partition(":")[0] for name in own} == {"pool", "recycle", "lookahead"}
    assert found.wants.top_tokens == TreeShape(setting_of("recycle").widths).widest


def test_a_name_without_a_size_is_the_shipped_setting():
    assert switching(PAIR, ["chain", "chain:7"]).settings == ("none", "chain:7")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bush:3", "no method 'bush'; there are none, chain, tree, "),
        *((name, f"no method '{name}'; there are none, ") for name in ("", "auto", "off", "Chain")),
        ("none:1", "the method none takes no size, not '1'"),
        ("tree:2,x", "the size of 'tree:2,x' is '2,x'; it must be numbers separated by commas"),
        ("tree:", "the size of 'tree:' is ''; it must be numbers"),
        ("chain:129", "the setting 'chain:129' has 129 nodes; a server's has 128 at most"),
        ("tree:129", "the setting 'tree:129' has 129 nodes; a server's has 128 at most"),
        *((f"{kind}:{count}", f"the size of {f'{kind}:{count}'!r:.16} is ")
          for kind in ("chain", "specexec", "lookup", "ngram", "recycle")
          for count in ("", "0", "-1", "x", " 3", "3 ", "+3", "1.5", "007", "٣", "8193",
                        "0000000019999999999")),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_a_name_of_no_setting_is_refused_in_a_sentence(name, reason):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read(name)
    assert str(refused.value).startswith(reason[:20] if "size" in reason else reason)
    assert str(refused.value).endswith(".")
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        switching(PAIR, ["none", name])


def test_none_drafts_nothing():
    assert read("none").widths is None
    assert switching(ALONE, ["none"]).num_slots == 1
    assert switching(ALONE, ["none"]).settings == ("none",)


WITH_DRAFT = {name for name in SETTINGS if name.startswith(("chain", "specexec"))}


def test_by_default_a_pair_has_all_the_settings_that_it_can():
    assert set(switching(PAIR).settings) == {"none", "lookup:7"} | WITH_DRAFT
    assert set(switching(ALONE).settings) == {"none", "lookup:7"}
    table = set(switching(ALONE._replace(table=TABLE)).settings)
    assert table == {"none"} | {name for name in SETTINGS if name.startswith(("lookup", "ngram"))}
    assert switching(PAIR._replace(table=TABLE)).settings == SETTINGS


def test_more_drafts_and_stages_do_not_get_in_the_way():
    pair = Pair(TARGET, None, DRAFTS, TABLE, DRAFTS[1])
    drafter = switching(pair)
    assert drafter.settings == SETTINGS
    assert drafter.model is DRAFTS[0]


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("chain:3", "a draft model; name one with --draft"),
        ("specexec:7", "a draft model; name one with --draft"),
        ("ngram:7", "an n-gram model; name its folder with --stage, or make one: .*"),
    ],
)
def test_a_named_setting_that_the_pair_has_not_what_it_takes_for_is_refused(name, lacks):
    with pytest.raises(ValueError, match=f"^the setting {name} cannot be used: it needs {lacks}.$"):
        switching(ALONE, ["none", name])


def test_names_are_taken_once_and_none_is_always_there():
    found = switching(PAIR, ["chain:3", "none", "chain:3", "specexec:7"])
    assert found.settings == ("none", "chain:3", "specexec:7")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_leaves_out_what_it_is_not_lossless_for_and_refuses_it_if_it_is_named(rule):
    pair = PAIR._replace(table=TABLE)
    able = set(switching(pair, verify=rule).settings)
    assert "none" in able
    for name in SETTINGS:
        if name in able:
            chosen = switching(pair, [name], rule).of_setting(name).construction
            assert RULES[rule].refusal(chosen) is None
        else:
            reason = f"^the setting {name} cannot be used: the {rule} rule is not lossless for it, "
            with pytest.raises(ValueError, match=reason):
                switching(pair, [name], rule)


def test_rules_that_divide_by_q_leave_chosen_trees_out():
    for rule in ("block", "traversal", "multi-step", "recursive"):
        able = switching(PAIR, verify=rule)
        assert {name for name in WITH_DRAFT if name.startswith("chain")} < set(able.settings)
        assert not {"specexec:7", "lookup:7"} & set(able.settings)
    assert set(switching(PAIR, verify="naive").settings) == set(switching(PAIR).settings)


def test_chains_are_drawn_for_auto_and_trees_are_chosen():
    found = switching(PAIR, verify=AUTO)
    chosen = {n for n in found.settings if found.of_setting(n).construction.children == TOP_K}
    assert chosen == {"specexec:7", "specexec:15", "specexec:31", "lookup:7"}
