"""One speculative step: draft, score, verify, commit."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.platform import platform
from specjax.base.axes import Key
from specjax.base.grammars import NO_NODE, Grammars, allows, masked
from specjax.base.penalties import TokenCounts, penalized
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import GREEDY, Sampling, is_greedy, largest, most_likely, process
from specjax.decoding.request import Limits, Rows
from specjax.draft.drafter import Drafter, DraftState, Seen, Step, TokenLogprobs, Wants
from specjax.models import layers
from specjax.models.kv_cache import KVCache, NewKV, cache_dtype, empty_cache
from specjax.models.packing import UNPACKED, Packing, Unpacked, packing_of
from specjax.models.transformer import (
    PROMPT_BLOCK,
    Columns,
    Model,
    Pass,
    reads_in_blocks,
    trunk,
    unembed,
)
from specjax.trees.accepted import Accepted
from specjax.trees.budget import likeliest, log_acceptance
from specjax.trees.construction import TOP_K
from specjax.trees.tree import TokenTree, chosen, only, shallower
from specjax.verify.rules import NAIVE, Rule, decide
from specjax.verify.token_wise import match

Noted = TypeVar("Noted")
"""What a loop keeps of its steps."""


@pytree
class DecodeState:
    """Everything a batch of rows needs to go on; rows are independent of each other.

    `cache` holds each row's tokens but the last; `last` is that token, the root of the next tree,
    and stands at position `cache.length`. `made` are the tokens a row has given, and a row that is
    `done` gives no more. `counts` are there where a row may have a bias or a penalty, `grammars`
    where one may have a grammar.
    """

    cache: KVCache
    draft: DraftState
    last: Int32[Array, " B"]
    key: Key[Array, " B"]
    sampling: Sampling
    limits: Limits
    made: Int32[Array, " B"]
    done: Bool[Array, " B"]
    counts: TokenCounts | None = None
    grammars: Grammars | None = None


def prefill(target: Model, drafter: Drafter, rows: Rows, slots: int) -> DecodeState:
    """The state after prompts, with `slots` cache slots a row.

    The last prompt token is the first root, so the first token comes from a step like any other.
    """
    state, seen = read(target, rows, slots, drafter.wants)
    return replace(state, draft=drafter.init(rows.prompt, rows.length, slots, seen))


def read(target: Model, rows: Rows, slots: int, wants: Wants) -> tuple[DecodeState, Seen]:
    """The target's part of a prefill, and what is wanted of it after each token of the prompts."""
    if not target.is_stacked and reads_in_blocks(rows.prompt.shape[1]):
        return _read_in_blocks(target, rows, slots, wants)
    # A stack's keys and values are not copied into a cache, they become one.
    whole = slots if target.is_stacked else None
    made = trunk(
        target, rows.prompt, positions_of(rows), None, None,
        slots=whole, hidden_layers=wants.hidden_layers,
    )  # fmt: skip
    return after_prompts(target, rows, slots, wants, made)


def positions_of(rows: Rows) -> Int32[Array, "B T"]:
    """Those of the tokens of prompts."""
    return jnp.broadcast_to(jnp.arange(rows.prompt.shape[1], dtype=jnp.int32), rows.prompt.shape)


