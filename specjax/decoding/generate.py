"""The loop over speculative steps: as one program, or a step at a time; on a device or a mesh."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, unchecked
from specjax.base.sampling import Sampling
from specjax.decoding.request import Limits, Prompts, Request, prepare, window_of
from specjax.decoding.stepping import DecodeState, prefill, step
from specjax.draft.drafter import Drafter, Step
from specjax.models import layers
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Model
from specjax.parallel.mesh import ROWS, Layout, everywhere, laid_out, spread
from specjax.verify.rules import Rule


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
class _Loop:
    state: DecodeState
    tokens: Array
    made: Array
    steps: Array
    nodes: Array
    done: Array


@partial(jax.jit, static_argnames=("rule", "outputs", "slots", "layout"))
def run(
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    sampling: Sampling,
    limits: Limits,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    key: Key[Array, " B"],
    outputs: int,
    slots: int,
    layout: Layout | None = None,
) -> tuple[Int32[Array, "B O"], Int32[Array, " B"], Int32[Array, " B"], Int32[Array, " B"]]:
    """Prefill and the whole loop as one program: tokens, how many, target passes, and nodes.

    On a mesh every device runs the loop on its own rows, and ends when these do.
    """
    whole = partial(_run, rule, outputs, slots)
    over = spread(layout, whole, (target, drafter), (ROWS, P(), ROWS, ROWS, ROWS), ROWS)
    return everywhere(layout, over(target, drafter, sampling, limits, prompt, length, key))


def _run(
    rule: Rule,
    outputs: int,
    slots: int,
    target: Model,
    drafter: Drafter | None,
    sampling: Sampling,
    limits: Limits,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    key: Key[Array, " B"],
) -> tuple[Int32[Array, "B O"], Int32[Array, " B"], Int32[Array, " B"], Int32[Array, " B"]]:
    rows, window = prompt.shape[0], window_of(drafter)

    def body(at: _Loop) -> _Loop:
        with jax.named_scope("step"):
            state, gave, done = step(
                target, drafter, rule, sampling, limits, at.state, at.made, at.done
            )
        nodes = gave.tree.valid.sum(axis=1, dtype=jnp.int32) - 1
        return _Loop(
            state=state,
            tokens=layers.write_window(at.tokens, gave.tokens, at.made, axis=1),
            made=at.made + gave.count,
            steps=at.steps + ~at.done,
            nodes=at.nodes + jnp.where(at.done, 0, nodes),
            done=done,
        )

    none = jnp.zeros(rows, jnp.int32)
    start = _Loop(
        state=prefill(target, drafter, prompt, length, key, slots),
        tokens=jnp.zeros((rows, outputs + window), jnp.int32),
        made=none,
        steps=none,
        nodes=none,
        done=none != 0,
    )
    end = lax.while_loop(lambda at: ~at.done.all(), body, start)
    live = jnp.arange(outputs) < end.made[:, None]
    return jnp.where(live, end.tokens[:, :outputs], 0), end.made, end.steps, end.nodes


def generate(
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    verify: str = "auto",
    stop_at_eos: bool = True,
) -> Generation:
    """Continuations of `prompts` (see `Prompts`), distributed exactly as the target's own.

    `key` is one key (row i uses `fold_in(key, i)`) or one a row. `drafter=None` is plain
    decoding through the same program. One compilation a bucket of rows, prompt length and
    output length; weights, prompts and sampling parameters never recompile.

    Raises:
      TypeError, ValueError: see `prepare`.
    """
    request = prepare(
        key, target, drafter, prompts, max_new_tokens,
        Sampling() if sampling is None else sampling, verify, stop_at_eos,
    )  # fmt: skip
    made = run(target, drafter, **request._asdict())
    tokens, lengths, steps, nodes = map(np.asarray, made)
    return Generation(tokens[:, :max_new_tokens], lengths, steps, nodes)


@partial(jax.jit, static_argnames=("slots", "layout"))
def prefill_jit(
    target: Model,
    drafter: Drafter | None,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    key: Key[Array, " B"],
    slots: int,
    layout: Layout | None = None,
) -> DecodeState:
    """`prefill` as a program of its own, on one device or a mesh."""
    whole, states = partial(prefill, slots=slots), _state_specs(target, drafter)
    over = spread(layout, whole, (target, drafter), (ROWS, ROWS, ROWS), states)
    return over(target, drafter, prompt, length, key)


def step_on(
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    sampling: Sampling,
    limits: Limits,
    state: DecodeState,
    made: Int32[Array, " B"],
    done: Bool[Array, " B"],
    layout: Layout | None = None,
) -> tuple[DecodeState, Step, Bool[Array, " B"]]:
    """`step` on one device or a mesh; what it gave is on all of its devices."""

    def whole(target: Model, drafter: Drafter | None, *more: Any) -> Any:
        return step(target, drafter, rule, *more)

    states = _state_specs(target, drafter)
    specs, out = (ROWS, P(), states, ROWS, ROWS), (states, ROWS, ROWS)
    over = spread(layout, whole, (target, drafter), specs, out)
    state, gave, done = over(target, drafter, sampling, limits, state, made, done)
    return state, *everywhere(layout, (gave, done))


step_jit = jax.jit(step_on, static_argnames=("rule", "layout"), donate_argnames="state")


def _state_specs(target: Model, drafter: Drafter | None) -> DecodeState:
    """How a state is spread: caches with their rows and heads, the rest with its rows."""
    held = P(*ROWS, target.axis)
    draft = () if drafter is None else drafter.state_specs
    cache = unchecked(KVCache, keys=held, values=held, length=ROWS)
    return unchecked(DecodeState, cache=cache, draft=draft, last=ROWS, key=ROWS)


def stream(
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    verify: str = "auto",
    stop_at_eos: bool = True,
) -> Iterator[Step]:
    """The same continuations as `generate`, a step at a time, as they are committed.

    Each `Step` holds host arrays; row b gained `tokens[b, :count[b]]`.

    Raises:
      TypeError, ValueError: when it is called; see `prepare`.
    """
    request = prepare(
        key, target, drafter, prompts, max_new_tokens,
        Sampling() if sampling is None else sampling, verify, stop_at_eos,
    )  # fmt: skip
    return _steps(target, drafter, request)


def _steps(target: Model, drafter: Drafter | None, request: Request) -> Iterator[Step]:
    layout = request.layout
    state = prefill_jit(
        target, drafter, request.prompt, request.length, request.key, request.slots, layout
    )
    rows = request.prompt.shape[0]
    made, done = np.zeros(rows, np.int32), np.zeros(rows, bool)
    while not done.all():
        so_far = laid_out(layout, (made, done), ROWS)
        state, gave, ended = step_jit(
            target, drafter, request.rule, request.sampling, request.limits, state, *so_far, layout
        )
        gave = jax.device_get(gave)
        made, done = made + gave.count, np.asarray(ended)
        yield gave
