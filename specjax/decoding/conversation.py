"""A row that keeps its text between replies: of the next prompt only what is new is read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from pallas_kernels.tree_attention.xla import reads_rows_in_place
from specjax.base.penalties import counts_of
from specjax.base.prefix import common_prefix
from specjax.base.pytree import replace, unchecked
from specjax.base.sampling import Sampling
from specjax.decoding.extending import can_truncate, extended, shortened
from specjax.decoding.generate import state_specs, step_jit
from specjax.decoding.request import (
    Rows,
    check_drafter,
    check_memory,
    check_prompts,
    limits_of,
    row_keys,
    rule_of,
)
from specjax.decoding.stepping import DecodeState
from specjax.draft.drafter import Drafter, Step
from specjax.draft.plain import PlainDrafter
from specjax.models.kv_cache import KVCache, cache_dtype, empty_cache
from specjax.models.transformer import Model
from specjax.parallel.mesh import ROWS, Layout, check_rows, laid_out, layout_of, spread
from specjax.verify.rules import AUTO

LONGEST = 8192
"""Tokens of a prompt and its continuation that there is room for where no number is named."""

CHUNK, LARGE_CHUNK = 32, 256
"""Tokens of a prompt that a pass reads; the large one, whose program is compiled when it is first
needed, where two of it are left."""

_SLOT_MULTIPLE = 128


@partial(jax.jit, static_argnames=("slots", "layout"))
def begin_jit(
    target: Model, drafter: Drafter, first: Int32[Array, "1"], slots: int, layout: Layout | None
) -> DecodeState:
    """A row that holds one token, of which the target's cache has nothing."""

    def whole(target: Model, drafter: Drafter, first: Array) -> DecodeState:
        one, none = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
        unseen = drafter.wants.zeros((1, 1), target.config.hidden_size)
        return DecodeState(
            cache=_empty(target, slots),
            draft=drafter.init(first[:, None], one, slots, unseen),
            last=first,
            key=row_keys(jax.random.key(0), 1),
            sampling=Sampling().rows(1),
            limits=limits_of(target, 1, 0, stop_at_eos=True),
            made=none,
            done=none == 0,
        )

    over = spread(layout, whole, (target, drafter), (P(),), state_specs(target, drafter))
    state = over(target, drafter, first)
    return _read_in_place(state) if layout is None else state


@partial(jax.jit, static_argnames="layout", donate_argnames="state")
def extend_jit(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    tokens: Int32[Array, "1 T"],
    count: Int32[Array, "1"],
    layout: Layout | None,
) -> DecodeState:
    """The row with the first `count` of `tokens` after its own; its buffers are given away."""

    def whole(target: Model, drafter: Drafter, *given: Any) -> DecodeState:
        return extended(target, drafter, *given)[0]

    states = state_specs(target, drafter)
    over = spread(layout, whole, (target, drafter), (states, P(), P()), states)
    return over(target, drafter, state, tokens, count)


@partial(jax.jit, static_argnames="layout", donate_argnames="state")
def shorten_jit(
    target: Model,
    drafter: Drafter,
    state: DecodeState,
    length: Int32[Array, "1"],
    last: Int32[Array, "1"],
    layout: Layout | None,
) -> DecodeState:
    """The row with the first `length` of its tokens; its buffers are given away."""

    def whole(target: Model, drafter: Drafter, *given: Any) -> DecodeState:
        del target
        return shortened(drafter, *given)

    states = state_specs(target, drafter)
    over = spread(layout, whole, (target, drafter), (states, P(), P()), states)
    return over(target, drafter, state, length, last)


def _empty(target: Model, slots: int) -> KVCache:
    """A cache of one row that holds nothing, stacked where the target's layers are."""
    dtype = cache_dtype(target.embedding.dtype)
    cache = empty_cache(target.config, 1, slots, dtype, target.kv_heads)
    if not target.is_stacked:
        return cache
    return replace(cache, keys=(jnp.stack(cache.keys),), values=(jnp.stack(cache.values),))


def _read_in_place(state: DecodeState) -> DecodeState:
    """The state with caches of which a pass reads no slot that is empty, where there is a way."""

    def one(cache: KVCache) -> KVCache:
        own = reads_rows_in_place() and cache.keys[0].ndim == 4
        return replace(cache, pages=jnp.zeros((1, 1), jnp.int32)) if own else cache

    def is_cache(node: Any) -> bool:
        return isinstance(node, KVCache)

    return jax.tree.map(lambda x: one(x) if is_cache(x) else x, state, is_leaf=is_cache)


