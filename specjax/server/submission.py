"""From what a client asks for to an engine's requests."""

from collections.abc import Sequence
from typing import Any

from specjax.engine.request import Request
from specjax.server.errors import ApiError
from specjax.server.options import ServerOptions
from specjax.server.protocol import GenerationRequest
from specjax.server.service import Service

_DIRECT = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "max_tpot_ms",
)
"""Fields that mean the same to the engine; null is the server's default, or else the engine's, but
for the temperature."""


def check_limits(body: GenerationRequest, options: ServerOptions) -> None:
    """Refuses more choices and longer stops than this server allows.

    Raises:
      ApiError: 400.
    """
    if body.n is not None and body.n > options.max_choices:
        raise _beyond("n", body.n, options.max_choices)
    stops = stops_of(body)
    if len(stops) > options.max_stops:
        raise _beyond("stop", len(stops), options.max_stops, "strings")
    longest = max(map(len, stops), default=0)
    if longest > options.max_stop_length:
        raise _beyond("stop", longest, options.max_stop_length, "characters")
    if body.stream_options is not None and not body.stream:
        message = "stream_options may only be given where stream is true."
        raise ApiError(400, message, param="stream_options")


def _beyond(name: str, value: int, limit: int, unit: str = "") -> ApiError:
    has = f"has {value:,} {unit}; it may have" if unit else f"is {value:,}; it may be"
    return ApiError(400, f"{name} {has} at most {limit:,}.", param=name)


def check_prompts(count: int, options: ServerOptions) -> None:
    """Refuses longer lists of prompts than this server allows.

    Raises:
      ApiError: 400.
    """
    if count > options.max_prompts:
        raise _beyond("prompt", count, options.max_prompts, "prompts")


def stops_of(body: GenerationRequest) -> list[str]:
    """The stop strings of a request."""
    if body.stop is None:
        return []
    return [body.stop] if isinstance(body.stop, str) else body.stop


def new_tokens(
    service: Service, asked: int | None, default: int | None, prompt: Sequence[int], param: str
) -> int:
    """The longest continuation of a prompt: what was asked for, or the default if it has room.

    Args:
      service: of the engine.
      asked: the request's own limit.
      default: the limit where it has none, if the server has no smaller one; None takes all the
        room.
      prompt: token ids.
      param: the field that the prompt came in.

    Raises:
      ApiError: the prompt is empty, or too long (400).
    """
    most = service.engine.max_model_len
    if not prompt:
        raise ApiError(400, f"{param} has no tokens.", param=param)
    room = most - len(prompt)
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {most} tokens, but {len(prompt) + wanted} "
            f"were asked for: {len(prompt)} in {param} and {wanted} to be generated.",
            param=param,
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    limits = default, service.options.defaults.get("max_tokens"), room
    return min(int(limit) for limit in limits if limit is not None)


def requests_of(
    service: Service, body: GenerationRequest, prompt: Sequence[int], **more: Any
) -> list[Request]:
    """The engine's requests for all choices of a prompt.

    Args:
      service: of the engine.
      body: what was asked for.
      prompt: token ids.
      more: further fields of the requests.
    """
    asked = {name: getattr(body, name) for name in (*_DIRECT, "top_k")}
    defaults = {n: value for n, value in service.options.defaults.items() if n in asked}
    own = {n: value for n, value in asked.items() if value is not None}
    given = {"temperature": 1.0} | defaults | own
    if "top_k" in given:
        given["top_k"] = min(max(given["top_k"], 0), service.engine.vocab_size)
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    service.check_ids(list(bias), "logit_bias")
    service.check_ids(body.stop_token_ids or [], "stop_token_ids")
    return [
        Request(prompt=prompt, logit_bias=bias, choice=choice, **given, **more)
        for choice in range(body.n or 1)
    ]
