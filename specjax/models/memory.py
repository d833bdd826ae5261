"""What a generation takes of a device's memory, planned before any of it is taken.

`specjax.decoding.request.memory_plan` asks for it, of `generate` and of an engine's rows.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.cpu.library import status
from pallas_kernels.dispatch import named
from pallas_kernels.grouped_matmul import sizes_of_blocks
from pallas_kernels.platform import platform
from pallas_kernels.tree_attention.xla import (
    SLOTS_AT_ONCE,
    queries_at_once,
    reads_rows_in_place,
)
from specjax.models.kv_cache import cache_dtype
from specjax.models.placement import Placement
from specjax.models.quantized import holds_packed
from specjax.models.transformer import PROMPT_BLOCK, Model, reads_in_blocks
from specjax.parallel.mesh import DATA, DRAFT, mesh_of, size_of

USUAL_DISTRIBUTIONS = 5.8
"""Float32 arrays over a tree's nodes and the vocabulary that live at once where traversal decides
(`specjax.verify.rules.Rule.live_distributions`)."""

STREAMED_PROCESS = 620 * 2**20
"""Bytes of a process that runs a streamed model on a CPU, beside its arrays: Python and jax, the
programs of a layer and what compiling them took. 0.51 to 0.62 GiB were seen with 2.02B parameters
(`python -m benchmarks.offload.disk`, jax 0.10.2, 2026-11-25); programs do not grow with the
weights.
"""

DRAFTED_LAYER = 10 * 2**20
"""Bytes of the same for each layer of the drafts, which are one program: 0.3 GiB with 32."""

_CHUNK = 128
"""Queries of a plain sequence whose scores live at once (`pallas_kernels.tree_attention.xla`)."""


_GROUPS_2 = ("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_GROUPS_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
             ("total_inactive_file", "total_active_file"))  # fmt: skip
"""Where control groups are, and in them the limit, what is taken, and of that what is of files."""


class Load(NamedTuple):
    """A model and how it is held: in `dtype`, `copies` of it, placed somehow.

    `held` are the bytes of weights that are quantized, of all devices that share a layer. Layers of
    a `streamed` model come in every pass; those of a `stacked` one are run by a loop. One of a
    `pool` is run under `vmap` with others.
    """

    placed: Placement
    dtype: jnp.dtype
    copies: int = 1
    held: int | None = None
    streamed: bool = False
    stacked: bool = False
    pool: bool = False

    @property
    def parts(self) -> int:
        """Devices that share a layer."""
        return 1 if self.placed.axis is None else size_of(self.placed.mesh, self.placed.axis)

    @property
    def weights(self) -> int:
        """Bytes of weights on a device."""
        if self.held is not None:
            return self.copies * self.held // self.parts
        config, mesh = self.placed.config, self.placed.mesh

        def own(name: str, shape: tuple[int, ...]) -> int:
            parts = math.prod(size_of(mesh, axis) for axis in self.placed.spec(name) if axis)
            return math.prod(shape) // parts

        every = [*map(config.layer_shapes, range(config.num_layers)), config.outer_shapes]
        held = sum(own(*leaf) for shapes in every for leaf in shapes.items())
        return self.copies * held * self.dtype.itemsize

    def caches(self, rows: int, slots: int) -> int:
        """Bytes of keys and values on a device that has so many rows."""
        config = self.placed.config
        heads = config.num_kv_heads // self.parts
        token = 2 * config.num_layers * heads * config.head_dim * cache_dtype(self.dtype).itemsize
        return self.copies * rows * slots * token

    def prefill(self, rows: int, tokens: int) -> int:
        """Bytes of a pass over prompts: its largest arrays, and all keys and values it made."""
        config, scores = self.placed.config, 2 * 4 * min(tokens, _CHUNK) * tokens
        inside = self._layer(rows * tokens, scores * config.num_heads // self.parts)
        return inside + self.caches(rows, tokens)

    def reading(self, rows: int, tokens: int, slots: int) -> int:
        """Bytes of reading prompts: in one pass, or in blocks that go to the cache."""
        if self.stacked or self.streamed or not reads_in_blocks(tokens):
            return self.prefill(rows, tokens)
        if not reads_rows_in_place():
            return self.step(rows, PROMPT_BLOCK, slots)
        config = self.placed.config
        attended = 0
        if not self._makes_no_scores:  # of a row's: two of scores, three of values by weight
            queries = PROMPT_BLOCK * config.num_heads // self.parts
            attended = 4 * queries * (2 * SLOTS_AT_ONCE + 3 * config.head_dim)
        return self._layer(rows * PROMPT_BLOCK, attended) + 2 * self.caches(rows, PROMPT_BLOCK)

    @property
    def _makes_no_scores(self) -> bool:
        """Whether tree attention is the C++ of a CPU, which reads caches where they lie."""
        config = self.placed.config
        takes = config.attention_cap is None and config.head_dim % 16 == 0
        return takes and _has_cpu_kernels()

    def step(self, rows: int, nodes: int, slots: int, after: int = 0) -> int:
        """Bytes of a pass over trees: a layer's arrays, and a copy of the values it looks at.

        Those of a layer make room for `after` bytes, of what is done when all layers have run.
        """
        config = self.placed.config
        queries = rows * queries_at_once(nodes)
        scores = 2 * 4 * queries * (slots + nodes) * config.num_heads // self.parts
        values = self.caches(rows, slots) // (2 * config.num_layers)
        layer = self._layer(rows * nodes, scores + values)
        return max(layer, after) + 2 * self.caches(rows, nodes)

    def _layer(self, columns: int, scores: int) -> int:
        """The stream of a pass and the inside of the layer that has most, bytes of float32.

        A dot in bfloat16 reads its columns rounded, beside what they were.
        """
        config = self.placed.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim // self.parts
        features = (1 + config.gated) * self._widest // self.parts
        rounded = self.dtype.itemsize * columns * (config.hidden_size + features // 2)
        attention = 4 * columns * heads + scores
        inside = max(4 * columns * features, self._experts(columns), attention)
        return 4 * columns * 2 * config.hidden_size + inside + rounded * (self.dtype.itemsize < 4)

    @property
    def _widest(self) -> int:
        """Features of a token in the layer that has most."""
        config, experts = self.placed.config, self.placed.config.experts
        if experts is None:
            return config.intermediate_size
        return config.intermediate_size if experts.dense_layers else experts.shared_size

    def _experts(self, columns: int) -> int:
        """Bytes of columns while their experts are multiplied: a device has those of all that a
        column chose, also of experts that it does not hold.

        On accelerators they are in blocks of each expert. On a CPU XLA's own products are all held
        until a layer's last one, with a copy of an expert's matrices; after ours XLA:CPU adds, in
        float32, copies of what each expert gave.
        """
        config, experts = self.placed.config, self.placed.config.experts
        if experts is None:
            return 0
        size, given, width = experts.intermediate_size, config.hidden_size, self.dtype.itemsize
        first = (1 + config.gated) * size
        chosen = columns * experts.experts_per_token
        if platform() != "cpu":
            rows = math.prod(sizes_of_blocks(chosen, experts.num_experts // self.parts))
            return rows * max(width * given + 4 * first, width * size + 4 * given)
        if not _has_cpu_kernels():
            return 4 * chosen * (first + size + given) + width * first * given
        return 4 * chosen * max(size + max(first, given), 2 * given * (width == 4))


def _has_cpu_kernels() -> bool:
    """Whether products and tree attention are the C++ of a CPU."""
    return platform() == "cpu" and status().reason is None and named() != "xla"


def load_of(model: Model, beside: Any = None) -> Load:
    """How a model is held; of stacked ones, all that a device has.

    Of one that is quantized those weights do not count that are also in the tree `beside`.
    """
    pool = len(model.embedding.shape) == 3
    stack = model.embedding.shape[0] if pool else 1
    mesh = mesh_of(model)
    placed = Placement(model.config, mesh, model.axis)
    held = None
    if not model.is_whole:
        held = model.held_bytes
    elif holds_packed(model):
        others = {id(leaf) for leaf in jax.tree.leaves(beside)}
        own = [leaf for leaf in jax.tree.leaves(model) if id(leaf) not in others]
        held = sum(leaf.nbytes for leaf in own) // stack
    copies = -(-stack // size_of(mesh, DRAFT))
    return Load(
        placed, model.embedding.dtype, copies, held, not model.is_whole, model.is_stacked, pool
    )


def loads_in(tree: Any, beside: Any = None) -> list[Load]:
    """How the models within a drafter are held, but for what they share with `beside`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Model))
    return [load_of(leaf, beside) for leaf in leaves if isinstance(leaf, Model)]


