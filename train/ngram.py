"""A back-off trigram model of what a model says, counted and laid out (Katz 1987).

S. M. Katz, Estimation of probabilities from sparse data, IEEE ASSP 35(3). Where Katz discounts
small counts by Good and Turing's formula, every count here loses the same amount, n1 / (n1 + 2 n2)
of the counts of 1 and 2 (Ney, Essen and Kneser 1994): greedy text has too few rare grams for the
formula's fractions to be sound.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.draft.ngram import NO_TOKEN, NGram, pack

_NOTHING = 1e-9
"""A mass that rounding leaves."""

_NEVER = 1e-30
"""What the logarithm of an impossible token is taken of."""


class Occurrences(NamedTuple):
    """Tokens of texts, each after two others; `before` may be `NO_TOKEN`."""

    before: Int[np.ndarray, " N"]
    last: Int[np.ndarray, " N"]
    token: Int[np.ndarray, " N"]


def occurrences_after(
    tokens: Int[np.ndarray, "N T"], following: Int[np.ndarray, "N T"]
) -> Occurrences:
    """The token of `following` after each token of each row; negative where there is none."""
    before = np.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=NO_TOKEN)
    there = following >= 0
    return Occurrences(before[there], tokens[there], following[there])


def joined(parts: Iterable[Occurrences]) -> Occurrences:
    """All of them."""
    return Occurrences(*(np.concatenate(each) for each in zip(*parts, strict=True)))


class Successors(NamedTuple):
    """The distinct tokens that followed a context, and how often each did."""

    tokens: Int[np.ndarray, " n"]
    counts: Int[np.ndarray, " n"]


class Counts:
    """How often each token followed each context; contexts are numbers in increasing order."""

    def __init__(self, context: Int[np.ndarray, " N"], token: Int[np.ndarray, " N"], size: int):
        codes, self._counts = np.unique(context.astype(np.int64) * size + token, return_counts=True)
        self._tokens = codes % size
        self.contexts, starts = np.unique(codes // size, return_index=True)
        self._ends = np.append(starts, len(codes))
        ones, twos = ((self._counts == r).sum() for r in (1, 2))
        self.discount = float(ones / (ones + 2 * twos)) if ones and twos else 0.5
        self.totals = np.add.reduceat(self._counts, starts) if len(starts) else self._counts

    def of(self, context: int) -> Successors:
        """The successors of a context; none where it was never seen."""
        at = int(np.searchsorted(self.contexts, context))
        if at == len(self.contexts) or self.contexts[at] != context:
            return Successors(self._tokens[:0], self._counts[:0])
        piece = slice(self._ends[at], self._ends[at + 1])
        return Successors(self._tokens[piece], self._counts[piece])


def back_off(
    lower: Float[np.ndarray, " V"], seen: Successors, discount: float
) -> Float[np.ndarray, " V"]:
    """Katz's distribution: discounted counts, and what they lose spread over the others as in
    `lower`.

    Counts are not discounted where `lower` leaves nothing to the others.
    """
    tokens, counts = seen
    if not len(tokens):
        return lower
    probs = lower.copy()
    probs[tokens] = 0
    rest, total = probs.sum(), counts.sum()
    if rest < _NOTHING:
        discount, rest = 0.0, 1.0
    probs *= discount * len(tokens) / total / rest
    probs[tokens] = (counts - discount) / total
    return probs


class Katz:
    """The distributions of a back-off trigram model over `size` tokens, one at a time."""

    def __init__(self, of: Occurrences, size: int) -> None:
        known = of.before != NO_TOKEN
        pair = of.before[known].astype(np.int64) * size + of.last[known]
        self.size = size
        self.pairs = Counts(pair, of.token[known], size)
        self.singles = Counts(of.last, of.token, size)
        alone = Counts(np.zeros(len(of.token), np.int64), of.token, size)
        self.unigram = back_off(np.full(size, 1 / size), alone.of(0), alone.discount)

    def bigram(self, last: int) -> Float[np.ndarray, " V"]:
        """The distribution after `last`, the token before it being unknown or never seen with
        it.
        """
        return back_off(self.unigram, self.singles.of(last), self.singles.discount)

    def trigram(
        self, before: int, last: int, lower: Float[np.ndarray, " V"] | None = None
    ) -> Float[np.ndarray, " V"]:
        """The distribution after `before` and `last`; `lower` is `bigram(last)`, where it is at
        hand.
        """
        lower = self.bigram(last) if lower is None else lower
        if before == NO_TOKEN:
            return lower
        return back_off(lower, self.pairs.of(before * self.size + last), self.pairs.discount)


def materialize(model: Katz, width: int, most_contexts: int) -> NGram:
    """The `width` likeliest successors of every token, and of the most frequent contexts.

    Takes as many passes over the vocabulary as the table has rows.
    """
    contexts = _frequent(model, most_contexts)
    shape = model.size + len(contexts), width
    tokens, log_q = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, probs in enumerate(_distributions(model, contexts)):
        best = np.argpartition(-probs, width - 1)[:width]
        tokens[row] = best[np.lexsort((best, -probs[best]))]
        log_q[row] = np.log(np.maximum(probs[tokens[row]], _NEVER))
    return pack(contexts, tokens, log_q)


def _frequent(model: Katz, most: int) -> Int[np.ndarray, "C 2"]:
    """The `most` contexts of two tokens seen most often, sorted by their last token."""
    often = np.argsort(-model.pairs.totals, kind="stable")[:most]
    before, last = np.divmod(model.pairs.contexts[often], model.size)
    order = np.lexsort((before, last))
    return np.stack([before[order], last[order]], axis=1)


def _distributions(
    model: Katz, contexts: Int[np.ndarray, "C 2"]
) -> Iterator[Float[np.ndarray, " V"]]:
    """The distributions after every token, then after `contexts`, which are sorted by their last
    token.
    """
    for last in range(model.size):
        yield model.bigram(last)
    at, lower = NO_TOKEN, model.unigram
    for before, last in contexts.tolist():
        if last != at:
            at, lower = last, model.bigram(last)
        yield model.trigram(before, last, lower)
