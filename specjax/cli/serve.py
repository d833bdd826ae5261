"""`specjax serve`: a model over HTTP, as OpenAI's API."""

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from specjax.checkpoints import gguf
from specjax.checkpoints.files import find, name_of
from specjax.checkpoints.generation_config import Defaults, defaults_for
from specjax.checkpoints.pair import Pair
from specjax.cli.generate import say
from specjax.cli.kernels import check_kernels, use_kernels
from specjax.cli.loading import SERVED_TEMPERATURE, asked_of, pair_of, settings_named
from specjax.cli.options import Batch, Serve
from specjax.cli.values import at_least, dtype_of
from specjax.draft.drafter import Drafter
from specjax.engine.engine import Engine
from specjax.methods import registry
from specjax.methods.choice import choose
from specjax.methods.method import check_method
from specjax.methods.switch import switching
from specjax.parallel.processes import devices_for
from specjax.verify.rules import AUTO, check_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specjax.server.options import ServerOptions

_KEY = "SPECJAX_API_KEY"


def serve(options: Serve) -> int:
    """Runs `specjax serve` until SIGTERM or SIGINT; gives the exit code.

    Raises:
      ValueError: an option is wrong, the pair does not fit, or a package is missing.
    """
    check(options)
    keys = keys_of(options)
    with _ending_at(signal.SIGTERM):
        try:
            from specjax.server.app import run
        except ModuleNotFoundError as error:
            raise ValueError(
                f"serve needs {error.name}, which is not installed: pip install 'specjax[serve]'."
            ) from error
        return run(*prepared(options, keys))


def prepared(
    options: Serve, keys: tuple[str, ...]
) -> tuple[Engine, "PreTrainedTokenizerFast", "ServerOptions"]:
    """What `specjax.server.app` makes a server of: an engine that has not started, and its options.

    Args:
      options: checked (`check`).
      keys: of which requests must bear one, if there are any.

    Raises:
      ValueError: an option is wrong, or the pair does not fit.
    """
    from specjax.server.hosts import check_hosts, check_origins
    from specjax.server.options import ServerOptions

    hosts, origins = _listed(options.allowed_hosts), _listed(options.allowed_origins)
    check_hosts(hosts)
    check_origins(origins)
    engine, pair, defaults = engine_of(options, options.max_waiting, options.max_waiting_tokens)
    server = ServerOptions(
        served_model_name=options.served_model_name or served_name(options.model),
        host=options.host,
        port=options.port,
        api_keys=keys,
        allowed_origins=origins,
        allowed_hosts=hosts,
        drain_seconds=options.drain_seconds,
        strict_fields=options.strict_fields,
        defaults=defaults.values,
        tool_call_parser=options.tool_call_parser,
        reasoning=options.reasoning_parser == "auto",
        debug=options.debug,
    )
    return engine, pair.tokenizer, server


def engine_of(
    options: Serve | Batch, max_waiting: int, max_waiting_tokens: int
) -> tuple[Engine, Pair, Defaults]:
    """An engine that has not started, its pair, and what requests take that name nothing.

    Raises:
      ValueError: an option is wrong, or the pair does not fit.
    """
    mesh = devices_for(options.mesh)
    use_kernels(options.kernels)
    defaults = defaults_for(options.generation_config, find(options.model).path)
    pair = pair_of(options, dtype_of(options.dtype), mesh)
    for sentence in defaults.notices:
        say(sentence)
    engine = Engine(
        pair.target,
        _drafter_of(options, pair),
        rows=options.rows,
        max_model_len=options.max_model_len,
        verify=options.verify,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        page_size=options.page_size,
        kv_cache_tokens=options.kv_cache_tokens,
    )
    most = pair.target.config.max_positions
    paged = engine.page_counts is not None
    if options.max_model_len is None and engine.max_model_len < most:
        more = "" if paged else f" with {options.rows} rows; fewer --rows leave more"
        say(
            f"a prompt and its continuation may have {engine.max_model_len} tokens, as much of the "
            f"model's context of {most} as there is memory for{more}."
        )
    if paged:
        say(f"the KV cache has pages for {engine.kv_cache_tokens} tokens.")
    return engine, pair, defaults


def _drafter_of(options: Serve | Batch, pair: Pair) -> Drafter:
    """What drafts: settings that each step chooses from, or one method."""
    asked = asked_of(options)
    if options.settings is not None:
        if asked[:4] != (AUTO, None, None, None):
            raise ValueError(
                "--settings is what each step chooses from; leave out method, tree, budget and "
                "config beside it."
            )
        drafter = switching(pair, settings_named(options.settings), options.verify)
        say(f"each step drafts with one of {', '.join(drafter.settings)}.")
        return drafter
    choice = choose(asked, pair, SERVED_TEMPERATURE, options.rows)
    say(f"method {choice.setting.label}: {choice.reason}.")
    return registry.build(choice.setting, pair, verify=options.verify)


def served_name(model: str) -> str:
    """What requests call a model: its folder's name, its GGUF file's, or a hub's id."""
    path = Path(model)
    if gguf.is_gguf(path):
        return Path(model.rpartition(":")[2]).stem
    if not path.exists():
        return model.partition("@")[0]
    return name_of(path.parent if path.is_file() else path)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


@contextlib.contextmanager
def _ending_at(number: signal.Signals) -> Iterator[None]:
    """Lets a signal end the process with exit code 0 while it loads; a server has its own way."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, leave)
    try:
        yield
    finally:
        signal.signal(number, before)


def keys_of(options: Serve) -> tuple[str, ...]:
    """The keys that requests may bear; a name without one would open the server to everybody.

    Raises:
      ValueError: there is such a name.
    """
    name = "--api-key" if options.api_key is not None else _KEY
    given = os.environ.get(_KEY) if options.api_key is None else options.api_key
    keys = _listed(given)
    if given is not None and not keys:
        raise ValueError(f"{name} is {given!r} and holds no key; leave it out to ask for none.")
    return keys


def check_engine(options: Serve | Batch) -> None:
    """Checks what can be before anything is loaded.

    Raises:
      ValueError: an option is wrong.
    """
    check_method(options.method, AUTO)
    check_kernels(options.kernels)
    check_rule(options.verify)
    at_least("--rows", options.rows, 1)


def check(options: Serve) -> None:
    """Checks what can be of a server's options before anything is loaded.

    Raises:
      ValueError: an option is wrong.
    """
    check_engine(options)
    for name in ("max_waiting", "max_waiting_tokens"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port is {options.port}; it must lie in [0, {2**16 - 1}].")
    if not (options.drain_seconds >= 0 and math.isfinite(options.drain_seconds)):
        raise ValueError(f"--drain-seconds is {options.drain_seconds}; it must be at least 0.")
