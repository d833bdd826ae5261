"""Named methods, and the choice that auto makes among them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax import checkpoint, methods, records
from specjax.verify import DRAWN, TOP_K
from tests.conftest import tiny_model
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]
TARGET, DRAFTS = tiny_model(), [tiny_model(1, num_layers=1), tiny_model(2, num_layers=1)]


def measured(method: str, rate: float, widths: tuple[int, ...] | None = None) -> dict:
    return {"method": method, "widths": widths, "tokens_per_second": rate}


def remember(*entries: dict, sampled: bool = False, batch: int = 1) -> None:
    records.remember(records.setting(TARGET, DRAFTS, batch, sampled), entries)


def auto(sampled: bool = False, batch: int = 1) -> methods.Choice:
    return methods.choose("auto", None, TARGET, DRAFTS, sampled, batch)


@pytest.mark.parametrize(
    ("method", "widths", "slots", "drafts"),
    [("chain", (1, 1), 3, 1), ("tree", (2, 1), 5, 1), ("pool", (2, 1), 9, 2)],
)
def test_a_method_is_a_drafter(method, widths, slots, drafts):
    drafter = methods.build(method, DRAFTS, widths)
    assert (drafter.num_slots, drafter.num_drafts) == (slots, drafts)
    assert drafter.construction == DRAWN
    assert methods.build(method, DRAFTS, widths, "naive").construction == TOP_K


def test_plain_decoding_has_no_drafter():
    assert methods.build("none", DRAFTS, None) is None
    with pytest.raises(ValueError, match="takes no tree"):
        methods.build("none", DRAFTS, (1,))


def test_what_a_method_lacks_is_said():
    with pytest.raises(ValueError, match="needs a draft model"):
        methods.build("tree", [], (2,))
    with pytest.raises(ValueError, match="not 2,1; use the method tree"):
        methods.build("chain", DRAFTS, (2, 1))
    with pytest.raises(ValueError, match="there are none, chain, tree, pool"):
        methods.build("bush", DRAFTS, None)


def test_every_method_has_default_widths():
    for method in ("chain", "tree", "pool"):
        for sampled in (False, True):
            widths = methods.default_widths(method, sampled)
            assert methods.build(method, DRAFTS, widths).window == len(widths) + 1
    assert methods.default_widths("none", False) is None


def test_a_pool_is_loaded_from_folders():
    folders = [pair_folder() / "one", pair_folder() / "two"]
    drafter = methods.load_drafter(folders, (1, 1))
    assert (drafter.num_drafts, drafter.window) == (2, 3)
    assert methods.load_drafter(folders[0]).num_drafts == 1


def test_vocabularies_must_be_the_same(tmp_path):
    checkpoint.save_model(tiny_model(), tmp_path / "small")
    with pytest.raises(ValueError, match=r"draft 0 has a vocabulary of 64 tokens .* 272"):
        methods.load_pair(str(pair_folder() / "target"), str(tmp_path / "small"), None)


def test_a_named_method_is_taken():
    choice = methods.choose("tree", None, TARGET, DRAFTS, False)
    assert choice[:2] == ("tree", methods.default_widths("tree", False))
    assert methods.choose("auto", (2, 1), TARGET, DRAFTS, False)[:2] == ("pool", (2, 1))
    assert methods.choose("auto", (2, 1), TARGET, DRAFTS[:1], False).method == "tree"
    assert methods.choose("auto", (1, 1), TARGET, DRAFTS[:1], False).method == "chain"


def test_without_drafts_or_measurement_auto_says_so():
    assert methods.choose("auto", None, TARGET, [], False)[:2] == ("none", None)
    assert "shipped default" in auto().reason
    assert auto(sampled=True).method in methods.METHODS


def test_auto_takes_the_fastest_that_was_measured_for_such_rows():
    remember(measured("none", 10), measured("tree", 30, (2, 1)), measured("chain", 20, (1,)))
    assert auto()[:2] == ("tree", (2, 1))
    assert "30.0 tokens/s" in auto().reason
    assert "10.0 with plain decoding" in auto().reason
    assert "shipped" in auto(sampled=True).reason
    assert "shipped" in auto(batch=8).reason


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    assert records.setting(TARGET, DRAFTS, 5, False) == records.setting(TARGET, DRAFTS, 8, False)