def _read_in_blocks(
    target: Model, rows: Rows, slots: int, wants: Wants
) -> tuple[DecodeState, Seen]:
    """What `read` gives, by passes over a block of tokens after those that a cache holds."""
    count, tokens = rows.prompt.shape
    prompt = jnp.pad(rows.prompt, ((0, 0), (0, -tokens % PROMPT_BLOCK)))
    tree_mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((PROMPT_BLOCK, PROMPT_BLOCK), bool)), (count, PROMPT_BLOCK, PROMPT_BLOCK)
    )
    room = max(slots, prompt.shape[1])
    dtype = cache_dtype(target.embedding.dtype)
    cache = empty_cache(target.config, count, room, dtype, target.kv_heads)
    cache = replace(cache, pages=jnp.arange(count, dtype=jnp.int32)[:, None])
    seen = wants.zeros(prompt.shape, target.config.hidden_size)

    def one(number: Array, made: tuple[KVCache, Seen]) -> tuple[KVCache, Seen]:
        cache, seen = made
        begin = number * PROMPT_BLOCK
        own = lax.dynamic_slice_in_dim(prompt, begin, PROMPT_BLOCK, axis=1)
        positions = cache.length[:, None] + jnp.arange(PROMPT_BLOCK, dtype=jnp.int32)
        passed = trunk(target, own, positions, cache, tree_mask, hidden_layers=wants.hidden_layers)
        seen = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, begin, axis=1),
            seen, seen_in(target, passed, own.shape, wants),
        )  # fmt: skip
        return cache.keep(passed.new, None, jnp.full(count, PROMPT_BLOCK, jnp.int32)), seen

    blocks = -(-rows.length.max() // PROMPT_BLOCK)
    cache, seen = lax.fori_loop(0, blocks, one, (cache, seen))
    keys = tuple(each[..., :slots] for each in cache.keys)
    values = tuple(each[..., :slots, :] for each in cache.values)
    seen = jax.tree.map(lambda leaf: leaf[:, :tokens], seen)
    return _begun(rows, KVCache(keys, values, rows.length - 1)), seen


def after_prompts(
    target: Model, rows: Rows, slots: int, wants: Wants, made: Pass
) -> tuple[DecodeState, Seen]:
    """What `read` gives, of a pass over the prompts; a stack's keys lie as in a cache already."""
    count, length, new = rows.prompt.shape[0], rows.length - 1, made.new
    if target.is_stacked:
        cache = KVCache((new[0][0],), (new[0][1],), length)
    else:
        dtype = cache_dtype(target.embedding.dtype)
        empty = empty_cache(target.config, count, slots, dtype, target.kv_heads)
        cache = empty.keep(new, None, length)
    return _begun(rows, cache), seen_in(target, made, rows.prompt.shape, wants)


def _begun(rows: Rows, cache: KVCache) -> DecodeState:
    """The state of rows whose prompts a cache holds but for the last token."""
    made = jnp.zeros_like(rows.length)
    return DecodeState(
        cache=cache,
        draft=(),
        last=jnp.take_along_axis(rows.prompt, rows.length[:, None] - 1, axis=1)[:, 0],
        key=rows.key,
        sampling=rows.sampling,
        limits=rows.limits,
        made=made,
        done=made != 0,
        counts=rows.counts,
        grammars=rows.grammars,
    )


def seen_in(target: Model, made: Pass, shape: tuple[int, ...], wants: Wants) -> Seen:
    """What is wanted of the target after each column of a pass over tokens of that shape."""
    top_tokens = top_tokens_in(target, made.x, shape, wants.top_tokens)
    return Seen(top_tokens, by_token(made.hidden, shape))


def by_token(
    hidden: tuple[Float[Array, "E C"], ...], shape: tuple[int, ...]
) -> Float[Array, "B T H"]:
    """The hidden states of a pass one behind the other, its columns as rows of tokens."""
    return _joined([x.T.reshape(*shape, -1) for x in hidden], shape)


def _joined(hidden: list[Float[Array, "_ _ E"]], shape: tuple[int, ...]) -> Float[Array, "_ _ H"]:
    """Hidden states one behind the other; of none an array of that shape without any."""
    return jnp.concatenate([jnp.zeros((*shape, 0), jnp.float32), *hidden], axis=-1)


def top_tokens_in(
    target: Model, x: Float[Array, "E C"], shape: tuple[int, ...], count: int
) -> Int32[Array, "B T k"]:
    """The target's `count` likeliest tokens after each column of a pass, a block at a time."""
    if not count:
        return jnp.zeros((*shape, 0), jnp.int32)
    columns = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PROMPT_BLOCK)))
    blocks = columns.reshape(x.shape[0], -1, PROMPT_BLOCK).swapaxes(0, 1)
    best = lax.map(lambda block: largest(unembed(target, block).T, count)[1], blocks)
    return best.reshape(-1, count)[: x.shape[1]].reshape(*shape, count)


