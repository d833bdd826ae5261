"""How implementations of tree attention are timed, and checked before: for the bench and a choice.

A choice is made while a program is traced; what runs then runs in a thread of its own, which has
no part in that trace.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, shapes
from pallas_kernels.tree_attention import xla
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS, Attention
from pallas_kernels.tree_attention.operands import Operands, Prefix

PATIENCE = 180.0
"""Seconds that one implementation may take on one shape, compilation included."""
ROTATED_BYTES = 2**28
"""Caches that take turns have so many bytes together: more than the last cache of a chip holds."""
_MOST_COPIES = 8
_ROUNDS = 5
_SECONDS = 0.02
_MOST_OFF = 0.02

_T = TypeVar("_T")


def able(at: Operands) -> tuple[str, ...]:
    """The names of what runs here on such operands, XLA's first; the definition is none of them.

    Nor is "cpu", which runs wherever it can: on a CPU nothing is measured. What cannot even be
    asked, as a package that it needs is missing, is none of them either.
    """

    def can_run(name: str) -> bool:
        try:
            return dispatch.unable(IMPLEMENTATIONS[name], at) is None
        except Exception:
            return False

    tried = IMPLEMENTATIONS.keys() - {"reference", "cpu"}
    names = sorted(tried, key=lambda name: (name != "xla", name))
    return tuple(filter(can_run, names))


def candidates(at: Operands) -> dict[str, Attention]:
    """What runs on this platform on such operands."""
    return {name: IMPLEMENTATIONS[name].run for name in able(at)}


def seconds(run: Callable[[Any], jax.Array], caches: Sequence[Any]) -> float:
    """The median time of one call, over calls that take turns among the caches."""

    @jax.jit
    def loop(caches: Sequence[Any], turns: int | jax.Array) -> jax.Array:
        def turn(_: jax.Array, query: jax.Array) -> jax.Array:
            for at in caches:  # each call waits for the one before, and nothing is done once
                at, query = lax.optimization_barrier((at, query))
                query = (at.query + 1e-6 * run(at._replace(query=query))).astype(query.dtype)
            return query

        return lax.fori_loop(0, turns, turn, caches[0].query)

    def timed(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(loop(caches, turns))
        return time.perf_counter() - begin

    timed(1)
    turns = max(2, round(_SECONDS / timed(1)))
    timed(turns)
    return statistics.median(timed(turns) for _ in range(_ROUNDS)) / turns / len(caches)


def ragged(at: Operands) -> Operands:
    """The operands with rows of unequal length, and nothing that counts past them."""
    if at.prefix is None or not at.slots:
        return at
    rows, slots = at.query.shape[0], at.slots
    length = jnp.asarray([slots - 1 - (row * 37) % slots for row in range(rows)], jnp.int32)
    return at._replace(prefix=at.prefix._replace(length=length))


def check(found: jax.Array, expected: jax.Array) -> None:
    """Refuses to time what computes something else.

    Raises:
      ValueError: the two differ by more than 2 % of the largest entry.
    """
    off = jnp.abs(found.astype(jnp.float32) - expected).max() / jnp.abs(expected).max()
    if not off < _MOST_OFF:
        raise ValueError(f"it differs from XLA's by {float(off):.3f} of the largest entry")


def reason(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class Trial(NamedTuple):
    """What implementations are timed on, full caches that take turns, and checked on."""

    caches: Sequence[Operands]
    ragged: Operands
    expected: jax.Array


class UnpreparedError(RuntimeError):
    """There is nothing to measure on: too little memory, or XLA's form fails."""


def prepared(at: Operands) -> Trial:
    """Random operands of the shapes and dtypes of `at`, and what XLA's form makes of them.

    They are made in a thread of its own.

    Raises:
      UnpreparedError: the device has too little memory to spare, or XLA's form fails.
    """
    try:
        return apart(partial(_prepared, shapes_of(at)), PATIENCE)
    except Exception as error:
        raise UnpreparedError(reason(error)) from error


def _prepared(at: Operands) -> Trial:
    cap = at.soft_cap
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in _arrays(at))
    copies = max(1, min(_MOST_COPIES, ROTATED_BYTES // size))
    scores = 4 * math.prod(at.query.shape[:3]) * (at.slots + at.tree_mask.shape[-1])
    spare, needed = _spare_bytes(), 2 * size + 3 * scores
    if spare is not None and needed > spare:
        raise MemoryError(f"it takes {needed >> 20} MiB of the device, which has {spare >> 20}")
    if spare is not None:
        copies = max(1, min(copies, (spare - needed) // size))

    @jax.jit
    def made(key: jax.Array) -> Operands:
        return shapes.alike(at, key)._replace(soft_cap=None)

    keys = jax.random.split(jax.random.key(1), copies)
    caches = [made(key)._replace(soft_cap=cap) for key in keys]
    uneven = ragged(caches[0])
    return jax.block_until_ready(Trial(caches, uneven, jitted(xla.tree_attention, cap)(uneven)))


def timed(run: Attention, trial: Trial) -> float:
    """The seconds of one call of `run`, once it is known to compute what XLA's form does.

    Raises:
      ValueError: it does not.
      Exception: whatever it raises.
    """
    cap = trial.ragged.soft_cap
    check(jitted(run, cap)(trial.ragged), trial.expected)

    def capped(at: Operands) -> jax.Array:
        return run(at._replace(soft_cap=cap))

    return seconds(capped, [at._replace(soft_cap=None) for at in trial.caches])


def jitted(run: Attention, soft_cap: float | None) -> Attention:
    """`run` as a program of the arrays; what caps scores is static."""
    program = jax.jit(lambda at: run(at._replace(soft_cap=soft_cap)))
    return lambda at: program(at._replace(soft_cap=None))


def shapes_of(at: Operands) -> Operands:
    """The shapes and dtypes of operands, each row's pages of a larger cache put together."""
    cap, at = at.soft_cap, at._replace(soft_cap=None)
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), at)
    if shaped.prefix is not None:
        shaped = shaped._replace(prefix=jax.eval_shape(Prefix.taken, shaped.prefix))
    return shaped._replace(soft_cap=cap)


def _arrays(at: Operands) -> list[Any]:
    return jax.tree.leaves(at._replace(soft_cap=None))


def device() -> Any:
    """The device that runs what names none."""
    chosen = jax.config.values["jax_default_device"]
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def _spare_bytes() -> int | None:
    """Bytes that the device has to spare, None where it does not say."""
    stats = device().memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0)


def apart(work: Callable[[], _T], patience: float) -> _T:
    """What `work` gives in a thread of its own, which no trace of the caller's reaches.

    It has the caller's default device and width of numbers, and may move arrays.

    Raises:
      TimeoutError: it did not end within `patience` seconds; it is left running.
      BaseException: what `work` raises.
    """
    values = jax.config.values
    chosen, wide = values["jax_default_device"], values["jax_enable_x64"]
    gave: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with jax.default_device(chosen), jax.enable_x64(wide), jax.transfer_guard("allow"):
                gave.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="specjax-kernels", daemon=True)
    thread.start()
    thread.join(patience)
    if raised:
        raise raised[0]
    if not gave:
        raise TimeoutError(f"it did not end in {patience:g} seconds")
    return gave[0]
