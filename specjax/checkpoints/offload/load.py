"""Loads models of which the first layers stay in memory, and the others come in every pass."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.checkpoints import pruned_vocabulary
from specjax.checkpoints.experts import Tensor, gathered
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import checked, leaves_of, read_config
from specjax.checkpoints.offload.disk import DiskLayers
from specjax.checkpoints.offload.experts import DiskExperts, expert_spans, of_experts
from specjax.checkpoints.offload.host import HostExperts, HostLayers, on_host
from specjax.checkpoints.offload.memory import DISK, HOST, division, dtype_of_layers
from specjax.checkpoints.offload.reading import READERS
from specjax.checkpoints.offload.spans import expected_tensors
from specjax.models.expert_cache import ExpertCache
from specjax.models.families import Stored
from specjax.models.layer_weights import layer_of
from specjax.models.placement import placement
from specjax.models.quantized import PackedWeight, quantization_of
from specjax.models.streamed import StreamedModel, by_layers
from specjax.models.transformer import assemble


def load_offloaded(
    files: Files,
    offload: str | None = DISK,
    memory_bytes: int | None = None,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    positions: int | None = None,
) -> StreamedModel:
    """A model of which the first layers that fit into so much memory stay there.

    Args:
      files: the model, in safetensors files or a GGUF file.
      offload: "disk" reads the others from there in every pass; "host" keeps them in the host's
        memory, from which they move to the device. Of a mixture whose layers fit without their
        experts it is these alone that come from there, as tokens take them, and as many as there is
        memory left for stay.
      memory_bytes: for its weights, what reading the others takes included; None is half of what
        there is.
      dtype: "float32" or "bfloat16"; None takes bfloat16 where the files have that, else as `load`.
      mesh: None: an offloaded model is on one device.
      positions: None: it has all of them.

    Raises:
      CheckpointError: a file or a tensor is missing or not supported, or not even what lies outside
        the layers fits beside a few of them.
      ValueError: `offload` is neither, or it does not go with the other arguments or an adapter.
    """
    check_offload(offload, memory_bytes, mesh=mesh, positions=positions)
    if files.lora is not None:
        raise ValueError(
            f"a LoRA adapter ({files.lora}) is not merged into a model that is offloaded; merge it "
            "into a folder first, with peft."
        )
    host = offload == HOST
    config, family = read_config(files.path)
    pruned_vocabulary.check_none(config, f"{files.path} is not offloaded")
    kind = dtype_of_layers(files, dtype)
    placed = placement(config, None)
    shared = division(files, config, kind, memory_bytes, offload)
    first, parts = shared.resident, bool(shared.slots)
    outer: dict[str, Any] = {}
    kept = config.num_layers if host else first
    layers: list[dict[str, Any]] = [{} for _ in range(kept)]
    waiting: dict[int, dict[str, Any]] = {layer: {} for layer in shared.slots}
    names: dict[tuple[str, str], None] = {}

    def stays(stored: Stored) -> bool:
        if parts and of_experts(stored):
            return host
        return stored.layer is None or stored.layer < kept

    def staying() -> Iterator[tuple[Stored, Tensor]]:
        for stored, tensor in checked(files, config, family, stays):
            if isinstance(tensor, PackedWeight):
                names[stored.leaves[0], tensor.name] = None
            if stays(stored):
                yield stored, tensor

    for stored, tensor in gathered(staying(), config, files.path):
        leaves = leaves_of(stored, tensor, placed, kind, files.path)
        if stored.layer is None:
            outer |= leaves
        elif parts and of_experts(stored):
            waiting[stored.layer] |= jax.tree.map(np.asarray, leaves)
        else:
            layers[stored.layer] |= leaves if stored.layer < first else on_host(leaves)
    made = assemble(placed.config, outer, layers[:first])
    source = experts = None
    if parts:
        assert config.experts is not None
        if host:
            reader = HostExperts(waiting)
        else:
            spans = expert_spans(files, family, config, expected_tensors(config, family))
            reader = DiskExperts(files, config, family, spans, kind)
        experts = ExpertCache(reader, config.experts.num_experts, shared.slots, READERS)
    elif host and first < config.num_layers:
        source = HostLayers([layer_of(own) for own in layers[first:]], first)
    elif first < config.num_layers:
        source = DiskLayers(files, config, family, first, placed, kind)
    return by_layers(made, source, experts, quantization_of(names), shared.total)


def check_offload(
    offload: str | None, memory_bytes: int | None, *, mesh: Mesh | None, positions: int | None
) -> None:
    """Checks that a model can be offloaded so.

    Raises:
      ValueError: there is no such way, or it does not go with the other arguments.
    """
    if offload not in (DISK, HOST):
        raise ValueError(
            f"offload is {offload!r}; it must be {DISK!r} or {HOST!r}, which memory goes with."
        )
    if mesh is not None or positions is not None:
        raise ValueError("an offloaded model is on one device, with all its positions.")
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"memory is {memory_bytes}; it must be at least 1 byte.")
