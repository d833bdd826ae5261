"""One line of JSON for each request; never its text."""

import asyncio
import dataclasses
import json
import logging
import sys
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.server.errors import unknown

if TYPE_CHECKING:
    from specjax.server.generation import Generation

LOGGER = logging.getLogger("specjax.server.requests")
_FIELDS = logging.getLogger("specjax.server.fields")
_LOGGED = 256
"""Names of ignored fields that are logged, each once: clients may send any number."""
_QUIET = ("/health", "/ready", "/metrics", "/")
_WATCHED = ("/debug/", "/page/")
"""Routes that an open live page asks for again and again begin with one of these."""
_KEY = "specjax.record"
_ROUTE = 200
"""Characters of a path that are logged."""


class PanicError(Exception):
    """What a library raised that is no `Exception`, such as a panic of its Rust."""


@dataclasses.dataclass
class Record:
    """What is known of a request; `id` is in its response too."""

    route: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    started: float = dataclasses.field(default_factory=time.monotonic)
    status: int | None = None
    complete: bool = False
    client_aborted: bool = False
    ignored: str = ""
    """Names of fields that were ignored, as the response's header has them."""
    generation: "Generation | None" = None

    def line(self) -> dict[str, Any]:
        """The fields of its log line."""
        known = {
            "id": self.id,
            "route": self.route,
            "status": self.status,
            "client_aborted": self.client_aborted,
            "seconds": round(time.monotonic() - self.started, 6),
        }
        if self.generation is None:
            return known
        usage, metrics = self.generation.usage(), self.generation.speculation()
        speculation = metrics["speculative_decoding"]
        return known | {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish_reasons": [each.finish_reason or "abort" for each in self.generation.choices],
            "ttft_s": self.generation.first_token_seconds,
            "mean_acceptance_length": speculation and speculation["mean_acceptance_length"],
        }


def record_of(request: HTTPConnection) -> Record:
    """The record of a request that came through `RequestLog`."""
    return request.scope[_KEY]


class RequestLog:
    """Keeps a record of each request and logs it when its response has ended, or could not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = Record(scope["path"][:_ROUTE])

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.complete:
                record.client_aborted = True
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = [(b"x-request-id", record.id.encode())]
                if record.ignored:
                    own.append((b"x-ignored-fields", record.ignored.encode()))
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)
            record.complete |= message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )

        try:
            await self._app(scope, watched_receive, watched_send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except Exception:
            record.status = 500
            raise
        except BaseException as error:
            record.status = 500
            raise PanicError(f"{type(error).__name__}: {error}") from error
        finally:
            if record.route not in _QUIET and not record.route.startswith(_WATCHED):
                LOGGER.info("request", extra={"fields": record.line()})


class IgnoredFields:
    """Names of ignored fields, each of which is logged once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Sequence[str], known: Sequence[str]) -> None:
        """Logs those that are new, with the known field that they resemble."""
        for name in names:
            if name in self._logged or len(self._logged) > _LOGGED:
                continue
            self._logged.add(name)
            if len(self._logged) > _LOGGED:
                _FIELDS.warning("further unknown fields are ignored without a line")
                return
            said = unknown(name, () if "." in name else known)
            _FIELDS.warning("%s It is ignored.", said, extra={"fields": {"ignored_field": name}})


class _Lines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": record.created, "level": record.levelname, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Sends the server's log, and what uvicorn warns of, to standard error as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name, level in (("specjax.server", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
