"""What bench measures, counts and remembers."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from pallas_kernels import machine
from specjax.__main__ import main
from specjax.checkpoints.load import load
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli import outcome, values
from specjax.cli.bench import workload_of
from specjax.cli.options import Bench
from specjax.cli.report import Report
from specjax.decoding import request
from specjax.decoding.generate import generate
from specjax.measure import bench, prompts, timing
from specjax.measure.prompts import Prompt
from specjax.measure.workload import MIXED
from specjax.methods import registry, tuned
from specjax.methods.choice import Asked, choose
from specjax.methods.method import METHODS, Setting
from specjax.methods.tuned import Entry
from specjax.models.inflate import inflate
from tests.conftest import QUICKLY, tiny_model
from tests.folders import own_cache, pair_flags, pair_folder

__all__ = ["own_cache"]
ROW = {
    *("method", "temperature", "batch", "dtype", "prompts", "new_tokens", "target_steps"),
    *("tokens_per_step", "tokens_per_second", "speedup", "draft_seconds", "target_seconds"),
    *("other_seconds", "repeated_8grams", "mean_nodes", "setting", "label", "nodes"),
}
ENV = {
    *("device", "cpu", "cpu_count", "python", "jax", "jaxlib", "specjax", "date", "config"),
    *("read_gb_per_second", "weight_bytes", "prompts_left_out", "parameters"),
}


@pytest.fixture(autouse=True)
def small_read(monkeypatch):
    monkeypatch.setitem(machine.READ_BYTES, "cpu", 2**20)


@pytest.fixture
def prompt_file(tmp_path):
    lines = [
        {"id": "a", "prompt": "def add(a, b):"},
        {"id": "b", "turns": ["return a", "x" * 300]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_a_run_writes_what_the_contract_says(prompt_file, tmp_path, capsys):
    out = tmp_path / "bench.json"
    flags = ["--methods", "pool:1,1", "--batch", "2", "--max-new-tokens", "10", "--json", str(out)]
    flags += ["--png", str(tmp_path / "bench.png")]
    flags += ["--inflate", "48320", "--prompts", str(prompt_file)]
    assert main(["bench", *flags, *pair_flags()]) == 0
    printed = capsys.readouterr()
    assert "prompt b/1 is left out: 300 tokens and 10 new ones" in printed.err
    assert "pool:1,1" in printed.out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    assert report["env"].keys() >= ENV
    assert report["env"]["prompts_left_out"] == ["b/1"]
    assert report["env"]["parameters"] > 25_000
    rows = report["rows"]
    assert all(row.keys() >= ROW for row in rows)
    assert [(row["method"], row["dtype"]) for row in rows[:3]] == [
        ("none", "float32"), ("none", "bfloat16"), ("pool", "float32"),
    ]  # fmt: skip
    assert {row["temperature"] for row in rows} == {0.0, 0.8, "mixed"}
    check_rows(rows)
    check_rounds(rows, printed.err)
    assert report["complete"] is True


SHORT = ("--methods", "none,chain", "--batch", "1", "--max-new-tokens", "6", "--limit", "3",
         "--temperatures", "0", "--dtype", "float32")  # fmt: skip


def test_prompts_of_a_chat_are_messages_whose_answers_end(prompt_file, tmp_path, capsys):
    """In the chat template, up to an end token of the model's."""
    target, out = tmp_path / "target", tmp_path / "bench.json"
    flags = [*SHORT, "--chat", "--prompts", str(prompt_file), "--json", str(out)]
    assert main(["bench", *flags, *pair_flags()]) == 2
    assert "--chat needs a chat template, and the model has none." in capsys.readouterr().err
    shutil.copytree(pair_folder() / "target", target)
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    model, tokenizer = load(target)
    wanted = tokenizer("<def add(a, b):>", add_special_tokens=False).input_ids
    chosen, _ = prompts.fitting(prompts.read(str(prompt_file)), tokenizer, 256, 9, chat=True)
    assert chosen[0] == Prompt("a", wanted)
    (plain,) = generate(jax.random.key(0), model, None, [wanted], max_new_tokens=6).tokens.tolist()
    config = json.loads((target / "config.json").read_text()) | {"eos_token_id": plain[1]}
    (target / "config.json").write_text(json.dumps(config))
    flags += ["--model", str(target), "--draft", "none", "--methods", "none", "--limit", "1"]
    for chat, count in ((True, plain.index(plain[1]) + 1), (False, 6)):
        asked = [flag for flag in flags if chat or flag != "--chat"]
        assert main(["bench", *asked]) == 0
        assert {row["new_tokens"] for row in json.loads(out.read_text())["rows"]} == {count}


