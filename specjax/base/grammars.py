"""Grammars of rows inside compiled programs: which tokens may follow each node of a tree.

A grammar is followed on the host, by a `Matcher` of each row (`specjax.grammar` makes
them from JSON schemas, regular expressions and the like). A program asks for the masks of nodes by
a callback; so loops over steps stay one program, and masks are data. What a row's target may say is
its distribution among the allowed tokens, whatever drafts: every rule is exact for that.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import pytree, replace

BITS = 32
"""Tokens of a word of a mask, the lowest bit first."""
ROOT, NO_NODE = -1, -2
"""In place of a node: the root, and none at all."""
ALL = np.int32(-1)
"""A word of a mask that allows every token."""


class Matcher(Protocol):
    """Follows the text of a row. Not used by two threads at once."""

    def words(self) -> np.ndarray:
        """The tokens that may come next, int32 `[ceil(V / 32)]`; those that end the text where it
        can follow no further.
        """
        ...

    def consume(self, tokens: Sequence[int]) -> int:
        """Takes the first tokens as far as they are allowed; how many that are."""
        ...

    def rollback(self, count: int) -> None:
        """Forgets the last tokens that were taken."""
        ...

    def reset(self) -> None:
        """Forgets all of them, and what went wrong."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        ...

    def error(self) -> str:
        """Why it can follow no further, in a sentence; empty if it can."""
        ...


class Grammar(Protocol):
    """What texts must match."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        ...


def matchers_of(
    grammar: Grammar | Sequence[Grammar | None] | None, rows: int
) -> list[Matcher | None]:
    """A matcher for each row that has a grammar, from one for all rows or from one a row.

    Raises:
      TypeError: one of them is none.
      ValueError: there are others than `rows` grammars.
    """
    given: list[Any] = [*grammar] if isinstance(grammar, list | tuple) else [grammar] * rows
    wrong = next((own for own in given if own is not None and not hasattr(own, "matcher")), None)
    if wrong is not None:
        raise TypeError(
            f"grammar is a {type(wrong).__name__}; it must be a Grammar: specjax.GrammarCompiler "
            "makes one."
        )
    if len(given) != rows:
        raise ValueError(f"{len(given)} grammars are given for {rows} prompts.")
    return [None if own is None else own.matcher() for own in given]


def num_words(vocabulary: int) -> int:
    """Words of a mask."""
    return -(-vocabulary // BITS)


_Path = tuple[int, ...]
"""Tokens below the root."""
_Masks = dict[_Path, np.ndarray | None]


class _Row:
    """A row's matcher after the tokens that it has given, and the masks of its tree's nodes.

    Several devices may ask for the same row, one of them a step behind another.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._lock = threading.Lock()
        self._made, self._ended = 0, False
        self._text: list[int] = []
        self._ahead: list[int] = []
        """Tokens below the root that the matcher has taken."""
        self._known: _Masks = {}
        self._before: tuple[int, _Masks] = 0, {}

    def masks(self, made: int, recent: list[int], paths: list[_Path]) -> list[np.ndarray | None]:
        """The masks after some paths below the root; all that there is below an end, or below a
        token that is not allowed, which no text comes to.

        Of the `made` tokens so far `recent` are the last. With fewer than before the text begins
        anew, unless it is the step before that is asked for again.
        """
        with self._lock:
            earlier, known = self._before
            if made == earlier < self._made and all(path in known for path in paths):
                return [known[path] for path in paths]
            self._follow(made, recent)
            for path in sorted({*paths} - self._known.keys()):
                self._known[path] = self._after(path)
            return [self._known[path] for path in paths]

    def _follow(self, made: int, recent: list[int]) -> None:
        if made == self._made:
            return
        self._go_to(())
        self._before, self._known = (self._made, self._known), {}
        if made < self._made:
            self.matcher.reset()
            self._made, self._ended, self._text = 0, False, []
        new = made - self._made
        if not 0 <= new <= len(recent):
            raise RuntimeError(f"a grammar has followed {self._made} tokens of {made}.")
        self._made = made
        tokens = recent[len(recent) - new :]
        if self._ended:
            return
        ends = [at for at, token in enumerate(tokens) if self.matcher.is_end(token)]
        own = tokens[: ends[0]] if ends else tokens
        self._ended = bool(ends)
        self._text += own[: self.matcher.consume(own)]

    def _go_to(self, path: _Path) -> bool:
        """Takes the tokens of a path below the root; whether all are allowed and none is an end."""
        same = 0
        while same < min(len(path), len(self._ahead)) and path[same] == self._ahead[same]:
            same += 1
        if len(self._ahead) > same:
            self.matcher.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        for token in path[same:]:
            if self.matcher.is_end(token) or not self.matcher.consume([token]):
                return False
            self._ahead.append(token)
        return True

    def _after(self, path: _Path) -> np.ndarray | None:
        if self._ended:
            return None
        found = self.matcher.words() if self._go_to(path) else None
        if path and self.matcher.error():  # of what was only drafted: the text may go on elsewhere
            self.matcher.reset()
            self.matcher.consume(self._text)
            self._ahead.clear()
        return found


