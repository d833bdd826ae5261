"""Named methods, and the choice that auto makes among them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.checkpoints import huggingface
from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.pair import Pair, load_pair
from specjax.draft.ngram import pack
from specjax.draft.plain import PlainDrafter
from specjax.draft.retrieval import corpus_of
from specjax.methods import choice, defaults, drafted, records, registry
from specjax.methods.choice import Asked, Choice, choose
from specjax.methods.method import METHODS, Setting
from specjax.methods.records import Measured, Run
from specjax.methods.setting import from_json, to_json
from specjax.methods.switch import switching
from specjax.models.stacking import stacked
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K
from specjax.trees.widths import Widths
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]
TARGET, DRAFTS = tiny_model(), [tiny_model(1, num_layers=1), tiny_model(2, num_layers=1)]
PAIR = Pair(TARGET, None, DRAFTS)
ONE = PAIR._replace(drafts=DRAFTS[:1])
CORPUS = corpus_of([[1, 2, 3, 1, 2, 4]])
TABLE = pack(np.zeros((0, 2), int), np.arange(128).reshape(64, 2) % 64, np.full((64, 2), -0.7))


def measured(method: str, ratio: float, widths: Widths | None = None) -> Measured:
    """A setting `ratio` times as fast as plain decoding of 10 tokens/s, in each of eight rounds."""
    return Measured(registry.setting_of(method, widths=widths), 10.0 * ratio, (float(ratio),) * 8)


def remember(
    *entries: Measured, sampled: bool = False, batch: int = 1, temperature: float = 0.0
) -> None:
    run = Run("2026-11-23T01:02:03+00:00", temperature, 24, entries)
    records.remember(records.setting(TARGET, DRAFTS, batch, sampled), run)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """The shipped defaults are a platform's."""
    monkeypatch.setattr(choice.jax, "default_backend", lambda: "cpu")


def auto(temperature: float = 0.0, batch: int = 1) -> Choice:
    return choose(Asked(), PAIR, temperature, batch)


def taken(asked: Asked, pair: Pair = PAIR) -> tuple[str, Widths | None]:
    setting = choose(asked, pair, 0.0).setting
    return setting.method, setting.widths


@pytest.mark.parametrize(
    ("method", "widths", "slots", "drafts"),
    [
        *(("chain", (1, 1), 3, 1), ("tree", (2, 1), 5, 1), ("pool", (2, 1), 9, 2)),
        *(("tree", (3, (2, 0, 1)), 7, 1), ("pool", (2, (0, 1)), 7, 2)),
    ],
)
def test_a_method_is_a_drafter(method, widths, slots, drafts):
    drafter = registry.build(registry.setting_of(method, widths=widths), PAIR)
    assert (drafter.num_slots, len(drafter.trees)) == (slots, drafts)
    assert drafter.children == (DRAWN if drafts > 1 else DISTINCT)
    drawn = registry.build(registry.setting_of(method, widths=widths), PAIR, verify="multi-step")
    assert drawn.children == DRAWN
    naive = registry.build(registry.setting_of(method, widths=widths), PAIR, verify="naive")
    assert naive.children == TOP_K


def test_plain_decoding_drafts_nothing():
    drafter = registry.build(registry.setting_of("none"), PAIR)
    assert isinstance(drafter, PlainDrafter)
    assert (drafter.window, drafter.num_slots) == (1, 1)
    for named in ({"widths": (1,)}, {"budget": 3}):
        with pytest.raises(ValueError, match="takes no tree and no budget"):
            registry.setting_of("none", **named)


