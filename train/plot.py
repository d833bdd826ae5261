"""The tables of `train.evaluate` as a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from train.heldout import TOP
from train.runs import Row


def plot(found: dict[str, Any], file: Path) -> None:
    """Writes a PNG: a row of panels for each table that there is, a panel for each temperature.

    Tokens per step by nodes, and coverage by k.
    """
    drawn = {"equal_nodes": _nodes, "coverage": _coverage}
    there = {table: draw for table, draw in drawn.items() if found.get(table)}
    temperatures = sorted({row["temperature"] for table in there for row in found[table]})
    across, down = max(1, len(temperatures)), max(1, len(there))
    figure, panels = plt.subplots(down, across, figsize=(5 * across, 3.5 * down), squeeze=False)
    for line, (table, draw) in zip(panels, there.items(), strict=False):
        for panel, temperature in zip(line, temperatures, strict=True):
            draw(panel, [row for row in found[table] if row["temperature"] == temperature])
            panel.set_title(f"T = {temperature:g}")
            panel.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _nodes(panel: Axes, rows: list[Row]) -> None:
    for pool in dict.fromkeys(row["pool"] for row in rows):
        own = [row for row in rows if row["pool"] == pool]
        panel.errorbar(
            [row["mean_nodes"] for row in own],
            [row["tokens_per_step"] for row in own],
            yerr=[row["spread"] or 0 for row in own],
            marker="o",
            label=pool,
        )
    panel.set(xlabel="nodes a step", ylabel="tokens per step")


def _coverage(panel: Axes, rows: list[Row]) -> None:
    ks = range(1, TOP + 1)
    for row in rows:
        if row["of"] == "union":
            panel.plot(ks, [row[f"top{k}"] for k in ks], marker="o", label=row["pool"])
    panel.set(xlabel="k", ylabel="P(token among the k most likely)")
