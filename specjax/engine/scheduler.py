"""Which request runs in which row, and what a step is made of. No jax, no clock, no threads."""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from specjax.base.prefix import common_prefix
from specjax.engine.pages import Pages
from specjax.engine.request import QueueFullError, Request, RequestError
from specjax.engine.sequence import Sequence
from specjax.goodput.bursts import BURST, steps_of
from specjax.goodput.chunks import (
    ChunkCosts,
    PrefillBatch,
    allowed,
    fastest,
    longest,
    mixing_pays,
)
from specjax.goodput.policy import RowState

_LEAST_PREFIX = 16
"""Tokens of a common prefix from which on it is copied."""
_NEW_PACE = 0.02
"""Weight of a burst in how many tokens a step gives a row."""
_NEW_LENGTH, _FIRST_LENGTH = 0.1, 128.0
"""Weight of a sequence in how many steps one takes, and how many those are believed to be."""
_BURSTS = 16
"""Bursts that a sequence takes at least beside others, where what ends it may come at any time: a
row gives nothing in the rest of a burst and in the one that is in flight then."""
_WAITING = 0.25
"""Times the rows that decode that may wait for their prompts: idle rows cost a step as much. On a
simulated H100 with 256 rows that always have requests 16,800 tokens/s come so, and 11,600 where
steps alone read prompts (`python -m benchmarks.simulation grown`)."""


@dataclasses.dataclass(eq=False)
class Row:
    """A row of the batch: the tokens that it is known to hold, and the sequence that runs in it.

    A free row keeps its tokens for requests that begin as they do. It was last `used` at that turn.
    `drafted` of its tokens the draft has read for sure; all of them if it is `current`: the last
    step that was handed over ran it.
    """

    number: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    sequence: Sequence | None = None
    used: int = 0
    drafted: int = 0
    current: bool = False

    @property
    def lag(self) -> int:
        """Tokens that the draft may not have read."""
        if self.current:
            return 0
        assert self.sequence is not None
        return len(self.tokens) + self.sequence.tokens_in_flight - self.drafted

    def leave_draft(self) -> None:
        """Notes that the next step does not run the draft: what is in flight it may lack."""
        if self.current:
            self.current, self.drafted = False, len(self.tokens)

    def state(self) -> RowState:
        """What a policy knows of it."""
        assert self.sequence is not None
        request, left = self.sequence.request, self.sequence.left - self.sequence.in_flight
        return RowState(
            self.sequence, request.temperature, len(self.tokens), self.lag, left,
            _seconds_of(request.max_tpot_ms),
        )  # fmt: skip

    @property
    def is_in_time(self) -> bool:
        """Whether its request wants its tokens in time."""
        return self.sequence is not None and self.sequence.request.max_tpot_ms is not None

    @property
    def decoding(self) -> bool:
        """Whether its sequence takes part in steps."""
        return self.sequence is not None and self.sequence.decoding


class Admission(NamedTuple):
    """A request that moves into a row, which takes the first `common` tokens from row `source`.

    Without a source it begins with its first token.
    """

    row: Row
    source: int | None
    common: int


