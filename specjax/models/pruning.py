"""Drafts that know a part of their target's tokens: a row for each, and one for all the others.

Frequency-ranked tokens are what FR-Spec (arXiv 2502.14856) leaves a draft, and EAGLE-3's heads
have such maps. What a draft does not know has probability 0 in q, which every rule allows.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.base.pytree import replace
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model


def rows_of(ids: Int[np.ndarray, " D"], vocab_size: int) -> np.ndarray:
    """Each token's row where token `ids[d]` has row d, int32 [U]; those of no other have row D.

    Raises:
      ValueError: a token is outside the vocabulary or there twice.
    """
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"it names tokens from {int(ids.min())} to {int(ids.max())}; the vocabulary has "
            f"{vocab_size}."
        )
    found = np.full(vocab_size, ids.size, np.int32)
    found[ids] = np.arange(ids.size, dtype=np.int32)
    if (known := int((found < ids.size).sum())) != ids.size:
        raise ValueError(f"it names {ids.size} tokens, of which {known} differ.")
    return found


def ids_of(row_of: Int[np.ndarray, " U"], count: int) -> np.ndarray:
    """The tokens of the first `count` rows, int64 [D]."""
    return np.argsort(row_of, kind="stable")[:count]


def with_rows(model: Model, ids: Int[np.ndarray, " D"], vocab_size: int) -> Model:
    """A draft over `vocab_size` tokens whose tables have a row for each of `ids`, and one more.

    Raises:
      ValueError: the tables have other rows, or the tokens are no such ones (see `rows_of`).
    """
    held = model.embedding.shape[0]
    if held != ids.size + 1:
        raise ValueError(f"the tables have {held} rows; {ids.size} tokens need {ids.size + 1}.")
    config = dataclasses.replace(
        model.config, vocab_size=vocab_size, draft_vocab_size=ids.size, num_known=None
    )
    return replace(model, row_of=jnp.asarray(rows_of(ids, vocab_size)), config=config)


def pruned(model: Model, ids: Int[np.ndarray, " D"]) -> Model:
    """A draft that knows the tokens `ids` of `model`'s alone; the row of the others is their mean.

    Raises:
      ValueError: it knows all of them, or its tables are packed; see also `rows_of`.
    """
    if isinstance(model.embedding, PackedWeight) or isinstance(model.unembedding, PackedWeight):
        raise ValueError("tables that are quantized are not pruned.")
    size = model.config.vocab_size
    others = rows_of(ids, size) == ids.size
    if not others.any():
        raise ValueError(f"all {size} tokens are known; nothing is pruned.")

    def rows(table: Float[Array, "V E"]) -> Float[Array, "D E"]:
        return jnp.concatenate([table[ids], table[others].mean(axis=0, keepdims=True)])

    unembedding = None if model.unembedding is None else rows(model.unembedding)
    made = replace(model, embedding=rows(model.embedding), unembedding=unembedding)
    return with_rows(made, ids, size)


def resized(model: Model, size: int, known: int) -> Model:
    """A pruned draft for a target with tables of `size` rows, of which `known` are tokens.

    No token beyond them has a row of its own.
    """
    own = model.config.draft_vocab_size
    assert model.row_of is not None
    kept = model.row_of[: min(size, known)]
    row_of = jnp.pad(kept, (0, size - kept.shape[0]), constant_values=own)
    return replace(model, row_of=row_of, config=dataclasses.replace(model.config, vocab_size=size))
