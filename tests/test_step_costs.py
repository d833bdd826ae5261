"""What an engine's programs take, kept in the cache folder: damaged, of others, written at once."""

import json
import math
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from pallas_kernels.cache import cache_folder
from specjax.engine.device import Measured, Plan
from specjax.engine.measured import name_of, recall, remember
from specjax.engine.sizes import Sizes
from specjax.goodput.costs import Cost
from specjax.goodput.policy import StepShape
from tests.conftest import tiny_model
from tests.folders import own_cache

__all__ = ["own_cache"]
ROOT = Path(__file__).parent.parent
STEPS = (StepShape("none", 1, 1), StepShape("chain:3", 1, 4))
PLAN = Plan(
    STEPS, (16, 64), 16, ((1, 16), (1, 64), (4, 16)), 512, True, mixed_steps=STEPS[1:]
)  # fmt: skip
SIZES = Sizes(100, 128, 4, None)
FOUND = Measured(
    {16: (0.01, 1e-6), 64: (0.03, 2e-6)},
    {STEPS[0]: Cost(0.01, 1e-6), STEPS[1]: Cost(0.02)},
    {16: 0.001, 64: 0.004},
    0.02,
    {STEPS[0]: 0.0, STEPS[1]: 0.003},
)


def file() -> Path:
    folder = cache_folder()
    assert folder is not None
    return folder / "step_costs.json"


def check_recalled(found: Measured | None) -> None:
    assert found is not None
    assert found.batch_seconds == pytest.approx(FOUND.batch_seconds)
    assert found.mixed_seconds == {STEPS[1]: 0.003}
    for known, wanted in zip(found[:3], FOUND[:3], strict=True):
        assert known.keys() == wanted.keys()
        for key, value in wanted.items():
            assert known[key] == pytest.approx(value)


def test_what_is_remembered_is_recalled():
    assert recall("engine", PLAN) is None
    remember("engine", FOUND)
    check_recalled(recall("engine", PLAN))
    assert recall("another", PLAN) is None


@pytest.mark.parametrize(
    "other",
    [
        PLAN._replace(steps=(*STEPS, StepShape("chain:3", 2, 8))),
        PLAN._replace(chunks=(16, 256)),
        PLAN._replace(catch_ups=((1, 16), (1, 256))),
        PLAN._replace(mixed_steps=(StepShape("chain:3", 2, 8),)),
    ],
)
def test_costs_of_a_plan_are_not_those_of_one_with_more_programs(other):
    remember("engine", FOUND)
    assert recall("engine", other) is None


def test_of_more_programs_those_of_the_plan_are_recalled():
    remember("engine", FOUND)
    fewer = PLAN._replace(steps=STEPS[:1], chunks=(16,), catch_ups=((4, 16),), mixed_steps=())
    found = recall("engine", fewer)
    assert found is not None
    assert set(found.chunk_seconds) == {16}
    assert set(found.step_costs) == set(STEPS), "fewer columns follow from what steps take"
    assert not found.catch_up_seconds
    assert not found.mixed_seconds


def test_every_engine_has_its_own_name():
    plain, wider = tiny_model(), tiny_model(intermediate_size=64)
    names = [
        name_of((plain, None), PLAN, SIZES),
        name_of((wider, None), PLAN, SIZES),
        name_of((plain, plain), PLAN, SIZES),
        name_of((plain, None), PLAN._replace(steps=STEPS[:1]), SIZES),
        name_of((plain, None), PLAN, SIZES._replace(slots=256)),
        name_of((jax.tree.map(lambda leaf: leaf.astype("bfloat16"), plain), None), PLAN, SIZES),
    ]
    assert len(set(names)) == len(names)
    assert name_of((tiny_model(seed=3), None), PLAN, SIZES) == names[0], "weights do not matter"


def test_the_last_engines_are_kept():
    for number in range(40):
        remember(f"engine {number}", FOUND)
    remember("engine 20", FOUND)
    kept = [number for number in range(40) if recall(f"engine {number}", PLAN) is not None]
    assert len(kept) == 32
    assert 20 in kept
    assert kept[-1] == 39
    assert 0 not in kept


KNOWN = {
    "date": "2026-11-24", "chunks": [[16, 0.01, 0.0], [64, 0.03, 0.0]],
    "steps": [["none", 1, 1, 0.01, 0.0], ["chain:3", 1, 4, 0.02, 0.0]],
    "catch_ups": [[16, 0.001], [64, 0.004]], "batch": 0.02,
    "mixed": [["none", 1, 1, 0.0], ["chain:3", 1, 4, 0.003]],
}  # fmt: skip
STEP = KNOWN["steps"][1]


