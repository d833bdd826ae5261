"""Layers and experts that wait in the host's memory, and move to the device in every pass."""

import collections
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from specjax.models.layer_weights import LayerWeights
from specjax.models.quantized import PackedWeight

AHEAD = 2
"""Layers that move to the device while one is computed and one is handed over."""
_KINDS = ("pinned_host", "unpinned_host")


class HostLayers:
    """Moves layers to the device in turn, again and again, some ahead of who takes them.

    Moves are asynchronous: they go on while the device computes. On a CPU they are copies.

    Args:
      layers: of host memory (see `on_host`).
      first: the number of the first one; those before are on the device.
    """

    def __init__(self, layers: Sequence[LayerWeights], first: int) -> None:
        self._layers, self._first = layers, first
        self._moving: collections.deque[tuple[int, LayerWeights]] = collections.deque()
        self._lock = threading.Lock()
        self._to = SingleDeviceSharding(jax.devices()[0])

    @property
    def bytes_a_pass(self) -> int:
        """Bytes that a pass moves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(list(self._layers)))

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Keeps other threads from taking layers meanwhile."""
        with self._lock:
            yield

    def take(self, layer: int) -> LayerWeights:
        """A layer's weights; those that a pass left over are let go."""
        while self._moving and self._moving[0][0] != layer:
            self._moving.popleft()
        if not self._moving:
            self._move(layer)
        _, found = self._moving.popleft()
        while len(self._moving) < min(AHEAD, len(self._layers) - 1):
            last = self._moving[-1][0] if self._moving else layer
            self._move(last + 1)
        return found

    def _move(self, layer: int) -> None:
        place = (layer - self._first) % len(self._layers)
        self._moving.append((self._first + place, jax.device_put(self._layers[place], self._to)))

    def close(self) -> None:
        """Lets go of what moves."""
        self._moving.clear()


class HostExperts:
    """Moves single experts to the device, for several threads at a time.

    Args:
      layers: the leaves of all experts of each layer, in the host's memory.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, Any]]) -> None:
        self._layers = layers

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes that are moved of an expert, by layer."""
        return {
            layer: sum(leaf.nbytes // leaf.shape[0] for leaf in own.values())
            for layer, own in self._layers.items()
        }

    def buffer(self) -> None:
        """Nothing: an expert moves from where it lies."""

    def read(self, layer: int, expert: int, buffer: None) -> dict[str, Any]:
        """The leaves of an expert."""
        del buffer

        def moved(part: np.ndarray) -> Array:
            return jax.device_put(part[expert : expert + 1])

        return {
            name: leaf.of_rows(moved) if isinstance(leaf, PackedWeight) else moved(leaf)
            for name, leaf in self._layers[layer].items()
        }

    def close(self) -> None:
        """Lets go of nothing: the cache may be used on."""


def on_host(leaves: dict[str, Any]) -> dict[str, Any]:
    """Leaves of a layer in the host's memory, pinned where the device has that."""
    device = jax.devices()[0]
    known = {each.kind for each in device.addressable_memories()}
    kind = next((each for each in _KINDS if each in known), None)
    return jax.device_put(leaves, SingleDeviceSharding(device, memory_kind=kind))
