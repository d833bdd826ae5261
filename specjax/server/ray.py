"""A server of several engines with Ray Serve.

    serve run specjax.server.ray:app model=bundled rows=8 num_replicas=2

Ray's proxies listen. `Ingress` reads requests and chooses a replica for each; a replica of `Engine`
has an engine and the application of `specjax serve` around it, without a socket. This module is an
entry point as the command line is, whose options it takes.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import click
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve import (  # pyright: ignore[reportMissingImports]
    Application,
    deployment,
    get_deployment_handle,
    get_replica_context,
    ingress,
)
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message

from specjax.cli.options import Serve, parsed
from specjax.cli.serve import check, keys_of, prepared
from specjax.cli.values import at_least
from specjax.methods.records import use_compilation_cache
from specjax.server.app import create_app
from specjax.server.log import log_to_stderr
from specjax.server.options import ServerOptions
from specjax.server.process import raise_file_limit, start
from specjax.server.ray_policies import RUNNING, WAITING
from specjax.server.relay import Front, RelayedRequest, ReplicaLostError, answered

_POLICIES = "specjax.server.ray_policies"
_ENGINE = "Engine"
_PROGRAM = "specjax.server.ray:app"
_RAY_S_OWN = ("host", "port")
_OTHERS = 64
"""Requests beside those of the engine, such as for `/metrics`, that a replica has at once."""
_AT_ONCE = 1 << 16
"""Requests that an ingress has at once."""
_HEALTH_SECONDS = 2.0
"""How often Ray asks a replica whether its engine lives."""
_METRICS_SECONDS = 10.0


class OptionError(click.ClickException, ValueError):
    """An option is wrong. `serve run` prints its sentence alone."""


@dataclasses.dataclass(frozen=True)
class Replicated(Serve):
    """The options of `specjax serve`, and how many replicas there are."""

    num_replicas: int = 1
    """Engines, each with the whole model in a process of its own."""
    max_replicas: int | None = None
    """Most engines: there are as many as requests need, num_replicas at least. By default always
    num_replicas."""
    target_waiting: float = 2.0
    """Requests that may wait at a replica, on average, before there are more replicas."""
    num_ingresses: int = 1
    """Processes that read requests and choose a replica for each."""
    num_cpus: float = 1.0
    """Of a replica, by which Ray places it."""
    num_gpus: float = 0.0
    """Of a replica, which sees no others."""
    num_tpus: float = 0.0
    """Of a replica: Ray's resource TPU."""


def app(args: dict[str, Any]) -> Application:
    """The application for `serve run` and Ray's configuration files.

    Args:
      args: options of `specjax serve`, but `host` and `port`, and those of `Replicated`.

    Raises:
      OptionError: one is unknown or wrong.
    """
    options = options_of(args)
    resources = {"TPU": options.num_tpus} if options.num_tpus else {}
    engine = deployment(
        name=_ENGINE,
        max_ongoing_requests=options.rows + options.max_waiting + _OTHERS,
        ray_actor_options={
            "num_cpus": options.num_cpus, "num_gpus": options.num_gpus, "resources": resources
        },
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config={
            "request_router_class": f"{_POLICIES}.PrefixRouter",
            "request_router_kwargs": {"most_ahead": options.rows},
        },
        **_numbers(options),
    )  # fmt: skip
    fronts = deployment(
        name="Ingress",
        num_replicas=options.num_ingresses,
        max_ongoing_requests=_AT_ONCE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.drain_seconds,
    )
    return fronts(ingress(front)()).bind(engine(Engine).bind(options))


def _numbers(options: Replicated) -> dict[str, Any]:
    """How many replicas there are."""
    if options.max_replicas is None:
        return {"num_replicas": options.num_replicas}
    policy = {
        "policy_function": f"{_POLICIES}:RequestsWaiting",
        "policy_kwargs": {"rows": options.rows, "target_waiting": options.target_waiting},
    }
    bounds = {"min_replicas": options.num_replicas, "max_replicas": options.max_replicas}
    return {"autoscaling_config": bounds | {"policy": policy}}


