"""From what a client asks for to an engine's requests."""

from collections.abc import Sequence
from typing import Any

from specjax.engine.request import MAX_STOP_TOKEN_IDS, Request
from specjax.server.errors import ApiError, shown
from specjax.server.options import ServerOptions
from specjax.server.protocol import GenerationRequest
from specjax.server.service import Service
from specjax.server.stops import end_ids_of

ANY_SEED = -1
"""The seed of llama.cpp's and vLLM's clients that have none."""

_DIRECT = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "max_tpot_ms",
)
"""Fields that mean the same to the engine; null is the server's default, or else the engine's, but
for the temperature."""

_WINDOWS = ("repeat_last_n", "penalty_last_n", "repetition_penalty_range", "rep_pen_range")
"""How many of the last tokens others' penalties look at; -1 is all."""


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
    _check_window(body)
    if body.stream_options is not None and not body.stream:
        message = "stream_options may only be given where stream is true."
        raise ApiError(400, message, param="stream_options")


def _check_window(body: GenerationRequest) -> None:
    """Refuses penalties of the last tokens only: those here are of all."""
    extra = body.model_extra or {}
    windows = {name: extra[name] for name in _WINDOWS if extra.get(name) not in (None, -1)}
    off = body.repetition_penalty in (None, 1)
    if windows and not (off and not body.presence_penalty and not body.frequency_penalty):
        name, value = next(iter(windows.items()))
        message = f"{name} is not supported beside a penalty: should be -1; it is {shown(value)}."
        raise ApiError(400, message, param=name)


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
      asked: the request's own limit; -1 takes all the room.
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
    wanted = 1 if asked in (None, -1) else asked
    if wanted > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {most} tokens, but {len(prompt) + wanted} "
            f"were asked for: {len(prompt)} in {param} and {wanted} to be generated.",
            param=param,
            code="context_length_exceeded",
        )
    if asked is not None:
        return room if asked == -1 else asked
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
    if ends := _end_ids(service, body):
        given["stop_token_ids"] = ends
    if body.seed == ANY_SEED:
        del given["seed"]
    given["has_stop_strings"] = bool(stops_of(body))
    return [
        Request(prompt=prompt, logit_bias=bias, choice=choice, **given, **more)
        for choice in range(body.n or 1)
    ]


def _end_ids(service: Service, body: GenerationRequest) -> list[int]:
    """The tokens that a request names as its ends, and stops that are special tokens.

    Those that the engine has no room for end the text where it is made.
    """
    asked = body.stop_token_ids or []
    found = end_ids_of(stops_of(body), service.texts.special)
    more = [each for each in found if each < service.engine.vocab_size and each not in asked]
    return [*asked, *more][: max(MAX_STOP_TOKEN_IDS, len(asked))]
