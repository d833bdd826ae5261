"""Every outcome of a speculative step, walked through specjax's own functions, in float64.

Contexts (the tokens since the root) are numbered in product order, shorter ones first: that of
`context + (token,)` is `context * V + token + 1`. A *flow* is the probability mass of the step's
outcomes: entry `[context, token]` is that of accepting exactly `context` and emitting `token`
after it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees.tree import NO_PARENT, Draws, TokenTree, TreeShape, merge
from specjax.verify import rules, token_wise, traversal
from tests import oracles

QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # half the time on CPU, the same values
_CHUNK = 1024  # rows of one compiled enumeration
_NODE_ROWS = 32  # the same, for the trees of one node


def table(distributions: dict[tuple[int, ...], oracles.Probs]) -> np.ndarray:
    """Distributions by context as an array `[contexts, V]`."""
    return np.array([[float(x) for x in probs] for probs in distributions.values()])


@dataclasses.dataclass(frozen=True)
class Case:
    """A target distribution, the drafters' distributions (tables by context) and the tree they
    expand, or each.

    Siblings of one drafter are independent draws, or `distinct` ones.
    """

    p: np.ndarray
    drafters: tuple[np.ndarray, ...]
    shape: TreeShape | tuple[TreeShape, ...]
    distinct: bool = False

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        shape = self.shape
        return shape if isinstance(shape, tuple) else (shape,) * len(self.drafters)

    @property
    def depth(self) -> int:
        return max(tree.depth for tree in self.trees)

    @property
    def vocabulary(self) -> int:
        return self.p.shape[1]

    @property
    def num_draws(self) -> int:
        return sum(tree.num_nodes for tree in self.trees)

    def parents(self) -> np.ndarray:
        found, start = [], 0
        for tree in self.trees:
            own = tree.parents()
            found.append(np.where(own < 0, NO_PARENT, own + start))
            start += tree.num_nodes
        return np.concatenate(found)

    def proposer(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.trees)), [tree.num_nodes for tree in self.trees])

    def depths(self) -> np.ndarray:
        return np.concatenate([tree.depths() for tree in self.trees])

    def contexts(self, tokens: np.ndarray) -> np.ndarray:
        """`[A, M]`: the number of the context that each draw ends."""
        found = np.zeros_like(tokens)
        for m, parent in enumerate(self.parents()):
            above = 0 if parent < 0 else found[:, parent]
            found[:, m] = above * self.vocabulary + tokens[:, m] + 1
        return found

    def draws(self, tokens: np.ndarray, certain: bool = False) -> Draws:
        """The draws `tokens` `[A, M]`, each naming its drafter's distribution after its own
        context.
        """
        rows, ended = len(tokens), self.contexts(tokens)
        distributions = []
        for d, q in enumerate(self.drafters):
            parents = self.trees[d].parents()
            mine = ended[:, self.proposer() == d][:, np.unique(parents[parents >= 0])]
            distributions.append(
                np.concatenate([np.broadcast_to(q[0], (rows, 1, q.shape[1])), q[mine]], 1)
            )
        first = np.cumsum([0, *(tree.num_distributions for tree in self.trees[:-1])])
        row = np.concatenate(
            [tree.distributions() + at for tree, at in zip(self.trees, first, strict=True)]
        )
        same = {"parents": self.parents(), "depth": self.depths(), "drafter": self.proposer()}
        same = {n: np.broadcast_to(v, tokens.shape) for n, v in (same | {"row": row}).items()}
        return Draws(
            tokens=jnp.asarray(tokens, jnp.int32),
            q=jnp.asarray(np.concatenate(distributions, axis=1)),
            certain=jnp.full(rows, certain),
            **{name: jnp.asarray(v, jnp.int32) for name, v in same.items()},
        )

    def weight(self, tokens: np.ndarray) -> np.ndarray:
        """The probability of each row of draws."""
        ended, parents, proposer = self.contexts(tokens), self.parents(), self.proposer()
        result = np.ones(len(tokens))
        for m, (parent, d) in enumerate(zip(parents, proposer, strict=True)):
            context = np.zeros(len(tokens), int) if parent < 0 else ended[:, parent]
            probs = self.drafters[d][context].copy()
            if self.distinct:
                gone = np.zeros(probs.shape, bool)
                for n in np.flatnonzero((parents[:m] == parent) & (proposer[:m] == d)):
                    probs[np.arange(len(probs)), tokens[:, n]] = 0
                    gone[np.arange(len(probs)), tokens[:, n]] = True
                probs = np.where(probs.any(axis=1, keepdims=True), probs, first(~gone))
                probs /= probs.sum(axis=1, keepdims=True)
            result = result * probs[np.arange(len(probs)), tokens[:, m]]
        return result

    def every_draw(self) -> np.ndarray:
        """All joint draws `[A, M]` of any probability."""
        choices = itertools.product(range(self.vocabulary), repeat=self.num_draws)
        tokens = np.array(list(choices))
        return tokens[self.weight(tokens) > 0] if self.distinct else tokens


def first(which: np.ndarray) -> np.ndarray:
    """One-hot at each row's first token of `which`: what comes when nothing can be drawn."""
    return np.eye(which.shape[1])[which.argmax(axis=1)]


