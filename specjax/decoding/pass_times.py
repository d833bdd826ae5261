"""What passes take, measured: of layers that are read in each, and of models in memory."""

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.platform import platform
from specjax.base.pytree import replace
from specjax.decoding.streamed import hidden_by_layers, logits_by_layers, run_layer
from specjax.draft.levels import by_level
from specjax.draft.reading import ModelState, ready, run
from specjax.models.config import ModelConfig
from specjax.models.kv_cache import cache_dtype, empty_cache
from specjax.models.layer_weights import LayerWeights
from specjax.models.transformer import Model, embed, unembed

BUDGETS = (15, 31, 63, 127, 255, 511, 1023, 2047)
"""Of nodes below the root, among which one is chosen."""
_COLUMNS, _SLOTS, _RUNS = (16, 64, 256, 1024), 64, 3
_ALONG, _PASSES = (1, 4, 16), 2
"""Columns of passes along a text, and how many of each count."""
_MANY, _ENOUGH_SECONDS = 20, 0.15
"""Runs of which the fastest counts where passes are compared, and seconds of each after which three
do."""
_BEYOND_CACHES = 2**29
"""Bytes of layers that no processor's cache holds."""
MOST_LEVELS = 16
"""Tokens that a draft goes deep where its passes cost nearly nothing."""
ACCEPTANCE = 0.9
"""How often a drafted token is accepted if those before it were, before anything was measured."""


class OffloadTimes(NamedTuple):
    """How fast layers come, and how fast they are computed.

    Attributes:
      size: bytes of a pass that are read.
      read_seconds: in which they are, with nothing computed.
      columns: numbers of nodes, the root included.
      seconds: in which all layers are computed for so many, with nothing read.
    """

    size: int
    read_seconds: float
    columns: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def budget(self) -> int:
        """The most nodes whose pass is computed while its layers are read; 15 where none is.

        SpecExec (arXiv 2406.02532, section 4): what is drafted costs nothing until then.
        """
        free = [n for n in BUDGETS if self.computed(n + 1) <= self.read_seconds]
        return max(free, default=BUDGETS[0])

    @property
    def budgets(self) -> tuple[int, ...]:
        """The least budget, that whose pass costs no more than reading, and about twice as many."""
        above = [budget for budget in BUDGETS if budget > self.budget]
        return tuple(sorted({BUDGETS[0], self.budget, *above[:1]}))

    def levels(self, draft_seconds: float) -> int:
        """How many tokens deep a draft should go whose passes take so long, one after the other.

        The most expected tokens a second, of a step that reads all layers and drafts first.
        """

        def rate(levels: int) -> float:
            return expected_tokens(levels) / (self.read_seconds + levels * draft_seconds)

        return max(range(1, MOST_LEVELS + 1), key=rate)

    def pass_seconds(self, columns: int) -> float:
        """The longer of reading all layers and computing them."""
        return max(self.read_seconds, self.computed(columns))

    def computed(self, columns: int) -> float:
        """Seconds in which so many nodes are computed; beyond what was measured in proportion."""
        last, most = self.columns[-1], self.seconds[-1]
        if columns > last:
            return most * columns / last
        return float(np.interp(columns, self.columns, self.seconds))

    def __str__(self) -> str:
        nodes = self.budget + 1
        return (
            f"reading {self.size / 1e9:.2f} GB takes {self.read_seconds:.2f} s, at "
            f"{self.size / self.read_seconds / 1e9:.2f} GB/s, and computing {nodes} nodes "
            f"{self.computed(nodes):.2f} s"
        )


class ExpertTimes(NamedTuple):
    """What passes of a mixture take of which experts are read as they are taken.

    More nodes take more experts, so none is free. All is measured along a text, whose neighbouring
    tokens choose alike, in passes one after the other that leave their experts in memory.

    Attributes:
      experts: of a layer.
      columns: numbers of nodes, the root included.
      taken: of a layer's experts, by these.
      sizes: bytes that are read.
      seconds: of a pass.
    """

    experts: int
    columns: tuple[int, ...]
    taken: tuple[float, ...]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    budgets = (3, 7, 15)
    """Of nodes, among which one is chosen."""

    def pass_seconds(self, columns: int) -> float:
        """Seconds of a pass; beyond what was measured as between the last two."""
        more = (self.seconds[-1] - self.seconds[-2]) / (self.columns[-1] - self.columns[-2])
        beyond = max(0, columns - self.columns[-1]) * max(0.0, more)
        return float(np.interp(columns, self.columns, self.seconds)) + beyond

    def __str__(self) -> str:
        def listed(values: Sequence[float], form: str) -> str:
            return ", ".join(f"{value:{form}}" for value in values)

        return (
            f"a pass over {listed(self.columns, 'd')} nodes takes {listed(self.taken, '.1f')} of a "
            f"layer's {self.experts} experts, reads "
            f"{listed([size / 1e9 for size in self.sizes], '.2f')} GB of them and takes "
            f"{listed(self.seconds, '.2f')} s"
        )


