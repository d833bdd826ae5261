"""Grammars of rows inside compiled programs: which tokens may follow each node of a tree.

A grammar is followed on the host, by a `Matcher` of each row (`specjax.grammar` makes
them from JSON schemas, regular expressions and the like). A program asks for the masks of nodes by
a callback; so loops over steps stay one program, and masks are data. What a row's target may say is
its distribution among the allowed tokens, whatever drafts: every rule is exact for that.
"""

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.cpu.host_call import answer_host_calls, host_call, host_call_unable
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

    def copy(self) -> "Matcher":
        """Another that is where this one is."""
        ...

    def reset(self) -> None:
        """Forgets all of them, and what went wrong."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that are to be expected next where the text can go on in one way only, as it
        is tokenized most often; empty where it can in several.
        """
        ...

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        ...

    def fail(self, reason: str) -> None:
        """Follows no further, for a reason in a sentence."""
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
_Found = TypeVar("_Found")


@dataclasses.dataclass
class _Place:
    """What is known below the root of a step, after the `made` tokens before it.

    `row` looks up what is not known yet; without it, as the row has gone on, that is a `KeyError`.
    """

    made: int
    row: "_Row | None"
    masks: dict[_Path, np.ndarray | None] = dataclasses.field(default_factory=dict)
    chains: dict[_Path, Sequence[int]] = dataclasses.field(default_factory=dict)

    def mask(self, path: _Path) -> np.ndarray | None:
        """The words after a path; None, which is all that there is, below an end, or below a token
        that is not allowed, which no text comes to.
        """
        if path not in self.masks and self.row is not None:
            self.masks[path] = self.row.words_after(path)
        return self.masks[path]

    def forced(self, path: _Path) -> Sequence[int]:
        """The tokens that are to be expected after a path (see `Matcher.forced`)."""
        if path not in self.chains and self.row is not None:
            self.chains[path] = self.row.forced_after(path)
        return self.chains[path]


class _Row:
    """A row's matcher after the tokens that it has given, and what it said below its root.

    Several devices may ask for the same row, one of them a step behind another.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._lock = threading.Lock()
        self._ended = False
        self._ahead, self._path = matcher, ()
        """One that has taken tokens below the root, and which: those that are drafted are followed
        by copies, as what takes them back may not be what it was (see `TextMatcher.copy`).
        """
        self._now, self._before = _Place(0, self), _Place(0, None)

    def ask(self, made: int, recent: list[int], question: Callable[[_Place], _Found]) -> _Found:
        """The answer to a question about what is below the root.

        Of the `made` tokens so far `recent` are the last. With fewer than before the text begins
        anew, unless it is the step before that is asked about again.
        """
        with self._lock:
            if made == self._before.made < self._now.made:
                with suppress(KeyError):
                    return question(self._before)
            self._follow(made, recent)
            return question(self._now)

    def masks(self, made: int, recent: list[int], paths: list[_Path]) -> list[np.ndarray | None]:
        """The masks after some paths below the root."""

        def look(place: _Place) -> list[np.ndarray | None]:
            found = {path: place.mask(path) for path in sorted({*paths})}
            return [found[path] for path in paths]

        return self.ask(made, recent, look)

    def _follow(self, made: int, recent: list[int]) -> None:
        before = self._now
        if made == before.made:
            return
        self._ahead, self._path = self.matcher, ()
        if anew := made < before.made:
            self.matcher.reset()
            self._ended = False
        new = made - (0 if anew else before.made)
        if not 0 <= new <= len(recent):
            raise RuntimeError(f"a grammar has followed {before.made} tokens of {made}.")
        self._now, self._before = _Place(made, self), dataclasses.replace(before, row=None)
        tokens = recent[len(recent) - new :]
        if self._ended:
            return
        ends = [at for at, token in enumerate(tokens) if self.matcher.is_end(token)]
        own = tokens[: ends[0]] if ends else tokens
        self._ended = bool(ends)
        if self.matcher.consume(own) < len(own) and not self.matcher.error():
            self.matcher.fail("a text has left its grammar.")

    def words_after(self, path: _Path) -> np.ndarray | None:
        """The matcher's words below the root (see `_Place.mask`)."""
        ahead = self._after(path)
        return None if ahead is None else ahead.words()

    def forced_after(self, path: _Path) -> Sequence[int]:
        """What the matcher expects below the root (see `Matcher.forced`)."""
        ahead = self._after(path)
        return () if ahead is None else ahead.forced()

    def _after(self, path: _Path) -> Matcher | None:
        """A matcher that has taken a path below the root, or came to its limits there; None if the
        path is not allowed, or the text ended.
        """
        if self._ended:
            return None
        if not path:
            return self.matcher
        known = len(self._path)
        if not known or path[:known] != self._path or self._ahead.error():
            self._ahead, self._path, known = self.matcher.copy(), (), 0
        for token in path[known:]:
            if self._ahead.is_end(token) or not self._ahead.consume([token]):
                return self._ahead if self._ahead.error() else None
            self._path = (*self._path, token)
        return self._ahead


