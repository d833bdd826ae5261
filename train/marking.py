"""What a later draft of a pool learns from: how much each step of the target's text counts.

Collective boost-tuning (SpecInfer, arXiv 2305.09781, section 3) drops the samples on which an
earlier draft already gives the target's tokens. That is the rule `samples`; the other rules are
this project's, each measured in `train/LOG.md`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from train.config import Boost

TOO_FEW, TOO_MANY = 0.05, 0.95
"""Outside these marked shares the next draft learns from nearly all samples, or from too few."""

ROUNDING = 1e-6
"""Mass that float32 distributions may leave where none should be."""


class Seen(NamedTuple):
    """What one earlier draft says along the target's text, `S` steps of `N` rows.

    `rank` is the place of the target's token among the draft's most likely ones (0: the first;
    the number of known places where it is not among them). `accepted` is the probability that
    the target's token came from an accepted draw of this draft, given that it is the target's:
    min(1, q / p) at the row's temperature, and 0 or 1 on greedy rows. `alive` are the steps
    that the target took; the others are in no sample and have weight 0.
    """

    rank: Int[np.ndarray, "N S"]
    accepted: Float[np.ndarray, "N S"]
    alive: Bool[np.ndarray, "N S"]


class Weights(NamedTuple):
    """What a rule found: the weight of every step, of mean 1, and how much was marked."""

    steps: Float[np.ndarray, "N S"]
    marked: float


def mark(match: Bool[np.ndarray, "N S"], window: int) -> Bool[np.ndarray, "N W"]:
    """The samples on which a draft gives the target's next `window` tokens, `W = S - window + 1`.

    `match[n, s]` says that the draft's most likely token at step s of row n, all earlier ones
    being the target's, is the target's. That is what the draft itself would have produced from
    step s on as long as it keeps matching, so a sample is marked exactly where all match.
    """
    windows = np.lib.stride_tricks.sliding_window_view(match, window, axis=1)
    return np.all(windows, axis=-1)


def normalized(
    value: Float[np.ndarray, "N S"], alive: Bool[np.ndarray, "N S"]
) -> Float[np.ndarray, "N S"]:
    """`value` scaled to a mean of 1 over the steps alive, 0 elsewhere; 1 where nothing is left."""
    mean = value[alive].mean() if alive.any() else 0.0
    scaled = value / mean if mean > 0 else np.ones_like(value)
    return np.where(alive, scaled, 0.0).astype(np.float32)


def by_samples(earlier: Sequence[Seen], settings: Boost) -> Weights:
    """As published: samples on which an earlier draft's greedy tokens are the target's count less.

    A marked sample counts as `keep` of one.
    """
    matches = [mark(draft.rank == 0, settings.window) for draft in earlier]
    return _by_windows(np.any(matches, axis=0), earlier[0].alive, settings)


def by_union(earlier: Sequence[Seen], settings: Boost) -> Weights:
    """The same, marked where the union of the earlier drafts' trees covers the target's tokens.

    Every node of a draft's tree has `cover` children, its most likely ones.
    """
    matches = [mark(draft.rank < settings.cover, settings.window) for draft in earlier]
    return _by_windows(np.any(matches, axis=0), earlier[0].alive, settings)


def by_chance(earlier: Sequence[Seen], settings: Boost) -> Weights:
    """Samples count as the probability that every earlier draft's chain breaks inside them.

    The published rule with verification's own probabilities in place of a comparison of most
    likely tokens, so that text drawn at a temperature is marked by the same measure.
    """
    windows = [
        np.lib.stride_tricks.sliding_window_view(draft.accepted, settings.window, axis=1)
        for draft in earlier
    ]
    broken = np.prod([1 - np.prod(each, axis=-1) for each in windows], axis=0)
    return _by_windows(1 - broken, earlier[0].alive, settings)


def _by_windows(
    marked: Bool[np.ndarray, "N W"] | Float[np.ndarray, "N W"],
    alive: Bool[np.ndarray, "N S"],
    settings: Boost,
) -> Weights:
    """Weights from how far, 0 to 1, the sample that begins at each step is marked.

    A sample is worth (1 - marked) ** `strength`, and at least `keep`; a step the mean of the
    samples that contain it. Samples lie within the rows; the steps of a row that is shorter than
    a sample count as one that is not marked.
    """
    window, whole = settings.window, mark(alive, settings.window)
    value = settings.keep + (1 - settings.keep) * (1.0 - marked) ** settings.strength
    total, number = (
        np.stack([np.convolve(row, np.ones(window)) for row in np.where(whole, what, 0.0)])
        for what in (value, np.ones(value.shape))
    )
    steps = np.where(number > 0, total / np.maximum(number, 1), 1.0)
    return Weights(normalized(steps, alive), float(marked[whole].mean()) if whole.any() else 0.0)


def by_tokens(earlier: Sequence[Seen], settings: Boost) -> Weights:
    """Single steps: those where an earlier draft's most likely token is right count as `keep`."""
    alive, right = earlier[0].alive, np.any([draft.rank == 0 for draft in earlier], axis=0)
    return Weights(
        normalized(np.where(right, settings.keep, 1.0), alive), float(right[alive].mean())
    )


