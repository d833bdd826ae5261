"""Drafters that share a state, and a policy that takes any of their programs at random."""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.switching import SwitchingDrafter
from specjax.engine.engine import Engine
from specjax.engine.speculation import Speculation
from specjax.goodput.policy import Decision, Policy, step_rows
from specjax.models.transformer import Model
from tests.engines import running
from tests.pairs import alone


def switching_of(draft: Model) -> SwitchingDrafter:
    """One of each kind of setting."""
    vocabulary = draft.config.vocab_size

    def tree(budget: int) -> BestFirstDrafter:
        return BestFirstDrafter(draft, jnp.ones(2), Growth(budget=budget, beams=2, width=2))

    return SwitchingDrafter.of(
        {
            "off": PlainDrafter(vocabulary),
            "chain:1": alone(draft, (1,)),
            "chain:3": alone(draft, (1, 1, 1)),
            "tree:6": tree(6),
            "lookup:4": TextDrafter(
                jnp.asarray([0.0, 0.4, 0.6]), None, Growth(budget=4, depth=3), vocabulary
            ),
        }
    )


class RandomPolicy(Policy):
    """Takes any program that has a column for each row, and any depths that fit in it."""

    def __init__(self, speculation: Speculation, rows: int, seed: int = 0) -> None:
        self._shapes, self._settings = speculation.shapes, speculation.settings
        self._rows, self._drawn = rows, np.random.default_rng(seed)
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
        size = step_rows(len(rows), self._rows, True)
        able = [shape for shape in self._shapes if shape.rows == size]
        shape = able[self._drawn.integers(len(able))]
        setting, room, depths = self._settings[shape.setting], shape.width - len(rows), []
        for _ in rows:
            most = min(setting.depth, room) if setting.drawn else setting.depth
            depths.append(int(self._drawn.integers(most + 1)))
            room -= depths[-1] if setting.drawn else 0
        self.taken.append(shape)
        return Decision(shape, tuple(depths))

    def caught_up(self, request, chances) -> None:
        self.chances.extend(chance for chance in chances if chance >= 0)

    def row_to_probe(self, rows) -> int | None:
        return int(self._drawn.integers(len(rows))) if self._drawn.integers(2) else None


class TurnsPolicy(Policy):
    """Takes settings in turns, whole trees; notes what every step of a request accepted."""

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
        size = step_rows(len(rows), self._rows, True)
        shape = max(s for s in self._shapes if (s.setting, s.rows) == (setting, size))
        return Decision(shape, (1 << 20,) * len(rows))

    def observe_step(self, decision, outcomes, seconds, cached) -> None:
        for each in outcomes:
            own = self.steps.setdefault(each.request.request.prompt, [])
            own.append((decision.shape.setting, each.tokens, each.accepted, each.ended))


@contextlib.contextmanager
def running_at_random(target: Model, draft: Model, rows: int, **options) -> Iterator[Engine]:
    """An engine whose steps are made with any of its programs."""
    with running(target, switching_of(draft), rows=rows, columns=24, **options) as engine:
        engine.speculation.policy = RandomPolicy(engine.speculation, rows)
        yield engine
