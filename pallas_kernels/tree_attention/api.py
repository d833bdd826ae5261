"""The entry point of tree attention: picks an implementation by platform and shape."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.tree_attention import autotune, sequence, xla
from pallas_kernels.tree_attention.implementations import (
    IMPLEMENTATIONS,
    differentiable,
    folding,
)
from pallas_kernels.tree_attention.operands import Operands, Prefix


@functools.partial(jax.named_call, name="tree_attention")
def tree_attention(
    query: Float[Array, "B H T D"],
    block_keys: Float[Array, "B K M D"],
    block_values: Float[Array, "B K M D"],
    tree_mask: Bool[Array, "B T M"] | None,
    prefix: Prefix | None = None,
    *,
    first: Int[Array, "B T"] | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B H T D"]:
    """Attention of `T` nodes to a cached prefix and to the block columns they may see.

    Query head `h` uses key/value head `h // (H // K)`. The block holds the nodes' own keys and
    values, possibly after those of earlier levels of the same tree (`M >= T`); `tree_mask[b, t, m]`
    says that `m` is `t` itself or one of its ancestors. `tree_mask=None` stands for a plain
    sequence: each token sees itself and those before it; it takes no prefix and no earlier block.
    `first` is the first slot of the prefix that a node sees, for a sliding window; a token of a
    plain sequence sees the last `window` tokens up to itself. Scores are capped to ±`soft_cap` by
    a tangent. `sinks` are a further score of each head, which has no value (gpt-oss). `interpret`
    runs a Pallas kernel in its interpreter.

    Raises:
      ValueError: a plain sequence came with a prefix or with more keys than queries, `first`
        without a prefix, or `window` without a plain sequence.
      ImplementationError: the named implementation does not exist or cannot run here.
    """
    if first is not None and prefix is None:
        raise ValueError("`first` bounds a prefix, and there is none.")
    if window is not None and tree_mask is not None:
        raise ValueError("`window` is for plain sequences; `first` and `tree_mask` bound a tree's.")
    by_row = None if sinks is None else jnp.broadcast_to(sinks, query.shape[:2])
    if tree_mask is None:
        if prefix is not None or block_keys.shape[2] != query.shape[2]:
            raise ValueError(
                f"tree_mask=None takes no prefix and as many keys ({block_keys.shape[2]}) "
                f"as queries ({query.shape[2]})."
            )
        if implementation is None and dispatch.named() != "xla":
            return sequence.causal(query, block_keys, block_values, soft_cap, window, by_row)
        if implementation in (None, "xla"):
            return xla.causal(query, block_keys, block_values, soft_cap, window, by_row)
        rows, tokens = query.shape[0], query.shape[2]
        plain = xla.within(jnp.arange(tokens), jnp.arange(tokens), window)
        tree_mask = jnp.broadcast_to(plain, (rows, tokens, tokens))
    at = Operands(query, block_keys, block_values, tree_mask, prefix, first, soft_cap, by_row)
    return _run(at, implementation or dispatch.named(), interpret)


def _run(at: Operands, named: str | None, interpret: bool) -> Float[Array, "B H T D"]:
    """What the named implementation gives, or the one chosen for such operands."""
    name = named or autotune.choice(at)
    run = dispatch.pick("tree_attention", name, named is not None, IMPLEMENTATIONS, at, interpret)
    gathers = run is IMPLEMENTATIONS["xla"].run and not xla.reads_rows_in_place()
    if at.prefix is not None and (gathers or run is IMPLEMENTATIONS["reference"].run):
        at = at._replace(prefix=at.prefix.taken())
    if IMPLEMENTATIONS[name].platforms is None or run is IMPLEMENTATIONS["xla"].run:
        return run(at)
    folded = folding(run, functools.partial(_run, named=named, interpret=interpret))
    return differentiable(folded, IMPLEMENTATIONS["xla"].run)(at)
