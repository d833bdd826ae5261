"""The report as a page of Markdown, and its plots."""

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.cells import Json
from benchmarks.papers import STAGED_SAMPLING
from benchmarks.rounds import Sampled
from benchmarks.speed import ALL
from specjax.base.output import write_bytes

Cell = str | float | int | None
Rows = Sequence[Json]


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Cell]]) -> str:
    """A table of Markdown.

    Args:
      columns: the heading of each field; numbers stand on the right.
      rows: values by field; what is missing is left empty.
    """
    made = [[shown(row.get(name)) for name in columns] for row in rows]
    sides = ["--:" if _is_numeric(own) else "---" for own in zip(*made, strict=True)]
    lines = [list(columns.values()), sides or ["---"] * len(columns), *made]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_numeric(values: Sequence[str]) -> bool:
    """Whether all that is there begins as a number does, and no name of a tree."""
    there = [value for value in values if value]
    return bool(there) and all(value[0].isdigit() and "; " not in value for value in there)


def shown(value: Cell) -> str:
    """A value as text: three figures of a number are enough."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def command_of(arguments: Sequence[str]) -> str:
    """The command, with files of other folders by their names alone."""
    short = [Path(each).name if Path(each).is_absolute() else each for each in arguments]
    return shlex.join(["python", "-m", "benchmarks.report", *short])


def caption(env: Json, dates: Sequence[str], what: str) -> str:
    """What stands beside every table: hardware, versions, model and dates."""
    days = sorted({date[:10] for date in dates})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else env["date"][:10]
    return (
        f"{what} {env['model']} ({env['parameters'] / 1e6:.1f}M parameters, {env['weights_as']}), "
        f"drafts {env['drafts_are']}; {env['cpu']}, {env['cpu_count']} cores, {env['device']}, "
        f"products {env['products']}, Python {env['python']}, jax {env['jax']}; {when}."
    )


def speed(rows: Rows) -> str:
    """Methods and rules over all texts, then by group."""
    overall = [_speed_row(row) for row in rows if row["group"] == ALL]
    columns = {
        "T": "T", "name": "method, rule", "nodes": "nodes", "tokens_per_step": "tokens per step",
        "tokens_per_second": "tokens/s", "speedup": "times plain", "repeated": "repeated 8-grams",
        "published": "published: times plain (tokens per step)",
    }  # fmt: skip
    parts = [table(columns, overall)]
    groups = list(dict.fromkeys(row["group"] for row in rows if row["group"] != ALL))
    if len(groups) > 1:
        parts.append("By group, times plain (tokens per step):")
        parts.append(table({"T": "T", "name": "method, rule"} | {g: g for g in groups},
                           _by_group(rows)))  # fmt: skip
    parts.append(f"Published: {published.SPEC_BENCH}.")
    return "\n\n".join(parts)


def _speed_row(row: Json) -> Json:
    method = row["name"].split()[0].rstrip(",")
    found = published.SPEC_BENCH_SPEEDUPS.get(method) if not row["sampled"].temperature else None
    return row | {
        "T": _temperature(row["sampled"]),
        "repeated": f"{row['repeated']:.0%}",
        "published": None if found is None else f"{found[0]:.2f} ({found[1]:.2f})",
    }


def _by_group(rows: Rows) -> list[Json]:
    found: dict[tuple[Sampled, str], Json] = {}
    for row in rows:
        own = found.setdefault((row["sampled"], row["name"]), {})
        own |= {"T": _temperature(row["sampled"]), "name": row["name"]}
        own[row["group"]] = f"{row['speedup']:.2f} ({row['tokens_per_step']:.2f})"
    return list(found.values())


def _temperature(sampled: Sampled) -> str:
    return f"{sampled.temperature:g}" + (f", top-k {sampled.top_k}" if sampled.top_k else "")


def coverage(rows: Rows) -> str:
    """SpecInfer's Table 1."""
    ranks = range(1, 6)
    made: list[Json] = [
        row | {"T": f"{row['temperature']:g}"} | {f"top{k}": f"{row[f'top{k}']:.3f}" for k in ranks}
        for row in rows
    ]
    for greedy in (True, False):
        own = {f"top{k}": published.COVERAGE.get((greedy, k)) for k in ranks}
        made.append({"T": "0" if greedy else "stochastic", "of": "published"} | own)
    columns = {"T": "T", "of": "draft", "tokens": "tokens"} | {f"top{k}": f"top {k}" for k in ranks}
    return f"{table(columns, made)}\n\nPublished: {published.SPECINFER}, over five data sets."


