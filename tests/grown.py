"""Growing drafters beside plain dictionaries: a search over paths, trees as paths, and steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.base.sampling import Sampling
from specjax.draft import Seen, Step
from specjax.draft.growth import Growth
from specjax.measure import distribution_tests
from specjax.models.transformer import Model
from specjax.trees.accepted import Accepted

SLOTS = 96
WIDTH = 48  # of all prompts, so that texts of every length take one program
SAMPLING = Sampling(temperature=np.array([0.0, 0.8, 1.3, 0.0]))
TEMPERATURES = (0.5, 1.0)
Path = tuple[int, ...]
Children = Callable[[list[Path]], list[dict[int, float]]]
"""The log probabilities of the children of some paths."""

INIT = jax.jit(lambda drafter, *rest: drafter.init(*rest), static_argnums=3)
PROPOSE = jax.jit(lambda drafter, *rest: drafter.propose(*rest))
COMMIT = jax.jit(lambda drafter, *rest: drafter.commit(*rest))


def plain_search(
    children: Children, growth: Growth, tree: dict[Path, float] | None = None
) -> dict[Path, float]:
    """Paths with their scores, grown round by round; below every node of `tree` if there is one."""
    taken = {(): 0.0} | (tree or {})
    tree, expanded = dict(tree or {}), set(taken) - {()}
    for _ in range(growth.depth):
        open_to = {path: score for path, score in taken.items() if len(path) < growth.depth}
        offered = {
            (*path, x): score + np.log(growth.decay) + log_q
            for (path, score), own in zip(open_to.items(), children(list(open_to)), strict=True)
            for x, log_q in own.items()
            if (*path, x) not in tree
        }
        both = sorted((tree | offered).items(), key=lambda item: -item[1])
        grown = {path: score for path, score in both[: growth.budget] if np.isfinite(score)}
        gain = sum(np.exp(list(grown.values()))) - sum(np.exp(list(tree.values())))
        stuck, tree = grown.keys() <= tree.keys(), grown
        if stuck or (growth.least_gain and gain <= growth.least_gain):
            break
        waiting = [path for path in tree if path not in expanded and len(path) < growth.depth]
        if growth.by_level:
            last = max(map(len, tree))
            waiting = [path for path in waiting if len(path) == last]
        best = sorted(waiting, key=lambda path: -tree[path])[: growth.beams]
        expanded |= set(best)
        taken = {path: tree[path] for path in best}
    return tree


def children_of(model: Model, text: list[int], growth: Growth, sharpness: float) -> Children:
    """A draft's likeliest tokens below paths after a text, by one plain pass a path."""

    def children(paths):
        logits = []
        for first in range(0, len(paths), 16):
            texts = [text + list(path) for path in paths[first : first + 16]]
            padded = texts + [text] * (16 - len(texts))  # one compiled size
            logits.extend(distribution_tests.logits_after(model, padded)[: len(texts)])
        found = []
        for own in logits:
            log_q = np.asarray(jax.nn.log_softmax(jnp.asarray(own) / sharpness))
            best = np.argsort(-log_q, kind="stable")[: min(growth.width, growth.budget)]
            found.append({int(x): float(log_q[x]) for x in best})
        return found

    return children


def sharpness_of(row: int) -> float:
    """What a row's draft is sharpened by."""
    return TEMPERATURES[0 if SAMPLING.temperature[row] == 0 else 1]


def seen_after(tokens, count: int):
    """Something that a target could have thought likely after tokens: distinct, and decided."""
    tokens = jnp.asarray(tokens, jnp.int32)
    likely = (tokens[..., None] * 7 + 5 * jnp.arange(count, dtype=jnp.int32) + 1) % 64
    return Seen(likely, jnp.zeros((*tokens.shape, 0)))


def start(drafter, texts, slots: int = SLOTS):
    """The state after whole texts."""
    length = jnp.asarray([len(text) for text in texts], jnp.int32)
    padded = np.zeros((len(texts), WIDTH), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    seen = seen_after(padded, drafter.wants.top_tokens)
    return INIT(drafter, jnp.asarray(padded), length, slots, seen)


def propose(drafter, state, texts, sampling: Sampling = SAMPLING, through=PROPOSE):
    """The trees on the host, and the state; `through` is the compiled `propose`."""
    keys = jax.random.split(jax.random.key(0), len(texts))
    position = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    last = jnp.asarray([text[-1] for text in texts], jnp.int32)
    tree, state = through(drafter, keys, position, state, last, sampling.rows(len(texts)))
    return jax.tree.map(np.asarray, tree), state


def paths_of(tree, row: int) -> dict[Path, int]:
    """The node of every path of a row's tree, of which no two are equal."""
    paths = {0: ()}
    for node in range(1, tree.tokens.shape[1]):
        if tree.valid[row, node]:
            above = int(tree.parents[row, node])
            assert above < node
            assert tree.depth[row, node] == tree.depth[row, above] + 1
            paths[node] = (*paths[above], int(tree.tokens[row, node]))
    assert len(set(paths.values())) == len(paths)
    return {path: node for node, path in paths.items()}


def scores_of(tree, row: int, growth: Growth) -> dict[Path, float]:
    """The score of every path as the tree's own chances make it."""
    scores = {(): 0.0}
    for path, node in paths_of(tree, row).items():
        if path:
            chance = np.log(tree.chance[row, node]) + np.log(growth.decay)
            scores[path] = scores[path[:-1]] + chance
    return {path: score for path, score in scores.items() if path}


def check_best(found: dict[Path, float], expected: dict[Path, float], children: Children):
    """Trees whose nodes have the right scores, as good as expected; ties may go either way."""
    paths = [(), *found]
    distributions = dict(zip(paths, children(paths), strict=True))
    assert all(path[-1] in distributions[path[:-1]] for path in found)
    best, got = (sorted(each.values(), reverse=True) for each in (expected, found))
    np.testing.assert_allclose(got, best, rtol=1e-4, atol=1e-4)
    worst = best[-1] + 1e-4 * (1 + abs(best[-1])) if best else 0.0
    sure = {path for path, score in expected.items() if score > worst}
    assert sure <= found.keys()
    for path in found.keys() & expected.keys():
        assert np.isclose(found[path], expected[path], rtol=1e-4, atol=1e-4)


def commit(drafter, state, tree, texts, counts, rests, pick=max):
    """A step along one path a row, cut to `counts` tokens with a last one of `rests`.

    `pick` chooses among a row's paths, by length unless it has a mind of its own.
    """
    window = drafter.window
    path, tokens = (np.zeros((len(texts), window), np.int32) for _ in range(2))
    made = []
    for row, (count, rest) in enumerate(zip(counts, rests, strict=True)):
        nodes = paths_of(tree, row)
        chosen = pick(nodes, key=len)
        text = [*chosen, rest]
        along = [nodes[chosen[:n]] for n in range(len(text))]
        path[row, : len(along)] = along
        tokens[row, : len(text)] = text
        made.append(text[: min(count, len(text))])
    length = jnp.asarray([len(text) for text in made], jnp.int32)
    accepted = Accepted(jnp.asarray(path), length, length)
    grown = jax.tree.map(jnp.asarray, tree)
    seen = seen_after(grown.tokens, drafter.wants.top_tokens)
    step = Step(jnp.asarray(tokens), length, length < 0, grown, accepted, seen)
    return COMMIT(drafter, state, step), [[*t, *new] for t, new in zip(texts, made, strict=True)]
