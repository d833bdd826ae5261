"""What each program would give the rows of a step, and how long it would take."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specjax.goodput.acceptance import CHAIN, Acceptance, curve_of
from specjax.goodput.chunks import PromptLoad
from specjax.goodput.costs import StepCosts
from specjax.goodput.policy import DraftSetting, Forecast, RowState, StepShape

_HORIZON = 16
"""Steps over which the seconds of catching up count."""
_YIELD = 0.01
"""Weight of each row's step in what a program gave over what was expected of it. At 0.05 chance
alone moves that by a tenth, and a program that had bad luck is not run again (12 % of goodput lost
in a simulated row with α = 0.85, 2026-11-24)."""

Node = tuple[float, int, int]
"""How often a row's chain survives to a depth; the row's place; the depth."""


class Candidate(NamedTuple):
    """A way to make the next step.

    Attributes:
      shape: its program.
      forecast: what it gives.
      depths: how deep each row's tree may be.
      goodput: tokens a second, with its share of the seconds in which the draft catches up and
        prompts are read.
    """

    shape: StepShape
    forecast: Forecast
    depths: tuple[int, ...]
    goodput: float


class Forecaster:
    """Forecasts every program's step, for the rows of the next one.

    Args:
      settings: by their names.
      shapes: the programs there are; `join` adds others.
      costs: of them.
      acceptance: of drafts.
      catch_up: seconds in which the draft reads some tokens of a row, by how many.
      prompts: what of them is read between steps.
      rows: how many there are.
    """

    def __init__(
        self,
        settings: Mapping[str, DraftSetting],
        shapes: Sequence[StepShape],
        costs: StepCosts,
        acceptance: Acceptance,
        catch_up: Mapping[int, float],
        prompts: PromptLoad,
        rows: int,
    ) -> None:
        self.prompts = prompts
        self._settings, self._costs, self._acceptance = settings, costs, acceptance
        self._rows = rows
        self.join(shapes, catch_up)
        trees = sorted((s for s in settings.values() if s.nodes and not s.is_chain), key=_nodes)
        self._smaller = {
            setting.name: [*(each for each in trees if each.kind == setting.kind
                             and each.nodes < setting.nodes), setting]
            for setting in trees
        }  # fmt: skip
        self._draws = any(setting.is_chain for setting in settings.values())
        self._yields: dict[StepShape, float] = {}

    def join(self, shapes: Sequence[StepShape], catch_up: Mapping[int, float]) -> None:
        """Takes all the programs that there are now, and what catching up costs."""
        self._catch_up = sorted(catch_up.items())
        counts = range(1, self._rows + 1)
        self._by_count = {count: _fitting(count, shapes) for count in counts}

    @property
    def reads(self) -> bool:
        """Whether there are programs with which the draft catches up."""
        return bool(self._catch_up)

    def candidates(self, rows: Sequence[RowState]) -> list[Candidate]:
        """Every program that these rows fit in."""
        count, cached = len(rows), sum(row.held for row in rows)
        switch = sum(self.catch_up_seconds(row.lag) for row in rows) / _HORIZON
        chains = self._chains(rows)
        found = []
        for shape in self._by_count[count]:
            setting = self._settings[shape.setting]
            tokens, depths = self._yield_of(setting, shape.width - count, rows, chains)
            tokens = count + (tokens - count) * self._yields.get(shape, 1.0)
            seconds = self._costs.seconds(shape, cached)
            reading = self.prompts.seconds_a_token(seconds)
            whole = seconds + reading * tokens + (switch if setting.runs_draft else 0.0)
            forecast = Forecast(tokens, seconds, reading)
            found.append(Candidate(shape, forecast, depths, tokens / whole))
        return found

    def catch_up_seconds(self, tokens: int) -> float:
        """How long the draft takes to read so many tokens of a row."""
        if tokens <= 0 or not self._catch_up:
            return 0.0
        size, seconds = next(
            ((size, own) for size, own in self._catch_up if size >= tokens), self._catch_up[-1]
        )
        return seconds * -(-tokens // size)

    def observe(self, shape: StepShape, forecast: Forecast, count: int, tokens: int) -> None:
        """Notes what a step gave `count` rows of which `forecast` was expected."""
        expected = forecast.tokens - count
        if expected <= 0.2 * count:
            return
        was, weight = self._yields.get(shape, 1.0), min(_YIELD * count, 0.1)
        ratio = was * min(max((tokens - count) / expected, 0.0), 4.0)
        self._yields[shape] = min(max(was + weight * (ratio - was), 0.5), 1.5)

    def kept_of(self, shape: StepShape, count: int) -> DraftSetting | None:
        """The setting whose whole trees `count` rows had in a step, by its columns.

        That of the program itself, or of chosen trees the largest one that there was room for.
        """
        setting = self._settings[shape.setting]
        if setting.drawn:
            return setting
        fitting = [s for s in self._smaller[setting.name] if count * (s.nodes + 1) <= shape.width]
        return fitting[-1] if fitting else None

    def tokens_of(self, candidate: Candidate, rows: Sequence[RowState], place: int) -> float:
        """Tokens that a row is expected to be given."""
        setting, row = self._settings[candidate.shape.setting], rows[place]
        if not setting.nodes:
            return 1.0
        if setting.is_chain:
            curve = self._acceptance.expected(curve_of(setting), row.request, row.temperature)
            return 1.0 + curve.tokens[min(candidate.depths[place], len(curve.survival))]
        return 1.0 + self._tree(setting, row, candidate.shape.width / len(rows) - 1)

    def _chains(self, rows: Sequence[RowState]) -> list[Node]:
        """The nodes of all rows' chains, the likeliest first."""
        if not self._draws:
            return []
        found = []
        for place, row in enumerate(rows):
            survival = self._acceptance.expected(CHAIN, row.request, row.temperature).survival
            most = min(len(survival), max(row.left - 1, 0))
            found.extend((survival[depth], place, depth + 1) for depth in range(most))
        found.sort(key=_survival, reverse=True)
        return found

    def _yield_of(
        self, setting: DraftSetting, room: int, rows: Sequence[RowState], chains: list[Node]
    ) -> tuple[float, tuple[int, ...]]:
        """Tokens that a step with room for so many drafted nodes emits, and the rows' depths."""
        count = len(rows)
        if not setting.nodes:
            return float(count), (0,) * count
        if setting.is_chain:
            return _packed(setting.depth, room, count, chains)
        each, total = room / count, float(count)
        for row in rows:
            total += min(self._tree(setting, row, each), max(row.left - 1, 0))
        return total, (setting.depth,) * count

    def _tree(self, setting: DraftSetting, row: RowState, nodes: float) -> float:
        """Accepted tokens of a tree of which so many nodes are kept, of a drawn one all.

        Between the trees of fewer nodes that there are it is taken as a line; below the smallest as
        the square root of its share of nodes.
        """
        low, least = 0, 0.0
        for other in self._smaller[setting.name]:
            own = self._acceptance.expected(other.name, row.request, row.temperature).tokens[-1]
            if nodes < other.nodes:
                if not low:
                    return own * (max(nodes, 0.0) / other.nodes) ** 0.5
                return least + (own - least) * (nodes - low) / (other.nodes - low)
            low, least = other.nodes, own
        return least


def _packed(
    deepest: int, room: int, count: int, chains: list[Node]
) -> tuple[float, tuple[int, ...]]:
    """The likeliest nodes of all rows' chains that there is room for.

    A chain survives to a depth less often than to the one above, so that these are chains.
    """
    depths, total = [0] * count, float(count)
    for alive, place, depth in chains:
        if not room:
            break
        if depth <= deepest:
            room -= 1
            total += alive
            depths[place] += 1
    return total, tuple(depths)


def _fitting(count: int, shapes: Sequence[StepShape]) -> list[StepShape]:
    """Of each setting the programs of the fewest rows in which so many fit."""
    fitting = [shape for shape in shapes if shape.rows >= count]
    fewest: dict[str, int] = {}
    for shape in fitting:
        fewest[shape.setting] = min(shape.rows, fewest.get(shape.setting, shape.rows))
    return [shape for shape in fitting if shape.rows == fewest[shape.setting]]


def _survival(node: Node) -> float:
    return node[0]


def _nodes(setting: DraftSetting) -> int:
    return setting.nodes
