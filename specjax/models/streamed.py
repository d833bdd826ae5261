"""Models that run a layer at a time, as most of their layers are not in memory."""

import contextlib
import dataclasses
from typing import Any, Protocol, runtime_checkable

from specjax.models.expert_cache import ExpertCache
from specjax.models.layer_weights import LayerWeights
from specjax.models.transformer import Model


@runtime_checkable
class LayerSource(Protocol):
    """Gives the layers that are not in memory, again and again in order."""

    def in_pass(self) -> "contextlib.AbstractContextManager[None]":
        """Keeps other threads from taking layers meanwhile."""
        ...

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads."""
        ...

    def take(self, layer: int) -> LayerWeights:
        """A layer's weights, the next one that it has read.

        They are valid until the take after the next, or until the pass ends.

        Raises:
          ValueError: it could not be read.
        """
        ...

    def close(self) -> None:
        """Stops to read."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedModel(Model):
    """A `Model` of which a part comes in each pass, from elsewhere.

    That are the layers after the first ones, or of a mixture the experts of all layers that are not
    in memory. It is no pytree: no program may take it whole (see `specjax.decoding.streamed`).

    Attributes:
      source: where the other layers come from; None where there are none.
      experts: where experts come from, of which `layers` then have none; None where they are there.
      quantization: how matrices of all its layers are quantized, if any are.
      planned_bytes: of its weights in memory, with what streaming takes; None if it is not known.
    """

    source: LayerSource | None = None
    experts: ExpertCache | None = None
    quantization: str | None = None
    planned_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        """Never."""
        return False

    @property
    def is_offloaded(self) -> bool:
        """Whether a part of it is elsewhere."""
        return self.source is not None or self.experts is not None

    @property
    def expert_cache(self) -> ExpertCache | None:
        """Where experts come from that are read when they are taken."""
        return self.experts

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads, of experts at most."""
        if self.experts is not None:
            return self.experts.most_bytes
        return 0 if self.source is None else self.source.bytes_a_pass

    @property
    def held_bytes(self) -> int | None:
        """Bytes of its weights in memory, with what streaming takes, where they are known."""
        return self.planned_bytes

    @property
    def outer(self) -> Model:
        """What lies outside its layers."""
        return self.resident.outer

    @property
    def resident(self) -> Model:
        """What of it stays in memory, as a pytree."""
        return Model(**_fields_of(self))

    def layer(self, index: int) -> LayerWeights:
        """A layer, of those in memory or from the source (see `LayerSource.take`); of one whose
        experts are elsewhere what else it has.

        Raises:
          ValueError: it could not be read.
        """
        if self.source is None or index < len(self.layers):
            return super().layer(index)
        return self.source.take(index)

    def in_pass(self) -> "contextlib.AbstractContextManager[None]":
        """Holds what is elsewhere for a pass over all layers."""
        held = self.source or self.experts
        return contextlib.nullcontext() if held is None else held.in_pass()


def by_layers(
    model: Model,
    source: LayerSource | None = None,
    experts: ExpertCache | None = None,
    quantization: str | None = None,
    planned_bytes: int | None = None,
) -> StreamedModel:
    """A model that runs a layer at a time: its layers, then those of the source (`StreamedModel`).

    Of one in memory, little is compiled: a layer, and not the model.
    """
    return StreamedModel(
        **_fields_of(model), source=source, experts=experts, quantization=quantization,
        planned_bytes=planned_bytes,
    )  # fmt: skip


def _fields_of(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in Model.__dataclass_fields__}
