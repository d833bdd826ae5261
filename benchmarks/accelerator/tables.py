"""The tables of docs/benchmarks.md, from what `benchmarks.accelerator` measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accelerator.pieces import PIECES
from benchmarks.accelerator.running import DONE, OWED, line_of

Row = dict[str, Any]
State = Mapping[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: int = 1) -> str:
    """A table whose first columns are text and whose others are numbers."""
    rule = ["---"] * text_columns + ["--:"] * (len(header) - text_columns)
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def tables(state: State) -> str:
    """All tables, each with the command that measured it, and what is missing."""
    found = [_where(state), f"{_goals(state)}"]
    for title, names, made in _SECTIONS:
        rows = made(state["results"])
        if rows is not None:
            commands = [state["pieces"][n]["command"] for n in names if n in state["pieces"]
                        and "command" in state["pieces"][n]]  # fmt: skip
            listed = "\n".join(dict.fromkeys(commands))
            found.append(f"{title}\n\n```sh\n{listed}\n```\n\n{rows}")
    found.append(_missing(state))
    return "\n\n".join(filter(None, found))


def _where(state: State) -> str:
    """Where and when."""
    machine = state["machine"]
    if machine is None:
        return "Nothing is measured."
    dates = sorted({call["date"][:10] for call in state["calls"]})
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    small = " **Small sizes, which only show that it works.**" if any(
        call.get("small") for call in state["calls"]
    ) else ""  # fmt: skip
    return (
        f"{machine['device']}{driver}, Python {machine['python']}, jax {machine['jax']}, jaxlib "
        f"{machine['jaxlib']}, {machine['cpu_count']} cores of an {machine['cpu']}, "
        f"{', '.join(dates)}.{small}"
    )


def _missing(state: State) -> str:
    """What is not measured, and why."""
    records = {piece.name: state["pieces"].get(piece.name, {"status": OWED}) for piece in PIECES}
    rows = [(name, line_of(each)) for name, each in records.items() if each["status"] != DONE]
    return f"Not measured:\n\n{markdown(('piece', 'why'), rows, 2)}" if rows else ""


# Tree attention


def _attention_rows(results: State) -> list[Row]:
    return [row for row in results.get("attention", {}).get("rows", []) if "seconds" in row]


def _shape(row: Row) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["nodes"], row["slots"]


def attention(results: State, key: str = "attention") -> str | None:
    """Microseconds of every implementation at every shape, and of the fastest the ratio."""
    if key not in results:
        return None
    rows = results[key]["rows"]
    names = sorted({row["implementation"] for row in rows} - {"xla", "cudnn"})
    names = [n for n in ("xla", "cudnn") if any(n == r["implementation"] for r in rows)] + names
    lines = []
    for shape in dict.fromkeys(map(_shape, rows)):
        own = {row["implementation"]: row for row in rows if _shape(row) == shape}
        timed = [
            row for row in own.values() if "seconds" in row and row["implementation"] != "cudnn"
        ]
        cells = [_microseconds(own.get(name)) for name in names]
        best = min(timed, key=lambda row: row["seconds"]) if timed else {}
        lines.append(
            (
                *shape,
                *cells,
                best.get("implementation", ""),
                _number(best.get("best_peer_over_it")),
                _share(best.get("of_peak")),
            )
        )
    header = ("model", "rows", "nodes", "slots", *(f"{name}, µs" for name in names), "fastest",
              "over the best of XLA and cuDNN", "of the bandwidth")  # fmt: skip
    peak = results[key]["env"]["read_gb_per_second"]
    return f"{markdown(header, lines)}\n\nThe same run read {peak:,.0f} GB/s."


def _microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['seconds'] * 1e6:.1f}" if "seconds" in row else f"({row['error'][:40]})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def kernels(results: State) -> str | None:
    """How many cases of each implementation are right, and the largest error."""
    lines = []
    for key, held in results.items():
        if not key.startswith("kernels-"):
            continue
        rows = held["rows"]
        tried = [row for row in rows if "refused" not in row]
        wrong = [f"{row['case']} ({row.get('error') or 'wrong'})"[:80] for row in tried
                 if not row["passed"]]  # fmt: skip
        off = [row["error_over_tolerance"] or 0 for row in tried if row["passed"]]
        right = f"{len(tried) - len(wrong)} of {len(tried)}"
        refused = len(rows) - len(tried)
        lines.append(
            (
                key.removeprefix("kernels-"),
                right,
                refused,
                _number(max(off, default=None)),
                "; ".join(wrong[:3]) + ("; ..." if len(wrong) > 3 else ""),
            )
        )
    header = ("implementation", "right", "refused, with the reason", "largest error over tolerance",
              "wrong")  # fmt: skip
    return markdown(header, lines) if lines else None


# Costs and texts


def _roofline_rows(results: State, prefix: str) -> Iterator[Row]:
    for key, held in results.items():
        if key.startswith(prefix):
            yield from (row for row in held["rows"] if "model" in row)


def passes(results: State) -> str | None:
    """Milliseconds of passes and plain steps."""
    lines = []
    rows = list(_roofline_rows(results, "passes-"))
    for model in dict.fromkeys(row["model"] for row in rows):
        for row in rows:
            if row["model"] == model and "over_floor" in row:
                what = f"pass over {row['nodes']}" if row["what"] == "pass" else row["what"]
                lines.append(
                    (
                        model,
                        what,
                        row["slots"],
                        f"{row['seconds'] * 1e3:.3f}",
                        _number(row.get("over_the_first")),
                        _number(row["over_floor"]),
                    )
                )
    header = ("model", "", "slots", "ms", "over the first", "over its floor")
    return markdown(header, lines, 2) if lines else None


def texts(results: State) -> str | None:
    """Tokens a second of every method, and of transformers."""
    lines = [
        (row["model"], f"{row.get('temperature', '')}",
         f"{row['what']}{', ' + row['dtype'] if 'dtype' in row else ''}",
         _number(row.get("tokens_per_step")),
         f"{row['tokens_per_second']:.1f}" if "tokens_per_second" in row else row["error"][:60],
         _number(row.get("speedup")))
        for row in _roofline_rows(results, "pair-")
    ]  # fmt: skip
    header = ("model", "T", "method", "tokens per step", "tokens/s", "over its plain decoding")
    return markdown(header, lines, 3) if lines else None


def limits(results: State) -> str | None:
    """Milliseconds of distributions and steps under limits, beside a sort."""
    rows = results.get("limits", {}).get("rows", [])
    names = list(dict.fromkeys(name for row in rows for name in row["milliseconds"]))
    lines = [
        (row["what"], *(_milliseconds(row["milliseconds"].get(name)) for name in names))
        for row in rows
    ]
    return markdown(("rows x nodes x tokens, ms", *names), lines) if rows else None


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def packed(results: State) -> str | None:
    """Microseconds of a product with weights in 16, 8 and 4 bits, and over reading them."""
    rows = results.get("packed", {}).get("rows", [])
    columns = list(dict.fromkeys(row["columns"] for row in rows))
    found = {(row["outputs"], row["inputs"], row["form"], row["columns"]): row for row in rows}
    lines = []
    for outputs, inputs, form in dict.fromkeys(key[:3] for key in found):
        each = [found.get((outputs, inputs, form, many), {}) for many in columns]
        lines.append((f"{outputs:,} x {inputs:,}", form, *(
            f"{row['microseconds']:.1f} ({row['over_floor']:.2f})" if row else "" for row in each
        )))  # fmt: skip
    header = "matrix", "weights", *(f"{many} columns, us (over floor)" for many in columns)
    return markdown(header, lines, 2) if rows else None


def shares(results: State) -> str | None:
    """Where a step's time goes: by phases compiled apart, and by a trace."""
    lines = []
    for row in results.get("shares", {}).get("rows", []):
        spent = [row.get(f"{name}_seconds") for name in ("draft", "target", "other")]
        whole = sum(value or 0 for value in spent)
        phases = [_share(value / whole) if value is not None and whole else "" for value in spent]
        parts = row.get("profile", {})
        traced = sum(parts.values())
        told = ", ".join(f"{n} {v / traced:.0%}" for n, v in parts.items() if traced and v)
        lines.append((row["label"], row["dtype"], row["temperature"], *phases, told))
    header = ("method", "dtype", "T", "drafting", "target", "the rest", "by a trace")
    return markdown(header, lines, 3) if lines else None


