"""`python -m train.evaluate --model bundled|DIR`: what a pool of drafts is worth, in five tables.

A pair is a folder with `target`, `drafts/0`, `drafts/1`, ..., as `train.run` leaves it in
`export`. Shapes are chosen on its `dev.jsonl`, or with the bundled prompts where it has none.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.base.interrupts import CODE, ending_at_interrupts, if_interrupted, leave
from specjax.base.progress import reporting
from specjax.checkpoints.feature_drafts import is_feature_draft, load_feature_draft
from specjax.checkpoints.files import BUNDLED, Files
from specjax.checkpoints.load import load, load_draft, pool_in
from specjax.cli.options import parsed
from specjax.cli.values import at_least, check_seed, check_target_file
from specjax.measure import prompts
from specjax.measure.timing import environment, forget_programs
from specjax.methods.records import use_compilation_cache
from specjax.models.transformer import Model
from train import tables
from train.chunks import write_text
from train.config import TABLES
from train.export import DEVELOPMENT, HELDOUT, PAIR
from train.loop import progress_bar
from train.runs import Shape, Task
from train.tables import ALIKE, BOOSTED, SINGLE, Cell, Pair

_TITLES = (
    "P(target's token among the k most likely), along the target's own text",
    "Tokens per step of trees ⟨1,1,k,1,1,1,1,1⟩, best draft alone",
    "Verification rules, trees of one draft and a chain, by how children are made",
    "Equal nodes: every pool with its best shape within a budget",
    "Equal time: one row at a time",
)
TITLES = dict(zip(TABLES, _TITLES, strict=True))
_COMMAND = "train.evaluate"
_TIMED_PROMPTS = 6
_SPELLED = ("date", "model", "prompts")
"""What says nothing of a measurement that the rest does not say."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure a target and its pool of drafts: coverage, widths, rules, equal nodes, equal time."""

    model: str = "bundled"
    """"bundled", or a pair's folder."""
    alike: str | None = None
    """A folder whose drafts/ were trained alike, for comparison."""
    prompts: str | None = None
    """A file of {"id", "prompt"} or {"id", "turns"} lines. By default the pair's held-out ones."""
    limit: int | None = None
    """Take this many prompts only, to choose shapes on and to measure on."""
    max_new_tokens: int = 128
    """Tokens of every continuation."""
    draws: int = 1
    """Continuations of every prompt where tokens per step are measured at a temperature."""
    rows: int = 33
    """At most so many rows a pass."""
    seed: int = 0
    """Names the random numbers."""
    tables: str = ",".join(TITLES)
    """Which tables, separated by commas."""
    shapes: str | None = None
    """Tables of another seed, whose trees are taken over."""
    json: str | None = None
    """Where the tables go; those already there are kept."""
    plot: str | None = None
    """A PNG of equal nodes and coverage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives the exit code, 2 with one sentence for what a person got wrong.

    Raises:
      SystemExit: after printing help, or for unknown flags (code 2).
    """
    options: Options = parsed(Options, _COMMAND, arguments)
    use_compilation_cache()
    try:
        with ending_at_interrupts(_COMMAND), reporting("evaluate", _COMMAND):
            run(options)
    except KeyboardInterrupt:
        return CODE
    except (ValueError, OSError, ImportError) as error:
        print(f"{_COMMAND}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: Options) -> None:
    """Measures, prints and writes what `options` ask for.

    Raises:
      ValueError: an option is out of its range, or the pair or the prompts cannot be used.
      OSError: a file cannot be read or written.
    """
    _check(options)
    found = evaluate(options)
    show(found)
    if options.plot:
        from train.plot import plot

        plot(found, Path(options.plot))


def _check(options: Options) -> None:
    """Refuses what would fail after minutes of work."""
    at_least("--limit", options.limit, 1)
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    at_least("--draws", options.draws, 1)
    at_least("--rows", options.rows, 2)
    check_seed(options.seed)
    for name in options.tables.split(","):
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    check_target_file("--json", options.json)
    check_target_file("--plot", options.plot)
    if options.plot and Path(options.plot).suffix != ".png":
        raise ValueError(f"--plot is {options.plot}; it must end in .png.")


def evaluate(options: Options) -> dict[str, Any]:
    """The tables that were asked for, with what they were measured on.

    Every table is written to `--json` when it is done, and taken from there where the file was
    measured on the same models, prompts and settings: a killed evaluation goes on.
    """
    folder = _pair_folder(options.model)
    target, tokenizer = load(_target_folder(folder))
    boosted = drafts_in(folder, target)
    other = drafts_in(Path(options.alike), target) if options.alike else []
    _check_rows(target, boosted)
    _check_rows(target, other)

    def task(file: Path | None) -> Task:
        listed = prompts.read(None if file is None else str(file))[: options.limit]
        longest = target.config.max_positions
        chosen, _ = prompts.fitting(listed, tokenizer, longest, options.max_new_tokens)
        texts = [prompt.tokens for prompt in chosen]
        passes = -(-len(texts) // (options.rows - 1))
        rows = -(-len(texts) // passes) + 1
        return Task(texts, options.max_new_tokens, rows, options.seed, options.draws)

    sizes = {SINGLE: 1, ALIKE: len(other), BOOSTED: len(boosted)}
    earlier = _earlier(options.shapes, {name: size for name, size in sizes.items() if size})
    # without prompts of its own, a pair's trees are chosen on the bundled ones
    choosing = _existing(folder / DEVELOPMENT)
    asked = Path(options.prompts) if options.prompts else _existing(folder / HELDOUT)
    if asked is None:
        raise ValueError(f"{folder} has no {HELDOUT}; name prompts to measure on with --prompts.")
    development, measured_on = task(choosing), task(asked)
    settings = {
        "model": options.model,
        "weights": digest([target, *boosted, *other]),
        "shapes": digest([tables.SHAPES, tables.BUDGETS, tables.TIMED]),
        "rows": [development.rows, measured_on.rows],
        "target_parameters": target.config.num_parameters,
        "drafts": [draft.config.num_parameters for draft in boosted],
        "prompts": asked.name,
        "count": len(measured_on.prompts),
        "development": DEVELOPMENT if choosing else "bundled prompts",
        "development_count": len(development.prompts),
        "new_tokens": options.max_new_tokens,
        "draws": options.draws,
        "seed": options.seed,
        "earlier": digest([str(sorted(earlier.items()))]),
        "texts": digest([development.prompts, measured_on.prompts]),
    }
    found = _kept(options.json, environment() | settings)
    if "single" not in found["env"]:
        found["env"]["single"] = tables.best_member(target, boosted, development)
    pools = {SINGLE: [boosted[found["env"]["single"]]], ALIKE: other, BOOSTED: boosted}
    pair = Pair(target, {name: drafts for name, drafts in pools.items() if drafts})
    _fill(found, pair, development, measured_on, options, earlier)
    return found


def _kept(file: str | None, env: dict[str, Any]) -> dict[str, Any]:
    """The tables in `file` that were measured as `env` says, or none."""
    new = {"env": env}
    if not file or not Path(file).is_file():
        return new
    try:
        old = json.loads(Path(file).read_text("utf-8"))
        same = all(old["env"].get(name) == env[name] for name in env if name not in _SPELLED)
    except (ValueError, KeyError, TypeError, AttributeError):
        return new
    return old if same else new


def _fill(
    found: dict[str, Any],
    pair: Pair,
    development: Task,
    task: Task,
    options: Options,
    earlier: Mapping[Cell, Shape],
) -> None:
    """Measures the tables that `found` lacks, one after the other."""
    makers = {
        "coverage": lambda: tables.coverage(pair, task),
        "width": lambda: tables.widths(pair, task),
        "rules": lambda: tables.rules(pair, task),
        "equal_nodes": lambda: tables.equal_nodes(pair, development, task, earlier),
        "equal_time": lambda: tables.equal_time(pair, _few(development), _few(task)),
    }
    if options.json:
        if_interrupted(
            lambda: f"tables that are done are in {options.json}; the same command goes on"
        )
    missing = [name for name in TITLES if name in options.tables.split(",") and name not in found]
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("evaluate", total=len(missing), note="")
        for name in missing:
            progress.update(bar, note=name)
            found[name] = makers[name]()
            forget_programs()
            progress.advance(bar)
            if options.json:
                write_text(Path(options.json), json.dumps(found, indent=1) + "\n")


def _earlier(file: str | None, sizes: Mapping[str, int]) -> dict[Cell, Shape]:
    """The shapes of equal nodes in tables that were written before, for pools of such sizes."""
    if not file:
        return {}
    try:
        return tables.known_shapes(json.loads(Path(file).read_text("utf-8"))["equal_nodes"], sizes)
    except (OSError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"--shapes is {file}, which holds no table of equal nodes.") from None
    except ValueError as error:
        raise ValueError(f"--shapes is {file}: {error}") from error


def digest(values: Sequence[Any]) -> str:
    """A number that changes with any of the models, texts or shapes, and with their structure."""
    leaves, structure = jax.tree.flatten(values)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def _few(task: Task) -> Task:
    """The prompts of middle length."""
    ordered = sorted(task.prompts, key=len)
    start = max(0, (len(ordered) - _TIMED_PROMPTS) // 2)
    return task._replace(prompts=ordered[start : start + _TIMED_PROMPTS])


def _pair_folder(name: str) -> Path:
    """The folder of a pair: the bundled one, a run's export, or the run that holds it."""
    if name == "bundled":
        return BUNDLED
    folder = Path(name)
    if not (folder / "drafts").is_dir() and (folder / "export" / "drafts").is_dir():
        return folder / "export"
    return folder


def _target_folder(folder: Path) -> str | Path:
    """Where the pair's target is: beside its drafts, or where `pair.json` says."""
    if (folder / "target").is_dir():
        return folder / "target"
    try:
        return str(json.loads((folder / PAIR).read_text())["target"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder} is no pair: it has no target, and no {PAIR} names one."
        ) from None


def drafts_in(folder: Path, target: Model) -> list[Model]:
    """The members of a pool: a pair's, or those of a folder that holds nothing else.

    Heads among them read hidden states of `target`.

    Raises:
      CheckpointError: there is none, or one is not supported.
      ValueError: one is a head of another target.
    """
    own = folder / "drafts"
    listed = map(Files, pool_in(own if own.is_dir() else folder))
    return [
        load_feature_draft(files, target) if is_feature_draft(files) else load_draft(files)
        for files in listed
    ]


def _check_rows(target: Model, drafts: Sequence[Model]) -> None:
    """Checks that the drafts have as many tokens as the target, as all have that train here.

    Raises:
      ValueError: one has not.
    """
    rows = target.config.vocab_size
    for number, draft in enumerate(drafts):
        if draft.config.vocab_size != rows:
            raise ValueError(
                f"draft {number} has a vocabulary of {draft.config.vocab_size} tokens and the "
                f"model one of {rows}; they must be the same."
            )


def _existing(place: Path) -> Path | None:
    return place if place.exists() else None


def show(found: dict[str, Any]) -> None:
    """Prints the tables."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    env = found["env"]
    console.print(
        f"{env['cpu']}, {env['cpu_count']} cores, jax {env['jax']}, {env['date']}; "
        f"{env['count']} prompts ({env['prompts']}), {env['new_tokens']} new tokens"
    )
    for name, title in TITLES.items():
        if found.get(name):
            columns = list(dict.fromkeys(key for row in found[name] for key in row))
            table = Table(*columns, title=title)
            for row in found[name]:
                table.add_row(*(_cell(row.get(column, "")) for column in columns))
            console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    leave(main())
