"""Guesses for a draft's own tree (Staged speculative decoding, arXiv 2308.04623)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.base.pytree import pytree, static
from specjax.draft.growth import Nodes, ScoredNodes, contexts, roots
from specjax.draft.ngram import NO_TOKEN, NGram, successors
from specjax.trees.tree import TokenTree, TreeShape


@pytree
class TableStage:
    """What an n-gram model of the draft's output expects below the nodes that a round expands.

    A tree of this shape below each of the `fan` likeliest ones.
    """

    table: NGram
    shape: TreeShape = static()
    fan: int = static(default=1)

    def __post_init__(self) -> None:
        if self.shape.widest > self.table.width:
            raise ValueError(
                f"a node of the stage's tree has {self.shape.widest} children; "
                f"the table lists {self.table.width} successors."
            )
        if self.fan < 1:
            raise ValueError(f"fan is {self.fan}; it must be at least 1.")

    def guess(self, nodes: Nodes, scored: ScoredNodes, last: Int32[Array, " B"]) -> ScoredNodes:
        """The nodes of a round with guesses; `last` are the tokens of the roots."""
        rows, count = scored.slots.shape
        fan = min(self.fan, count)
        before, token = contexts(nodes, scored.slots[:, :fan], last, last)
        before, token, above = before[..., None], token[..., None], np.arange(fan)[:, None]
        made, hung = [], []
        for level in range(self.shape.depth):
            places, children = self.shape.expanded(level)
            parents = np.repeat(places, children)
            ranks = np.concatenate([np.arange(own) for own in children])
            likely = successors(self.table, before, token)[1][:, :, parents, ranks]
            made.append(likely.reshape(rows, -1))
            hung.append(above[:, parents].ravel())
            above = count + np.arange(fan * parents.size).reshape(fan, parents.size)
            count += fan * parents.size
            before, token = token[:, :, parents], likely
        every = jnp.asarray(np.concatenate(hung), jnp.int32)
        guesses = jnp.concatenate(made, axis=1)
        above = jnp.broadcast_to(every, guesses.shape)
        return ScoredNodes(scored.slots, scored.score, guesses, above, self.shape.depth)


def below_roots(tree: TokenTree, levels: int) -> ScoredNodes:
    """The roots, and the nodes of a tree of so many levels as guesses below them."""
    root = roots(tree.tokens.shape[0])
    guesses = jnp.where(tree.valid, tree.tokens, NO_TOKEN)[:, 1:]
    return ScoredNodes(root.slots, root.score, guesses, tree.parents[:, 1:], levels)
