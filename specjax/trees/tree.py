"""Token trees: a static number of slots, their topology as data."""

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from specjax.base.loops import repeated
from specjax.base.pytree import pytree, replace
from specjax.trees.widths import Widths, canonical, counts, widest

NO_PARENT = -1
NO_DRAFTER = -1


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Static expansion: how many children every node has, level by level.

    An entry of `widths` is a number for every node of the level above, as in SpecInfer's ⟨k1..km⟩
    (arXiv 2305.09781, section 3), or a tuple of numbers, one a node (0: none), as in Sequoia's
    trees (2402.12374). A tuple of equal numbers is kept as one, so that equal trees are equal. All
    ones is a chain. Nodes are numbered level by level, the children of a node side by side; the
    root is not counted. A node is expanded if it has children.
    """

    widths: Widths

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", canonical(self.widths))

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return len(self.widths)

    @property
    def levels(self) -> tuple[int, ...]:
        """Nodes of each level, the root's included: `(1, k1, k1·k2, ...)` of ⟨k1..km⟩."""
        return (1, *(sum(own) for own in counts(self.widths)))

    @property
    def num_nodes(self) -> int:
        """Nodes below the root."""
        return sum(self.levels[1:])

    @property
    def widest(self) -> int:
        """The most children of a node."""
        return widest(self.widths)

    def expanded(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        """Which nodes of a level (0: the root's) have children, by place, and how many; int [E]."""
        own = np.asarray(counts(self.widths)[level])
        places = np.flatnonzero(own)
        return places, own[places]

    def parents(self) -> np.ndarray:
        """For each node its parent's number, `NO_PARENT` for children of the root; int32 [M]."""
        own = self._children()
        return np.repeat(np.arange(own.size) + NO_PARENT, own).astype(np.int32)

    def ranks(self) -> np.ndarray:
        """For each node its place among its siblings, 0 for the first; int32 [M]."""
        return np.concatenate([np.arange(own) for own in self._children()]).astype(np.int32)

    def depths(self) -> np.ndarray:
        """For each node its depth, 1 for children of the root; int32 [M]."""
        return np.repeat(np.arange(1, self.depth + 1), self.levels[1:]).astype(np.int32)

    def distributions(self) -> np.ndarray:
        """For each node which expanded node's distribution it was drawn from (0: the root's); int32
        [M].
        """
        own = self._children()
        return np.repeat(np.arange(self.num_distributions), own[own > 0]).astype(np.int32)

    @property
    def num_distributions(self) -> int:
        """Number of expanded nodes, the root included."""
        return int(np.count_nonzero(self._children()))

    def _children(self) -> np.ndarray:
        """How many children the root and every node but those of the last level have."""
        return np.concatenate(counts(self.widths))


@pytree
class Draws:
    """What drafters drew below one root, before merging: draw `m` is a token under a draw.

    Parents come before children. `row` is the row of `q` that a draw was taken from;
    `certain` says that every draw was chosen, not sampled, so that its distribution is one-hot at
    its own token (`q` is then only the draft's opinion of it).
    """

    tokens: Int32[Array, "*B M"]
    parents: Int32[Array, "*B M"]
    depth: Int32[Array, "*B M"]
    drafter: Int32[Array, "*B M"]
    row: Int32[Array, "*B M"]
    q: Float[Array, "*B R V"]
    certain: Bool[Array, "*B"]


@pytree
class TokenTree:
    """Candidate continuations of a root token, equal paths merged into one node.

    Node 0 is the root, with parent `NO_PARENT` and drafter `NO_DRAFTER`; a parent's number is
    below its child's. Slots that are not `valid` hold nothing. Every draw stays a trial of its
    own, in drawing order: `trial_node` is the node it names, `trial_row` its row of `q`. A node
    drawn twice has two trials, which multi-step sampling needs (SpecInfer, Algorithm 2). A trial
    that names the root is none. `chance` is the drafter's probability of a node below its parent.
    """

    tokens: Int32[Array, "*B N"]
    parents: Int32[Array, "*B N"]
    depth: Int32[Array, "*B N"]
    valid: Bool[Array, "*B N"]
    drafter: Int32[Array, "*B N"]
    chance: Float[Array, "*B N"]
    trial_node: Int32[Array, "*B M"]
    trial_row: Int32[Array, "*B M"]
    q: Float[Array, "*B R V"]
    certain: Bool[Array, "*B"]

    @property
    def num_slots(self) -> int:
        """Static number of node slots, the root's included."""
        return self.tokens.shape[-1]

    @property
    def attention_mask(self) -> Bool[Array, "*B N N"]:
        """The tree attention mask (SpecInfer, section 4.2): a node sees its ancestors and itself.

        An empty slot sees only itself and the root, so that no softmax runs over nothing.
        """
        own = jnp.eye(self.num_slots, dtype=bool)
        above = jnp.maximum(self.parents, 0)

        def twice_as_far(at: tuple[Array, Array]) -> tuple[Array, Array]:
            seen, above = at
            seen = seen | jnp.take_along_axis(seen, above[..., None], -2)
            return seen, jnp.take_along_axis(above, above, -1)

        none = jnp.broadcast_to(own, (*self.parents.shape, self.num_slots))
        most = (self.num_slots - 1).bit_length()  # of the deepest tree there can be
        return repeated(twice_as_far, (none, above), most, 32 - lax.clz(self.depth.max()))[0]

    def trial_q(self, trial: Int32[Array, ""]) -> Float[Array, " V"]:
        """The distribution that trial number `trial` of one row was really drawn from."""
        token = self.tokens[self.trial_node[trial]]
        one_hot = (jnp.arange(self.q.shape[-1]) == token).astype(self.q.dtype)
        return jnp.where(self.certain, one_hot, self.q[self.trial_row[trial]])


def root_only(last: Int32[Array, " B"], vocabulary: int) -> TokenTree:
    """Trees of nothing but their roots: plain decoding."""
    one = jnp.zeros((last.shape[0], 1), jnp.int32)
    none = jnp.zeros((last.shape[0], 0), jnp.int32)
    return TokenTree(
        tokens=last[:, None],
        parents=one + NO_PARENT,
        depth=one,
        valid=one == 0,
        drafter=one + NO_DRAFTER,
        chance=jnp.ones((last.shape[0], 1)),
        trial_node=none,
        trial_row=none,
        q=jnp.zeros((last.shape[0], 0, vocabulary)),
        certain=jnp.zeros(last.shape[0], bool),
    )


def shallower(tree: TokenTree, room: Int32[Array, " B"]) -> TokenTree:
    """Trees without their nodes at depth `room` and below, which a context has no position for."""
    return only(tree, tree.depth < room[:, None])


def only(tree: TokenTree, keep: Bool[Array, "B N"]) -> TokenTree:
    """Trees without nodes that are not to be kept, nor the trials that name them.

    What is kept of chosen trees may be any part that holds its nodes' ancestors; of drawn ones a
    part that was decided before anything was drawn, else trials would be missing.
    """
    valid = tree.valid & keep
    there = jnp.take_along_axis(valid, tree.trial_node, axis=1)
    return replace(tree, valid=valid, trial_node=jnp.where(there, tree.trial_node, 0))


def chosen(
    tokens: Int32[Array, "B N"],
    parents: Int32[Array, "B N"],
    depth: Int32[Array, "B N"],
    valid: Bool[Array, "B N"],
    drafter: Int32[Array, "B N"],
    chance: Float[Array, "B N"],
    vocabulary: int,
) -> TokenTree:
    """Trees of chosen nodes, each a trial whose distribution is one-hot at its own token.

    Slots that are not `valid` are emptied; the root's drafter and parent are set.
    """
    rows, slots = tokens.shape
    number = jnp.arange(slots, dtype=jnp.int32)
    at_root = number == 0

    def clean(values: Array, root: int) -> Array:
        return jnp.where(at_root, jnp.asarray(root, values.dtype), jnp.where(valid, values, 0))

    return TokenTree(
        tokens=jnp.where(valid, tokens, 0),
        parents=clean(parents, NO_PARENT),
        depth=clean(depth, 0),
        valid=valid,
        drafter=clean(drafter, NO_DRAFTER),
        chance=clean(chance, 1),
        trial_node=jnp.where(valid, number, 0)[:, 1:],
        trial_row=jnp.zeros((rows, slots - 1), jnp.int32),
        q=jnp.zeros((rows, 0, vocabulary)),
        certain=jnp.ones(rows, bool),
    )


def merge(draws: Draws, root: Int32[Array, ""], depth: int) -> TokenTree:
    """The tree whose set of paths is exactly that of `draws`, for one row.

    SpecInfer, definition 3.2, with multiplicities kept as trials. Nodes are ordered by depth,
    then by their first draw; `depth` is the static number of levels.
    """
    count = draws.tokens.shape[0]
    index = jnp.arange(count)
    at_root = draws.parents == NO_PARENT
    alike = (draws.tokens[:, None] == draws.tokens) & (draws.depth[:, None] == draws.depth)
    same = alike & at_root[:, None] & at_root
    for _ in range(depth - 1):
        above = same[draws.parents[:, None], draws.parents] & ~at_root[:, None] & ~at_root
        same = alike & (above | (at_root[:, None] & at_root))
    first = jnp.argmax(same, axis=1)
    kept = first == index
    order = jnp.argsort(jnp.where(kept, draws.depth * count + index, count * (depth + 1)))
    node = jnp.zeros(count, jnp.int32).at[order].set(index.astype(jnp.int32) + 1)[first]
    valid = jnp.concatenate([jnp.ones(1, bool), kept[order]])
    parent = jnp.where(at_root, 0, node[draws.parents])
    chance = draws.q[draws.row, draws.tokens]

    def slots(values: Array, at_top: Array | int) -> Array:
        rest = jnp.where(valid[1:], values[order], 0)
        return jnp.concatenate([jnp.asarray(at_top, jnp.int32)[None], rest.astype(jnp.int32)])

    return TokenTree(
        tokens=slots(draws.tokens, root),
        parents=slots(parent, NO_PARENT),
        depth=slots(draws.depth, 0),
        valid=valid,
        drafter=slots(draws.drafter, NO_DRAFTER),
        chance=jnp.concatenate([jnp.ones(1, chance.dtype), jnp.where(valid[1:], chance[order], 0)]),
        trial_node=node,
        trial_row=draws.row,
        q=draws.q,
        certain=draws.certain,
    )


def unmerged(draws: Draws, root: Int32[Array, ""]) -> TokenTree:
    """What `merge` gives where no two draws of one parent can be equal and levels come in order.

    A chain, or children drawn without replacement.
    """
    count = draws.tokens.shape[0]
    node = jnp.arange(1, count + 1, dtype=jnp.int32)

    def slots(values: Array, at_top: Array | int) -> Array:
        return jnp.concatenate([jnp.asarray(at_top, values.dtype)[None], values])

    return TokenTree(
        tokens=slots(draws.tokens, root),
        parents=slots(draws.parents + 1, NO_PARENT),
        depth=slots(draws.depth, 0),
        valid=jnp.ones(count + 1, bool),
        drafter=slots(draws.drafter, NO_DRAFTER),
        chance=slots(draws.q[draws.row, draws.tokens], 1),
        trial_node=node,
        trial_row=draws.row,
        q=draws.q,
        certain=draws.certain,
    )


def draw_tree(
    tree: TokenTree,
    text: Callable[[int], str],
    names: Callable[[int], str] | None = None,
    accepted: Collection[int] = (),
) -> str:
    """One row's tree as text, a line a node: token, the draft's probability, who proposed it.

    The nodes that were `accepted` end in a star.
    """
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    valid, drafter = np.asarray(tree.valid), np.asarray(tree.drafter)
    name = names or (lambda number: f"draft {number}")
    lines = [repr(text(int(tokens[0])))]

    def below(node: int, indent: str) -> None:
        children = [c for c in range(1, len(tokens)) if valid[c] and parents[c] == node]
        for child in children:
            last = child == children[-1]
            probability = float(tree.chance[child])
            proposer = name(int(drafter[child]))
            lines.append(
                f"{indent}{'└─' if last else '├─'} {text(int(tokens[child]))!r} "
                f"{probability:.2f} {proposer}{' *' if child in accepted else ''}"
            )
            below(child, indent + ("   " if last else "│  "))

    below(0, "")
    return "\n".join(lines)


def take_row(tree: TokenTree, row: int) -> TokenTree:
    """Row `row` of a batch of trees."""
    return jax.tree.map(lambda leaf: leaf[row], tree)
