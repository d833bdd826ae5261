"""Experts of which some are in memory: those that were taken most, and lately."""

import collections
import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from specjax.models.quantized import PackedWeight

_DECAY = 0.95
"""What is left of how often an expert was taken after a pass that does not take it."""
_RIGHT, _GUESSED = 0.7, 64
"""How often a guess must have been right for experts to be prefetched, after so many of them."""


class ExpertReader(Protocol):
    """Gives single experts, to several threads at a time."""

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes that are read of an expert, by layer."""
        ...

    def buffer(self) -> Any:
        """What an expert is read into."""
        ...

    def read(self, layer: int, expert: int, buffer: Any) -> dict[str, Any]:
        """The leaves of an expert, valid until the buffer is read into again.

        Raises:
          ValueError: it could not be read.
        """
        ...

    def close(self) -> None:
        """Lets go of files."""
        ...


class Round(NamedTuple):
    """Experts of a layer that are in memory together.

    Attributes:
      leaves: of all slots.
      slots: of each column's experts; -1 where one is in no slot of this round.
    """

    leaves: dict[str, Any]
    slots: Int[np.ndarray, "K C"]


@dataclasses.dataclass
class Reads:
    """What was asked for, counted.

    Attributes:
      passes: over all layers.
      taken: experts that layers took, each once a pass.
      read: those of them that were not in memory.
      bytes: that were read, of wrong guesses too.
      guessed: experts out of memory that were guessed for the next layer.
      right: those of them that it took.
    """

    passes: int = 0
    taken: int = 0
    read: int = 0
    bytes: int = 0
    guessed: int = 0
    right: int = 0

    def since(self, before: "Reads") -> "Reads":
        """What was asked for since then."""
        names = [field.name for field in dataclasses.fields(self)]
        return Reads(**{name: getattr(self, name) - getattr(before, name) for name in names})


class _Layer:
    """The slots of a layer, which experts are in them, and how often each expert was taken."""

    def __init__(self, experts: int, slots: int) -> None:
        self.leaves: dict[str, Any] = {}
        self.held = np.full(slots, -1)
        self.uses = np.zeros(experts)

    @property
    def slot_of(self) -> Int32[np.ndarray, " X1"]:
        """The slot of each expert, and last of -1, which is none; -1 where it is in none."""
        found = np.full(len(self.uses) + 1, -1, np.int32)
        found[self.held] = np.arange(len(self.held))
        found[-1] = -1
        return found

    def evicted(self, keeping: Sequence[int]) -> int:
        """The slot that is free, or else whose expert was taken least, lately more than long ago;
        none of those that are needed.
        """
        uses = np.where(self.held < 0, -1.0, self.uses[self.held])
        return int(np.where(np.isin(self.held, keeping), np.inf, uses).argmin())


class ExpertCache:
    """The experts of a model's layers, of which each layer has `slots` in memory.

    The others are read when columns take them, and evict those that were taken least (least
    frequently used, with decay). The next layer's may be guessed, and are prefetched where guesses
    were right.

    Args:
      reader: where experts come from.
      experts: how many each layer has.
      slots: in memory, by layer.
      readers: reads at a time.
    """

    def __init__(
        self, reader: ExpertReader, experts: int, slots: Mapping[int, int], readers: int
    ) -> None:
        self._reader, self._experts, self._sizes = reader, experts, reader.sizes
        self._layers = {layer: _Layer(experts, count) for layer, count in slots.items()}
        self._pool = ThreadPoolExecutor(readers, "specjax-experts")
        self._buffers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(buffers(readers)):
            self._buffers.put(reader.buffer())
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._lock = threading.Lock()
        self.reads = Reads()
        # Which a thread of the pool may run, so that it cannot wait for that.
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    @property
    def layers(self) -> Sequence[int]:
        """Those that have experts."""
        return tuple(self._layers)

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return self._experts

    @property
    def num_slots(self) -> int:
        """Experts in memory, of all layers together."""
        return sum(len(own.held) for own in self._layers.values())

    @property
    def all_bytes(self) -> int:
        """Bytes of all experts where they are read from."""
        return self._experts * sum(self._sizes.values())

    @property
    def most_bytes(self) -> int:
        """Bytes that a pass reads which takes all experts."""
        own = self._layers.items()
        return sum(self._sizes[layer] * (self._experts - len(each.held)) for layer, each in own)

    @property
    def guesses(self) -> bool:
        """Whether what is guessed is prefetched."""
        return self.reads.guessed < _GUESSED or self.reads.right >= _RIGHT * self.reads.guessed

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """Keeps other threads from taking experts meanwhile."""
        with self._lock:
            self.reads.passes += 1
            try:
                yield
            finally:
                self._drop([])

    def rounds(
        self,
        layer: int,
        chosen: Int[np.ndarray, "K C"],
        guessed: Int[np.ndarray, "K C"] | None = None,
    ) -> Iterator[Round]:
        """The chosen experts of a layer, as many together as have slots; -1 is none.

        What is `guessed` of the next layer is prefetched as soon as all of this one is being read,
        as long as guesses are right often enough.

        Raises:
          ValueError: one could not be read, or the cache is closed.
        """
        own = self._layers[layer]
        wanted, slots = np.unique(chosen[chosen >= 0]), len(own.held)
        if not own.leaves and not wanted.size:
            wanted = np.zeros(1, int)  # there must be leaves
        own.uses *= _DECAY
        own.uses[wanted] += 1
        out = self._out(layer, wanted)
        held = [expert for expert in wanted.tolist() if expert not in out]
        self.reads.taken += len(wanted)
        self.reads.read += len(out)
        begun = self._drop([(layer, expert) for expert in out])
        out.sort(key=lambda expert: (layer, expert) not in begun)  # else they keep all buffers
        order, waiting = held + out, collections.deque((layer, expert) for expert in out)
        waiting.extend(self._ahead(layer + 1, guessed))
        for begin in range(0, max(len(order), 1), slots):
            together = order[begin : begin + slots]
            for expert in together:
                self._begin_all(waiting)
                if expert not in own.held:
                    self._put(layer, expert, together)
            here = np.isin(chosen, together)
            yield Round(own.leaves, np.where(here, own.slot_of[chosen], np.int32(-1)))
        self._begin_all(waiting)

    def judge(
        self, layer: int, guessed: Int[np.ndarray, "K C"], chosen: Int[np.ndarray, "K C"]
    ) -> None:
        """Counts how many of the guessed experts that are not in memory a layer took."""
        out = self._out(layer, guessed)
        self.reads.guessed += len(out)
        self.reads.right += int(np.isin(out, chosen).sum())

    def _out(self, layer: int, chosen: Int[np.ndarray, "*columns"]) -> list[int]:
        """The experts among these that are not in memory."""
        wanted = np.unique(chosen[chosen >= 0])
        return wanted[self._layers[layer].slot_of[wanted] < 0].tolist()

    def _ahead(self, layer: int, guessed: Int[np.ndarray, "K C"] | None) -> list[tuple[int, int]]:
        """What is to be prefetched."""
        if guessed is None or not self.guesses:
            return []
        return [(layer, expert) for expert in self._out(layer, guessed)]

    def _begin_all(self, waiting: collections.deque[tuple[int, int]]) -> None:
        """Lets experts be read in their order, as far as there are buffers for them."""
        while waiting and self._begin(*waiting[0]):
            waiting.popleft()

    def close(self) -> None:
        """Reads no more, once what is being read is."""
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def _begin(self, layer: int, expert: int, *, wait: bool = False) -> bool:
        """Lets an expert be read, unless there is no buffer for it and it need not wait for one."""
        if (layer, expert) in self._coming:
            return True
        try:
            buffer = self._buffers.get(wait)
        except queue.Empty:
            return False
        try:
            read = self._pool.submit(self._reader.read, layer, expert, buffer)
        except RuntimeError as error:
            self._buffers.put(buffer)
            raise ValueError("the model's experts are not read any more: it is closed.") from error
        self._coming[layer, expert] = _Coming(read, buffer)
        self.reads.bytes += self._sizes[layer]
        return True

    def _put(self, layer: int, expert: int, keeping: Sequence[int]) -> None:
        """Puts an expert into a slot, and evicts the one that is there, none that is kept."""
        own = self._layers[layer]
        self._begin(layer, expert, wait=True)
        leaves = self._coming[layer, expert].read.result()
        _, buffer = self._coming.pop((layer, expert))
        try:
            held, own.leaves = own.leaves, {}
            if not held:
                held = {name: _empty(leaf, len(own.held)) for name, leaf in leaves.items()}
            if not _alike(held, leaves):
                raise ValueError(
                    f"expert {expert} of layer {layer} is stored otherwise than others of it."
                )
            slot = own.evicted(keeping)
            own.held[slot] = expert
            own.leaves = jax.block_until_ready(_in_slot(held, leaves, jnp.int32(slot)))
        finally:
            if not own.leaves:  # what was in the slots was given away
                own.held[:] = -1
            self._buffers.put(buffer)

    def _drop(self, wanted: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Lets go of what was begun and is not wanted; what is."""
        for place in self._coming.keys() - set(wanted):
            read, buffer = self._coming.pop(place)
            if read.cancel():
                self.reads.bytes -= self._sizes[place[0]]
            read.add_done_callback(partial(_returned, self._buffers, buffer))
        return set(self._coming)


