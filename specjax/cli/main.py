"""The command line: `specjax generate`, `bench`, `tune`, `verify`, `info` and their like."""

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from specjax.base.interrupts import CODE, ending_at_interrupts
from specjax.base.progress import reporting
from specjax.cli.options import (
    ABOUT,
    VERBS,
    Batch,
    Bench,
    BenchServe,
    Chat,
    CheckPair,
    Generate,
    Inflate,
    Info,
    Models,
    Options,
    Quantize,
    Roofline,
    Serve,
    Shard,
    Tune,
    Verify,
    parsed,
)

_COMMANDS: dict[type, tuple[str, str]] = {
    Generate: ("generate", "generate"),
    Chat: ("chat", "chat"),
    Serve: ("serve", "serve"),
    Batch: ("batch", "batch"),
    Bench: ("bench", "bench"),
    BenchServe: ("bench_serve", "bench_serve"),
    Tune: ("tune", "tune"),
    Verify: ("verify", "verify"),
    Info: ("info", "info"),
    CheckPair: ("info", "check_pair"),
    Models: ("models", "models"),
    Shard: ("shard", "shard"),
    Quantize: ("quantize", "quantize"),
    Inflate: ("inflate", "inflate"),
    Roofline: ("roofline", "roofline"),
}
"""The module of a verb's options, and the function in it that runs them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit code, 2 with one sentence for what a person got wrong.

    Raises:
      SystemExit: after printing help, or for unknown or missing flags (code 2).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before this process began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        with ending_at_interrupts(), reporting(_name_of(options)):
            code = _command(options)()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _let_output_go()
        return 1
    except KeyboardInterrupt:
        return CODE
    except RuntimeError as error:  # what jax raises when an allocation fails
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"specjax: not enough memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"specjax: not enough memory: {error or 'more than there is'}.", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"specjax: {' '.join(str(error).split())}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _let_output_go()
        return 2


def _name_of(options: Options) -> str | None:
    """What a verb is called while it is at work; who waits for requests or lines is at nothing."""
    if isinstance(options, Chat | Serve):
        return None
    return _COMMANDS[type(options)][1].replace("_", "-")


def _options(arguments: Sequence[str]) -> Options:
    """The options of a verb; without any argument, help and exit code 2."""
    try:
        return parsed(
            VERBS,
            "specjax",
            arguments or ["--help"],
            tyro.conf.OmitSubcommandPrefixes,
            description=ABOUT,
        )
    except SystemExit:
        sys.stdout.flush()  # what refuses it is met here, and not when the process ends
        if not arguments:
            raise SystemExit(2) from None
        raise


def _let_output_go() -> None:
    """Lets what standard output still holds go nowhere: nobody reads it, or it takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _command(options: Options) -> Callable[[], int]:
    """The verb, imported only now: what it needs takes a second to load."""
    from specjax.methods import records

    records.use_compilation_cache()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    module, function = _COMMANDS[type(options)]
    command = getattr(importlib.import_module(f"specjax.cli.{module}"), function)
    return lambda: command(options)
