"""Which leaves of a model lie in which tensor of a file, and how."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.models.config import LATENT_PRODUCTS, ModelConfig, Shape
from specjax.models.families.family import Family


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file: its name and shape there, and the leaves that it holds.

    `layer` is that of the leaves, None for those outside; `sizes` are their rows and `heads` how
    many heads lie one after the other, 0 where the leaves do. `interleaved` are the heads whose two
    halves' rows take turns, 0 where they do not: of the first `rotated` rows of each, or where
    these are `rotated_last` of the last ones, which are first in the leaf. `shift` is what was
    added. Of leaves with experts it holds those of one `expert`, or where that is None of all of
    them, whose rows are along `axis`. Where leaves are `alternating`, their rows take turns. What
    is `turned` is `[in, out]`, unless it is packed; what is `lone` has a first axis of 1 before the
    leaf's. Of `latents` the leaves are each head's keys, turned, and its values.
    """

    name: str
    shape: Shape
    layer: int | None
    leaves: tuple[str, ...]
    sizes: tuple[int, ...]
    turned: bool = False
    heads: int = 0
    interleaved: int = 0
    rotated: int = 0
    shift: float = 0.0
    expert: int | None = None
    axis: int = 0
    alternating: bool = False
    lone: bool = False
    rotated_last: bool = False
    latents: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is a single leaf as it stands."""
        as_is = not (self.turned or self.interleaved or self.shift or self.lone)
        return len(self.leaves) == 1 and as_is and self.expert is None

    @property
    def shape_as_rows(self) -> Shape:
        """The shape of the tensor where it is not turned."""
        return _turned(self.shape) if self.turned else self.shape

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The leaves of the tensor, as views of it where they lie together."""
        return self.split_rows(tensor.swapaxes(-1, -2) if self.turned else tensor)

    def split_rows(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The same of a tensor that is not turned."""
        if self.alternating:
            turns = len(self.leaves)
            return [tensor[(*(slice(None),) * self.axis, slice(n, None, turns))]
                    for n in range(turns)]  # fmt: skip
        if self.lone:
            return [tensor[0]]
        if self.latents:
            parts = tensor.reshape(self.heads, -1, tensor.shape[-1])
            key, value = np.split(parts, [parts.shape[1] - self.sizes[1]], axis=1)
            return [key.swapaxes(1, 2), value]
        if self.interleaved:
            tensor = self._from_pairs(tensor)
        if self.shift:
            tensor = tensor.astype(np.float32) - np.float32(self.shift)
        if self.heads:
            parts = tensor.reshape(self.heads, len(self.leaves), -1, *tensor.shape[1:])
            return [parts[:, i].reshape(-1, *tensor.shape[1:]) for i in range(len(self.leaves))]
        return np.split(tensor, np.cumsum(self.sizes)[:-1], axis=self.axis)

    def join(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds the leaves."""
        if self.latents:
            key, value = leaves
            together = np.concatenate([key.swapaxes(1, 2), value], axis=1)
            return together.reshape(-1, together.shape[-1])
        if self.heads:
            parts = [leaf.reshape(self.heads, 1, -1, *leaf.shape[1:]) for leaf in leaves]
            return np.concatenate(parts, axis=1).reshape(-1, *leaves[0].shape[1:])
        if self.expert is not None:
            leaves = [leaf[self.expert] for leaf in leaves]
        if self.alternating:
            together = np.stack(leaves, axis=self.axis + 1)
            before, after = together.shape[: self.axis], together.shape[self.axis + 2 :]
            tensor = together.reshape(*before, -1, *after)
            return tensor.swapaxes(-1, -2) if self.turned else tensor
        if self.lone:
            return leaves[0][None]
        tensor = leaves[0] if len(leaves) == 1 else np.concatenate(leaves, axis=self.axis)
        if self.interleaved:
            tensor = self._as_pairs(tensor)
        if self.shift:
            tensor = tensor.astype(np.float32) + np.float32(self.shift)
        return tensor.swapaxes(-1, -2) if self.turned else tensor

    def _from_pairs(self, tensor: np.ndarray) -> np.ndarray:
        """With each head's rotated rows first, its halves one after the other."""
        heads = tensor.reshape(self.interleaved, -1, *tensor.shape[1:])
        at = heads.shape[1] - self.rotated if self.rotated_last else self.rotated
        parts = np.split(heads, [at], axis=1)
        turned, rest = parts[::-1] if self.rotated_last else parts
        pairs = turned.reshape(self.interleaved, -1, 2, *tensor.shape[1:])
        halves = pairs.swapaxes(1, 2).reshape(turned.shape)
        return np.concatenate([halves, rest], axis=1).reshape(tensor.shape)

    def _as_pairs(self, tensor: np.ndarray) -> np.ndarray:
        """What `_from_pairs` makes that of."""
        heads = tensor.reshape(self.interleaved, -1, *tensor.shape[1:])
        turned, rest = np.split(heads, [self.rotated], axis=1)
        halves = turned.reshape(self.interleaved, 2, -1, *tensor.shape[1:])
        pairs = halves.swapaxes(1, 2).reshape(turned.shape)
        parts = [rest, pairs] if self.rotated_last else [pairs, rest]
        return np.concatenate(parts, axis=1).reshape(tensor.shape)


def _turned(shape: Shape) -> Shape:
    """With the last two numbers exchanged."""
    return *shape[:-2], shape[-1], shape[-2]


def stored(family: Family, config: ModelConfig) -> Iterator[Stored]:
    """Every tensor that a checkpoint of `config` must hold."""
    yield from _tensors(family, family.outer, config.outer_shapes, None, "")
    for layer in range(config.num_layers):
        names = {**family.layer, **(family.experts if config.has_experts(layer) else {})}
        prefix = family.layer_prefix.format(index=layer)
        yield from _tensors(family, names, config.layer_shapes(layer), layer, prefix, config)


def _tensors(
    family: Family,
    names: Any,
    shapes: dict[str, Shape],
    layer: int | None,
    prefix: str,
    config: ModelConfig | None = None,
) -> Iterator[Stored]:
    for together, name in names.items():
        for end in ("", "_bias"):
            leaves = tuple(leaf + end for leaf in together.split())
            if any(leaf not in shapes for leaf in leaves):
                continue
            whole = prefix + (_of_bias(name) if end else name)
            if "{expert}" in name:
                count, shape = shapes[leaves[0]][0], shapes[leaves[0]][1:]
                for expert in range(count):
                    own = whole.format(expert=expert)
                    yield Stored(own, shape, layer, leaves, shape[:1], expert=expert)
                continue
            if leaves == LATENT_PRODUCTS:
                (heads, rank, unrotated), (_, value, _) = (shapes[leaf] for leaf in leaves)
                rows = heads * (unrotated + value), rank
                yield Stored(
                    whole, rows, layer, leaves, (unrotated, value), heads=heads, latents=True
                )
                continue
            of_experts = leaves[0].startswith("expert_")
            axis = 1 if of_experts else 0
            sizes = tuple(shapes[leaf][axis] for leaf in leaves)
            shape = *shapes[leaves[0]][:axis], sum(sizes), *shapes[leaves[0]][axis + 1 :]
            packing = family.expert_packing if of_experts else family.packing
            turned = "turned" in packing and layer is not None and len(shape) == 2 + axis
            heads = config.num_heads if config and family.packing == "heads" and leaves[1:] else 0
            shift = family.norm_shift if not end and together.endswith("norm") else 0.0
            shape = _turned(shape) if turned else shape
            lone = together in family.lone
            shape = (1, *shape) if lone else shape
            interleaved = rotated = 0
            if config and together in family.interleaved:
                of_queries = together.startswith("query")
                interleaved = config.num_heads if of_queries else config.num_kv_heads
                rotated = config.rotated
            yield Stored(
                whole, shape, layer, leaves, sizes, turned, heads, interleaved, rotated, shift,
                axis=axis, alternating="alternating" in packing and len(leaves) > 1, lone=lone,
                rotated_last=family.rotated_last,
            )  # fmt: skip


def _of_bias(name: str) -> str:
    """The name of the bias beside a tensor."""
    if name.endswith("weight"):
        return name.removesuffix("weight") + "bias"
    return f"{name}_bias"
