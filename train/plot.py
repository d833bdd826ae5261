"""The tables of `train.evaluate` as a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from train.heldout import TOP


def plot(found: dict[str, Any], file: Path) -> None:
    """Writes a PNG: tokens per step by nodes, and coverage by k, a panel each temperature."""
    nodes, coverage = found.get("equal_nodes", []), found.get("coverage", [])
    temperatures = sorted({row["temperature"] for row in (*nodes, *coverage)})
    figure, panels = plt.subplots(
        2, max(1, len(temperatures)), figsize=(5 * max(1, len(temperatures)), 7), squeeze=False
    )
    for column, temperature in enumerate(temperatures):
        top, bottom = panels[0][column], panels[1][column]
        for pool in dict.fromkeys(row["pool"] for row in nodes):
            own = [r for r in nodes if (r["pool"], r["temperature"]) == (pool, temperature)]
            top.errorbar(
                [row["mean_nodes"] for row in own],
                [row["tokens_per_step"] for row in own],
                yerr=[row["spread"] or 0 for row in own],
                marker="o",
                label=pool,
            )
        top.set(title=f"T = {temperature:g}", xlabel="nodes a step", ylabel="tokens per step")
        own = [r for r in coverage if r["temperature"] == temperature and r["of"] == "union"]
        for row in own:
            ks = range(1, TOP + 1)
            bottom.plot(ks, [row[f"top{k}"] for k in ks], marker="o", label=row["pool"])
        bottom.set(xlabel="k", ylabel="P(token among the k most likely)")
        for panel in (top, bottom):
            if panel.get_legend_handles_labels()[0]:
                panel.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
