"""Responses of `/v1/responses` that others may go on from, in memory."""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.server.errors import ApiError

_MOST, _MOST_BYTES = 1024, 32 << 20
"""Responses that are kept, and what they and the messages up to them have as JSON."""
_BEGINNING, _END = "resp_", "-"
"""What is around a replica's name in the ids of its responses."""


def response_id(request: str, replica: str) -> str:
    """The id of a request's response; it names the replica that keeps it, if there are several."""
    return f"{_BEGINNING}{replica}{_END}{request}" if replica else f"{_BEGINNING}{request}"


def replica_of(identity: str) -> str:
    """The replica that keeps a response; empty if its id names none."""
    name, end, _ = identity.removeprefix(_BEGINNING).partition(_END)
    return name if end and identity.startswith(_BEGINNING) else ""


class Stored:
    """The last responses, with the messages up to each, for those that go on from one."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._bytes = 0

    def add(self, messages: Sequence[Mapping[str, Any]], response: dict[str, Any]) -> None:
        """Keeps one, and forgets the oldest for it."""
        own = json.dumps({"messages": messages, "response": response}).encode()
        self._kept[response["id"]] = own
        self._bytes += len(own)
        while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
            _, old = self._kept.popitem(last=False)
            self._bytes -= len(old)

    def messages(self, identity: str) -> list[dict[str, Any]]:
        """The messages up to a response, its own too.

        Raises:
          ApiError: it is not known (404).
        """
        return self._of(identity)["messages"]

    def response(self, identity: str) -> dict[str, Any]:
        """A response. Raises: see `messages`."""
        return self._of(identity)["response"]

    def remove(self, identity: str) -> None:
        """Forgets one. Raises: see `messages`."""
        self._bytes -= len(self._held(identity))
        del self._kept[identity]

    def _of(self, identity: str) -> dict[str, Any]:
        return json.loads(self._held(identity))

    def _held(self, identity: str) -> bytes:
        found = self._kept.get(identity)
        if found is None:
            message = f"There is no response {identity[:80]!r}; this server keeps the last {_MOST}."
            raise ApiError(404, message, param="previous_response_id", code="response_not_found")
        return found
