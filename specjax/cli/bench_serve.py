"""`specjax bench-serve`: a server under load, with each setting and with its own choice of them."""

import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.base.interrupts import if_interrupted
from specjax.base.output import tried
from specjax.base.progress import counted, working
from specjax.checkpoints.huggingface import default_dtype, read_config, save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import named
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.cli.kernels import check_kernels
from specjax.cli.load_report import LoadSheet, table
from specjax.cli.options import BenchServe
from specjax.cli.report import Report, env_of, rows_kept
from specjax.cli.values import (
    at_least,
    check_seed,
    check_target_file,
    count_of,
    dtype_of,
    items,
    temperatures_in,
)
from specjax.measure import load, plots, prompts
from specjax.measure.arrivals import check_shape
from specjax.measure.load import Asked, Mix
from specjax.measure.load_rows import AUTO, LoadRun
from specjax.measure.served import Server, serving
from specjax.measure.workload import MIXED
from specjax.methods import switch
from specjax.methods.method import PLAIN, listed
from specjax.methods.registry import ALL
from specjax.models.inflate import inflate
from specjax.models.quantized import check_activations

_MIXED = (0.0, 0.8)
_LEAST_PER_ROW, _LEAST_SECONDS = 4, 10.0
"""Requests of a row, and seconds, by which the capacity is measured at least."""
_TARGET = "target"
_MOST_TPOT_MS = 1e9