class _Tree:
    """The nodes of a tree that are to be scored, of which there is room for some.

    Args:
      place: what follows nodes.
      room: how many nodes there may be.
      deepest: tokens of their paths, at most.
    """

    def __init__(self, place: _Place, room: int, deepest: int) -> None:
        self._place, self._room, self._deepest = place, room, deepest
        self._slots: dict[_Path, int] = {}
        """Those that nodes come from, by their paths."""

    def add(self, above: _Path, token: int, slot: int) -> bool:
        """Adds a node below another, unless it stands there; whether it stands there then."""
        path = (*above, token)
        if path in self._slots:
            return True
        if len(self._slots) == self._room or not self._may_stand(above, token):
            return False
        self._slots[path] = slot
        return True

    def _may_stand(self, above: _Path, token: int) -> bool:
        words = self._place.mask(above)
        there = (not above or above in self._slots) and len(above) < self._deepest
        return there and words is not None and bool(words[token // BITS] >> (token % BITS) & 1)

    def expect(self, path: _Path, before_others: bool) -> None:
        """Adds what is to be expected after a path, in place of others if it comes `before_others`
        and there is no room.
        """
        for token in self._place.forced(path):
            if not self.add(path, token, NO_NODE):
                others = [each for each in self._leaves() if each != path]
                if not (before_others and others and self._may_stand(path, token)):
                    return
                del self._slots[others[-1]]
                self.add(path, token, NO_NODE)
            path = (*path, token)

    def fill(self) -> None:
        """Adds what is to be expected after the root, then after nodes that have no children."""
        self.expect((), before_others=True)
        for path in self._leaves():
            if len(self._slots) == self._room:
                return
            self.expect(path, before_others=False)

    def nodes(self) -> list[tuple[_Path, int]]:
        """The paths of nodes and the slots that they come from, those above others first."""
        return sorted(self._slots.items(), key=lambda node: len(node[0]))

    def _leaves(self) -> list[_Path]:
        above = {path[:-1] for path in self._slots}
        return [path for path in self._slots if path not in above]


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

    def masks(self, question: "_Question", whole: np.ndarray, found: np.ndarray) -> None:
        """Writes the words of each wanted node of each row; of one that has no grammar all.

        Each row of `whole` has what `_Asked` says; the rest is what is wanted.
        """
        found[:] = ALL
        shape = len(whole), question.rest, num_words(question.vocabulary)
        self._of_each(_masks, question, whole, found.reshape(shape))

    def completed(self, question: "_Question", whole: np.ndarray, found: np.ndarray) -> None:
        """Writes each row's tree within its grammar (see `Grammars.completed`), and its masks.

        Each row of `whole` has what `_Asked` says; the rest is how deep nodes may be. Each row of
        `found` gets the slots from which nodes come, their tokens, parents and depths, and the
        words after the root and each.
        """
        nodes = question.nodes
        found[:] = ALL
        found[:, :nodes] = np.arange(nodes)
        found[:, nodes : 3 * nodes] = whole[:, -1 - 2 * nodes : -1]
        self._of_each(_complete, question, whole, found)

    def _of_each(
        self,
        answer: Callable[["_Asked", np.ndarray], None],
        question: "_Question",
        whole: np.ndarray,
        found: np.ndarray,
    ) -> None:
        """Writes to `found` for the rows that have grammars."""
        nodes, rest = question.nodes, whole.shape[1] - question.rest
        jobs = []
        for at in np.flatnonzero(whole[:, 0]).tolist():
            given = whole[at].tolist()  # lists are cut faster than arrays
            number, made, count = given[:3]
            row = self._rows.get(number)
            if row is not None:  # one that has left meanwhile is in no text
                tokens, parents = given[rest - 2 * nodes : rest - nodes], given[rest - nodes : rest]
                asked = _Asked(row, made, given[3 : 3 + count], tokens, parents, given[rest:])
                jobs.append((asked, found[at]))
        # Matchers let go of Python's lock while they look for a mask.
        run = itertools.starmap(answer, jobs)
        if len(jobs) > 1:
            run = self._pool.map(lambda job: answer(*job), jobs)
        for _ in run:
            pass


class _Asked(NamedTuple):
    """What is asked of a row after so many tokens, the last of which are given, about a tree of
    nodes; `rest` is what else there is.
    """

    row: _Row
    made: int
    recent: list[int]
    tokens: list[int]
    parents: list[int]
    rest: list[int]

    def path_to(self) -> Callable[[int], _Path]:
        """Gives the tokens of the path to a node that is there, and to the root."""
        known: dict[int, _Path] = {ROOT: ()}

        def path(node: int) -> _Path:
            if node not in known:
                known[node] = (*path(self.parents[node]), self.tokens[node])
            return known[node]

        return path


def _masks(asked: _Asked, found: np.ndarray) -> None:
    """The words of the wanted nodes."""
    path = asked.path_to()
    places = [place for place, node in enumerate(asked.rest) if node >= ROOT]
    masks = asked.row.masks(asked.made, asked.recent, [path(asked.rest[at]) for at in places])
    for place, words in zip(places, masks, strict=True):
        if words is not None:
            found[place] = words


def _complete(asked: _Asked, found: np.ndarray) -> None:
    """The tree without what the grammar forbids, with what is to be expected, and its masks."""
    count, path = len(asked.tokens), asked.path_to()

    def within(place: _Place) -> list[tuple[_Path, int, np.ndarray | None]]:
        tree = _Tree(place, count, *asked.rest)
        for slot, (token, parent) in enumerate(zip(asked.tokens, asked.parents, strict=True)):
            if parent >= ROOT:
                tree.add(path(parent), token, slot)
        tree.fill()
        return [(*node, place.mask(node[0])) for node in [((), ROOT), *tree.nodes()]]

    nodes = asked.row.ask(asked.made, asked.recent, within)
    number = {own_path: at - 1 for at, (own_path, *_) in enumerate(nodes)}
    slots, tokens, parents, depth = found[: 4 * count].reshape(4, count)
    slots[:], tokens[:], parents[:] = NO_NODE, 0, NO_NODE
    words = found[4 * count :].reshape(count + 1, -1)
    for at, (own_path, slot, own) in enumerate(nodes):
        if own_path:
            here = slot, own_path[-1], number[own_path[:-1]], len(own_path)
            slots[at - 1], tokens[at - 1], parents[at - 1], depth[at - 1] = here
        if own is not None:
            words[at] = own


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
        words = num_words(vocabulary)
        question = _Question("masks", vocabulary, tokens.shape[1], wanted.shape[1])
        found = self._asked(question, wanted.shape[1] * words, tokens, parents, wanted)
        return found.reshape(*wanted.shape, words)

    def completed(
        self,
        tokens: Int32[Array, "B K"],
        parents: Int32[Array, "B K"],
        deepest: Int32[Array, " B"],
        vocabulary: int,
    ) -> "Completed":
        """Trees without nodes that grammars forbid, and with those that are to be expected.

        Where a text can go on in one way only, its tokens come first: below the root in place of
        the last of other nodes, below others where there is room. What rows hold that have no
        grammar stays as it is.

        Args:
          tokens: of the nodes below the root, each behind its parent.
          parents: of these their parents' numbers, `ROOT` of the root's children, `NO_NODE` of
            those that are not there.
          deepest: tokens of a path, at most.
          vocabulary: how many tokens there are.
        """
        count, words = tokens.shape[1], num_words(vocabulary)
        question = _Question("completed", vocabulary, count, 1)
        size = 4 * count + (count + 1) * words
        found = self._asked(question, size, tokens, parents, deepest[:, None])
        slots, tokens, parents, depth = jnp.split(found[:, : 4 * count], 4, axis=1)
        masks = found[:, 4 * count :].reshape(-1, count + 1, words)
        return Completed(slots, tokens, parents, depth, masks)

    def _asked(
        self, question: "_Question", size: int, *about: Int32[Array, "B _"]
    ) -> Int32[Array, "B n"]:
        """What the host answers about rows, so many numbers each; asked in one array, as each takes
        a callback some ten microseconds.
        """
        own = jnp.stack([self.number, self.made, self.count], axis=1)
        packed = jnp.concatenate([own, self.recent, *about], axis=1)
        shape = (packed.shape[0], size)
        if host_call_unable() is None:
            _answer_host_calls()
            return host_call(question.text, packed, shape)
        answer = partial(_called_back, question, shape)
        return jax.pure_callback(
            answer, jax.ShapeDtypeStruct(shape, jnp.int32), packed, vmap_method="sequential"
        )


class _Question(NamedTuple):
    """What is asked about rows: a method of `_Registry`, and how much each says beside its recent
    tokens: tokens and parents of so many nodes, and so many numbers more.
    """

    method: str
    vocabulary: int
    nodes: int
    rest: int

    @property
    def text(self) -> str:
        """It in a program that is kept."""
        return " ".join(map(str, self))

    def answer(self, whole: np.ndarray, found: np.ndarray) -> None:
        """Writes the answer."""
        getattr(_ROWS, self.method)(self, whole, found)


def _called_back(question: _Question, shape: tuple[int, int], packed: Array) -> np.ndarray:
    found = np.empty(shape, np.int32)
    question.answer(np.asarray(packed), found)
    return found


@cache
def _answer_host_calls() -> None:
    def answer(text: str, given: Any, shape: tuple[int, int], found: Any) -> None:
        method, *numbers = text.split()
        whole = np.frombuffer(given, np.int32).reshape(shape)
        own = np.frombuffer(found, np.int32).reshape(shape[0], -1)
        _Question(method, *map(int, numbers)).answer(whole, own)

    answer_host_calls(answer)


class Completed(NamedTuple):
    """Trees within their rows' grammars (see `Grammars.completed`).

    Attributes:
      slots: in which a node stood; `NO_NODE` if it is new, or none.
      tokens: of nodes.
      parents: their parents' numbers, `ROOT` of the root's children, `NO_NODE` of none.
      depth: of the nodes that are new.
      words: the masks after the root and the nodes.
    """

    slots: Int32[Array, "B K"]
    tokens: Int32[Array, "B K"]
    parents: Int32[Array, "B K"]
    depth: Int32[Array, "B K"]
    words: Int32[Array, "B K1 w"]


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
