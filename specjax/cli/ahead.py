"""`--compile-for`: what a pair's programs take of hardware that is not here."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.checkpoints import quantized
from specjax.checkpoints.feature_drafts import draft_config
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import default_dtype, read_config
from specjax.checkpoints.pair import named
from specjax.cli.loading import SERVED_TEMPERATURE, settings_named
from specjax.cli.options import CheckPair, Info, Serve
from specjax.cli.values import at_least, dtype_of
from specjax.engine.ahead import engine_of_shapes, step_programs
from specjax.measure.compile_ahead import HERE, Hardware, Program, Texts, hardware, programs
from specjax.models.config import ModelConfig
from specjax.models.families.mimo import mtp_config
from specjax.models.memory import readable
from specjax.parallel.mesh import MODEL
from specjax.parallel.processes import sizes_of

NEW = 128
"""New tokens of a text: what `generate` makes by default."""
_LENGTH = 2048 + NEW
"""Tokens of a text where none are named."""


def compile_for(options: Info) -> int:
    """Runs `specjax info --compile-for`; gives the exit code, 1 if a program does not fit.

    Configurations are read, weights are not.

    Raises:
      CheckpointError: a folder or file is missing or damaged, or an architecture not supported.
      ValueError: an option is wrong, nothing can be compiled for that hardware here, the model is
        quantized, or the mesh does not divide it.
    """
    at_least("--batch", options.batch, 1)
    at_least("--length", options.length or _LENGTH, 2)
    if options.distributed is not None:
        raise ValueError("--compile-for compiles in one process; leave out --distributed.")
    on_a_cpu(options)
    found = named(options.model, options.draft)
    target = read_config(found.target.path, options.positions)[0]
    drafts = [draft_config(each, target) for each in found.drafts]
    drafts += [mtp_config(target)] if found.has_mtp else []
    length = length_of(options.length, target)
    if options.serve:
        report = _steps_for(options, found.target, target, drafts, length)
    else:
        report = compiled_for(options, found.target, target, drafts, (options.batch, length))
    print(json.dumps(report)) if options.json else _tell(report)
    return 0 if all(each["fits"] for each in report["programs"]) else 1


def compiled_for(
    options: Info | CheckPair,
    files: Files,
    target: ModelConfig,
    drafts: Sequence[ModelConfig],
    size: tuple[int, int],
    plain: bool = True,
) -> dict[str, Any]:
    """What the programs for `size` (texts at once, tokens of each) take of hardware.

    With `plain` decoding that is among them.

    Raises: see `compile_for`.
    """
    found, mesh, dtype = _place(options, files)
    rows, length = size
    new = min(NEW, length - 1)
    texts = Texts(rows, length - new, new)
    made = []
    for program in programs(found, mesh, target, drafts, dtype, texts, plain):
        made.append(_of(program, found))
        print(f"compiled: {program.name}", file=sys.stderr)
    return _report(files, found, mesh, dtype, made) | {"batch": rows, "length": length}


def check_serve(options: Info) -> None:
    """Checks what `--serve` goes with.

    Raises:
      ValueError: it is named without `--compile-for`, or what it needs without it.
    """
    if options.serve and options.compile_for is None:
        raise ValueError(
            "--serve says what a server's steps take once they are compiled; name the hardware "
            "too, such as --compile-for h100, or here."
        )
    for name in ("rows", "settings"):
        if getattr(options, name) is not None and not options.serve:
            raise ValueError(f"--{name} is of a server's steps; add --serve.")
    if options.serve and options.batch != 1:
        raise ValueError(
            f"--batch is {options.batch}, of texts that start together; a server's are --rows."
        )
    at_least("--rows", _rows(options), 1)


def _rows(options: Info) -> int:
    return Serve.rows if options.rows is None else options.rows


def _steps_for(
    options: Info, files: Files, target: ModelConfig, drafts: Sequence[ModelConfig], length: int
) -> dict[str, Any]:
    """What the steps of a server take of hardware."""
    found, mesh, dtype = _place(options, files)
    rows = _rows(options)
    settings = None if options.settings is None else settings_named(options.settings)
    own = engine_of_shapes(
        found, mesh, target, drafts, dtype, settings, rows, length, SERVED_TEMPERATURE
    )
    made = []
    for step in step_programs(found, mesh, own):
        setting, of_rows, columns = step.shape
        sizes = {
            "setting": setting, "rows": of_rows, "columns": columns,
            "prompt_columns": step.prompt_columns,
        }  # fmt: skip
        made.append(sizes | _of(step.program, found))
        print(f"compiled: {step.program.name}", file=sys.stderr)
    return _report(files, found, mesh, dtype, made) | {"rows": rows, "length": length}


def _place(options: Info | CheckPair, files: Files) -> tuple[Hardware, Mesh, str]:
    """The hardware, its mesh, and the dtype of the target."""
    if options.offloaded:
        raise ValueError("--compile-for compiles what is in memory; leave out --offload, --memory.")
    if quantized.is_quantized(files.path):
        raise ValueError(
            f"--compile-for compiles models in float32 or bfloat16; {files.path} is quantized."
        )
    assert options.compile_for is not None
    found = hardware(options.compile_for)
    mesh = found.mesh(**(sizes_of(options.mesh) or {MODEL: len(found.devices)}))
    with found.traced():
        dtype = dtype_of(options.dtype) or default_dtype()
    return found, mesh, dtype


def _report(
    files: Files, found: Hardware, mesh: Mesh, dtype: str, made: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": str(files.path), "hardware": found.name, "devices": mesh.size, "dtype": dtype,
        "memory_bytes": found.memory_bytes, "programs": made,
    }  # fmt: skip


def length_of(asked: int | None, target: ModelConfig) -> int:
    """Tokens of a text: those that are asked for, or that many, as far as the target goes."""
    return min(asked or _LENGTH, target.max_positions)


def on_a_cpu(options: Info | CheckPair) -> None:
    """Keeps jax off devices that may be here: one that libtpu holds compiles for no other."""
    if options.compile_for not in (None, HERE):
        jax.config.update("jax_platforms", "cpu")


def _of(program: Program, found: Hardware) -> dict[str, Any]:
    if program.made is None:
        return {"name": program.name, "fits": False, "refused": program.refused}
    made, most = program.made, found.memory_bytes
    figures = {"total_bytes": made.total_bytes, "seconds": round(made.seconds, 1)}
    return {
        "name": program.name, "fits": most is None or made.total_bytes <= most, **figures,
        **dataclasses.asdict(made), "collectives": made.collectives,
    }  # fmt: skip


def _tell(report: dict[str, Any]) -> None:
    devices = f"{report['devices']} device{'s' * (report['devices'] > 1)} of {report['hardware']}"
    print(
        f"{report['model']} in {report['dtype']} for {devices}, {_memory(report['memory_bytes'])} "
        f"each; {report.get('batch', report.get('rows'))} x {report['length']:,} tokens"
    )
    for one in report["programs"]:
        print(f"{one['name']}: {said(one, report['memory_bytes'])}")


def _memory(size: int | None) -> str:
    return "unknown memory" if size is None else readable(size)


def said(one: dict[str, Any], memory_bytes: int | None) -> str:
    """What came of a program, in words."""
    if "refused" in one:
        return f"does not compile: {one['refused']}"
    passed = ", ".join(f"{count} {name}" for name, count in one["collectives"].items())
    return (
        f"{'fits' if one['fits'] else 'DOES NOT FIT'}: {readable(one['total_bytes'])} of "
        f"{_memory(memory_bytes)} (weights and arguments {readable(one['argument_bytes'])}, "
        f"temporaries {readable(one['temporary_bytes'])}); collectives: {passed or 'none'}; "
        f"compiled in {one['seconds']} s"
    )
