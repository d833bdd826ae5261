"""Costs against the floor, and the peer that generations are measured beside."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

from pallas_kernels import machine, shapes
from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate
from specjax.measure import roofline, timing
from specjax.measure.transformers_baseline import Peer, available
from tests.conftest import tiny_model

pytestmark = pytest.mark.long_running
BANDWIDTH = 1e9


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(machine.READ_BYTES, "cpu", 2**20)
    monkeypatch.setattr(roofline, "_ROUND_SECONDS", 1e-4)


@pytest.mark.slow
def test_a_pass_is_held_against_weights_and_cache_read_once():
    model = tiny_model()
    config = model.config
    first, second = roofline.passes(model, (1, 3), 40, BANDWIDTH)
    assert [first.nodes, second.nodes] == [1, 3]
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 40 * 4
    floor = (timing.weight_bytes(model) + cached) / BANDWIDTH
    for row in (first, second):
        assert row.over_floor == pytest.approx(row.seconds / floor)
        assert row.over_the_first == pytest.approx(row.seconds / first.seconds)


def test_a_plain_step_is_timed_inside_the_loop():
    row = roofline.plain_step(tiny_model(), 16, BANDWIDTH)
    assert (row.report()["what"], row.slots) == ("plain step", 16)
    assert row.over_floor > 0


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-3.1-8b", 8.03, 8.03),
        ("llama-3.2-1b", 1.24, 1.24),
        ("qwen3-4b", 4.02, 4.02),
        ("qwen3-30b-a3b", 30.53, 3.353),
        ("gpt-oss-20b", 20.908, 4.186),
        ("deepseek-v2-lite", 15.706, 2.661),
    ],
)
def test_shapes_are_those_of_the_models(name, billions, active):
    """But for biases, and norms of heads."""
    config = roofline.SHAPES[name]
    assert config.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert config.num_active_parameters / 1e9 == pytest.approx(active, abs=0.005)
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    assert heads == tuple(shapes.MODELS.get(name, heads))


@pytest.mark.slow
def test_the_command_measures_shapes_and_the_grown_pair(tmp_path, monkeypatch, capsys):
    tiny = dataclasses.replace(tiny_model().config, max_positions=512)
    monkeypatch.setitem(roofline.SHAPES, "tiny", tiny)
    file = tmp_path / "rows.json"
    flags = ["--shapes", "tiny", "--inflate", "18.5M", "--nodes", "1,2", "--slots", "32",
             "--methods", "chain", "--temperatures", "0", "--limit", "1",
             "--max-new-tokens", "9"]  # fmt: skip
    assert main(["roofline", *flags, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    what = [(row.get("model"), row["what"]) for row in rows]
    grown = "bundled, grown to 18.5M"
    costs = ["pass", "pass", "plain step"]
    assert what[:7] == [(None, "read bandwidth"), *(("tiny", each) for each in costs),
                        *((grown, each) for each in costs)]  # fmt: skip
    assert [name for _, name in what[7:10]] == ["none", "none", "chain:7"]
    if available():
        assert [name for _, name in what[10:]] == [
            "transformers, plain", "transformers, assisted"
        ]  # fmt: skip
    else:
        assert rows[10:] == [
            {"model": grown, "what": "transformers", "error": "PyTorch is not installed"}
        ]
    assert capsys.readouterr().out.count("\n") == len(rows)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param("costs", ["pass", "plain step"], marks=pytest.mark.slow),
        ("generations", ["none", "none", "transformers"]),
    ],
)
def test_a_part_of_what_there_is_to_measure_of_a_pair(parts, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.measure.transformers_baseline.available", lambda: False)
    file = tmp_path / "rows.json"
    flags = ["--shapes", "", "--inflate", "18.5M", "--parts", parts, "--nodes", "1", "--slots",
             "32", "--methods", "none", "--temperatures", "0", "--limit", "1",
             "--max-new-tokens", "9"]  # fmt: skip
    assert main(["roofline", *flags, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["what"] for row in rows] == ["read bandwidth", *expected]


def test_models_that_there_is_no_time_for_are_owed(capsys):
    assert main(["roofline", "--shapes", "qwen3-4b", "--inflate", "1B", "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "qwen3-4b owed", "bundled, grown to 1B owed"
    ]  # fmt: skip


def test_what_cannot_be_is_one_sentence(capsys):
    assert main(["roofline", "--shapes", "moon"]) == 2
    assert "no shape 'moon'; there are llama-3.1-8b, " in capsys.readouterr().err
    assert main(["roofline", "--parts", "costs,moon"]) == 2
    assert "--parts has 'moon'; there are costs and generations." in capsys.readouterr().err
    assert main(["roofline", "--nodes", "0"]) == 2
    assert "--nodes is 0; it must be at least 1." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_peer_says_what_we_say():
    """Greedy, plain and assisted, over the very same weights."""
    target, draft = tiny_model(0), tiny_model(1)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    ours = generate(jax.random.key(0), target, None, prompts, max_new_tokens=12,
                           sampling=Sampling(), stop_at_eos=False)  # fmt: skip
    generated = Peer(target, draft)
    for assisted in (False, True):
        made = generated.generate(prompts, 12, 0.0, assisted)
        np.testing.assert_array_equal(np.stack(made.outputs), ours.tokens)
        assert made.seconds > 0
