"""What the responses of completions and of chats have in common."""

import abc
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.server.choices import Delta
from specjax.server.errors import ApiError
from specjax.server.generation import Generation
from specjax.server.protocol import GenerationRequest
from specjax.server.responses import FinishReason
from specjax.server.service import Service

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class Answer(abc.ABC):
    """A response's objects, whole or as events; `choice` and `part` give their shape.

    Args:
      service: for the model's name and the tokens' texts.
      body: what was asked for.
      generation: the choices.
      identity: the response's id.
    """

    whole_kind: str
    chunk_kind: str
    ending = b"data: [DONE]\n\n"
    """Behind a stream's last event."""

    def __init__(
        self, service: Service, body: GenerationRequest, generation: Generation, identity: str
    ) -> None:
        self.texts = service.texts
        self._generation = generation
        self._envelope = {
            "id": identity,
            "object": self.whole_kind,
            "created": int(time.time()),
            "model": service.options.served_model_name,
            "system_fingerprint": None,
        }
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._counts_in_each = options is not None and bool(options.continuous_usage_stats)

    @abc.abstractmethod
    def choice(self, delta: Delta) -> Mapping[str, Any]:
        """A choice of the whole response, of which `delta` is all."""

    @abc.abstractmethod
    def part(self, delta: Delta) -> Mapping[str, Any]:
        """A choice of an event."""

    def failure(self, error: ApiError) -> Mapping[str, Any]:
        """The event that ends a stream in which something failed."""
        return error.content()

    def parts(self, delta: Delta) -> list[Delta]:
        """What one event each gives: the text, then why it ended, as some clients read no text of
        an event that has a `finish_reason`.
        """
        if reason_of(delta) is None or delta.is_empty:
            return [delta]
        text = dataclasses.replace(delta, finish_reason=None)
        return [text, Delta(delta.index, False, "", [], [], [], delta.finish_reason)]

    def whole(self) -> Mapping[str, Any]:
        """The response when all choices have ended."""
        choices = [self.choice(delta) for delta in self._generation.deltas()]
        return self._object(self.whole_kind, choices) | self._counts()

    def chunks(self, deltas: Sequence[Delta]) -> list[Mapping[str, Any]]:
        """The events of the choices that have something to give."""
        parts = [part for delta in deltas for part in self.parts(delta)]
        made = [self._object(self.chunk_kind, [self.part(each)]) for each in parts]
        if not self._usage:
            return list(made)
        usage = self._generation.usage() if self._counts_in_each else None
        return [each | {"usage": usage} for each in made]

    def last(self) -> list[Mapping[str, Any]]:
        """The events behind those of the choices: the usage, if it was asked for."""
        return [self._object(self.chunk_kind, []) | self._counts()] if self._usage else []

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._envelope | {"object": kind, "choices": choices}

    def _counts(self) -> dict[str, Any]:
        return {"usage": self._generation.usage(), "metrics": self._generation.speculation()}


def reason_of(delta: Delta) -> FinishReason | None:
    """Why a choice ended as OpenAI names it; None where it goes on, or an error follows."""
    match delta.finish_reason:
        case "stop" | "length" | "tool_calls" as reason:
            return reason
        case _:
            return None


def finite(logprob: float) -> float:
    """A log probability as JSON can have it."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
