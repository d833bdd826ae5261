"""What drafts are expected to give: curves of all requests, and each request's own effect."""

from collections.abc import Hashable, Iterator, Sequence

from specjax.goodput.policy import DraftSetting, Outcome
from specjax.goodput.survival import Calibration, Curve, Expected, Rate, RequestEffect

_LIMITS = (0.0, 0.6, 1.0)
"""Temperatures up to which requests are alike; those above the last are alike, too."""
_NAMES = ("0", "0.6", "1", "above 1")
_STRIDE = 4
"""Tokens of a text between the places from which a chain's survival along it is noted."""

_CALIBRATED = 4
"""Of so many trees the nodes of one are noted."""

CHAIN = "chain"
"""The name of the curve of all drawn chains of the shared draft."""
PRIORS = {
    CHAIN: ((0.83, 0.84), (0.72, 0.75), (0.65, 0.7), (0.5, 0.6)),
    "specexec": ((0.92, 0.9), (0.78, 0.72), (0.7, 0.65), (0.55, 0.5)),
    "lookup": ((0.35, 0.6), (0.25, 0.5), (0.2, 0.45), (0.12, 0.3)),
}
"""Chances of acceptance at depth 1 and below, by the setting's kind and the band of temperatures:
what is believed before anything is seen. Near those of the bundled pair (`methods.defaults`)."""


def band(temperature: float) -> int:
    """Which requests are like one of this temperature."""
    return sum(temperature > limit for limit in _LIMITS)


class _Known:
    """A request: its band, and how much better its drafts are than those of others."""

    def __init__(self, temperature: float) -> None:
        self.band = band(temperature)
        self.effect = RequestEffect(self.band == 0)


class Acceptance:
    """Expected tokens of every setting, for every request.

    Curves are kept by the setting and the band of temperatures, and one of all chains: a chain
    survives to a depth alike however long it is, but a tree of more nodes is another.

    Args:
      settings: those that draft.
      by_depth: whether chances differ by depth; else there is a single rate.
      censoring: whether full acceptance says nothing of what is deeper.
    """

    def __init__(
        self, settings: Sequence[DraftSetting], by_depth: bool = True, censoring: bool = True
    ) -> None:
        self._depths: dict[str, int] = {}
        for setting in settings:
            name = curve_of(setting)
            self._depths[name] = max(setting.depth, self._depths.get(name, 0))
        self._by_depth, self._censoring = by_depth, censoring
        self._curves: dict[tuple[str, int], Curve | Rate] = {}
        self._requests: dict[Hashable, _Known] = {}
        self._observed = 0
        self.calibrations = {greedy: Calibration() for greedy in (True, False)}

    def curve(self, name: str, number: int) -> Curve | Rate:
        """The curve of a name, for a band of temperatures."""
        found = self._curves.get((name, number))
        if found is None:
            first, later = PRIORS.get(name.partition(":")[0], PRIORS[CHAIN])[number]
            hazards = [first, *(later,) * (self._depths[name] - 1)]
            made = Curve(hazards) if self._by_depth else Rate(hazards)
            found = self._curves[name, number] = made
        return found

    def trials(self, name: str) -> float:
        """How much is known of a curve, of the bands that running requests are in the least."""
        bands = {known.band for known in self._requests.values()}
        return min((self.curve(name, number).trials for number in bands), default=0.0)

    def expected(self, name: str, request: Hashable, temperature: float) -> Expected:
        """What a request's drafts are expected to give; None stands for one of which nothing is
        known.
        """
        known = self._known(request, temperature)
        return self.curve(name, known.band).expected(known.effect.logits)

    def _known(self, request: Hashable, temperature: float) -> _Known:
        known = self._requests.get(request)
        if known is None:
            known = _Known(temperature)
            if request is not None:
                self._requests[request] = known
        return known

    def observe(self, name: str, outcome: Outcome, depth: int, whole: bool, is_chain: bool) -> None:
        """Notes what a step gave a request.

        Args:
          name: of the curve.
          outcome: of the step.
          depth: of the deepest tree that the row might have had.
          whole: whether the tree was as large as its setting's; a tree that was cut is no trial of
            the curve: what it accepted a whole one would have, but not what it did not.
          is_chain: whether it was a chain, whose end is that of its depth.
        """
        if is_chain:
            depth = min(depth, outcome.nodes)
        known = self._requests.get(outcome.request)
        if known is None or not depth:
            return
        if whole:
            self._observe_whole(self.curve(name, known.band), known, outcome, depth)
        self._observed += 1
        if outcome.chances is not None and self._observed % _CALIBRATED == 0:
            self.calibrations[known.band == 0].observe(outcome.chances())

    def _observe_whole(
        self, curve: Curve | Rate, known: _Known, outcome: Outcome, depth: int
    ) -> None:
        accepted = min(outcome.accepted, depth)
        drafted = accepted if outcome.ended else depth
        if not self._censoring and accepted == depth:
            drafted = depth + 1
        effect = known.effect.logits  # before this step
        known.effect.observe(curve.hazards(), accepted, drafted)
        curve.observe(accepted, drafted, effect)

    def observe_text(self, name: str, request: Hashable, chances: Sequence[float]) -> None:
        """Notes how likely tokens of a text would have been accepted (-1: unknown)."""
        known = self._requests.get(request)
        if known is None:  # it has ended since
            return
        curve = self.curve(name, known.band)
        first = curve.hazards()[0]
        for start in range(0, len(chances), _STRIDE):
            ahead = _until_unknown(chances[start : start + curve.depth])
            if ahead:
                curve.observe_chances(ahead)
        for chance in chances:
            if chance >= 0:
                known.effect.observe_chance(first, chance)

    def forget(self, request: Hashable) -> None:
        """Forgets a request that has ended."""
        self._requests.pop(request, None)

    def table(self) -> Iterator[tuple[str, str, Curve | Rate]]:
        """Every curve, by its name and the band of temperatures."""
        for (name, number), curve in list(self._curves.items()):
            yield name, _NAMES[number], curve


def curve_of(setting: DraftSetting) -> str:
    """The name of the curve by which a setting's whole trees survive."""
    return CHAIN if setting.is_chain else setting.name


def _until_unknown(chances: Sequence[float]) -> list[float]:
    found = []
    for chance in chances:
        if not chance >= 0:  # it may be no number
            break
        found.append(chance)
    return found