class Prepared(NamedTuple):
    """What requests ask for, and where and on what they are measured."""

    prompts: list[list[int]]
    then: list[list[int]]
    env: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is measured; `mix` is what requests are drawn from."""

    rates: Sequence[float]
    settings: Sequence[str]
    temperatures: Sequence[float]
    options: BenchServe

    def mix(self, prepared: Prepared) -> Mix:
        """What the requests are drawn from."""
        options = self.options
        return Mix(
            prepared.prompts, prepared.then, options.max_new_tokens, self.temperatures,
            options.max_tpot_ms,
        )  # fmt: skip

    def plan(self, mix: Mix, turn: int) -> list[Asked]:
        """The requests of a turn, which are those of every setting and, at its pace, every rate."""
        options = self.options
        drawn = np.random.default_rng([options.seed, turn])
        return load.plan(mix, options.shape, options.requests, drawn)

    def order(self) -> Iterator[tuple[int, float, str]]:
        """Turns, rates and settings; the first setting of a turn and rate is another each time."""
        for turn in range(self.options.turns):
            for place, rate in enumerate(self.rates):
                first = (turn + place) % len(self.settings)
                for setting in (*self.settings[first:], *self.settings[:first]):
                    yield turn, rate, setting


def bench_serve(options: BenchServe) -> int:
    """Runs `specjax bench-serve`; gives the exit code.

    Raises:
      ValueError: an option or a prompt file is wrong, no prompt fits, or the server refuses.
    """
    measurement = measurement_of(options)
    _check_packages()
    with _leaving(), tempfile.TemporaryDirectory(prefix="specjax-") as name:
        prepared = _apart(options, Path(name) / _TARGET)
        mix = measurement.mix(prepared)
        start = time.perf_counter()
        with _started(flags_of(measurement, Path(name) / _TARGET), Path(name) / "log") as server:
            _say(f"the server is ready after {time.perf_counter() - start:.0f} s.")
            sheet = _measured(server, measurement, mix, prepared.env)
    return _leave(options, sheet)


def _leave(options: BenchServe, sheet: LoadSheet) -> int:
    """Writes what was measured, then prints it: nobody may be there to read."""
    whole = sheet.report.whole(sheet.rows())
    written = [sheet.report.finish(whole["rows"])]
    if file := options.png:
        work = partial(plots.draw_load, whole, file)
        written.append(tried(f"{file} cannot be written", work))
    table(whole)
    return 0 if all(written) else 2


def measurement_of(options: BenchServe) -> Measurement:
    """What the options name.

    Raises:
      ValueError: an option is wrong.
    """
    for name in ("requests", "turns", "rows", "max_new_tokens", "limit"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    check_seed(options.seed)
    if options.max_tpot_ms is not None and not 0 < options.max_tpot_ms <= _MOST_TPOT_MS:
        raise ValueError(
            f"--max-tpot-ms is {options.max_tpot_ms:g}; it must be above 0, at most "
            f"{_MOST_TPOT_MS:g}."
        )
    plots.check(options.png)
    for name in ("json", "png"):
        check_target_file(f"--{name}", getattr(options, name))
    check_shape(options.shape)
    check_kernels(options.kernels)
    dtype_of(options.dtype)
    check_activations(options.activations)
    if options.inflate is not None:
        count_of(options.inflate)
    for file in _files(options):
        prompts.read(file)
    return Measurement(
        rates_of(options.rates), settings_of(options.settings),
        temperatures_of(options.temperature), options,
    )  # fmt: skip


def _files(options: BenchServe) -> list[str | None]:
    """The files of prompts; None is the bundled one."""
    return [options.prompts] if options.then is None else [options.prompts, options.then]


def rates_of(text: str) -> tuple[float, ...]:
    """The rates that `--rates` names, as shares of capacity.

    Raises:
      ValueError: one is no number above 0.
    """
    found = items(text, float, "--rates")
    for rate in found:
        if not 0 < rate < math.inf:
            raise ValueError(f"--rates has {rate:g}; a rate must be a number above 0.")
    return tuple(dict.fromkeys(found))


def settings_of(text: str) -> tuple[str, ...]:
    """The settings that `--settings` names, as they spell themselves.

    Raises:
      ValueError: there is no such setting.
    """
    every = (name if name == AUTO else switch.read(name).name for name in listed(text))
    return tuple(dict.fromkeys(every))


def temperatures_of(text: str) -> tuple[float, ...]:
    """The temperatures that requests have at random: one, or for "mixed" 0 and 0.8.

    Raises:
      ValueError: it is neither.
    """
    if text == MIXED:
        return _MIXED
    try:
        (found,) = temperatures_in(text)
    except ValueError as error:
        raise ValueError(
            f"--temperature is {text!r}; it must be {MIXED} or a number of at least 0."
        ) from error
    return (found,)


def _check_packages() -> None:
    """Checks that a server can start, and lets this process open a connection for each request.

    Raises:
      ValueError: a package is missing.
    """
    try:
        from specjax.server.process import raise_file_limit
    except ModuleNotFoundError as error:
        raise ValueError(
            f"bench-serve needs {error.name}, which is not installed: pip install 'specjax[serve]'."
        ) from error
    raise_file_limit()


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Lets SIGTERM end this process as Ctrl-C does: with its server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _apart(options: BenchServe, folder: Path) -> Prepared:
    """What `prepare` gives, in a process that then ends: jax would keep a GPU's memory.

    Raises:
      ValueError: an option is wrong, or the process was ended.
    """
    context = multiprocessing.get_context("spawn")
    ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # this process ends it
    with ProcessPoolExecutor(1, context, *ignore) as executor:
        try:
            with working("reading the model and the prompts"):
                return executor.submit(prepare, options, folder).result()
        except BrokenProcessPool as error:
            raise ValueError("the process that reads the model was ended.") from error


def prepare(options: BenchServe, folder: Path) -> Prepared:
    """Reads prompts, and writes the target to a folder if it is to be inflated.

    Raises:
      ValueError: the model has more weights than it is to be inflated to, or no prompt fits.
    """
    files = named(options.model, options.draft, options.stage, options.lora).target
    config, _ = read_config(files.path)
    tokenizer = tokenizer_of(files.path, config.vocab_size)
    if options.inflate:
        model = inflate(load_model(files, dtype="float32"), count_of(options.inflate))
        dtype = dtype_of(options.dtype) or default_dtype()
        save_model(model, folder, tokenizer=tokenizer, dtype=dtype)
        config = model.config
    found, left_out = [], []
    for file in _files(options):
        listed = prompts.read(file)[: options.limit]
        most = load.most_tokens(options.max_new_tokens)
        chosen, others = prompts.fitting(
            listed, tokenizer, config.max_positions, most, options.chat
        )
        found.append([list(prompt.tokens) for prompt in chosen])
        left_out += others
    env = env_of("bench-serve", options) | {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "prompts_left_out": left_out,
    }
    first, *then = found
    return Prepared(first, then[0] if then else [], env)


def flags_of(measurement: Measurement, folder: Path) -> list[str]:
    """The server's flags; drafts are those that the model would have had as it is."""
    options = measurement.options
    flags = ["--debug", "--served-model-name", load.MODEL, "--rows", str(options.rows)]
    flags += ["--model", str(folder) if options.inflate else options.model]
    flags += ["--max-waiting", str(max(1024, options.requests))]
    flags += ["--max-waiting-tokens", str(1 << 30)]
    draft, stage = options.draft, options.stage
    if options.inflate and options.model == "bundled" and draft in (None, "bundled"):
        draft, stage = "bundled", stage or "bundled/ngram,bundled/stage2"
    flags += ["--kernels", options.kernels]
    lora = None if options.inflate else options.lora  # what is written then is merged
    named_ones = {"dtype": options.dtype, "draft": draft, "stage": stage, "lora": lora}
    named_ones["activations"] = options.activations
    for name, value in named_ones.items():
        if value is not None:
            flags += [f"--{name}", value]
    fixed = [name for name in measurement.settings if name != AUTO]
    known = set(fixed) <= set(switch.SETTINGS)
    return [*flags, "--settings", ALL if known else ",".join(fixed)]


