"""`specjax batch`: a file of requests, answered as a server would."""

import asyncio
from pathlib import Path

from specjax.base.interrupts import if_interrupted
from specjax.base.output import check_writable
from specjax.base.progress import counted
from specjax.cli.generate import say
from specjax.cli.options import Batch
from specjax.cli.serve import check_engine, engine_of, served_name

_AT_ONCE = 4
"""Requests that are under way for each row, so that no row waits for one."""


def batch(options: Batch) -> int:
    """Runs `specjax batch`; gives the exit code, 1 if a request was refused or failed.

    Raises:
      ValueError: an option is wrong, a file cannot be read or written, the pair does not fit, or a
        package is missing.
    """
    try:
        from specjax.server.app import create_app
        from specjax.server.batch import answer_all, answered, read
        from specjax.server.options import ServerOptions
        from specjax.server.process import raise_file_limit
    except ModuleNotFoundError as error:
        raise ValueError(
            f"batch needs {error.name}, which is not installed: pip install 'specjax[serve]'."
        ) from error
    check_engine(options)
    out = Path(options.answers)
    lines, known = read(Path(options.requests)), answered(out)
    try:
        check_writable(out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}.") from error
    left = [line for line in lines if line.custom_id not in known]
    if known:
        say(f"{len(lines) - len(left)} of {len(lines)} requests are answered in {out}.")
    if not left:
        return 0
    engine, pair, defaults = engine_of(options, len(left), len(left) * 2**20)
    server = ServerOptions(
        served_model_name=options.served_model_name or served_name(options.model),
        defaults=defaults.values,
        tool_call_parser=options.tool_call_parser,
        reasoning=options.reasoning_parser == "auto",
    )
    app = create_app(engine, pair.tokenizer, server)
    raise_file_limit()
    done = 0
    if_interrupted(lambda: f"{done} answers are in {out}; the same command goes on behind them")
    try:
        engine.start(wait=False)
        with counted("requests answered") as tell, out.open("a", encoding="utf-8") as file:

            def told(count: int, of: int) -> None:
                nonlocal done
                done = count
                tell(count, of)

            failed = asyncio.run(answer_all(app, left, file, _AT_ONCE * options.rows, told))
    finally:
        app.state.service.close()
        engine.close()
    wrong = f"; {failed} were refused or failed, with the reason in their lines" if failed else ""
    say(f"{len(left)} requests are answered in {out}{wrong}.")
    return int(failed > 0)