@pytest.mark.slow
@pytest.mark.parametrize("output", ["/dev/full", "head -1"])
def test_a_cache_and_an_output_that_refuse_lose_nothing(output, prompt_file, tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "specjax", "bench", *SHORT, *pair_flags(),
               "--prompts", str(prompt_file), "--json", str(out)]  # fmt: skip
    full = output == "/dev/full"
    with open("/dev/full" if full else os.devnull, "w") as written:
        done = subprocess.run(
            command if full else ["sh", "-c", f"{shlex.join(command)} | head -c 1"],
            env=os.environ | QUICKLY | {"SPECJAX_CACHE": "/proc/nope"}, stdout=written,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    report = json.loads(out.read_text())
    assert report["complete"] is True
    assert [row["method"] for row in report["rows"]] == ["none", "none", "chain"]
    assert "Traceback" not in done.stderr
    if full:
        assert (done.returncode, "No space left on device" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_cache_that_refuses_is_a_line(prompt_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECJAX_CACHE", "/proc/nope")
    monkeypatch.setattr(outcome, "compared_with", lambda *_: registry.setting_of("chain"))
    assert main(["bench", *SHORT, *pair_flags()]) == 0
    printed = capsys.readouterr()
    assert "chain" in printed.out
    assert printed.err == (
        "specjax: what was measured is not remembered for --method auto: No such file or "
        "directory.\n"
    )


@pytest.mark.slow
def test_a_run_that_is_ended_leaves_its_rows(tmp_path, monkeypatch):
    def ended(report, rows):
        keep(report, rows)
        raise KeyboardInterrupt

    keep = Report.keep
    monkeypatch.setattr(Report, "keep", ended)
    out = tmp_path / "bench.json"
    assert main(["bench", *SHORT, *pair_flags(), "--json", str(out)]) == 130
    report = json.loads(out.read_text())
    assert report["complete"] is False
    assert [row["method"] for row in report["rows"]] == ["none", "none", "chain"]
    assert all(len(row["round_speedups"]) == 1 for row in report["rows"])


def check_rows(rows):
    for row in rows:
        assert row["new_tokens"] == 10 * row["prompts"] == 20
        assert row["tokens_per_step"] == row["new_tokens"] / row["target_steps"]
        phases = [row[f"{phase}_seconds"] for phase in ("draft", "target", "other", "prefill")]
        assert sum(phases) == pytest.approx(row["seconds"])
        assert min(phases) >= 0
        alike = [r for r in rows if r["temperature"] == row["temperature"]]
        plain = max(r["tokens_per_second"] for r in alike if r["method"] == "none")
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain)
        if row["method"] == "none":
            assert (row["target_steps"], row["tokens_per_step"]) == (row["new_tokens"], 1.0)
            assert (row["mean_nodes"], row["draft_seconds"]) == (0.0, 0.0)
        else:
            assert 2 <= row["mean_nodes"] <= 4
    assert next(row for row in rows if row["method"] == "pool")["tokens_per_step"] > 2


def check_rounds(rows, said):
    """Of one round nothing can be told, and bench says so."""
    assert all(len(row["round_speedups"]) == 1 and row["spread"] is None for row in rows)
    assert said.count("the shipped default, chain:3, was not measured beside the others") == 2
    assert "shipped" in choose(Asked(), bench_pair(), 0.0, 2).reason


def bench_pair():
    flags = pair_flags()
    pair = load_pair(flags[1], flags[3], dtype="float32")
    return pair._replace(target=inflate(pair.target, 48_320))


@pytest.mark.slow
def test_phases_of_a_step_are_positive_and_leave_the_request_whole():
    target = tiny_model(num_layers=1)
    drafter = registry.build(
        registry.setting_of("tree", widths=(2, 1)), Pair(target, None, [target])
    )
    asked = request.prepare(
        jax.random.key(0), target, drafter, [[1, 2, 3]], max_new_tokens=10, stop_at_eos=False
    )
    for _ in range(2):
        found = timing.phases(asked, steps=3)
        assert min(found.prefill, found.draft, found.target) > 0
    assert timing.typical([found, found]) == found
    timing.warm_up(asked)
    run, seconds = timing.timed(asked)
    assert seconds > 0
    assert run.tokens.shape == (1, asked.outputs)
    assert run.lengths.tolist() == [10]
    assert run.steps.tolist() == [4]
    assert run.nodes.tolist() == [16]


@pytest.mark.parametrize(
    ("tokens", "share"), [(range(20), 0.0), ([1] * 17, 0.9), ([1] * 8, 0.0), ([1] * 3, 0.0)]
)
def test_repeated_8grams(tokens, share):
    assert timing.repeated([np.asarray(tokens)]) == pytest.approx(share)


def test_bandwidth_counts_what_a_step_reads():
    tied, untied = tiny_model(), tiny_model(tie_embeddings=False)
    assert timing.weight_bytes(tied) == 4 * tied.config.num_parameters
    assert timing.weight_bytes(untied) == timing.weight_bytes(tied)
    assert machine.read_bandwidth() > 1e7


def some(*lengths: int) -> list[Prompt]:
    return [Prompt(str(index), [1] * length) for index, length in enumerate(lengths)]


def numbers(batches) -> list[list[int]]:
    return [[number for number, _ in rows] for rows in batches]


def test_batches_are_full_and_of_similar_length():
    assert numbers(bench.batches_of(some(5, 1, 9, 3, 7), 2)) == [[3, 0], [4, 2]]
    assert numbers(bench.batches_of(some(2, 1), 1)) == [[1], [0]]
    assert numbers(bench.batches_of(some(2, 1), 5)) == [[1, 0, 1, 0, 1]]


def test_a_plan_holds_every_setting_and_both_plain_loops():
    plan = workload_of(Bench(batch="1,4", temperatures="0,0.5", dtype="bfloat16"))
    assert plan.temperatures_of(1) == (0.0, 0.5)
    assert plan.temperatures_of(4) == (0.0, 0.5, MIXED)
    named = plan.candidates(4)
    assert [c.dtype for c in named[:2]] == ["float32", "bfloat16"]
    assert named[2] == (registry.setting_of("chain", batch=4), "bfloat16")
    assert bench.temperatures_of(MIXED, 4, (0.0, 0.5)).tolist() == [0.0, 0.5, 0.0, 0.5]


def test_sizes_of_methods_are_compared():
    shapes = (("chain", (1, 1)), ("tree", (2, (2, 1))), ("tree", (2, 1)), ("tree", None))
    plan = workload_of(Bench(methods="chain:2,tree:2/2,1, tree:2,1,tree"))
    assert settings(plan) == [
        registry.setting_of(method, widths=widths) for method, widths in shapes
    ]


def settings(plan) -> list[Setting]:
    return [candidate.setting for candidate in plan.candidates(1)[2:]]


def test_every_method_takes_every_budget():
    plan = workload_of(Bench(methods="all", budgets="4,9"))
    able = [name for name in METHODS if not METHODS[name].for_servers]
    named = [(name, budget) for name in able[1:] for budget in (4, 9)]
    assert settings(plan) == [registry.setting_of(name, budget=budget) for name, budget in named]


def test_what_has_a_size_is_measured_beside_budgets():
    plan = workload_of(Bench(methods="tree:2,1,lookup", budgets="3"))
    assert settings(plan) == [
        registry.setting_of("tree", widths=(2, 1)),
        registry.setting_of("lookup", budget=3),
    ]


def test_what_tune_wrote_is_measured_beside_the_methods(tmp_path):
    setting = registry.setting_of("hybrid", budget=5)
    entries = [Entry(0.0, 1, setting, {}, {}), Entry(0.8, 1, Setting(), {}, {})]
    tuned.write(tmp_path / "tuned.json", entries, {})
    plan = workload_of(Bench(methods="none", config=str(tmp_path / "tuned.json")))
    assert settings(plan) == [setting]


@pytest.mark.parametrize(
    ("mesh", "batches"), [(None, (1, 8)), ("model=4", (1, 8)), ("data=4", (8,)), ("data=3", (3,))]
)
def test_batches_are_those_that_a_mesh_divides(mesh, batches):
    assert workload_of(Bench(mesh=mesh)).batches == batches


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"verify": "greedy"}, "needs --temperatures 0"),
        ({"batch": "0"}, "--batch is 0"),
        ({"limit": 0}, "--limit is 0"),
        ({"seed": -2}, "--seed is -2"),
        ({"json": "nowhere/out.json"}, "--json is nowhere/out.json, in a folder that does not"),
        ({"png": "out.jpg"}, "--png is out.jpg; its name must end in .png"),
        ({"png": "nowhere/out.png"}, "--png is nowhere/out.png, in a folder that does not"),
        ({"budgets": "3,0"}, "the budget is 0"),
        ({"config": "nowhere.json"}, "--config is nowhere.json, which cannot be read"),
        ({"methods": "tree:a"}, "the size of 'tree:a' is 'a'; it must be numbers separated by"),
        ({"methods": "chain:7", "budgets": "16"}, "chain:7: each has a size, and --budgets 16 is"),
        ({"dtype": "float64"}, "no dtype 'float64'"),
        ({"temperatures": "-1"}, "--temperatures is '-1'"),
        ({"mesh": "data=2", "batch": "2,3"}, "--mesh has data=2, which does not divide --batch 3"),
        ({"mesh": "model=2", "inflate": "1M"}, "--inflate is for one device"),
        ({"mesh": "model=2", "profile": True}, "--profile is for one device"),
    ],
)
def test_a_wrong_plan_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        workload_of(Bench(**changes))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1 of .* is not JSON"),
        ("[" * 100_000, "line 1 of .* is not JSON"),
        ("\n\ncaf\xe9", "prompts.jsonl is not UTF-8 text: byte 5 is not"),
        ('{"id": 1, "prompt": "a\\ud800"}', "line 1 of .* is not UTF-8 text: character 1"),
        ('{"id": 1, "turns": ["\\udfff"]}', "line 1 of .* is not UTF-8 text: character 0"),
        ('{"id": 1}', "line 1 of .* has neither"),
        ('{"id": 1, "turns": [2]}', "has neither"),
        ("", "holds no prompt"),
    ],
)
def test_a_damaged_prompt_file_is_refused(tmp_path, line, sentence):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line.encode("latin-1"))
    with pytest.raises(ValueError, match=sentence):
        prompts.read(str(path))


