"""What runs of a load give: a row for each rate and setting, with units in its fields' names."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.goodput.policy import PLAIN
from specjax.measure.load import Answered

AUTO = "auto"


class LoadRun(NamedTuple):
    """A setting's requests at a rate, once.

    Attributes:
      answered: what became of the requests.
      client_cpu: the client's share of a core.
      counts: steps of rows, and drafted, accepted and generated tokens, by the server's metrics.
      chosen: steps by setting, where the server chooses.
    """

    answered: Sequence[Answered]
    client_cpu: float
    counts: Mapping[str, float]
    chosen: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Statistics of one run, or of several together; NaN where there is nothing to take them of.

    Latencies are of requests that completed, from when they were due.

    Attributes:
      requests: how many were sent.
      errors: how many of them did not complete.
      tokens: of those that did.
      seconds: from the first due time to the last token of a run, added up.
      goodput_tokens_per_s: `tokens` over `seconds`.
      mean_latency_s: to the last token.
      p50_latency_s: its median.
      p99_latency_s: its 99th percentile.
      ttft_s_p50: median seconds to the first token.
      tpot_s_p50: median seconds of a token after the first.
      within_tpot_target: of the requests with a latency target, the share that had their tokens in
        time.
      late_s_p99: how late requests were sent; the client's own delay.
      client_cpu: the client's share of a core, the median of runs.
      tokens_per_step: generated tokens over steps of rows.
      drafted_per_step: drafted tokens over steps of rows.
      acceptance: accepted tokens over drafted ones.
      chosen: shares of steps by setting, where the server chooses.
    """

    requests: int
    errors: int
    tokens: int
    seconds: float
    goodput_tokens_per_s: float
    mean_latency_s: float
    p50_latency_s: float
    p99_latency_s: float
    ttft_s_p50: float
    tpot_s_p50: float
    within_tpot_target: float
    late_s_p99: float
    client_cpu: float
    tokens_per_step: float
    drafted_per_step: float
    acceptance: float
    chosen: Mapping[str, float]


def numbers_of(runs: Sequence[LoadRun]) -> Numbers:
    """The statistics of runs of one setting at one rate."""
    everything = [each for run in runs for each in run.answered]
    whole = [each for each in everything if each.error is None]
    tokens, seconds = sum(each.tokens for each in whole), sum(_seconds(run) for run in runs)
    latencies = [each.latency_s for each in whole]
    counts = {name: sum(run.counts.get(name, 0) for run in runs) for name in _counted(runs)}
    return Numbers(
        requests=len(everything),
        errors=len(everything) - len(whole),
        tokens=tokens,
        seconds=seconds,
        goodput_tokens_per_s=_ratio(tokens, seconds),
        mean_latency_s=statistics.fmean(latencies) if latencies else math.nan,
        p50_latency_s=_percentile(latencies, 50),
        p99_latency_s=_percentile(latencies, 99),
        ttft_s_p50=_percentile([each.first_s - each.due_s for each in whole], 50),
        tpot_s_p50=_percentile([each.tpot_s for each in whole if each.tokens > 1], 50),
        within_tpot_target=_ratio(*_within_target(everything)),
        late_s_p99=_percentile([each.sent_s - each.due_s for each in everything], 99),
        client_cpu=statistics.median(run.client_cpu for run in runs),
        tokens_per_step=_ratio(counts.get("generated", 0), counts.get("steps", 0)),
        drafted_per_step=_ratio(counts.get("drafted", 0), counts.get("steps", 0)),
        acceptance=_ratio(counts.get("accepted", 0), counts.get("drafted", 0)),
        chosen=_shares(runs),
    )


def _counted(runs: Sequence[LoadRun]) -> list[str]:
    return sorted({name for run in runs for name in run.counts})


def _seconds(run: LoadRun) -> float:
    """From when a run's first request was due to its last token; 0 where none completed."""
    ends = [each.last_s for each in run.answered if each.error is None]
    return max(ends) - min(each.due_s for each in run.answered) if ends else 0.0


