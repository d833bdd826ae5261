"""`/v1/completions`: continuations of prompts."""

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.engine.request import Logprob
from specjax.server.answer import ChoicesAnswer, finite, reason_of
from specjax.server.choices import Delta, Echo, echo_of
from specjax.server.connection import respond, unless_gone
from specjax.server.errors import ApiError
from specjax.server.fields import check_fields
from specjax.server.generation import Generation, Prompt, submit
from specjax.server.log import record_of
from specjax.server.protocol import CompletionRequest
from specjax.server.responses import CompletionChoice, CompletionLogprobs
from specjax.server.service import Service, service_of
from specjax.server.structured import grammar_of
from specjax.server.submission import (
    check_limits,
    check_prompts,
    new_tokens,
    requests_of,
    stops_of,
)

if TYPE_CHECKING:
    from specjax.grammar.compiling import Grammar

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues prompts; in a stream if asked for.

    Raises:
      ApiError: the request cannot be served.
      ClientGoneError: the client went away.
    """
    service, record = service_of(request), record_of(request)
    check_fields(body, request)
    service.check_model(body.model)
    _check(body, service)
    prompts = await unless_gone(request.receive, _all_prompts(service, body))
    generation = await submit(service, prompts, stops_of(body), record.started)
    record.generation = generation
    return await respond(
        request, generation, _Completion(service, body, generation, record.id), bool(body.stream)
    )


def _check(body: CompletionRequest, service: Service) -> None:
    check_limits(body, service.options)
    check_prompts(len(_prompts(body.prompt)), service.options)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of is {body.best_of}; it is not supported unless it is n, {body.n or 1}."
        raise ApiError(400, message, param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens may be 0 only where echo is true.", param="max_tokens")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one, or those of a list."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [each for each in prompt if not isinstance(each, int)]
    return texts or [[each for each in prompt if isinstance(each, int)]]


async def _all_prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    prompts, grammar = [], await grammar_of(service, body)
    for given in _prompts(body.prompt):
        prompts.append(await _prompt(service, body, given, grammar))
        await asyncio.sleep(0)  # others are answered between two long lists of token ids
    return prompts


async def _prompt(
    service: Service, body: CompletionRequest, given: str | list[int], grammar: "Grammar | None"
) -> Prompt:
    """A prompt's tokens and the requests of its choices.

    Raises:
      ApiError: it is too long, or has tokens that the model does not have (400).
    """
    text = given if isinstance(given, str) else None
    special = body.add_special_tokens is not False
    ids = given if not isinstance(given, str) else await service.encode(given, special=special)
    most = new_tokens(service, body.max_tokens, DEFAULT_MAX_TOKENS, ids, "prompt")
    service.check_ids(ids, "prompt")
    requests = requests_of(
        service, body, ids,
        max_new_tokens=most,
        logprobs=body.logprobs,
        prompt_logprobs=_of_prompt(body),
        grammar=grammar,
    )  # fmt: skip
    return Prompt(ids, await _echo(service, body, ids, text), requests)


def _of_prompt(body: CompletionRequest) -> int | None:
    """How many log probabilities of a prompt are needed; nothing else makes no new tokens."""
    wanted = body.logprobs if body.echo else None
    return 0 if wanted is None and body.max_tokens == 0 else wanted


async def _echo(
    service: Service, body: CompletionRequest, ids: list[int], text: str | None
) -> Echo | None:
    if not body.echo:
        return None
    wanted = body.logprobs is not None
    return await service.run_apart(
        len(ids), lambda: echo_of(service.texts, ids, text, logprobs=wanted)
    )


class _Completion(ChoicesAnswer):
    """A completion's responses."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self, service: Service, body: CompletionRequest, generation: Generation, identity: str
    ) -> None:
        super().__init__(service, body, generation, f"cmpl-{identity}")
        self._logprobs = body.logprobs

    def choice(self, delta: Delta) -> CompletionChoice:
        """A choice, or what an event adds to it."""
        wanted = self._logprobs is not None and delta.ids
        known = logprobs_of(self.texts, delta) if wanted else None
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": known,
            "finish_reason": reason_of(delta),
        }

    part = choice


def logprobs_of(texts: TokenTexts, delta: Delta) -> CompletionLogprobs:
    """The log probabilities of a choice's tokens; the first of an echoed prompt has none."""
    return {
        "tokens": [texts.text_of(token) for token in delta.ids],
        "token_logprobs": [each and finite(each.logprob) for each in delta.logprobs],
        "top_logprobs": [
            each and _top(texts, token, each)
            for token, each in zip(delta.ids, delta.logprobs, strict=True)
        ],
        "text_offset": delta.offsets,
    }


def _top(texts: TokenTexts, token: int, known: Logprob) -> dict[str, float]:
    """The likeliest tokens' log probabilities, and that of the token that came.

    Of tokens with one text the one that came has it, else the likeliest; the others are named by
    their ids.
    """
    top: dict[str, float] = {}
    others = {other: logprob for other, logprob in known.top if other != token}
    for other, logprob in ({token: known.logprob} | others).items():
        text = texts.text_of(other)
        top[f"token_id:{other}" if text in top else text] = finite(logprob)
    return top
