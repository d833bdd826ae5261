"""What drafts are expected to give: curves, a request's own effect, calibrated chances."""

import itertools
import math
import random
from statistics import fmean

import pytest

from specjax.goodput.acceptance import Acceptance
from specjax.goodput.policy import DraftSetting, Outcome
from specjax.goodput.survival import Calibration, Curve, Rate, RequestEffect, logistic, logit

HAZARDS = (0.9, 0.6, 0.8, 0.4, 0.7)
CHAIN = DraftSetting("chain:5", 5, 5, drawn=True, runs_draft=True)
TREE = DraftSetting("specexec:7", 7, 3, runs_draft=True)


def survivors(drawn: random.Random, hazards, depth: int) -> int:
    """How many of so many drafted tokens are accepted."""
    return next((at for at in range(depth) if drawn.random() >= hazards[at]), depth)


def survival_of(hazards) -> list[float]:
    return list(itertools.accumulate(hazards, lambda alive, chance: alive * chance))


def mean_survival(curve, note, times: int) -> list[float]:
    """The survival that a curve states, on average over the second half of its observations."""
    found = []
    for time in range(times):
        note(curve)
        if time > times // 2 and time % 50 == 0:
            found.append(curve.expected(0.0).survival)
    return [fmean(each) for each in zip(*found, strict=True)]


def test_a_curve_recovers_chances_by_depth_from_drafts_of_mixed_depths():
    drawn = random.Random(0)

    def note(curve: Curve) -> None:
        depth = drawn.randint(1, 5)
        curve.observe(survivors(drawn, HAZARDS, depth), depth)

    found = mean_survival(Curve([0.5] * 5), note, 8000)
    assert found == pytest.approx(survival_of(HAZARDS), abs=0.04)


def expected_tokens(censoring: bool) -> float:
    drawn, acceptance = random.Random(1), Acceptance([CHAIN], censoring=censoring)
    found = []
    for time in range(3000):
        request, depth = time // 10, drawn.randint(1, 5)
        acceptance.expected("chain", request, 0.0)
        accepted = survivors(drawn, HAZARDS, depth)
        outcome = Outcome(request, accepted + 1, depth, accepted)
        acceptance.observe("chain", outcome, 5, whole=True, is_chain=True)
        found.append(acceptance.expected("chain", None, 0.0).tokens[-1])
    return fmean(found[1000:])


def test_full_acceptance_that_counts_as_a_rejection_makes_chances_too_low():
    true = sum(survival_of(HAZARDS))
    assert expected_tokens(censoring=True) == pytest.approx(true, rel=0.05)
    assert expected_tokens(censoring=False) < 0.9 * true


def test_accepted_over_drafted_is_too_low_a_rate():
    """True α = 0.8 and five drafted tokens: 0.538 of them are accepted, 3.69 tokens are given."""
    drawn = random.Random(2)

    def note(each) -> None:
        each.observe(survivors(drawn, [0.8] * 5, 5), 5)

    by_rate = mean_survival(Rate([0.6] * 5), note, 8000)
    by_depth = mean_survival(Curve([0.6] * 5), note, 8000)
    assert by_rate[0] == pytest.approx(0.538, abs=0.02)
    assert 1 + sum(by_rate) == pytest.approx(2.11, abs=0.15)  # curved, so a little more on average
    assert 1 + sum(by_depth) == pytest.approx(3.69, abs=0.1)

    def best_depth(survival: list[float]) -> int:
        """Where a drafted token takes a tenth of a step."""
        return max((1, 3, 5), key=lambda depth: (1 + sum(survival[:depth])) / (1 + 0.1 * depth))

    assert (best_depth(by_rate), best_depth(by_depth)) == (3, 5), "it settles too shallow"


def test_a_curve_forgets_what_does_not_hold_any_more():
    drawn, curve = random.Random(3), Curve([0.5] * 4)
    for _ in range(2000):
        curve.observe(survivors(drawn, [0.95] * 4, 4), 4)
    assert curve.hazards()[0] > 0.9
    for _ in range(600):
        curve.observe(survivors(drawn, [0.2] * 4, 4), 4)
    assert curve.hazards()[0] == pytest.approx(0.2, abs=0.15)


