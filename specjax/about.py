"""`specjax info` and `specjax check-pair`: what a pair is, what it takes, and whether it fits."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax import checkpoint, memory, records, vocabulary
from specjax.choice import Asked, choose
from specjax.config import ModelConfig
from specjax.distributed import devices_for
from specjax.folder import Files
from specjax.memory import Load, Plan, readable
from specjax.options import CheckPair, Info
from specjax.pair import load_pair, named
from specjax.sharding import placement
from specjax.values import at_least, dtype_of


def info(options: Info) -> int:
    """Runs `specjax info`; gives the exit code.

    The memory is told, and refused, before any of it is taken.

    Raises:
      ValueError: an option is wrong, the pair does not fit, or there is too little memory.
    """
    for name in ("batch", "length", "nodes"):
        at_least(f"--{name}", getattr(options, name), 1)
    kind = dtype_of(options.dtype)
    mesh = devices_for(options.mesh, options.distributed)
    found = named(options.model, options.draft)
    target = checkpoint.read_config(found.target.folder, options.positions)[0]
    drafts = [checkpoint.read_config(each.folder)[0] for each in found.drafts]
    needed = _plan(options, target, drafts, jnp.dtype(kind or checkpoint.default_dtype()), mesh)
    facts = _sizes(target, drafts, needed)
    if not options.json:
        _print(facts)
    if needed.available is not None and needed.total > needed.available:
        raise ValueError(
            f"all of it takes {readable(needed.total)} of each device, which has "
            f"{readable(needed.available)} to spare."
        )
    chosen = _chosen(options, mesh)
    print(json.dumps(facts | chosen)) if options.json else _print(chosen)
    return 0


def _plan(
    options: Info,
    target: ModelConfig,
    drafts: Sequence[ModelConfig],
    dtype: jnp.dtype,
    mesh: Mesh | None,
) -> Plan:
    length = min(options.length or target.max_positions, target.max_positions)
    held = Load(placement(target, mesh), dtype)
    small = jnp.dtype(checkpoint.default_dtype())  # which drafts keep, whatever the target's
    pool = [Load(placement(draft, mesh, split=False), small) for draft in drafts]
    return memory.plan(held, pool, options.batch, length, length, options.nodes)


def _sizes(target: ModelConfig, drafts: Sequence[ModelConfig], needed: Plan) -> dict[str, Any]:
    given = {f.name: f.default for f in dataclasses.fields(target)}
    config = {
        name: value
        for name, value in dataclasses.asdict(target).items()
        if given[name] is dataclasses.MISSING or getattr(target, name) != given[name]
    }
    sizes = {f"{name}_bytes": value for name, value in needed._asdict().items()}
    return {
        "config": config,
        "parameters": target.num_parameters,
        "drafts": [draft.num_parameters for draft in drafts],
        **sizes,
        "total_bytes": needed.total,
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
    }


def _chosen(options: Info, mesh: Mesh | None) -> dict[str, Any]:
    kind = dtype_of(options.dtype)
    pair = load_pair(options.model, options.draft, kind, None, mesh, options.positions)

    def chosen(temperature: float) -> str:
        choice = choose(Asked(), pair, temperature)
        return f"{choice.setting.label} ({choice.reason})"

    return {
        "dtype": str(pair.target.embedding.dtype),
        "method_greedy": chosen(0.0),
        "method_sampled": chosen(0.8),
        "cache_folder": str(records.cache_folder()),
    }


def _print(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        print(f"{words}: {_readable(name, value)}")


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if name.endswith("_bytes"):
        return f"{readable(value)} of each device"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(f"{entry:,}" for entry in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Finding(NamedTuple):
    """Something about a draft beside its target; `obstacle` if they cannot work together."""

    what: str
    said: str
    obstacle: bool = False


def check_pair(options: CheckPair) -> int:
    """Runs `specjax check-pair`; gives the exit code, 1 if a draft cannot work for the target.

    Configurations and tokenizers are read, weights are not.

    Raises:
      CheckpointError: a folder or file is missing or damaged, or an architecture not supported.
    """
    found = named(options.target, ",".join(options.drafts))
    target = checkpoint.read_config(found.target.folder)[0]
    report = {"target": _described(found.target, target), "drafts": []}
    for files in found.drafts:
        draft = checkpoint.read_config(files.folder)[0]
        findings = [*_findings(found.target, target, files, draft)]
        works = not any(finding.obstacle for finding in findings)
        one = {"draft": _described(files, draft), "works": works}
        report["drafts"].append(one | {"findings": [each._asdict() for each in findings]})
    report["works"] = all(one["works"] for one in report["drafts"])
    print(json.dumps(report)) if options.json else _tell(report)
    return 0 if report["works"] else 1


def _described(files: Files, config: ModelConfig) -> str:
    kind = checkpoint.default_dtype()
    size = memory.Load(placement(config, None), jnp.dtype(kind)).weights
    return (
        f"{files.folder}: {config.family}, {config.num_parameters:,} parameters "
        f"({readable(size)} in {kind}), {config.vocab_size:,} rows of vocabulary, "
        f"{config.max_positions:,} positions"
    )


def _findings(
    of: Files, target: ModelConfig, files: Files, draft: ModelConfig
) -> Sequence[Finding]:
    return (
        _on_vocabulary(of, target, files, draft),
        _on_ends(target, draft),
        _on_context(target, draft),
        *_on_windows(draft),
        _on_memory(target, draft),
    )


def _on_vocabulary(of: Files, target: ModelConfig, files: Files, draft: ModelConfig) -> Finding:
    what, sizes = "vocabulary", (target.vocab_size, draft.vocab_size)
    mine, theirs = vocabulary.contents_of(of), vocabulary.contents_of(files)
    if mine is None or theirs is None:
        which = of.folder if mine is None else files.folder
        same = sizes[0] == sizes[1]
        rows = f"{sizes[0]:,} and {sizes[1]:,} rows"
        return Finding(what, f"{which} has no tokenizer.json to compare; {rows}", not same)
    if found := vocabulary.difference(mine, theirs):
        return Finding(what, f"{found} (the model's first)", True)
    known = vocabulary.known(mine)
    if sizes[0] != sizes[1] and min(sizes) < known:
        return Finding(what, f"{known:,} tokens, and tables of {sizes[0]:,} and {sizes[1]:,}", True)
    padded = "" if sizes[0] == sizes[1] else f"; tables padded to {sizes[0]:,} and {sizes[1]:,}"
    return Finding(what, f"the same {known:,} tokens{padded}")


def _on_ends(target: ModelConfig, draft: ModelConfig) -> Finding:
    ends = [", ".join(map(str, config.eos_ids)) or "none" for config in (target, draft)]
    if ends[0] == ends[1]:
        return Finding("end tokens", f"{ends[0]} in both")
    return Finding("end tokens", f"{ends[0]} and {ends[1]}; the model's count")


def _on_context(target: ModelConfig, draft: ModelConfig) -> Finding:
    if draft.max_positions >= target.max_positions:
        return Finding("context", f"{draft.max_positions:,} positions for {target.max_positions:,}")
    return Finding(
        "context",
        f"{draft.max_positions:,} positions for {target.max_positions:,}: past them the draft "
        "guesses poorly; the text stays the model's own",
    )


def _on_windows(draft: ModelConfig) -> Sequence[Finding]:
    windows = [window for window in draft.windows if window is not None]
    if not windows:
        return ()
    return (Finding("windows", f"trees grown in several passes have at most {min(windows)} nodes"),)


def _on_memory(target: ModelConfig, draft: ModelConfig) -> Finding:
    kind, slots = jnp.dtype(checkpoint.default_dtype()), target.max_positions
    whole, small = (Load(placement(config, None), kind) for config in (target, draft))
    needed = memory.plan(whole, [small], 1, slots, slots, 16)
    said = (
        f"{readable(needed.total)} with a text of {slots:,} tokens, of which the draft takes "
        f"{readable(needed.draft_weights + needed.draft_caches)}"
    )
    if needed.available is None:
        return Finding("memory", said)
    return Finding("memory", f"{said}; {readable(needed.available)} to spare here")


def _tell(report: dict[str, Any]) -> None:
    print(f"model {report['target']}")
    for number, one in enumerate(report["drafts"]):
        print(f"draft {number} {one['draft']}")
        for finding in one["findings"]:
            mark = "NO " if finding["obstacle"] else ""
            print(f"  {mark}{finding['what']}: {finding['said']}")
        print("  can draft for the model" if one["works"] else "  cannot draft for the model")
