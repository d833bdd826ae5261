"""The controller over simulated loads: what it must never lose, and what it must gain. No jax."""

import dataclasses
import functools
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from statistics import fmean

import pytest

from benchmarks.simulation.__main__ import FEW, FEW_WRONG, checked
from benchmarks.simulation.cases import EIGHT, MACHINE, RATE, ROWS, WRONG, random_case, shapes
from benchmarks.simulation.machines import (
    grown_8b_on_h100,
    llama_8b_on_h100,
    llama_8b_on_v5e,
    measured,
)
from benchmarks.simulation.simulator import (
    SETTINGS,
    Result,
    World,
    controller_of,
    fixed,
    simulate,
    simulate_replicas,
)
from benchmarks.simulation.workload import (
    Arrival,
    Kinds,
    Truth,
    arrivals,
    at_once,
    constant,
    usual,
)
from specjax.engine import scheduler
from specjax.goodput.policy import PLAIN, FixedPolicy, Policy, StepShape
from tests.cases import slow_but


def auto(load: Sequence[Arrival], world: World, rows: int = ROWS, seed: int = 0) -> Result:
    return simulate(controller_of(MACHINE, rows), load, world, rows, seed=seed)


def of(name: str, load: Sequence[Arrival], world: World, rows: int = ROWS) -> Result:
    return simulate(fixed(name, rows), load, world, rows)


def test_the_simulator_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = sys.modules['numpy'] = None;"
        "import benchmarks.simulation.simulator"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def policies() -> list[Policy]:
    return [controller_of(MACHINE, ROWS), *(fixed(name, ROWS) for name in ("none", "specexec:7"))]


@pytest.mark.parametrize("place", range(3))
def test_every_request_is_given_its_tokens(place):
    load = arrivals(constant(RATE), RATE, 40.0, 3, Kinds(temperatures=(0.0, 0.8)))
    world = World(MACHINE, noise=0.0, pauses=0.0)
    found = simulate(policies()[place], load, world, ROWS)
    assert sorted(each.of for each in found.served) == sorted(load)
    assert found.tokens == sum(each.tokens for each in load)
    assert found.busy <= found.seconds + 1e-9
    fastest = MACHINE.step(StepShape(PLAIN, 1, 1)).seconds
    for each in found.served:
        assert each.of.at < each.first <= each.end
        assert each.latency >= fastest * math.ceil(each.of.tokens / 17)


@pytest.mark.parametrize(
    ("columns", "milliseconds"),
    [(8, 7.36), (16, 7.42), (32, 7.39), (48, 7.64), (64, 7.53), (96, 7.74), (128, 7.81),
     (192, 7.90), (256, 8.32)],
)  # fmt: skip
def test_steps_on_an_h100_take_what_was_measured_there(columns, milliseconds):
    machine = grown_8b_on_h100(SETTINGS)
    seconds = machine.step(StepShape("chain:7", 32, columns)).seconds
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.03)
    assert 6.4 <= 1000 * machine.step(StepShape(PLAIN, 32, 32)).seconds <= 6.7


def test_where_prompts_are_read_together_more_is_served():
    """On an accelerator, where a pass over four prompts takes little longer than over one, and one
    that decodes little longer with prompts in it."""
    machine = grown_8b_on_h100(SETTINGS)
    load, found = at_once(200, 1, Kinds((32, 200), (32, 128), (0.0,))), []
    apart = dataclasses.replace(machine, mixed=None)
    for own in (machine, apart, dataclasses.replace(apart, batch=None)):
        policy = FixedPolicy(SETTINGS[0], 32, row_factor=None)
        found.append(simulate(policy, load, World(own), 32))
        assert sorted(each.of for each in found[-1].served) == sorted(load)
    mixed, together, alone = (each.throughput for each in found)
    assert mixed > 1.1 * together
    assert together > 1.02 * alone


def test_where_many_rows_wait_prompts_are_read_between_steps_as_well(monkeypatch):
    machine = grown_8b_on_h100(SETTINGS)
    load, found = at_once(2000, 1, Kinds((32, 200), (32, 128), (0.0,))), []
    chain = next(each for each in SETTINGS if each.name == "chain:7")
    for most in (0.25, math.inf):
        monkeypatch.setattr(scheduler, "_WAITING", most)
        policy = FixedPolicy(chain, 256, row_factor=None)
        found.append(simulate(policy, load, World(machine), 256).throughput)
    assert found[0] > 1.1 * found[1]


