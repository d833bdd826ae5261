"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.server.chat import ids_of_chat
from specjax.server.connection import unless_gone
from specjax.server.errors import ApiError
from specjax.server.protocol import DetokenizeRequest, TokenizeRequest
from specjax.server.responses import DetokenizeResponse, TokenizeResponse
from specjax.server.service import Service, service_of


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a prompt, or of a chat.

    Raises:
      ApiError: there is neither, or both, or a field that goes with the other (400).
    """
    service = service_of(request)
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
    if body.messages is not None and body.add_special_tokens:
        message = "add_special_tokens does not go with messages: their template has all tokens."
        raise ApiError(400, message, param="add_special_tokens")
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if body.messages is None and getattr(body, name) is not None:
            raise ApiError(400, f"{name} does not go with prompt.", param=name)


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        answer = body.add_generation_prompt is not False
        return await ids_of_chat(service, body.messages, body.chat_template_kwargs, answer=answer)
    return await service.encode(body.prompt or "", special=body.add_special_tokens is not False)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, special ones included.

    Raises:
      ApiError: one of them is none of the model's (400).
    """
    service = service_of(request)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    text = await service.run_apart(
        len(body.tokens), lambda: service.texts.decode(body.tokens, special=True)
    )
    content: DetokenizeResponse = {"prompt": text}
    return JSONResponse(content)