@contextlib.contextmanager
def _started(flags: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that is ready."""
    with contextlib.ExitStack() as stack:
        with working("starting the server"):
            server = stack.enter_context(serving(flags, log))
        yield server


def _measured(server: Server, measurement: Measurement, mix: Mix, env: dict[str, Any]) -> LoadSheet:
    """Every setting at every rate, in turns."""
    options = measurement.options
    with working("running every setting once"):
        warm_up(server, measurement, mix)
    with working("measuring the capacity without drafting"):
        requests, tokens = capacity_of(server, measurement, mix)
    _say(f"plain decoding completes {requests:.3g} requests/s, {tokens:.1f} tokens/s.")
    own = {"capacity_requests_per_s": requests, "capacity_tokens_per_s": tokens}
    runs = {rate: {name: [] for name in measurement.settings} for rate in measurement.rates}
    sheet = LoadSheet(Report(options.json, env | own), requests, runs)
    if_interrupted(
        lambda: rows_kept(options.json, any(any(each.values()) for each in runs.values()))
    )
    cells = list(measurement.order())
    with counted("load") as done:
        for number, (turn, rate, setting) in enumerate(cells):
            done(number, len(cells))
            plan = load.at_rate(measurement.plan(mix, turn), rate * requests)
            sheet.add(rate, setting, run(server, setting, plan))
    return sheet


def warm_up(server: Server, measurement: Measurement, mix: Mix) -> None:
    """Lets every setting run once, which also shows that the server has it."""
    rows = measurement.options.rows
    plan = measurement.plan(mix, measurement.options.turns)
    for setting in dict.fromkeys((PLAIN, *measurement.settings)):
        server.fix(setting)
        asyncio.run(load.closed_loop(server.port, plan, rows, rows))
        server.wait_until_idle()


def capacity_of(server: Server, measurement: Measurement, mix: Mix) -> tuple[float, float]:
    """Requests and tokens a second without drafting, with as many clients as there are rows."""
    options = measurement.options
    server.fix(PLAIN)
    plan = measurement.plan(mix, options.turns)
    count = options.rows + max(options.requests, _LEAST_PER_ROW * options.rows)
    clients = load.closed_loop(server.port, plan, options.rows, count, _LEAST_SECONDS)
    ended = asyncio.run(clients)
    server.wait_until_idle()
    return load.completion_rate(ended, options.rows)


def run(server: Server, setting: str, plan: Sequence[Asked]) -> LoadRun:
    """A setting's requests once, and what the server counted meanwhile."""
    server.fix(setting)
    server.wait_until_idle()
    before, began = server.counts(), time.time()
    cpu, wall = time.process_time(), time.perf_counter()
    answered = asyncio.run(load.open_loop(server.port, plan))
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    server.wait_until_idle()
    counts = {name: count - before[name] for name, count in server.counts().items()}
    return LoadRun(answered, share, counts, server.chosen(began) if setting == AUTO else {})


def _say(sentence: str) -> None:
    """Says it on standard error, without jax, which would take a GPU's memory to know its rank."""
    print(f"specjax: {sentence}", file=sys.stderr, flush=True)
