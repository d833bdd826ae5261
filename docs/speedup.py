"""Draws docs/speedup.svg from README's table of measured rows: `python docs/speedup.py`."""

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(
    r"^\| ([\d.]+) \| ([a-z][\w ]*) \| ([\d.]+) \| ([\d.]+) \| \**([\d.]+)\** \|$", re.M
)


def rows(readme: str) -> list[tuple[str, str, float, float]]:
    """Temperature, method, tokens per second and times plain decoding of each row."""
    return [(t, name, float(rate), float(times)) for t, name, _, rate, times in ROW.findall(readme)]


def main() -> None:
    """Draws a bar for every row."""
    matplotlib.rcParams["svg.hashsalt"] = "specjax"
    found = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    colours = ["#b0b0b0" if name == "plain" else "#3b6fb6" for _, name, _, _ in found]
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    bars = axes.barh(range(len(found)), [row[2] for row in found], color=colours)
    axes.bar_label(bars, [f"{times:.2f} times" for _, _, _, times in found], padding=3)
    axes.set_yticks(range(len(found)), [f"{name}, T = {t}" for t, name, _, _ in found])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "speedup.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
