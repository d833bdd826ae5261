"""When measurements replace the shipped default, and when they do not."""

import math

import numpy as np
import pytest

from specjax.methods import registry
from specjax.methods.evidence import evidence, fastest, gains
from specjax.methods.method import Setting
from specjax.methods.records import Measured, Run

DEFAULT, OTHER = registry.setting_of("specexec"), registry.setting_of("chain")
PLAIN = Setting()


def run(*ratios: tuple[Setting, list[float]], date: str = "2026-11-23") -> Run:
    return Run(date, 0.0, 8, tuple(Measured(setting, 1.0, tuple(each)) for setting, each in ratios))


def restless(mean: float, spread: float, rounds: int, seed: int = 0) -> list[float]:
    """Ratios whose logarithms have just this mean and standard deviation."""
    noise = np.random.default_rng(seed).standard_normal(rounds)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    return np.exp(math.log(mean) + spread * noise).tolist()


def replaced_by(*runs: Run) -> Setting | None:
    best = fastest(gains(evidence(runs, DEFAULT), DEFAULT))
    return None if best is None else best.setting


def test_what_did_not_run_beside_the_default_is_no_evidence():
    alone = run((PLAIN, [1.0] * 8), (OTHER, [9.0] * 8))
    assert evidence([alone], DEFAULT) == []
    assert replaced_by(alone) is None
    assert evidence([run((DEFAULT, [1.0] * 8))], DEFAULT) == []


def test_two_rounds_are_no_evidence():
    few = run((DEFAULT, [1.0] * 2), (OTHER, [9.0] * 2))
    assert replaced_by(few) is None
    assert replaced_by(run((DEFAULT, [1.0] * 3), (OTHER, [9.0] * 3))) == OTHER
    assert replaced_by(run((DEFAULT, [1.0] * 4), (OTHER, [9.0] * 3))) is None  # not the same rounds


@pytest.mark.parametrize(
    ("gain", "spread", "rounds", "replaces"),
    [
        (1.08, 0.0, 40, False),  # another run might differ by as much
        (1.12, 0.0, 40, True),
        (1.12, 0.2, 8, False),
        (1.5, 0.2, 8, True),
        (1.5, 0.4, 4, False),
        (1.5, 0.4, 40, True),
        (0.5, 0.0, 40, False),
    ],
)
def test_a_gain_must_be_above_the_noise(gain, spread, rounds, replaces):
    told = run((DEFAULT, [2.0] * rounds), (OTHER, restless(2 * gain, spread, rounds)))
    assert replaced_by(told) == (OTHER if replaces else None)


def test_the_noise_is_as_documented():
    one = run((DEFAULT, [2.0] * 10), (OTHER, restless(3.0, 0.2, 10)))
    (found,) = gains([one], DEFAULT)
    assert found.mean == pytest.approx(math.log(1.5))
    assert found.noise == pytest.approx(3 * math.sqrt(0.2**2 / 8 + 0.03**2))
    (twice,) = gains([one, one], DEFAULT)  # the same prompts again say nothing of others
    assert twice.deviation == pytest.approx(0.2 / math.sqrt(8))
    (quiet,) = gains([run((DEFAULT, [2.0] * 10), (OTHER, [3.0] * 10))] * 4, DEFAULT)
    assert quiet.deviation == pytest.approx(0.03 / 2)


def test_one_run_on_a_busy_machine_does_not_outweigh_those_before_it():
    """Plain decoding seems faster once; it was slower in two runs."""
    calm = run((DEFAULT, [1.3] * 24), (PLAIN, [1.0] * 24))
    busy = run((DEFAULT, [0.8] * 24), (PLAIN, [1.0] * 24), date="2026-11-24")
    assert replaced_by(calm, calm, busy) is None
    shaken = run((DEFAULT, restless(0.8, 0.5, 24)), (PLAIN, [1.0] * 24))
    assert replaced_by(shaken) is None


def test_runs_that_contradict_each_other_keep_the_default():
    up = run((DEFAULT, [1.0] * 24), (OTHER, [1.5] * 24))
    down = run((DEFAULT, [1.0] * 24), (OTHER, [0.8] * 24))
    assert replaced_by(up) == OTHER
    assert replaced_by(up, up, down) is None


def test_a_later_run_of_some_methods_leaves_what_was_known():
    full = run((PLAIN, [1.0] * 24), (DEFAULT, [2.0] * 24), (OTHER, [3.0] * 24))
    some = run((PLAIN, [1.0] * 24), (DEFAULT, [2.0] * 24), date="2026-11-24")
    few = run((DEFAULT, restless(2.0, 0.4, 4)), (OTHER, restless(1.8, 0.4, 4, 1)))
    assert replaced_by(full, some) == OTHER
    assert replaced_by(full, few) == OTHER


def test_of_several_the_surest_gain_is_taken_and_none_below_plain_decoding():
    tree, lookup = registry.setting_of("tree"), registry.setting_of("lookup")
    told = run((DEFAULT, [1.0] * 12), (tree, [1.5] * 12), (OTHER, restless(1.7, 0.25, 12)),
               (lookup, [1.4] * 12))  # fmt: skip
    assert replaced_by(told) == tree
    slow = run((DEFAULT, [0.5] * 12), (tree, [0.8] * 12), (PLAIN, restless(1.0, 0.3, 12)))
    assert replaced_by(slow) == PLAIN
    unsure = run((DEFAULT, [0.5] * 12), (tree, [0.8] * 12), (PLAIN, restless(1.0, 1.5, 12)))
    assert replaced_by(unsure) == tree