def offload(results: State) -> str | None:
    """Steps of a target in the host's memory."""
    held = results.get("offload")
    if held is None:
        return None
    lines = [
        (name, f"{row['step_seconds'] * 1e3:.1f}", f"{row['drafting_seconds'] * 1e3:.1f}",
         _number(row["tokens_per_step"]), f"{row['tokens_per_second']:.1f}",
         _number(row["over_plain"]))
        for name, row in held["rows"].items()
    ]  # fmt: skip
    header = ("", "step, ms", "drafting, ms", "tokens per step", "tokens/s", "over plain")
    rate = held["bytes_a_pass"] / held["read_seconds"] / 1e9
    timed = "; ".join(
        f"{n} {seconds * 1e3:.1f} ms" for n, seconds in held.get("passes", {}).items()
    )
    return (
        f"{markdown(header, lines)}\n\n{held['parameters'] / 1e9:.2f} billion parameters, moved "
        f"at {rate:.1f} GB/s. A pass: {timed or 'not measured'}."
    )


def verify(results: State) -> str | None:
    """What came of certificates."""
    lines = []
    for key, held in results.items():
        if not key.startswith("verify-"):
            continue
        drawn = held["sampled"]["law"]
        lowest = min(test["p_value"] for test in drawn["tests"])
        sections = held["greedy"], held["sampled"]["naive"]
        lines.append(
            (
                key.removeprefix("verify-"),
                "passed" if held["passed"] else "**FAILED**",
                *(f"{each['divergences']} in {each['tokens']}" for each in sections),
                f"{lowest:.2g} of {len(drawn['tests'])} (level {drawn['level']:.1g})",
            )
        )
    header = ("kernels", "", "divergences at T = 0", "under the naive rule", "lowest p-value")
    return markdown(header, lines, 2) if lines else None