@pytest.mark.parametrize(
    ("method", "named", "sentence"),
    [
        ("chain", {"widths": (2, 1)}, "not 2,1; use the method tree"),
        ("chain", {"widths": (1, 2, (1, 0))}, "not 1/2/1,0; use the method tree"),
        ("bush", {}, "there are none, chain, tree, pool, specexec"),
        ("tree", {"widths": (2,), "budget": 3}, r"a tree \(2\) and a budget \(3\) are named"),
        ("specexec", {"widths": (2, 1)}, "specexec grows trees of its own, not 2,1"),
        ("hybrid", {"budget": 0}, "the budget is 0; it must be at least 1 node"),
        ("eagle:60", {"budget": 6}, r"eagle:60 has a size, and a budget \(6\) is named beside it"),
        ("eagle:60,8,10,2", {}, "it must be nodes,levels,top-k, each 1 to 8192"),
        ("eagle:60,0", {}, "size of 'eagle:60,0' is '60,0'"),
        ("specexec:60,8", {}, "is '60,8'; it must be a number of nodes, 1 to 8192."),
    ],
)
def test_what_a_method_does_not_take_is_said(method, named, sentence):
    with pytest.raises(ValueError, match=sentence):
        registry.setting_of(method, **named)


@pytest.mark.parametrize(
    ("text", "name", "sizes"),
    [
        ("eagle", "eagle:59", (59, 8, 10)),
        ("eagle:60", "eagle:60", (60, 8, 10)),
        ("eagle:60,8,10", "eagle:60", (60, 8, 10)),
        ("eagle:60,5", "eagle:60,5", (60, 5, 10)),
        ("eagle:15,8,4", "eagle:15,8,4", (15, 8, 4)),
    ],
)
def test_a_tree_that_grows_by_level_names_nodes_levels_and_children(text, name, sizes):
    setting = registry.setting_of(text)
    growth = setting.growth
    assert growth is not None
    assert (growth.budget, growth.depth, growth.width, growth.beams) == (*sizes, sizes[2])
    assert growth.by_level
    assert setting.name == name
    assert registry.setting_of(name) == setting


@pytest.mark.parametrize("method", ["tree", "specexec", "eagle", "hybrid", "staged"])
def test_what_a_method_lacks_is_said(method):
    with pytest.raises(ValueError, match=f"the method {method} needs a draft model"):
        registry.build(registry.setting_of(method), PAIR._replace(drafts=[]))
    with pytest.raises(ValueError, match="needs a second stage; name an n-gram or model folder"):
        registry.build(registry.setting_of("staged"), PAIR)
    with pytest.raises(ValueError, match="the method retrieve needs texts; name files of them"):
        registry.build(registry.setting_of("retrieve"), PAIR)
    with pytest.raises(ValueError, match="the method ngram needs an n-gram model"):
        registry.build(registry.setting_of("ngram"), PAIR)
    asked = dataclasses.replace(registry.setting_of("staged"), stage="draft")
    with pytest.raises(ValueError, match="asks for a smaller draft"):
        registry.build(asked, PAIR._replace(table=TABLE))


@pytest.mark.parametrize("method", list(METHODS)[1:])
@pytest.mark.parametrize("budget", [None, 1, 6, 40])
def test_every_method_keeps_to_its_budget(method, budget):
    pair = PAIR._replace(drafts=DRAFTS[:1], smaller=DRAFTS[1], table=TABLE, corpus=CORPUS)
    for batch in (1, 8):
        setting = registry.setting_of(method, budget=budget, batch=batch)
        drafter = registry.build(setting, pair)
        assert 1 < drafter.num_slots == setting.nodes + 1
        assert budget is None or setting.nodes <= budget
        assert from_json(json.loads(json.dumps(to_json(setting))), "here") == setting
        assert registry.setting_of(setting.name, batch=batch) == setting


def test_trees_deeper_than_a_drafts_sliding_window_are_refused_where_they_are_built(caplog):
    draft = tiny_model(1, num_layers=2, windows=(None, 5))
    pair = PAIR._replace(drafts=[draft], table=TABLE, smaller=draft)
    for method, size, levels in (
        ("chain", {"widths": (1,) * 7}, 7),
        ("pool", {"widths": (1,) * 7}, 7),
        *((each, {"budget": 15}, 15) for each in ("specexec", "hybrid", "staged")),
    ):
        words = f"window of 5 tokens cannot grow trees of {levels} levels; they may have 6"
        with pytest.raises(ValueError, match=words):
            registry.build(registry.setting_of(method, **size), pair)
    registry.build(registry.setting_of("specexec", budget=6), pair)
    drafter = switching(pair)
    assert drafter.settings == ("none", "chain:1", "chain:3", "lookup:7")
    assert [
        line.partition(" is left out: a draft with a sliding")[0] for line in caplog.messages
    ] == [
        f"specjax: the setting {name}"
        for name in ("chain:7", "specexec:7", "specexec:15", "specexec:31")
    ]
    with pytest.raises(
        ValueError, match="setting specexec:15 cannot be used: a draft with a sliding"
    ):
        switching(pair, ["specexec:15"])


