"""Stop strings, found across the pieces of a text and the special tokens among them."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from specjax.checkpoints.detokenizer import SpecialToken, SpecialTokens

Symbol = str | int
"""A character of the text, or a special token, which has no text."""


def sequences_of(stop: str, special: SpecialTokens) -> list[tuple[Symbol, ...]]:
    """What tokens write where a stop string names special tokens; nothing where it names none.

    Spaces that encoding would take into a special token may be there or not.

    Args:
      stop: a stop string.
      special: tokens of the tokenizer.
    """
    parts = _parts(stop, special)
    if all(isinstance(part, str) for part in parts):
        return []
    after = _without_spaces(parts, "rstrip")
    both = _without_spaces(after[::-1], "lstrip")[::-1]
    each = [
        tuple(part if isinstance(part, str) else part.id for part in of) for of in (parts, both)
    ]
    return list(dict.fromkeys(each))


def _parts(stop: str, special: SpecialTokens) -> list[str | SpecialToken]:
    """The characters of a stop string, and the special tokens that it names."""
    parts: list[str | SpecialToken] = []
    place = 0
    while place < len(stop):
        token = special.at(stop, place)
        parts.append(stop[place] if token is None else token)
        place += 1 if token is None else len(token.name)
    return parts


def _without_spaces(
    parts: Sequence[str | SpecialToken], flag: Literal["lstrip", "rstrip"]
) -> list[str | SpecialToken]:
    """The parts without spaces behind a token that has the flag."""
    kept: list[str | SpecialToken] = []
    takes = False
    for part in parts:
        if isinstance(part, SpecialToken):
            takes = getattr(part, flag)
        elif takes and part.isspace():
            continue
        else:
            takes = False
        kept.append(part)
    return kept


def end_ids_of(stops: Iterable[str], special: SpecialTokens) -> list[int]:
    """The special tokens that are stops by themselves, which the engine can end at."""
    sequences = (each for stop in stops for each in sequences_of(stop, special) if len(each) == 1)
    return list(dict.fromkeys(token for (token,) in sequences if isinstance(token, int)))


class _Automaton:
    """Finds the ends of sequences, after Aho and Corasick.

    A node is the longest end of what was read that a sequence begins with. Building it is linear
    in the sequences' symbols. Each is given with the stop string that it is.
    """

    def __init__(self, sequences: Iterable[tuple[Sequence[Symbol], str]]) -> None:
        self.next: list[dict[Symbol, int]] = [{}]
        self.fallback = [0]
        """The node of the longest proper end of a node that is a node too."""
        self.characters = [0]
        """Those of a node."""
        self.completed: list[tuple[int, str] | None] = [None]
        """The longest sequence that ends at a node: its characters, and its stop string."""
        for sequence, string in sequences:
            self._insert(sequence, string)
        self._link()

    def _insert(self, sequence: Sequence[Symbol], string: str) -> None:
        node = 0
        for symbol in sequence:
            if symbol not in self.next[node]:
                self.next[node][symbol] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.characters.append(self.characters[node] + isinstance(symbol, str))
                self.completed.append(None)
            node = self.next[node][symbol]
        self.completed[node] = self.characters[node], string

    def _link(self) -> None:
        """Sets fallbacks breadth first, so that those of shorter nodes are there."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for symbol, child in self.next[node].items():
                self.fallback[child] = self.step(self.fallback[node], symbol)
                queue.append(child)
            if self.completed[node] is None:
                self.completed[node] = self.completed[self.fallback[node]]

    def step(self, node: int, symbol: Symbol) -> int:
        """The node after one more symbol."""
        while node and symbol not in self.next[node]:
            node = self.fallback[node]
        return self.next[node].get(symbol, 0)


class StopStrings:
    """Strings of which the first to be complete ends a text.

    A string that names special tokens is looked for twice: in the text as it is written, and with
    the tokens themselves in their places. `search` starts one text.

    Args:
      strings: none of them empty.
      special: tokens of the tokenizer.

    Raises:
      ValueError: one is empty.
    """

    def __init__(self, strings: Iterable[str], special: SpecialTokens | None = None) -> None:
        strings = list(strings)
        if not all(strings):
            raise ValueError("a stop string is empty.")
        special = special or SpecialTokens()
        marked = [(each, string) for string in strings for each in sequences_of(string, special)]
        self.in_text = _Automaton((string, string) for string in strings)
        self.with_tokens = _Automaton(marked) if marked else None
        """Of the strings that name special tokens."""

    def search(self) -> "StopSearch":
        """A search in a text that has not begun."""
        return StopSearch(self)


class StopSearch:
    """Looks for stop strings in a text that comes in pieces; linear in its characters.

    The string that is complete first ends the text, the longest of those that are complete at the
    same place. What may still become one of them is held back. Special tokens have no text: they
    interrupt only what is looked for with tokens.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._in_text, self._with_tokens = strings.in_text, strings.with_tokens
        self._node = 0
        self._node_with_tokens = 0
        self._held = ""
        self._read = 0
        """Characters so far."""
        self._tokens: deque[tuple[int, int]] = deque()
        """Special tokens that were not read yet, behind so many characters."""
        self.found: str | None = None
        """The string that ended the text."""

    def add(self, piece: str) -> tuple[str, bool]:
        """The text that is certain with one more piece, and whether a string ended it.

        Nothing of that string or behind it is given.
        """
        text = self._held + piece
        first = self._read - len(self._held)
        end = self._read_on(piece)
        if end is not None:
            self._node = self._node_with_tokens = 0
            self._held = ""
            return text[: end - first], True
        held = self._in_text.characters[self._node]
        if self._with_tokens is not None:
            held = max(held, self._with_tokens.characters[self._node_with_tokens])
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def add_token(self, token: int, pending: str) -> tuple[str, bool]:
        """The text that is certain with a special token, and whether it ended the text.

        Args:
          token: its id.
          pending: the text before it that may still change; it is added only if the text ends.
        """
        if self._with_tokens is None:
            return "", False
        self._tokens.append((self._read + len(pending), token))
        return self.add(pending if self.would_end(pending) else "")

    def would_end(self, piece: str) -> bool:
        """Whether `add` of this piece would end the text."""
        other = copy.copy(self)
        other._tokens = self._tokens.copy()
        return other._read_on(piece) is not None

    def _read_on(self, piece: str) -> int | None:
        """Reads characters, and the tokens among them; where the text ends, if it does."""
        for character in piece:
            if (end := self._read_tokens()) is not None:
                return end
            self._read += 1
            self._node = self._in_text.step(self._node, character)
            found = self._in_text.completed[self._node]
            if (other := self._step_with_tokens(character)) is not None:
                found = other if found is None else max(other, found)
            if found is not None:
                return self._end(found)
        return self._read_tokens()

    def _read_tokens(self) -> int | None:
        while self._tokens and self._tokens[0][0] <= self._read:
            found = self._step_with_tokens(self._tokens.popleft()[1])
            if found is not None:
                return self._end(found)
        return None

    def _end(self, found: tuple[int, str]) -> int:
        length, self.found = found
        return self._read - length

    def _step_with_tokens(self, symbol: Symbol) -> tuple[int, str] | None:
        automaton = self._with_tokens
        if automaton is None:
            return None
        self._node_with_tokens = automaton.step(self._node_with_tokens, symbol)
        return automaton.completed[self._node_with_tokens]

    def flush(self) -> str:
        """The text that was held back, when nothing follows."""
        held, self._held, self._node, self._node_with_tokens = self._held, "", 0, 0
        return held
