"""What responses to requests for texts have in common."""

import abc
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax.server.choices import Delta
from specjax.server.generation import Generation
from specjax.server.protocol import GenerationRequest
from specjax.server.responses import FinishReason
from specjax.server.service import Service

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class Answer(abc.ABC):
    """What a response says, whole or as events."""

    ending = b""
    """Behind a stream's last event."""

    @abc.abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """The response when all choices have ended."""

    @abc.abstractmethod
    def chunks(self, deltas: Sequence[Delta]) -> list[Mapping[str, Any]]:
        """The events of the choices that have something to give."""

    @abc.abstractmethod
    def last(self) -> list[Mapping[str, Any]]:
        """The events behind those of the choices."""


class ObjectAnswer(Answer):
    """An answer of one choice as an object, and events that have a type.

    Args:
      service: for the model's name.
      generation: the choice.
      read: what a delta says in parts.
      add: adds that to the object; gives the events of it.
      identity: the response's id.
    """

    def __init__(
        self,
        service: Service,
        generation: Generation,
        read: Callable[[Delta], Delta],
        add: Callable[[Delta], Iterator[dict[str, Any]]],
        identity: str,
    ) -> None:
        self._generation, self._read, self._add = generation, read, add
        self._identity, self._model = identity, service.options.served_model_name
        self._begun = False
        self._reason: str | None = None

    @abc.abstractmethod
    def _first(self) -> list[dict[str, Any]]:
        """The events before any of the choice."""

    @abc.abstractmethod
    def _ended(self) -> dict[str, Any]:
        """The object when the choice has ended."""

    def whole(self) -> Mapping[str, Any]:
        """The object when the choice has ended."""
        for delta in self._generation.deltas():
            self._events_of(delta)
        return self._ended()

    def chunks(self, deltas: Sequence[Delta]) -> list[Mapping[str, Any]]:
        """The events of what came."""
        events: list[Mapping[str, Any]] = []
        if deltas and not self._begun:
            self._begun = True
            events += self._first()
        for delta in deltas:
            events += self._events_of(delta)
        return events

    def _events_of(self, delta: Delta) -> list[dict[str, Any]]:
        own = self._read(delta)
        self._reason = own.finish_reason or self._reason
        return list(self._add(own))


class ChoicesAnswer(Answer):
    """An answer as OpenAI's completions and chats have it; `choice` and `part` give its shape.

    Args:
      service: for the model's name and the tokens' texts.
      body: what was asked for.
      generation: the choices.
      identity: the response's id.
    """

    whole_kind: str
    chunk_kind: str
    ending = b"data: [DONE]\n\n"

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