Drafted = tuple[TokenTree, Int32[Array, "B N w"] | None, DraftState]
"""Trees, the masks after their nodes where rows may have grammars, and the drafter's state."""


def draft_tree(target: Model, drafter: Drafter, state: DecodeState) -> Drafted:
    """A tree below each row's root, within the row's grammar if it has one."""
    length, room = state.cache.length, target.config.max_positions - state.cache.length
    if state.grammars is None:
        tree, draft = drafter.propose(state.key, length, state.draft, state.last, state.sampling)
        return shallower(tree, room), None, draft
    grammars = state.grammars.without(state.done)
    own = drafter.under(grammars)
    tree, draft = own.propose(state.key, length, state.draft, state.last, state.sampling)
    tree = shallower(tree, room)
    if drafter.takes_nodes:
        deepest = jnp.minimum(drafter.window, room) - 1
        tree, words = _completed(tree, grammars, deepest, drafter.vocab_size)
        return tree, words, draft
    exists = tree.valid & ~state.done[:, None]
    slots = jnp.arange(tree.num_slots, dtype=jnp.int32) - 1
    words = grammars.masks(
        tree.tokens[:, 1:], tree.parents[:, 1:] - 1, jnp.where(exists, slots, NO_NODE),
        drafter.vocab_size,
    )  # fmt: skip
    if drafter.construction.children == TOP_K:
        return _allowed(tree, words), words, draft
    return _after_masks(tree, words), words, draft


def _after_masks(tree: TokenTree, words: Int32[Array, "B N w"]) -> TokenTree:
    """The same trees, once there are the masks after their nodes.

    On a CPU the call that makes them would take a core from a pass beside it, in which all cores
    wait for each other.
    """
    if platform() != "cpu":
        return tree
    nothing = (words[:, :1, 0] & 1) >> 1  # 0, which XLA does not find
    return replace(tree, tokens=tree.tokens + nothing)


def _allowed(tree: TokenTree, words: Int32[Array, "B N w"]) -> TokenTree:
    """Trees without chosen nodes that masks forbid.

    Drawn nodes stay: the rules are told what they were drawn from, and accept none that the target
    may not say.
    """
    above = jnp.maximum(tree.parents, 0)
    own = allows(jnp.take_along_axis(words, above[:, :, None], axis=1), tree.tokens)
    own |= tree.parents < 0
    return only(tree, (own[:, None] | ~tree.attention_mask).all(axis=2))


def _completed(
    tree: TokenTree, grammars: Grammars, deepest: Int32[Array, " B"], vocabulary: int
) -> tuple[TokenTree, Int32[Array, "B N w"]]:
    """Trees of chosen nodes within grammars, with the nodes that these let expect, which are the
    likeliest of all (see `Grammars.completed`); and the masks after their nodes.
    """
    parents = jnp.where(tree.valid, tree.parents - 1, NO_NODE)[:, 1:]
    found = grammars.completed(tree.tokens[:, 1:], parents, deepest, vocabulary)

    def rooted(values: Array) -> Array:
        return jnp.pad(values, ((0, 0), (1, 0)))

    stood = rooted(found.slots + 1)

    def kept(values: Array, new: Array | int) -> Array:
        old = jnp.take_along_axis(values, jnp.maximum(stood, 0), axis=1)
        return jnp.where(stood < 0, jnp.asarray(new, values.dtype), old)

    whole = chosen(
        tokens=jnp.concatenate([tree.tokens[:, :1], found.tokens], axis=1),
        parents=rooted(found.parents + 1),
        depth=kept(tree.depth, rooted(found.depth)),
        valid=jnp.concatenate([tree.valid[:, :1], found.parents > NO_NODE], axis=1),
        drafter=kept(tree.drafter, 0),
        chance=kept(tree.chance, 1),
        vocabulary=vocabulary,
    )
    return whole, found.words


class Scored(NamedTuple):
    """The target's pass over trees: logits and hidden states after every node, keys and values.

    Of packed columns there is one a row (`Packing.by_column`). `beside` is what the pass made of
    other rows' tokens.
    """

    logits: Float[Array, "_ _ V"]
    new: NewKV
    hidden_states: Float[Array, "_ _ H"]
    beside: Pass | None = None