class Plan(NamedTuple):
    """Bytes that a generation takes of each device, and how many there are to be had.

    `prompts` is what reading them takes, `trees` what a step does; they follow each other.
    `process` is what is no array, where it is known.
    """

    weights: int
    draft_weights: int
    caches: int
    draft_caches: int
    trees: int
    prompts: int
    process: int
    available: int | None

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.weights + self.draft_weights + self.beside_weights + self.process

    @property
    def beside_weights(self) -> int:
        """Bytes that the texts take."""
        return self.caches + self.draft_caches + max(self.trees, self.prompts)


def plan(
    target: Load,
    drafts: Sequence[Load],
    rows: int,
    prompt: int,
    slots: int,
    nodes: int,
    live_distributions: float = USUAL_DISTRIBUTIONS,
    hidden_layers: int = 0,
    paged: tuple[int, int] | None = None,
) -> Plan:
    """The memory of `rows` texts with room for `slots` tokens, in trees of `nodes`, root included.

    Drafts read prompts of `prompt` tokens in one pass. `live_distributions` is that of the rule
    that decides (`Rule.live_distributions`); `hidden_layers` is how many of the target's hidden
    states the drafts see. Where caches have pages, `paged` are the tokens that the target's have
    room for and those that a draft's have; those of pools have none. Kernels read pages where they
    lie, and one prompt is read at a time. Tables that draft without a model are left out, and that
    a pool which is stacked is held a second time.
    """
    own = -(-rows // size_of(target.placed.mesh, DATA))
    readers, seen = (own, slots) if paged is None else (1, 0)
    layers = sum(draft.placed.config.num_layers for draft in drafts)
    scoring = int(4 * live_distributions * own * nodes * target.placed.config.vocab_size)
    shown = 8 * hidden_layers * target.placed.config.hidden_size  # as they were made, and together
    scoring = target.step(own, nodes, seen, scoring) + own * nodes * shown
    process = STREAMED_PROCESS + layers * DRAFTED_LAYER
    return Plan(
        weights=target.weights,
        draft_weights=sum(draft.weights for draft in drafts),
        caches=target.caches(own, slots) if paged is None else target.caches(1, paged[0]),
        draft_caches=sum(
            draft.caches(own, slots) if paged is None or draft.pool else draft.caches(1, paged[1])
            for draft in drafts
        ),
        trees=max([scoring, *(draft.step(own, nodes, seen) for draft in drafts)]),
        prompts=target.reading(readers, prompt, seen)
        + readers * prompt * shown
        + sum(draft.prefill(readers, prompt) for draft in drafts),
        process=process if target.streamed and platform() == "cpu" else 0,
        available=available(target.placed.mesh),
    )


def available(mesh: Mesh | None) -> int | None:
    """Bytes that each device has to spare, None if unknown; a CPU's devices share its memory."""
    own = [jax.devices()[0]] if mesh is None else list(mesh.local_devices)
    if own[0].platform == "cpu":
        spare = host()
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


def host(root: Path = Path("/")) -> int | None:
    """Bytes that the host could give without swapping, no more than its control groups let it.

    None where the system does not report it. `root` is where its files are.
    """
    listed = _read(root / "proc/meminfo").splitlines()
    free = (int(line.split()[1]) * 1024 for line in listed if line.startswith("MemAvailable:"))
    return min((*free, *_left_in_groups(root)), default=None)


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left in each control group of this process that has a limit, of version 2 or 1.

    Pages of files can be had back, and count as left. A container may see its own group as the
    topmost one, whatever it is called outside.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            top, most, used, of_files = _GROUPS_2
        elif "memory" in kinds.split(","):
            top, most, used, of_files = _GROUPS_1
        else:
            continue
        below = Path(path.lstrip("/"))
        for group in (below, *below.parents):
            folder = root / top / group
            limit, taken = _read(folder / most).strip(), _read(folder / used).strip()
            if not (limit.isdigit() and taken.isdigit()):
                continue
            figures = (line.split() for line in _read(folder / "memory.stat").splitlines())
            back = sum(int(value) for name, value in figures if name in of_files)
            yield max(0, int(limit) - max(0, int(taken) - back))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
