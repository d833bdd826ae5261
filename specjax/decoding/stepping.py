"""One speculative step: draft, score, verify, commit."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, is_greedy, largest, most_likely, process
from specjax.decoding.request import Limits, window_of
from specjax.draft.drafter import Drafter, DraftState, Step
from specjax.models import layers
from specjax.models.kv_cache import KVCache, NewKV, cache_dtype, empty_cache
from specjax.models.transformer import Model, forward, trunk, unembed
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree, ancestors, root_only, shallower
from specjax.verify.rules import Rule, decide
from specjax.verify.token_wise import match

_SEEN_BLOCK = 128
"""Columns of a prompt that are unembedded at a time."""


@pytree
class DecodeState:
    """Everything a batch of rows needs to go on.

    `cache` holds each row's tokens but the last; `last` is that token, the root of the next tree,
    and stands at position `cache.length`.
    """

    cache: KVCache
    draft: DraftState
    last: Int32[Array, " B"]
    key: Key[Array, " B"]


def prefill(
    target: Model,
    drafter: Drafter | None,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    key: Key[Array, " B"],
    slots: int,
) -> DecodeState:
    """The state after prompts of `length` tokens, right-padded to `T`; `slots` cache slots a row.

    The last prompt token is the first root, so the first token comes from a step like any other.
    """
    state, top_tokens = read(target, prompt, length, key, slots, target_top_k_of(drafter))
    if drafter is None:
        return state
    return replace(state, draft=drafter.init(prompt, length, slots, top_tokens))


def read(
    target: Model,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    key: Key[Array, " B"],
    slots: int,
    target_top_k: int,
) -> tuple[DecodeState, Int32[Array, "B T k"]]:
    """The target's part of a prefill, and its likeliest tokens after each token of the prompts."""
    rows, tokens = prompt.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
    x, new = trunk(target, prompt, positions, None, None)
    dtype = cache_dtype(target.embedding.dtype)
    cache = empty_cache(target.config, rows, slots, dtype, target.kv_heads)
    last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)[:, 0]
    state = DecodeState(cache.keep(new, None, length - 1), (), last, key)
    return state, top_tokens_in(target, x, prompt.shape, target_top_k)


def target_top_k_of(drafter: Drafter | None) -> int:
    """How many of the target's likeliest tokens the drafter wants to see."""
    return 0 if drafter is None else drafter.target_top_k


def top_tokens_in(
    target: Model, x: Float[Array, "E C"], shape: tuple[int, ...], count: int
) -> Int32[Array, "B T k"]:
    """The target's `count` likeliest tokens after each column of a pass, a block at a time."""
    if not count:
        return jnp.zeros((*shape, 0), jnp.int32)
    columns = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _SEEN_BLOCK)))
    blocks = columns.reshape(x.shape[0], -1, _SEEN_BLOCK).swapaxes(0, 1)
    best = lax.map(lambda block: largest(unembed(target, block).T, count)[1], blocks)
    return best.reshape(-1, count)[: x.shape[1]].reshape(*shape, count)


def draft_tree(
    target: Model, drafter: Drafter | None, sampling: Sampling, state: DecodeState
) -> tuple[TokenTree, DraftState]:
    """A tree below each row's root, and the drafter's state; nothing but the root without one."""
    if drafter is None:
        return root_only(state.last, target.config.vocab_size), state.draft
    length = state.cache.length
    tree, draft = drafter.propose(state.key, length, state.draft, state.last, sampling)
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
    tree_mask = jnp.pad(ancestors(tree), ((0, 0), (0, spare), (0, spare)))
    tree_mask |= jnp.eye(slots + spare, dtype=bool)
    positions = state.cache.length[:, None] + depth
    logits, new = forward(target, tokens, positions, state.cache, tree_mask)
    return logits[:, :slots], new


def verify_tree(
    rule: Rule,
    sampling: Sampling,
    state: DecodeState,
    tree: TokenTree,
    logits: Float[Array, "B N V"],
    window: int,
) -> Accepted:
    """What `rule` accepts of every row's tree.

    On rows of temperature 0 all rules decide as the greedy one does, which needs no distribution;
    where there is no other row, none is made.
    """

    def by_rule(logits: Float[Array, "B N V"]) -> Accepted:
        p = process(logits, sampling)
        one = partial(decide, rule, window=window)
        return jax.vmap(lambda key, at, t, probs: one(key, at, t, probs))(
            state.key, state.cache.length, tree, p
        )

    def by_choice(logits: Float[Array, "B N V"]) -> Accepted:
        return jax.vmap(lambda t, choice: match(t, choice, window))(tree, most_likely(logits))

    return lax.cond(is_greedy(sampling).all(), by_choice, by_rule, logits)


def commit(
    drafter: Drafter | None, state: DecodeState, new: NewKV, draft: DraftState, step: Step
) -> DecodeState:
    """The state after a step's tokens, of which the last becomes the root.

    `new` are the pass's keys and values, `draft` is the drafter's state after it drafted.
    """
    count = step.count
    last = jnp.take_along_axis(step.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(
        state,
        cache=state.cache.keep(new, step.accepted.path, count),
        draft=draft if drafter is None else drafter.commit(draft, step),
        last=jnp.where(count > 0, last, state.last),
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
    tokens: Int32[Array, "B W"],
    count: Int32[Array, " B"],
    made: Int32[Array, " B"],
    done: Bool[Array, " B"],
    limits: Limits,
    eos_ids: tuple[int, ...],
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """How many of a step's tokens count, and which rows are now done.

    A row ends after the first end token inside the accepted path, or at exactly
    `max_new_tokens`; a row that was done gives nothing.
    """
    is_end = jnp.isin(tokens, jnp.asarray(eos_ids, jnp.int32)) & limits.stop
    is_end &= jnp.arange(tokens.shape[1]) < count[:, None]
    ended = is_end.any(axis=1)
    count = jnp.where(ended, jnp.argmax(is_end, axis=1) + 1, count)
    full = made + count >= limits.max_new_tokens
    count = jnp.where(done, 0, jnp.minimum(count, limits.max_new_tokens - made))
    return count.astype(jnp.int32), done | ended | full


def step(
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    sampling: Sampling,
    limits: Limits,
    state: DecodeState,
    made: Int32[Array, " B"],
    done: Bool[Array, " B"],
) -> tuple[DecodeState, Step, Bool[Array, " B"]]:
    """One speculative step: draft, score, verify, commit.

    The names of the scopes are what `specjax.measure.profile` tells its parts by.
    """
    with jax.named_scope("draft"):
        tree, draft = draft_tree(target, drafter, sampling, state)
    with jax.named_scope("score"):
        logits, new = score_tree(target, tree, state)
    with jax.named_scope("verify"):
        accepted = verify_tree(rule, sampling, state, tree, logits, window_of(drafter))
        tokens = emitted(tree, accepted)
        count, done = truncate(tokens, accepted.count, made, done, limits, target.config.eos_ids)
        top_tokens = top_tokens_of(logits, target_top_k_of(drafter))
    gave = Step(tokens, count, tree, accepted, top_tokens)
    with jax.named_scope("commit"):
        return commit(drafter, state, new, draft, gave), gave, done
