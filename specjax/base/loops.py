"""Loops whose end the data decides, and their forms on accelerators."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.platform import platform

_T = TypeVar("_T")
_MOST_ROUNDS = 32
"""Rounds that are run for nothing rather than decided on; chosen, not measured."""


def bounded_while(
    more: Callable[[_T], Array], body: Callable[[_T], _T], start: _T, most: int
) -> _T:
    """`lax.while_loop` that takes `most` rounds at most.

    On an accelerator it runs all of them if they are few, of which those after the end change
    nothing: a GPU may wait for the host to learn whether there is another round.
    """
    if platform() == "cpu" or most > _MOST_ROUNDS:
        return lax.while_loop(more, body, start)

    def round_of(_: Array, at: _T) -> _T:
        going = more(at)
        return jax.tree.map(lambda new, old: jnp.where(going, new, old), body(at), at)

    return lax.fori_loop(0, most, round_of, start)


def repeated(body: Callable[[_T], _T], start: _T, most: int, enough: Array | int) -> _T:
    """`body` `enough` times, a loop on a CPU; `most` times, one after the other, elsewhere.

    More than `enough` must change nothing.
    """
    if platform() == "cpu":
        return lax.fori_loop(0, enough, lambda _, at: body(at), start)
    for _ in range(most):
        start = body(start)
    return start
