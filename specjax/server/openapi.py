"""What the OpenAPI document says of responses, beside what FastAPI finds out by itself."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI

from specjax.server.errors import ErrorResponse

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "The body is no request that this server can honour.",
    401: "No key, or a wrong one.",
    404: "Another model than the one that is served.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The server or its engine failed.",
    503: "The server is not ready, or shuts down; Retry-After says when to try again.",
}


def errors(*statuses: int, model: Any = ErrorResponse) -> Responses:
    """Responses that are errors, by default in OpenAI's shape."""
    return {each: {"model": model, "description": _ERRORS[each]} for each in statuses}


def answer(model: Any) -> Responses:
    """The response that was asked for."""
    return {200: {"model": model}}


def streamed(model: Any) -> Responses:
    """The same, or as events."""
    data = {"type": "string", "description": "An object of JSON, or [DONE]."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    events = {"text/event-stream": {"itemSchema": event}}
    description = "The response, or its events where stream is true."
    return {200: {"model": model, "description": description, "content": events}}


def add_get(router: APIRouter, path: str, respond: Callable[..., Any], **options: Any) -> None:
    """Adds a route for GET, and for HEAD, whose response is the same without its body."""
    router.add_api_route(path, respond, **options)
    router.add_api_route(
        path, respond, **options | {"methods": ["HEAD"], "include_in_schema": False}
    )


class Documented(FastAPI):
    """An application without FastAPI's 422: bodies that are no request get a 400 here."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    operation["description"] = operation["description"].split("\n\n")[0]
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
        return super().openapi()