class _Registry:
    """The rows of this process that have grammars, by number; 0 is of none."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "specjax-grammars")

    def add(self, matcher: Matcher) -> int:
        with self._lock:
            number = next(self._numbers)
            self._rows[number] = _Row(matcher)
        return number

    def remove(self, number: int) -> None:
        with self._lock:
            self._rows.pop(number, None)

    def __len__(self) -> int:
        return len(self._rows)

    def masks(self, vocabulary: int, sizes: tuple[int, int, int], packed: Array) -> np.ndarray:
        """The words of each wanted node of each row; of one that has no grammar all.

        Each row of `packed` has its number, how many tokens it has made, how many of the recent
        ones count, and in so many `sizes` these, tokens and parents of nodes, and what is wanted.
        """
        width, nodes, _ = sizes
        whole = np.asarray(packed)
        number, made, count = whole[:, 0], whole[:, 1], whole[:, 2]
        ends = np.cumsum([3, width, nodes, nodes])
        _, recent, tokens, parents, wanted = np.split(whole, ends, axis=1)
        found = np.full((*wanted.shape, num_words(vocabulary)), ALL, np.int32)
        jobs = []
        for at in np.flatnonzero(number):
            row = self._rows.get(int(number[at]))
            if row is not None:  # one that has left meanwhile is in no text
                given = recent[at, : count[at]].tolist()
                jobs.append((row, int(made[at]), given, tokens[at], parents[at], wanted[at],
                             found[at]))  # fmt: skip
        # Matchers let go of Python's lock while they look for a mask.
        for _ in map(_fill, jobs) if len(jobs) < 2 else self._pool.map(_fill, jobs):
            pass
        return found


def _fill(job: tuple[_Row, int, list[int], np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    row, made, recent, tokens, parents, wanted, found = job
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}

    def path(node: int) -> tuple[int, ...]:
        if node not in paths:
            paths[node] = (*path(int(parents[node])), int(tokens[node]))
        return paths[node]

    places = np.flatnonzero(wanted >= ROOT)
    masks = row.masks(made, recent, [path(int(wanted[place])) for place in places])
    for place, words in zip(places, masks, strict=True):
        if words is not None:
            found[place] = words


_ROWS = _Registry()


@contextmanager
def registered(matchers: Sequence[Matcher | None]) -> Iterator[np.ndarray]:
    """The numbers of rows with these matchers, 0 of those without one; they are forgotten after.

    Raises:
      ValueError: after it, that a matcher came to its limits.
    """
    numbers = [0 if matcher is None else _ROWS.add(matcher) for matcher in matchers]
    try:
        yield np.asarray(numbers, np.int32)
        for matcher in matchers:
            if matcher is not None and (error := matcher.error()):
                raise ValueError(error)
    finally:
        for number in numbers:
            _ROWS.remove(number)


add: Callable[[Matcher], int] = _ROWS.add
"""Registers a row's matcher; gives its number."""
remove: Callable[[int], None] = _ROWS.remove
"""Forgets a row's matcher, if it is known."""


def num_rows() -> int:
    """How many rows with grammars are known."""
    return len(_ROWS)


@pytree
class Grammars:
    """Which rows have a grammar, by number (0: none), and where they are in it.

    `made` is how many tokens a row has given, of which the first `count` of `recent` are the last.
    """

    number: Int32[Array, " B"]
    made: Int32[Array, " B"]
    recent: Int32[Array, "B W"]
    count: Int32[Array, " B"]

    def after(self, tokens: Int32[Array, "B w"], count: Int32[Array, " B"]) -> "Grammars":
        """The same after the first `count` of `tokens`."""
        width = self.recent.shape[1]
        recent = jnp.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))
        return replace(self, made=self.made + count, recent=recent, count=count)

    def without(self, rows: Bool[Array, " B"]) -> "Grammars":
        """The same without those of some rows."""
        return replace(self, number=jnp.where(rows, 0, self.number))

    def masks(
        self,
        tokens: Int32[Array, "B K"],
        parents: Int32[Array, "B K"],
        wanted: Int32[Array, "B n"],
        vocabulary: int,
    ) -> Int32[Array, "B n w"]:
        """The words of the tokens that may follow each wanted node.

        Args:
          tokens: of the nodes below the root.
          parents: of these their parents' numbers, `ROOT` of the root's children.
          wanted: numbers of nodes, `ROOT`, or `NO_NODE`, which may be followed by anything.
          vocabulary: how many tokens there are.
        """
        shape = jax.ShapeDtypeStruct((*wanted.shape, num_words(vocabulary)), jnp.int32)
        own = jnp.stack([self.number, self.made, self.count], axis=1)
        # One array, as each takes a callback some ten microseconds.
        packed = jnp.concatenate([own, self.recent, tokens, parents, wanted], axis=1)
        sizes = self.recent.shape[1], tokens.shape[1], wanted.shape[1]
        return jax.pure_callback(
            lambda given: _ROWS.masks(vocabulary, sizes, given), shape, packed,
            vmap_method="sequential",
        )  # fmt: skip


def none_of(rows: int, window: int) -> Grammars:
    """Rows without grammars, that give at most `window` tokens a step."""
    none = jnp.zeros(rows, jnp.int32)
    return Grammars(none, none, jnp.zeros((rows, window), jnp.int32), none)


def allowed(words: Int32[Array, "*B w"], vocabulary: int) -> Bool[Array, "*B V"]:
    """Which tokens a mask allows."""
    bits = jnp.right_shift(words[..., None], jnp.arange(BITS, dtype=jnp.int32)) & 1
    return (bits > 0).reshape(*words.shape[:-1], -1)[..., :vocabulary]


def allows(words: Int32[Array, "*B w"], tokens: Int32[Array, "*B"]) -> Bool[Array, "*B"]:
    """Whether masks allow tokens, one each."""
    own = jnp.take_along_axis(words, (tokens // BITS)[..., None], axis=-1)[..., 0]
    return (jnp.right_shift(own, tokens % BITS) & 1) > 0


def masked(logits: Float[Array, "*B V"], words: Int32[Array, "*B w"]) -> Float[Array, "*B V"]:
    """Logits with those of tokens that are not allowed at minus infinity."""
    return jnp.where(allowed(words, logits.shape[-1]), logits, -jnp.inf)