def compiling(results: State) -> str | None:
    """Seconds that programs take to be compiled."""
    lines = [
        (name.removeprefix("here "), f"{row['trace_seconds']:.1f}", f"{row['lower_seconds']:.1f}",
         f"{row['compile_seconds']:.1f}", f"{row['temporary_bytes'] / 2**20:.0f}")
        for name, row in results.get("compile", {}).items()
    ]  # fmt: skip
    header = ("program", "traced, s", "lowered, s", "compiled, s", "temporaries, MiB")
    return markdown(header, lines) if lines else None


Table = Callable[[State], str | None]
_SECTIONS: tuple[tuple[str, tuple[str, ...], Table], ...] = (
    ("Kernels against the definition:", ("kernels-xla", "kernels-hopper", "kernels-triton",
     "kernels-tpu"), kernels),
    ("Tree attention:", ("attention-4096", "attention-32768", "attention-8-rows",
     "attention-rest"), attention),
    ("Tree attention over caches of 8 bits:", ("attention-8-bits",),
     lambda results: attention(results, "attention of 8 bits")),
    ("Passes and plain steps:", ("passes-8b", "passes-1b"), passes),
    ("The bundled pair, its target grown:", ("pair-1b-greedy", "pair-8b-greedy",
     "pair-1b-sampled", "pair-8b-sampled"), texts),
    ("Products with packed weights:", ("packed",), packed),
    ("Distributions and steps under limits:", ("limits",), limits),
    ("Shares of a step:", ("shares",), shares),
    ("Layers in the host's memory:", ("offload",), offload),
    ("Certificates:", ("verify-triton", "verify-xla"), verify),
    ("Programs compiled from nothing:", ("compile",), compiling),
)  # fmt: skip