def unchanged(tree: TokenTree) -> TokenTree:
    return tree


def node_contexts(tree: TokenTree) -> jax.Array:
    """The number of each node's context; that of the root is 0."""
    size = tree.q.shape[-1]

    def one(node, found):
        return found.at[node].set(found[tree.parents[node]] * size + tree.tokens[node] + 1)

    zeros = jnp.zeros(tree.num_slots, jnp.int32)
    return jax.lax.fori_loop(1, tree.num_slots, one, zeros)


TRIAL_PROBS = {
    rules.MULTI_STEP: TokenTree.trial_q,
    rules.RECURSIVE: token_wise.without_earlier,
    rules.ONE_HOT: token_wise.own_token,
}
"""The distribution by which each token-wise rule tries a child (`test_token_wise` holds their
decisions against it)."""
FLOW_OPTIONS = ("depth", "rule", "trial_probs", "alter")


@partial(jax.jit, static_argnames=FLOW_OPTIONS, compiler_options=QUICK_COMPILE)
def walk_flow(
    draws: Draws,
    p: jax.Array,
    depth: int,
    rule: Callable = token_wise.multi_step,
    trial_probs: token_wise.TrialProbs = TokenTree.trial_q,
    alter: Callable[[TokenTree], TokenTree] = unchanged,
) -> jax.Array:
    """Flows `[A, contexts, V]` of the token-wise walk, tree by tree.

    Mass goes down each merged tree: at a node its trials are visited by number, each takes
    `accept` of the mass that is left and hands `residual` on; a child starts anew from p.
    """

    def one(draw: Draws) -> jax.Array:
        tree = alter(merge(draw, jnp.int32(0), depth))
        contexts, parent = node_contexts(tree), tree.parents[tree.trial_node]

        def at_node(node, carry):
            reached, flow = carry

            def at_trial(state, trial):
                probs, mass, reached = state
                child, here = tree.trial_node[trial], parent[trial] == node
                tested = rule(probs, trial_probs(tree, trial), tree.tokens[child])
                passed = here & (tested.accept > 0)  # a uniform is never below NaN
                taken = mass * jnp.where(passed, jnp.minimum(tested.accept, 1), 0)
                probs = jnp.where(here, tested.residual, probs)
                return (probs, mass - taken, reached.at[child].add(taken)), None

            start = (p[contexts[node]], reached[node], reached)
            trials = jnp.arange(parent.shape[0], dtype=jnp.int32)
            (probs, mass, reached), _ = jax.lax.scan(at_trial, start, trials)
            return reached, flow.at[contexts[node]].add(mass * probs)

        reached = jnp.zeros(tree.num_slots).at[0].set(1.0)
        return jax.lax.fori_loop(0, tree.num_slots, at_node, (reached, jnp.zeros_like(p)))[1]

    return jax.vmap(one)(draws)