def width(rows: Rows) -> str:
    """SpecInfer's Table 2."""
    made = [
        row
        | {"T": _temperature(row["sampled"]), "width": row["name"]}
        | {"published": published.WIDTHS.get((not row["sampled"].temperature, int(row["name"])))}
        for row in rows
    ]
    columns = {
        "T": "T", "width": "width", "tokens_per_step": "tokens per step",
        "published": "published tokens per step", "tokens_per_second": "tokens/s",
        "speedup": "times plain",
    }  # fmt: skip
    return f"{table(columns, made)}\n\nPublished: {published.SPECINFER}, data set CIP."


def rules(rows: Rows) -> str:
    """SpecInfer's Table 3."""
    made = [
        row | {"published": published.RULES.get(row["rule"]) if _is_theirs(row) else None}
        for row in rows
    ]
    columns = {
        "shape": "tree", "children": "children", "rule": "rule",
        "tokens_per_step": "tokens per step", "published": "published",
        "tokens_per_second": "tokens/s", "speedup": "times plain",
    }  # fmt: skip
    return (
        f"{table(columns, made)}\n\nPublished: {published.SPECINFER}, data set Alpaca; on five "
        "data sets multi-step sampling accepts 1.26 to 1.28 times what naive sampling does."
    )


def _is_theirs(row: Json) -> bool:
    return row["shape"] == "1,1,5,1,1,1,1,1" and row["children"] == "drawn"


def budgets(rows: Rows, plot: str | None) -> str:
    """SpecExec's curve."""
    made = [
        row
        | {"T": _temperature(row["sampled"]), "budget": int(row["name"])}
        | {"published": published.BUDGETS.get(int(row["name"]))}
        for row in rows
    ]
    columns = {
        "T": "T", "budget": "nodes", "tokens_per_step": "tokens per step",
        "published": "published tokens per step", "tokens_per_second": "tokens/s",
        "speedup": "times plain",
    }  # fmt: skip
    parts = [table(columns, made), f"Published: {published.SPECEXEC}; {published.SPECEXEC_MOST}."]
    return "\n\n".join(parts + _picture("Tokens per step and speed-up against nodes", plot))


def staged(rows: Rows) -> str:
    """Staged's configurations."""
    kinds = {sampled: kind for kind, sampled in STAGED_SAMPLING.items()}
    made = []
    for row in rows:
        kind, name = kinds[row["sampled"]], row["name"]
        theirs = published.STAGED_RATES.get((kind, name))
        made.append(
            row
            | {"kind": kind, "published": theirs, "times": published.STAGED_TIMES.get((kind, name))}
        )
    columns = {
        "kind": "tokens are", "name": "configuration", "tokens_per_step": "tokens per step",
        "tokens_per_second": "tokens/s", "speedup": "times plain",
        "published": "published tokens/s", "times": "published times plain",
    }  # fmt: skip
    return f"{table(columns, made)}\n\nPublished: {published.STAGED}."


def served(rows: Rows, plot: str | None) -> str:
    """SmartSpec's rates."""
    made: list[Json] = []
    for row in rows:
        latency = row["over_plain_latency"]
        made.append(row | {"faster": latency and 1 / latency})
    columns = {
        "rate": "rate, of capacity", "rate_requests_per_s": "requests/s", "setting": "setting",
        "mean_latency_s": "mean latency, s", "faster": "times lower than plain",
        "goodput_tokens_per_s": "goodput, tokens/s", "over_plain_goodput": "times plain",
        "tokens_per_step": "tokens per step",
    }  # fmt: skip
    parts = [table(columns, made), f"Published: {published.SMARTSPEC}."]
    return "\n\n".join(parts + _picture("Mean latency against the rate", plot))


