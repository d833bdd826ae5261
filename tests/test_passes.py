"""The script that times passes of models."""

import json
import sys

from benchmarks import passes
from specjax.measure import roofline
from tests.folders import own_cache, pair_folder

__all__ = ["own_cache"]


def test_every_model_has_its_plain_step_and_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "_ROUND_SECONDS", 0.01)
    models = [f"{pair_folder()}/{name}" for name in ("target", "two")]
    file = tmp_path / "rows.json"
    asked = ["--nodes", "1", "3", "--slots", "8", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["passes", *models, *asked])
    passes.main()
    report = json.loads(file.read_text())
    assert [row["model"] for row in report["rows"]] == models
    for row in report["rows"]:
        assert list(row["milliseconds"]) == ["plain step", "1 nodes", "3 nodes"]
        assert min(row["milliseconds"].values()) > 0
