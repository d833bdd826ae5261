"""Cases of a test of which some are slow: they repeat what the others prove.

What is marked as slow `pytest` leaves out and `pytest -m slow` runs. Each promise is proven once
without it: the output distribution for every rule, greedy equality for every method, one family of
each kind, resumption, sharding, several processes.
"""

from collections.abc import Iterable

import pytest


def slow_among(cases: Iterable, *slow) -> list:
    """The cases, those that are named marked as slow."""
    cases = list(cases)
    assert all(one in cases for one in slow), f"{slow} are not all among {cases}"
    return [pytest.param(one, marks=pytest.mark.slow) if one in slow else one for one in cases]


def slow_but(cases: Iterable, *quick) -> list:
    """The cases, all but those that are named marked as slow."""
    cases = list(cases)
    assert all(one in cases for one in quick), f"{quick} are not all among {cases}"
    return slow_among(cases, *(one for one in cases if one not in quick))