def test_all_are_the_methods_that_a_pair_can_do():
    assert registry.names_of("all", PAIR._replace(drafts=[])) == [
        "lookup", "recycle", "lookahead",
    ]  # fmt: skip
    assert not {"staged", "ngram"} & set(registry.names_of("all", PAIR))
    pair = PAIR._replace(table=TABLE, corpus=CORPUS)
    able = [name for name in METHODS if not METHODS[name].for_servers]
    assert registry.names_of("all", pair) == able[1:]
    assert "suffix" not in able
    assert registry.names_of("chain, none", PAIR) == ["chain", "none"]


def test_a_pool_is_loaded_from_folders():
    folders = [pair_folder() / "one", pair_folder() / "two"]
    drafter = registry.load_drafter(folders, widths=(1, 1))
    assert (len(drafter.trees), drafter.window) == (2, 3)
    assert len(registry.load_drafter(folders[0]).trees) == 1


def test_one_bundled_draft_is_loaded_by_its_number():
    one, pool = registry.load_drafter("bundled/1", widths=(1, 1)), registry.load_drafter("bundled")
    assert (len(one.trees), len(pool.trees)) == (1, 3)
    assert (one.groups[0].embedding == pool.groups[1].embedding).all()
    with pytest.raises(CheckpointError, match=r"drafts/7"):
        registry.load_drafter("bundled/7")


def test_vocabularies_must_be_the_same(tmp_path):
    huggingface.save_model(tiny_model(), tmp_path / "small")
    with pytest.raises(ValueError, match=r"draft 0 .* tables of 272 and 64 rows"):
        load_pair(str(pair_folder() / "target"), str(tmp_path / "small"), dtype=None)


def test_a_named_method_is_taken():
    assert taken(Asked("tree")) == ("tree", registry.setting_of("tree").widths)
    assert taken(Asked(widths=(2, 1))) == ("pool", (2, 1))
    assert taken(Asked(widths=(2, 1)), ONE) == ("tree", (2, 1))
    assert taken(Asked(widths=(1, (1,))), ONE) == ("chain", (1, 1))
    assert choose(Asked(budget=9), PAIR, 0.0).setting == registry.setting_of("specexec", budget=9)
    assert choose(Asked(budget=9), PAIR, 0.8).setting == registry.setting_of("tree", budget=9)
    alone = PAIR._replace(drafts=[])
    assert choose(Asked(budget=9), alone, 0.0).setting == registry.setting_of("lookup", budget=9)


def test_auto_measured_without_drafts_and_leaves_out_what_the_pair_cannot_do():
    alone = PAIR._replace(drafts=[])
    entries = measured("none", 1), measured("lookup", 1.8), measured("ngram", 4)
    run = Run("2026-11-23T00:00:00", 0.0, 24, entries)
    records.remember(records.setting(TARGET, [], 1, False), run)
    assert choose(Asked(), alone, 0.0).setting.method == "lookup"
    with pytest.raises(ValueError, match="a tree is named and there is no draft model"):
        choose(Asked(widths=(2, 1)), alone, 0.0)


def test_without_drafts_or_measurement_auto_says_so():
    assert choose(Asked(), PAIR._replace(drafts=[]), 0.0).setting == Setting()
    assert "shipped default" in auto().reason
    assert auto(0.8).setting.method in METHODS


