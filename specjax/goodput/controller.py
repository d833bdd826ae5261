"""The setting of each step: the one of the largest goodput (SmartSpec, arXiv 2406.14066).

Goodput is the tokens that a step is expected to emit, over the seconds that it is expected to take.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from specjax.goodput.acceptance import CHAIN, Acceptance, curve_of
from specjax.goodput.bursts import BURST
from specjax.goodput.chunks import ChunkCosts, PromptLoad
from specjax.goodput.costs import Cost, StepCosts
from specjax.goodput.forecast import Candidate, Forecaster
from specjax.goodput.guard import Guard
from specjax.goodput.policy import (
    PLAIN,
    Decision,
    DraftSetting,
    Forecast,
    Outcome,
    Policy,
    RowState,
    StepShape,
    Timed,
)

_REUSED = 4
"""Bursts of the same rows for which a decision stands."""
_BETTER = 1.03
"""Times the goodput of the last setting that the forecast of another must exceed."""
_PROBING = 0.02
"""Share of time that may be lost to learn."""
_READING = 0.01
"""Of it, the share for texts that the draft reads while nothing is drafted; what they leave is for
steps that are not believed to be best."""
_FIRST_PROBES = 0.5
"""Seconds that may be lost to such steps before there is any share."""
_PROBE_STEPS = 4
_WORTH_A_PROBE = 0.85
"""Share of the best goodput from which a setting of which little is known is worth a probe."""
_FEW_TRIALS, _FEW_STEPS = 100, 3
_STALE = 3000
"""Steps after which a program that promises as much as the best is tried again, and plain
decoding is."""
PAUSE = 4.0
"""Times as long as expected that a step counts as at most: what is longer was a pause."""
_LEARNED = 4
"""Rows of a step that are learned from, in turn: learning takes time as well."""
_MARGIN = 0.8
"""Share of the seconds a token that a request asks for in which it is to have it: chunks of prompts
and hard places of a text make some steps longer. With 1 / 0.9 / 0.8 of it 0.62 / 0.68 / 0.79 of the
requests of a simulated load had their tokens in time, 0.53 without targets
(`benchmarks.simulation`, 2026-11-24)."""
_LEAST_TPOT = 1e-9
"""Seconds a token that nobody can ask for less than."""
_LEAST_LAG = 32
"""Tokens that the draft lacks of a text from which on a probe is worth its program."""


class Options(NamedTuple):
    """What of the controller may be left out, for ablations.

    Attributes:
      packing: steps of fewer columns than all rows' whole trees.
      survival: acceptance by depth; else it is a single rate, accepted over drafted.
      censoring: full acceptance says nothing of what is deeper; else it counts as a rejection.
      probing: what is not believed to be best is tried, and acceptance is measured while nothing
        is drafted.
      hysteresis: another setting must promise more than the last one.
    """

    packing: bool = True
    survival: bool = True
    censoring: bool = True
    probing: bool = True
    hysteresis: bool = True


class Controller(Policy):
    """Chooses each step's setting, columns and budgets, of those whose programs are there.

    Args:
      settings: those to choose from; `none` is one of them.
      costs: of the programs that are there (see `shapes`); one of `none` for all rows is. `join`
        adds others.
      catch_up: seconds in which the draft reads some tokens of a row, by how many.
      rows: how many rows there are.
      chunks: of prompts, their costs.
      options: what is left out of it.
    """

    def __init__(
        self,
        settings: Sequence[DraftSetting],
        costs: Mapping[StepShape, Cost],
        catch_up: Mapping[int, float],
        rows: int,
        *,
        chunks: ChunkCosts = MappingProxyType({}),
        options: Options = Options(),
    ) -> None:
        self.settings = {setting.name: setting for setting in settings}
        self.costs, self._shapes = StepCosts(costs), sorted(costs)
        self.acceptance = Acceptance(
            [s for s in settings if s.nodes], options.survival, options.censoring
        )
        self._forecaster = Forecaster(
            self.settings, self._shapes, self.costs, self.acceptance, catch_up,
            PromptLoad(chunks), rows,
        )  # fmt: skip
        self.guard, self._options = Guard(), options
        self.fixed: str | None = None
        self.last: Decision | None = None
        self.forecasts: dict[str, Forecast] = {}
        self._requests: tuple[Hashable, ...] = ()
        self._probe: tuple[StepShape, int] | None = None
        self._best = math.inf  # of the last probe, tokens a second that it was to be better than
        self._reused = self._steps = self._turn = 0
        self._last_run: dict[StepShape, int] = {}
        self.seconds = self._tried_seconds = self._read_seconds = 0.0

    def join(
        self, costs: Mapping[StepShape, Cost], catch_up: Mapping[int, float], chunks: ChunkCosts
    ) -> None:
        """Takes further programs, or other costs of known ones.

        Args:
          costs: of programs that are there from now on.
          catch_up: as of the constructor, of all programs there are.
          chunks: of prompts, their costs.
        """
        self.costs.join(costs)
        self._shapes = sorted(self.costs.measured)
        self._forecaster.join(self._shapes, catch_up)
        self._forecaster.prompts.use(chunks)

    @property
    def probing_seconds(self) -> float:
        """Seconds that were lost to learn."""
        return self._tried_seconds + self._read_seconds

    @property
    def shapes(self) -> Sequence[StepShape]:
        """Every program that may be asked for."""
        return self._shapes

    @property
    def calibration(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Intercept and slope of the nodes' chances, of greedy rows and of sampled ones."""
        greedy, sampled = (self.acceptance.calibrations[each] for each in (True, False))
        return (greedy.intercept, greedy.slope), (sampled.intercept, sampled.slope)

    def fix(self, setting: str | None) -> None:
        """Uses a setting from now on; None lets the controller choose again.

        Raises:
          ValueError: there is no such setting, or none of its programs is there yet.
        """
        if setting is not None and setting not in self.settings:
            raise ValueError(f"no setting {setting!r}; there are auto, {', '.join(self.settings)}.")
        there = {shape.setting for shape in self._shapes}
        if setting is not None and setting not in there:
            names = [name for name in self.settings if name in there]
            raise ValueError(
                f"the setting {setting!r} has no program yet; those that have are "
                f"{', '.join(names)}."
            )
        self.fixed, self.last, self._probe = setting, None, None

    def decide(self, rows: Sequence[RowState]) -> Decision:
        """The setting of the largest goodput, unless the last is nearly as good or one is tried."""
        requests = tuple([row.request for row in rows])
        if (standing := self.standing(requests)) is not None:
            return standing
        found = self._forecaster.candidates(rows)
        plain = next(each for each in found if each.shape.setting == PLAIN)
        chosen, reason = self._chosen(rows, found, plain)
        most = _PROBE_STEPS // 2 if reason == "probe" else BURST  # two bursts are in flight
        self.last = Decision(
            chosen.shape, chosen.depths, reason, chosen.forecast, plain.forecast, most
        )
        self.forecasts = _best_of_settings(found)
        self._requests, self._reused = requests, 0
        return self.last

    def standing(self, requests: Sequence[Hashable]) -> Decision | None:
        """The last decision, if it was for these rows, lately."""
        if self.last is None or not self._stands(requests):
            return None
        self._reused += 1
        return self.last

    def _stands(self, requests: Sequence[Hashable]) -> bool:
        """Whether the last decision may be used again."""
        assert self.last is not None
        if tuple(requests) != self._requests:
            return False
        if self._probe is not None:
            return self._probe[1] > 0
        return self._reused < _REUSED and self.guard.active == (self.last.reason == "guard")

    def _chosen(
        self, rows: Sequence[RowState], found: list[Candidate], plain: Candidate
    ) -> tuple[Candidate, str]:
        self._probe = None
        if self.fixed is not None:
            return max(_of(found, self.fixed) or [plain], key=_width), "fixed"
        if self.guard.active:
            return plain, "guard"
        best = max(found, key=_goodput)
        targets = [at for at, row in enumerate(rows) if row.max_tpot is not None]
        if targets:
            kept = self._within_targets(rows, found, targets)
            return (best, "best") if kept is best else (kept, "latency")
        if self._options.probing and (tried := self._worth_a_probe(found, best)) is not None:
            self._probe = tried.shape, _PROBE_STEPS
            self._best = best.forecast.goodput
            return tried, "probe"
        if self._options.hysteresis and self.last is not None:
            same = _of(found, self.last.shape.setting)
            kept = max(same, key=_goodput, default=best)
            if kept is not best and best.goodput < _BETTER * kept.goodput:
                return kept, "hysteresis"
        return best, "best"

    def _worth_a_probe(self, found: list[Candidate], best: Candidate) -> Candidate | None:
        """What may be better than it is believed to be, if there is time left to try it.

        That of which least is known; plain decoding and what promises as much as the best also when
        they were not run for long, as what is known of them may not hold any more.
        """
        if self.probing_seconds > _FIRST_PROBES + _PROBING * self.seconds:
            return None
        tried = [each for each in found if each is not best and self._is_open(each, best)]
        return min(tried, key=lambda each: self.costs.steps(each.shape), default=None)

    def _is_open(self, candidate: Candidate, best: Candidate) -> bool:
        shape, promising = candidate.shape, candidate.goodput > _WORTH_A_PROBE * best.goodput
        steps = self.costs.steps(shape)
        stale = self._steps - self._last_run.get(shape, 0) > _STALE
        if shape.setting == PLAIN:
            return steps < _FEW_STEPS or stale
        # Trees that are cut are no trials of a curve, but their steps tell as much of themselves.
        known = max(self._trials(shape.setting), steps)
        few = steps < _FEW_STEPS or known < _FEW_TRIALS
        return promising and (few or stale)

    def _trials(self, name: str) -> float:
        """How much is known of a setting's acceptance, where least is."""
        return self.acceptance.trials(curve_of(self.settings[name]))

    def _within_targets(
        self, rows: Sequence[RowState], found: list[Candidate], targets: list[int]
    ) -> Candidate:
        """The best of those that give each row its tokens in time, or of those that miss least."""

        def excess(candidate: Candidate) -> float:
            """The most times as long a token as was asked for; 1 if all are in time."""
            return max(1.0, max(self._tpot(candidate, rows, at) for at in targets))

        return min(found, key=lambda each: (round(excess(each), 3), -each.goodput))

    def _tpot(self, candidate: Candidate, rows: Sequence[RowState], place: int) -> float:
        """Seconds a token that a row is expected to see, over those that it asks for at most."""
        most = rows[place].max_tpot
        assert most is not None
        most = max(_MARGIN * most, _LEAST_TPOT)
        tokens = self._forecaster.tokens_of(candidate, rows, place)
        return candidate.forecast.seconds / tokens / most

    def may_admit(self, rows: Sequence[RowState]) -> bool:
        """Whether all rows are expected to have their tokens in time with the last of them, too.

        A row alone is always admitted.
        """
        targets = [at for at, row in enumerate(rows) if row.max_tpot is not None]
        if len(rows) == 1 or not targets:
            return True
        best = self._within_targets(rows, self._forecaster.candidates(rows), targets)
        return all(self._tpot(best, rows, at) <= 1 for at in targets)

    def observe_step(
        self, decision: Decision, outcomes: Sequence[Outcome], timed: Timed | None, cached: int
    ) -> None:
        """Learns from a step."""
        self._steps += 1
        shape, setting = decision.shape, self.settings[decision.shape.setting]
        self._last_run[shape] = self._steps
        if self._probe is not None and self._probe[0] == shape:
            self._probe = shape, self._probe[1] - 1
        if setting.nodes:
            self._learn(decision, setting, outcomes)
        else:
            self.guard.observe_off()
        expected = decision.forecast.seconds if decision.forecast is not None else 0.0
        if timed is not None and not 0 < timed.seconds < math.inf:
            timed = None
        seconds = expected if timed is None else timed.seconds
        self.seconds += seconds
        tokens = float(sum(outcome.tokens for outcome in outcomes))
        self._forecaster.prompts.observe_step(tokens)
        reading = 0.0 if decision.forecast is None else decision.forecast.reading * tokens
        if decision.reason == "probe":
            taken = min(seconds, PAUSE * expected)
            self._tried_seconds += taken + reading - tokens / self._best
        if timed is None:
            return
        self.costs.observe(shape, cached, seconds, timed.share)
        plain, rows = decision.plain, len(decision.depths)
        compared = setting.nodes and decision.reason not in ("probe", "fixed")
        # Rows that ended before, plain decoding would have lost, too.
        if compared and plain is not None and len(outcomes) == rows:
            taken = min(seconds, PAUSE * expected)
            self.guard.observe(rows, tokens, taken + reading, plain.goodput)

    def _learn(
        self, decision: Decision, setting: DraftSetting, outcomes: Sequence[Outcome]
    ) -> None:
        count = len(outcomes)
        kept = self._forecaster.kept_of(decision.shape, len(decision.depths))
        own = setting if kept is None else kept
        name, whole = curve_of(own), kept is not None
        for number in range(min(_LEARNED, count)):
            at = (self._turn + number) % count
            self.acceptance.observe(name, outcomes[at], own.depth, whole, setting.is_chain)
        self._turn += _LEARNED
        left = count < len(decision.depths) or any(each.ended for each in outcomes)
        if decision.forecast is not None and not setting.is_chain and not left:
            tokens = sum(outcome.tokens for outcome in outcomes)
            self._forecaster.observe(decision.shape, decision.forecast, count, tokens)

    def prompt_read(self, tokens: int, left: int) -> None:
        """Learns how much of prompts is read beside the steps."""
        self._forecaster.prompts.observe_prompt(tokens, left)

    def caught_up(self, request: Hashable, chances: Sequence[float]) -> None:
        """Learns how likely tokens of a text would have been accepted."""
        if any(setting.is_chain for setting in self.settings.values()):
            self.acceptance.observe_text(CHAIN, request, chances)

    def row_to_probe(self, rows: Sequence[RowState]) -> int | None:
        """The row whose text the draft lacks most of, if there is time to read it meanwhile."""
        if not (self._options.probing and rows and self._forecaster.reads):
            return None
        place = max(range(len(rows)), key=lambda at: rows[at].lag)
        seconds = self._forecaster.catch_up_seconds(rows[place].lag)
        if rows[place].lag < _LEAST_LAG:
            return None
        if self._read_seconds + seconds > _READING * self.seconds:
            return None
        self._read_seconds += seconds
        return place

    def ended(self, request: Hashable) -> None:
        """Forgets a request."""
        self.acceptance.forget(request)


def _best_of_settings(found: list[Candidate]) -> dict[str, Forecast]:
    best: dict[str, Candidate] = {}
    for each in found:
        other = best.get(each.shape.setting)
        if other is None or each.goodput > other.goodput:
            best[each.shape.setting] = each
    return {name: each.forecast for name, each in best.items()}


def _of(found: list[Candidate], setting: str) -> list[Candidate]:
    return [each for each in found if each.shape.setting == setting]


def _goodput(candidate: Candidate) -> float:
    return candidate.goodput


def _width(candidate: Candidate) -> int:
    return candidate.shape.width
