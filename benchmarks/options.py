"""Options of `benchmarks.report`, and its tables."""

import dataclasses
from pathlib import Path

from specjax.base.output import check_writable
from specjax.cli.values import at_least, check_seed, items, temperatures_in
from specjax.methods import registry

TABLES = {
    "speed": "Methods and rules",
    "coverage": "How often the target's token is among a draft's likeliest (SpecInfer, Table 1)",
    "width": "Widths of trees (SpecInfer, Table 2)",
    "rules": "Verification rules (SpecInfer, Table 3)",
    "budgets": "Best-first trees of growing budgets (SpecExec)",
    "staged": "Two stages of drafts (Staged Speculative Decoding)",
    "served": "A server under load (SmartSpec)",
    "peers": "Beside llama.cpp and transformers",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure a target with its drafts, and write a page of tables and plots."""

    prompts: tuple[str, ...]
    """Files of {"id", "turns"} lines (chats: the first turn, in the chat template) and of {"id",
    "prompt"} lines (continued as they are); a line's "category" is its group, else its file."""
    model: str = "smollm2"
    """The target: a short name, a folder, a GGUF file or a hub's id."""
    draft: tuple[str, ...] = ()
    """Drafts; the first is the one of methods with one. By default those of the model, if any."""
    stage: tuple[str, ...] = ()
    """An n-gram folder and that of a smaller draft, for staged and ngram."""
    folder: str = "runs/report"
    """Where what is measured is kept."""
    out: str = "docs/results"
    """Where the page and its plots go."""
    tables: str = ",".join(TABLES)
    """Which tables, separated by commas."""
    limit: int = 8
    """Prompts of each group."""
    few: int = 12
    """Prompts beside peers (of all groups), and of the papers' tables (of one compiled size)."""
    max_new_tokens: int = 128
    """The most tokens of a text; each is as long as the target's own greedy answer."""
    temperatures: str = "0,0.6,1"
    """Separated by commas; the papers' tables are made at the first and the last of them."""
    methods: str = "all"
    """Of the table of speeds, separated by commas."""
    budgets: str | None = None
    """Nodes of the methods' trees, separated by commas; by default their shipped settings."""
    config: str | None = None
    """A file that `specjax tune` wrote: its settings take part."""
    rules: bool = True
    """Every rule that a method's trees allow; --no-rules is the automatic one alone."""
    curve: str = "7,15,31,63,127,255,511"
    """Budgets of SpecExec's curve, separated by commas."""
    rates: str = "0.25,0.5,0.75,1,1.2"
    """Rates of requests, as shares of what the server completes without drafts."""
    settings: str | None = None
    """Of the server, as `specjax bench-serve` takes them; by default its own, without drafts
    none,lookup:7,auto."""
    requests: int = 40
    """Requests of a setting at a rate."""
    gguf: str | None = None
    """The target as a GGUF file, for llama.cpp; by default the model, where it is one."""
    dtype: str | None = None
    """float32 or bfloat16. By default float32 on a CPU, else bfloat16."""
    activations: str | None = None
    """What multiplies weights of 8 and 4 bits on a CPU; see `specjax.load`."""
    seed: int = 0
    """Names the random numbers."""


def checked(options: Options) -> tuple[tuple[float, ...], list[str]]:
    """The temperatures and the tables; refuses what would fail after minutes of work.

    Raises:
      ValueError: an option is out of its range.
      OSError: a folder cannot be written to.
    """
    for name in ("limit", "few", "max_new_tokens", "requests"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    check_seed(options.seed)
    registry.names_of(options.methods, None)
    tables = [name.strip() for name in options.tables.split(",")]
    for name in tables:
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    for name in ("budgets", "curve"):
        if (given := getattr(options, name)) is not None:
            for count in items(given, int, f"--{name}"):
                at_least(f"--{name}", count, 1)
    if not options.prompts:
        raise ValueError("--prompts names no file.")
    for place in (options.folder, options.out):
        Path(place).mkdir(parents=True, exist_ok=True)
        check_writable(Path(place) / ".writable")
    return temperatures_in(options.temperatures), tables