def test_a_seed_gives_the_same_result_again():
    load = at_once(16, 1, Kinds(temperatures=(0.0, 0.8)))
    one, same, other = (auto(load, World(MACHINE), seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.marks != other.marks


@pytest.mark.parametrize("name", ["none", "chain:3"])
def test_a_fixed_setting_gives_what_its_costs_and_hazards_say(name):
    setting = next(each for each in SETTINGS if each.name == name)
    hazard = 0.8
    ends = {key: (math.log(hazard / (1 - hazard)),) * 2 for key in usual()}
    world = World(MACHINE, Truth(ends, effect=0.0, text_effect=(0.0, 0.0)), noise=0.0, pauses=0.0)
    load = [Arrival(0.0, prompt=1, tokens=3000) for _ in range(ROWS)]
    found = of(name, load, world)
    tokens = ROWS * sum(hazard**depth for depth in range(setting.depth + 1))
    shape = StepShape(name, ROWS, ROWS * (setting.nodes + 1))
    seconds = MACHINE.step(shape).at(ROWS * 1500)
    assert found.marks[-2].tokens / found.marks[-2].busy == pytest.approx(
        tokens / seconds, rel=0.03
    )


_checked = functools.cache(checked)


@pytest.fixture
def ratios(request) -> dict[str, float]:
    """Of a quick test with few loads; all of them take a minute and a half."""
    return _checked(few=request.node.get_closest_marker("slow") is None)


@pytest.mark.parametrize("name", slow_but([*shapes(), *EIGHT], *FEW))
def test_the_controller_is_as_good_as_the_best_fixed_setting_in_hindsight(name, ratios):
    """On average over runs: one depends on how easy its one or two hundred texts happen to be."""
    assert ratios[name] >= 0.95  # the regret that is allowed
    assert ratios[f"{name}, least"] >= 0.9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", slow_but(WRONG, *FEW_WRONG))
def test_what_is_believed_wrongly_costs_less_than_a_twentieth_of_off(name, temperature, ratios):
    assert ratios[f"{name}, T = {temperature}"] >= 0.95


def test_targets_of_latency_are_met_more_often_where_they_are_asked_for(ratios):
    assert ratios["targets met"] > ratios["met without"] + 0.1


@pytest.mark.parametrize(("temperature", "least", "most"), [(0.0, 0.35, 0.6), (0.8, 0.0, 0.15)])
def test_texts_are_easy_or_hard_for_a_while_as_recorded_ones_are(temperature, least, most):
    """Accepted tokens of a chain of 7, one step apart: they correlate by 0.49 and 0.06."""
    truth, drawn, found = Truth(), random.Random(0), []
    setting = next(each for each in SETTINGS if each.name == "chain:7")
    for _ in range(400):
        of = Arrival(0.0, temperature=temperature)
        effect, text_effect, steps = truth.draw_effect(drawn), truth.draw_text_effect(drawn, of), []
        for _ in range(30):
            hazards = truth.hazards(setting, 7, of, effect + text_effect, 0.0)
            accepted = next((n for n, each in enumerate(hazards) if drawn.random() >= each), 7)
            text_effect = truth.next_text_effect(drawn, of, text_effect, accepted + 1)
            steps.append(accepted)
        found.append(steps)
    mean = fmean(each for steps in found for each in steps)
    of_steps = [[each - mean for each in steps] for steps in found]
    variance = fmean(each**2 for steps in of_steps for each in steps)
    apart = fmean(a * b for steps in of_steps for a, b in itertools.pairwise(steps))
    assert least < apart / variance < most


@pytest.mark.slow
def test_random_cases_are_served_whole():
    case = random_case(0, requests=20)
    assert sorted(each.of for each in case.auto().served) == sorted(case.load)


def test_replicas_share_a_load():
    load = at_once(120, 1)
    world = World(MACHINE)
    made = [fixed("chain:1", ROWS) for _ in range(3)]
    found = simulate_replicas(made, load, world, ROWS)
    assert sorted(each.of for each in found.served) == sorted(load)
    alone = of("chain:1", load, world)
    assert found.throughput == pytest.approx(3 * alone.throughput, rel=0.15)


@pytest.mark.parametrize("make", [llama_8b_on_h100, llama_8b_on_v5e])
def test_published_machines_draft_less_the_more_rows_decode(make):
    machine = make(SETTINGS)
    world = World(machine)
    alone, many = (
        simulate(controller_of(machine, rows, columns=512), at_once(3 * rows + 10, 1), world, rows)
        for rows in (1, 32)
    )
    assert sum(share for name, share in alone.shares.items() if name.startswith("specexec")) > 0.8
    assert many.goodput > 3 * alone.goodput


def test_a_servers_report_is_a_machine():
    report = {
        "costs": [
            {"setting": s, "rows": 1, "width": w, "seconds": t, "seconds_per_cached_token": 1e-6}
            for s, w, t in (("none", 1, 0.004), ("chain:1", 2, 0.005))
        ],
        "chunks": [{"tokens": 8, "seconds": 0.006, "seconds_per_cached_token": 2e-6}],
        "catch_ups": [{"tokens": 16, "seconds": 0.001}],
    }
    machine = measured(report)
    assert (machine.chunks, machine.catch_up) == ({8: (0.006, 2e-6)}, {16: 0.001})
    assert machine.step(StepShape("chain:1", 1, 2)).at(1000) == pytest.approx(0.006)
    with pytest.raises(ValueError, match="has no program"):
        machine.step(StepShape("chain:3", 1, 4))
