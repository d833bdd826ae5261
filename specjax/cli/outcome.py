"""What a run of `specjax bench` leaves behind for `--method auto`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from specjax.base.output import reason
from specjax.checkpoints.pair import Pair
from specjax.measure.rows import BenchRow
from specjax.methods import records
from specjax.methods.choice import compared_with
from specjax.methods.evidence import LEAST_ROUNDS
from specjax.methods.method import PLAIN, Setting
from specjax.methods.records import Measured, Run
from specjax.models.transformer import Model


def remember(
    rows: Sequence[BenchRow], pair: Pair, targets: Mapping[str, Model], date: str, mixed: str
) -> Path | None:
    """Keeps what `--method auto` goes by, and reports what it cannot use; gives the file.

    A run is kept only if the shipped default ran in it beside others: without it nothing could be
    decided. A cache that refuses is reported in a line and loses nothing else. `mixed` is the
    temperature of rows that no text has.

    Rates are those that the speed-ups name over one plain rate, so that groups compare.
    """
    file, untold = None, []
    for (batch, dtype, temperature), alike in _alike(rows, mixed):
        run = Run(date, temperature, alike[0][0].prompts, tuple(_measured(*one) for one in alike))
        default = compared_with(pair, temperature, batch)
        if len(run.measured) < 2:  # plain decoding alone says nothing about the methods
            continue
        if lacks := _lacks(run, default):
            untold.append(f"temperature {temperature:g}, batch {batch}, {dtype} ({lacks})")
            continue
        name = records.setting(targets[dtype], pair.drafts, batch, temperature > 0)
        try:
            file = records.remember(name, run)
        except OSError as error:
            _say(f"what was measured is not remembered for --method auto: {reason(error)}.")
            return None
    if untold:
        _say(f"--method auto learns nothing from {'; '.join(untold)}.")
    return file


def _alike(
    rows: Sequence[BenchRow], mixed: str
) -> Iterator[tuple[tuple[int, str, Any], list[tuple[BenchRow, float]]]]:
    """Rows of a batch size, dtype and temperature, each with its rate over one plain one."""

    def kind(one: tuple[BenchRow, float]) -> tuple[int, str, Any]:
        return one[0].batch, one[0].dtype, one[0].temperature

    plain = {(row.temperature, row.batch): row.plain_tokens_per_second
             for row in rows if row.setting.method == PLAIN}  # fmt: skip
    found = [
        (row, row.speedup * plain[row.temperature, row.batch])
        for row in rows
        if row.temperature != mixed
    ]
    for one, alike in groupby(sorted(found, key=kind), key=kind):
        yield one, list(alike)


def _measured(row: BenchRow, rate: float) -> Measured:
    return Measured(row.setting, rate, tuple(row.round_speedups))


def _lacks(run: Run, default: Setting) -> str | None:
    """What a run lacks for anything to be decided by it."""
    beside = run.of(default)
    if beside is None:
        return f"the shipped default, {default.label}, was not measured beside the others"
    rounds = len(beside.ratios)
    if rounds < LEAST_ROUNDS:
        return f"{rounds} batches of prompts are too few; {LEAST_ROUNDS} at least"
    return None


def _say(sentence: str) -> None:
    print(f"specjax: {sentence}", file=sys.stderr, flush=True)
