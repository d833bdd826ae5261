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
from jaxtyping import Array, Int32

from specjax.base.pytree import replace
from specjax.base.sampling import Sampling
from specjax.decoding import stepping
from specjax.decoding.generate import run
from specjax.decoding.request import Request, window_of
from specjax.decoding.stepping import DecodeState
from specjax.draft import Drafter, Step
from specjax.draft.drafter import DraftState
from specjax.models.kv_cache import NewKV
from specjax.models.transformer import Model
from specjax.trees.tree import TokenTree
from specjax.verify.rules import Rule

_T = TypeVar("_T")
MOST_MAPS = 20_000
"""Pieces of memory that a process may map before it forgets programs.

Linux allows 65,530, and what is compiled next, the phases of a step say, may take as many again.
"""


class Timed(NamedTuple):
    """A generation on the host: tokens, how many a row, passes and nodes a row, wall seconds."""

    tokens: Int32[np.ndarray, "B O"]
    lengths: Int32[np.ndarray, " B"]
    steps: Int32[np.ndarray, " B"]
    nodes: Int32[np.ndarray, " B"]
    seconds: float


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
    """Pieces of memory that this process maps; 0 where the system does not tell."""
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


def warm(target: Model, drafter: Drafter | None, request: Request) -> None:
    """Compiles the program that `timed` runs for such a request, and runs it for one token."""
    one_token = jnp.minimum(request.limits.max_new_tokens, 1)  # where the request's lies
    one = request._replace(limits=replace(request.limits, max_new_tokens=one_token))
    jax.block_until_ready(run(target, drafter, **one._asdict()))


def timed(target: Model, drafter: Drafter | None, request: Request) -> Timed:
    """The request's generation and its wall time, prefill included; `warm` it before."""
    made, seconds = clocked(lambda: run(target, drafter, **request._asdict()))
    tokens, lengths, steps, nodes = map(np.asarray, made)
    return Timed(tokens[:, : int(request.limits.max_new_tokens)], lengths, steps, nodes, seconds)


_draft_tree = jax.jit(stepping.draft_tree)
_score_tree = jax.jit(stepping.score_tree)
_read = jax.jit(stepping.read, static_argnames=("slots", "target_top_k"))


@partial(jax.jit, static_argnames="slots")
def _begin(
    drafter: Drafter,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    seen: Int32[Array, "B T k"],
    slots: int,
) -> DraftState:
    return drafter.init(prompt, length, slots, seen)


@partial(jax.jit, static_argnames=("rule", "window", "target_top_k"), donate_argnames="state")
def _verify_and_commit(
    rule: Rule,
    sampling: Sampling,
    state: DecodeState,
    tree: TokenTree,
    scored: tuple[Array, NewKV],
    window: int,
    target_top_k: int,
) -> tuple[DecodeState, Step]:
    """Decides and commits, but for the drafter's part."""
    accepted = stepping.verify_tree(rule, sampling, state, tree, scored[0], window)
    seen = stepping.top_tokens_of(scored[0], target_top_k)
    gave = Step(stepping.emitted(tree, accepted), accepted.count, tree, accepted, seen)
    return stepping.commit(None, state, scored[1], state.draft, gave), gave


@partial(jax.jit, donate_argnames="draft")
def _catch_up(drafter: Drafter, draft: DraftState, step: Step) -> DraftState:
    return drafter.commit(draft, step)


class _StepTime(NamedTuple):
    draft: float
    target: float
    rest: float


def phases(target: Model, drafter: Drafter | None, request: Request, steps: int = 16) -> Phases:
    """Median seconds of each phase over `steps` real steps of a request.

    The phases are compiled apart, with the shapes and the cache length that the whole loop has,
    and run in its order, so that each finds the processor's caches as it does there.
    """
    _steps(target, drafter, request, 1)  # compiles
    fitting = max(1, min(steps, (request.outputs - 1) // window_of(drafter)))
    prefill, taken = _steps(target, drafter, request, fitting)
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


def _steps(
    target: Model, drafter: Drafter | None, request: Request, steps: int
) -> tuple[float, list[_StepTime]]:
    """Seconds of the prefill, and of `steps` steps after it, which must fit the cache."""
    state, seconds = clocked(partial(_prefill, target, drafter, request))
    taken = []
    for _ in range(steps):
        state, took = _step(target, drafter, request, state)
        taken.append(took)
    return seconds, taken


def _prefill(target: Model, drafter: Drafter | None, request: Request) -> DecodeState:
    """The target's part is one program for all drafters."""
    state, seen = _read(
        target, request.prompt, request.length, request.key,
        slots=request.slots, target_top_k=stepping.target_top_k_of(drafter),
    )  # fmt: skip
    if drafter is None:
        return state
    return replace(
        state, draft=_begin(drafter, request.prompt, request.length, seen, request.slots)
    )


def _step(
    target: Model, drafter: Drafter | None, request: Request, state: DecodeState
) -> tuple[DecodeState, _StepTime]:
    """One step, phase by phase."""
    (tree, draft), drafting = clocked(lambda: _draft_tree(target, drafter, request.sampling, state))
    state = replace(state, draft=())
    scored, scoring = clocked(lambda: _score_tree(target, tree, state))
    window, target_top_k = window_of(drafter), stepping.target_top_k_of(drafter)
    (state, gave), verifying = clocked(
        lambda: _verify_and_commit(
            request.rule, request.sampling, state, tree, scored, window, target_top_k
        )
    )
    if drafter is None:
        return state, _StepTime(0.0, scoring, drafting + verifying)
    draft, catching = clocked(lambda: _catch_up(drafter, draft, gave))
    return replace(state, draft=draft), _StepTime(drafting + catching, scoring, verifying)


def repeated(outputs: Iterable[np.ndarray], length: int = 8) -> float:
    """The share of `length`-grams that an output had before, over all outputs."""
    grams = again = 0
    for tokens in outputs:
        seen = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
        grams += len(seen)
        again += len(seen) - len(set(seen))
    return again / grams if grams else 0.0


def weight_bytes(model: Model) -> int:
    """Bytes of weights that a decoding pass reads: all but an embedding that is only looked up."""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    return held - (model.embedding.nbytes if model.unembedding is not None else 0)


def environment() -> dict[str, Any]:
    """What a measurement depends on beside its configuration."""
    return {
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "specjax": _version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text("utf-8").splitlines() if listing.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