def test_the_entry_that_is_damaged_below_is_known():
    remember("else", FOUND)
    file().write_text(json.dumps({"engine": KNOWN}))
    assert recall("engine", PLAN) is not None


def of_steps(*changed) -> dict:
    return KNOWN | {"steps": [KNOWN["steps"][0], [*changed]]}


def without(key: str) -> dict:
    return {each: own for each, own in KNOWN.items() if each != key}


def nested(depth: int) -> str:
    return '{"engine": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", "null", "\udcff", "[" * 200_000, "9" * 5000, "{}", '{"engine": null}'),
        *('{"engine": 3}', '{"engine": []}', '{"engine": {}}', nested(600), nested(900)),
        json.dumps({"engine": KNOWN | {"more": 1}}),
        json.dumps({"engine": KNOWN | {"more": []}}).replace("[]", "[" * 600 + "]" * 600),
        *(json.dumps({"engine": without(key)}) for key in KNOWN),
        *(json.dumps({"engine": KNOWN | {key: 1}}) for key in KNOWN if key != "batch"),
        *(json.dumps({"engine": KNOWN | {"batch": own}}) for own in (0, -1.0, math.nan, True, "1")),
        *(json.dumps({"engine": KNOWN | {key: [1, None, "a", {}]}}) for key in KNOWN),
        json.dumps({"engine": KNOWN | {"catch_ups": [*KNOWN["catch_ups"], ["x", 0.1]]}}),
        json.dumps({"engine": KNOWN | {"chunks": [*KNOWN["chunks"], [256, 0.1]]}}),
        *(
            json.dumps({"engine": KNOWN | {"mixed": [*KNOWN["mixed"], entry]}})
            for entry in (["none", 2, 2], ["none", 2, 2, -1.0], [2, 2, 2, 0.1], ["none", 2, 2, "1"])
        ),
        *(
            json.dumps({"engine": of_steps(*entry)})
            for entry in (
                *((*STEP[:3], own, 0.0) for own in (math.nan, math.inf, 0, -1, "1", None, True)),
                *((*STEP[:3], 10**400, 0.0), (*STEP[:3], 0.02, -1e-6), (*STEP[:3], 0.02, math.nan)),
                *(STEP[:4], [*STEP, 1.0], [[], *STEP[1:]], ["chain:3", 1, 4.0, 0.02, 0.0]),
                *(["chain:3", "1", 4, 0.02, 0.0], [3, 1, 4, 0.02, 0.0], ["chain:7", *STEP[1:]]),
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_understood_counts_as_empty(content):
    remember("else", FOUND)
    file().write_bytes(content.encode(errors="surrogateescape"))
    assert recall("engine", PLAN) is None
    remember("engine", FOUND)
    check_recalled(recall("engine", PLAN))


def test_what_others_wrote_stays_though_an_entry_is_damaged():
    remember("else", FOUND)
    held = json.loads(file().read_text())
    file().write_text(json.dumps(held | {"engine": {"steps": 3}}))
    remember("engine", FOUND)
    check_recalled(recall("else", PLAN))


WRITER = """
import sys, time
from pathlib import Path
from specjax.engine.measured import remember
from tests.test_step_costs import FOUND

number, go = sys.argv[1], Path(sys.argv[2])
Path(f"{go}.{number}").touch()
while not go.exists():
    time.sleep(0.001)
for record in range(10):
    remember(f"{number} {record}", FOUND)
"""


def test_processes_that_remember_at_once_lose_nothing(tmp_path):
    go = tmp_path / "go"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(number), str(go)], cwd=ROOT)
        for number in range(2)
    ]
    while not all(Path(f"{go}.{number}").exists() for number in range(2)):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    go.touch()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    for number in range(2):
        for record in range(10):
            check_recalled(recall(f"{number} {record}", PLAN))
    assert sorted(os.listdir(cache_folder())) == ["step_costs.json", "step_costs.lock"]


def test_without_a_home_nothing_is_kept(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "SPECJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_folder() is None
    remember("engine", FOUND)
    assert recall("engine", PLAN) is None


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null/cache"])
def test_where_no_folder_can_be_made_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", folder)
    remember("engine", FOUND)
    assert recall("engine", PLAN) is None


def test_a_folder_in_place_of_the_file_is_left_alone():
    file().mkdir(parents=True)
    remember("engine", FOUND)
    assert recall("engine", PLAN) is None
    assert file().is_dir()
