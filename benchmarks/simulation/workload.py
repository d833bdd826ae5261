"""What a simulated server is asked for, and how its drafts truly fare. No jax, no clock."""

import bisect
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specjax.goodput.acceptance import PRIORS, band
from specjax.goodput.policy import DraftSetting
from specjax.goodput.survival import logistic, logit

CODE, PROSE = "code", "prose"
"""Classes of text."""

_MOST_LOGITS = 5.0


class Arrival(NamedTuple):
    """A request that comes at a time, in seconds.

    Attributes:
      at: when it comes.
      prompt: its tokens.
      tokens: that it is given; none ends sooner.
      temperature: at which it samples.
      text: its class.
      max_tpot_ms: milliseconds a token that it asks for at most, or None.
    """

    at: float
    prompt: int = 128
    tokens: int = 128
    temperature: float = 0.0
    text: str = CODE
    max_tpot_ms: float | None = None


Rate = Callable[[float], float]
"""Requests a second, at a time."""


def constant(rate: float) -> Rate:
    """Always the same."""
    return lambda now: rate


def steps(rates: Sequence[float], seconds: float) -> Rate:
    """One rate after the other, each for as long."""
    return lambda now: rates[min(int(now * len(rates) / seconds), len(rates) - 1)]


def ramp(first: float, last: float, seconds: float) -> Rate:
    """From one rate to another."""
    return lambda now: first + (last - first) * min(now / seconds, 1.0)


def bursts(low: float, high: float, period: float, share: float = 0.25) -> Rate:
    """A high rate for a share of each period, a low one for the rest."""
    return lambda now: high if now % period < share * period else low


class Kinds(NamedTuple):
    """Of what kinds the requests of a load are; each is drawn from these.

    Attributes:
      prompts: least and most tokens of a prompt.
      tokens: least and most tokens that are made.
      temperatures: any of them.
      text: the class of text at a time.
      max_tpot_ms: any of them.
    """

    prompts: tuple[int, int] = (32, 256)
    tokens: tuple[int, int] = (32, 256)
    temperatures: Sequence[float] = (0.0,)
    text: Callable[[float], str] = lambda now: CODE
    max_tpot_ms: Sequence[float | None] = (None,)

    def draw(self, at: float, rng: random.Random) -> Arrival:
        """A request that comes at a time."""
        return Arrival(
            at, rng.randint(*self.prompts), rng.randint(*self.tokens),
            rng.choice(self.temperatures), self.text(at), rng.choice(self.max_tpot_ms),
        )  # fmt: skip


def arrivals(
    rate: Rate, most: float, seconds: float, seed: int, kinds: Kinds = Kinds()
) -> list[Arrival]:
    """Requests of a Poisson process whose rate changes (by thinning, Lewis and Shedler 1979).

    Args:
      rate: requests a second at each time.
      most: the largest that it is.
      seconds: for how long they come.
      seed: of the random numbers.
      kinds: what they ask for.
    """
    rng, now, found = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(now):
            found.append(kinds.draw(now, rng))
    return found


def at_once(count: int, seed: int, kinds: Kinds = Kinds()) -> list[Arrival]:
    """So many requests that all come at the beginning, which saturates a server."""
    rng = random.Random(seed)
    return [kinds.draw(0.0, rng) for _ in range(count)]


def switching(before: str, after: str, at: float) -> Callable[[float], str]:
    """One class of text up to a time, another from then on."""
    return lambda now: before if now < at else after


Ends = tuple[float, float]
"""Logits of acceptance at depth 1, and below it."""


def usual(shift: float = 0.0) -> dict[tuple[str, str, int], Ends]:
    """Chances near those that the controller believes in at first, `shift` logits better; of prose
    they are a logit worse, those of a lookup two.
    """
    worse = {CODE: 0.0, PROSE: 1.0}
    return {
        (kind, text, number): (
            logit(first) + shift - less * (1 + (kind == "lookup")),
            logit(later) + shift - less * (1 + (kind == "lookup")),
        )
        for kind in ("chain", "lookup")
        for number, (first, later) in enumerate(PRIORS[kind])
        for text, less in worse.items()
    }


def random_weights() -> dict[tuple[str, str, int], Ends]:
    """A draft model that knows nothing: one token in a hundred is accepted."""
    bad = (logit(0.01), logit(0.01))
    return {key: bad if key[0] == "chain" else ends for key, ends in usual().items()}


@dataclasses.dataclass(frozen=True)
class Truth:
    """How often drafts are truly accepted.

    A request of a class and a temperature has a chance of acceptance at depth 1 and one below,
    moved by its own effect, which is normal on the scale of logits, and by how easy its text is
    where it is, which comes and goes. A tree of more nodes than its
    levels does better where it is wide: by `gain` logits for each doubling of nodes over twice the
    depth. So a tree of 15 nodes has three gains at depth 1, none at depth 8.

    Attributes:
      ends: by kind (`chain`, which trees begin from, or `lookup`), class and band of temperature.
      effect: standard deviation of a request's, in logits.
      text_effect: standard deviation of a text's where it is, of greedy requests and of others.
      memory: what is left of it a token later.
      gain: of trees.
      changes: times, in order, and from then on the logits that drafts of the model are better.
    """

    ends: Mapping[tuple[str, str, int], Ends] = dataclasses.field(default_factory=usual)
    effect: float = 0.25
    text_effect: tuple[float, float] = (1.7, 0.3)
    memory: float = 0.97
    gain: float = 0.3
    changes: Sequence[tuple[float, float]] = ()
    _made: dict[tuple, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def change(self, now: float) -> float:
        """Logits that drafts of the model are better at a time."""
        place = bisect.bisect_right([at for at, _ in self.changes], now) if self.changes else 0
        return self.changes[place - 1][1] if place else 0.0

    def draw_effect(self, rng: random.Random) -> float:
        """That of a request, in logits."""
        return rng.gauss(0.0, self.effect)

    def draw_text_effect(self, rng: random.Random, of: Arrival) -> float:
        """That of a text's beginning, in logits."""
        return rng.gauss(0.0, self.text_effect[of.temperature > 0])

    def next_text_effect(
        self, rng: random.Random, of: Arrival, text_effect: float, tokens: int
    ) -> float:
        """That of a text so many tokens later."""
        kept = self.memory**tokens
        return kept * text_effect + math.sqrt(1 - kept * kept) * self.draw_text_effect(rng, of)

    def hazards(
        self, setting: DraftSetting, nodes: int, of: Arrival, effect: float, change: float
    ) -> tuple[float, ...]:
        """The chances of acceptance at each depth of a tree of so many nodes.

        Args:
          setting: that drafts it.
          nodes: below the root.
          of: the request.
          effect: its own, with its text's, in logits.
          change: what drafts are better now.
        """
        key = (setting, nodes, of.text, of.temperature, round(effect, 1), change)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._hazards(*key)
        return found

    def _hazards(
        self, setting: DraftSetting, nodes: int, text: str, temperature: float, effect: float,
        change: float,
    ) -> tuple[float, ...]:  # fmt: skip
        own = "chain" if setting.runs_draft else "lookup"
        ends = self.ends[own, text, band(temperature)]
        shift = effect + (change if setting.runs_draft else 0.0)
        gain = 0.0 if setting.drawn or not setting.runs_draft else self.gain
        return tuple(
            _chance(ends[depth > 0] + shift + gain * math.log2((nodes + 1) / (2 * depth + 2)))
            for depth in range(min(setting.depth, nodes))
        )


def _chance(logits: float) -> float:
    return logistic(min(max(logits, -_MOST_LOGITS), _MOST_LOGITS))
