"""Tokens a second against the layers in memory, of files that `benchmarks.offload.disk` wrote.

python -m benchmarks.offload.plot out.png l0.json l8.json l16.json l24.json
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def main(out: str, *files: str) -> None:
    """Draws a line for plain decoding and for each tree, from disk."""
    found = sorted(
        (json.loads(Path(file).read_text()) for file in files),
        key=lambda each: each["layers_in_memory"],
    )
    lines: dict[str, list[tuple[int, float]]] = {}
    for each in found:
        for name, row in each["rows"].items():
            where, _, setting = name.partition(" ")
            if where == "disk":
                point = each["layers_in_memory"], row["tokens_per_second"]
                lines.setdefault(setting, []).append(point)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for setting, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=setting)
    one = found[0]
    axes.set_xlabel(f"layers in memory, of {one['layers']}")
    axes.set_ylabel("tokens a second")
    axes.set_yscale("log")
    axes.set_title(
        f"{one['parameters'] / 1e9:.2f}B parameters, {one['config']['dtype']}, "
        f"T = {one['config']['temperature']:g}, {one['cpu']}, {one['date'][:10]}",
        fontsize=9,
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