def peers(rows: Rows, said: Sequence[str]) -> str:
    """Peers on the same files, and ours beside them; then what there is to say of them."""
    fastest: dict[Sampled, float] = {}
    for row in rows:
        if row["name"].startswith("llama.cpp"):
            rate = row["tokens_per_second"]
            fastest[row["sampled"]] = max(rate, fastest.get(row["sampled"], 0.0))
    made: list[Json] = []
    for row in rows:
        best = fastest.get(row["sampled"])
        over = None if best is None else row["tokens_per_second"] / best
        same = None if row["sampled"].temperature else f"{row['same']:.0%}"
        made.append(row | {"T": _temperature(row["sampled"]), "over": over, "same": same})
    columns = {
        "T": "T", "name": "", "tokens_per_step": "tokens per step",
        "tokens_per_second": "tokens/s", "speedup": "times specjax's plain",
    }  # fmt: skip
    columns |= {"over": "tokens/s over llama.cpp's best"} if fastest else {}
    columns["same"] = "text as plain's, up to the first other token"
    return "\n\n".join([table(columns, made), *said])


def _picture(what: str, plot: str | None) -> list[str]:
    return [f"![{what}]({plot})"] if plot else []


def draw_budgets(rows: Rows, file: Path) -> None:
    """Tokens per step and speed-up against budgets, a curve a temperature.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    titles = {"tokens_per_step": "tokens per step", "speedup": "times plain decoding"}
    for axis, (field, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for sampled in dict.fromkeys(row["sampled"] for row in rows):
            own = sorted((int(r["name"]), r[field]) for r in rows if r["sampled"] == sampled)
            axis.plot(*zip(*own, strict=True), "o-", ms=3, label=f"T = {_temperature(sampled)}")
        _finish(axis, "nodes below the root", title)
        axis.set_xscale("log", base=2)
    _save(figure, file)


def draw_served(rows: Rows, file: Path) -> None:
    """Mean latency against the rate, a curve a setting.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axis = figure.subplots()
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [(row["rate_requests_per_s"], row["mean_latency_s"]) for row in rows
               if row["setting"] == setting]  # fmt: skip
        axis.plot(*zip(*own, strict=True), "o-", ms=3, label=setting)
    _finish(axis, "requests per second", "mean latency, s")
    _save(figure, file)


def draw_speed(rows: Rows, file: Path) -> None:
    """The speed-up of each method with its best rule, a bar a temperature.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    own = [row for row in rows if row["group"] == ALL and row["name"] != "plain"]
    highest: dict[tuple[str, Sampled], float] = {}
    for row in own:
        at = row["name"].rpartition(", ")[0], row["sampled"]
        highest[at] = max(row["speedup"], highest.get(at, 0.0))
    names = list(dict.fromkeys(name for name, _ in highest))
    drawn = list(dict.fromkeys(sampled for _, sampled in highest))
    figure = Figure(figsize=(8.6, 1 + 0.34 * len(names)), layout="constrained")
    axis, height = figure.subplots(), 0.8 / max(1, len(drawn))
    for number, sampled in enumerate(drawn):
        places = [place + number * height for place in range(len(names))]
        values = [highest.get((name, sampled), 0.0) for name in names]
        axis.barh(places, values, height, label=f"T = {_temperature(sampled)}")
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axis.axvline(1.0, color="black", lw=0.8)
    axis.invert_yaxis()
    _finish(axis, "times plain decoding", "")
    _save(figure, file)


def _finish(axis: Any, below: str, beside: str) -> None:
    axis.set_xlabel(below)
    axis.set_ylabel(beside)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _save(figure: Any, file: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    write_bytes(file, drawn.getvalue())
