"""The implementations of tree attention, by name."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_attention import reference, tpu, xla
from pallas_kernels.tree_attention.operands import Operands

Attention = Callable[[Operands], jax.Array]


def _later(file: str, name: str) -> Callable[..., Any]:
    """A function of a kernel's file, which is imported when it is called.

    Mosaic GPU takes a while and packages that a CPU has no need of, newer versions of jax are to
    drop Triton's lowering, and a CPU's library asks this package what is named.
    """

    def call(at: Operands, **options: Any) -> Any:
        found = importlib.import_module(f"pallas_kernels.tree_attention.{file}")
        return getattr(found, name)(at, **options)

    return call


def traced_once(run: Attention, name: str) -> Attention:
    """`run`, which is traced once for operands of a shape, however many layers call it.

    A program has it once, too. 16 layers of Llama-3.1-8B's attention (1 row, 16 nodes, 512 slots)
    take 0.4 s to trace and lower for Hopper so, and took 2.9 s (2 cores, jax 0.10.2, 2026-11-26).
    """

    def once(at: Operands, soft_cap: float | None) -> jax.Array:
        return run(at._replace(soft_cap=soft_cap))

    once.__name__ = name  # by which profiles and programs call it
    program = jax.jit(once, static_argnames="soft_cap")

    def call(at: Operands) -> jax.Array:
        return program(at._replace(soft_cap=None), at.soft_cap)

    return call


IMPLEMENTATIONS = {
    "reference": Implementation(reference.tree_attention),
    "xla": Implementation(xla.tree_attention),
    "cpu": Implementation(_later("cpu", "tree_attention"), _later("cpu", "unable"), ("cpu",)),
    "tpu": Implementation(
        traced_once(tpu.tree_attention, "tpu"), tpu.unable, ("tpu",), interpreted=tpu.interpreted
    ),
    "hopper": Implementation(
        traced_once(_later("hopper", "tree_attention"), "hopper"), _later("hopper", "unable"),
        ("gpu",), interpreted=_later("hopper", "interpreted"),
    ),
    "triton": Implementation(
        traced_once(_later("triton", "tree_attention"), "triton"), _later("triton", "unable"),
        ("gpu",), interpreted=functools.partial(_later("triton", "tree_attention"), interpret=True),
    ),
}  # fmt: skip


def differentiable(run: Attention, alike: Attention) -> Attention:
    """`run` with the gradients of `alike`: no kernel has to have its own."""

    def call(at: Operands) -> jax.Array:
        soft_cap = at.soft_cap

        @jax.custom_vjp
        def own(at: Operands) -> jax.Array:
            return run(at._replace(soft_cap=soft_cap))

        def forward(at: Operands) -> tuple[jax.Array, Operands]:
            return own(at), at

        def backward(at: Operands, grad: jax.Array) -> tuple[Operands]:
            return jax.vjp(lambda at: alike(at._replace(soft_cap=soft_cap)), at)[1](grad)

        own.defvjp(forward, backward)
        return own(at._replace(soft_cap=None))

    return call


def _taken(at: Operands) -> Operands:
    """The same with a copy of every row's pages, put together."""
    assert at.prefix is not None
    return at._replace(prefix=at.prefix.taken())


def folding(run: Attention, again: Attention) -> Attention:
    """`run`, and under `vmap` `again` of all rows in one call: no kernel has to be batched."""

    def call(at: Operands) -> jax.Array:
        soft_cap = at.soft_cap

        @custom_vmap
        def own(at: Operands) -> jax.Array:
            return run(at._replace(soft_cap=soft_cap))

        @own.def_vmap
        def of_all(size: int, batched: list[Operands], at: Operands) -> tuple[jax.Array, bool]:
            if at.prefix is not None and at.prefix.pages is not None:
                axes = jax.tree.map(lambda own: 0 if own else None, batched[0])
                at = jax.vmap(_taken, in_axes=(axes,), axis_size=size)(at)
                batched = [jax.tree.map(lambda _: True, at)]

            def rows(x: jax.Array, is_batched: bool) -> jax.Array:
                x = x if is_batched else jax.numpy.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            folded = jax.tree.map(rows, at, batched[0])
            out = again(folded._replace(soft_cap=soft_cap))
            return out.reshape(size, -1, *out.shape[1:]), True

        return own(at._replace(soft_cap=None))

    return call
