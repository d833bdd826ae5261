"""The loop over speculative steps: as one program, or a step at a time; on a device or a mesh."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from specjax.base.grammars import Grammar, Matcher, matchers_of, registered
from specjax.base.pytree import pytree, replace, unchecked
from specjax.base.sampling import Sampling
from specjax.decoding import streamed
from specjax.decoding.request import Prompts, Request, Rows, grammars_of, listed, prepare
from specjax.decoding.stepping import DecodeState, prefill, run_steps, step
from specjax.draft.drafter import Drafter, Step
from specjax.models import layers
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Model
from specjax.parallel.mesh import ROWS, Layout, everywhere, laid_out, spread
from specjax.verify.rules import AUTO, Rule


@dataclasses.dataclass(frozen=True)
class Generation:
    """Generated tokens `[B, max_new_tokens]`, with what they cost.

    Row b's text is its first `lengths[b]` tokens, an end token included; zeros follow. `steps`
    counts target passes after prefill, `nodes` the nodes of all their trees, roots left out.
    """

    tokens: Int32[np.ndarray, "B O"]
    lengths: Int32[np.ndarray, " B"]
    steps: Int32[np.ndarray, " B"]
    nodes: Int32[np.ndarray, " B"]

    @property
    def tokens_per_step(self) -> Float[np.ndarray, " B"]:
        """Emitted tokens over target passes, bonus tokens included."""
        return self.lengths / np.maximum(self.steps, 1)


@pytree
class Generated:
    """A `Generation` on the device, with as many columns as the program has."""

    tokens: Int32[Array, "B O"]
    lengths: Int32[Array, " B"]
    steps: Int32[Array, " B"]
    nodes: Int32[Array, " B"]


@partial(jax.jit, static_argnames=("rule", "outputs", "slots", "layout"))
def generate_jit(
    target: Model,
    drafter: Drafter,
    rows: Rows,
    rule: Rule,
    outputs: int,
    slots: int,
    layout: Layout | None = None,
) -> Generated:
    """Prefill and the whole loop as one program, from a request's fields (see `prepare`).

    On a mesh every device runs the loop on its own rows, and ends when these do.
    """
    whole = partial(_run, rule, outputs, slots)
    over = spread(layout, whole, (target, drafter), (ROWS,), ROWS)
    return everywhere(layout, over(target, drafter, rows))


def _run(
    rule: Rule, outputs: int, slots: int, target: Model, drafter: Drafter, rows: Rows
) -> Generated:
    def one(state: DecodeState) -> tuple[DecodeState, Step]:
        return step(target, drafter, rule, state)

    def note(made: Generated, number: Array, state: DecodeState, gave: Step) -> Generated:
        del number
        live = ~state.done
        nodes = gave.tree.valid.sum(axis=1, dtype=jnp.int32) - 1
        return Generated(
            tokens=layers.write_window(made.tokens, gave.tokens, state.made, axis=1),
            lengths=made.lengths,
            steps=made.steps + live,
            nodes=made.nodes + jnp.where(live, nodes, 0),
        )

    none = jnp.zeros_like(rows.length)
    tokens = jnp.zeros((none.shape[0], outputs + drafter.window), jnp.int32)
    state = prefill(target, drafter, rows, slots)
    state, made = run_steps(one, note, state, Generated(tokens, none, none, none))
    live = jnp.arange(outputs) < state.made[:, None]
    tokens = jnp.where(live, made.tokens[:, :outputs], 0)
    return replace(made, tokens=tokens, lengths=state.made)


def on_host(made: Generated, max_new_tokens: int) -> Generation:
    """What `generate_jit` gave as host arrays, without the columns that no row may reach."""
    tokens, *counts = map(np.asarray, (made.tokens, made.lengths, made.steps, made.nodes))
    return Generation(tokens[:, :max_new_tokens], *counts)


def generate(
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    verify: str = AUTO,
    stop_at_eos: bool = True,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
) -> Generation:
    """Continuations of `prompts`, distributed exactly as the target's own.

    With a `grammar` as the target's own among the tokens that it allows, one after the other.

    One compilation a bucket of rows, prompt length and output length; weights, prompts and
    sampling parameters never recompile.

    Args:
      key: one key (row i uses `fold_in(key, i)`) or one a row.
      target: the model whose distribution the texts follow.
      drafter: what proposes trees; None is plain decoding through the same program.
      prompts: token ids (see `Prompts`).
      max_new_tokens: the longest continuation of every row.
      sampling: how to sample, for all rows or each; greedy by default.
      verify: the name of a verification rule; "auto" takes the one that accepts most.
      stop_at_eos: whether the target's end tokens end a text; they end one that has a grammar.
      grammar: what all texts must match, or each (None: anything); `specjax.GrammarCompiler` makes
        them. A text that reaches `max_new_tokens` before its end matches the beginning of it.

    Returns:
      Host arrays, tokens of shape `[B, max_new_tokens]`.

    Raises:
      TypeError: an argument is of another type than it must be.
      ValueError: an argument is refused (see `prepare`), or a text became too much for its grammar.
    """
    request, matchers = _prepared(
        grammar, key, target, drafter, prompts, max_new_tokens=max_new_tokens, sampling=sampling,
        verify=verify, stop_at_eos=stop_at_eos,
    )  # fmt: skip
    with following(request, matchers) as own:
        return completed(own, max_new_tokens)


def _prepared(
    grammar: Grammar | Sequence[Grammar | None] | None,
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    **options: Any,
) -> tuple[Request, list[Matcher | None]]:
    """A request, and the matchers that its rows are to follow."""
    prompts = listed(prompts)
    matchers = matchers_of(grammar, len(prompts))
    own = np.asarray([matcher is not None for matcher in matchers])
    return prepare(key, target, drafter, prompts, has_grammar=own, **options), matchers


@contextlib.contextmanager
def following(request: Request, matchers: Sequence[Matcher | None]) -> Iterator[Request]:
    """The request whose rows follow these matchers, which are known as long as that.

    Raises:
      ValueError: after it, that a text became too much for its grammar.
    """
    if not any(matchers):
        yield request
        return
    with registered(matchers) as numbers:
        rows = replace(request.rows, grammars=grammars_of(numbers, request.drafter.window))
        yield request._replace(rows=laid_out(request.layout, rows, ROWS))


def completed(request: Request, columns: int) -> Generation:
    """A request's generation on the host, of so many columns of tokens."""
    if not request.target.is_whole:
        return _collected(request, columns)
    return on_host(generate_jit(**request._asdict()), columns)


