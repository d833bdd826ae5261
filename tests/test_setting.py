"""Settings that a file holds: what is read, and the one sentence for what cannot be."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.draft import Growth
from specjax.methods import tuned
from specjax.methods.method import (
    METHODS,
    NO_SIZE,
    WIDTHS,
    WINDOW,
    Setting,
    listed,
    register_method,
)
from specjax.methods.registry import setting_of
from specjax.methods.setting import from_json, to_json
from specjax.trees.tree import TreeShape
from specjax.trees.widths import MOST_NODES, canonical, counts, spelled

GROWN = {"method": "specexec", "growth": {"budget": 4}}


def growth(**changed) -> dict:
    return GROWN | {"growth": GROWN["growth"] | changed}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"method": "chain", "widths": [1, 1]},
        {"method": "tree", "widths": [2, [1, 0]]},
        growth(decay=0.5, least_gain=0, by_level=True),
        {"method": "staged", "growth": {"budget": 3}, "temperatures": [1, 0.5], "stage": "draft",
         "guess": [2], "fan": 2},
    ],
)  # fmt: skip
def test_what_is_written_is_read(values):
    setting = from_json(values, "here")
    assert from_json(json.loads(json.dumps(to_json(setting))), "here") == setting
    with_nulls = {"widths": None, "growth": None, "temperatures": None, "fan": None} | values
    assert from_json(with_nulls, "here") == setting


@st.composite
def named(draw):
    """A method, and a size of it: none, a number of nodes, or children of every node by level."""
    name = draw(st.sampled_from(list(METHODS)))
    if METHODS[name].size == NO_SIZE:
        return name, None
    if METHODS[name].size == WINDOW:
        sizes = draw(st.tuples(st.integers(1, 9), st.integers(2, 5), st.integers(0, 9)))
        return name, ",".join(map(str, sizes))
    if METHODS[name].size != WIDTHS:
        return name, draw(st.integers(1, 300))
    levels, nodes = [], 1
    for _ in range(draw(st.integers(1, 4))):
        levels.append(draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes).filter(any)))
        nodes = sum(levels[-1])
    return name, levels


def printed(name, size) -> str:
    if isinstance(size, list):
        size = spelled(canonical(tuple(map(tuple, size))))
    return name if size is None else f"{name}:{size}"


@settings(deadline=None, max_examples=100)
@given(st.lists(named(), min_size=1, max_size=6))
def test_what_is_printed_is_read(found):
    """Each alone, in a list, as an argument, and from JSON with its fields beside it or without."""
    texts = [printed(*each) for each in found]
    assert listed(", ".join(texts)) == listed(",".join(texts)) == texts
    for text in texts:
        setting = setting_of(text)
        assert setting.name == setting.label == text
        assert setting_of(setting.name) == setting
        values = json.loads(json.dumps(to_json(setting)))
        assert values["name"] == text
        assert from_json(values, "here") == from_json(text, "here") == setting


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("batch", [1, 8])
def test_every_shipped_setting_is_read_from_what_is_printed(method, batch):
    setting = setting_of(method, batch=batch)
    assert setting_of(setting.name) == setting
    assert setting.name.partition(":")[0] == method


@pytest.mark.parametrize("method", [name for name, own in METHODS.items() if own.takes_budget])
def test_every_budget_is_named_by_what_it_made(method):
    for budget in (*range(1, 17), 64):
        setting = setting_of(method, budget=budget)
        assert setting_of(setting.name) == setting


@pytest.mark.parametrize(
    ("text", "named", "sentence"),
    [
        (
            "specexec:15",
            {"budget": 7},
            r"^specexec:15 has a size, and a budget \(7\) is named",
        ),
        (
            "tree:2,1",
            {"widths": (2,)},
            r"^tree:2,1 has a size, and a tree \(2\) is named beside",
        ),
        ("chain:3", {"budget": 3}, r"^chain:3 has a size, and a budget \(3\) is named beside it; "),
    ],
)
def test_a_size_is_named_once(text, named, sentence):
    with pytest.raises(ValueError, match=sentence):
        setting_of(text, **named)


def test_what_a_name_does_not_carry_is_in_the_fields():
    other = replace(setting_of("specexec:7"), temperatures=(1.0, 1.0), draft="self:8bit")
    assert (other.name, other.label) == ("specexec:7", "specexec:7 of self:8bit")
    assert from_json(to_json(other), "here") == other != setting_of(other.name)
    shaped = Setting("recycle", (2, 1))
    assert (shaped.name, to_json(shaped)["widths"]) == ("recycle:4", (2, 1))


@pytest.mark.parametrize("name", ["a:b", "a,b", "2a", "", "a b", "a/b"])
def test_a_method_whose_name_is_no_word_is_not_registered(name):
    with pytest.raises(ValueError, match="it must be a letter with letters, digits, - and _ after"):
        register_method(replace(METHODS["chain"], name=name))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"name": "chain:3", "method": "chain", "widths": [1]},
            "here has the name 'chain:3', and the fields of chain:1",
        ),
        ({"name": ["chain"]}, r"here has the name \['chain'\], and the fields of none"),
        ("bush:3", "here: no method 'bush'"),
        (None, "here is None; it must be an object"),
        ([], r"here is \[\]; it must be an object"),
        ({"method": None}, "no method None"),
        ({"method": ["chain"]}, r"no method \['chain'\]"),
        ({"stage": {}}, r"no stage \{\}"),
        ({"x" * 10**6: 1}, "here has 'x{40}'; the nearest name there is is"),
        ({"widths": 3}, "widths are 3; they must be a list of levels"),
        ({"widths": "11"}, "widths are '11'; they must be a list"),
        ({"widths": {"a": 1}}, "they must be a list"),
        ({"widths": [1e300]}, r"level 1 is 1e\+300; it must be an integer or a list"),
        ({"widths": [2, 1.5]}, "level 2 is 1.5; it must be an integer"),
        ({"widths": [True]}, "level 1 is True; it must be an integer"),
        ({"widths": [None]}, "level 1 is None"),
        ({"widths": ["2"]}, "level 1 is '2'"),
        ({"widths": [1, [math.nan]]}, r"level 2 is \[nan\]"),
        ({"widths": [1, [[1]]]}, r"level 2 is \[\[1\]\]"),
        ({"widths": []}, "a tree needs widths of at least 1"),
        ({"widths": [0]}, "a tree needs widths of at least 1"),
        ({"widths": [10**9, 10**9]}, f"first 1 levels have {10**9} nodes; a tree has {MOST_NODES}"),
        ({"widths": [10**30]}, "a tree has 8192 at most"),
        ({"guess": [2, 10**30]}, "a tree has 8192 at most"),
        (growth(budget=2.5), "budget is 2.5; it must be an integer"),
        (growth(budget=True), "budget is True; it must be an integer"),
        (growth(budget=None), "budget is None; it must be an integer"),
        (growth(budget=math.nan), "budget is nan; it must be an integer"),
        (growth(budget=10**30), "budget is 1000000000000000000000000000000; it must be at most"),
        (growth(beams=0), "beams is 0; it must be at least 1"),
        (growth(width="4"), "width is '4'; it must be an integer"),
        (growth(depth=10**10), "depth is 10000000000; it must be at most 8192"),
        (growth(decay=None), "decay is None"),
        (growth(decay="0.5"), "decay is 0.5; it must lie"),
        (growth(decay=math.nan), "decay is nan"),
        (growth(decay=True), "decay is True"),
        (growth(least_gain=math.inf), "least_gain is inf"),
        (growth(least_gain=10**400), "least_gain is 1000"),
        (growth(by_level="no"), "by_level is 'no'; it must be true or false"),
        (GROWN | {"growth": {}}, "growth has no budget"),
        (GROWN | {"growth": 3}, "growth is 3; it must be an object"),
        (GROWN | {"temperatures": 5}, "temperatures are 5; they must be two positive numbers"),
        (GROWN | {"temperatures": [0.5]}, r"temperatures are \[0.5\]"),
        (GROWN | {"temperatures": [math.nan, -1]}, r"temperatures are \[nan, -1\]"),
        (GROWN | {"temperatures": [1, 1e-60]}, r"temperatures are \[1, 1e-60\]"),
        (GROWN | {"temperatures": [10**400, 1]}, "they must be two positive numbers"),
        (GROWN | {"fan": 2.5}, "fan is 2.5; it must be an integer"),
        (GROWN | {"fan": -1}, "fan is -1; it must be at least 1"),
    ],
)
def test_a_setting_of_other_values_is_refused(values, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        from_json(values, "here")
    assert str(refusal.value).startswith("here")
    assert len(str(refusal.value)) < 1000


def test_growth_and_trees_check_what_python_gives_them():
    for wrong in (True, 0, MOST_NODES + 1):
        with pytest.raises(ValueError, match="budget is"):
            Growth(wrong)
    with pytest.raises(ValueError, match=r"level 2 has widths 0,0,0.*which are 9000"):
        counts((1, (0,) * 9000))
    assert TreeShape((MOST_NODES,)).num_nodes == MOST_NODES
    with pytest.raises(ValueError, match="its first 13 levels have 16382 nodes"):
        TreeShape((2,) * 13)


def written(folder, **changed) -> str:
    entry = {"temperature": 0, "batch": 1, "setting": {}} | changed
    (folder / "tuned.json").write_text(json.dumps({"settings": [entry]}))
    return str(folder / "tuned.json")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        *(({"temperature": value}, "has the temperature .*; it must be a number of at least 0")
          for value in (None, math.nan, math.inf, -1, True, "0", [], 10**400)),
        *(({"batch": value}, "has the batch .*; it must be an integer of at least 1")
          for value in (None, math.nan, math.inf, 1.5, 0, -3, True, "1", [])),
        ({"expected": 3}, "expected must be an object of numbers"),
        ({"measured": {"speedup": "fast"}}, "measured must be an object of numbers"),
    ],
)  # fmt: skip
def test_an_entry_of_other_values_is_refused(changed, sentence, tmp_path):
    with pytest.raises(ValueError, match=f"^--config .*tuned.json, setting 0.*{sentence}"):
        tuned.read(written(tmp_path, **changed))


def test_an_entry_may_be_of_many_rows_and_know_no_figures(tmp_path):
    entry = tuned.read(written(tmp_path, batch=10**400, expected=None))[0]
    assert entry == (0.0, 10**400, Setting(), {}, {})
    assert tuned.pick([entry], 0.5, 2) == entry


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" * 200_000, "which is not JSON: it is too deeply nested"),
        (b"\xff", "which is not JSON: 'utf-8' codec"),
        (b'{"settings": [' + b"9" * 5000 + b"]}", "which is not JSON: Exceeds the limit"),
        (b"null", "holds no settings"),
        (b'{"settings": null}', "holds no settings"),
        (b'{"settings": [' + b"[" * 500 + b"]" * 500 + b"]}", "setting 0 is .*must be an object"),
        (b'{"complete": false, "settings": []}', "of a run of tune that did not end; run it again"),
        (b'{"complete": null, "settings": [3]}', "of a run of tune that did not end"),
    ],
)
def test_a_damaged_file_is_named(content, sentence, tmp_path):
    file = tmp_path / "tuned.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--config .*tuned.json.*{sentence}") as refusal:
        tuned.read(file)
    assert len(str(refusal.value)) < 1000


def test_what_can_never_be_read_to_its_end_is_refused():
    with pytest.raises(ValueError, match=r"--config is /dev/zero, which is not JSON: .* more than"):
        tuned.read("/dev/zero")
    with pytest.raises(ValueError, match="--config is /proc, which cannot be read: Is a directory"):
        tuned.read("/proc")
