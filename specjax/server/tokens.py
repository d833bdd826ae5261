"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.server.chat import ids_of_chat, variables_of
from specjax.server.connection import unless_gone
from specjax.server.errors import ApiError
from specjax.server.fields import check_fields
from specjax.server.protocol import DetokenizeRequest, TemplateFields, TokenizeRequest
from specjax.server.responses import DetokenizeResponse, TokenizeResponse
from specjax.server.service import Service, service_of


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a prompt, or of a chat.

    Raises:
      ApiError: there is neither, or both, or a field that goes with the other (400).
    """
    service = service_of(request)
    check_fields(body, request)
    service.check_model(body.model)
    _check(body)
    ids = await unless_gone(request.receive, _ids(service, body))
    names = service.texts.names_of(ids) if body.return_token_strs else None
    content: TokenizeResponse = {
        "count": len(ids),
        "max_model_len": service.engine.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }
    return JSONResponse(content)


def _check(body: TokenizeRequest) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Either prompt or messages must be given.", param="prompt")
    for name in ("add_generation_prompt", *TemplateFields.model_fields):
        if body.messages is None and getattr(body, name) is not None:
            raise ApiError(400, f"{name} does not go with prompt.", param=name)


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        answer = body.add_generation_prompt is not False
        return await ids_of_chat(
            service, body.messages, variables_of(service, body),
            answer=answer, special=bool(body.add_special_tokens),
        )  # fmt: skip
    return await service.encode(body.prompt or "", special=body.add_special_tokens is not False)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, special ones included.

    Raises:
      ApiError: one of them is none of the model's (400).
    """
    service = service_of(request)
    check_fields(body, request)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    text = await service.run_apart(
        len(body.tokens), lambda: service.texts.decode(body.tokens, special=True)
    )
    content: DetokenizeResponse = {"prompt": text}
    return JSONResponse(content)
