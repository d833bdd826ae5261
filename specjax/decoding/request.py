"""What is asked of a generation: checked on the host, padded to buckets."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from specjax.base.axes import Key
from specjax.base.grammars import Grammars, none_of
from specjax.base.penalties import TokenCounts, counts_of
from specjax.base.pytree import pytree, replace
from specjax.base.sampling import Sampling, fold, threefry
from specjax.draft.drafter import Drafter
from specjax.draft.plain import PlainDrafter
from specjax.models import memory
from specjax.models.transformer import Model
from specjax.parallel.mesh import ROWS, Layout, check_rows, laid_out, layout_of
from specjax.verify.rules import AUTO, NAIVE, Rule, find_rule

PROMPT_BUCKETS = (
    *(32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072),
)
OUTPUT_BUCKETS = (32, 128, 512, 2048, 8192, 32768)
_SLOT_MULTIPLE = 64
NO_END = -1
"""Fills up `Limits.end_ids`; no token has this number."""


@pytree
class Limits:
    """Where each row's text ends: after `max_new_tokens`, or after one of its `end_ids`.

    -1 fills up a row that has fewer end tokens than another.
    """

    max_new_tokens: Int32[Array, " B"]
    end_ids: Int32[Array, "B e"]


@pytree
class Rows:
    """What is asked for, row by row: prompts of `length` tokens, right-padded to `T`."""

    prompt: Int32[Array, "B T"]
    length: Int32[Array, " B"]
    key: Key[Array, " B"]
    sampling: Sampling
    limits: Limits
    counts: TokenCounts | None = None
    grammars: Grammars | None = None


class Request(NamedTuple):
    """Arguments of `generate_jit` (`specjax.decoding.generate`), checked, padded to buckets."""

    target: Model
    drafter: Drafter
    rows: Rows
    rule: Rule
    outputs: int
    slots: int
    layout: Layout | None = None


Prompts: TypeAlias = Sequence[Sequence[int | np.integer] | Array | np.ndarray] | Array | np.ndarray
"""Token ids: a list of prompts, each a list or a 1-D array; or a 2-D array with a prompt a row."""


def listed(prompts: Prompts) -> list[list[int]]:
    """The prompts as lists of token ids.

    Raises:
      TypeError: they are not lists or arrays of integers.
      ValueError: an array has other than two axes.
    """
    wanted = "it must be a list of prompts, each a list of token ids"
    if isinstance(prompts, str | bytes):
        raise TypeError(f"prompts is text, {prompts[:20]!r}; {wanted}: tokenize it first.")
    if isinstance(prompts, jax.Array | np.ndarray) and prompts.ndim != 2:
        raise ValueError(f"prompts has shape {prompts.shape}; an array of prompts has two axes.")
    if not isinstance(prompts, Sequence | jax.Array | np.ndarray):
        raise TypeError(f"prompts is a {type(prompts).__name__}; {wanted}.")
    return [_ids_of(row, prompt) for row, prompt in enumerate(prompts)]


def _ids_of(row: int, prompt: Any) -> list[int]:
    if isinstance(prompt, str | bytes):
        raise TypeError(f"prompt {row} is text, {prompt[:20]!r}; it must be a list of token ids.")
    if isinstance(prompt, jax.Array | np.ndarray):
        found = np.asarray(prompt)
        if found.ndim == 1 and found.dtype.kind in "iu":
            return found.tolist()
        if found.ndim:
            raise TypeError(
                f"prompt {row} is an array of {found.dtype} with shape {found.shape}; it must be "
                "integers along one axis."
            )
        prompt = found[()]
    if not isinstance(prompt, Sequence):
        raise TypeError(
            f"prompt {row} is {prompt!r}, not a list of token ids; for a single prompt, give a "
            "list that holds it."
        )
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"prompt {row} holds {token!r}; token ids are integers.")
    return [int(token) for token in prompt]


def check_prompts(
    target: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[int]:
    """The prompts' lengths.

    Raises:
      TypeError: `max_new_tokens` is not an integer.
      ValueError: there is no prompt, or one is empty, holds a foreign token or does not fit.
    """
    config = target.config
    if not prompts:
        raise ValueError("there is no prompt.")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
        raise TypeError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer.")
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
    key: Array | np.ndarray,
    target: Model,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    verify: str = AUTO,
    stop_at_eos: bool = True,
    has_grammar: Bool[np.ndarray, " B"] | bool = False,
) -> Request:
    """The request as arrays in buckets.

    Args:
      key: one key (row i uses `fold_in(key, i)`) or one a row.
      target: the model whose distribution the texts follow.
      drafter: what proposes trees; None for plain decoding.
      prompts: token ids (see `Prompts`).
      max_new_tokens: the longest continuation of every row.
      sampling: how to sample, for all rows or each; greedy by default.
      verify: the name of a verification rule, or "auto".
      stop_at_eos: whether the target's end tokens end a text.
      has_grammar: which rows have one, whose texts end in an end token whatever that says.

    Returns:
      The arguments of `generate_jit`, on the target's mesh if it is on one.

    Raises:
      TypeError: an argument is of another type than it must be.
      ValueError: a prompt is empty, has a token outside the vocabulary, or does not fit; the
        draft's vocabulary is another; the rule is not lossless for these trees; a parameter is
        out of its range; a mesh's axis does not divide the rows; the texts
        would take more memory than there is; a draft is split over a mesh, or reads layers that
        there are not.
    """
    sampling = Sampling() if sampling is None else sampling
    _check_types(target, drafter, sampling, verify)
    drafter = PlainDrafter(target.config.vocab_size) if drafter is None else drafter
    prompts = listed(prompts)
    lengths = check_prompts(target, prompts, max_new_tokens)
    check_drafter(target, drafter)
    own_sampling, keys = sampling.rows(len(prompts)), row_keys(key, len(prompts))
    rule = rule_of(verify, drafter)
    if rule.greedy_only and np.any(np.asarray(own_sampling.temperature) > 0):
        raise ValueError(
            f"the {rule.name} rule needs temperature 0; "
            f"it is {float(np.max(np.asarray(own_sampling.temperature))):g}. Use auto or naive."
        )
    layout = layout_of(target, drafter)
    check_rows(layout, len(prompts))
    most = target.config.max_positions
    width, outputs, slots = room(max(lengths), max_new_tokens, drafter.window, most)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = prompt
    counts = counts_of(sampling, prompts, target.config.vocab_size)
    visiting = visits(target, drafter, rule, counts is not None or bool(np.any(has_grammar)))
    check_memory(target, drafter, rule, len(prompts), width, slots, visiting)
    rows = Rows(
        prompt=jnp.asarray(padded),
        length=jnp.asarray(lengths, jnp.int32),
        key=keys,
        sampling=own_sampling,
        limits=limits_of(target, len(prompts), max_new_tokens, stop_at_eos, has_grammar),
        counts=counts,
    )
    return Request(target, drafter, laid_out(layout, rows, ROWS), rule, outputs, slots, layout)


def limits_of(
    target: Model,
    rows: int,
    max_new_tokens: int,
    stop_at_eos: bool,
    has_grammar: Bool[np.ndarray, " B"] | bool = False,
) -> Limits:
    """The same limits for all rows, with the target's end tokens if `stop_at_eos`, or if a row
    `has_grammar`.

    Raises:
      ValueError: a row has a grammar, and the target no end token.
    """
    ends = np.asarray(target.config.eos_ids, np.int32).reshape(1, -1)
    if np.any(has_grammar) and not ends.size:
        raise ValueError("a grammar is given, whose texts end in an end token; the model has none.")
    own = np.broadcast_to(np.asarray(has_grammar) | stop_at_eos, (rows,))
    ends = np.where(own[:, None], ends, NO_END)
    return Limits(
        max_new_tokens=jnp.full(rows, max_new_tokens, jnp.int32), end_ids=jnp.asarray(ends)
    )


def grammars_of(numbers: Int32[np.ndarray, " B"], window: int) -> Grammars:
    """Rows before their first token with grammars of these numbers (0: none)."""
    return replace(none_of(len(numbers), window), number=jnp.asarray(numbers, jnp.int32))


def _check_types(target: Model, drafter: Drafter | None, sampling: Sampling, verify: str) -> None:
    """Checks what else would fail far from here, and say something of jax."""
    wanted = {
        "target": (target, Model, "load gives one, and a tokenizer beside it"),
        "sampling": (sampling, Sampling, "such as specjax.Sampling(temperature=0.8)"),
        "verify": (verify, str, "such as 'auto'"),
    }
    if drafter is not None:
        wanted["drafter"] = (drafter, Drafter, "build and load_drafter give one")
    for name, (value, kind, hint) in wanted.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"{name} is a {type(value).__name__}; it must be a {kind.__name__}: {hint}."
            )


def rule_of(verify: str, drafter: Drafter) -> Rule:
    """The verification rule for a drafter's trees: naive where nothing is drafted.

    Raises:
      ValueError: there is no such rule, or it is not lossless for them.
    """
    rule = find_rule(verify, drafter.construction)
    return NAIVE if drafter.window == 1 and not rule.greedy_only else rule


def check_drafter(target: Model, drafter: Drafter) -> None:
    """Checks that a drafter's drafts go with a target.

    Raises:
      ValueError: they have another vocabulary, want to see a layer or tokens that there are not, or
        are split over a mesh.
    """
    if drafter.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the drafts have a vocabulary of {drafter.vocab_size} tokens, "
            f"the target one of {target.config.vocab_size}."
        )
    wants, layers = drafter.wants, target.config.num_layers
    if not 0 <= wants.top_tokens <= target.config.vocab_size:
        raise ValueError(
            f"the drafts read the target's {wants.top_tokens} likeliest tokens "
            f"of {target.config.vocab_size}."
        )
    for layer in wants.hidden_layers:
        if not 0 <= layer <= layers:
            raise ValueError(
                f"the drafts read the hidden states after {layer} layers of the target, "
                f"which has {layers}."
            )
    if any(draft.placed.axis is not None for draft in memory.loads_in(drafter)):
        raise ValueError("a draft is split over the mesh; load_drafts gives drafts that are whole.")


VISITED_FROM = 512
"""Nodes from which on those of a streamed target are unembedded one after the other."""


def visits(target: Model, drafter: Drafter, rule: Rule, limited: bool) -> bool:
    """Whether a step unembeds the nodes that its rule visits, and no others.

    One after the other they take as long as hundreds at once, so that it is for large trees;
    what drafts must not need the others, and no row may have a bias, a penalty or a grammar.
    """
    large = not target.is_whole and drafter.num_slots >= VISITED_FROM
    others = drafter.wants.top_tokens > 0 or drafter.needs_probs or limited
    return large and rule.visiting is not None and not others


def memory_plan(
    target: Model,
    drafter: Drafter,
    rule: Rule,
    rows: int,
    width: int,
    slots: int,
    visiting: bool = False,
    paged: tuple[int, int] | None = None,
) -> memory.Plan:
    """The memory of so many rows of `slots`, of prompts read `width` at a time.

    If `visiting`, the distributions of hardly any nodes are in memory; `paged` is as in
    `memory.plan`.
    """
    held, drafts = memory.load_of(target), memory.loads_in(drafter, target.resident)
    live = 0.0 if visiting else rule.live_distributions
    shown = len(drafter.wants.hidden_layers)
    return memory.plan(held, drafts, rows, width, slots, drafter.num_slots, live, shown, paged)


def check_memory(
    target: Model,
    drafter: Drafter,
    rule: Rule,
    rows: int,
    width: int,
    slots: int,
    visiting: bool = False,
    paged: tuple[int, int] | None = None,
) -> None:
    """Checks that there is memory for what `memory_plan` plans.

    Raises:
      ValueError: there is not.
    """
    needed = memory_plan(target, drafter, rule, rows, width, slots, visiting, paged)
    what = f"{rows} texts of {slots} tokens in trees of {drafter.num_slots} nodes"
    if paged is not None:
        what += f", with pages for {paged[0]} tokens,"
    memory.check(needed.beside_weights, needed.available, what)


class Room(NamedTuple):
    """Tokens of prompts and of what is made, and slots of the caches, as programs have them."""

    prompt: int
    outputs: int
    slots: int


def room(prompt: int, new_tokens: int, window: int, positions: int) -> Room:
    """What so many tokens are rounded up to, where a step commits `window` at most.

    No text is longer than the context of `positions`, whatever its tokens are rounded up to.

    Raises:
      ValueError: they exceed the largest bucket.
    """
    width, outputs = bucket(prompt, PROMPT_BUCKETS), bucket(new_tokens, OUTPUT_BUCKETS)
    tokens = min(width + outputs, max(width, positions)) + window
    slots = -(-tokens // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
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


def row_keys(key: Array | np.ndarray, rows: int) -> Key[Array, " B"]:
    """One key a row: `fold(key, row)` of a single key, or the given keys; all of threefry.

    Raises:
      TypeError: it is not a JAX PRNG key.
      ValueError: the number of keys is not that of the prompts.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key is {key!r}; it must be a JAX PRNG key, such as jax.random.key(0).")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(jax.random.key(0)).shape
        if key.dtype != np.uint32 or key.ndim not in (1, 2) or key.shape[-1:] != words:
            raise TypeError(
                f"key is an array of {key.dtype} with shape {key.shape}; it must be a JAX PRNG "
                "key, such as jax.random.key(0)."
            )
        key = jax.random.wrap_key_data(jnp.asarray(key))
    keys = jnp.asarray(key)
    if keys.ndim == 0:
        return jax.vmap(partial(fold, keys))(jnp.arange(rows))
    if keys.shape != (rows,):
        raise ValueError(
            f"key has shape {keys.shape}, for {rows} prompts; give one key, or one a row."
        )
    return threefry(keys)