def expected_tokens(levels: int) -> float:
    """Tokens of a step that drafts so many, one after the other, before anything was measured."""
    return sum(ACCEPTANCE**level for level in range(levels + 1))


_measured: "weakref.WeakKeyDictionary[Model, OffloadTimes]" = weakref.WeakKeyDictionary()
_of_experts: "weakref.WeakKeyDictionary[Model, ExpertTimes]" = weakref.WeakKeyDictionary()
_of_drafts: "weakref.WeakKeyDictionary[Model, float]" = weakref.WeakKeyDictionary()
_of_passes: "weakref.WeakKeyDictionary[Model, dict[int, float]]" = weakref.WeakKeyDictionary()


def offload_times(target: Model) -> OffloadTimes:
    """What is measured of a target, once: in passes that only read, and of a layer by itself.

    Raises:
      ValueError: a layer could not be read.
    """
    if target not in _measured:
        _measured[target] = _measure(target)
    return _measured[target]


def _measure(target: Model) -> OffloadTimes:
    streamed = range(len(target.layers), target.config.num_layers)
    passes = []
    for _ in range(2):  # the first opens files and looks for numbers that are none
        with target.in_pass():
            start = time.perf_counter()
            for index in streamed:
                jax.block_until_ready(target.layer(index))
            passes.append(time.perf_counter() - start)
    reading = min(passes)
    columns, seconds = [], []
    with target.in_pass():  # so long what was taken stays
        weights = target.layer(streamed.start if streamed else 0)
        for count in _COLUMNS:
            columns.append(count)
            seconds.append(_pass_seconds(target.outer, target.config, weights, count))
            if streamed and seconds[-1] > reading:
                break
    return OffloadTimes(target.bytes_a_pass, reading, tuple(columns), tuple(seconds))


def expert_times(target: Model, text: Sequence[int]) -> ExpertTimes:
    """What is measured of a mixture whose experts are elsewhere, once, in passes along a text.

    Raises:
      ValueError: an expert could not be read, or all of them are in memory.
    """
    if target not in _of_experts:
        _of_experts[target] = _along(target, np.asarray(text, np.int32))
    return _of_experts[target]


