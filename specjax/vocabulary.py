"""Whether two models mean the same by their tokens, and drafts fitted to their target's tables."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array
from tokenizers import Tokenizer

from specjax.folder import CheckpointError, Files
from specjax.model import Model
from specjax.pytree import replace

Contents = Mapping[str, int]
_FILE = "tokenizer.json"
_SHOWN = 3


def contents_of(files: Files) -> Contents | None:
    """The tokens of a folder's tokenizer with their numbers; None where it has none to compare.

    Raises:
      CheckpointError: it cannot be read.
    """
    file = files.folder / _FILE
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # what the library raises has no type of its own
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def known(contents: Contents) -> int:
    """How many numbers of a vocabulary mean something; a table's rows past them are padding."""
    return max(contents.values()) + 1


class Difference(NamedTuple):
    """Numbers that two vocabularies give to different tokens: how many of how many, and some."""

    number: int
    of: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number:,} of {self.of:,} tokens differ, such as {'; '.join(self.examples)}"


def difference(target: Contents, draft: Contents) -> Difference | None:
    """How a draft's vocabulary differs from its target's, or None."""
    names, others = ({number: token for token, number in each.items()} for each in (target, draft))
    differing = sorted(n for n in {*names, *others} if names.get(n) != others.get(n))
    if not differing:
        return None
    shown = tuple(f"{n} is {names.get(n)!r}, and {others.get(n)!r}" for n in differing[:_SHOWN])
    return Difference(len(differing), len({*names, *others}), shown)


def fitted(model: Model, size: int, known: int) -> Model:
    """A draft with tables of `size` rows, of which it proposes the first `known`.

    What it has beyond is cut off, what it lacks filled up: both are padding.
    """
    if model.config.vocab_size == size:
        return model

    def rows(table: Array | None) -> Array | None:
        if table is None:
            return None
        spare = max(0, size - table.shape[0])
        return jnp.pad(table, ((0, spare), (0, 0)))[:size]

    config = dataclasses.replace(
        model.config, vocab_size=size, num_known=min(known, model.config.vocab_size)
    )
    embedding, unembedding = rows(model.embedding), rows(model.unembedding)
    return replace(model, embedding=embedding, unembedding=unembedding, config=config)
