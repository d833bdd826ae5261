"""Tokens per step of methods that need no draft model, along texts that the target writes itself.

Their trees are chosen, not drawn, so that a step accepts what the target's text goes on with:
following a text gives the steps that decoding it would have. `draftless` weighs them against what
the steps cost.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from specjax.base.axes import Key
from specjax.base.sampling import Sampling, largest
from specjax.decoding.generate import steps_on_host
from specjax.decoding.request import prepare, row_keys
from specjax.decoding.streamed import logits_by_layers
from specjax.draft.drafter import Drafter, DraftState, Seen
from specjax.models.streamed import by_layers
from specjax.models.transformer import Model
from specjax.trees.tree import TokenTree

_MULTIPLE = 64
"""Texts are padded to so many tokens, so that few programs are compiled."""


class Text(NamedTuple):
    """A prompt and what the target wrote after it, from `start` on."""

    tokens: tuple[int, ...]
    start: int

    @property
    def written(self) -> int:
        """Tokens that the target wrote."""
        return len(self.tokens) - self.start


class Replayed(NamedTuple):
    """Tokens per step of each text by the budget of nodes, and the seconds of drafting a step."""

    tokens: dict[int, tuple[float, ...]]
    draft_seconds: float


def write(
    target: Model,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    most: int,
    seconds: float,
) -> list[Text]:
    """What the target writes after prompts: `most` tokens each, or what comes in so many seconds.

    They are written side by side. A layer is compiled, and not the model; its compilation does not
    count.
    """
    request = prepare(
        jax.random.key(0), by_layers(target), None, prompts, max_new_tokens=most,
        sampling=Sampling(temperature),
    )  # fmt: skip
    made: list[list[int]] = [list(prompt) for prompt in prompts]
    begun = None
    for step in steps_on_host(request):
        for own, tokens, count in zip(made, step.tokens, step.count, strict=True):
            own += tokens[:count].tolist()
        begun = begun or time.monotonic()
        if time.monotonic() > begun + seconds:
            break
    return [Text(tuple(own), len(prompt)) for own, prompt in zip(made, prompts, strict=True)]


def likeliest_along(
    target: Model, texts: Sequence[Text], count: int
) -> list[Int32[np.ndarray, "T k"]]:
    """The target's `count` likeliest tokens after each token of every text."""
    size, found = padded_size(texts), []
    if not count:
        return [np.zeros((size, 0), np.int32) for _ in texts]
    for text in texts:
        tokens = jnp.asarray(padded(text, size)[None])
        logits = logits_by_layers(target, tokens, jnp.arange(size, dtype=jnp.int32)[None])[0]
        found.append(np.asarray(_largest(logits, count)))
    return found


_largest = jax.jit(lambda logits, count: largest(logits, count)[1], static_argnames="count")


def replay(
    drafter: Drafter,
    texts: Sequence[Text],
    likeliest: Sequence[Int32[np.ndarray, "T k"]],
    budgets: Sequence[int],
    rows: int = 1,
) -> Replayed:
    """The steps that decoding the texts would have, with trees of the likeliest nodes.

    Args:
      drafter: its trees are as large as the largest budget, and chosen; it reads no hidden states.
      texts: some.
      likeliest: the target's likeliest tokens along each, as many as the drafter asks for.
      budgets: numbers of nodes; of each tree so many of the likeliest count.
      rows: texts of a batch that are drafted for at once, for the seconds.
    """
    reached: list[list[list[int]]] = [[] for _ in texts]
    taken = []
    for owners, trees, seconds in _proposed(drafter, texts, likeliest, rows):
        taken.append(seconds)
        for row, (number, place) in enumerate(owners):
            following = texts[number].tokens[place + 1 :]
            one = jax.tree.map(lambda leaf, row=row: leaf[row], trees)
            reached[number].append(_accepted(one, following, budgets))
    tokens = {
        budget: tuple(
            _tokens_per_step([each[index] for each in own]) for own in reached
        )
        for index, budget in enumerate(budgets)
    }  # fmt: skip
    return Replayed(tokens, statistics.median(taken))