def _along(target: Model, text: Int32[np.ndarray, " T"]) -> ExpertTimes:
    cache = target.expert_cache
    if cache is None:
        raise ValueError("the model's experts are all in memory.")
    layers, last = len(cache.layers), (target.config.num_layers,)
    found: list[tuple[float, float, float]] = []
    for columns in _ALONG:
        hop = max(1, columns // 2)  # about as many are accepted

        def one(number: int, hop: int = hop, columns: int = columns) -> None:
            window = np.resize(text[number * hop :], columns)[None]
            jax.block_until_ready(hidden_by_layers(target, jnp.asarray(window), last))

        one(0)  # compiles
        before, start = dataclasses.replace(cache.reads), time.perf_counter()
        for number in range(_PASSES):
            one(number + 1)
        seconds, reads = time.perf_counter() - start, cache.reads.since(before)
        found.append((reads.taken / layers / _PASSES, reads.bytes / _PASSES, seconds / _PASSES))
    taken, sizes, each = zip(*found, strict=True)
    return ExpertTimes(cache.num_experts, _ALONG, taken, sizes, each)


def draft_seconds(draft: Model) -> float:
    """Seconds in which a draft's layers are computed for one token; measured once.

    Of one that reads hidden states with its logits.
    """
    if draft not in _of_drafts:
        if draft.config.features is not None:
            return passes_seconds(draft, (1,))[1]
        _of_drafts[draft] = _pass_seconds(draft, draft.config, draft.layers[0], 1)
    return _of_drafts[draft]


def passes_seconds(
    model: Model, columns: Sequence[int], text: Sequence[int] = ()
) -> dict[int, float]:
    """Seconds of a model's passes over several numbers of columns, logits included; measured once.

    Columns of a mixture are tokens of the `text` that follow one another, if there is one: they
    choose experts alike, so that a pass reads fewer than for columns that have nothing in common.

    They take turns, so that other work on the machine slows all of them. The programs of a layer
    and of the unembedding are timed, so that little is compiled; layers go one after the other, as
    many as no cache holds: of one alone a pass of few columns would be too fast. On a CPU starting
    their programs does not count (1.2 of 7.4 ms of SmolLM2's 30 layers); elsewhere programs are
    started while others run. A draft that reads hidden states makes its pass in one program, for
    so many rows that draft a level, or a whole block where it predicts blocks.
    """
    known = _of_passes.setdefault(model, {})
    new = [count for count in dict.fromkeys(columns) if count not in known]
    if model.config.features is not None and new:
        size = model.config.hidden_size
        levels = [_clock(partial(_level, model), _drawn(size, n)) for n in new]
        *taken, idle = _least_seconds(
            [*levels, _clock(partial(_nothing, model, None), _drawn(size, 1))], _MANY
        )
        idle = idle if platform() == "cpu" else 0.0
        known |= {n: max(whole - idle, whole / 2) for n, whole in zip(new, taken, strict=True)}
    elif new:
        outer = model.outer
        layers = _timed_layers(model)
        whole = model.config.num_layers / len(layers)
        drawn = [_drawn(model.config.hidden_size, count) for count in new]
        entering = drawn
        if model.config.experts is not None and text:
            entering = [_embedded(outer, text, count) for count in new]
        passes = [_pass(outer, model.config, layers, own) for own in entering]
        unembeds = [_clock(partial(_logits, outer), own) for own in drawn]
        starts = _clock(partial(_started, outer, layers), _drawn(model.config.hidden_size, 1))
        *taken, idle = _least_seconds([*passes, *unembeds, starts], _MANY)
        for count, inside, after in zip(new, taken, taken[len(new) :], strict=False):
            computed = inside - idle if platform() == "cpu" else inside
            known[count] = whole * max(computed, inside / 2) + after
    return {count: known[count] for count in columns}


def _started(outer: Model, layers: Sequence[LayerWeights], x: Array) -> Array:
    """As many programs as layers, with their weights, that compute next to nothing."""
    for weights in layers:
        x = _nothing(outer, weights, x)
    return x


@partial(jax.jit, donate_argnames="x", keep_unused=True)
def _nothing(
    model: Model, weights: LayerWeights | None, x: Float[Array, "E C"]
) -> Float[Array, "E C"]:
    del model, weights
    return x + 1


@jax.jit
def _level(model: Model, x: Float[Array, "E C"]) -> Array:
    """What a draft that reads hidden states says of a token below each of `C` rows."""
    rows = x.shape[1]
    cache = empty_cache(model.config, rows, _SLOTS, cache_dtype(model.embedding.dtype))
    token = jnp.zeros((rows, 1), jnp.int32)
    if model.config.block_levels is not None:
        made = ready(model, ModelState(cache, None), token[:, 0])
        assert made.logits is not None
        return made.logits + made.ahead.sum() if made.ahead is not None else made.logits
    mask = jnp.ones((rows, 1, 1), bool)
    return unembed(model, run(model, token, token, cache, mask, features=x.T[:, None]).x)


def seconds_of(work: Callable[[Array], object], size: int, columns: int) -> float:
    """The least seconds of other work on so many columns of `size` numbers."""
    return _least_seconds([_clock(work, _drawn(size, columns))], _MANY)[0]


def _timed_layers(model: Model) -> list[LayerWeights]:
    """The first layers that together are too large for a cache; all of a smaller model."""
    found, size = [], 0
    for layer in model.layers:
        found.append(layer)
        size += sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
        if size >= _BEYOND_CACHES:
            break
    return found


_logits = jax.jit(unembed)


def overlaps(
    target: Model,
    draft: Model,
    text: Sequence[int] | Int[np.ndarray, " T"],
    columns: Sequence[int],
    temperature: float,
    levels: int = 1,
) -> Float[Array, "l n"]:
    """How much of the target's distributions after some tokens of a text a draft's have.

    That is how often a token drawn from the one is accepted for the other; at temperature 0 it is 1
    where both have the same most likely token. A layer is compiled, and not the model. Of a draft
    that reads hidden states at so many `levels` (see `specjax.draft.levels`), of another one once.
    """
    tokens, every = jnp.asarray(text, jnp.int32)[None], jnp.arange(len(text), dtype=jnp.int32)[None]
    p, at = logits_by_layers(target, tokens, every)[0], jnp.asarray(columns)
    if draft.config.features is None:
        said = [logits_by_layers(draft, tokens, every)[0]]
    else:
        said = said_by_level(draft, target, tokens, levels)
    found = []
    for q in said:
        if temperature == 0:
            shared = (p.argmax(axis=1) == q.argmax(axis=1)).astype(jnp.float32)
        else:
            shared = _shared(p, q, jnp.float32(temperature))
        found.append(shared[at])
    return jnp.stack(found)


def said_by_level(
    draft: Model, target: Model, tokens: Int32[Array, "1 T"], levels: int
) -> Iterator[Float[Array, "T V"]]:
    """The logits of a draft that reads hidden states after every token of a text, level by level.

    Raises:
      ValueError: it reads none, or a layer of the target could not be read.
    """
    read = draft.config.features
    if read is None:
        raise ValueError("the draft reads no hidden states, so it has no levels.")
    hidden = hidden_by_layers(target, tokens, read.layers)
    for x in _by_level(draft, tokens, hidden, levels):  # all logits at once would be large
        yield _logits(draft, x).T


@partial(jax.jit, static_argnames="levels")
def _by_level(
    draft: Model, tokens: Int32[Array, "1 T"], hidden: Float[Array, "1 T H"], levels: int
) -> list[Float[Array, "E T"]]:
    return list(by_level(draft, tokens, hidden, levels))


@jax.jit
def _shared(
    p: Float[Array, "T V"], q: Float[Array, "T V"], temperature: Float[Array, ""]
) -> Float[Array, " T"]:
    p, q = (jax.nn.softmax(each / temperature, axis=-1) for each in (p, q))
    return jnp.minimum(p, q).sum(axis=-1)


def _drawn(size: int, columns: int) -> Float[np.ndarray, "E C"]:
    """Columns that differ, as those of one that is the same would choose the same experts."""
    return np.random.default_rng(0).standard_normal((size, columns), np.float32)


def _embedded(outer: Model, text: Sequence[int], columns: int) -> Float[np.ndarray, "E C"]:
    """So many tokens of a text, from its beginning on, as they enter the first layer."""
    tokens = jnp.asarray(np.resize(np.asarray(text, np.int32), columns))[None]
    positions = jnp.arange(columns, dtype=jnp.int32)[None]
    return np.asarray(embed(outer, tokens, positions), np.float32)


def _clock(work: Callable[[Array], object], state: Float[np.ndarray, "E C"]) -> Callable[[], float]:
    """Takes the seconds of work on a state, which it may be given away to."""

    def taken() -> float:
        x = jax.block_until_ready(jnp.array(state))
        start = time.perf_counter()
        jax.block_until_ready(work(x))
        return time.perf_counter() - start

    return taken


def _least_seconds(clocks: Sequence[Callable[[], float]], runs: int = _RUNS) -> list[float]:
    """The least of each clock, which take turns."""
    for clock in clocks:  # the first run compiles
        clock()
    taken: list[list[float]] = []
    while len(taken) < runs:
        taken.append([clock() for clock in clocks])
        enough = sum(map(sum, taken)) > _ENOUGH_SECONDS * len(clocks)
        if enough and len(taken) >= _RUNS:
            break
    return [min(each) for each in zip(*taken, strict=True)]


def _pass_seconds(outer: Model, config: ModelConfig, weights: LayerWeights, columns: int) -> float:
    """The least seconds of a layer over so many columns, for all layers."""
    state = _drawn(config.hidden_size, columns)
    (taken,) = _least_seconds([_pass(outer, config, [weights], state)])
    return config.num_layers * taken


def _pass(
    outer: Model,
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    state: Float[np.ndarray, "E C"],
) -> Callable[[], float]:
    """A clock of some layers over such columns."""
    outer, columns = replace(outer, layers=()), state.shape[1]
    heads = layers[0].num_key_rows // config.head_dim
    cache = empty_cache(config, 1, _SLOTS, cache_dtype(outer.embedding.dtype), heads)
    held = cache.keys[0], cache.values[0], cache.length
    positions = jnp.zeros((1, columns), jnp.int32)
    tree_mask = jnp.eye(columns, dtype=bool)[None]
    kind = config.kind_of(config.num_layers - 1)

    def run(x: Array) -> object:
        for weights in layers:
            x, _ = run_layer(outer, weights, x, positions, tree_mask, held, kind=kind)
        return x

    return _clock(run, state)
