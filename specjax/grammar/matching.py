"""A text that is followed through a grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from specjax.base.grammars import BITS, num_words

if TYPE_CHECKING:
    import llguidance


class TextMatcher:
    """The state of llguidance's parser along a text (see `specjax.base.grammars.Matcher`)."""

    def __init__(
        self, parser: "llguidance.LLMatcher", end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._parser, self._end_ids, self._words = parser, end_ids, num_words(vocab_size)
        self._error = ""

    def words(self) -> Int32[np.ndarray, " w"]:
        """The tokens that may come next; the end tokens alone where a limit was reached."""
        found = np.frombuffer(self._parser.compute_bitmask(), np.int32)[: self._words]
        if self._parser.is_error() or not found.any():
            why = " ".join(self._parser.get_error().split())[:300] or "no token fits"
            self._error = self._error or f"a text came to the limits of its grammar: {why}."
            return self._ends()
        return found

    def _ends(self) -> Int32[np.ndarray, " w"]:
        found = np.zeros(self._words, np.uint32)
        for token in self._end_ids:
            found[token // BITS] |= np.uint32(1 << token % BITS)
        return found.view(np.int32)

    def consume(self, tokens: Sequence[int]) -> int:
        """Takes the first tokens as far as they are allowed; how many that are.

        They are looked at first, as a parser that was given another one is of no more use.
        """
        count = self._parser.validate_tokens([*tokens])
        if count and not self._parser.consume_tokens([*tokens][:count]):
            self._error = self._error or " ".join(self._parser.get_error().split())[:300]
            return 0
        return count

    def rollback(self, count: int) -> None:
        """Forgets the last tokens."""
        self._parser.rollback(count)

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self._end_ids

    def error(self) -> str:
        """Why it can follow the text no further; empty if it can."""
        return self._error
