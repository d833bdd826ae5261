"""A text that goes on: more tokens after those that a state holds, or fewer of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.pytree import replace
from specjax.decoding.stepping import DecodeState, seen_in
from specjax.draft.drafter import Drafter, Step
from specjax.models.transformer import Model, trunk
from specjax.trees.accepted import Accepted
from specjax.trees.tree import NO_DRAFTER, NO_PARENT, TokenTree

_FEW_SLOTS = 128
"""Of a state that is only looked at."""


def extended(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    tokens: Int32[Array, "1 T"],
    count: Int32[Array, "1"],
) -> tuple[DecodeState, Float[Array, "E C"]]:
    """A row's state after the first `count` of `tokens`, and the pass over them.

    It is as if a chain of these tokens had been drafted elsewhere and accepted.
    """
    number = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    nodes = jnp.concatenate([state.last[:, None], tokens[:, :-1]], axis=1)
    tree_mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    positions = state.cache.length[:, None] + number
    made = trunk(
        target, nodes, positions, state.cache, tree_mask, hidden_layers=drafter.wants.hidden_layers
    )
    seen = seen_in(target, made, tokens.shape, drafter.wants)
    tree = _chain(nodes, number < count[:, None], target.config.vocab_size)
    at_end = jnp.maximum(count - 1, 0)
    last = jnp.take_along_axis(tokens, at_end[:, None], axis=1)[:, 0]
    gave = Step(tokens, count, state.done, tree, Accepted(number, count, last), seen)
    state = replace(
        state,
        cache=state.cache.keep(made.new, None, count),
        draft=drafter.follow(state.draft, gave),
        last=jnp.where(count > 0, last, state.last),
    )
    return state, made.x


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


def _chain(tokens: Int32[Array, "1 T"], valid: Bool[Array, "1 T"], vocabulary: int) -> TokenTree:
    """The tokens as a tree, each below the one before it."""
    number = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return TokenTree(
        tokens=tokens,
        parents=jnp.where(number > 0, number - 1, NO_PARENT),
        depth=number,
        valid=valid,
        drafter=jnp.full_like(number, NO_DRAFTER),
        chance=jnp.ones(tokens.shape),
        trial_node=jnp.zeros((1, 0), jnp.int32),
        trial_row=jnp.zeros((1, 0), jnp.int32),
        q=jnp.zeros((1, 0, vocabulary)),
        certain=jnp.ones(1, bool),
    )
