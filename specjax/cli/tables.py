"""A bench report as a table."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from specjax.measure.profile import PARTS

_COLUMNS = (
    *("method", "T", "batch", "dtype", "nodes", "tokens/step", "tokens/s", "speed-up"),
    *("draft", "target", "other", "prefill", "8-grams again", "over floor"),
)
_LONGEST_NAME = 24
_WIDE = 160
"""Columns of a table that goes to a file."""


def table(report: dict[str, Any]) -> None:
    """Prints a report: a line a row, shares of the wall time for the phases."""
    env = report["env"]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    console.print(
        f"{env['device']}, {env['cpu']}, {env['cpu_count']} cores; jax {env['jax']}; "
        f"{env['parameters'] / 1e6:.1f}M parameters; reads {env['read_gb_per_second']:.1f} GB/s; "
        f"{env['date']}"
    )
    first, *others = _COLUMNS
    lines = Table(Column(first, no_wrap=True, max_width=_LONGEST_NAME), *others)
    for row in report["rows"]:
        lines.add_row(*_cells(row))
    console.print(lines)
    if any("profile" in row for row in report["rows"]):
        console.print("A traced step in milliseconds, and its share, by part:")
        console.print(_parts(report["rows"]))


def _parts(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for every row that was traced."""
    lines = Table(Column("method", no_wrap=True, max_width=_LONGEST_NAME), "T", "dtype", *PARTS)
    for row in rows:
        if "profile" in row:
            whole = sum(row["profile"].values())
            cells = (f"{took * 1e3:.2f} ({took / whole:.0%})" for took in row["profile"].values())
            lines.add_row(row["label"], str(row["temperature"]), row["dtype"], *cells)
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    phases = ("draft_seconds", "target_seconds", "other_seconds", "prefill_seconds")
    floor = row.get("step_over_bandwidth_floor")
    return [
        row["label"],
        str(row["temperature"]),
        str(row["batch"]),
        row["dtype"],
        f"{row['mean_nodes']:.1f}",
        f"{row['tokens_per_step']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}",
        *(f"{row[phase] / row['seconds']:.0%}" if phase in row else "" for phase in phases),
        f"{row['repeated_8grams']:.1%}",
        "" if floor is None else f"{floor:.2f}",
    ]