class _Coming(NamedTuple):
    """An expert that is being read into a buffer."""

    read: Future[dict[str, Any]]
    buffer: Any


def _returned(buffers: queue.SimpleQueue[Any], buffer: Any, read: Future[dict[str, Any]]) -> None:
    del read
    buffers.put(buffer)


def buffers(readers: int) -> int:
    """How many experts are read or wait for their slots at a time."""
    return 2 * readers


def _alike(held: dict[str, Any], one: dict[str, Any]) -> bool:
    """Whether an expert's leaves are what those of slots are."""
    return jax.tree.structure(held) == jax.tree.structure(one) and all(
        (whole.shape[1:], whole.dtype) == (own.shape[1:], own.dtype)
        for name in held
        for whole, own in zip(_rows(held[name]), _rows(one[name]), strict=True)
    )


def _rows(leaf: Array | PackedWeight) -> list[Array]:
    """The parts of a leaf that each expert has its own of."""
    return [*leaf.rows.values()] if isinstance(leaf, PackedWeight) else [leaf]


def _empty(leaf: Array | PackedWeight, slots: int) -> Array | PackedWeight:
    """So many slots for a leaf of one expert."""
    if isinstance(leaf, PackedWeight):
        return leaf.of_rows(partial(_empty, slots=slots))
    return jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype)


@partial(jax.jit, donate_argnames="held")
def _in_slot(held: dict[str, Any], one: dict[str, Any], slot: Int32[Array, ""]) -> dict[str, Any]:
    """The slots with an expert in one of them, in the same memory."""

    def put(whole: Array, own: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, own, slot, axis=0)

    def leaf(whole: Any, own: Any) -> Any:
        if not isinstance(whole, PackedWeight):
            return put(whole, own)
        return whole.changed(**{name: put(whole.rows[name], own.rows[name]) for name in own.rows})

    return {name: leaf(held[name], one[name]) for name in held}
