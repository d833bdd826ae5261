"""The application: its routes, who may use them, and what they answer."""

import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specjax.server.body import BoundedRequest
from specjax.server.chat import create_chat_completion
from specjax.server.completions import create_completion
from specjax.server.connection import CLIENT_CLOSED_REQUEST, ClientGoneError
from specjax.server.debug import fix_speculation, show_requests, show_speculation
from specjax.server.errors import (
    RETRY_SECONDS,
    MessagesErrorResponse,
    respond_to_api_error,
    respond_to_failure,
    respond_to_invalid_body,
)
from specjax.server.hosts import HostCheck
from specjax.server.log import RequestLog
from specjax.server.message_route import count_tokens, create_message
from specjax.server.metrics import CONTENT_TYPE
from specjax.server.openapi import Documented, add_get, answer, errors, streamed
from specjax.server.options import ServerOptions
from specjax.server.page import page_routes
from specjax.server.process import listen, serve
from specjax.server.response_route import create_response, delete_response, show_response
from specjax.server.responses import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    InputTokens,
    ModelCard,
    ModelList,
    Readiness,
    Status,
    TokenizeResponse,
    Version,
)
from specjax.server.service import Service, service_of
from specjax.server.tokens import detokenize, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specjax.engine.engine import Engine

_STARTED = int(time.time())


class GuardedRoute(APIRoute):
    """A route that asks for a key, then reads the body within limits, before it answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler behind the checks."""
        answer = super().get_route_handler()
        needs_engine = self.path.startswith("/v1/")

        async def checked(request: Request) -> Response:
            service = service_of(request)
            service.check_key(request)
            if needs_engine:
                service.check_ready()
            return await answer(BoundedRequest(request, service.options))

        return checked


def run(engine: "Engine", tokenizer: "PreTrainedTokenizerFast", options: ServerOptions) -> int:
    """Serves an engine until SIGTERM or SIGINT; gives the exit code.

    It listens at once and starts the engine meanwhile. A signal makes `/ready` fail and lets
    running requests finish within `drain_seconds`; a second one ends the process at once.

    Args:
      engine: not started.
      tokenizer: the model's.
      options: where to listen, names, keys and limits.

    Raises:
      ValueError: nothing can listen at that address.
    """
    with listen(options.host, options.port) as listener:
        return serve(create_app(engine, tokenizer, options), listener)


def create_app(
    engine: "Engine", tokenizer: "PreTrainedTokenizerFast", options: ServerOptions
) -> FastAPI:
    """The application that answers for an engine.

    Args:
      engine: started, or starting in another thread: until it is ready `/ready` and `/v1` say 503.
      tokenizer: the model's.
      options: names, keys and limits.
    """
    app = Documented(
        title="specjax", version=version("specjax"), docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.service = Service(engine, tokenizer, options)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"],
            allow_headers=["*"], expose_headers=["*"], allow_private_network=True,
        )  # fmt: skip
    app.add_middleware(HostCheck, options=options)
    app.add_middleware(RequestLog)
    app.add_exception_handler(HTTPException, respond_to_api_error)
    app.add_exception_handler(RequestValidationError, respond_to_invalid_body)
    app.add_exception_handler(ClientGoneError, _respond_to_nobody)
    app.add_exception_handler(Exception, respond_to_failure)
    routers = _guarded(bool(options.api_keys)), _open(), page_routes()
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    return app


def _respond_to_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _guarded(keys: bool) -> APIRouter:
    """The routes that need a key, if there are keys."""
    schemes = HTTPBearer(auto_error=False), APIKeyHeader(name="X-Api-Key", auto_error=False)
    either = [Depends(scheme) for scheme in schemes] if keys else []
    keyless = (401,) if keys else ()
    common = errors(*keyless)
    router = APIRouter(route_class=GuardedRoute, dependencies=either, responses=common)
    of_body, of_engine = (400, 404, 408, 413, 415), (429, 500, 503)
    body = errors(*of_body)
    engine = body | errors(*of_engine)
    of_messages = errors(*keyless, *of_body, *of_engine, model=MessagesErrorResponse)
    for path, respond, model, responses in (
        ("/v1/completions", create_completion, streamed(CompletionResponse), engine),
        ("/v1/chat/completions", create_chat_completion, streamed(ChatCompletionResponse), engine),
        ("/v1/responses", create_response, streamed(dict[str, Any]), engine),
        ("/v1/messages", create_message, streamed(dict[str, Any]), of_messages),
        ("/v1/messages/count_tokens", count_tokens, answer(InputTokens), of_messages),
        ("/tokenize", tokenize, answer(TokenizeResponse), body),
        ("/detokenize", detokenize, answer(DetokenizeResponse), body),
    ):
        router.add_api_route(path, respond, methods=["POST"], responses=model | responses)
    for path, watch in (
        ("/debug/speculation", show_speculation),
        ("/debug/requests", show_requests),
    ):
        add_get(router, path, watch, include_in_schema=False)
    router.add_api_route(
        "/debug/speculation", fix_speculation, methods=["POST"], include_in_schema=False
    )
    add_get(router, "/v1/responses/{response}", show_response, responses=errors(404, 503))
    router.add_api_route(
        "/v1/responses/{response}", delete_response, methods=["DELETE"], responses=errors(404, 503)
    )
    add_get(router, "/v1/models", list_models, responses=answer(ModelList) | errors(503))
    card = answer(ModelCard) | errors(404, 503)
    add_get(router, "/v1/models/{model:path}", show_model, responses=card)
    return router


def _open() -> APIRouter:
    """The routes for those who watch the server; they need no key."""
    router = APIRouter()
    not_so = {503: {"model": Status, "description": "It is not."}}
    not_yet = {503: {"model": Readiness, "description": "It is not."}}
    add_get(router, "/health", health, responses=answer(Status) | not_so)
    add_get(router, "/ready", ready, responses=answer(Readiness) | not_yet)
    add_get(router, "/version", show_version, responses=answer(Version))
    add_get(router, "/metrics", metrics, response_class=PlainTextResponse)
    return router


def _card(service: Service) -> ModelCard:
    return {
        "id": service.options.served_model_name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "specjax",
        "max_model_len": service.engine.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """The model that is served."""
    models: ModelList = {"object": "list", "data": [_card(service_of(request))]}
    return JSONResponse(models)


async def show_model(model: str, request: Request) -> Response:
    """The model of a name.

    Raises:
      ApiError: it is not served (404).
    """
    service = service_of(request)
    service.check_model(model)
    return JSONResponse(_card(service))


async def health(request: Request) -> Response:
    """Whether the server lives: 200 unless its engine has failed."""
    state = service_of(request).state()
    return JSONResponse({"status": state}, 503 if state == "failed" else 200)


async def ready(request: Request) -> Response:
    """Whether the server takes requests."""
    service = service_of(request)
    state, compiling = service.state(), list(service.engine.settings_compiling)
    headers = None if state == "ready" else {"Retry-After": str(RETRY_SECONDS)}
    body: Readiness = {"status": state, "settings_compiling": compiling}
    return JSONResponse(body, 200 if state == "ready" else 503, headers)


async def show_version() -> Response:
    """The version of specjax."""
    return JSONResponse({"version": version("specjax")})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(service_of(request).metrics.exposition(), media_type=CONTENT_TYPE)
