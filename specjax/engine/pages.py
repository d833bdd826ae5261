"""Which pages of the caches rows have: on the host, without jax."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Paging(NamedTuple):
    """Caches whose rows share pages of `size` slots: how many pages there are of the target's and
    of each draft's, 0 where no draft has any. Page 0 is nobody's: rows that have no page for what
    they write write there.
    """

    size: int
    target_pages: int
    draft_pages: int


class PageCounts(NamedTuple):
    """Pages of the target's cache: all that there are, those that are free, those of running
    requests and those that ended ones left for others. None may be `leaked`: neither free nor
    anybody's, or free and somebody's.
    """

    total: int
    free: int
    running: int
    cached: int
    leaked: int


class _Pool:
    """Pages of one kind of cache; page 0 is nobody's. Several rows may have one, to read it."""

    def __init__(self, rows: int, pages: int) -> None:
        self.of_row: list[list[int]] = [[] for _ in range(rows)]
        self.free = deque(range(1, pages))
        self.total, self._holders = pages - 1, [0] * pages

    def is_shared(self, row: int, index: int) -> bool:
        """Whether another row has this page of a row, too."""
        return self._holders[self.of_row[row][index]] > 1

    def held(self, rows: Iterable[int]) -> set[int]:
        """All pages of some rows."""
        return {page for row in rows for page in self.of_row[row]}

    def may_have(self, row: int, count: int, begin: list[int], kept: Iterable[int]) -> bool:
        """Whether a row could have `count` pages, of which it shares those that it begins with,
        once all rows but those that are `kept` gave up theirs.
        """
        kept = self.held(each for each in kept if each != row) | {*begin}
        return count - len(begin) <= self.total - len(kept)

    def lacking(self, row: int, count: int, begin: list[int]) -> int:
        """How many more pages would have to be free for that."""
        own = sum(self._holders[page] == 1 and page not in begin for page in self.of_row[row])
        return count - len(begin) - own - len(self.free)

    def take(self, row: int, count: int, begin: list[int]) -> None:
        """A row has `count` pages, of which the first are these; it keeps what is its own alone."""
        for page in begin:
            self._holders[page] += 1
        kept: dict[int, int] = {}
        for index, page in enumerate(self.of_row[row]):
            if len(begin) <= index < count and self._holders[page] == 1:
                kept[index] = page
            else:
                self._let_go(page)
        new = (kept.get(index) or self._fresh() for index in range(len(begin), count))
        self.of_row[row] = [*begin, *new]

    def trim(self, row: int, count: int) -> None:
        """A row keeps its first `count` pages."""
        own = self.of_row[row]
        for page in own[count:]:
            self._let_go(page)
        self.of_row[row] = own[:count]

    def leaked(self) -> int:
        """Pages that are neither free nor anybody's, or both; or of which the count is wrong."""
        found = [0] * (self.total + 1)
        for page in (page for own in self.of_row for page in own):
            found[page] += 1
        free = [0] * (self.total + 1)
        for page in self.free:
            free[page] += 1
        every = zip(found[1:], free[1:], self._holders[1:], strict=True)
        return sum(own != holders or is_free != (own == 0) for own, is_free, holders in every)

    def _fresh(self) -> int:
        page = self.free.popleft()
        self._holders[page] = 1
        return page

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self.free.append(page)


class Pages:
    """The pages of an engine's rows: of the target's cache, which rows share where they begin
    alike, and of the drafts' caches, which they do not, as a draft may be behind in one of them.

    A row gets all pages that its request may need when it begins, so that none that runs ever has
    to give up its own. The full pages of what it takes over from another row it shares; who shares
    a page only reads it.

    Args:
      rows: of the engine.
      slots: of a row.
      window: tokens that a step writes at most.
      paging: how many pages there are.
    """

    def __init__(self, rows: int, slots: int, window: int, paging: Paging) -> None:
        self._size, self._window, self._per_row = paging.size, window, slots // paging.size
        self._target = _Pool(rows, paging.target_pages)
        self._pools = [self._target]
        if paging.draft_pages:
            self._pools.append(_Pool(rows, paging.draft_pages))
        self._changed: set[int] = set()

    def changes(self) -> dict[int, list[list[int]]]:
        """The pages of each row whose pages are others since this was asked last: the target's, and
        then a draft's where it has any.
        """
        changed, self._changed = self._changed, set()
        return {row: [pool.of_row[row] for pool in self._pools] for row in changed}

    def usable(self, row: int, source: int, common: int) -> int:
        """Of `common` tokens, those that a row may take over from a source: where it is the row
        itself, and another one reads the page of the last of them, only those in the pages before.
        """
        full, rest = divmod(common - 1, self._size)
        if source == row and rest and self._target.is_shared(row, full):
            return full * self._size + 1
        return common

    def may_have(
        self, row: int, tokens: int, source: int | None, common: int, running: Iterable[int]
    ) -> bool:
        """Whether a row could have pages for so many tokens, once ended rows gave up theirs."""
        kept = {*running} if source is None else {*running, source}
        count = self._count(tokens)
        wanted = self._wanted(source, common)
        return all(pool.may_have(row, count, begin, kept) for pool, begin in wanted)

    def lacks(self, row: int, tokens: int, source: int | None, common: int) -> bool:
        """Whether too few are free for that now."""
        count, wanted = self._count(tokens), self._wanted(source, common)
        return any(pool.lacking(row, count, begin) > 0 for pool, begin in wanted)

    def take(self, row: int, tokens: int, source: int | None, common: int) -> None:
        """A row has pages for so many tokens, of which it takes the first `common` from another
        one (or itself). Of the last page of these the device has to copy what counts.
        """
        for pool, begin in self._wanted(source, common):
            pool.take(row, self._count(tokens), begin)
        self._changed.add(row)

    def share(self, row: int, source: int, common: int) -> None:
        """A row that has its pages takes the first `common` tokens from another one."""
        self._target.take(row, len(self._target.of_row[row]), self._full_pages(source, common))
        self._changed.add(row)

    def trim(self, row: int, tokens: int) -> None:
        """A row that has ended keeps the pages of so many tokens for others."""
        for pool in self._pools:
            pool.trim(row, -(-tokens // self._size))
        self._changed.add(row)

    def counts(self, running: Iterable[int]) -> PageCounts:
        """How many pages there are, and whose."""
        pool = self._target
        every = pool.held(range(len(pool.of_row)))
        own = pool.held(running)
        leaked = sum(each.leaked() for each in self._pools)
        return PageCounts(pool.total, len(pool.free), len(own), len(every - own), leaked)

    def _count(self, tokens: int) -> int:
        """Pages of a row with so many tokens, and what steps write behind the last of them."""
        return min(-(-(tokens + self._window) // self._size), self._per_row)

    def _wanted(self, source: int | None, common: int) -> list[tuple[_Pool, list[int]]]:
        """Each pool, and the pages of it that a row shares which takes over so many tokens."""
        begin = [] if source is None else self._full_pages(source, common)
        return [(pool, begin if pool is self._target else []) for pool in self._pools]

    def _full_pages(self, source: int, common: int) -> list[int]:
        """Those of the first tokens of a row; the last of these is in no cache yet."""
        return self._target.of_row[source][: (common - 1) // self._size]
