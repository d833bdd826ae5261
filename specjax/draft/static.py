"""Static expansion by a pool of draft models (SpecInfer, arXiv 2305.09781, section 3)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from pallas_kernels.platform import platform
from specjax.base.axes import Key
from specjax.base.grammars import ROOT, Grammars, masked
from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import (
    GREEDY,
    Purpose,
    Sampling,
    draw,
    draw_distinct,
    fold,
    is_greedy,
    largest,
    most_likely,
    sampled_probs,
)
from specjax.draft.drafter import Drafter, Seen, Step, Wants
from specjax.draft.limits import check_depth
from specjax.draft.reading import ModelState, catch_up, prefill, read_by, ready, run, shorter
from specjax.models.transformer import Model, unembed
from specjax.parallel.mesh import DATA, DRAFT, gathered, mesh_of, place_along, size_of, stacked
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K, Construction
from specjax.trees.tree import NO_PARENT, Draws, TokenTree, TreeShape, merge, unmerged
from specjax.trees.widths import Widths


@pytree
class ExpansionDrafter(Drafter):
    """A pool of drafts, each expanding a tree below the root; the trees are merged into one.

    `groups` are equal models with equal trees: a single one, or several stacked on a leading axis
    and run as one `vmap`; `sizes` says how many a group holds (1: not stacked), `shapes` which
    tree its members expand. `axis` is the mesh axis over which stacked ones are spread, if any.
    Children are those that rows' `grammars` allow, where there are any.
    """

    groups: tuple[Model, ...]
    sizes: tuple[int, ...] = static()
    shapes: tuple[TreeShape, ...] = static()
    children: str = static(default=DRAWN)
    axis: str | None = static(default=None)
    grammars: Grammars | None = None

    @classmethod
    def of(
        cls,
        models: Sequence[Model],
        widths: Widths | tuple[Widths, ...],
        children: str = DRAWN,
        stack: bool | None = None,
    ) -> "ExpansionDrafter":
        """A pool of `models`, equal ones stacked if `stack` (default: except on CPU).

        `widths` are those of every model's tree (see `TreeShape`; the first is a number), or a
        tuple of each model's own; `children` says how children are made (`DRAWN`, `DISTINCT` or
        `TOP_K` of `specjax.trees.construction`). On 2
        CPU cores a batched dot made three stacked drafts cost as much as four to six single
        ones, so there they are unrolled. On a mesh with a `draft` axis they are stacked, and each
        device of it runs its share.

        Raises:
          ValueError: there is no model, vocabularies differ, trees are not one a model or deeper
            than a draft's sliding window, or the mesh's axis does not divide a number of equal
            drafts.
        """
        if not models:
            raise ValueError("a pool needs at least one draft model.")
        sizes = {m.config.vocab_size for m in models}
        if len(sizes) > 1:
            raise ValueError(f"the drafts have different vocabulary sizes: {sorted(sizes)}.")
        shapes = _shapes(widths, len(models))
        for model, shape in zip(models, shapes, strict=True):
            check_depth(model.config, shape.depth)
        mesh = mesh_of(models)
        devices = size_of(mesh, DRAFT)
        if stack is None:
            stack = platform() != "cpu" or devices > 1
        alike: list[tuple[TreeShape, list[Model]]] = []
        for model, shape in zip(models, shapes, strict=True):
            group = next(
                (g for s, g in alike if stack and s == shape and _may_join(model, g[0])), None
            )
            if group is None:
                alike.append((shape, [model]))
            else:
                group.append(model)
        for _, group in alike:
            if len(group) > 1 and len(group) % devices:
                raise ValueError(
                    f"mesh axis draft={devices} does not divide {len(group)} equal drafts."
                )
        axis = DRAFT if devices > 1 and any(len(g) > 1 for _, g in alike) else None
        groups = tuple(g[0] if len(g) == 1 else stacked(g, mesh, axis) for _, g in alike)
        sizes, shapes = tuple(len(g) for _, g in alike), tuple(s for s, _ in alike)
        return cls(groups, sizes, shapes, children, axis)

    def under(self, grammars: Grammars) -> "ExpansionDrafter":
        """The same, whose drafts draw from their distributions among the allowed tokens."""
        return replace(self, grammars=grammars)

    @property
    def wants(self) -> Wants:
        """The hidden states that its drafts read."""
        return Wants(hidden_layers=read_by(self.groups))

    @property
    def construction(self) -> Construction:
        """How trees are made."""
        chain = all(shape.widest == 1 for shape in self.shapes)
        return Construction(self.children, sum(self.sizes), chain)

    @property
    def state_specs(self) -> tuple[P, ...]:
        """Stacked drafts first, then rows."""
        return tuple(P(DATA) if size == 1 else P(self.axis, DATA) for size in self.sizes)

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        """Every draft's tree, in the order of the groups."""
        pairs = zip(self.shapes, self.sizes, strict=True)
        return tuple(shape for shape, size in pairs for _ in range(size))

    @property
    def vocab_size(self) -> int:
        """Tokens of the drafts' vocabulary."""
        return self.groups[0].config.vocab_size

    @property
    def window(self) -> int:
        """Depth of the trees plus 1."""
        return max(shape.depth for shape in self.shapes) + 1

    @property
    def num_slots(self) -> int:
        """Node slots of the merged tree, the root included."""
        return 1 + sum(shape.num_nodes for shape in self.trees)

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> tuple[ModelState, ...]:
        """Every draft's state after the prompts."""
        hidden = seen.hidden_states

        def one(model: Model) -> ModelState:
            return prefill(model, prompt, length, slots, hidden, self.wants.hidden_layers)

        return self._each(one, ())

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: tuple[ModelState, ...],
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, tuple[ModelState, ...]]:
        """The drafts' trees, merged."""
        keys = jax.vmap(lambda k, at: fold(k, at, Purpose.DRAFT))(key, position)
        certain = is_greedy(sampling) | (self.children == TOP_K)
        tokens, distributions, first = [], [], 0
        groups = zip(self.groups, self.sizes, self.shapes, state, strict=True)
        for model, size, shape, held in groups:
            here = size if size == 1 else model.embedding.shape[0]
            numbers = first + place_along(self.axis if size > 1 else None) * here + jnp.arange(here)
            first += size

            def one(
                model: Model, held: ModelState, number: Array, shape: TreeShape = shape
            ) -> tuple[Array, Array]:
                own = jax.vmap(lambda k: fold(k, number))(keys)
                held = ready(model, held, last)
                return expand(
                    model, held, own, shape, sampling, certain, self.children == DISTINCT,
                    self.grammars,
                )  # fmt: skip

            if size == 1:
                made = jax.tree.map(lambda x: x[None], one(model, held, numbers[0]))
            else:
                made = gathered(jax.vmap(one)(model, held, numbers), self.axis)
            tokens.extend(made[0])
            distributions.extend(made[1])
        tree = self._merged(
            jnp.concatenate(tokens, 1), jnp.concatenate(distributions, 1), last, certain
        )
        return tree, state

    def _merged(
        self,
        tokens: Int32[Array, "B M"],
        distributions: Float[Array, "B R V"],
        last: Int32[Array, " B"],
        certain: Array,
    ) -> TokenTree:
        rows, trees = last.shape[0], self.trees
        nodes = np.cumsum([0, *(tree.num_nodes for tree in trees)])
        starts = np.cumsum([0, *(tree.num_distributions for tree in trees)])
        parents = [
            np.where(tree.parents() == NO_PARENT, NO_PARENT, tree.parents() + start)
            for tree, start in zip(trees, nodes, strict=False)
        ]

        def same(values: Sequence[np.ndarray]) -> Int32[Array, "B M"]:
            joined = np.concatenate(values)
            return jnp.asarray(np.broadcast_to(joined, (rows, joined.size)), jnp.int32)

        draws = Draws(
            tokens=tokens,
            parents=same(parents),
            depth=same([tree.depths() for tree in trees]),
            drafter=same([np.full(tree.num_nodes, number) for number, tree in enumerate(trees)]),
            row=same([tree.distributions() + at for tree, at in zip(trees, starts, strict=False)]),
            q=distributions,
            certain=certain,
        )
        if len(trees) == 1 and (self.children != DRAWN or trees[0].widest == 1):
            return jax.vmap(unmerged)(draws, last)
        depth = self.window - 1
        return jax.vmap(lambda d, root: merge(d, root, depth))(draws, last)

    def commit(self, state: tuple[ModelState, ...], step: Step) -> tuple[ModelState, ...]:
        """Every draft caught up with the step's tokens, in one pass each."""

        def one(model: Model, held: ModelState) -> ModelState:
            return catch_up(
                model, held, step.tokens, step.count, step.hidden_states, self.wants.hidden_layers
            )

        return self._each(one, (state,))

    def truncate(
        self, state: tuple[ModelState, ...], length: Int32[Array, " B"]
    ) -> tuple[ModelState, ...]:
        """Every draft's state with shorter caches."""

        def one(model: Model, held: ModelState) -> ModelState:
            return shorter(model, held, length)

        return self._each(one, (state,))

    def _each(self, one: Any, arguments: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        """`one` of every group's model and arguments, under `vmap` where a group is stacked."""
        rows = zip(self.groups, *arguments, strict=True)
        return tuple(
            one(*row) if size == 1 else jax.vmap(one)(*row)
            for size, row in zip(self.sizes, rows, strict=True)
        )


def _may_join(model: Model, first: Model) -> bool:
    """Whether a model may be stacked with another; heads share an embedding, which would be copied
    for each.
    """
    return first.config == model.config and model.config.features is None


def _shapes(widths: Widths | tuple[Widths, ...], models: int) -> list[TreeShape]:
    """One tree a model; a tree's own first level is a number, as there is one root."""
    if widths and isinstance(widths[0], int):
        return [TreeShape(cast(Widths, widths))] * models
    own = [each for each in widths if isinstance(each, tuple)]
    if len(own) != models or len(own) != len(widths):
        raise ValueError(f"{len(widths)} trees are named for {models} drafts; each needs its own.")
    return [TreeShape(each) for each in own]


def expand(
    model: Model,
    held: ModelState,
    key: Key[Array, " B"],
    shape: TreeShape,
    sampling: Sampling,
    certain: Array,
    distinct: bool = False,
    grammars: Grammars | None = None,
) -> tuple[Int32[Array, "B M"], Float[Array, "B R V"]]:
    """The drawn tokens of one draft's tree, and the distributions of its expanded nodes.

    Rows that are `certain` take the most likely children; the others independent draws, or draws
    without replacement if `distinct`. A pass of a level runs the nodes that have children only.
    Distributions are among the tokens that rows' `grammars` allow after the nodes.
    """
    assert held.logits is not None
    rows, made, distributions = held.logits.shape[0], [], []
    noise = _uniforms(key, shape, distinct, held.logits.dtype)
    level_logits, block = held.logits[:, None], None
    features = None if held.features is None else held.features[:, None]
    tree_mask = np.zeros((1, 0), bool)
    for level in range(shape.depth):
        places, counts = shape.expanded(level)
        if grammars is not None:
            level_logits = masked(level_logits, _words(grammars, shape, level, places, made, model))
        probs = sampled_probs(level_logits, sampling, certain)
        if sampling.kind == GREEDY:
            shape_of = (rows, counts.size, int(counts.max()))
            drawn = jnp.zeros(shape_of, jnp.int32)  # nothing is
        elif level in noise:
            drawn = jax.vmap(jax.vmap(jax.vmap(draw, (None, 0))))(probs, noise[level])
        else:
            own = jax.vmap(lambda k, level=level: fold(k, level))(key)
            drawn = jax.vmap(partial(draw_distinct, count=int(counts.max())))(probs, own)
        tokens = _children(level_logits, counts, drawn, certain)
        made.append(tokens)
        distributions.append(probs)
        if level + 1 == shape.depth:
            break
        inner, _ = shape.expanded(level + 1)
        above = np.repeat(tree_mask, counts, axis=0)[inner]
        tree_mask = np.concatenate([above, np.eye(inner.size, dtype=bool)], 1)
        if held.ahead is not None:
            below = held.ahead[:, level, None]
            level_logits = jnp.broadcast_to(below, (rows, inner.size, below.shape[2]))
            continue
        if features is not None:
            features = features[:, np.repeat(np.arange(counts.size), counts)[inner]]
        after = run(
            model,
            _at(tokens, inner),
            jnp.broadcast_to(held.cache.length[:, None] + level, (rows, inner.size)),
            held.cache,
            jnp.asarray(np.broadcast_to(tree_mask, (rows, *tree_mask.shape))),
            block,
            features,
        )
        level_logits, features = (
            unembed(model, after.x).T.reshape(rows, inner.size, -1),
            after.features,
        )
        block = after.new if block is None else jax.tree.map(_append, block, after.new)
    return jnp.concatenate(made, axis=1), jnp.concatenate(distributions, axis=1)


def _words(
    grammars: Grammars,
    shape: TreeShape,
    level: int,
    places: np.ndarray,
    made: Sequence[Int32[Array, "B m"]],
    model: Model,
) -> Int32[Array, "B n w"]:
    """The masks after the nodes of a level that are expanded, of trees with the levels `made`."""
    rows = grammars.number.shape[0]
    tokens = jnp.concatenate([jnp.zeros((rows, 0), jnp.int32), *made], axis=1)
    parents = shape.parents()[: tokens.shape[1]]
    numbers = places + sum(shape.levels[1:level]) if level else np.full(1, ROOT)
    parents, wanted = (
        jnp.broadcast_to(jnp.asarray(own, jnp.int32), (rows, own.size))
        for own in (parents, numbers)
    )
    return grammars.masks(tokens, parents, wanted, model.config.vocab_size)


def _at(tokens: Int32[Array, "B m"], kept: np.ndarray) -> Int32[Array, "B n"]:
    """The columns `kept`, which are in order."""
    return tokens if kept.size == tokens.shape[1] else tokens[:, kept]


def _append(earlier: Array, new: Array) -> Array:
    return jnp.concatenate([earlier, new], axis=2)


def _uniforms(
    key: Key[Array, " B"], shape: TreeShape, distinct: bool, dtype: jnp.dtype
) -> dict[int, Float[Array, "B n w 2"]]:
    """The uniforms of every level's independent draws, those of one size made together.

    A single child is drawn so even where children are to be `distinct`.
    """
    levels: dict[tuple[int, int], list[int]] = {}
    for level in range(shape.depth):
        _, counts = shape.expanded(level)
        if counts.max() == 1 or not distinct:
            levels.setdefault((counts.size, int(counts.max())), []).append(level)
    found = {}
    for size, own in levels.items():

        def one(k: Array, level: Array, size: tuple[int, int] = size) -> Array:
            return jax.random.uniform(fold(k, level), (*size, 2), dtype)

        made = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(key, jnp.asarray(own))
        found |= {level: made[:, place] for place, level in enumerate(own)}
    return found


def _children(
    logits: Float[Array, "B n V"],
    counts: np.ndarray,
    drawn: Int32[Array, "B n w"],
    certain: Array,
) -> Int32[Array, "B m"]:
    """`counts` children of the expanded nodes of a level: `drawn`, or the likeliest ones.

    Every node has as many as the one that has the most, and keeps the first of them.
    """
    rows, nodes, width = drawn.shape
    best = most_likely(logits)[..., None] if width == 1 else largest(logits, width)[1]
    children = jnp.where(certain[:, None, None], best, drawn)
    kept = np.flatnonzero(np.arange(width) < counts[:, None])
    return _at(children.reshape(rows, nodes * width), kept)
