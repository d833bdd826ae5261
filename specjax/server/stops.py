"""Stop strings, found across the pieces of a text."""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Strings of which the first to be complete ends a text, as an Aho-Corasick automaton.

    A node is the longest end of the text that a string begins with. Building it is linear in the
    strings' characters; `search` starts one text.

    Args:
      strings: none of them empty.

    Raises:
      ValueError: one is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fallback = [0]
        """The node of the longest proper end of a node that is a node too."""
        self.depth = [0]
        self.completed = [0]
        """Characters of the longest string that ends at a node; 0 where none does."""
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string is empty.")
        node = 0
        for character in string:
            if character not in self.next[node]:
                self.next[node][character] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.completed.append(0)
            node = self.next[node][character]
        self.completed[node] = len(string)

    def _link(self) -> None:
        """Sets fallbacks breadth first, so that those of shorter nodes are there."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.next[node].items():
                self.fallback[child] = self.step(self.fallback[node], character)
                queue.append(child)
            self.completed[node] = max(self.completed[node], self.completed[self.fallback[node]])

    def step(self, node: int, character: str) -> int:
        """The node after one more character."""
        while node and character not in self.next[node]:
            node = self.fallback[node]
        return self.next[node].get(character, 0)

    def search(self) -> "StopSearch":
        """A search in a text that has not begun."""
        return StopSearch(self)


class StopSearch:
    """Looks for stop strings in a text that comes in pieces; linear in its characters.

    The string that is complete first ends the text, the longest of those that are complete at the
    same character. What may still become one of them is held back.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._node = 0
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """The text that is certain with one more piece, and whether a string ended it.

        Nothing of that string or behind it is given.
        """
        node, text = self._node, self._held + piece
        for place, character in enumerate(piece, start=len(self._held) + 1):
            node = self._strings.step(node, character)
            if length := self._strings.completed[node]:
                self._node, self._held = 0, ""
                return text[: place - length], True
        certain = len(text) - self._strings.depth[node]
        self._node, self._held = node, text[certain:]
        return text[:certain], False

    def would_end(self, piece: str) -> bool:
        """Whether `add` of this piece would end the text."""
        node = self._node
        for character in piece:
            node = self._strings.step(node, character)
            if self._strings.completed[node]:
                return True
        return False

    def flush(self) -> str:
        """The text that was held back, when nothing follows."""
        held, self._held, self._node = self._held, "", 0
        return held
