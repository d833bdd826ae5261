"""One speculative step: draft, score, verify, commit."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, is_greedy, largest, most_likely, process
from specjax.decoding.request import Limits, Rows
from specjax.draft.drafter import Drafter, DraftState, Step
from specjax.models import layers
from specjax.models.kv_cache import KVCache, NewKV, cache_dtype, empty_cache
from specjax.models.transformer import Model, forward, trunk, unembed
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree, shallower, tree_attention_mask
from specjax.verify.rules import Rule, decide
from specjax.verify.token_wise import match

_BLOCK = 128
"""Columns of a prompt that are unembedded at a time."""


@pytree
class DecodeState:
    """Everything a batch of rows needs to go on; rows are independent of each other.

    `cache` holds each row's tokens but the last; `last` is that token, the root of the next tree,
    and stands at position `cache.length`. `made` are the tokens a row has given, and a row that is
    `done` gives no more.
    """

    cache: KVCache
    draft: DraftState
    last: Int32[Array, " B"]
    key: Key[Array, " B"]
    sampling: Sampling
    limits: Limits
    made: Int32[Array, " B"]
    done: Bool[Array, " B"]


def prefill(target: Model, drafter: Drafter, rows: Rows, slots: int) -> DecodeState:
    """The state after prompts, with `slots` cache slots a row.

    The last prompt token is the first root, so the first token comes from a step like any other.
    """
    state, top_tokens = read(target, rows, slots, drafter.target_top_k)
    return replace(state, draft=drafter.init(rows.prompt, rows.length, slots, top_tokens))


def read(
    target: Model, rows: Rows, slots: int, target_top_k: int
) -> tuple[DecodeState, Int32[Array, "B T k"]]:
    """The target's part of a prefill, and its likeliest tokens after each token of the prompts."""
    count, tokens = rows.prompt.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (count, tokens))
    x, new = trunk(target, rows.prompt, positions, None, None)
    dtype = cache_dtype(target.embedding.dtype)
    cache = empty_cache(target.config, count, slots, dtype, target.kv_heads)
    made = jnp.zeros(count, jnp.int32)
    state = DecodeState(
        cache=cache.keep(new, None, rows.length - 1),
        draft=(),
        last=jnp.take_along_axis(rows.prompt, rows.length[:, None] - 1, axis=1)[:, 0],
        key=rows.key,
        sampling=rows.sampling,
        limits=rows.limits,
        made=made,
        done=made != 0,
    )
    return state, top_tokens_in(target, x, rows.prompt.shape, target_top_k)


def top_tokens_in(
    target: Model, x: Float[Array, "E C"], shape: tuple[int, ...], count: int
) -> Int32[Array, "B T k"]:
    """The target's `count` likeliest tokens after each column of a pass, a block at a time."""
    if not count:
        return jnp.zeros((*shape, 0), jnp.int32)
    columns = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK)))
    blocks = columns.reshape(x.shape[0], -1, _BLOCK).swapaxes(0, 1)
    best = lax.map(lambda block: largest(unembed(target, block).T, count)[1], blocks)
    return best.reshape(-1, count)[: x.shape[1]].reshape(*shape, count)


def draft_tree(target: Model, drafter: Drafter, state: DecodeState) -> tuple[TokenTree, DraftState]:
    """A tree below each row's root, and the drafter's state."""
    length = state.cache.length
    tree, draft = drafter.propose(state.key, length, state.draft, state.last, state.sampling)
    return shallower(tree, target.config.max_positions - length), draft


def score_tree(
    target: Model, tree: TokenTree, state: DecodeState
) -> tuple[Float[Array, "B N V"], NewKV]:
    """The target's logits after every node, in one pass.

    Empty slots are added where the platform's products run faster with more columns.
    """
    rows, slots = tree.tokens.shape
    spare = layers.fast_columns(rows * slots, target.embedding.dtype) // rows - slots
    tokens, depth = (jnp.pad(x, ((0, 0), (0, spare))) for x in (tree.tokens, tree.depth))
    tree_mask = jnp.pad(tree_attention_mask(tree), ((0, 0), (0, spare), (0, spare)))
    tree_mask |= jnp.eye(slots + spare, dtype=bool)
    positions = state.cache.length[:, None] + depth
    logits, new = forward(target, tokens, positions, state.cache, tree_mask)
    return logits[:, :slots], new


