"""Widths as text, as JSON, and as counts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees.widths import canonical, counts, of_json, read, spelled, widest


@st.composite
def random_widths(draw):
    """Widths of up to four levels, a number a level or a node."""
    nodes = draw(st.integers(1, 3))
    widths = [nodes]
    for _ in range(draw(st.integers(0, 3))):
        own = draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes).filter(any))
        one = draw(st.booleans())
        widths.append(own[0] or 1 if one else tuple(own))
        nodes = (own[0] or 1) * nodes if one else sum(own)
    return tuple(widths)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(random_widths())
def test_what_is_spelled_can_be_read_and_stored(widths):
    assert read(spelled(widths), "--tree") == canonical(widths)
    assert of_json(json.loads(json.dumps(widths))) == widths
    assert counts(canonical(widths)) == counts(widths)
    assert widest(widths) == max(map(max, counts(widths)))


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ((2, 2, 1), "2,2,1"),
        ((4,), "4"),
        ((3, (2, 1, 0), (1, 0, 1)), "3/2,1,0/1,0,1"),
        ((2, 2, (1, 0, 0, 3), 1), "2/2/1,0,0,3/1"),
        (None, ""),
    ],
)
def test_a_tree_is_spelled_with_slashes_where_a_level_has_numbers_of_its_own(widths, text):
    assert spelled(widths) == text
    assert not text or read(text, "--tree") == widths


def test_a_level_of_equal_numbers_is_one_number():
    assert read("2/1,1/3,3", "--tree") == (2, 1, 3)
    assert read("3/1/1", "--tree") == (3, 1, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--tree is ''; it must be numbers separated by commas, such as 2,2,1, or a"),
        ("2;1", "--tree is '2;1'; it must be numbers"),
        ("2//1", "--tree is '2//1'; it must be numbers"),
        ("2,0", "--tree is '2,0': a tree needs widths of at least 1"),
        ("3/2,1", "level 2 has widths 2,1, which are 2; it needs 3, one a node above it"),
        ("2,1/1", "level 1 has widths 2,1, which are 2; it needs 1,"),
        ("2/1,-1", "level 2 has widths 1,-1; none may be below 0"),
        ("2/0,0", "level 2 has widths 0,0, and so not one node; leave it out"),
    ],
)
def test_a_text_that_is_no_tree_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(text, "--tree")
