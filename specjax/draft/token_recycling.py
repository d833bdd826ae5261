"""Token Recycling (arXiv 2408.08696): trees from what the target thought likely before."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.axes import Key
from specjax.base.pytree import pytree, static
from specjax.base.sampling import Sampling
from specjax.draft.drafter import Drafter, Seen, Step, Wants
from specjax.draft.ngram import NO_TOKEN
from specjax.trees.construction import TOP_K, Construction
from specjax.trees.tree import NO_PARENT, TokenTree, TreeShape, chosen


@pytree
class RecycleDrafter(Drafter):
    """A static tree whose children are read from a table of successors, a row's own.

    The table holds for every token the target's likeliest successors where it last saw that token,
    in the prompt or on any node of a tree, accepted or not. `chance` is how likely the successor
    of each rank is to be the right one.
    """

    chance: Float[Array, " k"]
    shape: TreeShape = static()
    vocabulary: int = static()

    @property
    def window(self) -> int:
        """Depth of the tree plus 1."""
        return self.shape.depth + 1

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.vocabulary

    @property
    def num_slots(self) -> int:
        """Node slots, the root's included."""
        return self.shape.num_nodes + 1

    @property
    def wants(self) -> Wants:
        """As many successors as are kept of a token."""
        return Wants(top_tokens=self.shape.widest)

    @property
    def construction(self) -> Construction:
        """Chosen nodes."""
        return Construction(TOP_K, chain=self.shape.widest == 1)

    @property
    def takes_nodes(self) -> bool:
        """Its state is a table of what was seen; a chain stays one."""
        return self.shape.widest > 1

    def init(
        self,
        prompt: Int32[Array, "B T"],
        length: Int32[Array, " B"],
        slots: int,
        seen: Seen,
    ) -> Int32[Array, "B V k"]:
        """The table after the prompts."""
        del slots
        shape = (prompt.shape[0], self.vocabulary, self.shape.widest)
        there = jnp.arange(prompt.shape[1]) < length[:, None]
        return record(jnp.full(shape, NO_TOKEN, jnp.int32), prompt, there, seen.top_tokens)

    def propose(
        self,
        key: Key[Array, " B"],
        position: Int32[Array, " B"],
        state: Int32[Array, "B V k"],
        last: Int32[Array, " B"],
        sampling: Sampling,
    ) -> tuple[TokenTree, Int32[Array, "B V k"]]:
        """The tree that the table gives; nothing of it is random."""
        del key, position, sampling
        row = jnp.arange(last.shape[0])[:, None]
        parents, ranks = self.shape.parents() + 1, self.shape.ranks()
        tokens = last[:, None]
        for level in np.split(np.arange(parents.size), np.cumsum(self.shape.levels[1:-1])):
            above = tokens[:, parents[level]]
            found = state[row, jnp.maximum(above, 0), ranks[level]]
            tokens = jnp.concatenate([tokens, jnp.where(above < 0, NO_TOKEN, found)], axis=1)
        valid = tokens >= 0

        def every(root: int, values: Array | np.ndarray) -> Array:
            kept = jnp.asarray(values)
            both = jnp.concatenate([jnp.full(1, root, kept.dtype), kept])
            return jnp.broadcast_to(both, tokens.shape)

        tree = chosen(
            tokens=tokens,
            parents=every(NO_PARENT, parents),
            depth=every(0, self.shape.depths()),
            valid=valid,
            drafter=jnp.zeros_like(tokens),
            chance=every(1, self.chance[ranks]),
            vocabulary=self.vocabulary,
        )
        return tree, state

    def commit(self, state: Int32[Array, "B V k"], step: Step) -> Int32[Array, "B V k"]:
        """The table with what the target thought likely after every node, accepted or not."""
        there = step.tree.valid & (step.count > 0)[:, None]
        return record(state, step.tree.tokens, there, step.seen.top_tokens)

    def truncate(
        self, state: Int32[Array, "B V k"], length: Int32[Array, " B"]
    ) -> Int32[Array, "B V k"]:
        """The table as it is: what it learned of longer texts does no harm."""
        del length
        return state


def record(
    table: Int32[Array, "B V k"],
    tokens: Int32[Array, "B T"],
    there: Bool[Array, "B T"],
    top_tokens: Int32[Array, "B T k"],
) -> Int32[Array, "B V k"]:
    """The table with the successors of `tokens`; of a token's several places the last one counts.

    A scatter with equal indices has no defined winner, so the last place is found first.
    """
    rows, count = tokens.shape
    row, vocabulary = jnp.arange(rows)[:, None], table.shape[1]
    place = jnp.arange(1, count + 1, dtype=jnp.int32)
    at = jnp.where(there, tokens, vocabulary)
    latest = jnp.zeros((rows, vocabulary), jnp.int32).at[row, at].max(place, mode="drop")
    wins = there & (jnp.take_along_axis(latest, tokens, axis=1) == place)
    return table.at[row, jnp.where(wins, tokens, vocabulary)].set(top_tokens, mode="drop")
