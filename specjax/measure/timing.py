"""Clocks: whole generations, the phases of a step compiled apart, and the machine itself."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import products
from specjax.base.machine import cpu_model
from specjax.base.pytree import replace
from specjax.decoding import stepping
from specjax.decoding.generate import Generation, completed
from specjax.decoding.request import NO_END, Request, Rows
from specjax.decoding.stepping import DecodeState
from specjax.draft import Drafter, Step
from specjax.draft.drafter import DraftState, Seen
from specjax.models.config import EXPERT_MATRICES
from specjax.models.experts import expected_experts
from specjax.models.transformer import Model
from specjax.trees.tree import TokenTree
from specjax.verify.rules import Rule

_T = TypeVar("_T")
MOST_MAPS = 20_000
"""Pieces of memory that a process may map before it forgets programs.

Linux allows 65,530, and what is compiled next, the phases of a step say, may take as many again.
"""


class Phases(NamedTuple):
    """Seconds of a prefill, and per step of drafting (with its commit), the target, the rest."""

    prefill: float
    draft: float
    target: float
    rest: float

    @property
    def step(self) -> float:
        """Seconds of a step whose phases run apart."""
        return self.draft + self.target + self.rest


def mapped() -> int:
    """Pieces of memory that this process maps; 0 where the system does not report it."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def forget_programs() -> None:
    """Forgets what is compiled, if that is more than `MOST_MAPS`."""
    if mapped() > MOST_MAPS:
        jax.clear_caches()


def clocked(work: Callable[[], _T]) -> tuple[_T, float]:
    """What `work` gives once it is ready, and the seconds it took."""
    start = time.perf_counter()
    done = jax.block_until_ready(work())
    return done, time.perf_counter() - start


def warm_up(request: Request) -> None:
    """Compiles the program that `timed` runs for such a request, and runs it for one token."""
    limits = request.rows.limits
    fewer = replace(limits, max_new_tokens=jnp.minimum(limits.max_new_tokens, 1))
    one = request._replace(rows=replace(request.rows, limits=fewer))
    completed(one, request.outputs)


def timed(request: Request) -> tuple[Generation, float]:
    """The request's generation on the host, and its wall seconds, prefill included.

    Tokens are `[B, request.outputs]`. `warm_up` before.
    """
    start = time.perf_counter()
    made = completed(request, request.outputs)
    return made, time.perf_counter() - start


_read = jax.jit(stepping.read, static_argnames=("slots", "wants"))
_draft_tree = jax.jit(stepping.draft_tree)
_score_tree = jax.jit(stepping.score_tree, static_argnames="hidden_layers")


@partial(jax.jit, static_argnames="slots")
def _init(drafter: Drafter, rows: Rows, seen: Seen, slots: int) -> DraftState:
    return drafter.init(rows.prompt, rows.length, slots, seen)


@partial(jax.jit, static_argnames=("rule", "window", "target_top_k"), donate_argnames="state")
def _verify_and_commit(
    rule: Rule,
    state: DecodeState,
    tree: TokenTree,
    scored: stepping.Scored,
    window: int,
    target_top_k: int,
) -> tuple[DecodeState, Step]:
    """Decides and commits, but for the drafter's part; one program for drafters of equal trees."""
    gave = stepping.accept(rule, state, tree, scored, window, target_top_k)
    return stepping.commit(state, scored.new, (), gave), gave


@partial(jax.jit, donate_argnames="draft")
def _catch_up(drafter: Drafter, draft: DraftState, step: Step) -> DraftState:
    return drafter.commit(draft, step)


class _StepTime(NamedTuple):
    draft: float
    target: float
    rest: float


