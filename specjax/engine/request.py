"""What is asked of an engine and what it gives, as plain values: no jax, no tokenizer, no HTTP."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.base.grammars import Grammar

MAX_LOGPROBS = 20
"""The most tokens whose log probabilities may be asked for at a place, as in OpenAI's API."""

MAX_STOP_TOKEN_IDS = 16
"""End tokens that a request may name beside the model's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: the longest continuation; 0 gives only the prompt's log probabilities.
      temperature: 0 takes the most likely token.
      top_k: sample among this many tokens only; 0 is off.
      top_p: sample among the likeliest tokens of this total probability; 1 is off.
      min_p: leave out tokens below this share of the likeliest one's probability; 0 is off.
      presence_penalty: taken from the logit of every token that the continuation has.
      frequency_penalty: taken from it once for each time that the continuation has it.
      repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens
        that the prompt or the continuation has; 1 is off.
      logit_bias: added to the logits of tokens by their ids.
      seed: names the random numbers; the request then gives the same text whatever runs beside it,
        up to rounding: that of `generate` with `jax.random.key(seed)` and the naive rule. None
        draws them from the engine's own.
      choice: which of several continuations of one seed this is.
      stop_token_ids: end the continuation beside the model's own end tokens.
      ignore_eos: whether the model's end tokens end nothing.
      has_stop_strings: whether the caller looks for what ends the text, and aborts it there: it is
        then a burst late at most, as the next one waits a moment for who reads.
      logprobs: for each token its log probability and those of so many likeliest tokens; None gives
        none.
      prompt_logprobs: the same for the prompt's tokens.
      max_tpot_ms: milliseconds a token, from the first to the last, that it should take at most;
        the engine honours it where it can.
      grammar: what the continuation must match (see `specjax.GrammarCompiler`); it ends with one of
        the model's end tokens then, whatever `ignore_eos` says.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    choice: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    has_stop_strings: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tpot_ms: float | None = None
    grammar: "Grammar | None" = None


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The target's log probability of a token at a place, and the likeliest tokens' there.

    They are those of its logits as they are: before penalties, bias and temperature.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def of_likeliest(self, count: int | None) -> "Logprob":
        """The same with so many of the likeliest tokens; None keeps all."""
        return Logprob(self.logprob, self.top[:count])


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a burst of steps gave a request.

    `finish_reason` is None while it goes on; then "stop" (an end token, which is the last of
    `ids`), "length", "abort" or "error". `logprobs` is empty where none were asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None


@dataclasses.dataclass
class Statistics:
    """Counts of a request, or of all of an engine's.

    `accepted_at[i]` counts the steps that accepted a drafted token at depth i + 1; `tpot_targets`
    the requests that ended and had asked for their tokens in time, `tpot_met` those that had them.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    tpot_targets: int = 0
    tpot_met: int = 0

    def count_steps(
        self, tokens: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Counts what steps of a row gave, drafted and accepted."""
        self.steps += len(tokens)
        self.generated_tokens += sum(tokens)
        self.draft_tokens += sum(drafted)
        self.accepted_tokens += sum(accepted)
        for deepest in filter(None, accepted):
            for depth in range(deepest):
                self.accepted_at[depth] += 1

    def count_target(self, tpot_ms: float, most: float | None) -> None:
        """Counts a request that ended, if it asked for so many milliseconds a token at most."""
        if most is not None:
            self.tpot_targets += 1
            self.tpot_met += tpot_ms <= most


class RequestError(ValueError):
    """A request asks for what cannot be; `field` of `Request` does, or None in particular."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(RuntimeError):
    """The queue holds as many requests, or prompt tokens, as it may; `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(RuntimeError):
    """The engine takes no more requests: it drains, has stopped or has failed."""