def test_chances_along_a_text_give_the_survival_of_drafts():
    """Chances vary from place to place, as the likelihood of a text's tokens does."""
    drawn = random.Random(4)

    def chances() -> list[float]:
        return [
            each + drawn.choice([-0.1, 0.1]) * (depth > 0) for depth, each in enumerate(HAZARDS)
        ]

    found = mean_survival(Curve([0.5] * 5), lambda curve: curve.observe_chances(chances()), 2000)
    assert found == pytest.approx(survival_of(HAZARDS), abs=0.03)


def test_where_a_texts_chances_are_unknown_nothing_is_learned():
    acceptance = Acceptance([CHAIN])
    before = acceptance.expected("chain", "a", 0.0)
    acceptance.observe_text("chain", "a", [-1.0] * 40)
    acceptance.observe_text("chain", "a", [math.nan] * 40)
    acceptance.observe_text("chain", "gone", [0.1] * 40)
    assert acceptance.expected("chain", "a", 0.0) == before
    acceptance.observe_text("chain", "a", [-1.0, *[0.1] * 40])
    assert acceptance.expected("chain", "a", 0.0).tokens[-1] < before.tokens[-1]


@pytest.mark.parametrize("planted", [-1.5, 0.0, 1.5])
def test_a_requests_effect_is_learned(planted):
    """It is pulled to that of the others a little, as a request may have few steps."""
    drawn, effect, found = random.Random(5), RequestEffect(), []
    own = [logistic(logit(each) + planted) for each in HAZARDS]
    for _ in range(2000):
        effect.observe(HAZARDS, survivors(drawn, own, 5), 5)
        found.append(effect.logits)
    assert fmean(found[200:]) == pytest.approx(planted, abs=0.5)
    assert planted * fmean(found[10:30]) >= 0.2 * planted**2


def test_the_effect_of_a_greedy_text_passes_sooner():
    """After many easy steps and a few hard ones less is left of it than of a sampled one's."""
    left = []
    for greedy in (True, False):
        effect = RequestEffect(greedy)
        for _ in range(300):
            effect.observe(HAZARDS, 5, 5)
        before = effect.logits
        assert before > 1
        for _ in range(4):
            effect.observe(HAZARDS, 1, 5)
        left.append(effect.logits / before)
    assert left[0] < left[1] - 0.2


def test_an_effect_is_bounded():
    for accepted, drafted in ((5, 5), (0, 5)):
        effect = RequestEffect()
        for _ in range(5000):
            effect.observe(HAZARDS, accepted, drafted)
            effect.observe_chance(0.9, float(accepted > 0))
            assert abs(effect.logits) <= 4


def test_a_request_learns_from_its_own_steps_and_is_forgotten():
    acceptance = Acceptance([CHAIN])
    acceptance.expected("chain", "good", 0.0)
    for number in range(400):
        acceptance.expected("chain", number, 0.0)
        for request, accepted in (("good", 5), (number, number % 2)):
            outcome = Outcome(request, accepted + 1, 5, accepted)
            acceptance.observe("chain", outcome, 5, whole=True, is_chain=True)
    others = acceptance.expected("chain", None, 0.0).tokens[-1]
    assert acceptance.expected("chain", "good", 0.0).tokens[-1] > others + 1
    acceptance.forget("good")
    assert acceptance.expected("chain", "good", 0.0).tokens[-1] == pytest.approx(others)


def test_a_curve_is_of_requests_of_like_temperatures():
    acceptance = Acceptance([CHAIN])
    before = {each: acceptance.expected("chain", None, each) for each in (0.0, 0.5, 0.9, 2.0)}
    acceptance.expected("chain", "a", 0.8)
    for _ in range(50):
        acceptance.observe("chain", Outcome("a", 1, 5, 0), 5, whole=True, is_chain=True)
    changed = {each for each in before if acceptance.expected("chain", None, each) != before[each]}
    assert changed == {0.9}


def test_a_tree_that_was_cut_is_no_trial_of_whole_ones():
    """Else only what is accepted counts of it, and trees that are always cut look perfect."""
    drawn, acceptance = random.Random(6), Acceptance([TREE])
    before = acceptance.expected("specexec:7", "a", 0.0)
    for _ in range(300):
        accepted = survivors(drawn, [0.3] * 3, 3)
        outcome = Outcome("a", accepted + 1, 3, accepted)
        acceptance.observe("specexec:7", outcome, 3, whole=False, is_chain=False)
    assert acceptance.expected("specexec:7", "a", 0.0) == before


