"""Slow exact twins of the verification rules, in rational numbers.

Written from SpecInfer (arXiv 2305.09781, section 4.3), Sequoia (2402.12374) and EAGLE-2's one-hot
rule, not from specjax, so that the two can disagree. A *trial* is a token and the distribution that
its rule divides by; a *rule* takes p and a node's trials in order and gives what happens there: the
mass with which each child is accepted, and the mass with which each token is emitted instead.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

Probs = tuple[Fraction, ...]
Trial = tuple[int, Probs]
Outcome = tuple[Counter[int], list[Fraction]]
Rule = Callable[[Probs, Sequence[Trial]], Outcome]
Weighted = Iterator[tuple[tuple[Trial, ...], Fraction]]
Conditional = Callable[[tuple[int, ...]], Probs]


def probs(*weights: float | str) -> Probs:
    """Weights as an exact distribution; `distribution(".5", ".3", ...)` or `distribution(5, 3,
    ...)`.
    """
    return norm([Fraction(w) for w in weights])


def norm(weights: Sequence[Fraction]) -> Probs:
    total = sum(weights)
    return tuple(w / total for w in weights)


def total_variation(a: Sequence, b: Sequence) -> float:
    return float(sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2)


def one_hot(token: int, size: int) -> Probs:
    return tuple(Fraction(token == x) for x in range(size))


# Rules. ------------------------------------------------------------------------------------


def chance(p: Probs, q: Probs, token: int) -> Fraction:
    """P(r < p/q) for r uniform on [0, 1), 0/0 rejected."""
    return min(Fraction(1), p[token] / q[token]) if q[token] else Fraction(p[token] > 0)


def residual(p: Probs, q: Probs) -> Probs:
    return norm([max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)])


def multi_step(p: Probs, trials: Sequence[Trial]) -> Outcome:
    """SpecInfer's multi-step speculative sampling, its trials in the order given."""
    accepted, mass = Counter(), Fraction(1)
    for token, q in trials:
        passed = chance(p, q, token)
        accepted[token] += mass * passed
        mass *= 1 - passed
        if not mass:
            return accepted, [mass] * len(p)
        p = residual(p, q)
    return accepted, [mass * x for x in p]


def recursive(p: Probs, trials: Sequence[Trial]) -> Outcome:
    """Recursive rejection sampling: the draft distribution loses each rejected token and is
    renormalised.

    Lossless for draws without replacement, in draw order, all of one distribution (Sequoia, section
    4).
    """
    updated, gone = [], set()
    for token, q in trials:
        updated.append((token, without(q, gone)))
        gone.add(token)
    return multi_step(p, updated)


def without(q: Probs, gone: set[int]) -> Probs:
    """q without some tokens; uniform over the others if nothing of q is left."""
    kept = [Fraction(0) if x in gone else w for x, w in enumerate(q)]
    return norm(kept if any(kept) else [Fraction(x not in gone) for x in range(len(q))])


def block(p: Conditional, q: Conditional, tokens: tuple[int, ...]) -> dict[int, Fraction]:
    """P(exactly i tokens of a drawn chain are accepted), by i (arXiv 2403.10444, algorithm 2)."""
    size, gamma = len(p(())), len(tokens)
    kept, chances = [Fraction(1)], []
    for i in range(1, gamma + 1):
        x, before = tokens[i - 1], tokens[: i - 1]
        kept.append(min(Fraction(1), kept[-1] * p(before)[x] / q(before)[x]))
        if i == gamma:
            chances.append(kept[i])
        else:
            at = tokens[:i]
            z = sum((max(kept[i] * p(at)[y] - q(at)[y], Fraction(0)) for y in range(size)),
                    Fraction(0))  # fmt: skip
            whole = z + 1 - kept[i]
            chances.append(z / whole if whole else Fraction(1))
    found, later = {}, Fraction(1)
    for i in range(gamma, 0, -1):
        found[i] = later * chances[i - 1]
        later *= 1 - chances[i - 1]
    return found | {0: later}


def naive(p: Probs, trials: Sequence[Trial]) -> Outcome:
    """Draw from p, then see whether the tree has it."""
    children = {token for token, _ in trials}
    accepted = Counter({x: p[x] for x in children})
    return accepted, [Fraction(0) if x in children else w for x, w in enumerate(p)]


# Constructions of one node's trials. ---------------------------------------------------------


