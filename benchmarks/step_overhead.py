"""What a step costs beside its passes: the loop, against the same loop of its passes only.

  python -m benchmarks.step_overhead chain 0.8
  python -m benchmarks.step_overhead specexec 0

In the second loop the drafter runs as many passes of as many columns as the real one and names
fixed tokens, three nodes are accepted whatever the target says, and no keys are kept. A little of
the rest stays in it (emitting, counting, masks), so that the share it gives is the least. Both
loops take turns in one process; the time of a step leaves out the first, so that no prefill is
counted. A trace (`specjax bench --profile`) says what the rest consists of, and makes it far too
dear.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.base.pytree import pytree, replace, static
from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import Pair, load_pair
from specjax.decoding import stepping
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import Request, prepare
from specjax.draft import Drafter
from specjax.draft.best_first import BestFirstDrafter, ModelSource
from specjax.draft.reading import ModelState, prefill
from specjax.draft.static import ExpansionDrafter
from specjax.measure import timing
from specjax.methods import registry
from specjax.models.transformer import Model, trunk, unembed
from specjax.trees.accepted import Accepted
from specjax.trees.construction import Construction
from specjax.trees.tree import NO_DRAFTER, NO_PARENT, TokenTree

ROUNDS = 25
KEPT = 3


@pytree
class PassesOnly(Drafter):
    """A drafter that only runs passes, and names fixed tokens.

    Either passes of `columns` below `blocks` columns, or `rounds` (a mean) of `growth`: so many
    columns below so many.
    """

    model: Model
    rounds: jax.Array
    columns: tuple[int, ...] = static()
    blocks: tuple[int, ...] = static()
    growth: tuple[int, int] = static()
    caught_up: int = static()
    like: Any = static()

    @property
    def window(self) -> int:
        """That of the real drafter."""
        return self.like[0]

    @property
    def num_slots(self) -> int:
        """Those of the real drafter."""
        return self.like[1]

    @property
    def construction(self) -> Construction:
        """That of the real drafter."""
        return self.like[2]

    @property
    def vocab_size(self) -> int:
        """Of the draft."""
        return self.model.config.vocab_size

    def init(self, prompt, length, slots, seen):
        """Reads the prompts."""
        return prefill(self.model, prompt, length, slots, seen.hidden_states, ())

    def propose(self, key, position, state, last, sampling):
        """Runs the passes of a tree."""
        del key, sampling
        token = last + held_back(state.logits)
        for columns, block in zip(self.columns, self.blocks, strict=True):
            token = self._pass(state, token, columns, block)
        if not self.columns:  # a loop, as growth is one
            more = (position[0] % 128) < 128 * (self.rounds % 1)  # as good as drawn
            count = jnp.floor(self.rounds).astype(jnp.int32) + more
            beams, budget = self.growth
            token = lax.fori_loop(0, count, lambda _, t: self._pass(state, t, beams, budget), token)
        return fixed_tree(token, self.num_slots, self.window, self.vocab_size), state

    def _pass(self, state: ModelState, token, columns: int, block: int):
        """One pass; its token depends on its logits, but is always the one given."""
        config, cache = self.model.config, state.cache
        none = jnp.zeros((1, config.num_kv_heads, block, config.head_dim), cache.keys[0].dtype)
        earlier = tuple((none, none) for _ in self.model.layers) if block else None
        seen = np.concatenate([np.ones((1, columns, block), bool), np.tri(columns)[None] > 0], 2)
        tokens = jnp.broadcast_to(token[:, None], (1, columns))
        positions = cache.length[:, None] + jnp.arange(columns)
        x = trunk(self.model, tokens, positions, cache, jnp.asarray(seen), earlier).x
        return token + held_back(unembed(self.model, x).T)

    def commit(self, state, step):
        """Runs the pass that catches up."""
        tokens, columns = step.tokens[:, : self.caught_up], self.caught_up
        seen = jnp.asarray(np.tri(columns)[None] > 0)
        positions = state.cache.length[:, None] + jnp.arange(columns)
        x = trunk(self.model, tokens, positions, state.cache, seen).x
        length = state.cache.length + step.count
        return ModelState(replace(state.cache, length=length), unembed(self.model, x[:, :1]).T)


def held_back(logits: jax.Array) -> jax.Array:
    """0, which the compiler cannot know before it has the logits of a row."""
    return (logits.reshape(logits.shape[0], -1)[:1, 0] > 1e30).astype(jnp.int32)


def fixed_tree(token, slots: int, window: int, vocabulary: int) -> TokenTree:
    """A path to the depth of the window, and other children of the root."""
    number = np.arange(slots)
    parents = np.where(number < window, number - 1, 0)[None]
    depth = np.where(number < window, number, 1)[None]
    at_root = number[None] == 0
    return TokenTree(
        tokens=jnp.broadcast_to(token[:, None], (1, slots)),
        parents=jnp.asarray(np.where(at_root, NO_PARENT, parents), jnp.int32),
        depth=jnp.asarray(depth, jnp.int32),
        valid=jnp.ones((1, slots), bool),
        drafter=jnp.asarray(np.where(at_root, NO_DRAFTER, 0), jnp.int32),
        chance=jnp.ones((1, slots)),
        trial_node=jnp.asarray(number[None, 1:], jnp.int32),
        trial_row=jnp.zeros((1, slots - 1), jnp.int32),
        q=jnp.zeros((1, 0, vocabulary)),
        certain=jnp.ones(1, bool),
    )


def passes_of(drafter: Drafter, rounds: float) -> PassesOnly:
    """The passes of a real drafter; `rounds` is the mean number of a best-first one's."""
    like = drafter.window, drafter.num_slots, drafter.construction
    if isinstance(drafter, ExpansionDrafter):
        (model,), (shape,) = drafter.groups, drafter.shapes
        levels = [shape.expanded(level)[0].size for level in range(1, shape.depth)]
        blocks = [sum(levels[:level]) for level in range(len(levels))]
        none = jnp.float32(0)
        return PassesOnly(model, none, tuple(levels), tuple(blocks), (0, 0), drafter.window, like)
    assert isinstance(drafter, BestFirstDrafter)
    assert drafter.table is None
    growth = min(drafter.growth.beams, drafter.growth.budget), drafter.growth.budget
    return PassesOnly(drafter.model, jnp.float32(rounds), (), (), growth, 2, like)


