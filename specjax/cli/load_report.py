"""What a run of `specjax bench-serve` leaves behind: its report as it grows, and its table."""

import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.cli.report import Json, Report
from specjax.measure.load_rows import LoadRun, rows_of

_COLUMNS = (
    *("rate", "requests/s", "setting", "tokens/s", "mean s", "p50 s", "p99 s", "TTFT p50 ms"),
    *("TPOT p50 ms", "in time", "tokens/step", "tokens/s of best", "mean s of best", "errors"),
)
_WIDE = 160
"""Columns of a table that goes to a file."""


@dataclasses.dataclass
class LoadSheet:
    """What was measured so far, and the report of it.

    Attributes:
      report: where it is kept; its `env` has the client's median share of a core, too.
      capacity: requests a second that complete without drafting; rates are shares of it.
      runs: of each rate and setting, empty at first, then in the order of the turns.
    """

    report: Report
    capacity: float
    runs: Mapping[float, Mapping[str, list[LoadRun]]]

    def add(self, rate: float, setting: str, run: LoadRun) -> None:
        """Takes in what a setting gave at a rate, and writes the file."""
        self.runs[rate][setting].append(run)
        shares = [run.client_cpu for runs in self.runs.values() for own in runs.values()
                  for run in own]  # fmt: skip
        self.report.env["client_cpu"] = statistics.median(shares)
        self.report.keep(self.rows)

    def rows(self) -> list[Json]:
        """A row for each rate and setting, as plain values."""
        return [
            row.report()
            for rate, runs in sorted(self.runs.items())
            for row in rows_of(rate, rate * self.capacity, runs)
        ]


def table(report: dict[str, Any]) -> None:
    """Prints a report: a line a row, those of a rate together."""
    env = report["env"]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    console.print(
        f"{env['device']}, {env['cpu']}, {env['cpu_count']} cores; jax {env['jax']}; "
        f"{env['parameters'] / 1e6:.1f}M parameters; plain decoding completes "
        f"{env['capacity_requests_per_s']:.3g} requests/s; client's share of a core "
        f"{env['client_cpu']:.3f}; {env['date']}"
    )
    lines = Table(*_COLUMNS)
    for place, row in enumerate(report["rows"]):
        if place and row["rate"] != report["rows"][place - 1]["rate"]:
            lines.add_section()
        lines.add_row(*_cells(row))
    console.print(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['rate']:g}",
        f"{row['rate_requests_per_s']:.3g}",
        row["setting"],
        f"{row['goodput_tokens_per_s']:.1f}",
        *(f"{row[name]:.3g}" for name in ("mean_latency_s", "p50_latency_s", "p99_latency_s")),
        *(f"{1e3 * row[name]:.1f}" for name in ("ttft_s_p50", "tpot_s_p50")),
        _share(row["within_tpot_target"]),
        f"{row['tokens_per_step']:.2f}",
        *(_share(row[name]) for name in ("over_best_goodput", "over_best_latency")),
        str(row["errors"]),
    ]


def _share(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
