"""Reports as curves: what trees give against their nodes, what a server gives against its load."""

import importlib.util
import io
from pathlib import Path
from typing import Any

from specjax.base.output import write_bytes

_PANELS = {"tokens_per_step": "tokens per step", "speedup": "speed-up over plain decoding"}
_LOAD_PANELS = {"mean_latency_s": "mean latency (s)", "goodput_tokens_per_s": "goodput (tokens/s)"}


def check(file: str | None) -> None:
    """Checks before anything is measured that `file`, if it is named, can be drawn.

    Raises:
      ValueError: it is no PNG, or matplotlib is not installed.
    """
    if file is None:
        return
    if Path(file).suffix != ".png":
        raise ValueError(f"--png is {file}; its name must end in .png.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which is not installed; install specjax[train].")


def draw(report: dict[str, Any], file: str | Path) -> None:
    """Draws a report to a PNG: a column a temperature, a curve a method, a point a budget.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["method"] != "none"]
    columns = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    figure = Figure(figsize=(4.6 * max(1, len(columns)), 7.5), layout="constrained")
    axes = figure.subplots(2, max(1, len(columns)), squeeze=False, sharex=True)
    for column, (temperature, batch) in enumerate(columns):
        alike = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
        for panel, (field, title) in enumerate(_PANELS.items()):
            axis = axes[panel, column]
            _curves(axis, alike, field)
            axis.set_ylabel(title)
            axis.set_xlabel("nodes below the root")
        axes[0, column].set_title(f"temperature {temperature}, batch {batch}")
    axes[0, 0].legend(fontsize="small")
    _write(figure, report["env"], file)


def draw_load(report: dict[str, Any], file: str | Path) -> None:
    """Draws a report of a server under load: latency and goodput, a curve a setting (SmartSpec's
    figures, 2406.14066).

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(_LOAD_PANELS), 3.8), layout="constrained")
    axes = figure.subplots(1, len(_LOAD_PANELS))
    for axis, (field, title) in zip(axes, _LOAD_PANELS.items(), strict=True):
        for setting in dict.fromkeys(row["setting"] for row in report["rows"]):
            points = [(row["rate_requests_per_s"], row[field]) for row in report["rows"]
                      if row["setting"] == setting]  # fmt: skip
            style = {"lw": 2.5, "color": "black", "zorder": 3} if setting == "auto" else {}
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=setting, **style)
        axis.set_xlabel("requests per second")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    _write(figure, report["env"], file)


def _write(figure: Any, env: dict[str, Any], file: str | Path) -> None:
    figure.suptitle(
        f"{env['parameters'] / 1e6:.1f}M parameters, {env['device']}, {env['cpu_count']} cores, "
        f"{env['date'][:10]}",
        fontsize="small",
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    write_bytes(file, drawn.getvalue())


def _curves(axis: Any, rows: list[dict[str, Any]], field: str) -> None:
    """A curve for every method and dtype."""
    for method, dtype in dict.fromkeys((row["method"], row["dtype"]) for row in rows):
        alike = [row for row in rows if (row["method"], row["dtype"]) == (method, dtype)]
        points = sorted((row["nodes"], row[field]) for row in alike)
        several = len({row["dtype"] for row in rows}) > 1
        axis.plot(
            *zip(*points, strict=True), "o-", ms=3, label=f"{method} {dtype}" if several else method
        )
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
