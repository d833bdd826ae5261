"""A text that is followed through a grammar."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from specjax.base.grammars import BITS, num_words

if TYPE_CHECKING:
    import llguidance


class TextMatcher:
    """The state of llguidance's parser along a text (see `specjax.base.grammars.Matcher`).

    Args:
      first: a parser at the beginning of texts, which stays there.
      end_ids: tokens that end a text.
      vocab_size: tokens of the model.
    """

    def __init__(
        self, first: "llguidance.LLMatcher", end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._first, self._parser = first, first.deep_copy()
        self._end_ids, self._words = end_ids, num_words(vocab_size)
        self._error = ""

    def words(self) -> Int32[np.ndarray, " w"]:
        """The tokens that may come next; the end tokens alone where a limit was reached."""
        if not self._error:
            found = np.frombuffer(self._parser.compute_bitmask(), np.int32)[: self._words]
            if found.any() and not self._parser.is_error():
                return found
            self._fail()
        return self._ends()

    def fail(self, reason: str) -> None:
        """Follows the text no further, for a reason in a sentence."""
        self._error = reason

    def _fail(self) -> None:
        why = " ".join(self._parser.get_error().split())[:300].rstrip(".") or "no token fits"
        self.fail(f"a text came to the limits of its grammar: {why}.")

    def _ends(self) -> Int32[np.ndarray, " w"]:
        found = np.zeros(self._words, np.uint32)
        for token in self._end_ids:
            found[token // BITS] |= np.uint32(1 << token % BITS)
        return found.view(np.int32)

    def consume(self, tokens: Sequence[int]) -> int:
        """Takes the first tokens as far as they are allowed; how many that are.

        They are looked at first, as a parser that was given another one is of no more use.
        """
        if self._error:
            return 0
        count = self._parser.validate_tokens([*tokens])
        taken = not count or self._parser.consume_tokens([*tokens][:count])
        if not taken or self._parser.is_error():
            self._fail()
            return 0
        return count

    def copy(self) -> "TextMatcher":
        """Another at the same place, by which drafts are followed.

        llguidance takes tokens back itself, but may have other masks then (1.9.1, where one was
        looked for meanwhile). A copy takes a microsecond, and one more for 25 tokens of the text.
        """
        found = copy.copy(self)
        found._parser = self._parser.deep_copy()
        return found

    def reset(self) -> None:
        """Goes back to the beginning."""
        self._parser, self._error = self._first.deep_copy(), ""

    def forced(self) -> Sequence[int]:
        """The tokens of what must come next byte by byte, as they are tokenized most often."""
        return [] if self._error else self._parser.compute_ff_tokens()

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self._end_ids

    def error(self) -> str:
        """Why it can follow the text no further; empty if it can."""
        return self._error
