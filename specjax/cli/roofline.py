"""`specjax roofline`: rows as they come, on standard output and in a file."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.machine import read_bandwidth
from specjax.base.interrupts import if_interrupted
from specjax.base.progress import working
from specjax.checkpoints.huggingface import default_dtype
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.kernels import use_kernels
from specjax.cli.options import Roofline
from specjax.cli.report import Report, env_of, rows_kept
from specjax.cli.values import (
    at_least,
    budgets_of,
    check_target_file,
    count_of,
    dtype_of,
    items,
    temperatures_in,
)
from specjax.measure import prompts
from specjax.measure.roofline import SHAPES, Generations, costs, costs_of_pair, generations
from specjax.models.inflate import inflate
from specjax.models.transformer import initialize

Row = dict[str, Any]
"""A row as plain values, with the model that it is of."""

_ON_A_CPU = {"shapes": "", "inflate": "100M", "slots": 512}
PARTS = ("costs", "generations")
_ELSEWHERE = {"shapes": "llama-3.1-8b,llama-3.2-1b", "inflate": "1B,8B", "slots": 4096}


def line(row: Row) -> str:
    """A row as text."""
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("model", "what")
    )
    return f"{row.get('model', ''):26} {row['what']:24} {'  '.join(shown)}"


def roofline(options: Roofline) -> int:
    """Runs `specjax roofline`, which writes and prints row by row; gives the exit code.

    Raises:
      ValueError: an option is wrong, or no prompt fits.
      OSError: standard output cannot be written; the file is.
    """
    check_target_file("--json", options.json)
    rows: list[Row] = []
    unread: OSError | None = None
    use_kernels(options.kernels)
    report = Report(options.json, env_of("roofline", options))
    if_interrupted(lambda: rows_kept(options.json, bool(rows)))
    with working("read bandwidth") as now:
        for row in measured(options):
            rows.append(row)
            report.keep(lambda: rows)
            try:
                print(line(row), flush=True)
            except OSError as error:  # nobody reads, but the file is still wanted
                if not options.json:
                    raise
                unread = error
            now(f"{len(rows)} rows, after {row.get('model', 'all models')}: {row['what']}")
    written = report.finish(rows)
    if unread is not None:
        raise unread
    return 0 if written else 2


def measured(options: Roofline) -> Iterator[Row]:
    """All rows, one after the other.

    Raises:
      ValueError: an option is wrong, or no prompt fits.
    """
    begin, on_cpu = time.monotonic(), jax.default_backend() == "cpu"
    shapes = options.shapes if options.shapes is not None else _default(on_cpu, "shapes")
    sizes = options.inflate if options.inflate is not None else _default(on_cpu, "inflate")
    slots = int(_default(on_cpu, "slots")) if options.slots is None else options.slots
    nodes, parts = budgets_of(options.nodes, "--nodes"), _parts(options)
    at_least("--slots", options.slots, 1)
    dtype, bandwidth = dtype_of(options.dtype) or default_dtype(), read_bandwidth()
    yield {"what": "read bandwidth", "gb_per_second": bandwidth / 1e9}
    for name in filter(None, shapes.split(",")):
        if name not in SHAPES:
            raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}.")
        shape = partial(initialize, jax.random.key(0), SHAPES[name], jnp.dtype(dtype))
        if time.monotonic() - begin > options.seconds:
            yield {"model": name, "what": "owed"}
            continue
        for row in costs(shape(), nodes, slots, bandwidth):
            yield {"model": name, **row.report()}
    for size in filter(None, sizes.split(",")):
        name = f"bundled, grown to {size}"
        if time.monotonic() - begin > options.seconds:
            yield {"model": name, "what": "owed"}
            continue
        # Growing rounds nothing; on a CPU plain decoding is in both dtypes.
        pair = load_pair("bundled", None, dtype="float32" if on_cpu else dtype)
        pair = pair._replace(target=inflate(pair.target, count_of(size)))
        work = _generations(options, pair)
        if "costs" in parts:
            for row in costs_of_pair(pair, nodes, slots, bandwidth, dtype):
                yield {"model": name, **row.report()}
        if "generations" in parts:
            for row in generations(pair, work, dtype):
                yield {"model": name, **row.report()}


def _parts(options: Roofline) -> tuple[str, ...]:
    """What is measured of the grown pair.

    Raises:
      ValueError: something else is named.
    """
    named = items(options.parts, str, "--parts")
    for name in named:
        if name not in PARTS:
            raise ValueError(f"--parts has {name!r}; there are {' and '.join(PARTS)}.")
    return named


def _generations(options: Roofline, pair: Pair) -> Generations:
    """What is run end to end.

    Raises:
      ValueError: an option is wrong, or no prompt fits.
    """
    listed = prompts.read(options.prompts)[: options.limit]
    longest = pair.target.config.max_positions
    chosen, _ = prompts.fitting(listed, pair.tokenizer, longest, options.max_new_tokens)
    temperatures = temperatures_in(options.temperatures)
    return Generations(chosen, options.methods, temperatures, options.max_new_tokens)


def _default(on_cpu: bool, name: str) -> Any:
    return (_ON_A_CPU if on_cpu else _ELSEWHERE)[name]
