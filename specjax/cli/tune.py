"""`specjax tune`: what is chosen among, what came of it, and the file."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pallas_kernels
from specjax.base.interrupts import ANEW, if_interrupted
from specjax.base.output import tried
from specjax.base.progress import progress_bars
from specjax.checkpoints.huggingface import default_dtype
from specjax.checkpoints.pair import Pair, own_drafts, with_own_draft
from specjax.cli.kernels import use_kernels
from specjax.cli.loading import pair_of
from specjax.cli.options import Tune
from specjax.cli.outcome import remember
from specjax.cli.report import env_of
from specjax.cli.values import (
    at_least,
    budgets_of,
    check_seed,
    check_target_file,
    count_of,
    dtype_of,
    temperatures_in,
)
from specjax.measure import prompts
from specjax.measure.prompts import Prompt
from specjax.measure.rows import BenchRow
from specjax.measure.tune import Choices, Estimate, Tuner, fastest_of
from specjax.measure.tune_streamed import StreamedTuner, budgets_for_reading
from specjax.measure.workload import MIXED
from specjax.methods import registry, tuned
from specjax.methods.method import METHODS, PLAIN
from specjax.methods.setting import to_json
from specjax.methods.tuned import Entry, Unfinished
from specjax.models.inflate import inflate
from specjax.models.quantized import in_dtype
from specjax.models.transformer import Model

_CHAIN = "chain"
_FEW = (1, 3, 7, 15, 31)
"""Budgets for a model without a draft: more nodes are seldom worth what they take."""


def tune(options: Tune) -> int:
    """Runs `specjax tune`; gives the exit code.

    Raises:
      ValueError: an option or a prompt file is wrong, or no prompt fits.
    """
    temperatures, choices = _check(options)
    use_kernels(options.kernels)
    pallas_kernels.forget()
    listed = prompts.read(options.prompts)[: options.limit]
    parameters = count_of(options.inflate) if options.inflate else None
    native = pair_of(options, dtype_of(options.dtype) if options.offloaded else "float32")
    grown = inflate(native.target, parameters) if parameters else native.target
    dtype = dtype_of(options.dtype) or default_dtype()
    if options.offloaded:
        dtype = str(grown.embedding.dtype)
    chosen, _ = prompts.fitting(
        listed,
        native.tokenizer,
        native.target.config.max_positions,
        options.max_new_tokens,
        options.chat,
    )
    as_it_runs = grown if options.offloaded else in_dtype(grown, dtype)
    pairs = native, native._replace(target=as_it_runs)
    if not grown.is_whole and options.budgets is None:
        choices = dataclasses.replace(choices, budgets=budgets_for_reading(grown))
    elif options.budgets is None and not native.drafts:
        choices = dataclasses.replace(choices, budgets=_FEW)
    estimates: list[Sequence[Estimate]] = []
    checked: list[tuple[Entry, list[BenchRow]]] = []
    unfinished = Unfinished(options.out)

    def keep(found: Sequence[Estimate] = ()) -> None:
        so_far = [*estimates, found] if found else estimates
        entries = [entry for entry, _ in checked]
        unfinished.keep(entries, _environment(options, grown, so_far))

    if_interrupted(
        lambda: f"what was found so far is in {unfinished.beside}; the same command begins anew"
        if unfinished.beside.exists() else ANEW
    )  # fmt: skip
    with progress_bars() as progress:
        tuners = _tuners(options, choices, pairs, chosen, progress)
        for temperature in temperatures:
            estimates.append(_estimated(tuners, temperature, keep))
        final, rounds = native._replace(target=grown), tuners[0].rounds
        for temperature, best in zip(temperatures, estimates, strict=True):
            checked.append(
                fastest_of(choices, final, dtype, chosen, temperature, best, progress, rounds)
            )
            keep()
    entries = [entry for entry, _ in checked]
    env = _environment(options, grown, estimates)
    written = tried(
        f"{options.out} cannot be written", lambda: tuned.write(options.out, entries, env)
    )
    if written:
        unfinished.remove()
    if not native.drafts:  # what auto takes where nothing drafts is compared with plain decoding
        rows = [row for _, alike in checked for row in alike]
        remember(rows, final, {dtype: as_it_runs}, env["date"], MIXED)
    for (entry, rows), best in zip(checked, estimates, strict=True):
        _say(entry, best, rows)
    return 0 if written else 2


def _tuners(
    options: Tune,
    choices: Choices,
    pairs: tuple[Pair, Pair],
    chosen: Sequence[Prompt],
    progress: Progress,
) -> list[Tuner]:
    """One for the pair, and one for each draft of the model itself that is tried."""
    kind = Tuner if pairs[1].target.is_whole else StreamedTuner
    by_length = sorted(chosen, key=lambda prompt: len(prompt.tokens))
    found: list[Tuner] = []
    for own, methods in _drafts(options, pairs[0]):
        native, grown = pairs if own is None else (with_own_draft(each, own) for each in pairs)
        asked = dataclasses.replace(choices, methods=methods)
        found.append(kind(asked, native, grown, by_length, progress, own=own))
    return found


def _estimated(
    tuners: Sequence[Tuner], temperature: float, keep: Callable[[Sequence[Estimate]], None]
) -> list[Estimate]:
    """The estimates of all tuners, the best first; `keep` gets the growing list."""
    found: list[Estimate] = []
    for tuner in tuners:
        before = tuple(found)
        found += tuner.estimates(temperature, partial(_with, keep, before))
    return sorted(found, key=lambda estimate: -estimate.rate)


def _with(
    keep: Callable[[Sequence[Estimate]], None],
    before: Sequence[Estimate],
    more: Sequence[Estimate],
) -> None:
    keep([*before, *more])


def _drafts(options: Tune, pair: Pair) -> list[tuple[str | None, str]]:
    """What drafts, and the methods that are tried with it.

    Chains of the model itself in fewer bits are among them where nothing else drafts.
    """
    names = registry.names_of(options.methods, pair)
    asked = _CHAIN in registry.names_of(options.methods, None) and not options.inflate
    own = own_drafts(pair) if asked else []
    others = [name for name in names if name != _CHAIN] if own else names
    found: list[tuple[str | None, str]] = [(None, ",".join(others))] if others else []
    return [*found, *((name, _CHAIN) for name in own)]


def _check(options: Tune) -> tuple[tuple[float, ...], Choices]:
    """The temperatures and what is chosen among, once all options are checked."""
    for name in ("limit", "max_new_tokens", "batch"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    check_seed(options.seed)
    check_target_file("FILE", options.out)
    for name in registry.names_of(options.methods, None):
        if name not in METHODS:
            raise ValueError(f"--methods has {name}; tune chooses the size itself, leave it out.")
    budgets = Choices.budgets if options.budgets is None else budgets_of(options.budgets)
    dtype_of(options.dtype)
    if options.offloaded and options.inflate:
        raise ValueError(
            "--inflate is for a model in memory; specjax inflate writes one that can be offloaded."
        )
    choices = Choices(
        options.methods, budgets, options.batch, options.max_new_tokens, options.seed, options.chat
    )
    return temperatures_in(options.temperatures), choices


def _environment(
    options: Tune, target: Model, estimates: Sequence[Sequence[Estimate]]
) -> dict[str, Any]:
    """Where settings were measured, and the estimate of each."""
    return env_of("tune", options) | {
        "parameters": target.config.num_parameters,
        "promises": [
            [{"setting": to_json(p.setting), "tokens_per_step": p.tokens, "seconds": p.seconds,
              "bound": p.bound} for p in each]
            for each in estimates
        ],
    }  # fmt: skip


def _say(entry: Entry, estimates: Sequence[Estimate], rows: Sequence[BenchRow]) -> None:
    """The estimates, the measurements, and what was written."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    lines = Table("setting", "tokens/step", "ms/step", "tokens/s expected", "measured", "speed-up")
    measured = {row.setting: row for row in rows if row.setting.method != PLAIN}
    for estimate in estimates:
        row = measured.get(estimate.setting)
        expected = estimate.rate * entry.batch
        lines.add_row(
            estimate.setting.label,
            f"{estimate.tokens:.2f}",
            f"{'≥ ' * estimate.bound}{estimate.seconds * 1e3:.2f}",
            f"{'≤ ' * estimate.bound}{expected:.1f}",
            "" if row is None else f"{row.tokens_per_second:.1f}",
            "" if row is None else f"{row.speedup:.2f}",
        )
    console.print(f"temperature {entry.temperature:g}, batch {entry.batch}")
    console.print(lines)
    console.print(_verdict(entry))


def _verdict(entry: Entry) -> str:
    """The setting taken, and how far off the expectation was."""
    rate = entry.measured["tokens_per_second"]
    if not entry.expected:
        return f"taken: plain decoding, {rate:.1f} tokens/s; nothing was faster."
    off = rate / entry.expected["tokens_per_second"] - 1
    steps = entry.measured["tokens_per_step"]
    return (
        f"taken: {entry.setting.label}, {rate:.1f} tokens/s, {entry.measured['speedup']:.2f} times "
        f"plain decoding ({off:+.0%} against the expected rate; {steps:.2f} tokens per step, "
        f"expected {entry.expected['tokens_per_step']:.2f})."
    )