class Conversation:
    """Replies to prompts of which each begins as the one before went on, as those of a chat do.

    The caches keep the last prompt and its reply; of the next prompt the tokens are read that
    follow what it has in common with them. Each reply is distributed exactly as the target alone
    would continue its prompt. A drafter whose state cannot be shortened reads anew what does not
    just go on.

    Args:
      target: the model whose distribution the replies follow.
      drafter: what proposes trees; None is plain decoding.
      max_model_len: the most tokens of a prompt and its reply together; by default the model's
        context, 8,192 of it at most.
      verify: the verification rule.

    Raises:
      ValueError: the drafter or the rule does not go with the target, there is no such room, or no
        memory for it; the target is offloaded.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        *,
        max_model_len: int | None = None,
        verify: str = AUTO,
    ) -> None:
        if not target.is_whole:
            raise ValueError("the model is offloaded; its conversations cannot be kept.")
        drafter = PlainDrafter(target.config.vocab_size) if drafter is None else drafter
        check_drafter(target, drafter)
        most = target.config.max_positions
        if max_model_len is not None and not 2 <= max_model_len <= most:
            raise ValueError(
                f"max_model_len is {max_model_len}; it must lie in [2, {most}], the model's "
                "context."
            )
        self.max_model_len = max_model_len or min(most, LONGEST)
        self.cached = 0
        """Tokens of the last prompt that were not read, as they were held."""
        self.rule = rule_of(verify, drafter)
        self._models = target, drafter
        self._layout = layout_of(target, drafter)
        check_rows(self._layout, 1)
        room = self.max_model_len + max(LARGE_CHUNK, drafter.window)
        self._slots = -(-room // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
        try:
            check_memory(target, drafter, self.rule, 1, LARGE_CHUNK, self._slots)
        except ValueError as error:
            raise ValueError(f"{error} Use a smaller max_model_len.") from None
        self._shortens = can_truncate(target, drafter)
        self._programs: dict[Any, Any] = {}
        self._tokens: list[int] = []
        self._state: DecodeState | None = None  # None while a program has it
        self._turn = 0

    @property
    def tokens(self) -> list[int]:
        """The tokens that are held: a prompt, as far as it was read, and its reply."""
        return [] if self._state is None else list(self._tokens)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The target's end tokens."""
        return tuple(self._models[0].config.eos_ids)

    def forget(self) -> None:
        """Holds nothing any more, nor what drafts were learned from it."""
        self._turn, self._state = self._turn + 1, None

    def compile(self, sampling: Sampling | None = None) -> None:
        """Compiles what every reply needs, several programs at once; else the first ones do.

        Args:
          sampling: how replies will be sampled; penalties make a program of their own.
        """
        state: Any = self._begun(0) if self._layout else jax.eval_shape(lambda: self._begun(0))
        asked = self._asked(state, [0], jax.random.key(0), 1, sampling, True)
        one = self._put([1])
        calls = [
            (step_jit, (self.rule, asked)),
            (extend_jit, (state, *self._chunk([0], CHUNK))),
            (shorten_jit, (state, one, one)),
        ]
        if not self._shortens:
            del calls[-1]
        with ThreadPoolExecutor(2, "specjax-compile") as pool:
            list(pool.map(lambda call: self._program(call[0], *call[1]), calls))

    def read(self, prompt: Sequence[int]) -> Iterator[int]:
        """Reads a prompt as far as it is not held.

        Args:
          prompt: token ids. The last of them is always read anew.

        Returns:
          After each pass, how many tokens are left to be read. Whoever stops before 0 has them read
          when the next prompt is.

        Raises:
          TypeError: the prompt holds something else than integers.
          ValueError: it is empty, holds a token outside the vocabulary, or leaves no room.
        """
        prompt = [int(token) for token in prompt]
        check_prompts(self._models[0], [prompt], 1)
        self._check_room(len(prompt), 1)
        self._turn += 1
        common = common_prefix(self.tokens, prompt[:-1])
        if common < len(self.tokens) and not self._shortens:
            common = 0
        self.cached = common
        return self._reading(prompt, common, self._turn)

    def write(
        self,
        key: Array | np.ndarray,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        stop_at_eos: bool = True,
    ) -> Iterator[Step]:
        """A reply to the prompt that was read, a step at a time.

        Args:
          key: names the random numbers; `generate` gives the same text with it.
          max_new_tokens: the longest reply.
          sampling: how to sample; greedy by default.
          stop_at_eos: whether the target's end tokens end a reply.

        Returns:
          A `Step` of host arrays after another; the reply gained `tokens[0, :count[0]]`. Whoever
          stops before it is done keeps what there is as the reply.

        Raises:
          ValueError: nothing was read, a parameter is out of its range, or there is no room.
        """
        if self._state is None:
            raise ValueError("there is no prompt to reply to; read one first.")
        self._check_room(len(self._tokens), max_new_tokens)
        sampling = Sampling() if sampling is None else sampling
        prompt, self._turn = self._tokens, self._turn + 1
        state = self._asked(self._state, prompt, key, max_new_tokens, sampling, stop_at_eos)
        bare = {"sampling": self._state.sampling, "counts": self._state.counts}
        return self._writing(state, bare, self._turn)

    def reply(
        self, key: Array | np.ndarray, prompt: Sequence[int], **options: Any
    ) -> Iterator[Step]:
        """Reads a prompt and writes a reply to it.

        Args:
          key: see `write`.
          prompt: see `read`.
          options: see `write`.

        Returns:
          What `write` gives.

        Raises:
          TypeError, ValueError: as `read` and `write`.
        """
        for _ in self.read(prompt):
            pass
        return self.write(key, **options)

    def _check_room(self, held: int, new_tokens: int) -> None:
        if new_tokens < 1:
            raise ValueError(f"max_new_tokens is {new_tokens}; it must be at least 1.")
        if held + new_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {held} tokens and {new_tokens} are asked for; together they "
                f"exceed the context of {self.max_model_len}."
            )

    def _reading(self, prompt: list[int], common: int, turn: int) -> Iterator[int]:
        if not common:
            self._state = None  # whose caches are let go of before there are others
            self._state, self._tokens = self._begun(prompt[0]), prompt[:1]
        elif common < len(self._tokens):
            at = self._put([common]), self._put([prompt[common - 1]])
            self._change(prompt[:common], shorten_jit, *at)
        while turn == self._turn and len(self._tokens) < len(prompt):
            left = len(prompt) - len(self._tokens)
            size = LARGE_CHUNK if left >= 2 * LARGE_CHUNK else CHUNK
            own = prompt[len(self._tokens) :][:size]
            self._change(self._tokens + own, extend_jit, *self._chunk(own, size))
            jax.block_until_ready(self._state)
            yield left - len(own)

    def _writing(self, state: DecodeState, bare: dict[str, Any], turn: int) -> Iterator[Step]:
        """Steps of a reply; what is kept of the state has `bare` instead of how it is sampled, so
        that the programs that read on are the same whatever that was.
        """
        done = False
        while turn == self._turn and not done:
            self._state = None
            state, gave = self._program(step_jit, self.rule, state)(*self._models, state)
            gave = jax.device_get(gave)
            self._tokens = self._tokens + gave.tokens[0, : gave.count[0]].tolist()
            self._state = unchecked(DecodeState, **{**vars(state), **bare})
            done = bool(gave.done.all())
            yield gave

    def _change(self, tokens: list[int], function: Any, *given: Any) -> None:
        """Lets a program take over the state, which holds `tokens` then.

        While it runs, and if it is interrupted, nothing is held.
        """
        run = self._program(function, self._state, *given)
        state, self._state = self._state, None
        self._state, self._tokens = run(*self._models, state, *given), tokens

    def _program(self, function: Any, *given: Any) -> Any:
        """A program, compiled when it is asked for first."""
        arrays = [jax.tree.structure(each) for each in given]
        sizes = [x.shape for x in given if isinstance(x, jax.Array)]
        called = (function, str(sizes), *arrays)
        if called not in self._programs:
            lowered = function.lower(*self._models, *given, layout=self._layout)
            self._programs[called] = lowered.compile()
        return self._programs[called]

    def _begun(self, first: int) -> DecodeState:
        return begin_jit(*self._models, self._put([first]), self._slots, self._layout)

    def _asked(
        self,
        state: DecodeState,
        prompt: list[int],
        key: Array | np.ndarray,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop_at_eos: bool,
    ) -> DecodeState:
        """The state, asked to continue its prompt."""
        target, sampling = self._models[0], Sampling() if sampling is None else sampling
        asked = Rows(
            prompt=jnp.zeros((1, 1), jnp.int32),
            length=jnp.zeros(1, jnp.int32),
            key=row_keys(key, 1),
            sampling=sampling.rows(1),
            limits=limits_of(target, 1, max_new_tokens, stop_at_eos),
            counts=counts_of(sampling, [prompt], target.config.vocab_size),
        )
        asked = laid_out(self._layout, asked, ROWS)
        own = {
            "key": asked.key, "sampling": asked.sampling, "limits": asked.limits,
            "counts": asked.counts, "made": asked.length, "done": asked.length > 0,
        }  # fmt: skip
        return unchecked(DecodeState, **{**vars(state), **own})

    def _chunk(self, tokens: list[int], size: int) -> tuple[Array, Array]:
        """Tokens for a pass that takes `size` of them, and how many they are."""
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        return self._put(padded), self._put([len(tokens)])

    def _put(self, values: Any) -> Array:
        return laid_out(self._layout, jnp.asarray(values, jnp.int32), P())
