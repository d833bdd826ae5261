"""A text that goes on: more tokens after those that a state holds, or fewer of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import replace
from specjax.decoding.stepping import DecodeState, seen_in
from specjax.draft.drafter import Drafter, Step
from specjax.models.packing import UNPACKED, packing_of
from specjax.models.transformer import Columns, Model, Pass, trunk
from specjax.trees.accepted import Accepted
from specjax.trees.tree import NO_DRAFTER, NO_PARENT, TokenTree

_FEW_SLOTS = 128
"""Of a state that is only looked at."""


def extended(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    tokens: Int32[Array, "B T"],
    count: Int32[Array, " B"],
    columns: int | None = None,
) -> tuple[DecodeState, Float[Array, "E C"]]:
    """The rows' states after the first `count` of their `tokens`, and the pass over them.

    It is as if a chain of these tokens had been drafted elsewhere and accepted. The pass has as
    many `columns`, for the tokens that count; by default one for each token.
    """
    own = columns_of_tokens(state, tokens, count, columns)
    made = trunk(
        target, own.tokens, own.positions, own.cache, own.tree_mask,
        packing=own.packing, hidden_layers=drafter.wants.hidden_layers,
    )  # fmt: skip
    return after_tokens(target, drafter, state, tokens, count, own, made), made.x


def columns_of_tokens(
    state: DecodeState,
    tokens: Int32[Array, "B T"],
    count: Int32[Array, " B"],
    columns: int | None = None,
) -> Columns:
    """The columns of a pass that reads the first `count` of the rows' `tokens` (see `extended`)."""
    size = tokens.shape[1]
    number = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    packing = UNPACKED if columns is None else packing_of(number < count[:, None], columns)
    nodes = jnp.concatenate([state.last[:, None], tokens[:, :-1]], axis=1)
    tree_mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((size, size), bool)), (tokens.shape[0], size, size)
    )
    positions = state.cache.length[:, None] + number
    return Columns(nodes, positions, state.cache, tree_mask, packing)


def after_tokens(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    tokens: Int32[Array, "B T"],
    count: Int32[Array, " B"],
    own: Columns,
    made: Pass,
) -> DecodeState:
    """The rows' states after a pass over their columns (see `columns_of_tokens`)."""
    number = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    shape = tokens.shape if own.packing.has_every_slot else (made.x.shape[1], 1)
    seen = jax.tree.map(own.packing.by_node, seen_in(target, made, shape, drafter.wants))
    tree = _chain(own.tokens, number < count[:, None], target.config.vocab_size)
    at_end = jnp.maximum(count - 1, 0)
    last = jnp.take_along_axis(tokens, at_end[:, None], axis=1)[:, 0]
    gave = Step(tokens, count, state.done, tree, Accepted(number, count, last), seen)
    return replace(
        state,
        cache=state.cache.keep(made.new, None, count),
        draft=drafter.follow(state.draft, gave),
        last=jnp.where(count > 0, last, state.last),
    )


def shortened(
    drafter: Drafter, state: DecodeState, length: Int32[Array, " B"], last: Int32[Array, " B"]
) -> DecodeState:
    """The state of rows that hold but the first `length` of their tokens, of which `last` are the
    last.

    More tokens follow before anything is drafted; the drafter must be one that `can_truncate`.
    """
    cache = replace(state.cache, length=length - 1)
    return replace(state, cache=cache, draft=drafter.truncate(state.draft, length), last=last)


def can_truncate(target: Model, drafter: Drafter) -> bool:
    """Whether a draft's state can be shortened, so that a text may begin with a part of another."""

    def shorter() -> object:
        state = drafter.init(
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            _FEW_SLOTS,
            drafter.wants.zeros((1, 1), target.config.hidden_size),
        )
        nonlocal able
        able = drafter.truncate(state, jnp.ones(1, jnp.int32)) is not None

    able: Any = False
    jax.eval_shape(shorter)
    return able


def _chain(tokens: Int32[Array, "B T"], valid: Bool[Array, "B T"], vocabulary: int) -> TokenTree:
    """The tokens of rows as trees, each below the one before it."""
    rows = tokens.shape[0]
    number = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return TokenTree(
        tokens=tokens,
        parents=jnp.where(number > 0, number - 1, NO_PARENT),
        depth=number,
        valid=valid,
        drafter=jnp.full_like(number, NO_DRAFTER),
        chance=jnp.ones(tokens.shape),
        trial_node=jnp.zeros((rows, 0), jnp.int32),
        trial_row=jnp.zeros((rows, 0), jnp.int32),
        q=jnp.zeros((rows, 0, vocabulary)),
        certain=jnp.ones(rows, bool),
    )
