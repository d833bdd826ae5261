"""Steps that run a layer at a time, as layers come from elsewhere: each is a program of its own.

Drafting, each layer, and what follows the last one (logits, verification, commit) are programs of
their own; the host hands them over in order. A pass costs the reading of all layers once, whatever
the number of nodes (SpecExec, arXiv 2406.02532, section 4).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

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
from specjax.models.expert_cache import ExpertCache
from specjax.models.experts import outputs, route, weighed
from specjax.models.kv_cache import KVCache
from specjax.models.layer_weights import LayerWeights
from specjax.models.mlp import with_shared
from specjax.models.transformer import (
    Columns,
    Model,
    Pass,
    after_mlp,
    before_mlp,
    embed,
    final_norm,
    group_of,
    layer_of_pass,
    normed,
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
    counted = np.arange(positions.shape[1]) < np.asarray(rows.length)[:, None]
    layers = request.drafter.wants.hidden_layers
    made = _layers(target, outer, x, positions, None, None, layers, counted)
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
    tree, words, draft, x, at, counted = _draft(outer, drafter, rest, state.draft)
    layers = drafter.wants.hidden_layers
    made = _layers(target, outer, x, at.positions, at.tree_mask, state.cache, layers, counted)
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
    counted: Bool[Array, "B T"] | Bool[np.ndarray, "B T"] | None = None,
) -> Pass:
    """All layers of a pass, each handed over when the one before the last is done.

    What leaves the last one is not normed. No expert is read for columns that are not `counted`.
    """
    config = target.config
    elsewhere = target.expert_cache
    experts = None
    if elsewhere is not None:
        experts = _Experts(elsewhere, target, positions, tree_mask, counted)
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
            if experts is not None and config.has_experts(index):
                x, new = experts.layer(index, x, held)
            else:
                x, new = run_layer(outer, weights, x, positions, tree_mask, held, kind=kind)
            made.append(new)
            if index + 1 in hidden_layers:  # the next layer takes the buffer
                kept[index + 1] = jnp.copy(x)
            running.append(new[0])
            if len(running) > _IN_FLIGHT:  # else weights pile up faster than they are used
                running.pop(0).block_until_ready()
        jax.block_until_ready(x)
    return Pass(x, tuple(made), tuple(kept[layer] for layer in hidden_layers))


class _Experts:
    """The layers of a pass whose experts are elsewhere: each is handed over in parts.

    What its router chose is known before the next part; the next layer's router says beside it what
    it would choose of the same columns, which it nearly reads: a layer adds little to them.
    """

    def __init__(
        self,
        cache: ExpertCache,
        target: Model,
        positions: Array,
        tree_mask: Array | None,
        counted: Array | np.ndarray | None,
    ) -> None:
        self._cache, self._layers, self._outer = cache, target.layers, target.outer
        self._columns = positions, tree_mask, counted
        self._guessed = None

    def layer(
        self, index: int, x: Array, held: tuple[Array, Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """What `run_layer` gives of a layer; `x` is given away."""
        config, weights, after = self._outer.config, self._layers[index], None
        if index + 1 < config.num_layers and config.has_experts(index + 1):
            after = self._layers[index + 1]
        kind = config.kind_of(index)
        x, entering, shares, chosen, guess, new = _to_experts(
            self._outer, weights, after, x, *self._columns, held, kind=kind
        )
        chosen, guess = jax.device_get((chosen, guess))
        if self._guessed is not None:
            self._cache.judge(index, self._guessed, chosen)
        self._guessed, made = guess, None
        for each in self._cache.rounds(index, chosen, self._guessed):
            made = _of_slots(self._outer, weights, each.leaves, entering, each.slots, made)
        return _from_experts(self._outer, weights, x, entering, made, shares), new


@partial(jax.jit, static_argnames="kind", donate_argnames="x")
def _to_experts(
    outer: Model,
    weights: LayerWeights,
    following: LayerWeights | None,
    x: Array,
    positions: Array,
    tree_mask: Array | None,
    counted: Array | None,
    held: tuple[Array, Array, Array] | None,
    *,
    kind: LayerKind,
) -> tuple[Array, Array, Array, Array, Array | None, tuple[Array, Array]]:
    """A layer up to its experts: columns, what they enter experts as, the experts and their shares,
    what the `following` layer would choose, and keys and values. `x` is given away.
    """
    prefix = None if held is None else Prefix(*held)
    group = group_of(outer.config, kind, positions, tree_mask, prefix)
    at = before_mlp(outer, weights, x, [group])
    assert outer.config.experts is not None

    def of_counted(chosen: Array) -> Array:
        return chosen if counted is None else jnp.where(counted.reshape(-1), chosen, -1)

    chosen, shares = route(outer.config.experts, weights, at.entering)
    guess = None
    if following is not None:
        would_enter = normed(outer.config, following, "mlp_norm", at.x)
        guess = of_counted(route(outer.config.experts, following, would_enter).chosen)
    return at.x, at.entering, shares, of_counted(chosen), guess, at.new[0]


@partial(jax.jit, donate_argnames="made")
def _of_slots(
    outer: Model,
    weights: LayerWeights,
    leaves: dict[str, Any],
    x: Float[Array, "E C"],
    slots: Int32[Array, "K C"],
    made: Float[Array, "E K C"] | None,
) -> Float[Array, "E K C"]:
    """What the experts of some slots give, beside what others `made`."""
    own = outputs(outer.config, replace(weights, **leaves), x, slots)
    return own if made is None else made + own


@jax.jit
def _from_experts(
    outer: Model,
    weights: LayerWeights,
    x: Float[Array, "E C"],
    entering: Float[Array, "E C"],
    made: Float[Array, "E K C"],
    shares: Float[Array, "K C"],
) -> Float[Array, "E C"]:
    """What leaves a layer whose experts `made` that."""
    together, _ = with_shared(outer.config, weights, entering, weighed(made, shares))
    return after_mlp(outer.config, weights, x, together)


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
) -> tuple[TokenTree, Array | None, Any, Array, Columns, Array]:
    state = replace(rest, draft=draft)
    tree, words, draft = draft_tree(outer, drafter, state)
    spare = spare_slots(outer, tree)
    at = columns_of(tree, state, spare)
    counted = jnp.pad(tree.valid & ~state.done[:, None], ((0, 0), (0, spare)))
    x = embed(outer, at.tokens, at.positions)
    return tree, words, draft, x, at._replace(cache=None), counted


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
