"""Settings that are compiled while an engine serves: texts meanwhile, costs, what is left out."""

import asyncio
import threading

import pytest

from pallas_kernels.cache import cache_folder
from specjax.draft.plain import PlainDrafter
from specjax.draft.switching import SwitchingDrafter
from specjax.engine import engine as engines
from specjax.engine import joining, measuring
from specjax.engine.device import Device, Measured, Plan
from specjax.engine.engine import Engine
from specjax.engine.request import Request
from specjax.goodput import shapes
from specjax.goodput.costs import Cost
from specjax.goodput.policy import StepShape
from tests.engines import alone as plain_texts
from tests.engines import collected, ids_of, served
from tests.folders import own_cache
from tests.pairs import alone, near, varied_model
from tests.scripted_engine import until

__all__ = ["own_cache"]
LONG = Request(prompt=[1, 2, 3], max_new_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return varied_model()


def an_engine(target, monkeypatch, **options) -> Engine:
    monkeypatch.setattr(engines, "CHUNKS", (16,))
    chain = alone(near(target, 1), (1, 1))
    drafter = SwitchingDrafter.of(
        {"none": PlainDrafter(target.config.vocab_size), "chain:2": chain}
    )
    return Engine(target, drafter, **({"rows": 1, "max_model_len": 128} | options))


def compiling(monkeypatch, first) -> None:
    """Does `first` before the program of a setting that drafts is compiled."""
    compiled = Device._compiled

    def later(device, call):
        if call.static.get("setting") == "chain:2":
            first()
        return compiled(device, call)

    monkeypatch.setattr(Device, "_compiled", later)


def test_texts_are_plain_until_a_setting_joins_and_the_same_with_it(target, monkeypatch):
    """It joins while a request runs, at what may be hoped of it, and is measured afterwards."""
    allowed, said = threading.Event(), []
    compiling(monkeypatch, allowed.wait)
    monkeypatch.setattr(joining, "PATIENCE_SECONDS", 0.0)
    seeded = Request(prompt=[4, 5], max_new_tokens=60, temperature=0.9, seed=7, ignore_eos=True)
    (expected,), (drawn,) = (plain_texts(target, [each]) for each in (LONG, seeded))
    engine = an_engine(target, monkeypatch)
    assert engine.settings_compiling == ["none", "chain:2"]
    engine.start(wait=False, say=said.append)
    assert engine.ready
    assert ids_of(served(engine, [LONG])[0]) == expected
    assert engine.statistics().accepted_tokens == 0
    until(lambda: engine.settings_compiling == ["chain:2"], 120)
    assert engine.report()["settings_compiling"] == ["chain:2"]
    with pytest.raises(ValueError, match="'chain:2' has no program yet; those that have are none"):
        engine.fix("chain:2")

    async def meanwhile() -> None:
        allowed.set()
        while engine.settings_compiling:
            assert ids_of(await collected(engine.submit(LONG))) == expected

    asyncio.run(meanwhile())
    assert said[0] == "the setting chain:2 has joined"
    assert said[1].startswith("every setting has joined, after ")
    folder = cache_folder()
    assert folder is not None
    until((folder / "step_costs.json").exists, 120)  # which is written when all are measured
    costs = engine._device.step_costs
    assert set(costs) == set(engine.speculation.shapes)
    assert engine.speculation.controller.costs.measured == costs
    engine.fix("chain:2")
    assert ids_of(served(engine, [LONG])[0]) == expected
    assert ids_of(served(engine, [seeded])[0]) == drawn
    assert engine.statistics().accepted_tokens > 0
    engine.close()


@pytest.mark.slow
def test_what_was_measured_beside_a_compilation_is_measured_again(target, monkeypatch):
    """Compiling takes the cores that programs run on: a CPU's steps took 35 times as long."""
    allowed, measured = threading.Event(), []
    compiling(monkeypatch, allowed.wait)
    part, chunks = measuring.part, measuring.chunks

    def of_part(device, plan):
        measured.append(plan.steps[0].setting)
        return part(device, plan)

    def of_chunks(device, plan):
        measured.append("chunks")
        return chunks(device, plan)

    monkeypatch.setattr(measuring, "part", of_part)
    monkeypatch.setattr(measuring, "chunks", of_chunks)
    engine = an_engine(target, monkeypatch, rows=2)
    engine.start(wait=False)
    until(lambda: engine.settings_compiling == ["chain:2"], 120)
    assert measured == ["chunks", "none"]
    folder = cache_folder()
    assert folder is not None
    assert not (folder / "step_costs.json").exists()
    before = dict(engine._device.step_costs)
    allowed.set()
    until((folder / "step_costs.json").exists, 120)
    assert sorted(measured[2:]) == ["chain:2", "chunks", "none"]
    assert engine._device.step_costs != before
    engine.close()


def test_a_setting_that_cannot_be_compiled_is_left_out(target, monkeypatch, caplog):
    def fails() -> None:
        raise ValueError("scripted trouble.")

    compiling(monkeypatch, fails)
    said = []
    engine = an_engine(target, monkeypatch)
    engine.start(say=said.append)
    assert said[0] == (
        "the setting chain:2 is left out, as it could not be compiled: scripted trouble"
    )
    assert said[1].startswith("every setting but chain:2 has joined")
    assert (engine.settings_compiling, engine.failure) == ([], None)
    assert engine.settings_failed == {"chain:2": "ValueError: scripted trouble."}
    assert len(ids_of(served(engine, [LONG])[0])) == LONG.max_new_tokens
    assert "could not be compiled" in caplog.text
    engine.close()


def test_rows_are_measured_again_where_a_request_came_between(target, monkeypatch):
    """What was measured halfway is begun anew, and its texts are no request's prefix."""
    engine = an_engine(target, monkeypatch)
    device = engine._make_device()
    monkeypatch.setattr(measuring, "chunks", lambda *_: (None for _ in range(3)))
    monkeypatch.setattr(device, "begin_all", lambda live: forgotten.append(live))
    forgotten: list[object] = []
    own = joining.Joining(
        device, Plan((), (16,), 16, (), 128, True), [], None, lambda _: None, lambda _: None,
        lambda: None, lambda: forgotten.append("rows"), lambda: None, lambda _: None,
    )  # fmt: skip
    own.turn(True)
    own.turn(True)
    assert forgotten == ["rows"]
    assert not own.settled.is_set()
    own.turn(False)
    assert forgotten == ["rows", 0]
    assert own.has_work
    own.turn(True)
    assert forgotten == ["rows", 0, "rows"]


def test_what_came_while_no_request_was_there_joins_though_some_come(target, monkeypatch):
    """They leave no time to measure it from the beginning to the end."""
    monkeypatch.setattr(joining, "PATIENCE_SECONDS", 0.0)
    engine = an_engine(target, monkeypatch)
    device, joined = engine._make_device(), []
    device.step_costs = {StepShape("none", 1, 1): Cost(0.01)}
    monkeypatch.setattr(measuring, "part", lambda *_: (None for _ in range(3)))
    monkeypatch.setattr(measuring, "chunks", lambda *_: (None for _ in range(3)))
    plan = Plan((StepShape("chain:2", 1, 4),), (16,), 16, (), 128, True)
    own = joining.Joining(
        device, plan, [joining.Part("chain:2", plan)], None, joined.append, lambda _: None,
        lambda: None, lambda: None, lambda: None, lambda _: None,
    )  # fmt: skip
    own._to_compile.put(None)
    own._compile(1, lambda _: None)
    own.turn(True)
    assert own.compiling == ["chain:2"]
    own.turn(False)
    assert own.compiling == []
    assert [found.step_costs for found in joined] == [{plan.steps[0]: Cost(0.01)}]


def test_what_may_be_hoped_of_a_program_is_what_off_takes():
    plain = {StepShape("none", 1, 1): Cost(0.01), StepShape("none", 8, 8): Cost(0.03, 1e-6)}
    steps = [StepShape("chain:3", rows, 4 * rows) for rows in (1, 2, 8)]
    plan = Plan(
        steps, (16,), 16, ((1, 16), (1, 64), (8, 16)), 512, True, mixed_steps=steps[-1:]
    )  # fmt: skip
    known = Measured({}, plain, {}, mixed_seconds={StepShape("none", 8, 8): 0.002})
    found = measuring.assumed(plan, known)
    assert found.mixed_seconds == {steps[-1]: 0.002}
    assert measuring.assumed(plan, Measured({}, plain, {})).mixed_seconds == {}
    assert [found.step_costs[shape].seconds for shape in steps] == [0.01, 0.03, 0.03]
    assert found.catch_up_seconds == {16: 0.01, 64: 0.01}


@pytest.mark.slow
def test_a_setting_has_fewer_columns_where_its_steps_cost_clearly_more(target, monkeypatch):
    """They are compiled when its own are measured, and at once where that was known before."""
    monkeypatch.setattr(shapes, "_WORTH", 0.0)
    for _ in range(2):
        said = []
        engine = an_engine(target, monkeypatch, rows=4)
        engine.start(say=said.append)
        assert engine.settings_compiling == []
        assert [what.split(",")[0] for what in said] == [
            "the setting chain:2 has joined", "every setting has joined",
        ]  # fmt: skip
        there = engine.speculation.controller.shapes
        of_all = [each.width for each in there if each[:2] == ("chain:2", 4)]
        assert of_all == [8, 16]
        engine.close()
    assert set(engine.speculation.shapes) < set(there)


@pytest.mark.slow
def test_fewer_columns_that_cannot_be_compiled_leave_the_setting_its_own(target, monkeypatch):
    compiled, said = Device._compiled, []

    def fails(device, call):
        if (call.size, call.static.get("width")) == (4, 8):
            raise ValueError("scripted trouble.")
        return compiled(device, call)

    monkeypatch.setattr(Device, "_compiled", fails)
    monkeypatch.setattr(shapes, "_WORTH", 0.0)
    engine = an_engine(target, monkeypatch, rows=4)
    engine.start(say=said.append)
    assert said[1] == (
        "the setting chain:2 has no step of 8 columns, which could not be compiled: "
        "scripted trouble"
    )
    assert (engine.settings_compiling, engine.settings_failed) == ([], {})
    engine.fix("chain:2")
    assert len(ids_of(served(engine, [LONG] * 4)[0])) == LONG.max_new_tokens
    engine.close()
