"""Named shapes of real models, and operands of random numbers in them."""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.operands import Operands, Prefix, quantized


class Heads(NamedTuple):
    """The attention of a model: query heads, key/value heads, features of a head."""

    query: int
    kv: int
    dim: int


MODELS = {
    "llama-3.1-8b": Heads(32, 8, 128),
    "llama-3.2-1b": Heads(32, 8, 64),
    "qwen3-4b": Heads(32, 8, 128),
    "bundled": Heads(10, 2, 64),
}
SLOTS = (512, 4096, 32768)
NODES = (1, 16, 64, 256, 1024)
BATCHES = (1, 8, 64)
MOST_BYTES = 2**32
"""Of one layer's cache; what is larger is left out."""


class Shape(NamedTuple):
    """A call of tree attention: a model, rows, nodes of a tree, cache slots, and dtype."""

    model: str
    batch: int
    nodes: int
    slots: int
    dtype: str = "bfloat16"
    bits: int = 16

    @property
    def heads(self) -> Heads:
        """The model's attention."""
        return MODELS[self.model]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache of one layer, all slots."""
        entry = 1 if self.bits == 8 else jnp.dtype(self.dtype).itemsize
        vectors = 2 * self.batch * self.heads.kv * self.slots
        return vectors * (self.heads.dim * entry + (4 if self.bits == 8 else 0))

    @property
    def moved_bytes(self) -> int:
        """The fewest bytes a call moves: cache, block, ancestors, queries and output."""
        size = jnp.dtype(self.dtype).itemsize
        block = 2 * self.batch * self.heads.kv * self.nodes * self.heads.dim * size
        ends = 2 * self.batch * self.heads.query * self.nodes * self.heads.dim * size
        return self.cache_bytes + block + ends + self.batch * self.nodes * self.nodes // 8


def named() -> list[Shape]:
    """Every model with every batch, number of nodes and cache that fits."""
    shapes = (
        Shape(model, batch, nodes, slots)
        for model in MODELS for slots in SLOTS for batch in BATCHES for nodes in NODES
    )  # fmt: skip
    return [s for s in shapes if s.cache_bytes <= MOST_BYTES and s.batch * s.nodes <= 4096]


def abstract(shape: Shape) -> Operands:
    """The shapes and dtypes of the operands, with no arrays behind them."""
    heads, dtype = shape.heads, jnp.dtype(shape.dtype)
    cached = jnp.dtype("int8") if shape.bits == 8 else dtype

    def of(dtype: jnp.dtype, *size: int) -> Any:
        return jax.ShapeDtypeStruct((shape.batch, *size), dtype)

    scale = of(jnp.dtype("float32"), heads.kv, shape.slots)
    prefix = Prefix(
        of(cached, heads.kv, heads.dim, shape.slots),
        of(cached, heads.kv, shape.slots, heads.dim),
        of(jnp.dtype("int32")),
        (scale, scale) if shape.bits == 8 else None,
    )
    block = of(dtype, heads.kv, shape.nodes, heads.dim)
    tree_mask = of(jnp.dtype("bool"), shape.nodes, shape.nodes)
    return Operands(of(dtype, heads.query, shape.nodes, heads.dim), block, block, tree_mask, prefix)


def make(shape: Shape, key: jax.Array) -> Operands:
    """Random operands with full caches; the tree is a chain of 16 nodes with branches at random."""
    return alike(abstract(shape), key)


def alike(at: Operands, key: jax.Array) -> Operands:
    """Random operands of the shapes and dtypes of `at`, which may have no arrays behind them.

    Caches are full. The tree is a chain of 16 nodes with branches at random, of which the nodes
    are the last ones; with a window each sees the prefix from a slot of its first half on.
    """
    keys = jax.random.split(key, 5)
    rows, _, nodes, _ = at.query.shape
    columns = at.tree_mask.shape[-1]

    def normal(n: int, like: Any) -> jax.Array:
        return jax.random.normal(keys[n], like.shape, like.dtype)

    prefix, first = at.prefix, at.first
    if prefix is not None:
        length = jnp.full(rows, at.slots, prefix.length.dtype)
        if prefix.scales is None:
            prefix = Prefix(normal(3, prefix.keys), normal(4, prefix.values), length)
        else:
            wide = (like.update(dtype=at.block_keys.dtype) for like in map(_shape_of, prefix[:2]))
            past, values = (normal(3 + n, like) for n, like in enumerate(wide))
            (past, of_keys), (values, of_values) = quantized(past, 2), quantized(values)
            prefix = Prefix(past, values, length, (of_keys, of_values))
    if first is not None:
        first = jax.random.randint(keys[0], first.shape, 0, at.slots // 2 + 1, first.dtype)
    seen = _ancestors(columns)[columns - nodes :]
    return Operands(
        normal(0, at.query), normal(1, at.block_keys), normal(2, at.block_values),
        jnp.broadcast_to(seen, at.tree_mask.shape), prefix, first, at.soft_cap,
    )  # fmt: skip


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _ancestors(nodes: int) -> jax.Array:
    """Which nodes each of a random tree sees: itself and those above it; `[nodes, nodes]`."""
    draw = random.Random(nodes)
    parents = [node - 1 if node < 16 else draw.randrange(node) for node in range(1, nodes)]
    seen = jnp.eye(nodes) + jax.nn.one_hot(jnp.asarray([nodes, *parents]), nodes)
    for _ in range(nodes.bit_length()):  # twice as far up each time
        seen = jnp.minimum(seen @ seen, 1)
    return seen > 0