def score_tree(
    target: Model,
    tree: TokenTree,
    state: DecodeState,
    packing: Packing | Unpacked = UNPACKED,
    hidden_layers: tuple[int, ...] = (),
    beside: Columns | None = None,
) -> Scored:
    """The target's logits after every node, in one pass, which is over rows `beside` as well.

    Empty slots are added where the platform's products run faster with more columns; of packed
    ones there are as many as were asked for.
    """
    at = columns_of(tree, state, spare_slots(target, tree, packing))
    made = trunk(
        target, at.tokens, at.positions, state.cache, at.tree_mask,
        packing=packing, hidden_layers=hidden_layers, beside=beside,
    )  # fmt: skip
    return scored_of(target, tree, made, packing)


def scored_of(
    target: Model, tree: TokenTree, made: Pass, packing: Packing | Unpacked = UNPACKED
) -> Scored:
    """What a pass over the `columns_of` trees says of their nodes."""
    logits = packing.by_column(unembed(target, made.x), *tree.tokens.shape)
    hidden = [packing.by_column(x, *tree.tokens.shape) for x in made.hidden]
    return Scored(logits, made.new, _joined(hidden, logits.shape[:2]), made.beside)


def spare_slots(target: Model, tree: TokenTree, packing: Packing | Unpacked = UNPACKED) -> int:
    """Empty slots a row with which a pass over trees is fastest; none of packed columns."""
    rows, slots = tree.tokens.shape
    fastest = layers.fast_columns(rows * slots, target.embedding.dtype)
    return fastest // rows - slots if packing.has_every_slot else 0


def columns_of(tree: TokenTree, state: DecodeState, spare: int) -> Columns:
    """The slots of a pass over trees, with so many empty ones a row."""
    slots = tree.tokens.shape[1]
    tokens, depth = (jnp.pad(x, ((0, 0), (0, spare))) for x in (tree.tokens, tree.depth))
    tree_mask = jnp.pad(tree.attention_mask, ((0, 0), (0, spare), (0, spare)))
    tree_mask |= jnp.eye(slots + spare, dtype=bool)
    return Columns(tokens, state.cache.length[:, None] + depth, state.cache, tree_mask)


def penalize_tree(
    state: DecodeState, tree: TokenTree, logits: Array, packing: Packing | Unpacked = UNPACKED
) -> Array:
    """The logits of nodes with their rows' bias and penalties; as they are where no row has any."""
    counts = state.counts
    if counts is None:
        return logits

    def with_penalties(logits: Array) -> Array:
        path = packing.of_nodes(tree.attention_mask.at[:, :, 0].set(False))
        sampling, own, tokens = packing.of_rows((state.sampling, counts, tree.tokens))
        return penalized(logits, sampling, own, tokens, path)

    return lax.cond(counts.used.any(), with_penalties, lambda logits: logits, logits)


