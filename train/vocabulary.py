"""Drafts that learn a part of their target's tokens, in rows of their own (see `models.pruning`).

While it is trained such a draft is a model of D + 1 tokens: a row for each of the D tokens that it
knows, and one, never foreseen, for all the others. Its target's tokens and distributions are
turned into these rows a batch at a time; the map back is attached when it is measured and exported.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from specjax.models import pruning
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from train.collect import Collected
from train.labels import NEVER, Labelled

_LEAST = 1e-6
"""What a draft may foresee is at least as probable as this, where it is divided by."""


def most_frequent(rows: Collected, count: int, vocab_size: int) -> Int[np.ndarray, " D"]:
    """The `count` tokens that the target took most often, in increasing order.

    FR-Spec (arXiv 2502.14856) ranks tokens so. Of equally frequent ones the lower comes first.
    """
    taken = np.bincount(rows.following[rows.alive], minlength=vocab_size)
    return np.sort(np.argsort(-taken, kind="stable")[:count])


def in_training(whole: ModelConfig, known: int) -> ModelConfig:
    """The shape in training of a draft that will know `known` of `whole`'s tokens."""
    return dataclasses.replace(whole, vocab_size=known + 1, num_known=known)


class Rows:
    """The rows of a draft that knows the tokens `ids` of a target with `vocab_size` of them."""

    def __init__(self, ids: Int[np.ndarray, " D"], vocab_size: int) -> None:
        self.ids, self._vocab_size = ids, vocab_size
        self.row_of = pruning.rows_of(ids, vocab_size)

    def whole(self, model: Model) -> Model:
        """A draft in training as one of its target's tokens."""
        return pruning.with_rows(model, self.ids, self._vocab_size)

    def tokens(self, tokens: Int[np.ndarray, "*S"]) -> Int[np.ndarray, "*S"]:
        """The rows of tokens."""
        return self.row_of[tokens]

    def labelled(self, part: Labelled) -> Labelled:
        """Rows, and the target's distributions among the known tokens.

        Rows with hidden states keep their tokens: a head has embeddings of all of them.

        A position counts as much as they are probable there: by the chain rule that is all of the
        forward divergence which a draft that foresees no other token can change.
        """
        ids = self.row_of[part.ids].astype(np.min_scalar_type(len(self.ids)))
        log_p = np.asarray(part.log_p, np.float32)
        known = ids < len(self.ids)
        share = np.maximum(1 - np.exp(log_p).sum(axis=-1, where=~known), _LEAST)
        log_p = np.where(known, log_p - np.log(share)[..., None], NEVER)
        tokens = np.asarray(part.tokens)
        own = self.tokens(tokens) if part.hidden is None else tokens
        return Labelled(own, ids, log_p, part.weight * share, part.hidden)
