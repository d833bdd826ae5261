"""A model most of whose layers are not in memory: they come one after the other, in every pass."""

import contextlib
import dataclasses
from typing import Protocol, runtime_checkable

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
    """A `Model` whose `layers` are the first ones alone; `source` gives the others in each pass.

    `quantization` says how matrices of all its layers are quantized, if any are; `held_bytes` are
    those of its weights in memory, with what streaming takes.

    It is no pytree: no program may take it whole (see `specjax.decoding.streamed`).
    """

    source: LayerSource | None = None
    quantization: str | None = None
    held_bytes: int | None = None

    @property
    def outer(self) -> Model:
        """What lies outside its layers."""
        return Model(
            self.embedding, (), self.final_norm, self.unembedding, self.config,
            self.final_norm_bias, self.position_embedding, row_of=self.row_of,
        )  # fmt: skip

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass reads of what is not in memory."""
        return 0 if self.source is None else self.source.bytes_a_pass

    def layer(self, index: int) -> LayerWeights:
        """A layer, of those in memory or from the source (see `LayerSource.take`).

        Raises:
          ValueError: it could not be read.
        """
        if index < len(self.layers):
            return self.layers[index]
        assert self.source is not None
        return self.source.take(index)

    def in_pass(self) -> "contextlib.AbstractContextManager[None]":
        """Holds the source for a pass over all layers."""
        return contextlib.nullcontext() if self.source is None else self.source.in_pass()