def test_auto_takes_the_fastest_that_was_measured_for_such_rows():
    remember(measured("none", 1), measured("specexec", 1.5), measured("tree", 3, (2, 1)),
             measured("chain", 2, (1,)))  # fmt: skip
    assert taken(Asked()) == ("tree", (2, 1))
    told = auto().reason
    assert "measured 30.0 tokens/s with it at temperature 0 on this machine on 2026-11-23" in told
    assert "2.00 times the shipped default specexec:15 (noise 9%, 24 prompts)" in told
    assert told.endswith("and 10.0 with plain decoding")
    assert "shipped" in auto(0.8).reason
    assert "shipped" in auto(batch=8).reason


def test_auto_takes_no_method_that_the_named_rule_is_not_lossless_for():
    assert choose(Asked(), PAIR, 0.0).setting == registry.setting_of("specexec")
    for rule in ("multi-step", "block", "recursive"):
        assert choose(Asked(verify=rule), PAIR, 0.0).setting == registry.setting_of("chain")
    remember(measured("none", 1), measured("chain", 1.5), measured("tree", 2),
             measured("specexec", 4))  # fmt: skip
    assert auto().setting.method == "specexec"
    assert choose(Asked(verify="multi-step"), PAIR, 0.0).setting.method == "tree"
    many = choose(Asked(budget=40, verify="block"), PAIR, 0.0).setting
    assert many == registry.setting_of("specexec", budget=40)  # which is refused with the reason
    assert choose(Asked(budget=40, verify="traversal"), PAIR, 0.0).setting.method == "tree"


def test_the_nearest_temperature_counts():
    chain = measured("chain", 1.2)  # the shipped default
    remember(measured("none", 2), chain, sampled=True, temperature=1.2)
    remember(measured("none", 1), chain, measured("tree", 3), sampled=True, temperature=0.5)
    assert auto(0.7).setting.method == "tree"
    assert auto(1.0).setting.method == "none"
    assert "at temperature 1.2" in auto(1.0).reason
    assert "no other method was faster" in auto(1.0).reason


def test_a_tree_whose_nodes_differ_is_remembered_as_it_was():
    widths = (3, (2, 0, 1), (0, 1, 2))
    remember(measured("none", 1), measured("specexec", 2), measured("tree", 3, widths))
    assert taken(Asked()) == ("tree", widths)


def test_a_run_without_the_shipped_default_decides_nothing():
    """`bench --methods chain` measures a chain that is twice as fast as plain decoding."""
    remember(measured("none", 1), measured("chain", 2))
    assert auto().setting == registry.setting_of("specexec")
    assert "run specjax bench" in auto().reason
    remember(measured("none", 1), measured("specexec", 1.2), measured("chain", 2))
    remember(measured("none", 1), measured("tree", 9))
    assert auto().setting == registry.setting_of("chain")  # the evidence from before still counts


def test_a_tie_keeps_the_shipped_default_and_says_so():
    remember(measured("none", 1), measured("specexec", 2), measured("chain", 2.1))
    assert auto().setting == registry.setting_of("specexec")
    assert "none here that is faster by more than the noise (24 prompts" in auto().reason
    assert "the last on 2026-11-23" in auto().reason


@settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    ratios=st.lists(
        st.tuples(st.sampled_from(list(METHODS)), st.floats(0.1, 10)),
        min_size=1, max_size=6, unique_by=lambda entry: entry[0],
    )
)  # fmt: skip
def test_auto_replaces_the_default_by_what_is_surely_faster_only(ratios):
    path = records.RUNS.file
    path.unlink(missing_ok=True)
    remember(*(measured(method, ratio) for method, ratio in ratios))
    choice = choose(Asked(), PAIR._replace(table=TABLE), 0.0)
    by_method = dict(ratios)
    if choice.setting.method == "specexec":
        others = [ratio for method, ratio in ratios if method not in ("specexec", "staged")]
        sure = [ratio for ratio in others if ratio > 1.1 * by_method.get("specexec", np.inf)]
        assert not sure
    else:
        own = by_method[choice.setting.method]
        assert own > 1.09 * by_method["specexec"]
        assert own >= by_method.get("none", 0)


