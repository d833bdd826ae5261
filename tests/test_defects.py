"""The deliberate defects can still be made; that tests catch them is `tests.defects`' to say."""

from tests import defects


def test_every_defect_changes_what_is_there_once():
    assert len(defects.DEFECTS) >= 20
    assert defects.faults() == []
