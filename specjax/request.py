"""What is asked of a generation: checked on the host, padded to buckets."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from specjax import memory
from specjax.arrays import Key
from specjax.draft.drafter import Drafter
from specjax.model import Model
from specjax.pytree import pytree
from specjax.sampling import Sampling, fold, threefry
from specjax.sharding import ROWS, Layout, check_rows, laid_out, layout_of
from specjax.verify import DRAWN, NAIVE, Construction, Rule, find_rule

PROMPT_BUCKETS = (
    *(32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072),
)
OUTPUT_BUCKETS = (32, 128, 512, 2048, 8192, 32768)
_SLOT_MULTIPLE = 64


@pytree
class Limits:
    """Where a text ends: after `max_new_tokens`, or after an end token where `stop` says so."""

    max_new_tokens: Int32[Array, ""]
    stop: Bool[Array, ""]


def window_of(drafter: Drafter | None) -> int:
    """The most tokens a step can commit."""
    return 1 if drafter is None else drafter.window


class Request(NamedTuple):
    """Arguments of `run`, checked and padded to their buckets."""

    rule: Rule
    sampling: Sampling
    limits: Limits
    prompt: Array
    length: Array
    key: Array
    outputs: int
    slots: int
    layout: Layout | None = None


def check_prompts(
    target: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[int]:
    """The prompts' lengths.

    Raises:
      ValueError: there is none, or one is empty, holds a foreign token or does not fit.
    """
    config = target.config
    if not prompts:
        raise ValueError("there is no prompt.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    lengths = [len(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        if not lengths[row]:
            raise ValueError(f"prompt {row} is empty; it needs at least one token.")
        if lengths[row] + max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompt {row} has {lengths[row]} tokens and {max_new_tokens} are asked for; "
                f"together they exceed the model's {config.max_positions}."
            )
        foreign = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
        if foreign is not None:
            raise ValueError(
                f"prompt {row} holds token {foreign}; the vocabulary has {config.vocab_size}."
            )
    return lengths


def prepare(
    key: Array,
    target: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    verify: str,
    stop_at_eos: bool,
) -> Request:
    """The request as arrays in buckets.

    Raises:
      ValueError: a prompt is empty, has a token outside the vocabulary, or does not fit; the
        draft's vocabulary is another; the rule is not lossless for these trees; a parameter is
        out of its range; a mesh's axis does not divide the rows; the texts
        would take more memory than there is; a draft is split over a mesh.
    """
    lengths = check_prompts(target, prompts, max_new_tokens)
    _check_drafter(target, drafter)
    rows = sampling.rows(len(prompts))
    trees = Construction(DRAWN, chain=True) if drafter is None else drafter.construction
    rule = find_rule(verify, trees)
    rule = NAIVE if drafter is None else rule
    if verify == "greedy" and np.any(np.asarray(rows.temperature) > 0):
        raise ValueError(
            "the greedy rule needs temperature 0; "
            f"it is {float(np.max(np.asarray(rows.temperature))):g}. Use auto or naive."
        )
    layout = layout_of(target, drafter)
    check_rows(layout, len(prompts))
    width, outputs, slots = room(max(lengths), max_new_tokens, window_of(drafter))
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = prompt
    _check_memory(target, drafter, len(prompts), width, slots)
    by_row: Any = (rows, jnp.asarray(padded), jnp.asarray(lengths, jnp.int32),
                   row_keys(key, len(prompts)))  # fmt: skip
    limits = Limits(jnp.int32(max_new_tokens), jnp.asarray(stop_at_eos))
    rows, padded, length, keys = laid_out(layout, by_row, ROWS)
    return Request(
        rule=rule,
        sampling=rows,
        limits=laid_out(layout, limits, P()),
        prompt=padded,
        length=length,
        key=keys,
        outputs=outputs,
        slots=slots,
        layout=layout,
    )


def _check_drafter(target: Model, drafter: Drafter | None) -> None:
    if drafter is None:
        return
    if drafter.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the drafts have a vocabulary of {drafter.vocab_size} tokens, "
            f"the target one of {target.config.vocab_size}."
        )
    if any(draft.placed.axis is not None for draft in memory.loads_in(drafter)):
        raise ValueError("a draft is split over the mesh; load_drafts gives drafts that are whole.")


def _check_memory(
    target: Model, drafter: Drafter | None, rows: int, width: int, slots: int
) -> None:
    nodes = 1 if drafter is None else drafter.num_slots
    held, drafts = memory.load_of(target), memory.loads_in(drafter)
    needed = memory.plan(held, drafts, rows, width, slots, nodes)
    what = f"{rows} texts of {slots} tokens in trees of {nodes} nodes"
    memory.check(needed.beside_weights, needed.available, what)


class Room(NamedTuple):
    """Tokens of prompts and of what is made, and slots of the caches, as programs have them."""

    prompt: int
    outputs: int
    slots: int


def room(prompt: int, new_tokens: int, window: int) -> Room:
    """What so many tokens are rounded up to, where a step commits `window` at most.

    Raises:
      ValueError: they exceed the largest bucket.
    """
    width, outputs = bucket(prompt, PROMPT_BUCKETS), bucket(new_tokens, OUTPUT_BUCKETS)
    slots = -(-(width + outputs + window) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    return Room(width, outputs, slots)


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      ValueError: there is none.
    """
    fitting = next((b for b in buckets if b >= size), None)
    if fitting is None:
        raise ValueError(f"{size} tokens exceed the largest bucket, {buckets[-1]}.")
    return fitting


def row_keys(key: Array, rows: int) -> Key[Array, " B"]:
    """One key a row: `fold(key, row)` of a single key, or the given keys; all of threefry.

    Raises:
      ValueError: the number of keys is not that of the prompts.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(partial(fold, key))(jnp.arange(rows))
    if key.shape != (rows,):
        raise ValueError(f"there are {key.shape[0]} keys for {rows} prompts.")
    return threefry(key)
