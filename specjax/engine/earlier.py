"""Answers that have ended, as the corpus that later ones are drafted from."""

import threading
from collections import deque
from functools import partial

import numpy as np

from specjax.draft.retrieval import Corpus
from specjax.draft.suffix import earlier

_NEW = 1 / 64
"""Share of the tokens that are kept which has to be new for the corpus to be made anew."""


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
        self.is_ordering = False

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
        if self.is_ordering or self._new <= _NEW * self._held:
            return
        self._new, self.is_ordering, texts = 0, True, list(self._texts)
        run = partial(self._order, texts)
        threading.Thread(target=run, name="specjax-earlier", daemon=True).start()

    def _order(self, texts: list[np.ndarray]) -> None:
        made = earlier(texts, self._size)
        with self._lock:
            self._made, self.is_ordering = made, False

    def made(self) -> Corpus | None:
        """The corpus, if it was made anew since this was asked last."""
        with self._lock:
            made, self._made = self._made, None
            if made is not None:
                self._make()
        return made