class Chunk(NamedTuple):
    """Tokens of a row's prompt from `start` on, to be read by a program that takes `size`."""

    row: Row
    start: int
    tokens: list[int]
    size: int

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not read yet, these included."""
        assert self.row.sequence is not None
        return len(self.row.sequence.request.prompt) - self.start


class StepPlan(NamedTuple):
    """The rows of a step, then those that fill it up.

    What fills it up are those that hold least, as a pass reads what its rows hold.
    """

    rows: tuple[Row, ...]
    filling: tuple[int, ...]


class Scheduler:
    """Rows, a bounded queue, and how prompts are read between steps.

    Args:
      rows: how many run at a time.
      texts: how many there are, the others of which hold texts of requests that have ended; by
        default none does but those that run.
      reuses: whether a row may begin with what another holds.
      max_requests: that may wait.
      max_tokens: of prompts that may wait.
      pages: those of the caches; None where each row has room for a whole context.
    """

    def __init__(
        self,
        rows: int,
        *,
        texts: int | None = None,
        reuses: bool = True,
        max_requests: int = 1024,
        max_tokens: int = 1 << 20,
        pages: Pages | None = None,
    ) -> None:
        self.rows = [Row(number) for number in range(texts or rows)]
        self._most = rows
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self._reuses = reuses
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._tick = 0
        self._pace, self._usual_steps = 1.0, _FIRST_LENGTH  # tokens a step, and steps a sequence
        self._prefilling: deque[Row] = deque()

    @property
    def running(self) -> list[Sequence]:
        """Those in rows."""
        return [row.sequence for row in self.rows if row.sequence is not None]

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return _prompt_tokens(self.waiting)

    def add(self, *sequences: Sequence) -> None:
        """Puts sequences at the end of the queue, all of them or none.

        Those that were aborted, and still have a row or a place, count no more.

        Raises:
          QueueFullError: too many requests wait, or too many tokens of prompts.
          RequestError: so many at once can never wait.
        """
        waiting = [each for each in self.waiting if not each.finished]
        tokens, own, count = _prompt_tokens(waiting), _prompt_tokens(sequences), len(sequences)
        free = self._most - sum(not each.finished for each in self.running)
        if count > self._max_requests + self._most:
            raise RequestError(
                f"{count} requests come at once; {self._most} may run and "
                f"{self._max_requests} wait.",
                None,
            )
        if len(waiting) + count > self._max_requests + free:
            raise QueueFullError(
                f"{len(waiting)} requests wait; with {count} more they exceed the "
                f"{self._max_requests} that may.",
                1,
            )
        if count > 1 and own > self._max_tokens:
            raise RequestError(
                f"{own} tokens of prompts come at once; no more than {self._max_tokens} may wait.",
                "prompt",
            )
        if waiting and tokens + own > self._max_tokens:
            raise QueueFullError(
                f"{tokens} tokens of prompts wait; with {own} more they exceed the "
                f"{self._max_tokens} that may.",
                1,
            )
        self.waiting.extend(sequences)

    def abort(self, sequence: Sequence) -> bool:
        """Takes a sequence out of the queue or its row; whether it was there."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return True
        row = next((row for row in self.rows if row.sequence is sequence), None)
        if row is not None:
            self.free(row)
        return row is not None

    def free(self, row: Row) -> None:
        """The row's sequence has finished; its tokens stay for others."""
        if row.sequence is not None and (steps := row.sequence.statistics.steps):
            self._usual_steps += _NEW_LENGTH * (steps - self._usual_steps)
        row.sequence = None
        if row in self._prefilling:
            self._prefilling.remove(row)
        if self.pages is not None:
            self.pages.trim(row.number, len(row.tokens) if self._reuses else 0)
        self._touch(row)

    def next_waiting(
        self, may_begin: Callable[[Request], bool] = lambda _: True
    ) -> Sequence | None:
        """The first sequence that waits and may begin."""
        return next((each for each in self.waiting if may_begin(each.request)), None)

    def admit(
        self,
        may_join: Callable[[Request], bool] = lambda _: True,
        may_begin: Callable[[Request], bool] = lambda _: True,
    ) -> Admission | None:
        """The next sequence that waits gets a row; None if there is no row, or no sequence.

        Those that may not begin yet, whatever runs, are passed over.

        Or if there are too few pages for it, or it may not join those that run: then it waits, and
        those behind it do. An engine asks `Controller.may_admit`, which refuses what would make a
        request with `max_tpot_ms` late. Requests that have ended give up their pages for it, those
        first that were of use longest ago.
        """
        free = [row for row in self.rows if row.sequence is None]
        full = len(self.rows) - len(free) >= self._most
        sequence = self.next_waiting(may_begin)
        if full or sequence is None or not may_join(sequence.request):
            return None
        found = self._place_for(sequence.request, free)
        if found is None:
            return None
        row, source, common = found
        self.waiting.remove(sequence)
        if source is not None:
            self._touch(source)
        row.current, row.drafted = False, _drafted_of(source, common)
        row.sequence, sequence.prefilled = sequence, common if source else 1
        row.tokens = list(sequence.request.prompt[: sequence.prefilled])
        self._touch(row)
        if sequence.prefilling:
            self._prefilling.append(row)
        return Admission(row, None if source is None else source.number, sequence.prefilled)

    def _place_for(
        self, request: Request, free: Iterable[Row]
    ) -> tuple[Row, Row | None, int] | None:
        """The row that a request gets, with pages where there are some, and how many tokens it
        takes over from which; None as long as those that run need too many pages.
        """
        source, common = self._best_prefix(request)
        rows = sorted(free, key=lambda row: (row is source, row.used))[:1]
        if source is not None and source.sequence is None and source not in rows:
            # The source's own, if more of it is of use to this request than to others.
            rows.insert(0 if 2 * common >= len(source.tokens) else 1, source)
        if self.pages is None:
            return rows[0], source, common
        for row in sorted(rows, key=lambda row: self._usable(row, source, common) < common):
            own = self._usable(row, source, common)
            taken = source if own >= _LEAST_PREFIX else None
            if self._takes_pages(self.pages, request, row, taken, own):
                return row, taken, own
        return None

    def _usable(self, row: Row, source: Row | None, common: int) -> int:
        """What a row can take over of what a request has in common with a source."""
        if self.pages is None or source is None:
            return common
        return self.pages.usable(row.number, source.number, common)

    def _takes_pages(
        self, pages: Pages, request: Request, row: Row, source: Row | None, common: int
    ) -> bool:
        """Whether a row gets pages for a request; texts that have ended give up theirs for it."""
        tokens = len(request.prompt) + request.max_new_tokens
        begin = row.number, tokens, None if source is None else source.number, common
        if not pages.may_have(*begin, (own.number for own in self.rows if own.sequence)):
            return False
        ended = (own for own in self.rows if own.sequence is None and own not in (row, source))
        for own in sorted(ended, key=lambda own: own.used):
            if not pages.lacks(*begin):
                break
            self._forget(own)
        pages.take(*begin)
        return True

    def forget(self) -> None:
        """Free rows hold nothing any more that a request could begin with."""
        for row in self.rows:
            if row.sequence is None:
                self._forget(row)

    def _forget(self, row: Row) -> None:
        row.tokens, row.drafted, row.current = [], 0, False
        if self.pages is not None:
            self.pages.trim(row.number, 0)

    def prefix(self) -> Admission | None:
        """What the next row to be read may take from another that has read it meanwhile.

        Several requests with one beginning that come at once read it once.
        """
        row = next(iter(self._prefilling), None)
        if row is None:
            return None
        sequence = row.sequence
        assert sequence is not None
        if sequence.prefix_checked:
            return None
        sequence.prefix_checked = True
        source, common = self._best_prefix(sequence.request)
        if source is None or source is row or common < sequence.prefilled + _LEAST_PREFIX:
            return None
        self._touch(source)
        sequence.prefilled, row.tokens = common, list(sequence.request.prompt[:common])
        row.drafted = _drafted_of(source, common)
        if self.pages is not None:
            self.pages.share(row.number, source.number, common)
        return Admission(row, source.number, common)

    @property
    def next_to_read(self) -> Row | None:
        """The row whose prompt is read next."""
        return self._prefilling[0] if self._prefilling else None

    def chunk(self, costs: ChunkCosts, step_seconds: float) -> Chunk | None:
        """The next tokens of a prompt to be read.

        Of the sizes in `costs`, that with which the rest of the prompt is read soonest; while a row
        decodes, of those that are allowed beside a step (see `specjax.goodput.chunks`).

        Args:
          costs: of chunks by their sizes, the seconds in an empty row, and those that each token
            adds which the row holds.
          step_seconds: how long a step takes.
        """
        if not self._prefilling:
            return None
        row = self._prefilling[0]
        assert row.sequence is not None
        start, prompt = row.sequence.prefilled, row.sequence.request.prompt
        most = self.reading_seconds(step_seconds)
        size = fastest(len(prompt) - start, allowed(costs, start, most))[1]
        return Chunk(row, start, list(prompt[start : start + size]), size)

    def together(
        self, costs: ChunkCosts, batch: PrefillBatch | None, seconds: float, step_seconds: float
    ) -> list[Chunk]:
        """Tokens of several prompts that one pass reads sooner than chunks of each; or none.

        The row whose turn it is comes first. Those follow that cannot begin with what other rows
        hold, or are to read before them.

        Args:
          costs: of chunks.
          batch: the pass; None if there is none.
          seconds: how long it takes.
          step_seconds: how long a step takes.
        """
        if batch is None or len(self._prefilling) < 2:
            return []
        if seconds > self.reading_seconds(step_seconds):
            return []
        sizes = {size: own for size, (own, _) in costs.items()}
        chunks: list[Chunk] = []
        left, alone = batch.columns, 0.0
        for row in self._readers(batch):
            assert row.sequence is not None
            start, prompt = row.sequence.prefilled, row.sequence.request.prompt
            tokens = list(prompt[start : start + min(batch.tokens, left)])
            if not tokens:
                break
            chunks.append(Chunk(row, start, tokens, batch.tokens))
            left -= len(tokens)
            rest = len(prompt) - start
            alone += fastest(rest, sizes)[0] * len(tokens) / rest
        if len(chunks) < 2 or seconds >= alone:
            return []
        return chunks

    @property
    def _crowding(self) -> float:
        """How many times as long as usual prompts may be read before a step: rows that wait for
        theirs over rows that decode, and once at least. Once, where one of these wants its tokens
        in time.
        """
        count = len(self.decoding)
        if not count:
            return math.inf
        return 1.0 if self.is_in_time else max(1.0, len(self._prefilling) / count)

    def reading_seconds(self, step_seconds: float) -> float:
        """How long prompts may be read before the next step, if that takes so long."""
        return self._crowding * longest(step_seconds, self.is_in_time)

    def falls_behind(self, batch: PrefillBatch | None) -> bool:
        """Whether so many rows wait for their prompts that steps which read a `batch` of them are
        not enough: more than a quarter of those that decode, beside those that steps read.
        """
        decoding = len(self.decoding)
        if batch is None or not decoding:
            return False
        return len(self._prefilling) - batch.rows > _WAITING * decoding

    def mixes(
        self, costs: ChunkCosts, batch: PrefillBatch | None, more: float, step_seconds: float
    ) -> bool:
        """Whether the next steps should read prompts in their own passes, rather than chunks be
        read between them (see `specjax.goodput.chunks.mixing_pays`).

        Args:
          costs: of chunks.
          batch: what a step reads at most; None if it cannot.
          more: seconds that this adds to it.
          step_seconds: how long a step takes that reads none.
        """
        chunk = self.chunk(costs, step_seconds)
        if batch is None or chunk is None or not self.decoding or not self._reads_its_own(0):
            return False
        own, slope = costs[chunk.size]
        between = len(chunk.tokens), own + slope * chunk.start
        within = min(batch.tokens, batch.columns, chunk.left), more
        return mixing_pays(within, between, step_seconds)

    def beside(self, batch: PrefillBatch, steps: int) -> list[list[Chunk]]:
        """Tokens of prompts that each of the next steps reads in its own pass.

        The row whose turn it is comes first, and those that may as in `together`. The last step is
        that in which a prompt is whole, as its row is to decode.

        Args:
          batch: what a step reads at most.
          steps: how many there may be.
        """
        found: list[list[Chunk]] = []
        rows, read, whole = self._readers(batch), dict[int, int](), False
        while rows and len(found) < steps and not whole:
            left = batch.columns
            found.append([])
            for row in rows:
                assert row.sequence is not None
                start = read.get(row.number, row.sequence.prefilled)
                prompt = row.sequence.request.prompt
                tokens = list(prompt[start : start + min(batch.tokens, left)])
                if tokens:
                    found[-1].append(Chunk(row, start, tokens, batch.tokens))
                read[row.number] = start + len(tokens)
                whole |= read[row.number] == len(prompt)
                left -= len(tokens)
        return found

    def _readers(self, batch: PrefillBatch) -> list[Row]:
        """The rows of which a batch reads, in their order; none if the first has to read apart."""
        if not self._prefilling or not self._reads_its_own(0):
            return []
        waiting = enumerate(itertools.islice(self._prefilling, 2 * batch.rows))
        own = (row for place, row in waiting if self._reads_its_own(place))
        return list(itertools.islice(own, batch.rows))

    def _reads_its_own(self, place: int) -> bool:
        """Whether a row that is to read at this place must read what comes next of its prompt."""
        row = self._prefilling[place]
        assert row.sequence is not None
        request, read = row.sequence.request, row.sequence.prefilled
        if request.prompt_logprobs is not None:
            return False
        if not place or not self._reuses:
            return True
        source, common = self._best_prefix(request)
        if source is not None and source is not row and common >= read + _LEAST_PREFIX:
            return False
        prompt = list(request.prompt[:-1])
        before = (each.sequence for each in itertools.islice(self._prefilling, place))
        return all(
            common_prefix(list(each.request.prompt), prompt) < read + _LEAST_PREFIX
            for each in before
            if each is not None
        )

    def read(self, chunk: Chunk) -> bool:
        """Notes that a chunk is read; whether the prompt is whole now."""
        row = chunk.row
        assert row.sequence is not None
        row.sequence.prefix_checked = True  # what it reads itself it does not take over
        row.tokens += chunk.tokens
        row.sequence.prefilled += len(chunk.tokens)
        if row.sequence.prefilling:
            return False
        self._prefilling.remove(row)
        return True

    @property
    def decoding(self) -> tuple[Row, ...]:
        """The rows of the next step."""
        return tuple([row for row in self.rows if row.decoding])

    @property
    def is_in_time(self) -> bool:
        """Whether a row of the next step wants its tokens in time."""
        return any(row.is_in_time for row in self.decoding)

    def burst(self, step_seconds: float, most: int = BURST, mixed: bool = False) -> int:
        """How many steps the next burst has: one while a first token is due, or a prompt is read
        between steps.

        Args:
          step_seconds: how long a step takes.
          most: how many there may be.
          mixed: whether steps read prompts themselves.
        """
        running = [row.sequence for row in self.decoding if row.sequence is not None]
        between = self._prefilling and not mixed
        if between or any(sequence.begins for sequence in running):
            return 1
        if len(running) > 1 and any(sequence.may_end_early for sequence in running):
            most = min(most, max(1, int(self._usual_steps / _BURSTS)))
        return steps_of(step_seconds, min(each.steps_left(self._pace) for each in running), most)

    def step(self, size: int, steps: int = 1, window: int = 1) -> StepPlan:
        """The next burst of steps, in a program of `size` rows; it is in flight from here on.

        Each gives a row at least one token, and `window` at most.
        """
        rows = self.decoding
        for row in rows:
            assert row.sequence is not None
            row.sequence.in_flight += steps
            row.sequence.tokens_in_flight += steps * window
        if size == len(rows):
            return StepPlan(rows, ())
        taken = {row.number for row in rows}
        others = sorted(
            (row for row in self.rows if row.number not in taken), key=lambda row: len(row.tokens)
        )
        return StepPlan(rows, tuple(row.number for row in others[: size - len(rows)]))

    def postprocess(
        self, row: Row, tokens: list[int], steps: int = 1, window: int = 1, taken: int = 1
    ) -> None:
        """Notes what a burst (see `step`) gave a row, which was done after `taken` of its steps."""
        assert row.sequence is not None
        row.sequence.in_flight -= steps
        row.sequence.tokens_in_flight -= steps * window
        row.sequence.left -= len(tokens)
        row.tokens += tokens
        if taken:
            self._pace += _NEW_PACE * (len(tokens) / taken - self._pace)

    def _best_prefix(self, request: Request) -> tuple[Row | None, int]:
        """The row with the longest beginning in common, and how long it is.

        The last token of a prompt is always read anew: drafts need what comes after it.
        """
        if not self._reuses or request.prompt_logprobs is not None:
            return None, 0
        prompt = list(request.prompt)
        best, most = None, _LEAST_PREFIX - 1
        for row in self.rows:
            if row.tokens[:_LEAST_PREFIX] != prompt[:_LEAST_PREFIX]:  # most have nothing in common
                continue
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


def _prompt_tokens(sequences: Iterable[Sequence]) -> int:
    return sum(len(sequence.request.prompt) for sequence in sequences)


def _seconds_of(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _drafted_of(source: Row | None, common: int) -> int:
    """Tokens that the draft has read of what a row takes over; it reads the last one anew."""
    if source is None:
        return 0
    return min(len(source.tokens) if source.current else source.drafted, common - 1)
