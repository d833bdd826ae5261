"""`specjax bench`: what is to be measured, the table, and the files."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from specjax.base.interrupts import if_interrupted
from specjax.base.output import tried
from specjax.base.progress import progress_bars
from specjax.checkpoints.pair import Pair
from specjax.cli.kernels import use_kernels
from specjax.cli.loading import pair_of
from specjax.cli.options import Bench
from specjax.cli.outcome import remember
from specjax.cli.report import Json, Report, env_of, rows_kept
from specjax.cli.tables import table
from specjax.cli.values import (
    at_least,
    check_seed,
    check_target_file,
    count_of,
    dtype_of,
    dtypes_of,
    items,
    temperatures_in,
)
from specjax.measure import plots, prompts, timing
from specjax.measure.bench import Bencher, RowsSoFar
from specjax.measure.prompts import Prompt
from specjax.measure.rows import BenchRow
from specjax.measure.workload import MIXED, PLAIN_DTYPES, Workload
from specjax.methods import registry, tuned
from specjax.methods.method import METHODS, PLAIN, Setting
from specjax.models.inflate import inflate
from specjax.parallel.mesh import DATA
from specjax.parallel.processes import devices_for, sizes_of
from specjax.verify.rules import AUTO, RULES, check_rule

_BATCHES = (1, 8)
_SECONDS = 10.0
"""Between two writes of a report that grows."""


def bench(options: Bench) -> int:
    """Runs `specjax bench`; gives the exit code.

    Raises:
      ValueError: an option or a prompt file is wrong, or no prompt fits.
    """
    workload_of(options)
    mesh = devices_for(options.mesh)
    use_kernels(options.kernels)
    listed = prompts.read(options.prompts)[: options.limit]
    parameters = count_of(options.inflate) if options.inflate else None
    pair = pair_of(options, dtype_of(options.dtype) if options.offloaded else "float32", mesh)
    workload = workload_of(options, pair)
    if parameters:
        pair = pair._replace(target=inflate(pair.target, parameters))
    chosen, left_out = prompts.fitting(
        listed,
        pair.tokenizer,
        pair.target.config.max_positions,
        options.max_new_tokens,
        options.chat,
    )
    workload = dataclasses.replace(workload, prompts=chosen)
    with progress_bars() as progress:
        bencher = Bencher(
            workload,
            pair,
            progress,
            phases=not (options.skip_phases or options.offloaded),
            traced=options.profile,
        )
        report = Report(options.json, _environment(options, bencher, left_out), _SECONDS)
        if_interrupted(lambda: rows_kept(options.json, report.written > 0))
        rows: list[BenchRow] = []

        def keep(so_far: RowsSoFar) -> None:
            report.keep(lambda: _plain([*rows, *so_far()]))

        for batch in workload.batches:
            rows.extend(bencher.rows(batch, keep))
    return _leave(options, bencher, report, rows)


def _plain(rows: Sequence[BenchRow]) -> list[Json]:
    return [row.report() for row in rows]


def _leave(options: Bench, bencher: Bencher, report: Report, rows: Sequence[BenchRow]) -> int:
    """Writes and remembers what was measured, then prints it: nobody may be there to read."""
    whole = report.whole(_plain(rows))
    written = [report.finish(whole["rows"])]
    # With another rule or other kernels other methods may be the fastest.
    if options.verify == options.kernels == AUTO:
        date = report.env["date"]
        remember(rows, bencher.pair, bencher.targets, date, MIXED)
    if file := options.png:
        work = partial(plots.draw, whole, file)
        written.append(tried(f"{file} cannot be written", work))
    table(whole)
    return 0 if all(written) else 2


def _environment(options: Bench, bencher: Bencher, left_out: list[str]) -> dict[str, Any]:
    """Where and on what the rows were measured."""
    target = next(iter(bencher.targets.values()))
    found = env_of("bench", options) | {
        "model": dataclasses.asdict(target.stored_config),
        "parameters": target.stored_config.num_parameters,
        "drafts": [dataclasses.asdict(draft.config) for draft in bencher.pair.drafts],
        "read_gb_per_second": bencher.bandwidth,
        "weight_bytes": {d: timing.weight_bytes(m) for d, m in bencher.targets.items()},
        "prompts_left_out": left_out,
    }
    if not target.is_whole:
        found |= {"layers_in_memory": len(target.layers), "bytes_a_pass": target.bytes_a_pass}
    if target.expert_cache is not None:
        found |= {"experts_in_memory": target.expert_cache.num_slots}
    return found


def workload_of(
    options: Bench, pair: Pair | None = None, chosen: Sequence[Prompt] = ()
) -> Workload:
    """The workload that the options name; "all" are all methods, or those that `pair` can do.

    Raises:
      ValueError: an option is wrong.
    """
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    at_least("--limit", options.limit, 1)
    check_seed(options.seed)
    plots.check(options.png)
    for name in ("json", "png"):
        check_target_file(f"--{name}", getattr(options, name))
    check_rule(options.verify)
    batches = _batches(options)
    temperatures = temperatures_in(options.temperatures)
    for name in ("inflate", "profile"):
        if options.mesh is not None and getattr(options, name):
            raise ValueError(f"--{name} is for one device; leave out --mesh or it.")
    if options.offloaded:
        dtype_of(options.dtype)  # one
        if options.inflate or options.profile:
            raise ValueError(
                "--inflate and --profile are for a model in memory; specjax inflate writes one "
                "that can be offloaded."
            )
    if options.verify != AUTO and RULES[options.verify].greedy_only and max(temperatures) > 0:
        raise ValueError(
            f"the {options.verify} rule needs --temperatures 0, not {options.temperatures}."
        )
    dtypes, plain = dtypes_of(options.dtype), PLAIN_DTYPES
    if pair is not None and not pair.target.is_whole:
        dtypes = plain = (str(pair.target.embedding.dtype),)
    names = [name for name in registry.names_of(options.methods, pair) if name != PLAIN]
    registry.check_sizes(names, {"--budgets": options.budgets})
    drafts = 1 if pair is None else len(pair.drafts)
    written = [] if options.config is None else tuned.read(options.config)
    fixed = [each.setting for each in written if each.setting.method != PLAIN]
    settings = {batch: (*fixed, *_settings(options, names, batch, drafts)) for batch in batches}
    return Workload(
        chosen, settings, temperatures, dtypes, options.max_new_tokens, options.verify,
        options.seed, plain_dtypes=plain, stop_at_eos=options.chat,
    )  # fmt: skip


def _batches(options: Bench) -> tuple[int, ...]:
    """Rows per batch; of the default ones those that a mesh divides.

    Raises:
      ValueError: one that is named is no number, or the mesh does not divide it.
    """
    rows = sizes_of(options.mesh).get(DATA, 1)
    if options.batch is None:
        return tuple(batch for batch in _BATCHES if batch % rows == 0) or (rows,)
    found = items(options.batch, int, "--batch")
    for batch in found:
        at_least("--batch", batch, 1)
        if batch % rows:
            raise ValueError(f"--mesh has data={rows}, which does not divide --batch {batch}.")
    return found


def _settings(options: Bench, names: Sequence[str], batch: int, drafts: int) -> list[Setting]:
    """The settings to compare with plain decoding: those with a size, others with every budget.

    Raises:
      ValueError: a method does not take what is named for it.
    """
    budgets = (None,) if options.budgets is None else items(options.budgets, int, "--budgets")
    return [
        registry.setting_of(name, budget=budget, batch=batch, drafts=drafts)
        for name in names
        for budget in (budgets if name in METHODS else (None,))
    ]
