"""The settings that a server chooses from: their names, and which a pair and a rule allow."""

import numpy as np
import pytest

from specjax.checkpoints.pair import Pair
from specjax.draft.ngram import pack
from specjax.methods.switch import SETTINGS, read, switching
from specjax.trees.construction import TOP_K
from specjax.verify.rules import AUTO, RULES
from tests.conftest import tiny_model

TARGET, DRAFTS = tiny_model(), [tiny_model(1, num_layers=1), tiny_model(2, num_layers=1)]
ALONE = Pair(TARGET, None, [])
PAIR = Pair(TARGET, None, DRAFTS[:1])
TABLE = pack(np.zeros((0, 2), int), np.arange(128).reshape(64, 2) % 64, np.full((64, 2), -0.7))


@pytest.mark.parametrize("name", [*SETTINGS, "chain:128", "tree:128", "lookup:1", "ngram:31"])
def test_a_name_says_how_many_nodes_are_drafted(name):
    pair = PAIR._replace(table=TABLE)
    drafter = switching(pair, [name])
    count = int(name.partition(":")[2] or 0)
    own = drafter.of_setting(name)
    assert own.num_slots - 1 == count
    assert own.window - 1 == count if name.startswith("chain") else own.window - 1 <= count
    assert drafter.settings == tuple(dict.fromkeys(["off", name]))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pool:3", r"no setting 'pool:3'; there are off and chain:K, tree:K, lookup:K, ngram:K, "),
        ("", "no setting ''; there are off and "),
        ("auto", "no setting 'auto'; there are off and "),
        ("off:1", "no setting 'off:1'; there are off and "),
        ("Chain:3", "no setting 'Chain:3'; there are off and "),
        *((name, f"the setting '{name}' has no nodes; it must have 1 to 128")
          for name in ("chain", "chain:")),
        *((f"{kind}:{count}", f"the setting '{kind}:{count}' has {count} nodes; it must have 1 to")
          for kind in ("chain", "tree", "lookup", "ngram")
          for count in ("0", "-1", "129", "x", " 3", "3 ", "+3", "1.5", "007", "٣", "9" * 5000,
                        "0000000019999999999")),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_a_name_of_no_setting_is_refused_in_a_sentence(name, reason):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read(name)
    assert str(refused.value).startswith(reason)
    assert str(refused.value).endswith(".")
    with pytest.raises(ValueError, match="setting"):
        switching(PAIR, ["off", name])


def test_off_drafts_nothing():
    assert read("off").widths is None
    assert switching(ALONE, ["off"]).num_slots == 1
    assert switching(ALONE, ["off"]).settings == ("off",)


WITH_DRAFT = {name for name in SETTINGS if name.startswith(("chain", "tree"))}


def test_by_default_a_pair_has_all_the_settings_that_it_can():
    assert set(switching(PAIR).settings) == {"off", "lookup:7"} | WITH_DRAFT
    assert set(switching(ALONE).settings) == {"off", "lookup:7"}
    table = set(switching(ALONE._replace(table=TABLE)).settings)
    assert table == {"off"} | {name for name in SETTINGS if name.startswith(("lookup", "ngram"))}
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
        ("tree:7", "a draft model; name one with --draft"),
        ("ngram:7", "an n-gram model; name its folder with --stage, or make one: .*"),
    ],
)
def test_a_named_setting_that_the_pair_has_not_what_it_takes_for_is_refused(name, lacks):
    with pytest.raises(ValueError, match=f"^the setting {name} cannot be used: it needs {lacks}.$"):
        switching(ALONE, ["off", name])


def test_names_are_taken_once_and_off_is_always_there():
    found = switching(PAIR, ["chain:3", "off", "chain:3", "tree:7"])
    assert found.settings == ("off", "chain:3", "tree:7")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_leaves_out_what_it_is_not_lossless_for_and_refuses_it_if_it_is_named(rule):
    pair = PAIR._replace(table=TABLE)
    able = set(switching(pair, verify=rule).settings)
    assert "off" in able
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
        assert not {"tree:7", "lookup:7"} & set(able.settings)
    assert set(switching(PAIR, verify="naive").settings) == set(switching(PAIR).settings)


def test_chains_are_drawn_for_auto_and_trees_are_chosen():
    found = switching(PAIR, verify=AUTO)
    chosen = {n for n in found.settings if found.of_setting(n).construction.children == TOP_K}
    assert chosen == {"tree:7", "tree:15", "tree:31", "lookup:7"}