def verify_tree(
    rule: Rule,
    state: DecodeState,
    tree: TokenTree,
    logits: Float[Array, "_ _ V"],
    window: int,
    packing: Packing | Unpacked = UNPACKED,
    naive: Bool[Array, " B"] | None = None,
    with_probs: bool = False,
    words: Int32[Array, "B N w"] | None = None,
) -> tuple[Accepted, Float[Array, "B W"] | None]:
    """What `rule` accepts of every row's tree, and the naive rule of those that are `naive`.

    On rows of temperature 0 all rules decide as the greedy one does, which needs no distribution;
    where there is no other row, none is made. `logits` are those of packed columns if `packing` is
    given. Beside it, `with_probs`, how likely the target found the tokens that this emits. `words`
    are the masks after nodes (see `draft_tree`).
    """
    logits = penalize_tree(state, tree, logits, packing)
    if words is not None:
        logits = masked(logits, packing.of_nodes(words))

    def by_rule(logits: Array) -> tuple[Accepted, Array | None]:
        p = process(logits, packing.of_rows(state.sampling))
        of_row, probs = packing.looked_up(p)

        def decided(rule: Rule) -> Accepted:
            return jax.vmap(lambda key, at, t, own: decide(rule, key, at, t, probs(own), window))(
                state.key, state.cache.length, tree, of_row
            )

        accepted = decided(rule)
        if not (naive is None or rule is NAIVE):
            other = lax.cond(naive.any(), lambda: decided(NAIVE), lambda: accepted)
            accepted = jax.vmap(lambda own, x, y: jax.tree.map(partial(jnp.where, own), x, y))(
                naive, other, accepted
            )
        if not with_probs:
            return accepted, None
        at, tokens = accepted.path, emitted(tree, accepted)
        emitted_probs = jnp.take_along_axis(packing.at(p, at), tokens[:, :, None], axis=-1)
        return accepted, emitted_probs[:, :, 0]

    def by_choice(logits: Array) -> tuple[Accepted, Array | None]:
        choice = packing.by_node(most_likely(logits))
        accepted = jax.vmap(lambda t, own: match(t, own, window))(tree, choice)
        return accepted, jnp.ones(accepted.path.shape, logits.dtype) if with_probs else None

    if state.sampling.kind is not None:
        return (by_choice if state.sampling.kind == GREEDY else by_rule)(logits)
    return lax.cond(is_greedy(state.sampling).all(), by_choice, by_rule, logits)


def accept(
    rule: Rule,
    state: DecodeState,
    tree: TokenTree,
    scored: Scored,
    window: int,
    target_top_k: int,
    packing: Packing | Unpacked = UNPACKED,
    naive: Bool[Array, " B"] | None = None,
    with_probs: bool = False,
    words: Int32[Array, "B N w"] | None = None,
) -> Step:
    """The tokens that a step gives: what the rule accepts, cut off where a row's text ends."""
    logits = scored.logits
    accepted, probs = verify_tree(
        rule, state, tree, logits, window, packing, naive, with_probs, words
    )
    seen = Seen(top_tokens_of(logits, target_top_k), scored.hidden_states)
    return given(state, tree, accepted, jax.tree.map(packing.by_node, seen), probs)


def given(
    state: DecodeState,
    tree: TokenTree,
    accepted: Accepted,
    seen: Seen,
    probs: Float[Array, "B W"] | None = None,
) -> Step:
    """The tokens of what was accepted, cut off where a row's text ends."""
    tokens = emitted(tree, accepted)
    count, done = truncate(tokens, accepted.count, state)
    return Step(tokens, count, done, tree, accepted, seen, probs=probs)


def logprobs_of(
    logits: Float[Array, "_ _ V"],
    gave: Step,
    wanted: Bool[Array, ""],
    count: int,
    packing: Packing | Unpacked = UNPACKED,
) -> TokenLogprobs:
    """The log probabilities of a step's tokens and of the likeliest; zeros if not wanted."""
    path = gave.accepted.path

    def found() -> TokenLogprobs:
        return of_tokens(packing.at(logits, path), gave.tokens, count)

    shapes = jax.eval_shape(found)
    return lax.cond(wanted, found, lambda: jax.tree.map(jnp.zeros_like, shapes))


