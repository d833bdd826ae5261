"""Named methods, and the choice that auto makes among them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax import checkpoint, methods, records
from specjax.verify import DRAWN, TOP_K
from specjax.widths import Widths
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]
TARGET, DRAFTS = tiny_model(), [tiny_model(1, num_layers=1), tiny_model(2, num_layers=1)]


def measured(method: str, rate: float, widths: Widths | None = None) -> dict:
    return {"method": method, "widths": widths, "tokens_per_second": rate, "temperature": 0.0}


def remember(*entries: dict, sampled: bool = False, batch: int = 1) -> None:
    records.remember(records.setting(TARGET, DRAFTS, batch, sampled), entries)


def auto(temperature: float = 0.0, batch: int = 1) -> methods.Choice:
    return methods.choose("auto", None, TARGET, DRAFTS, temperature, batch)


@pytest.mark.parametrize(
    ("method", "widths", "slots", "drafts"),
    [
        *(("chain", (1, 1), 3, 1), ("tree", (2, 1), 5, 1), ("pool", (2, 1), 9, 2)),
        *(("tree", (3, (2, 0, 1)), 7, 1), ("pool", (2, (0, 1)), 7, 2)),
    ],
)
def test_a_method_is_a_drafter(method, widths, slots, drafts):
    drafter = methods.build(method, DRAFTS, widths)
    assert (drafter.num_slots, len(drafter.trees)) == (slots, drafts)
    assert drafter.children == DRAWN
    assert methods.build(method, DRAFTS, widths, "naive").children == TOP_K


def test_plain_decoding_has_no_drafter():
    assert methods.build("none", DRAFTS, None) is None
    with pytest.raises(ValueError, match="takes no tree"):
        methods.build("none", DRAFTS, (1,))


def test_what_a_method_lacks_is_said():
    with pytest.raises(ValueError, match="needs a draft model"):
        methods.build("tree", [], (2,))
    with pytest.raises(ValueError, match="not 2,1; use the method tree"):
        methods.build("chain", DRAFTS, (2, 1))
    with pytest.raises(ValueError, match="not 1/2/1,0; use the method tree"):
        methods.build("chain", DRAFTS, (1, 2, (1, 0)))
    with pytest.raises(ValueError, match="there are none, chain, tree, pool"):
        methods.build("bush", DRAFTS, None)


def test_every_method_has_default_widths():
    for method in ("chain", "tree", "pool"):
        for batch in (1, 2, 8):
            widths = methods.default_widths(method, batch)
            assert methods.build(method, DRAFTS, widths).window == len(widths) + 1
    assert methods.default_widths("none") is None


def test_a_pool_is_loaded_from_folders():
    folders = [pair_folder() / "one", pair_folder() / "two"]
    drafter = methods.load_drafter(folders, (1, 1))
    assert (len(drafter.trees), drafter.window) == (2, 3)
    assert len(methods.load_drafter(folders[0]).trees) == 1


def test_one_bundled_draft_is_loaded_by_its_number():
    one, pool = methods.load_drafter("bundled/1", (1, 1)), methods.load_drafter("bundled")
    assert (len(one.trees), len(pool.trees)) == (1, 3)
    assert (one.groups[0].embedding == pool.groups[1].embedding).all()
    with pytest.raises(checkpoint.CheckpointError, match=r"drafts/7"):
        methods.load_drafter("bundled/7")


def test_vocabularies_must_be_the_same(tmp_path):
    checkpoint.save_model(tiny_model(), tmp_path / "small")
    with pytest.raises(ValueError, match=r"draft 0 has a vocabulary of 64 tokens .* 272"):
        methods.load_pair(str(pair_folder() / "target"), str(tmp_path / "small"), None)


def test_a_named_method_is_taken():
    choice = methods.choose("tree", None, TARGET, DRAFTS, 0.0)
    assert choice[:2] == ("tree", methods.default_widths("tree"))
    assert methods.choose("auto", (2, 1), TARGET, DRAFTS, 0.0)[:2] == ("pool", (2, 1))
    assert methods.choose("auto", (2, 1), TARGET, DRAFTS[:1], 0.0).method == "tree"
    assert methods.choose("auto", (1, 1), TARGET, DRAFTS[:1], 0.0).method == "chain"


def test_without_drafts_or_measurement_auto_says_so():
    assert methods.choose("auto", None, TARGET, [], 0.0)[:2] == ("none", None)
    assert "shipped default" in auto().reason
    assert auto(0.8).method in methods.METHODS


def test_auto_takes_the_fastest_that_was_measured_for_such_rows():
    remember(measured("none", 10), measured("tree", 30, (2, 1)), measured("chain", 20, (1,)))
    assert auto()[:2] == ("tree", (2, 1))
    assert "30.0 tokens/s" in auto().reason
    assert "10.0 with plain decoding" in auto().reason
    assert "shipped" in auto(0.8).reason
    assert "shipped" in auto(batch=8).reason


def test_the_nearest_temperature_counts():
    slow = [measured("none", 20), measured("chain", 10, (1,))]
    fast = [measured("none", 20), measured("chain", 30, (1,))]
    remember(*({**entry, "temperature": 1.2} for entry in slow),
             *({**entry, "temperature": 0.5} for entry in fast), sampled=True)  # fmt: skip
    assert auto(0.7).method == "chain"
    assert auto(1.0).method == "none"
    assert "at temperature 1.2" in auto(1.0).reason


def test_a_tree_whose_nodes_differ_is_remembered_as_it_was():
    widths = (3, (2, 0, 1), (0, 1, 2))
    remember(measured("none", 10), measured("tree", 30, widths))
    assert auto()[:2] == ("tree", widths)
    assert methods.choose("auto", (1, (1,)), TARGET, DRAFTS[:1], 0.0).method == "chain"


@settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rates=st.lists(
        st.tuples(st.sampled_from(methods.METHODS), st.floats(0.1, 1e3)), min_size=1, max_size=6
    )
)
def test_auto_never_takes_a_slower_method(rates):
    remember(*(measured(m, rate, None if m == "none" else (1,)) for m, rate in rates))
    plain = [rate for method, rate in rates if method == "none"]
    choice = auto()
    if not plain:
        assert "shipped" in choice.reason
    elif choice.method != "none":
        assert max(rate for m, rate in rates if m == choice.method) >= max(plain)
    else:
        assert max(rate for _, rate in rates) <= max(plain)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_record_counts_as_none(text):
    path = records.remember("something", [])
    path.write_text(text)
    assert "shipped" in auto().reason


def test_settings_tell_machines_models_and_rows_apart():
    names = {
        records.setting(TARGET, DRAFTS, 1, False),
        records.setting(TARGET, DRAFTS, 1, True),
        records.setting(TARGET, DRAFTS[:1], 1, False),
        records.setting(TARGET, DRAFTS, 8, False),
        records.setting(tiny_model(num_layers=1), DRAFTS, 1, False),
    }
    assert len(names) == 5
