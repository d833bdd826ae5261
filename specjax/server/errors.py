"""Errors in OpenAI's shape, those of `/v1/messages` in Anthropic's, and the sentences for bodies
that fit no request.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from typing_extensions import TypedDict

RETRY_SECONDS = 5
"""What clients of a server that is not ready, or no longer, are told to wait."""

_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_MESSAGES = "/v1/messages"
_KINDS_OF_MESSAGES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's names."""
_SHOWN = 80
_LONGEST = 1000
"""Characters of a message, whatever it quotes."""


class Error(TypedDict):
    """What is wrong, the field that it is about, and a name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The body of every response that is an error."""

    error: Error


class NamedError(TypedDict):
    """What is wrong, and its kind."""

    type: str
    message: str


class MessagesErrorResponse(TypedDict):
    """The body of every response of `/v1/messages` that is an error."""

    type: Literal["error"]
    error: NamedError


class ApiError(HTTPException):
    """An answer other than the one that was asked for.

    Args:
      status: of HTTP.
      message: a sentence.
      param: the field that it is about.
      code: OpenAI's name for it, if it has one.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, shortened(message, _LONGEST), headers)
        self.param = None if param is None else shortened(param, _LONGEST)
        self.code = code

    def content(self) -> ErrorResponse:
        """The response's body."""
        kind = _KINDS.get(self.status_code, "invalid_request_error")
        return {
            "error": {
                "message": self.detail,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def content_of_messages(self) -> MessagesErrorResponse:
        """The response's body in Anthropic's shape."""
        kind = _KINDS_OF_MESSAGES.get(self.status_code, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.detail}}

    def content_at(self, path: str) -> ErrorResponse | MessagesErrorResponse:
        """The response's body in the shape of the API that has a path."""
        of_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
        return self.content_of_messages() if of_messages else self.content()


def shortened(text: str, length: int = _SHOWN) -> str:
    """The beginning of a text that a client may have made very long."""
    return text if len(text) <= length else f"{text[:length]}..."


def unavailable(message: str, code: str) -> ApiError:
    """A 503 that says when to try again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def queue_full(
    message: str, retry_after: int = RETRY_SECONDS, param: str | None = None
) -> ApiError:
    """A 429 that says when to try again."""
    return ApiError(
        429, message, param=param, code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after)},
    )  # fmt: skip


def respond_to_api_error(request: HTTPConnection, error: Exception) -> Response:
    """The response to an `ApiError`, or to what the router raises (404, 405)."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        allow = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        error = ApiError(error.status_code, f"{error.detail}.", headers=allow)
    content = error.content_at(request.scope["path"])
    return JSONResponse(content, error.status_code, error.headers)


def _allowed(request: HTTPConnection) -> str:
    """The methods of all routes of a path, of which the router names the first one's."""
    routes: list[Route] = request.app.state.routes
    own = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for each in own for method in each.methods or ()}))


def respond_to_failure(request: Request, error: Exception) -> Response:
    """The response to an error of the server itself; the log has its traceback.

    uvicorn closes the connection behind it, which the client must know.
    """
    message = f"The server failed: {type(error).__name__}."
    headers = {"Connection": "close"}
    failure = ApiError(500, message, code="internal_error", headers=headers)
    return respond_to_api_error(request, failure)


def respond_to_invalid_body(request: Request, error: Exception) -> Response:
    """The 400 to a body that is no request of this route: one sentence about one field."""
    assert isinstance(error, RequestValidationError)
    message, param = sentence(error.errors(), error.body)
    return respond_to_api_error(request, ApiError(400, message, param=param))


def sentence(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None]:
    """One sentence about what is wrong in a body, and the field that it names.

    Where a field may have several types, the errors are those of each; the ones that got furthest
    into the value are about the type that was meant.

    Args:
      errors: pydantic's, at least one.
      body: what was validated.
    """
    field = errors[0]["loc"][1:2]
    located = [(*_located(each, body), each) for each in errors if each["loc"][1:2] == field]
    path, value, error = max(located, key=lambda each: _depth(each[0]))
    wrong = [_requirement(each) for there, _, each in located if there == path]
    name = dotted(path)
    if not path:
        return f"The body must be a JSON object; it is {shown(value)}.", None
    if error["type"] == "missing":
        return f"{name} is missing.", name
    return f"{name}: {_any_of(wrong)}; it is {shown(value)}.", name


def _located(error: Mapping[str, Any], body: Any) -> tuple[list[str | int], Any]:
    """The path of names and places to a wrong value, without pydantic's names of types."""
    path: list[str | int] = []
    steps = error["loc"][1:]
    for place, step in enumerate(steps):
        if isinstance(body, dict) and place + 1 == len(steps) and error["type"] == "missing":
            return [*path, step], None
        if step == "[key]":
            return path, path[-1]
        inside = isinstance(body, dict) and step in body
        if inside or (isinstance(body, list) and isinstance(step, int) and step < len(body)):
            path.append(step)
            body = body[step]
    return path, body


def _depth(path: Sequence[str | int]) -> tuple[int, int]:
    """How far into a value an error is: levels, then places of a list."""
    last = path[-1] if path else 0
    return len(path), last if isinstance(last, int) else 0


def dotted(path: Sequence[str | int]) -> str:
    """A field's name in sentences: `messages[0].name`. Long names are cut."""
    steps = (f"[{each}]" if isinstance(each, int) else f".{shortened(each)}" for each in path)
    return "".join(steps).removeprefix(".")


def unknown(name: str, known: Sequence[str]) -> str:
    """The sentence about a field that is none of the known ones; it names the nearest."""
    near = difflib.get_close_matches(name, known, 1)
    return f"{name} is no field of this request" + (f"; there is {near[0]}." if near else ".")


def _requirement(error: Mapping[str, Any]) -> str:
    """What pydantic asks of a value, as the end of a sentence."""
    message = error["msg"].removeprefix("Input ").split(" after validation")[0]
    return message[:1].lower() + message[1:]


def _any_of(wrong: Sequence[str]) -> str:
    first, *others = dict.fromkeys(wrong)
    return " or ".join([first, *(each.removeprefix("should be ") for each in others)])


def shown(value: Any) -> str:
    """A value in sentences: bounded, lists and objects by their sizes."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, bytes):
        return "no JSON"
    part = value[: _SHOWN + 1] if isinstance(value, str) else value
    return shortened(json.dumps(part, ensure_ascii=False))