def test_an_entry_of_another_version_counts_as_none():
    """The format before runs, and a setting that this version does not know."""
    name, old = records.setting(TARGET, DRAFTS, 1, False), {"setting": {"method": "none"}}
    chain = {"setting": to_json(registry.setting_of("chain"))}
    known = {"temperature": 0.0, "tokens_per_second": 9.0, "prompts": 4}
    path = records.RUNS.file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({name: [old | known, chain | known | {"tokens_per_second": 99.0}]}))
    assert "run specjax bench" in auto().reason
    remember(measured("none", 1), measured("specexec", 2), measured("chain", 3))
    held = json.loads(path.read_text())
    unknown = {"setting": {"method": "chain", "colour": 1}, "tokens_per_second": 999.0}
    held[name][0]["measured"].append(unknown | {"ratios": [99.0] * 8})
    path.write_text(json.dumps(held))
    assert auto().setting == registry.setting_of("chain")


def test_settings_tell_machines_models_and_rows_apart():
    names = {
        records.setting(TARGET, DRAFTS, 1, False),
        records.setting(TARGET, DRAFTS, 1, True),
        records.setting(TARGET, DRAFTS[:1], 1, False),
        records.setting(TARGET, DRAFTS, 8, False),
        records.setting(tiny_model(num_layers=1), DRAFTS, 1, False),
    }
    assert len(names) == 5


@pytest.fixture
def large(monkeypatch) -> Pair:
    """A pair whose draft is as large as its target."""
    monkeypatch.setattr(defaults, "LEAST_TIMED", 0)
    monkeypatch.setattr(drafted, "texts_of", lambda pair, temperature: [])
    text = SimpleNamespace(input_ids=list(range(40)))
    return Pair(TARGET, lambda prompts, **_: text, [tiny_model(3)])


def timed(monkeypatch, draft: float, accepted: float) -> None:
    """A pass of the draft over that of the target, and how often its tokens would be accepted."""
    monkeypatch.setattr(
        drafted, "step_seconds",
        lambda model, nodes, *rows: dict.fromkeys(nodes, 1.0 if model is TARGET else draft),
    )  # fmt: skip
    monkeypatch.setattr(
        drafted, "overlaps",
        lambda target, draft, text, columns, *rest: np.full((1, len(columns)), accepted),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("draft", "accepted", "batch", "label"),
    [
        (0.9, 0.98, 1, "none"),
        (0.6, 0.7, 8, "none"),
        (0.2, 0.7, 1, "chain:3"),
        (0.1, 0.98, 1, "chain:7"),
        (0.1, 0.98, 8, "chain:3"),
    ],
)
def test_a_large_draft_is_taken_as_far_as_it_pays(
    draft, accepted, batch, label, large, monkeypatch
):
    timed(monkeypatch, draft, accepted)
    found = choose(Asked(), large, 0.0, batch)
    assert found.setting.label == label
    assert "times a plain one of 1e+03 ms (1.00 without drafting) and gives" in found.reason
    assert ("would not pay" in found.reason) == (label == "none")
    if label != "none":
        with pytest.raises(ValueError, match="needs a draft"):
            registry.build(found.setting, large._replace(drafts=[]))


def test_of_a_large_target_any_draft_is_weighed(large, monkeypatch):
    small = large._replace(drafts=[tiny_model(3, num_layers=1, intermediate_size=16)])
    monkeypatch.setattr(defaults, "LARGE_DRAFT", 2)
    timed(monkeypatch, 0.9, 0.98)
    assert choose(Asked(), small, 0.0).setting.label == "specexec:15"
    monkeypatch.setattr(defaults, "LEAST_WEIGHED", 0)
    assert choose(Asked(), small, 0.0).setting.label == "none"
    stack = small._replace(target=stacked(TARGET))  # whose layers are not timed one by one
    assert choose(Asked(), stack, 0.0).setting.label == "specexec:15"


def test_a_large_draft_is_compared_with_plain_decoding(large, monkeypatch):
    timed(monkeypatch, 0.1, 0.98)
    name = records.setting(TARGET, large.drafts, 1, False)
    runs = (measured("none", 1), measured("chain", 0.6))
    records.remember(name, Run("2026-11-23", 0.0, 24, runs))
    found = choose(Asked(), large, 0.0)
    assert found.setting.label == "none"
    assert "bench measured none here that is faster" in found.reason
