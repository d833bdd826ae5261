"""Answers that have ended, as the corpus that later ones are drafted from."""

import threading
from collections import deque

import numpy as np

from specjax.draft.retrieval import Corpus
from specjax.draft.suffix import earlier

_NEW = 1 / 64
"""New tokens after which the corpus is made anew, as a share of what it holds."""


class EarlierTexts:
    """The last answers of an engine, and a corpus of them that is made anew in a thread.

    To order a corpus takes as long as several steps, so no step waits for it.

    Args:
      size: of the corpus in tokens.
    """

    def __init__(self, size: int) -> None:
        self._size, self._held, self._new = size, 0, 0
        self._texts: deque[np.ndarray] = deque()
        self._made: Corpus | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, text: list[int]) -> None:
        """Keeps an answer, and drops the oldest ones that have no place beside it."""
        if not text:
            return
        with self._lock:
            self._texts.append(np.asarray(text[1 - self._size :], np.int32))
            self._held += len(self._texts[-1]) + 1
            self._new += len(self._texts[-1]) + 1
            while self._held > self._size and len(self._texts) > 1:
                self._held -= len(self._texts.popleft()) + 1
            self._make()

    def _make(self) -> None:
        """Begins to make the corpus anew if there is enough that it does not hold."""
        runs = self._thread is not None and self._thread.is_alive()
        few = self._new < _NEW * self._size and self._new < self._held
        if runs or few:
            return
        self._new, texts = 0, list(self._texts)
        self._thread = threading.Thread(target=self._ordered, args=(texts,), daemon=True)
        self._thread.start()

    def _ordered(self, texts: list[np.ndarray]) -> None:
        made = earlier(texts, self._size)
        with self._lock:
            self._made = made

    def made(self) -> Corpus | None:
        """The corpus, if it was made anew since this was asked last."""
        with self._lock:
            made, self._made = self._made, None
            if made is not None:
                self._make()
        return made
