"""What a request may ask, checked on the host, and what the rows' programs are handed for it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from specjax.base.penalties import checked_bias, has_penalty
from specjax.base.pytree import replace
from specjax.base.sampling import NUMBERS, Sampling, checked_number
from specjax.decoding.request import NO_END
from specjax.engine.programs import Parameters
from specjax.engine.request import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Request, RequestError
from specjax.models.config import ModelConfig
from specjax.verify.rules import Rule

_T = TypeVar("_T")
_LONGEST_TPOT = 10**9


def check_requests(
    requests: Iterable[Request], config: ModelConfig, max_model_len: int, rule: Rule
) -> list[tuple[Request, Parameters]]:
    """Copies of requests, which callers cannot change, with their parameters.

    Choices of one prompt that follow each other are checked once: 1,024 checks would take 0.12 s,
    in which a server answers nobody.

    Args:
      requests: of anyone.
      config: of the target.
      max_model_len: the most tokens of a prompt and its continuation together.
      rule: what decides requests without a seed.

    Raises:
      TypeError, RequestError: as `check_request`, or the rule does not go with a request.
    """
    checked: list[tuple[Request, Parameters]] = []
    given: Request | None = None
    for request in requests:
        if given is not None and _differ_by_choice_alone(given, request):
            checked.append(_other_choice(*checked[-1], request.choice))
            continue
        parameters = check_request(request, config, max_model_len)
        _check_rule(request, rule)
        own = dataclasses.replace(
            request,
            prompt=tuple(request.prompt),
            logit_bias=dict(request.logit_bias),
            stop_token_ids=tuple(request.stop_token_ids),
        )
        checked.append((own, parameters))
        given = request
    return checked


def _differ_by_choice_alone(one: Request, other: Request) -> bool:
    """Whether all else is the very same: equal values may be of other types, or have no answer."""
    held = vars(other)
    return all(name == "choice" or value is held[name] for name, value in vars(one).items())


def _other_choice(
    request: Request, parameters: Parameters, choice: Any
) -> tuple[Request, Parameters]:
    """The same with another choice."""
    changed = replace(parameters, choice=_checked_choice(choice))
    return dataclasses.replace(request, choice=choice), changed


def check_request(request: Request, config: ModelConfig, max_model_len: int) -> Parameters:
    """The request's parameters as the rows' programs take them, but for a key without a seed.

    Raises:
      TypeError: a field is of another type than it must be.
      RequestError: a field, which it names, is out of its range, or the prompt does not fit.
    """
    _check_prompt(request, config, max_model_len)
    numbers = {
        name: _of_field(name, checked_number, name, getattr(request, name), 1) for name in NUMBERS
    }
    sampling = Sampling(**numbers, kind=None)
    _of_field("logit_bias", checked_bias, request.logit_bias, config.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(request, name)
        if value is not None:
            _check_integer(name, value, 0, MAX_LOGPROBS)
    if request.seed is not None:
        _check_integer("seed", request.seed, -(2**63), 2**64 - 1)
    choice = _checked_choice(request.choice)
    _check_tpot(request.max_tpot_ms)
    _check_grammar(request, config)
    naive = request.seed is not None and request.temperature > 0  # at 0 all rules decide alike
    return Parameters(
        sampling=sampling,
        max_new_tokens=_integer(request.max_new_tokens),
        end_ids=_end_ids(request, config),
        key=key_of(0 if request.seed is None else request.seed)[None],
        choice=choice,
        naive=_integer(naive),
        penalized=_integer(has_penalty(sampling) or bool(request.logit_bias)),
        grammar=_integer(0),
    )


def _of_field(field: str, check: Callable[..., _T], *arguments: Any) -> _T:
    """What a check gives that names no field where it refuses."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise RequestError(str(error), field) from None


def _integer(value: int) -> np.ndarray:
    return np.asarray([value], np.int32)


def key_of(seed: int) -> np.ndarray:
    """The words of `jax.random.key(seed)` for 32 bits; other seeds are taken modulo 2^64."""
    both = seed % (2**32 if -(2**31) <= seed < 0 else 2**64)
    return np.asarray([both >> 32, both % 2**32], np.uint32)


def tokens_of(prompt: Sequence[int], vocabulary: int) -> np.ndarray:
    """Which tokens of the vocabulary a prompt holds."""
    found = np.zeros(vocabulary, bool)
    found[list(prompt)] = True
    return found


def bias_of(request: Request, vocabulary: int) -> np.ndarray:
    """What is added to the logit of each token."""
    found = np.zeros(vocabulary, np.float32)
    for token, value in request.logit_bias.items():
        found[token] = value
    return found


def _end_ids(request: Request, config: ModelConfig) -> np.ndarray:
    own = list(request.stop_token_ids)
    if len(own) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids holds {len(own)} tokens; at most {MAX_STOP_TOKEN_IDS} are taken."
        raise RequestError(message, "stop_token_ids")
    for token in own:
        _check_integer("stop_token_ids", token, 0, config.vocab_size - 1)
    ignored = request.ignore_eos and request.grammar is None
    ends = own if ignored else [*config.eos_ids, *own]
    spare = [NO_END] * (len(config.eos_ids) + MAX_STOP_TOKEN_IDS - len(ends))
    return np.asarray([[*ends, *spare]], np.int32)


def _check_rule(request: Request, rule: Rule) -> None:
    if rule.greedy_only and request.temperature > 0 and request.seed is None:
        raise RequestError(
            f"temperature is {request.temperature:g}; this engine's rule, {rule.name}, needs 0.",
            "temperature",
        )


def _check_prompt(request: Request, config: ModelConfig, max_model_len: int) -> None:
    prompt, vocabulary = request.prompt, config.vocab_size
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt is a {type(prompt).__name__}; it must be a list of token ids.")
    if not prompt:
        raise RequestError("prompt is empty; it needs at least one token.", "prompt")
    plain = set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocabulary
    for token in () if plain else prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"prompt holds {token!r}; token ids are integers.")
        if not 0 <= token < vocabulary:
            message = f"prompt holds token {token}; the vocabulary has {vocabulary}."
            raise RequestError(message, "prompt")
    least = 0 if request.prompt_logprobs is not None else 1
    _check_integer("max_new_tokens", request.max_new_tokens, least, 2**31 - 1)
    if len(prompt) + request.max_new_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and {request.max_new_tokens} are asked for; "
            f"together they exceed the context of {max_model_len}.",
            "prompt",
        )


def _check_tpot(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"max_tpot_ms is {value!r}; it must be a number.")
    if not 0 < value <= _LONGEST_TPOT:
        message = f"max_tpot_ms is {value}; it must be above 0, and {_LONGEST_TPOT} at most."
        raise RequestError(message, "max_tpot_ms")


def _check_grammar(request: Request, config: ModelConfig) -> None:
    grammar = request.grammar
    if grammar is None:
        return
    if not hasattr(grammar, "matcher"):
        raise TypeError(f"grammar is a {type(grammar).__name__}; GrammarCompiler makes one.")
    if not config.eos_ids:
        raise RequestError(
            "grammar is given, whose texts end in an end token; the model has none.", "grammar"
        )


def _checked_choice(choice: Any) -> np.ndarray:
    _check_integer("choice", choice, 0, 2**31 - 1)
    return _integer(choice)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}; it must be an integer.")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must lie in [{low}, {high}].", name)