def test_prompts_come_with_the_package(prompt_file):
    bundled = prompts.read(None)
    assert len(bundled) >= 20
    assert len({name for name, _ in bundled}) == len(bundled)
    assert [name for name, _ in prompts.read(str(prompt_file))] == ["a", "b/0", "b/1"]


@pytest.mark.parametrize(("text", "count"), [("100M", 10**8), ("1.5k", 1500), ("7", 7)])
def test_parameter_counts_are_read(text, count):
    assert values.count_of(text) == count


@pytest.mark.slow
def test_candidates_that_no_process_can_hold_run_in_groups(prompt_file, tmp_path, monkeypatch):
    """Each is compared with the faster plain loop of its own group; counts stay those of one."""
    flags = ["--methods", "chain,tree", "--budgets", "3,5", "--batch", "1"]
    flags += ["--max-new-tokens", "8", "--skip-phases", "--temperatures", "0"]
    flags += ["--prompts", str(prompt_file), *pair_flags()]
    kept = ("method", "dtype", "label", "new_tokens", "target_steps", "prompts", "mean_nodes")
    found, groups, timed = [], [], timing.timed
    clear = jax.clear_caches

    def run(asked):
        made, _ = timed(asked)
        seconds = len(groups) + (2.0 if asked.target.embedding.dtype == "float32" else 1.0)
        return made, seconds if asked.drafter.window == 1 else 0.5

    monkeypatch.setattr(timing, "timed", run)
    monkeypatch.setattr(jax, "clear_caches", lambda: (groups.append(1), clear()))
    for most in (10**9, -1):
        monkeypatch.setattr(timing, "MOST_MAPS", most)
        groups.clear()
        out = tmp_path / f"{most}.json"
        assert main(["bench", *flags, "--json", str(out)]) == 0
        rows = json.loads(out.read_text())["rows"]
        found.append([{name: row[name] for name in kept} for row in rows])
        speedups = [row["speedup"] for row in rows if row["method"] != "none"]
        assert len(groups) == (1 if most > 0 else 4)
        assert speedups == [2.0] * 4 if most > 0 else [2.0, 4.0, 6.0, 8.0]
    assert found[0] == found[1]
    assert len(found[0]) == 6