# Goals


def _goals(state: State) -> str:
    """Goals beside what was measured."""
    results = state["results"]
    lines = []
    for what, goal, measured, reached in goals(results):
        shown = "" if measured is None else f"{measured:.3g}"
        lines.append((what, goal, shown, "" if measured is None else "yes" if reached else "no"))
    return f"Goals:\n\n{markdown(('what', 'goal', 'measured', 'reached'), lines, 2)}"


def goals(results: State) -> list[tuple[str, str, float | None, bool]]:
    """What was to be reached, the worst that was measured of it, and whether that is enough."""
    best = _best_of_shapes(results)
    ratios = [row["best_peer_over_it"] for row in best if "best_peer_over_it" in row]
    large = [row["best_peer_over_it"] for row in best if "best_peer_over_it" in row
             and row["nodes"] >= 16 and row["slots"] >= 4096]  # fmt: skip
    peaks = [row["of_peak"] for row in best if row["batch"] >= 8 and row["slots"] >= 4096]
    costs = list(_roofline_rows(results, "passes-"))
    over = [row["over_the_first"] for row in costs
            if row.get("nodes") == 64 and row["model"] == "llama-3.1-8b"]  # fmt: skip
    floors = [row["over_floor"] for row in costs if row["what"] == "plain step"]
    sorts = [
        row["milliseconds"]["sort"] / max(row["milliseconds"][n] for n in ("top-k 40", "top-p 0.9"))
        for row in results.get("limits", {}).get("rows", [])
        if row["what"] == "1 x 17 x 128256"
    ]
    plain, peers = _over_others(results)
    return [
        (
            "tree attention, every shape, over the best of XLA and cuDNN",
            "0.95",
            *_least(ratios, 0.95),
        ),
        ("the same from 16 nodes and 4,096 slots on", "1.5", *_least(large, 1.5)),
        ("share of the bandwidth, 8 rows or more, 4,096 slots or more", "0.8", *_least(peaks, 0.8)),
        ("a pass over 64 nodes over one of 1, Llama-3.1-8B", "at most 1.1", *_most(over, 1.1)),
        ("a plain step over its floor", "at most 1.18", *_most(floors, 1.18)),
        ("the bundled pair over its plain decoding", "1", *_least(plain, 1.0)),
        ("the same over transformers' assisted generation", "1", *_least(peers, 1.0)),
        ("a sort over limits, 17 nodes of 128,256 tokens", "1", *_least(sorts, 1.0)),
    ]


def _best_of_shapes(results: State) -> list[Row]:
    """The row of the fastest of ours at each shape."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in _attention_rows(results):
        kept = best.get(_shape(row))
        if row["implementation"] != "cudnn" and (kept is None or row["seconds"] < kept["seconds"]):
            best[_shape(row)] = row
    return list(best.values())


def _over_others(results: State) -> tuple[list[float], list[float]]:
    """Of every model and temperature the best method over plain decoding, and over assisted."""
    plain, peers = [], []
    rows = [row for row in _roofline_rows(results, "pair-") if "tokens_per_second" in row]
    for place in dict.fromkeys((row["model"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["model"], row["temperature"]) == place]
        theirs = [row["tokens_per_second"] for row in own if "assisted" in row["what"]]
        ours = [row for row in own if row["what"] != "none" and "transformers" not in row["what"]]
        if ours:
            plain.append(max(row["speedup"] for row in ours))
            peers += [max(row["tokens_per_second"] for row in ours) / each for each in theirs]
    return plain, peers


def _least(values: Sequence[float], goal: float) -> tuple[float | None, bool]:
    return (min(values), min(values) >= goal) if values else (None, False)


def _most(values: Sequence[float], goal: float) -> tuple[float | None, bool]:
    return (max(values), max(values) <= goal) if values else (None, False)
