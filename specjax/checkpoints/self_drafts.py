"""A model's own weights in 8 or 4 bits as the draft for it (SubSpec, arXiv 2509.18344)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.base.pytree import replace
from specjax.checkpoints.experts import Tensor, gathered
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import checked, default_dtype, leaves_of, read_config
from specjax.models import families
from specjax.models.config import PACKABLE, ModelConfig
from specjax.models.families import Stored
from specjax.models.layer_weights import layer_of
from specjax.models.placement import Placement, placement
from specjax.models.quantized import GROUP_OF_4_BITS, packed, quantized_as
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of

PREFIX = "self:"
NAMES = {f"{PREFIX}4bit": 4, f"{PREFIX}8bit": 8}
"""What drafts of the model itself are called, and their bits."""


def bits_of(name: str) -> int:
    """The bits of a draft of the model itself.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in NAMES:
        raise ValueError(
            f"there is no draft {name}; there are {', '.join(NAMES)}, self:skip and self:mtp."
        )
    return NAMES[name]


def self_draft(
    files: Files,
    target: Model,
    bits: int,
    progress: Callable[[int, int], object] = lambda count, of: None,
) -> Model:
    """The target with its layers' matrices packed; what lies outside them is shared with it.

    Args:
      files: of the target.
      target: on one device.
      bits: of a weight, 8 or 4.
      progress: is called with how many tensors of how many are done.

    Raises:
      ValueError: the target is quantized itself, or lies on a mesh.
    """
    if (name := quantized_as(target)) is not None:
        raise ValueError(
            f"{files.path} is quantized ({name}); a draft in {bits} bits is made of full weights."
        )
    if mesh_of(target) is not None:
        raise ValueError(f"a draft of the model itself in {bits} bits is on one device, no mesh.")
    config, family = read_config(files.path)
    placed = placement(config, None)
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    whole = len(list(families.stored(family, config)))
    found = checked(files, config, family, lambda stored: False, tells=False)
    counted = _counted(found, whole, progress)
    for stored, tensor in gathered(counted, config, files.path):
        if stored.layer is not None:
            layers[stored.layer] |= _leaves(stored, tensor, placed, bits, files)
    return replace(target.outer, layers=tuple(map(layer_of, layers)))


def _counted(
    found: Iterable[tuple[Stored, Tensor]], whole: int, progress: Callable[[int, int], object]
) -> Iterator[tuple[Stored, Tensor]]:
    for number, each in enumerate(found):
        yield each
        progress(number + 1, whole)


def _leaves(
    stored: Stored, tensor: Any, placed: Placement, bits: int, files: Files
) -> dict[str, Any]:
    """The leaves of a tensor, matrices packed."""
    kind = jnp.dtype(default_dtype())
    if stored.leaves[0] not in PACKABLE:
        return leaves_of(stored, tensor, placed, kind, files.path)
    return {
        leaf: placed.put_packed(leaf, packed(part, bits, _group_of(part.shape[1], bits)), kind)
        for leaf, part in zip(stored.leaves, stored.split(tensor), strict=True)
    }


def _group_of(inputs: int, bits: int) -> int | None:
    """Inputs that share a scale: a row in 8 bits; in 4 bits 64, or what divides the inputs."""
    if bits == 8:
        return None
    return next((size for size in (GROUP_OF_4_BITS, 48, 32, 16) if inputs % size == 0), None)


def self_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes of such a draft beside the target."""
    total = 0
    for layer in range(config.num_layers):
        for name, shape in config.layer_shapes(layer).items():
            size = int(np.prod(shape))
            if name in PACKABLE:
                group = _group_of(shape[-1], bits) or shape[-1]
                total += size * bits // 8 + 2 * size // group
            else:
                total += size * jnp.dtype(default_dtype()).itemsize
    return total