@pytest.mark.parametrize("censoring", [True, False])
def test_a_row_that_drafted_nothing_says_nothing(censoring):
    acceptance = Acceptance([CHAIN], censoring=censoring)
    before = acceptance.expected("chain", "a", 0.0)
    for _ in range(50):
        acceptance.observe("chain", Outcome("a", 1, 0, 0), 5, whole=True, is_chain=True)
    assert acceptance.expected("chain", "a", 0.0) == before


def test_a_request_that_ended_may_have_accepted_more():
    acceptance = Acceptance([CHAIN])
    acceptance.expected("chain", "a", 0.0)
    before = acceptance.expected("chain", None, 0.0)
    for _ in range(50):
        outcome = Outcome("a", 1, 5, 0, ended=True)
        acceptance.observe("chain", outcome, 5, whole=True, is_chain=True)
    assert acceptance.expected("chain", None, 0.0) == before


def fitted(planted: list[tuple[float, float]], draw) -> Calibration:
    """A calibration that saw 2,000 nodes of each of these intercepts and slopes, in turn."""
    drawn, calibration = random.Random(7), Calibration()
    for intercept, slope in planted:
        for _ in range(20):
            chances = [draw(drawn) for _ in range(100)]
            truth = [logistic(intercept + slope * logit(each)) for each in chances]
            hits = [drawn.random() < each for each in truth]
            calibration.observe(list(zip(chances, hits, strict=True)))
    return calibration


PLANTED = [(0.0, 1.0), (-0.8, 0.6), (1.0, 1.4), (-2.0, 0.5)]


@pytest.mark.parametrize("planted", PLANTED)
def test_chances_are_calibrated(planted):
    found = fitted([planted], random.Random.random)
    assert (found.intercept, found.slope) == pytest.approx(planted, abs=0.35)
    assert found.fits > 2


@pytest.mark.parametrize("planted", [*itertools.permutations([(-2.0, 0.5), (2.0, 2.0)]), PLANTED])
def test_chances_near_0_and_1_are_calibrated_also_after_a_change(planted):
    """There a whole step of Newton's method goes far past the best fit, and stays there."""
    found = fitted(planted, lambda drawn: drawn.choice([1e-9, 0.5, 0.999]))
    assert (found.intercept, found.slope) == pytest.approx(planted[-1], abs=1.0)


def test_chances_that_are_no_numbers_are_not_calibrated_by():
    calibration = Calibration()
    for _ in range(20):
        calibration.observe([(math.nan, True)] * 100)
    assert (calibration.intercept, calibration.slope) == pytest.approx((0, 1))
    for _ in range(20):
        calibration.observe([(math.nan, True), *[(0.5, True)] * 100])
    assert calibration.intercept > 1


def test_a_chance_of_any_logit_is_one():
    assert logistic(-1e6) == pytest.approx(0)
    assert logistic(1e6) == pytest.approx(1)
    assert logistic(logit(0.3)) == pytest.approx(0.3)


def _told(curve: Curve, chance: float, steps: int, drawn: random.Random) -> None:
    for _ in range(steps):
        curve.observe(int(drawn.random() < chance), 1)


def test_a_draft_that_changed_is_seen_to_have_changed():
    """The memory is 400 trials; a change is seen within a third of that."""
    for before, after in ((0.3, 0.9), (0.9, 0.3), (0.03, 0.7)):
        curve, drawn = Curve([0.5] * 3), random.Random(1)
        _told(curve, before, 1000, drawn)
        assert curve.changes == 0
        assert curve.hazards()[0] == pytest.approx(before, abs=0.1)
        _told(curve, after, 130, drawn)
        assert curve.changes == 1
        assert curve.hazards()[0] == pytest.approx(after, abs=0.2)


def test_chance_is_not_taken_for_a_change():
    for seed in range(20):
        curve, drawn = Curve([0.5] * 3), random.Random(seed)
        for _ in range(60):  # texts, of which some are easy and some are hard
            _told(curve, drawn.choice((0.55, 0.65, 0.75)), 25, drawn)
        assert curve.changes == 0
