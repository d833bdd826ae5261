"""What the engine believes and does, for whoever watches it: the endpoints behind the live page."""

import codecs
import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.engine.watch import Watched
from specjax.server.errors import ApiError
from specjax.server.service import Service, service_of

_PROMPT = 200
"""Characters of a prompt's end that are shown; as many tokens hold them for sure."""


class Fixed(BaseModel):
    """The body of `POST /debug/speculation`."""

    model_config = ConfigDict(extra="forbid")

    setting: str


async def show_speculation(request: Request) -> Response:
    """What the choice of settings believes and does."""
    return JSONResponse(_report(service_of(request)))


def _report(service: Service) -> dict[str, Any]:
    counts = service.engine.statistics()
    targets = {"requests": counts.tpot_targets, "met": counts.tpot_met}
    return service.engine.report() | {"tpot_targets": targets}


async def fix_speculation(body: Fixed, request: Request) -> Response:
    """Uses one setting from now on, or lets the engine choose again ("auto").

    Raises:
      ApiError: the server was not started with --debug (404), or there is no such setting (400).
    """
    service = service_of(request)
    if not service.options.debug:
        raise ApiError(404, "Settings can be fixed where the server was started with --debug.")
    try:
        service.engine.fix(None if body.setting == "auto" else body.setting)
    except ValueError as error:
        raise ApiError(400, str(error), param="setting") from error
    return JSONResponse(_report(service))


async def show_requests(request: Request) -> Response:
    """The requests that run, with their last tokens and the tree of their last step."""
    service = service_of(request)
    watched = service.engine.watched()
    size = 2000 * len(watched)  # a few hundred tokens each are decoded
    shown = await service.run_apart(size, lambda: [_shown(service, each) for each in watched])
    return JSONResponse({"requests": shown})


def _shown(service: Service, watched: Watched) -> dict[str, Any]:
    texts = service.texts
    nodes = [
        {
            "parent": node.parent,
            "text": texts.text_of(node.token),
            "chance": round(node.chance, 4) if node.chance == node.chance else None,  # not NaN
            "accepted": node.accepted,
        }
        for node in watched.tree
    ]
    return {
        "id": watched.id,
        "row": watched.row,
        "temperature": watched.temperature,
        "max_tpot_ms": watched.max_tpot_ms,
        "steps": watched.steps,
        "tokens": watched.generated,
        "accepted": watched.accepted,
        "prompt": texts.decode(watched.prompt[-_PROMPT:], special=True)[-_PROMPT:],
        "text": _runs(texts, watched.tokens),
        "tree": {"setting": watched.setting, "nodes": nodes} if nodes else None,
    }


def _runs(texts: TokenTexts, tokens: Sequence[tuple[int, bool]]) -> list[dict[str, Any]]:
    """The text of tokens in runs: those that were drafted and accepted, the target's own, ...

    A character that several tokens make is part of the run that ends it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    runs = itertools.groupby(tokens, key=lambda own: own[1])
    return [
        {
            "text": decoder.decode(b"".join(texts.bytes_of(token) for token, _ in run)),
            "accepted": accepted,
        }
        for accepted, run in runs
    ]
