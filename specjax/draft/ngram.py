"""A trigram model as tables: what may follow two tokens, likeliest first, by a few gathers."""

from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from specjax.base.pytree import pytree, static

ORDER = 3
"""Tokens of a gram: two of context and the next one."""

NO_TOKEN = -1
"""Stands before a text's first token, and in empty slots."""

_MIX = tuple(np.uint32(odd) for odd in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))

_Tokens = TypeVar("_Tokens", Array, np.ndarray)


@pytree
class NGram:
    """A back-off trigram model with its successors laid out (Katz 1987, truncated to `w`).

    Row v < V of `tokens` and `log_q` is what may follow token v when nothing is known of the
    token before it; later rows belong to a context of two tokens. `slots` is a hash table of
    these contexts with linear probing: the two tokens (`NO_TOKEN` in an empty slot) and the row.
    A context lies within `probes` slots of its home, of which there are `homes`, a power of two.
    """

    slots: Int32[Array, "H 3"]
    tokens: Int32[Array, "R w"]
    log_q: Float[Array, "R w"]
    vocab_size: int = static()
    homes: int = static()
    probes: int = static()

    @property
    def width(self) -> int:
        """Successors of a context."""
        return self.tokens.shape[1]

    @property
    def num_contexts(self) -> int:
        """Contexts of two tokens that have successors of their own."""
        return self.tokens.shape[0] - self.vocab_size


def successors(
    table: NGram, before: Int32[Array, "*S"], last: Int32[Array, "*S"]
) -> tuple[Float[Array, "*S w"], Int32[Array, "*S w"]]:
    """Log probabilities and tokens of what may follow `before` and `last`, likeliest first.

    `before` may be `NO_TOKEN`; the tokens of a row are distinct.
    """
    first = _home(before, last, table.homes)
    near = table.slots[first[..., None] + jnp.arange(table.probes)]
    is_context = (near[..., 0] == before[..., None]) & (near[..., 1] == last[..., None])
    # a context's row comes after the rows of all tokens
    row = jnp.max(jnp.where(is_context, near[..., 2], last[..., None]), axis=-1)
    return table.log_q[row], table.tokens[row]


def pack(
    contexts: Int[np.ndarray, "C 2"],
    tokens: Int[np.ndarray, "R w"],
    log_q: Float[np.ndarray, "R w"],
    homes: int | None = None,
) -> NGram:
    """The tables of distinct `contexts` whose rows follow those of the `R - C` tokens.

    `homes`, a power of two, is at least twice the contexts unless given.
    """
    count, vocabulary = len(contexts), len(tokens) - len(contexts)
    homes = homes or 1 << max(1, 2 * count - 1).bit_length()
    before, last = contexts.astype(np.int32).T
    home = _home(before, last, homes).astype(np.int64)
    order = np.argsort(home, kind="stable")
    # in the order of their homes each lies in its home or behind the one before, whichever is later
    number = np.arange(count)
    place = np.maximum.accumulate(home[order] - number) + number
    probes = int((place - home[order]).max(initial=0)) + 1
    slots = np.full((homes + probes, 3), NO_TOKEN, np.int32)
    slots[place] = np.stack([before[order], last[order], vocabulary + order], axis=1)
    return NGram(
        slots=jnp.asarray(slots),
        tokens=jnp.asarray(tokens, jnp.int32),
        log_q=jnp.asarray(log_q, jnp.float32),
        vocab_size=vocabulary,
        homes=homes,
        probes=probes,
    )


def contexts_of(table: NGram) -> Int[np.ndarray, "C 2"]:
    """The contexts of two tokens in the order of their rows."""
    slots = np.asarray(table.slots)
    used = slots[slots[:, 1] != NO_TOKEN]
    return used[np.argsort(used[:, 2]), :2]


def _home(before: _Tokens, last: _Tokens, homes: int) -> _Tokens:
    """Where the search for a context begins; equal for arrays of numpy and of JAX."""
    mixed = before.astype(np.uint32) * _MIX[0] ^ last.astype(np.uint32) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint32(16))) * _MIX[2]
    return ((mixed ^ (mixed >> np.uint32(13))) & np.uint32(homes - 1)).astype(np.int32)
