"""What a generation takes of a device's memory, said before any of it is taken."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.cache import cache_dtype
from specjax.model import Model
from specjax.sharding import DATA, DRAFT, Placement, mesh_of, size_of

_LAWS = 3
"""Arrays over a tree's nodes and the vocabulary that live at once: logits, the law, the drafts'."""


class Load(NamedTuple):
    """A model and how it is held: in `dtype`, `copies` of it, placed somehow."""

    placed: Placement
    dtype: jnp.dtype
    copies: int = 1

    @property
    def parts(self) -> int:
        """Devices that share a layer."""
        return 1 if self.placed.axis is None else size_of(self.placed.mesh, self.placed.axis)

    @property
    def weights(self) -> int:
        """Bytes of weights on a device."""
        config, mesh = self.placed.config, self.placed.mesh

        def own(name: str, shape: tuple[int, ...]) -> int:
            parts = math.prod(size_of(mesh, axis) for axis in self.placed.spec(name) if axis)
            return math.prod(shape) // parts

        layer = sum(own(name, shape) for name, shape in config.layer_shapes.items())
        outer = sum(own(name, shape) for name, shape in config.outer_shapes.items())
        return self.copies * (config.num_layers * layer + outer) * self.dtype.itemsize

    def caches(self, rows: int, slots: int) -> int:
        """Bytes of keys and values on a device that has so many rows."""
        config = self.placed.config
        heads = config.num_kv_heads // self.parts
        token = 2 * config.num_layers * heads * config.head_dim * cache_dtype(self.dtype).itemsize
        return self.copies * rows * slots * token

    def pass_over(self, columns: int) -> int:
        """Bytes of a pass's largest arrays over so many tokens: the stream and a layer's inside."""
        config = self.placed.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        inside = max(2 * config.intermediate_size, heads) // self.parts
        return 4 * columns * (3 * config.hidden_size + inside)


def load_of(model: Model) -> Load:
    """How a model is held; of stacked ones, all that a device has."""
    stack = model.embedding.shape[0] if model.embedding.ndim == 3 else 1
    mesh = mesh_of(model)
    placed = Placement(model.config, mesh, model.axis)
    return Load(placed, model.embedding.dtype, -(-stack // size_of(mesh, DRAFT)))


def loads_in(tree: Any) -> list[Load]:
    """How the models within a drafter are held."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Model))
    return [load_of(leaf) for leaf in leaves if isinstance(leaf, Model)]


class Plan(NamedTuple):
    """Bytes that a generation takes of each device, and how many there are to be had."""

    weights: int
    draft_weights: int
    caches: int
    draft_caches: int
    trees: int
    prompts: int
    available: int | None

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(self[:-1])

    @property
    def beside_weights(self) -> int:
        """Bytes that the texts take."""
        return self.total - self.weights - self.draft_weights


def plan(
    target: Load, drafts: Sequence[Load], rows: int, prompt: int, slots: int, nodes: int
) -> Plan:
    """The memory of `rows` texts with room for `slots` tokens, in trees of `nodes`, root included.

    Prompts of `prompt` tokens are read in one pass. Tables that draft without a model are left out,
    and that a pool which is stacked is held a second time.
    """
    own = -(-rows // size_of(target.placed.mesh, DATA))
    return Plan(
        weights=target.weights,
        draft_weights=sum(draft.weights for draft in drafts),
        caches=target.caches(own, slots),
        draft_caches=sum(draft.caches(own, slots) for draft in drafts),
        trees=_LAWS * 4 * own * nodes * target.placed.config.vocab_size,
        prompts=max(each.pass_over(own * prompt) for each in (target, *drafts)),
        available=available(target.placed.mesh),
    )


def available(mesh: Mesh | None) -> int | None:
    """Bytes that each device has to spare, None if unknown; a CPU's devices share its memory."""
    own = [jax.devices()[0]] if mesh is None else list(mesh.local_devices)
    if own[0].platform == "cpu":
        spare = _host()
        return None if spare is None else spare // len(own)
    found = [device.memory_stats() for device in own]
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in found if stats]
    return min(free, default=None)


def check(needed: int, spare: int | None, what: str) -> None:
    """Checks that `needed` bytes can be had.

    Raises:
      ValueError: they cannot; `what` names them.
    """
    if spare is not None and needed > spare:
        raise ValueError(
            f"{what} would take {readable(needed)} of each device, which has {readable(spare)} "
            "to spare."
        )


def readable(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _host() -> int | None:
    """Bytes that the host could give without swapping; None where the system does not tell."""
    told = Path("/proc/meminfo")
    if not told.exists():
        return None
    for line in told.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
