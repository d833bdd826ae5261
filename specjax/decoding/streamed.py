"""Steps that run a layer at a time, as layers come from elsewhere: each is a program of its own.

Drafting, each layer, and what follows the last one (logits, verification, commit) are programs of
their own; the host hands them over in order. A pass costs the reading of all layers once, whatever
the number of nodes (SpecExec, arXiv 2406.02532, section 4).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.tree_attention import Prefix
from specjax.base.axes import KeyArray
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, process
from specjax.decoding.request import Request, Rows, visits
from specjax.decoding.stepping import (
    DecodeState,
    accept,
    after_prompts,
    by_token,
    columns_of,
    commit,
    draft_tree,
    given,
    positions_of,
    scored_of,
    spare_slots,
    without_hidden_states,
)
from specjax.draft.drafter import Drafter, Seen, Step
from specjax.models.config import LayerKind
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import (
    Columns,
    LayerWeights,
    Model,
    Pass,
    embed,
    final_norm,
    layer_of_pass,
    unembed,
)
from specjax.trees.accepted import Accepted
from specjax.trees.tree import TokenTree
from specjax.verify.rules import Rule

_IN_FLIGHT = 1
"""Layers that are computed while the next one is handed over; their weights stay until then."""


def begin(request: Request) -> DecodeState:
    """The state after a request's prompts, for which every layer is read once.

    Raises:
      ValueError: a layer could not be read.
    """
    target, rows = request.target, request.rows
    outer = target.outer
    x, positions = _enter(outer, rows)
    made = _layers(target, outer, x, positions, None, None, request.drafter.wants.hidden_layers)
    state, seen = _after_prompts(outer, request.drafter, rows, request.slots, made)
    draft = _init_draft(request.drafter, rows, request.slots, seen)
    return replace(state, draft=draft)


def step(request: Request, state: DecodeState) -> tuple[DecodeState, Step]:
    """One speculative step; the buffers of `state` are given away.

    Raises:
      ValueError: a layer could not be read.
    """
    target, drafter = request.target, request.drafter
    outer, rest = target.outer, replace(state, draft=())
    tree, words, draft, x, at = _draft(outer, drafter, rest, state.draft)
    layers = drafter.wants.hidden_layers
    made = _layers(target, outer, x, at.positions, at.tree_mask, state.cache, layers)
    rule = request.rule
    limited = state.counts is not None or state.grammars is not None
    visiting = visits(target, drafter, rule, limited)
    return _finish(outer, drafter, rule, rest, draft, tree, words, made, visiting)


def logits_by_layers(
    target: Model, tokens: Int32[Array, "B T"], columns: Int32[Array, "B n"]
) -> Float[Array, "B n V"]:
    """What `specjax.decoding.logits.logits_at` gives, a layer at a time.

    Little is compiled for a model in memory, and one that is not is read once.

    Raises:
      ValueError: a layer could not be read.
    """
    x = _of_sequences(target, tokens).x
    flat = jnp.arange(tokens.shape[0])[:, None] * tokens.shape[1] + columns
    x = final_norm(target.outer, x)[:, flat.reshape(-1)]
    return unembed(target.outer, x).T.reshape(*columns.shape, -1)


def hidden_by_layers(
    target: Model, tokens: Int32[Array, "B T"], layers: tuple[int, ...]
) -> Float[Array, "B T H"]:
    """The hidden states after `layers` of whole sequences, one behind the other, a layer at a time.

    Raises:
      ValueError: a layer could not be read.
    """
    hidden = jnp.concatenate(_of_sequences(target, tokens, layers).hidden)
    return hidden.T.reshape(*tokens.shape, -1)


def _of_sequences(
    target: Model, tokens: Int32[Array, "B T"], hidden_layers: tuple[int, ...] = ()
) -> Pass:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x = embed(target.outer, tokens, positions)
    return _layers(target, target.outer, x, positions, None, None, hidden_layers)


def _layers(
    target: Model,
    outer: Model,
    x: Array,
    positions: Array,
    tree_mask: Array | None,
    cache: KVCache | None,
    hidden_layers: tuple[int, ...] = (),
) -> Pass:
    """All layers of a pass, each handed over when the one before the last is done.

    What leaves the last one is not normed.
    """
    config = target.config
    made: list[tuple[Array, Array]] = []
    kept = {0: jnp.copy(x)} if 0 in hidden_layers else {}
    running: list[Array] = []
    with target.in_pass():
        for index in range(config.num_layers):
            held = None
            if cache is not None:
                held = cache.keys[index], cache.values[index], cache.length
            weights = target.layer(index)
            kind = config.kind_of(index)
            x, new = run_layer(outer, weights, x, positions, tree_mask, held, kind=kind)
            made.append(new)
            if index + 1 in hidden_layers:  # the next layer takes the buffer
                kept[index + 1] = jnp.copy(x)
            running.append(new[0])
            if len(running) > _IN_FLIGHT:  # else weights pile up faster than they are used
                running.pop(0).block_until_ready()
        jax.block_until_ready(x)
    return Pass(x, tuple(made), tuple(kept[layer] for layer in hidden_layers))


@jax.jit
def _enter(outer: Model, rows: Rows) -> tuple[Array, Array]:
    positions = positions_of(rows)
    return embed(outer, rows.prompt, positions), positions


@partial(jax.jit, static_argnames="kind", donate_argnames="x")
def run_layer(
    outer: Model,
    weights: LayerWeights,
    x: Array,
    positions: Array,
    tree_mask: Array | None,
    held: tuple[Array, Array, Array] | None,
    *,
    kind: LayerKind,
) -> tuple[Array, tuple[Array, Array]]:
    """A layer of a pass; `held` are its cached keys and values, and how many slots of them count.

    `x` is given away.
    """
    prefix = None if held is None else Prefix(*held)
    return layer_of_pass(outer, weights, kind, x, positions, tree_mask, prefix)


@partial(jax.jit, static_argnames="slots")
def _after_prompts(
    outer: Model, drafter: Drafter, rows: Rows, slots: int, made: Pass
) -> tuple[DecodeState, Seen]:
    made = made._replace(x=final_norm(outer, made.x))
    return after_prompts(outer, rows, slots, drafter.wants, made)


@partial(jax.jit, static_argnames="slots")
def _init_draft(drafter: Drafter, rows: Rows, slots: int, seen: Seen) -> Any:
    return drafter.init(rows.prompt, rows.length, slots, seen)


@partial(jax.jit, donate_argnames="draft")
def _draft(
    outer: Model, drafter: Drafter, rest: DecodeState, draft: Any
) -> tuple[TokenTree, Array | None, Any, Array, Columns]:
    state = replace(rest, draft=draft)
    tree, words, draft = draft_tree(outer, drafter, state)
    at = columns_of(tree, state, spare_slots(outer, tree))
    return tree, words, draft, embed(outer, at.tokens, at.positions), at._replace(cache=None)


@partial(jax.jit, static_argnames=("rule", "visiting"), donate_argnames=("rest", "draft"))
def _finish(
    outer: Model,
    drafter: Drafter,
    rule: Rule,
    rest: DecodeState,
    draft: Any,
    tree: TokenTree,
    words: Array | None,
    made: Pass,
    visiting: bool,
) -> tuple[DecodeState, Step]:
    rows, slots = tree.tokens.shape
    made = made._replace(x=final_norm(outer, made.x))
    if visiting:
        x = made.x.reshape(made.x.shape[0], rows, -1)
        accepted = _visit(outer, rule, rest, tree, x, drafter.window)
        hidden = by_token(made.hidden, (rows, x.shape[2]))[:, :slots]
        seen = Seen(jnp.zeros((rows, slots, 0), jnp.int32), hidden)
        gave = given(rest, tree, accepted, seen)
    else:
        gave = accept(
            rule, rest, tree, scored_of(outer, tree, made), drafter.window,
            drafter.wants.top_tokens, with_probs=drafter.needs_probs, words=words,
        )  # fmt: skip
    state = commit(rest, made.new, drafter.commit(draft, gave), gave)
    return state, without_hidden_states(gave)


def _visit(
    outer: Model,
    rule: Rule,
    state: DecodeState,
    tree: TokenTree,
    x: Float[Array, "E B T"],
    window: int,
) -> Accepted:
    """What a rule accepts, where the nodes that it visits are unembedded one after the other."""
    assert rule.visiting is not None
    decide = rule.visiting

    def of_row(
        key: KeyArray, position: Array, own: TokenTree, sampling: Sampling, x: Array
    ) -> Accepted:
        def p(node: Array) -> Array:
            logits = unembed(outer, x[:, node, None])[:, 0]
            return process(logits[None, None], jax.tree.map(lambda a: a[None], sampling))[0, 0]

        return decide(key, position, own, p, window)

    return jax.vmap(of_row, in_axes=(0, 0, 0, 0, 1))(
        state.key, state.cache.length, tree, state.sampling, x
    )