@partial(jax.jit, static_argnames=("depth", "alter"), compiler_options=QUICK_COMPILE)
def traverse_flow(
    draws: Draws,
    p: jax.Array,
    depth: int,
    alter: Callable[[TokenTree], TokenTree] = unchanged,
) -> jax.Array:
    """Flows `[A, contexts, V]` of traversal, tree by tree.

    What is visited is certain but for where it ends: every leaf keeps `weight` of the mass left.
    """

    def one(draw: Draws) -> jax.Array:
        tree = alter(merge(draw, jnp.int32(0), depth))
        contexts = node_contexts(tree)

        def probs_at(node):
            return p[contexts[node]]

        def visit(carry, _):
            at, mass, flow = carry
            inner, child = traversal.next_child(tree, at)
            here = tree.depth[at.node]
            kept = jnp.where(at.node == 0, 1, jnp.clip(at.weights[here], 0, 1))
            taken = jnp.where(inner, 0, mass * kept)
            flow = flow.at[contexts[at.node]].add(taken * at.distributions[here])
            down, up = traversal.descend(tree, probs_at, at, child), traversal.retreat(tree, at)
            moved = jax.tree.map(lambda a, b: jnp.where(inner, a, b), down, up)
            moved = jax.tree.map(
                lambda new, old: jnp.where(~inner & (at.node == 0), old, new), moved, at
            )
            return (moved, mass - taken, flow), None

        first = (traversal.start(tree, probs_at, depth + 1), jnp.ones(()), jnp.zeros_like(p))
        return jax.lax.scan(visit, first, None, length=2 * tree.num_slots)[0][2]

    return jax.vmap(one)(draws)


@partial(jax.jit, static_argnames="depth", compiler_options=QUICK_COMPILE)
def match_flow(draws: Draws, choices: jax.Array, p: jax.Array, depth: int) -> jax.Array:
    """Flows `[A, contexts, V]` of `token_wise.match` when every node's choice is drawn from p.

    All of `choices` `[C, N]`, the joint choices of the nodes, are tried on every tree.
    """

    def one(draw: Draws) -> jax.Array:
        tree = merge(draw, jnp.int32(0), depth)
        contexts = node_contexts(tree)

        def outcome(choice):
            got = token_wise.match(tree, choice, depth + 1)
            weight = p[contexts, choice].prod()
            return contexts[got.path[got.count - 1]], got.token, weight

        at, token, weight = jax.vmap(outcome)(choices)
        return jnp.zeros_like(p).at[at, token].add(weight)

    return jax.lax.map(one, draws)