def of_tokens(
    logits: Float[Array, "B W V"], tokens: Int32[Array, "B W"], count: int
) -> TokenLogprobs:
    """The log probabilities of `tokens` under logits, and of the `count` likeliest."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1) - total
    best, best_tokens = largest(logits, min(count, logits.shape[-1]))
    return TokenLogprobs(own[..., 0], best - total, best_tokens)


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
        counts=None if state.counts is None else state.counts.after(step.tokens, count),
        grammars=None if state.grammars is None else state.grammars.after(step.tokens, count),
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


class Served(NamedTuple):
    """What a step of a server's rows takes beside their state.

    `width` is the static number of columns of the target's pass, over the nodes of rows that are
    not done (see `specjax.models.packing`); rows that are `naive` are decided by the naive rule;
    `top` log probabilities a token are made where they are `wanted`. Trees are no deeper than
    `depth`, which is known before they are drawn. Of chosen trees with more nodes than columns the
    likeliest are scored, by `calibration`: the intercept and slope of their chances, of greedy rows
    and of sampled ones (see `specjax.trees.budget`).
    """

    width: int
    naive: Bool[Array, " B"]
    wanted: Bool[Array, ""]
    top: int
    depth: Int32[Array, " B"] | None = None
    calibration: Float[Array, "2 2"] | None = None


def within_budget(
    drafter: Drafter, tree: TokenTree, state: DecodeState, served: Served
) -> TokenTree:
    """Trees without what their rows may not emit any more, and without what has no column."""
    room = state.limits.max_new_tokens - state.made
    if served.depth is not None:
        room = jnp.minimum(room, served.depth + 1)
    tree = shallower(tree, room)
    if served.calibration is None or drafter.construction.children != TOP_K:
        return tree
    if tree.valid.size <= served.width:
        return tree
    own = served.calibration[jnp.where(is_greedy(state.sampling), 0, 1)]
    exists = tree.valid & ~state.done[:, None]
    return likeliest(tree, exists, log_acceptance(tree, own[:, 0], own[:, 1]), served.width)


def step(
    target: Model, drafter: Drafter, rule: Rule, state: DecodeState, served: Served | None = None
) -> tuple[DecodeState, Step]:
    """One speculative step: draft, score, verify, commit."""
    state, gave, _ = step_beside(target, drafter, rule, state, served, None)
    return state, gave


def step_beside(
    target: Model,
    drafter: Drafter,
    rule: Rule,
    state: DecodeState,
    served: Served | None,
    beside: Columns | None,
) -> tuple[DecodeState, Step, Pass | None]:
    """One speculative step, and what its pass made of other rows' tokens.

    The names of the scopes are what `specjax.measure.profile` tells its parts by.
    """
    packing, naive = UNPACKED, None
    with jax.named_scope("draft"):
        tree, words, draft = draft_tree(target, drafter, state)
    if served is not None:
        tree = within_budget(drafter, tree, state, served)
        packing = packing_of(tree.valid & ~state.done[:, None], served.width)
        naive = served.naive
    with jax.named_scope("score"):
        scored = score_tree(target, tree, state, packing, drafter.wants.hidden_layers, beside)
    with jax.named_scope("verify"):
        gave = accept(
            rule, state, tree, scored, drafter.window, drafter.wants.top_tokens, packing, naive,
            drafter.needs_probs, words,
        )  # fmt: skip
        if served is not None:
            found = logprobs_of(scored.logits, gave, served.wanted, served.top, packing)
            gave = replace(gave, logprobs=found)
    with jax.named_scope("commit"):
        state = commit(state, scored.new, drafter.commit(draft, gave), gave)
        return state, without_hidden_states(gave), scored.beside


def run_steps(
    one: Callable[[DecodeState], tuple[DecodeState, Step]],
    note: Callable[[Noted, Int32[Array, ""], DecodeState, Step], Noted],
    state: DecodeState,
    noted: Noted,
    most: Int32[Array, ""] | None = None,
) -> tuple[DecodeState, Noted]:
    """Steps in one loop on the device, until every row is done or there were `most`.

    Args:
      one: a step.
      note: what is kept of the steps so far with that of another, told its number from 0 on, the
        state before it and what it gave.
      state: before the first step.
      noted: what is kept before it.
      most: how many steps there may be; None is no limit.
    """

    def goes_on(at: tuple[Array, DecodeState, Noted]) -> Bool[Array, ""]:
        number, state, _ = at
        left = ~state.done.all()
        return left if most is None else left & (number < most)

    def body(at: tuple[Array, DecodeState, Noted]) -> tuple[Array, DecodeState, Noted]:
        number, state, noted = at
        with jax.named_scope("step"):
            after, gave = one(state)
        return number + 1, after, note(noted, number, state, gave)

    _, state, noted = lax.while_loop(goes_on, body, (jnp.int32(0), state, noted))
    return state, noted


def without_hidden_states(gave: Step) -> Step:
    """What leaves a step's program, which hands them to the drafter alone."""
    seen = replace(gave.seen, hidden_states=gave.seen.hidden_states[..., :0])
    return replace(gave, seen=seen)
