"""Named shapes of real models, and operands of random numbers in them."""

import random
from typing import NamedTuple

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
    return jax.eval_shape(lambda: make(shape, jax.random.key(0)))


def make(shape: Shape, key: jax.Array) -> Operands:
    """Random operands with full caches; the tree is a chain of 16 nodes with branches at random."""
    heads, dtype = shape.heads, jnp.dtype(shape.dtype)
    keys = jax.random.split(key, 5)

    def normal(n: int, *size: int) -> jax.Array:
        return jax.random.normal(keys[n], (shape.batch, *size), dtype)

    cached = (
        normal(3, heads.kv, heads.dim, shape.slots),
        normal(4, heads.kv, shape.slots, heads.dim),
    )
    length = jnp.full(shape.batch, shape.slots, jnp.int32)
    prefix = Prefix(*cached, length)
    if shape.bits == 8:
        (past, of_keys), (values, of_values) = quantized(cached[0], 2), quantized(cached[1])
        prefix = Prefix(past, values, length, (of_keys, of_values))
    return Operands(
        normal(0, heads.query, shape.nodes, heads.dim),
        normal(1, heads.kv, shape.nodes, heads.dim),
        normal(2, heads.kv, shape.nodes, heads.dim),
        jnp.broadcast_to(_ancestors(shape.nodes), (shape.batch, *[shape.nodes] * 2)),
        prefix,
    )


def _ancestors(nodes: int) -> jax.Array:
    """Which nodes each of a random tree sees: itself and those above it; `[nodes, nodes]`."""
    draw = random.Random(nodes)
    parents = [node - 1 if node < 16 else draw.randrange(node) for node in range(1, nodes)]
    seen = jnp.eye(nodes) + jax.nn.one_hot(jnp.asarray([nodes, *parents]), nodes)
    for _ in range(nodes.bit_length()):  # twice as far up each time
        seen = jnp.minimum(seen @ seen, 1)
    return seen > 0