def phases(request: Request, steps: int = 16) -> Phases:
    """Median seconds of each phase over `steps` real steps of a request.

    The phases are compiled apart, with the shapes and the cache length that the whole loop has,
    and run in its order, so that each finds the processor's caches as it does there.
    """
    _steps(request, 1)  # compiles
    fitting = max(1, min(steps, (request.outputs - 1) // request.drafter.window))
    prefill, taken = _steps(request, fitting)
    return Phases(
        prefill=prefill,
        draft=statistics.median(took.draft for took in taken),
        target=statistics.median(took.target for took in taken),
        rest=statistics.median(took.rest for took in taken),
    )


def typical(several: Sequence[Phases]) -> Phases:
    """The medians of several measurements."""
    return Phases(
        prefill=statistics.median(at.prefill for at in several),
        draft=statistics.median(at.draft for at in several),
        target=statistics.median(at.target for at in several),
        rest=statistics.median(at.rest for at in several),
    )


def _steps(request: Request, steps: int) -> tuple[float, list[_StepTime]]:
    """Seconds of the prefill, and of `steps` steps after it, which must fit the cache."""
    limits = request.rows.limits
    endless = replace(
        limits,
        max_new_tokens=jnp.full_like(limits.max_new_tokens, request.outputs),
        end_ids=jnp.full_like(limits.end_ids, NO_END),
    )
    request = request._replace(rows=replace(request.rows, limits=endless))
    state, seconds = clocked(partial(_prefill, request))
    taken = []
    for _ in range(steps):
        state, took = _step(request, state)
        taken.append(took)
    return seconds, taken


def _prefill(request: Request) -> DecodeState:
    """The target's part is one program for all drafters."""
    drafter, slots = request.drafter, request.slots
    state, seen = _read(request.target, request.rows, slots, drafter.wants)
    return replace(state, draft=_init(drafter, request.rows, seen, slots))


def _step(request: Request, state: DecodeState) -> tuple[DecodeState, _StepTime]:
    """One step (`stepping.step`), phase by phase."""
    target, drafter, rule = request.target, request.drafter, request.rule
    (tree, _, draft), drafting = clocked(lambda: _draft_tree(target, drafter, state))
    held = replace(state, draft=())
    layers = drafter.wants.hidden_layers
    scored, scoring = clocked(lambda: _score_tree(target, tree, held, hidden_layers=layers))
    window, target_top_k = drafter.window, drafter.wants.top_tokens
    (after, gave), verifying = clocked(
        lambda: _verify_and_commit(rule, held, tree, scored, window, target_top_k)
    )
    if window == 1:  # nothing is drafted; making the roots is the rest of a plain step
        return replace(after, draft=draft), _StepTime(0.0, scoring, drafting + verifying)
    draft, catching = clocked(lambda: _catch_up(drafter, draft, gave))
    return replace(after, draft=draft), _StepTime(drafting + catching, scoring, verifying)


def repeated(outputs: Iterable[np.ndarray], length: int = 8) -> float:
    """The share of `length`-grams that an output had before, over all outputs."""
    grams = again = 0
    for tokens in outputs:
        seen = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
        grams += len(seen)
        again += len(seen) - len(set(seen))
    return again / grams if grams else 0.0


def weight_bytes(model: Model, columns: int = 1, taken: float | None = None) -> int:
    """Bytes of weights that a pass over so many columns reads.

    All but an embedding that is only looked up, and experts that nobody takes: `taken` are so many
    of a layer, by default those that are expected (`expected_experts`).
    """
    cache = model.expert_cache
    read = model.bytes_a_pass if cache is None else cache.all_bytes
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.resident)) + read
    held -= model.embedding.nbytes if model.unembedding is not None else 0
    experts = model.config.experts
    if experts is None:
        return held
    layers = model.layers if model.stack is None else (model.stack,)
    own = [getattr(each, name) for each in layers for name in EXPERT_MATRICES]
    taken = expected_experts(experts, columns) if taken is None else taken
    unread = 1 - taken / experts.num_experts
    every = sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    every += 0 if cache is None else read
    return held - round(unread * every)


def environment() -> dict[str, Any]:
    """What a measurement depends on beside its configuration."""
    return {
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "specjax": _version(),
        "products": products(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
