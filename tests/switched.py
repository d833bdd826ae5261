"""Drafters that share a state, and a policy that takes any of their programs at random."""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.drafter import Drafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.lookahead import LookaheadDrafter, Window
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.switching import SwitchingDrafter
from specjax.draft.token_recycling import RecycleDrafter
from specjax.engine.engine import Engine
from specjax.engine.speculation import Speculation
from specjax.goodput import shapes
from specjax.goodput.policy import Decision, Policy, StepShape, step_rows
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, TOP_K
from specjax.trees.tree import TreeShape
from tests.engines import running
from tests.pairs import alone


def switching_of(draft: Model) -> SwitchingDrafter:
    """One of each kind of setting."""
    vocabulary = draft.config.vocab_size

    def tree(budget: int) -> BestFirstDrafter:
        return BestFirstDrafter(draft, jnp.ones(2), Growth(budget=budget, beams=2, width=2))

    return SwitchingDrafter.of(
        {
            "none": PlainDrafter(vocabulary),
            "chain:1": alone(draft, (1,)),
            "chain:3": alone(draft, (1, 1, 1)),
            "specexec:6": tree(6),
            "lookup:4": TextDrafter(
                jnp.asarray([0.0, 0.4, 0.6]), None, Growth(budget=4, depth=3), vocabulary
            ),
        }
    )


def switching_of_head(head: Model, other: Model) -> SwitchingDrafter:
    """Settings of a draft that reads hidden states, beside others and another such draft."""
    vocabulary = head.config.vocab_size
    trust, growth = jnp.asarray([0.0, 0.4, 0.6]), Growth(budget=4, beams=2, width=2)
    tree = BestFirstDrafter(head, jnp.ones(2), growth)
    return SwitchingDrafter.of(
        {
            "none": PlainDrafter(vocabulary),
            "chain:3": alone(head, (1, 1, 1)),
            "tree:2,1": alone(head, (2, 1), children=DISTINCT),
            "specexec:4": tree,
            "hybrid:4": HybridDrafter(tree, trust, None),
            "lookup:4": TextDrafter(trust, None, Growth(budget=4, depth=3), vocabulary),
            "recycle:4": RecycleDrafter(jnp.asarray([0.5, 0.2]), TreeShape((2, 1)), vocabulary),
            "pool:1,1": ExpansionDrafter.of([head, other], (1, 1)),
        }
    )


def every_kind(draft: Model, other: Model) -> SwitchingDrafter:
    """Trees over the shared draft, drawn and chosen, and each kind with a state of its own."""
    vocabulary = draft.config.vocab_size
    trust = jnp.asarray([0.0, 0.4, 0.6])
    growth = Growth(budget=6, beams=2, width=2)

    def tree(second: Drafter | None = None) -> BestFirstDrafter:
        return BestFirstDrafter(draft, jnp.ones(2), growth, None, second)

    return SwitchingDrafter.of(
        {
            "none": PlainDrafter(vocabulary),
            "chain:2": alone(draft, (1, 1)),
            "tree:2,1": alone(draft, (2, 1), children=DISTINCT),
            "hybrid:6": HybridDrafter(tree(), trust, None),
            "pool:2,1": ExpansionDrafter.of([draft, other], (2, 1)),
            "staged:6": tree(alone(other, (1, 1), children=TOP_K)),
            "recycle:4": RecycleDrafter(jnp.asarray([0.5, 0.2]), TreeShape((2, 1)), vocabulary),
            "lookahead:2,3,2": LookaheadDrafter(jnp.float32(0.5), Window(2, 3, 2), vocabulary),
        }
    )


class RandomPolicy(Policy):
    """Takes any program that has a column for each row, any depths that fit in it, short bursts.

    Programs are dealt from a shuffled deck for each number of rows: as many decisions take all.
    """

    def __init__(self, speculation: Speculation, rows: int, seed: int = 0) -> None:
        assert speculation.controller is not None
        self._shapes, self._settings = speculation.controller.shapes, speculation.settings
        self._rows, self._drawn = rows, np.random.default_rng(seed)
        self._decks: dict[int, list[StepShape]] = {}
        self.taken = []
        self.chances: list[float] = []

    @property
    def shapes(self):
        return self._shapes

    @property
    def calibration(self):
        """Another one now and then."""
        return ((0.0, 1.0), (float(len(self.taken) // 50 % 2), 0.7))

    def decide(self, rows) -> Decision:
        size = step_rows(len(rows), self._rows, 2)
        if not (deck := self._decks.setdefault(size, [])):
            deck += [shape for shape in self._shapes if shape.rows == size]
            self._drawn.shuffle(deck)
        shape = deck.pop()
        setting, room, depths = self._settings[shape.setting], shape.width - len(rows), []
        for _ in rows:
            most = min(setting.depth, room) if setting.is_chain else setting.depth
            depths.append(int(self._drawn.integers(most + 1)))
            room -= depths[-1] if setting.is_chain else 0
        self.taken.append(shape)
        return Decision(shape, tuple(depths), most_steps=int(self._drawn.integers(1, 4)))

    def caught_up(self, request, chances) -> None:
        self.chances.extend(chance for chance in chances if chance >= 0)

    def row_to_probe(self, rows) -> int | None:
        return int(self._drawn.integers(len(rows))) if self._drawn.integers(2) else None


class TurnsPolicy(Policy):
    """Takes settings in turns, two steps at most and whole trees; notes what each step accepted."""

    def __init__(self, speculation: Speculation, rows: int, turns: list[str]) -> None:
        self._shapes = [s for s in speculation.shapes if s.setting in turns]
        self._rows, self._turns, self._step = rows, turns, 0
        self.steps: dict[int, list[tuple[str, int, int, bool]]] = {}

    @property
    def shapes(self):
        return self._shapes

    def decide(self, rows) -> Decision:
        self._step += 1
        setting = self._turns[self._step % len(self._turns)]
        size = step_rows(len(rows), self._rows, 2)
        shape = max(s for s in self._shapes if (s.setting, s.rows) == (setting, size))
        return Decision(shape, (1 << 20,) * len(rows), most_steps=2)

    def observe_step(self, decision, outcomes, seconds, cached) -> None:
        for each in outcomes:
            own = self.steps.setdefault(each.request.request.prompt, [])
            own.append((decision.shape.setting, each.tokens, each.accepted, each.ended))


@contextlib.contextmanager
def running_at_random(
    target: Model, drafter: SwitchingDrafter, rows: int, columns: int = 24, **options
) -> Iterator[Engine]:
    """An engine whose steps are made with any of its programs, and of all that it could have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_WORTH", 0.0)
        with running(target, drafter, rows=rows, columns=columns, **options) as engine:
            engine.speculation.policy = RandomPolicy(engine.speculation, rows)
            yield engine
