"""The command line: `specjax generate`, `bench`, `verify` and `info`."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from specjax.options import VERBS, Bench, Generate, Options, Verify

_BOX = "╭╮╰╯│─ \n"
_RULE = "────"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit code, 2 with one sentence for what a person got wrong.

    Raises:
      SystemExit: after printing help, or for unknown or missing flags (code 2).
    """
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return _command(options)()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads: let the last flush go nowhere
        return 1
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:  # what jax raises when an allocation fails
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"specjax: not enough memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"specjax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str]) -> Options:
    """The options, or an exit with code 2 and one sentence on standard error."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                VERBS,  # pyright: ignore[reportArgumentType]
                prog="specjax",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as stop:
        if stop.code:
            print(f"specjax: {_sentence(complaint.getvalue())}", file=sys.stderr)
        raise


def _sentence(panel: str) -> str:
    """What a panel of tyro's says, on one line."""
    lines = panel.splitlines()[1:]
    rule = next((i for i, line in enumerate(lines) if _RULE in line), len(lines))
    said = " ".join(" ".join(line.strip(_BOX) for line in lines[:rule]).split())
    return f"{said.rstrip('.')}; see specjax --help."


def _command(options: Options) -> Callable[[], int]:
    """The verb, imported only now: what it needs takes a second to load."""
    from specjax import records

    records.use_compilation_cache()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(options, Bench):
        from specjax import bench

        return lambda: bench.bench(options)
    if isinstance(options, Verify):
        from specjax import certify

        return lambda: certify.verify(options)
    from specjax import console

    if isinstance(options, Generate):
        return lambda: console.generate(options)
    return lambda: console.info(options)


if __name__ == "__main__":
    sys.exit(main())
