"""What is shown of running requests: their last tokens, which of them were drafted, a tree."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_TOKENS = 400
"""Tokens of a request that are kept, the newest."""


class WatchedNode(NamedTuple):
    """A node of a tree: its token, its parent (-1: none), the drafter's probability, and whether
    it was accepted.
    """

    token: int
    parent: int
    chance: float
    accepted: bool


class Watched(NamedTuple):
    """A running request.

    `tokens` are its last ones, with whether each was drafted and accepted; `tree` is that of its
    last step, made with `setting`.
    """

    id: str
    row: int
    prompt: Sequence[int]
    temperature: float
    max_tpot_ms: float | None
    steps: int
    generated: int
    accepted: int
    tokens: Sequence[tuple[int, bool]]
    setting: str
    tree: Sequence[WatchedNode]


class Recent:
    """The last tokens of a request and its last tree, as the engine's thread notes them."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, bool]] = deque(maxlen=_TOKENS)
        self._tree: tuple[str, Callable[[], Sequence[WatchedNode]]] | None = None

    def note(
        self,
        tokens: Sequence[int],
        accepted: int,
        setting: str,
        tree: Callable[[], Sequence[WatchedNode]],
    ) -> None:
        """Notes a step: the first `accepted` of its tokens had been drafted."""
        self._tokens.extend((token, at < accepted) for at, token in enumerate(tokens))
        self._tree = setting, tree

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        """The last tokens, and whether each was drafted."""
        return list(self._tokens)

    @property
    def tree(self) -> tuple[str, list[WatchedNode]]:
        """The setting of the last step, and its tree."""
        if self._tree is None:
            return "", []
        setting, tree = self._tree
        return setting, list(tree())