def by_errors(earlier: Sequence[Seen], settings: Boost) -> Weights:
    """AdaBoost's weights (Freund and Schapire 1997): each draft's misses gain exp(strength · α).

    α is log((1 - e) / e) of the draft's error e under the weights it was measured with, at
    least 0. Marked are the steps below the mean weight.
    """
    alive = earlier[0].alive
    weight = normalized(np.ones(alive.shape), alive)
    for draft in earlier:
        missed = draft.rank > 0
        error = np.clip(np.average(missed, weights=weight), 1e-6, 1 - 1e-6)
        alpha = settings.strength * max(np.log((1 - error) / error), 0.0)
        weight = normalized(weight * np.exp(alpha * missed), alive)
    return Weights(weight, float((weight[alive] < 1).mean()))


Rule = Callable[[Sequence[Seen], Boost], Weights]

RESIDUAL = "residual"
BY_NOTHING = "alike"
RULES: dict[str, Rule] = {
    "samples": by_samples,
    "union": by_union,
    "chance": by_chance,
    "tokens": by_tokens,
    "errors": by_errors,
}
NAMES = (*RULES, RESIDUAL, BY_NOTHING)


def residual(
    p: Float[np.ndarray, "*B k"], distributions: Sequence[Float[np.ndarray, "*B k"]]
) -> tuple[Float[np.ndarray, "*B k"], Float[np.ndarray, "*B"]]:
    """What is left of the target's distribution once a draw of every earlier draft was rejected.

    Multi-step verification (SpecInfer, algorithm 2) goes on with norm(max(0, p - q)) after each
    rejection; the best next draft is that distribution itself. `p` and the drafts' `distributions`
    cover the same tokens, the last of which may stand for all others. Gives the distribution, and
    the probability that all draws were rejected; where no more than rounding is left the
    distribution is `p`.
    """
    left, reached = p.astype(np.float64), np.ones(p.shape[:-1])
    for probs in distributions:
        rest = np.maximum(left - probs, 0)
        mass = rest.sum(axis=-1)
        reached = reached * mass
        left = np.where(mass[..., None] > ROUNDING, rest / np.maximum(mass, ROUNDING)[..., None], p)
    return left, reached


def verdict(share: float) -> str:
    """What a marked share means for the next draft, as a sentence."""
    if TOO_FEW <= share <= TOO_MANY:
        return "the next draft learns from the other samples."
    few = "under" if share < TOO_FEW else "over"
    limit = TOO_FEW if share < TOO_FEW else TOO_MANY
    return f"no boost: {few} {100 * limit:.0f} % of the samples are marked."
