"""Which request runs in which row, and what a step is made of. No jax, no clock, no threads."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.base.prefix import common_prefix
from specjax.engine.request import QueueFullError, Request
from specjax.goodput.chunks import ChunkCosts, allowed, fastest
from specjax.goodput.policy import RowState

_LEAST_PREFIX = 16
"""Tokens of a common prefix from which on it is copied."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request on its way; `stream` is whoever waits for its tokens."""

    request: Request
    stream: Any = None


@dataclasses.dataclass(eq=False)
class Row:
    """A row of the batch: the tokens that it is known to hold, and whose it is.

    `filled` of the prompt's tokens are read. `left` tokens may still be made, as far as is known,
    while `flying` steps are not read yet, each of which gives one at least. `epoch` counts its
    tenants, so that what a step gave an earlier one is told apart. `prefix_checked`
    says whether other rows were searched for its prompt's prefix when its turn to be read came. A
    free row keeps its tokens for requests that begin as they do. `drafted` of its tokens the draft
    has read for sure; all of them if it is `current`: the last step that was handed over ran it.
    """

    number: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    ticket: Ticket | None = None
    filled: int = 0
    left: int = 0
    flying: int = 0
    epoch: int = 0
    used: int = 0
    prefix_checked: bool = False
    drafted: int = 0
    current: bool = False

    def lag(self, window: int) -> int:
        """Tokens that the draft may not have read, where a step gives `window` at most."""
        return 0 if self.current else len(self.tokens) + self.flying * window - self.drafted

    def leave_draft(self) -> None:
        """Notes that the next step does not run the draft: what is in flight it may lack."""
        if self.current:
            self.current, self.drafted = False, len(self.tokens)

    def state(self, window: int) -> RowState:
        """What a policy knows of it, where a step gives `window` tokens at most."""
        assert self.ticket is not None
        request = self.ticket.request
        return RowState(
            self.ticket, request.temperature, len(self.tokens), self.lag(window),
            self.left - self.flying, _seconds_of(request.max_tpot_ms),
        )  # fmt: skip

    @property
    def reads(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.ticket is not None and self.filled < len(self.ticket.request.prompt)

    @property
    def decodes(self) -> bool:
        """Whether it takes part in steps: those that fly may not give all its tokens."""
        return self.ticket is not None and self.left > self.flying and not self.reads


class Admission(NamedTuple):
    """A request that moves into a row, which takes the first `common` tokens from row `source`.

    Without a source it begins with its first token.
    """

    row: Row
    source: int | None
    common: int


class Chunk(NamedTuple):
    """Tokens of a row's prompt to be read, by a program that takes `size` of them."""

    row: Row
    tokens: list[int]
    size: int

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not read yet, these included."""
        assert self.row.ticket is not None
        return len(self.row.ticket.request.prompt) - self.row.filled


class StepPlan(NamedTuple):
    """The rows of a step, then those that fill it up.

    What fills it up are those that hold least, as a pass reads what its rows hold.
    """

    rows: tuple[Row, ...]
    filling: tuple[int, ...]


class Scheduler:
    """Rows, a bounded queue, and how prompts are read between steps.

    Args:
      rows: how many there are.
      reuses: whether a row may begin with what another holds.
      max_requests: that may wait.
      max_tokens: of prompts that may wait.
    """

    def __init__(
        self,
        rows: int,
        *,
        reuses: bool = True,
        max_requests: int = 1024,
        max_tokens: int = 1 << 20,
    ) -> None:
        self.rows = [Row(number) for number in range(rows)]
        self.waiting: deque[Ticket] = deque()
        self._reuses = reuses
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._tick = 0
        self._reading: deque[Row] = deque()

    @property
    def running(self) -> int:
        """Requests in rows."""
        return sum(row.ticket is not None for row in self.rows)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return sum(len(ticket.request.prompt) for ticket in self.waiting)

    def submit(self, *tickets: Ticket) -> None:
        """Puts requests at the end of the queue, all of them or none.

        Raises:
          QueueFullError: too many requests wait, or too many tokens of prompts.
          ValueError: so many at once can never wait.
        """
        tokens = self.waiting_tokens
        count, own = len(tickets), sum(len(ticket.request.prompt) for ticket in tickets)
        free = sum(row.ticket is None for row in self.rows)
        if count > self._max_requests + len(self.rows):
            raise ValueError(
                f"{count} requests come at once; {len(self.rows)} may run and "
                f"{self._max_requests} wait."
            )
        if len(self.waiting) + count > self._max_requests + free:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait; with {count} more they exceed the "
                f"{self._max_requests} that may.",
                1,
            )
        if count > 1 and own > self._max_tokens:
            raise ValueError(
                f"{own} tokens of prompts come at once; no more than {self._max_tokens} may wait."
            )
        if self.waiting and tokens + own > self._max_tokens:
            raise QueueFullError(
                f"{tokens} tokens of prompts wait; with {own} more they exceed the "
                f"{self._max_tokens} that may.",
                1,
            )
        self.waiting.extend(tickets)

    def withdraw(self, ticket: Ticket) -> bool:
        """Takes a request out of the queue or its row; whether it was there."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            return True
        row = next((row for row in self.rows if row.ticket is ticket), None)
        if row is not None:
            self.free(row)
        return row is not None

    def free(self, row: Row) -> None:
        """The row's request has ended; its tokens stay for others."""
        row.ticket, row.epoch = None, row.epoch + 1
        if row in self._reading:
            self._reading.remove(row)
        self._touch(row)

    def admit(self, may_join: Callable[[Request], bool] = lambda _: True) -> Admission | None:
        """The next request with the row it gets; None if there is no row, or no request.

        Or if it may not join those that run: then it waits, and those behind it do.
        """
        free = [row for row in self.rows if row.ticket is None]
        if not free or not self.waiting or not may_join(self.waiting[0].request):
            return None
        ticket = self.waiting.popleft()
        prompt = list(ticket.request.prompt)
        source, common = self._best_prefix(ticket.request)
        row = min(free, key=lambda row: (row is source, row.used))
        if source is not None and source.ticket is None and 2 * common >= len(source.tokens):
            row = source  # more of it would be of use to this request than to others
        if source is not None:
            self._touch(source)
        row.ticket, row.filled, row.prefix_checked = ticket, common if source else 1, False
        row.left, row.flying = ticket.request.max_new_tokens, 0
        row.current, row.drafted = False, _drafted_of(source, common)
        row.tokens = prompt[: row.filled]
        self._touch(row)
        if row.reads:
            self._reading.append(row)
        return Admission(row, None if source is None else source.number, row.filled)

    def forget(self) -> None:
        """Free rows hold nothing any more that a request could begin with."""
        for row in self.rows:
            if row.ticket is None:
                row.tokens, row.drafted, row.current = [], 0, False

    def prefix(self) -> Admission | None:
        """What the next row to be read may take from another that has read it meanwhile.

        Several requests with one beginning that come at once read it once.
        """
        row = next(iter(self._reading), None)
        if row is None or row.prefix_checked:
            return None
        row.prefix_checked = True
        assert row.ticket is not None
        source, common = self._best_prefix(row.ticket.request)
        if source is None or source is row or common < row.filled + _LEAST_PREFIX:
            return None
        row.filled, row.tokens = common, list(row.ticket.request.prompt[:common])
        row.drafted = _drafted_of(source, common)
        return Admission(row, source.number, common)

    def chunk(self, costs: ChunkCosts, step_seconds: float) -> Chunk | None:
        """The next tokens of a prompt to be read.

        Of the sizes in `costs`, that with which the rest of the prompt is read soonest; while a row
        decodes, of those that are allowed beside a step (see `specjax.goodput.chunks`).

        Args:
          costs: of chunks by their sizes, the seconds in an empty row, and those that each token
            adds which the row holds.
          step_seconds: how long a step takes.
        """
        if not self._reading:
            return None
        row = self._reading[0]
        assert row.ticket is not None
        beside = step_seconds if any(each.decodes for each in self.rows) else math.inf
        seconds = allowed(costs, row.filled, beside)
        prompt = row.ticket.request.prompt
        size = fastest(len(prompt) - row.filled, seconds)[1]
        return Chunk(row, list(prompt[row.filled : row.filled + size]), size)

    def read(self, chunk: Chunk) -> bool:
        """Notes that a chunk is read; whether the prompt is whole now."""
        row = chunk.row
        row.tokens += chunk.tokens
        row.filled += len(chunk.tokens)
        if row.reads:
            return False
        self._reading.remove(row)
        return True

    @property
    def decoding(self) -> tuple[Row, ...]:
        """The rows of the next step."""
        return tuple([row for row in self.rows if row.decodes])

    def step(self, size: int) -> StepPlan:
        """The next step, in a program of `size` rows; it is flying from here on."""
        rows = self.decoding
        for row in rows:
            row.flying += 1
        if size == len(rows):
            return StepPlan(rows, ())
        taken = {row.number for row in rows}
        others = sorted(
            (row for row in self.rows if row.number not in taken), key=lambda row: len(row.tokens)
        )
        return StepPlan(rows, tuple(row.number for row in others[: size - len(rows)]))

    def landed(self, row: Row, tokens: Sequence[int]) -> None:
        """Notes what a step gave a row."""
        row.flying -= 1
        row.left -= len(tokens)
        row.tokens += tokens

    def _best_prefix(self, request: Request) -> tuple[Row | None, int]:
        """The row with the longest beginning in common, and how long it is.

        The last token of a prompt is always read anew: drafts need what comes after it.
        """
        if not self._reuses or request.prompt_logprobs is not None:
            return None, 0
        prompt = list(request.prompt)
        best, most = None, _LEAST_PREFIX - 1
        for row in self.rows:
            common = common_prefix(row.tokens, prompt[:-1])
            if common > most:
                best, most = row, common
        return (best, most) if best else (None, 0)

    def _touch(self, row: Row) -> None:
        self._tick += 1
        row.used = self._tick


def state_of(request: Request) -> RowState:
    """What a policy knows of a request that has no row yet."""
    return RowState(
        None, request.temperature, len(request.prompt), 0, request.max_new_tokens,
        _seconds_of(request.max_tpot_ms),
    )  # fmt: skip


def _seconds_of(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _drafted_of(source: Row | None, common: int) -> int:
    """Tokens that the draft has read of what a row takes over; it reads the last one anew."""
    if source is None:
        return 0
    return min(len(source.tokens) if source.current else source.drafted, common - 1)