def independent(*distributions: Probs) -> Weighted:
    """One independent draw from each distribution, in the order of the distributions."""
    supports = ([x for x, w in enumerate(q) if w] for q in distributions)
    for tokens in itertools.product(*supports):
        weight = Fraction(1)
        for token, q in zip(tokens, distributions, strict=True):
            weight *= q[token]
        yield tuple(zip(tokens, distributions, strict=True)), weight


def without_replacement(q: Probs, count: int) -> Weighted:
    """`count` distinct draws from q in draw order, all naming the unchanged q."""
    for tokens in itertools.permutations([x for x, w in enumerate(q) if w], count):
        weight = Fraction(1)
        for i, token in enumerate(tokens):
            weight *= without(q, set(tokens[:i]))[token]
        yield tuple((token, q) for token in tokens), weight


def top_k(q: Probs, count: int) -> Weighted:
    """The `count` most likely tokens of q in the order of their ids, naming q."""
    best = sorted(range(len(q)), key=lambda x: (-q[x], x))[:count]
    yield tuple((token, q) for token in sorted(best)), Fraction(1)


# What a construction may wrongly do to trials. -------------------------------------------------


def sorted_by_q(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Largest own q first; a tie keeps its order."""
    return tuple(sorted(trials, key=lambda trial: -trial[1][trial[0]]))


def merged(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Equal tokens kept as one trial, that of the first."""
    return tuple({token: (token, q) for token, q in reversed(trials)}.values())[::-1]


def any_order(weighted: Weighted) -> Weighted:
    """Trials in an order drawn uniformly at random."""
    for trials, weight in weighted:
        orders = list(itertools.permutations(trials))
        yield from ((order, weight / len(orders)) for order in orders)


# Distributions of outputs.
# ------------------------------------------------------------------------------


def output_probs(p: Probs, weighted: Weighted, rule: Rule) -> tuple[Probs, Fraction]:
    """Of one node: the distribution of the emitted token, and the probability that a child is
    accepted.
    """
    out, hit = [Fraction(0)] * len(p), Fraction(0)
    for trials, weight in weighted:
        accepted, emitted = rule(p, trials)
        hit += weight * sum(accepted.values())
        out = [
            o + weight * (e + accepted[x])
            for x, (o, e) in enumerate(zip(out, emitted, strict=True))
        ]
    return tuple(out), hit


def expected_accepted(
    p: Conditional, drafters: Sequence[Conditional], widths: Sequence[int], rule: Rule
) -> Fraction:
    """Accepted tokens of a step whose tree merges one of `widths` from each drafter.

    Children are independent draws, by drafter and then by draw; below a token that several draws
    gave stand the children of all of them.
    """

    def below(path: tuple[int, ...], owners: tuple[int, ...]) -> Fraction:
        if len(path) == len(widths):
            return Fraction(0)
        drawn = [owner for owner in owners for _ in range(widths[len(path)])]
        total = Fraction(0)
        for trials, weight in independent(*(drafters[owner](path) for owner in drawn)):
            accepted, _ = rule(p(path), trials)
            for token, mass in ((t, m) for t, m in accepted.items() if m):
                heirs = [o for o, (t, _) in zip(drawn, trials, strict=True) if t == token]
                total += weight * mass * (1 + below((*path, token), tuple(heirs)))
        return total

    return below((), tuple(range(len(drafters))))


def expected_without_replacement(
    p: Conditional, q: Conditional, widths: Sequence[int], rule: Rule
) -> Fraction:
    """Accepted tokens of a step over one tree of distinct children."""

    def below(path: tuple[int, ...]) -> Fraction:
        if len(path) == len(widths):
            return Fraction(0)
        total = Fraction(0)
        for trials, weight in without_replacement(q(path), widths[len(path)]):
            for token, mass in rule(p(path), trials)[0].items():
                total += weight * mass * (1 + below((*path, token)) if mass else 0)
        return total

    return below(())


def random_distributions(seed: int, size: int, depths: int, count: int = 2, zeros: bool = False):
    """`count` random distributions of each context shorter than `depths`, contexts in product
    order.

    With `zeros`, one token in four has probability zero (never all of them).
    """
    source = random.Random(seed)
    tables: list[dict[tuple[int, ...], Probs]] = [{} for _ in range(count)]
    for depth in range(depths):
        for path in itertools.product(range(size), repeat=depth):
            for table in tables:
                weights = [source.randint(1, 9) for _ in range(size)]
                if zeros:
                    weights = [w * (source.random() < 0.75) for w in weights]
                    weights[source.randrange(size)] = 5
                table[path] = probs(*weights)
    return tables
