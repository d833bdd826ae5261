"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from starlette.requests import Request
from starlette.responses import Response

from specjax.server.chat import for_template, variables_of
from specjax.server.connection import unless_gone
from specjax.server.errors import ApiError
from specjax.server.fields import check_fields
from specjax.server.protocol import DetokenizeRequest, TemplateFields, TokenizeRequest
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
    content = await unless_gone(request.receive, _content(service, body))
    return Response(content, media_type="application/json")


def _check(body: TokenizeRequest) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Either prompt or messages must be given.", param="prompt")
    for name in ("add_generation_prompt", *TemplateFields.model_fields):
        if body.messages is None and getattr(body, name) is not None:
            raise ApiError(400, f"{name} does not go with prompt.", param=name)


async def _content(service: Service, body: TokenizeRequest) -> bytes:
    names = bool(body.return_token_strs)
    if body.messages is not None:
        answer = body.add_generation_prompt is not False
        chat = for_template(service, body.messages, variables_of(service, body), answer=answer)
        return await service.tokenized_chat(
            *chat, special=bool(body.add_special_tokens), names=names
        )
    special = body.add_special_tokens is not False
    return await service.tokenized(body.prompt or "", special, names)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, special ones included.

    Raises:
      ApiError: one of them is none of the model's (400).
    """
    service = service_of(request)
    check_fields(body, request)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    content = await unless_gone(request.receive, service.detokenized(body.tokens))
    return Response(content, media_type="application/json")