def flows_of(
    case: Case, tokens: np.ndarray, certain: bool = False, flow: Callable = walk_flow, **changes
) -> np.ndarray:
    """Flows `[A, contexts, V]` of the trees of given draws; one compiled size for any A."""
    count = len(tokens)
    padded = np.pad(tokens, ((0, -count % _CHUNK), (0, 0)))
    flows = [
        flow(case.draws(part, certain), jnp.asarray(case.p), case.depth, **changes)
        for part in np.split(padded, len(padded) // _CHUNK)
    ]
    return np.concatenate(flows)[:count]


def step_flow(case: Case, **changes) -> np.ndarray:
    """The flow of a step over all joint draws of the drafters."""
    tokens = case.every_draw()
    return np.tensordot(case.weight(tokens), flows_of(case, tokens, **changes), 1)


def match_flows_of(case: Case, tokens: np.ndarray) -> np.ndarray:
    """Flows `[A, contexts, V]` of the naive rule on the trees of given draws."""
    slots = range(1 + case.num_draws)
    choices = np.array(list(itertools.product(range(case.vocabulary), repeat=len(slots))))
    return np.asarray(
        match_flow(
            case.draws(tokens),
            jnp.asarray(choices, jnp.int32),
            jnp.asarray(case.p),
            case.depth,
        )
    )


def lazy_step_flow(case: Case, **changes) -> np.ndarray:
    """The same flow, drawing only what the walk reaches.

    A flow out of a context needs the draws below its prefixes alone; the others stay token 0.
    """
    total = np.zeros_like(case.p)
    for tokens, weight, context in reached_draws(case):
        flows = flows_of(case, tokens, **changes)
        np.add.at(total, context, weight[:, None] * flows[np.arange(len(tokens)), context])
    return total


def reached_draws(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Level by level: partial draws `[A, M]`, their probability, and the context reached."""
    parents, proposer = case.parents(), case.proposer()
    tokens = np.zeros((1, case.num_draws), int)
    weight, context, is_open = np.ones(1), np.zeros(1, int), (parents < 0)[None]
    for _ in range(case.depth + 1):
        parts = []
        for mask in np.unique(is_open, axis=0):
            rows, which = (is_open == mask).all(axis=1), np.flatnonzero(mask)
            drawn = np.array(list(itertools.product(range(case.vocabulary), repeat=len(which))))
            new = np.repeat(tokens[rows], len(drawn), axis=0)
            new[:, which] = np.tile(drawn, (rows.sum(), 1))
            at, mass = (np.repeat(x[rows], len(drawn)) for x in (context, weight))
            for m in which:
                mass = mass * case.drafters[proposer[m]][at, new[:, m]]
            parts.append((new, mass, at, np.broadcast_to(mask, new.shape)))
        tokens, weight, context, is_open = (np.concatenate(x) for x in zip(*parts, strict=True))
        yield tokens, weight, context
        nexts = []
        for token in range(case.vocabulary):
            live = is_open & (tokens == token)
            rows = live.any(axis=1)
            below = live[rows][:, parents] & (parents >= 0)
            at = context[rows] * case.vocabulary + token + 1
            nexts.append((tokens[rows], weight[rows], at, below))
        tokens, weight, context, is_open = (np.concatenate(x) for x in zip(*nexts, strict=True))


def node_flow(
    p: oracles.Probs, weighted: Iterable[tuple[tuple[oracles.Trial, ...], float | Fraction]]
) -> np.ndarray:
    """The flow of a step over one level of children, given as trials with their probability."""
    distributions = np.tile(np.array(p, float), (1 + len(p), 1))
    total = np.zeros_like(distributions)
    members = sorted(weighted, key=lambda member: len(member[0]))
    for _, group in itertools.groupby(members, key=lambda member: len(member[0])):
        rows, weights = zip(*group, strict=True)
        rows = rows + rows[:1] * (_NODE_ROWS - len(rows))
        flows = walk_flow(_one_level(rows), jnp.asarray(distributions), 1)[: len(weights)]
        total += np.tensordot(np.array(weights, float), np.asarray(flows), 1)
    return total


def _one_level(rows: Sequence[Sequence[oracles.Trial]]) -> Draws:
    """Draws below the root only, each with its own distribution."""
    numbers = np.tile(np.arange(len(rows[0])), (len(rows), 1))
    return Draws(
        tokens=jnp.asarray([[token for token, _ in trials] for trials in rows], jnp.int32),
        parents=jnp.full(numbers.shape, NO_PARENT, jnp.int32),
        depth=jnp.ones(numbers.shape, jnp.int32),
        drafter=jnp.zeros(numbers.shape, jnp.int32),
        row=jnp.asarray(numbers, jnp.int32),
        q=jnp.asarray([[np.array(q, float) for _, q in trials] for trials in rows]),
        certain=jnp.zeros(len(rows), bool),
    )


def levels(values: np.ndarray, depth: int) -> Iterator[np.ndarray]:
    """A table by context, cut into arrays `[V, ..., V]` of contexts of equal length."""
    size, start = values.shape[1], 0
    for length in range(depth + 1):
        yield values[start : start + size**length].reshape((size,) * (length + 1))
        start += size**length


def output_probs(flow: np.ndarray, p: np.ndarray, depth: int) -> np.ndarray:
    """The distribution of the next depth + 1 tokens, outcomes that emit fewer going on with p."""
    probs = np.zeros(())
    for emitted, target in zip(levels(flow, depth), levels(p, depth), strict=True):
        probs = probs[..., None] * target + emitted
    return probs


def target_probs(p: np.ndarray, depth: int) -> np.ndarray:
    """The target's distribution of the next depth + 1 tokens."""
    probs = np.ones(())
    for target in levels(p, depth):
        probs = probs[..., None] * target
    return probs


def total_variation(flow: np.ndarray, p: np.ndarray, depth: int) -> float:
    """Between the distribution of a step's tokens and the target's."""
    return float(np.abs(output_probs(flow, p, depth) - target_probs(p, depth)).sum() / 2)


def mean_accepted(flow: np.ndarray, depth: int) -> float:
    """The expected number of accepted tokens."""
    return float(sum(length * x.sum() for length, x in enumerate(levels(flow, depth))))


def differs(flow: np.ndarray, case: Case) -> float:
    """The total variation of a case's flow from its target."""
    return total_variation(flow, case.p, case.depth)


def accepted(flow: np.ndarray, case: Case) -> float:
    """The expected number of accepted tokens of a case's flow."""
    return mean_accepted(flow, case.depth)