def options_of(args: Mapping[str, Any]) -> Replicated:
    """The options that Ray's arguments name, checked.

    Args:
      args: values by the names of options, with `_` or `-`. Null leaves an option out.

    Raises:
      OptionError: one is unknown or wrong.
    """
    line: list[str] = []
    for name, value in args.items():
        option = str(name).replace("-", "_")
        if option in _RAY_S_OWN:
            raise OptionError(f"{option} is Ray's: name it in its http_options.")
        shown = str(value)  # 1 and 0 are equal to True and False
        if shown.lower() == "true":
            line.append(f"--{option.replace('_', '-')}")
        elif value is not None and shown.lower() != "false":
            line.append(f"--{option.replace('_', '-')}={shown}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            options: Replicated = parsed(Replicated, _PROGRAM, line)
        _check(options)
        return dataclasses.replace(options, api_key=",".join(keys_of(options)) or None)
    except SystemExit:
        said = complaint.getvalue().strip().removeprefix(f"{_PROGRAM}: ")
        raise OptionError(said.partition("; see ")[0] + ".") from None
    except ValueError as error:
        raise OptionError(" ".join(str(error).split())) from error


def _check(options: Replicated) -> None:
    check(options)
    at_least("num_replicas", options.num_replicas, 1)
    at_least("num_ingresses", options.num_ingresses, 1)
    if options.max_replicas is not None and options.max_replicas < options.num_replicas:
        raise ValueError(
            f"max_replicas is {options.max_replicas}; it must be at least num_replicas, "
            f"{options.num_replicas}."
        )
    for name in ("target_waiting", "num_cpus", "num_gpus", "num_tpus"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be at least 0.")


class Engine:
    """A replica: an engine, and the server's application around it.

    Args:
      options: of the server.

    Raises:
      ValueError: an option is wrong, or the pair does not fit.
    """

    def __init__(self, options: Replicated) -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        use_compilation_cache()
        log_to_stderr()
        raise_file_limit()
        self._name = get_replica_context().replica_tag
        self._engine, tokenizer, server = prepared(options, keys_of(options))
        named = dataclasses.replace(server, replica=self._name)
        self._app = create_app(self._engine, tokenizer, named)
        start(self._engine)  # Ray sends requests to a replica once it is made

    async def answer(self, request: RelayedRequest) -> AsyncGenerator[list[Message], None]:
        """The messages of a response."""
        async with contextlib.aclosing(answered(self._app, request)) as answers:
            async for messages in answers:
                yield messages

    async def exposition(self) -> tuple[str, str]:
        """The replica's name, and its metrics as Prometheus reads them."""
        return self._name, self._app.state.service.metrics.exposition().decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray's autoscaler sees."""
        engine = self._engine
        return {RUNNING: engine.num_requests_running, WAITING: engine.num_requests_waiting}

    async def check_health(self) -> None:
        """Raises if the engine has failed: Ray then makes another replica."""
        if self._engine.failure is not None:
            raise RuntimeError(self._engine.failure)


def front() -> ASGIApp:
    """The application of an ingress; Ray calls this in its process."""
    engine = get_deployment_handle(_ENGINE)
    streaming: Any = engine.options(stream=True)

    async def answers(request: RelayedRequest) -> AsyncGenerator[list[Message], None]:
        response = streaming.answer.remote(request)
        try:
            async for messages in response:
                yield messages
        except (RayActorError, RayServeException) as error:
            raise ReplicaLostError from error
        finally:
            response.cancel()

    async def expositions() -> Mapping[str, str]:
        every = engine.broadcast("exposition").results_async(
            timeout_s=_METRICS_SECONDS, return_exceptions=True
        )
        return dict(each for each in await every if isinstance(each, tuple))

    options = ServerOptions(served_model_name="")  # for its limits
    middleware = Middleware(Front, answers=answers, expositions=expositions, options=options)
    return Starlette(middleware=[middleware])