@contextmanager
def passes_only() -> Iterator[None]:
    """A step that decides nothing and keeps none of the target's keys."""

    def verify_tree(rule, state, tree, logits, window, *_):
        del rule, state
        along = jnp.arange(window, dtype=jnp.int32)[None]
        kept = Accepted(
            path=jnp.where(along < KEPT, along, 0),
            count=KEPT + held_back(logits),
            token=tree.tokens[:, 1],
        )
        return kept, None

    def commit(state, new, draft, step):
        count = step.count + held_back(new[-1][0])
        cache = replace(state.cache, length=state.cache.length + count)
        made = state.made + step.count
        return replace(state, cache=cache, draft=draft, made=made, done=step.done)

    kept = stepping.verify_tree, stepping.commit
    stepping.verify_tree, stepping.commit = verify_tree, commit
    try:
        yield
    finally:
        stepping.verify_tree, stepping.commit = kept


def loop_of(request: Request) -> Callable[[bool], tuple]:
    """Runs a compiled loop, whole or of one token: its steps and seconds."""
    target, drafter, rows, rule, outputs, slots, _ = request
    undecorated: Any = generate_jit
    afresh = jax.jit(lambda *a: undecorated.__wrapped__(*a, rule, outputs, slots))
    compiled = afresh.lower(target, drafter, rows).compile()
    least = jnp.ones_like(rows.limits.max_new_tokens)
    one = replace(rows, limits=replace(rows.limits, max_new_tokens=least))

    def timed(first: bool) -> tuple[int, float]:
        made, seconds = timing.clocked(lambda: compiled(target, drafter, one if first else rows))
        return int(made.steps.max()), seconds

    return timed


def mean_rounds(request: Request) -> float:
    """How many passes the growth of a tree takes, on a request's own text."""
    counted, real = [], ModelSource.after

    def after(self, nodes, scored, carry):
        jax.debug.callback(lambda _: counted.append(1), scored.score[0, 0])
        return real(self, nodes, scored, carry)

    ModelSource.after = after
    try:
        steps, _ = loop_of(request)(False)
    finally:
        ModelSource.after = real
    jax.effects_barrier()
    return len(counted) / steps


def overhead(
    pair: Pair, method: str, temperature: float, prompt: str
) -> tuple[float, float, float]:
    """Seconds of a step and of its passes alone (medians), and the median share of what is not."""
    drafter = registry.build(registry.setting_of(method), pair)
    tokens = pair.tokenizer(prompt).input_ids
    asked = prepare(
        jax.random.key(0), pair.target, drafter, [tokens], max_new_tokens=128,
        sampling=Sampling(temperature), stop_at_eos=False,
    )  # fmt: skip
    best_first = isinstance(drafter, BestFirstDrafter)
    rounds = mean_rounds(asked) if best_first else 0.0
    whole = loop_of(asked)
    with passes_only():
        alone = loop_of(asked._replace(drafter=passes_of(drafter, rounds)))

    def step(run: Callable[[bool], tuple[int, float]]) -> float:
        (steps, seconds), (first, begun) = run(False), run(True)
        return (seconds - begun) / (steps - first)

    times = [(step(whole), step(alone)) for _ in range(1 + ROUNDS)][1:]
    share = statistics.median((w - a) / w for w, a in times)
    return statistics.median(w for w, _ in times), statistics.median(a for _, a in times), share


def main() -> None:
    """Measures, and prints it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    parser.add_argument("method", choices=("chain", "specexec"))
    parser.add_argument("temperature", type=float)
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    options = parser.parse_args()
    pair = load_pair("bundled", None, dtype="float32")
    whole, alone, share = overhead(pair, options.method, options.temperature, options.prompt)
    print(f"a step {whole * 1e6:.0f} µs, its passes alone {alone * 1e6:.0f} µs, beside {share:.1%}")


if __name__ == "__main__":
    main()
