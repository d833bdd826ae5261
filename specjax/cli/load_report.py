"""What a run of `specjax bench-serve` leaves behind: its report as it grows, and its table."""

import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.base.output import is_stream, tried, write_json
from specjax.measure.load_rows import LoadRow, LoadRun, rows_of

_COLUMNS = (
    *("rate", "requests/s", "setting", "tokens/s", "mean s", "p50 s", "p99 s", "TTFT p50 ms"),
    *("TPOT p50 ms", "in time", "tokens/step", "tokens/s of best", "mean s of best", "errors"),
)
_WIDE = 160
"""Columns of a table that goes to a file."""


@dataclasses.dataclass
class LoadSheet:
    """What was measured so far, and the file that it is kept in.

    The file is whole and valid at any time; its `complete` says whether all turns are there.

    Attributes:
      file: where to keep it, if anywhere.
      env: what was measured, and on what.
      capacity: requests a second that complete without drafting; rates are shares of it.
      runs: of each rate and setting, empty at first, then in the order of the turns.
      refused: whether the file could not be written; it is not tried again before the end.
    """

    file: str | None
    env: dict[str, Any]
    capacity: float
    runs: Mapping[float, Mapping[str, list[LoadRun]]]
    refused: bool = False

    def add(self, rate: float, setting: str, run: LoadRun) -> None:
        """Takes in what a setting gave at a rate, and writes the file."""
        self.runs[rate][setting].append(run)
        file = self.file
        if file and not self.refused and not is_stream(file):
            self.refused = not self._written(file, complete=False)

    def rows(self) -> list[LoadRow]:
        """A row for each rate and setting."""
        return [
            row
            for rate, runs in sorted(self.runs.items())
            for row in rows_of(rate, rate * self.capacity, runs)
        ]

    def report(self, complete: bool = True) -> dict[str, Any]:
        """All of it as plain values."""
        shares = [run.client_cpu for runs in self.runs.values() for own in runs.values()
                  for run in own]  # fmt: skip
        client = {"client_cpu": statistics.median(shares) if shares else None}
        rows = [row.report() for row in self.rows()]
        return {"complete": complete, "env": self.env | client, "rows": rows}

    def finish(self) -> bool:
        """Writes the whole report; whether it could."""
        return not self.file or self._written(self.file, complete=True)

    def _written(self, file: str, complete: bool) -> bool:
        return tried(f"{file} cannot be written", lambda: write_json(file, self.report(complete)))


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
