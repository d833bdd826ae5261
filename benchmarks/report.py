"""`python -m benchmarks.report`: what a target gains from its drafts, as a page of Markdown.

    python -m benchmarks.report --model smollm2 --draft DIR --prompts FILE... --folder runs/report

Every run is kept in the folder as it ends, and the same command goes on with what is missing; when
all is there it only writes the page. Compared is what runs side by side in one process: all of a
round on one prompt, one after the other. Nothing else should run on the machine.
"""

import hashlib
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks import page, papers, peers, texts
from benchmarks.cells import Cells, Json
from benchmarks.options import TABLES, Options, checked
from benchmarks.rounds import Contestant, Sampled, size_of
from benchmarks.speed import ALL, Measuring, best, contests, rows, settings_of, sized
from benchmarks.texts import Text
from specjax.base.interrupts import CODE, ending_at_interrupts, if_interrupted, leave
from specjax.base.output import write_text
from specjax.base.progress import reporting
from specjax.checkpoints import pair as pairs
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.options import parsed
from specjax.cli.values import dtype_of, items
from specjax.measure.timing import environment
from specjax.methods import registry, tuned
from specjax.methods.records import use_compilation_cache
from specjax.models.quantized import quantized_as
from train.loop import progress_bar

_COMMAND = "benchmarks.report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives the exit code, 2 with one sentence for what a person got wrong.

    Raises:
      SystemExit: after printing help, or for unknown flags (code 2).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options: Options = parsed(Options, _COMMAND, given)
    use_compilation_cache()
    try:
        with ending_at_interrupts(_COMMAND), reporting("report", _COMMAND):
            return run(options, given)
    except KeyboardInterrupt:
        return CODE
    except (ValueError, OSError, ImportError) as error:
        print(f"{_COMMAND}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(options: Options, given: Sequence[str]) -> int:
    """Measures what is missing and writes the page; gives 0, or 2 if a table could not be made.

    Raises:
      ValueError: an option is out of its range, or the pair or the prompts cannot be used.
      OSError: a file cannot be read or written.
    """
    temperatures, tables = checked(options)
    pair = load_pair(
        options.model,
        ",".join(options.draft) or None,
        dtype=dtype_of(options.dtype),
        stage=",".join(options.stage) or None,
        activations=options.activations,
    )
    env = _environment(options, pair)
    most = pair.target.config.max_positions - options.max_new_tokens
    listed = texts.read(options.prompts, pair.tokenizer, most, options.limit)
    if_interrupted(lambda: f"the same command goes on with what is missing in {options.folder}")
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("report", total=len(tables), note="lengths of texts")
        doing, count = ["lengths of texts"], itertools.count(1)

        def after() -> None:
            progress.update(bar, note=f"{doing[-1]}, {next(count)} runs")

        cells = Cells(Path(options.folder), {n: env[n] for n in _DEPENDED_ON}, after)
        listed = sized(cells, pair, listed, options.max_new_tokens)
        measuring = Measuring(cells, pair, listed, options.seed)
        report = Report(options, measuring, env, temperatures, given)
        for name in tables:
            doing.append(name)
            progress.update(bar, note=name)
            report.make(name)
            report.write()
            progress.advance(bar)
    print(f"{report.page} is written.")
    return 2 if report.left_out else 0


_DEPENDED_ON = ("weights", "cpu", "cpu_count", "device", "products", "jax", "specjax", "dtype",
                "weights_as")  # fmt: skip
"""Of the environment, what every figure depends on."""


def _environment(options: Options, pair: Pair) -> Json:
    """Where and on what all is measured."""
    drafts = [
        f"{draft.config.num_parameters / 1e6:.2f}M"
        + (f" of {known:,} tokens" if (known := draft.config.draft_vocab_size) else "")
        for draft in pair.drafts
    ]
    dtype = str(pair.target.embedding.dtype)
    return environment() | {
        "weights": digest([pair.target, pair.drafts, pair.table, pair.smaller]),
        "model": Path(options.model).name,
        "parameters": pair.target.config.num_parameters,
        "dtype": dtype,
        "weights_as": quantized_as(pair.target) or dtype,
        "drafts_are": ", ".join(drafts) or "none",
    }


def digest(models: Any) -> str:
    """A number that changes with any weight of models, and with their structure."""
    leaves, structure = jax.tree.flatten(models)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


class Report:
    """A page that grows by a section for each table.

    Args:
      options: what was asked for.
      measuring: the pair, the texts and the cells.
      env: where and on what is measured.
      temperatures: of the texts.
      given: the arguments of the command.
    """

    def __init__(
        self,
        options: Options,
        measuring: Measuring,
        env: Json,
        temperatures: Sequence[float],
        given: Sequence[str],
    ) -> None:
        self.options, self.measuring, self.env = options, measuring, env
        self.temperatures, self._given = temperatures, given
        self._name = Path(options.model).name.removesuffix(".gguf").lower()
        self.page = Path(options.out) / f"{self._name}.md"
        self.sections: dict[str, str] = {}
        self.left_out: list[str] = []
        self._fastest: dict[Sampled, Contestant] = {}

    @property
    def few(self) -> list[Text]:
        """The texts beside peers, of all groups."""
        return texts.spread(self.measuring.texts, self.options.few)

    @property
    def alike(self) -> list[Text]:
        """The texts of the papers' tables: those of the commonest compiled size, as each size costs
        dozens of programs.
        """
        sizes = [size_of(text) for text in self.measuring.texts]
        common = statistics.mode(sizes)
        own = [t for t, size in zip(self.measuring.texts, sizes, strict=True) if size == common]
        return texts.spread(own, self.options.few)

    @property
    def ends(self) -> tuple[float, float]:
        """The temperatures of the papers' tables: the first and the last."""
        return self.temperatures[0], self.temperatures[-1]

    def make(self, name: str) -> None:
        """Measures what a table lacks, and makes its section; or a sentence why it has none."""
        try:
            made = getattr(self, f"_{name}")()
        except ValueError as error:
            sentence = f"The table is left out: {' '.join(str(error).split())}"
            print(f"{_COMMAND}: {name}: {sentence}", file=sys.stderr)
            self.left_out.append(name)
            self.sections[name] = sentence
            return
        dates = self.measuring.cells.dates.get(name, [])
        self.sections[name] = f"{made}\n\n{page.caption(self.env, dates, self._texts(name))}"

    def write(self) -> None:
        """Writes the page with the sections there are.

        Raises:
          OSError: it cannot be written.
        """
        parts = [f"# {self.env['model']} with its drafts", self._head()]
        parts += [f"## {TABLES[name]}\n\n{text}" for name, text in self.sections.items()]
        write_text(self.page, "\n\n".join(parts) + "\n")

    def _head(self) -> str:
        """What holds for all tables."""
        counts: dict[str, int] = {}
        for text in self.measuring.texts:
            kind = f"{text.group} ({'chat template' if text.chat else 'as it is'})"
            counts[kind] = counts.get(kind, 0) + 1
        groups = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
        return (
            f"```sh\n{page.command_of(self._given)}\n```\n\n"
            f"Prompts: {groups}. One row; each text has as many tokens as the target's own greedy "
            f"answer, {self.options.max_new_tokens} at most, end tokens after that are not looked "
            "for, and reading the prompt is part of its time. All methods of a table run one after "
            "the other on each prompt in one process. Tokens per step and tokens a second are over "
            "all texts, times plain decoding is the median over texts of the ratio to the plain "
            "run beside it."
        )

    def _texts(self, name: str) -> str:
        """What a table was measured on."""
        if name == "served":
            return f"{self.options.requests} requests of each setting at each rate."
        own = {"speed": self.measuring.texts, "peers": self.few}.get(name, self.alike)
        longest = max(len(text.tokens) for text in own)
        return f"Prompts: {len(own)}, of up to {longest} tokens."

    def _plot(self, kind: str, draw: Callable[[Path], None]) -> str | None:
        """A plot's name beside the page; None without matplotlib."""
        file = self.page.with_name(f"{self._name}-{kind}.png")
        try:
            draw(file)
        except ModuleNotFoundError:
            return None
        return file.name

    def _speed(self) -> str:
        options = self.options
        config = [] if options.config is None else tuned.read(options.config)
        budgets = items(options.budgets, int, "--budgets") if options.budgets else ()
        settings = settings_of(self.measuring.pair, options.methods, budgets, config)
        asked = contests(self.measuring, settings, self.temperatures, options.rules)
        made = rows(self.measuring.side_by_side("speed", asked))
        for sampled, some in asked.items():
            by_name = {each.name: each for each in some}
            self._fastest[sampled] = by_name[best(made, sampled)]
        plot = self._plot("speed", lambda file: page.draw_speed(made, file))
        picture = f"\n\n![Times plain decoding, each method with its best rule]({plot})"
        return page.speed(made) + (picture if plot else "")

    def _coverage(self) -> str:
        self._need_drafts()
        return page.coverage(
            papers.coverage(self.measuring, self.alike, list(dict.fromkeys(self.ends)))
        )

    def _width(self) -> str:
        self._need_drafts()
        return page.width(papers.widths(self.measuring, self.alike, self.ends[1]))

    def _rules(self) -> str:
        self._need_drafts()
        if not self.ends[1]:
            raise ValueError("all rules decide alike at temperature 0; name another.")
        return page.rules(papers.rules(self.measuring, self.alike, self.ends[1]))

    def _budgets(self) -> str:
        counts = items(self.options.curve, int, "--curve")
        two = list(dict.fromkeys(self.temperatures[:2]))
        made = papers.budgets(self.measuring, self.alike, counts, two)
        return page.budgets(made, self._plot("budgets", lambda f: page.draw_budgets(made, f)))

    def _staged(self) -> str:
        return page.staged(papers.staged(self.measuring, self.alike))

    def _served(self) -> str:
        options = self.options
        flags = ["--model", options.model, "--rates", options.rates, "--turns", "1"]
        flags += ["--requests", str(options.requests), "--prompts", options.prompts[0]]
        flags += ["--max-new-tokens", str(options.max_new_tokens), "--seed", str(options.seed)]
        settings = options.settings or (None if self._has_drafts else "none,lookup:7,auto")
        flags += ["--settings", settings] if settings else []
        for name in ("draft", "stage"):
            if own := getattr(options, name):
                flags += [f"--{name}", ",".join(own)]
        for name in ("dtype", "activations"):
            if named := getattr(options, name):
                flags += [f"--{name}", named]
        made = papers.served(self.measuring, flags)
        return page.served(made, self._plot("served", lambda f: page.draw_served(made, f)))

    def _peers(self) -> str:
        folder, file = Path(self.options.folder), self._gguf()
        with peers.contestants(self.measuring.pair, file, folder) as (theirs, missing):
            asked = {
                Sampled(temperature): [*self._ours(Sampled(temperature)), *theirs]
                for temperature in self.temperatures
            }
            found = rows(self.measuring.side_by_side("peers", asked, self.few))
            said = [*filter(None, [peers.versions(theirs)]), *missing]
        return page.peers([row for row in found if row["group"] == ALL], said)

    def _ours(self, sampled: Sampled) -> list[Contestant]:
        """Plain decoding, and the fastest method of the table of speeds, or a shipped one."""
        measuring = self.measuring
        shipped = ("chain" if sampled.temperature else "specexec") if self._has_drafts else "lookup"
        other = self._fastest.get(sampled) or measuring.ours(registry.setting_of(shipped))
        return list({each.name: each for each in (measuring.plain, other)}.values())

    @property
    def _has_drafts(self) -> bool:
        return bool(self.measuring.pair.drafts)

    def _gguf(self) -> Path | None:
        """The target as a GGUF file."""
        if self.options.gguf:
            return Path(self.options.gguf)
        found = pairs.named(self.options.model).target.path
        return found if found.suffix == ".gguf" else None

    def _need_drafts(self) -> None:
        if not self._has_drafts:
            raise ValueError("there is no draft model; name one with --draft.")


if __name__ == "__main__":
    leave(main())