def _collected(request: Request, columns: int) -> Generation:
    """What `generate_jit` would give, a step at a time."""
    count = request.rows.length.shape[0]
    tokens = np.zeros((count, columns), np.int32)
    lengths, taken, nodes = (np.zeros(count, np.int32) for _ in range(3))
    ended = np.zeros(count, bool)
    for gave in steps_on_host(request):
        taken += ~ended
        nodes += np.where(ended, 0, gave.tree.valid.sum(axis=1) - 1).astype(np.int32)
        for row, own in enumerate(gave.count.tolist()):
            tokens[row, lengths[row] : lengths[row] + own] = gave.tokens[row, :own]
        lengths += gave.count
        ended = np.asarray(gave.done)
    return Generation(tokens, lengths, taken, nodes)


@partial(jax.jit, static_argnames=("slots", "layout"))
def prefill_jit(
    target: Model, drafter: Drafter, rows: Rows, slots: int, layout: Layout | None = None
) -> DecodeState:
    """`prefill` as a program of its own, on one device or a mesh."""
    whole, states = partial(prefill, slots=slots), state_specs(target, drafter)
    return spread(layout, whole, (target, drafter), (ROWS,), states)(target, drafter, rows)


@partial(jax.jit, static_argnames=("rule", "layout"), donate_argnames="state")
def step_jit(
    target: Model, drafter: Drafter, rule: Rule, state: DecodeState, layout: Layout | None = None
) -> tuple[DecodeState, Step]:
    """`step` as a program of its own, on one device or a mesh; what it gave is on all devices.

    The buffers of `state` are given away.
    """

    def whole(target: Model, drafter: Drafter, state: DecodeState) -> tuple[DecodeState, Step]:
        return step(target, drafter, rule, state)

    states = state_specs(target, drafter)
    over = spread(layout, whole, (target, drafter), (states,), (states, ROWS))
    state, gave = over(target, drafter, state)
    return state, everywhere(layout, gave)


def state_specs(target: Model, drafter: Drafter) -> DecodeState:
    """How a state is spread: caches with their rows and heads, the rest with its rows."""
    held = P(*((None,) if target.is_stacked else ()), *ROWS, target.axis)
    cache = unchecked(KVCache, keys=held, values=held, length=ROWS, pages=ROWS)
    by_row = dict.fromkeys(
        ("last", "key", "sampling", "limits", "made", "done", "counts", "grammars"), ROWS
    )
    return unchecked(DecodeState, cache=cache, draft=drafter.state_specs, **by_row)


def begin(request: Request) -> DecodeState:
    """The state after a request's prompts.

    Raises:
      ValueError: a layer could not be read.
    """
    if not request.target.is_whole:
        return streamed.begin(request)
    return prefill_jit(request.target, request.drafter, request.rows, request.slots, request.layout)


def steps(request: Request, state: DecodeState) -> Iterator[tuple[DecodeState, Step]]:
    """States and what their steps gave, on the device, until every row is done.

    Each state's buffers are given away to the next step, as are those of the first.
    """
    ended, one = False, _step if request.target.is_whole else streamed.step
    while not ended:
        state, gave = one(request, state)
        yield state, gave
        ended = bool(np.asarray(gave.done).all())


def _step(request: Request, state: DecodeState) -> tuple[DecodeState, Step]:
    models = request.target, request.drafter
    return step_jit(*models, request.rule, state, request.layout)


def steps_on_host(request: Request) -> Iterator[Step]:
    """What each step of a request gave, as host arrays; its prompts are read at the first."""
    for _, gave in steps(request, begin(request)):
        yield jax.device_get(gave)


def stream(
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    verify: str = AUTO,
    stop_at_eos: bool = True,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
) -> Iterator[Step]:
    """The same continuations as `generate`, a step at a time, as they are committed.

    Args: see `generate`.

    Returns:
      A `Step` of host arrays after another; row b gained `tokens[b, :count[b]]`.

    Raises:
      TypeError, ValueError: when it is called; see `prepare`.
    """
    request, matchers = _prepared(
        grammar, key, target, drafter, prompts, max_new_tokens=max_new_tokens, sampling=sampling,
        verify=verify, stop_at_eos=stop_at_eos,
    )  # fmt: skip

    def made() -> Iterator[Step]:
        with following(request, matchers) as own:
            yield from steps_on_host(own)

    return made()