def _proposed(
    drafter: Drafter,
    texts: Sequence[Text],
    likeliest: Sequence[Int32[np.ndarray, "T k"]],
    rows: int,
) -> Iterator[tuple[list[tuple[int, int]], TokenTree, float]]:
    """Trees at every place where a step may begin, some at a time: text and place of each."""
    size = padded_size(texts)
    whole = [padded(text, size) for text in texts]
    places = [(n, at) for n, text in enumerate(texts)
              for at in range(text.start - 1, len(text.tokens) - 1)]  # fmt: skip
    keys, sampling = row_keys(jax.random.key(0), rows), Sampling().rows(rows)
    for begin in range(0, len(places), rows):
        own = places[begin : begin + rows]
        full = [*own, *own[:1] * (rows - len(own))]
        prompt = jnp.asarray(np.stack([whole[number] for number, _ in full]))
        top = jnp.asarray(np.stack([likeliest[number] for number, _ in full]))
        length = jnp.asarray([at + 1 for _, at in full], jnp.int32)
        last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)[:, 0]
        state = jax.block_until_ready(_init(drafter, prompt, length, top))
        start = time.perf_counter()
        tree = jax.block_until_ready(_propose(drafter, keys, state, length, last, sampling))
        yield own, jax.device_get(tree), time.perf_counter() - start


@jax.jit
def _init(
    drafter: Drafter,
    prompt: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    top_tokens: Int32[Array, "B T k"],
) -> DraftState:
    """The state where a step begins: of the last token the target's successors are not known yet.

    Nothing was read but the tokens before it, which `truncate` makes a state of all of them.
    """
    slots = prompt.shape[1] + drafter.window
    assert not drafter.wants.hidden_layers
    none = jnp.zeros((*prompt.shape, 0), jnp.float32)
    seen = Seen(top_tokens[..., : drafter.wants.top_tokens], none)
    before = drafter.init(prompt, length - 1, slots, seen)
    return drafter.truncate(before, length)


@jax.jit
def _propose(
    drafter: Drafter,
    key: Key[Array, " B"],
    state: DraftState,
    length: Int32[Array, " B"],
    last: Int32[Array, " B"],
    sampling: Sampling,
) -> TokenTree:
    return drafter.propose(key, length - 1, state, last, sampling)[0]


def padded_size(texts: Sequence[Text]) -> int:
    """The length that all of some texts are padded to, so that one program reads them."""
    longest = max(len(text.tokens) for text in texts)
    return -(-longest // _MULTIPLE) * _MULTIPLE


def padded(text: Text, size: int) -> Int32[np.ndarray, " T"]:
    """The tokens of a text, and zeros behind them."""
    found = np.zeros(size, np.int32)
    found[: len(text.tokens)] = text.tokens
    return found


def _accepted(tree: Any, following: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """How many tokens that follow are on a path of the tree, for each budget of nodes."""
    rank = _ranks(tree.parents, tree.chance, tree.valid)
    node, needed, path = 0, 0, []
    for token in following:
        below = np.flatnonzero((tree.parents == node) & tree.valid & (tree.tokens == token))
        if not below.size:
            break
        node = int(below[0])
        needed = max(needed, int(rank[node]))
        path.append(needed)
    return [sum(each <= budget for each in path) for budget in budgets]


def _ranks(
    parents: Int[np.ndarray, " N"], chance: Float[np.ndarray, " N"], valid: np.ndarray
) -> Int[np.ndarray, " N"]:
    """Which place each node has among the likeliest; that of the root is 0."""
    along = np.ones(len(parents))
    for node in range(1, len(parents)):
        along[node] = chance[node] * along[max(parents[node], 0)]
    along[0] = np.inf
    order = np.argsort(np.where(valid, -along, np.inf), kind="stable")
    rank = np.empty(len(parents), int)
    rank[order] = np.arange(len(parents))
    return rank


def _tokens_per_step(reached: Sequence[int]) -> float:
    """Of steps that each begin behind the last one's tokens; 1 where nothing was written."""
    place = steps = 0
    while place < len(reached):
        place += reached[place] + 1
        steps += 1
    return len(reached) / steps if steps else 1.0