def verify_tree(
    rule: Rule, state: DecodeState, tree: TokenTree, logits: Float[Array, "B N V"], window: int
) -> Accepted:
    """What `rule` accepts of every row's tree.

    On rows of temperature 0 all rules decide as the greedy one does, which needs no distribution;
    where there is no other row, none is made.
    """

    def by_rule(logits: Float[Array, "B N V"]) -> Accepted:
        p = process(logits, state.sampling)
        one = partial(decide, rule, window=window)
        return jax.vmap(lambda key, at, t, probs: one(key, at, t, probs))(
            state.key, state.cache.length, tree, p
        )

    def by_choice(logits: Float[Array, "B N V"]) -> Accepted:
        return jax.vmap(lambda t, choice: match(t, choice, window))(tree, most_likely(logits))

    return lax.cond(is_greedy(state.sampling).all(), by_choice, by_rule, logits)


def accept(
    rule: Rule,
    state: DecodeState,
    tree: TokenTree,
    logits: Float[Array, "B N V"],
    window: int,
    target_top_k: int,
) -> Step:
    """The tokens that a step gives: what the rule accepts, cut off where a row's text ends."""
    accepted = verify_tree(rule, state, tree, logits, window)
    tokens = emitted(tree, accepted)
    count, done = truncate(tokens, accepted.count, state)
    top_tokens = top_tokens_of(logits, target_top_k)
    return Step(tokens, count, done, tree, accepted, top_tokens)


def commit(state: DecodeState, new: NewKV, draft: DraftState, step: Step) -> DecodeState:
    """The state after a step's tokens, of which the last becomes the root.

    `new` are the pass's keys and values, `draft` is the drafter's state after the step.
    """
    count = step.count
    last = jnp.take_along_axis(step.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(
        state,
        cache=state.cache.keep(new, step.accepted.path, count),
        draft=draft,
        last=jnp.where(count > 0, last, state.last),
        made=state.made + count,
        done=step.done,
    )


def emitted(tree: TokenTree, accepted: Accepted) -> Int32[Array, "B W"]:
    """The tokens a step gives: those of the path below the root, then the token after it."""
    along = jnp.take_along_axis(tree.tokens, jnp.roll(accepted.path, -1, axis=1), axis=1)
    at_end = jnp.arange(along.shape[1]) == accepted.count[:, None] - 1
    return jnp.where(at_end, accepted.token[:, None], along)


def top_tokens_of(logits: Float[Array, "B N V"], count: int) -> Int32[Array, "B N k"]:
    """The tokens of the `count` largest logits of each node."""
    if not count:  # most drafters ask for none, and a step should not pay for it
        return jnp.zeros((*logits.shape[:2], 0), jnp.int32)
    return largest(logits, count)[1]


def truncate(
    tokens: Int32[Array, "B W"], count: Int32[Array, " B"], state: DecodeState
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """How many of a step's tokens count, and which rows are now done.

    A row ends after its first end token inside the accepted path, or at exactly its
    `max_new_tokens`; a row that was done gives nothing.
    """
    limits = state.limits
    is_end = (tokens[:, :, None] == limits.end_ids[:, None]).any(axis=-1)
    is_end &= jnp.arange(tokens.shape[1]) < count[:, None]
    ended = is_end.any(axis=1)
    count = jnp.where(ended, jnp.argmax(is_end, axis=1) + 1, count)
    full = state.made + count >= limits.max_new_tokens
    count = jnp.where(state.done, 0, jnp.minimum(count, limits.max_new_tokens - state.made))
    return count.astype(jnp.int32), state.done | ended | full


def step(
    target: Model, drafter: Drafter, rule: Rule, state: DecodeState
) -> tuple[DecodeState, Step]:
    """One speculative step: draft, score, verify, commit.

    The names of the scopes are what `specjax.measure.profile` tells its parts by.
    """
    with jax.named_scope("draft"):
        tree, draft = draft_tree(target, drafter, state)
    with jax.named_scope("score"):
        logits, new = score_tree(target, tree, state)
    with jax.named_scope("verify"):
        gave = accept(rule, state, tree, logits, drafter.window, drafter.target_top_k)
    with jax.named_scope("commit"):
        return commit(state, new, drafter.commit(draft, gave), gave), gave