def _within_target(answered: Sequence[Answered]) -> tuple[int, int]:
    """Requests that had their tokens in time, and those that asked for it."""
    asked = [each for each in answered if each.max_tpot_ms is not None]
    met = (each.error is None and 1000 * each.tpot_s <= (each.max_tpot_ms or 0) for each in asked)
    return sum(met), len(asked)


def _ratio(part: float | int, whole: float | int) -> float:
    return part / whole if whole else math.nan


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else math.nan


def _shares(runs: Sequence[LoadRun]) -> dict[str, float]:
    steps: dict[str, int] = {}
    for run in runs:
        for name, count in run.chosen.items():
            steps[name] = steps.get(name, 0) + count
    return {name: count / sum(steps.values()) for name, count in steps.items()}


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """A setting at a rate, over all turns.

    Ratios are the medians of those within turns. Fixed settings are all but `auto`; the best one
    is that with the best median over turns. None where there is nothing to compare with.

    Attributes:
      rate: as a share of what the server completes without drafting.
      rate_requests_per_s: the mean rate of arrivals.
      setting: its name.
      numbers: of all turns together.
      turns: of each turn.
      over_best_goodput: goodput over that of the best fixed setting; higher is better.
      over_best_latency: mean latency over that of the best fixed setting; lower is better.
      over_plain_goodput: goodput over that of plain decoding.
      over_plain_latency: mean latency over that of plain decoding.
    """

    rate: float
    rate_requests_per_s: float
    setting: str
    numbers: Numbers
    turns: Sequence[Numbers]
    over_best_goodput: float | None
    over_best_latency: float | None
    over_plain_goodput: float | None
    over_plain_latency: float | None

    def report(self) -> dict[str, Any]:
        """The row as plain values."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("numbers", "turns")
        }
        turns = [dataclasses.asdict(each) for each in self.turns]
        return own | dataclasses.asdict(self.numbers) | {"turns": turns}


def rows_of(rate: float, per_second: float, runs: Mapping[str, Sequence[LoadRun]]) -> list[LoadRow]:
    """A row for each setting of a rate.

    Args:
      rate: as a share of capacity.
      per_second: in requests a second.
      runs: of each setting, in the order of the turns; a setting may lack the last ones.
    """
    turns = {name: [numbers_of([run]) for run in own] for name, own in runs.items() if own}
    fixed = {name: own for name, own in turns.items() if name != AUTO}
    goodput = {name: [each.goodput_tokens_per_s for each in own] for name, own in turns.items()}
    latency = {name: [each.mean_latency_s for each in own] for name, own in turns.items()}
    fastest = _best(max, {name: goodput[name] for name in fixed})
    soonest = _best(min, {name: latency[name] for name in fixed})
    return [
        LoadRow(
            rate=rate,
            rate_requests_per_s=per_second,
            setting=name,
            numbers=numbers_of(runs[name]),
            turns=own,
            over_best_goodput=_over(goodput[name], goodput.get(fastest)),
            over_best_latency=_over(latency[name], latency.get(soonest)),
            over_plain_goodput=_over(goodput[name], goodput.get(PLAIN)),
            over_plain_latency=_over(latency[name], latency.get(PLAIN)),
        )
        for name, own in turns.items()
    ]


def _best(choose: Callable[..., str], values: Mapping[str, Sequence[float]]) -> str:
    """The name whose median over turns is the best; "" if every one has a turn without any."""
    medians = {name: statistics.median(own) for name, own in values.items()
               if not any(map(math.isnan, own))}  # fmt: skip
    return choose(medians, key=medians.__getitem__) if medians else ""


def _over(own: Sequence[float], others: Sequence[float] | None) -> float | None:
    """The median over turns of the ratio."""
    ratios = [_ratio(one, other) for one, other in zip(own, others or (), strict=False)]
    ratios = [each for each in ratios if not math.isnan(each)]
    return statistics.median(ratios) if ratios else None
