"""What bench-serve sends, notes and compares."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from scipy import stats

from specjax.__main__ import main
from specjax.cli import bench_serve
from specjax.cli.load_report import LoadSheet
from specjax.cli.options import BenchServe
from specjax.measure import load
from specjax.measure.arrivals import SHAPES, arrivals, expected
from specjax.measure.load import Answered, Mix
from specjax.measure.load_rows import LoadRun, numbers_of, rows_of
from specjax.measure.served import serving
from tests.conftest import QUICKLY
from tests.folders import own_cache, pair_flags
from tests.scripted_server import scripted

__all__ = ["own_cache"]
MIX = Mix([[1, 2], [3], [4, 5, 6]], [], 8, [0.0])
ROW = {
    *("rate", "rate_requests_per_s", "setting", "requests", "errors", "goodput_tokens_per_s"),
    *("mean_latency_s", "p50_latency_s", "p99_latency_s", "ttft_s_p50", "tpot_s_p50", "turns"),
    *("over_best_goodput", "over_best_latency", "over_plain_goodput", "over_plain_latency"),
}


@pytest.fixture
def server():
    with scripted() as found:
        yield found


def drawn(seed=0):
    return np.random.default_rng(seed)


def planned(count, seed=0, mix=MIX, shape="poisson"):
    return load.plan(mix, shape, count, drawn(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_arrivals_are_a_poisson_process_of_the_shape(shape):
    count = 4000
    found = arrivals(shape, count, drawn(1))
    assert np.array_equal(found, arrivals(shape, count, drawn(1)))
    assert not np.array_equal(found, arrivals(shape, count, drawn(2)))
    assert found[0] > 0
    assert np.all(np.diff(found) >= 0)
    assert count / found[-1] == pytest.approx(1, abs=4 / count**0.5)
    rescaled = np.diff(count * expected(shape, found / count))
    assert stats.kstest(rescaled, "expon").pvalue > 0.01
    if shape != "poisson":
        assert stats.kstest(np.diff(found), "expon").pvalue < 1e-4


@pytest.mark.parametrize(
    ("shape", "shares"),
    [("poisson", [0.25] * 4), ("steps", [0.1, 0.25, 0.4, 0.25]), ("ramp", [0.1, 0.2, 0.3, 0.4])],
)
def test_a_shape_is_the_rate_over_the_run(shape, shares):
    found = arrivals(shape, 8000, drawn(3)) / 8000
    counts = np.histogram(found, [0, 0.25, 0.5, 0.75, 1])[0]
    assert counts / 8000 == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_begins_again_where_a_run_takes_longer(shape):
    x = np.linspace(0, 1, 50)
    assert expected(shape, np.array([0.0, 1.0, 2.0])) == pytest.approx([0, 1, 2])
    assert expected(shape, 1 + x) == pytest.approx(1 + expected(shape, x))
    assert np.all(np.diff(expected(shape, x)) > 0)


def test_a_plan_deals_prompts_lengths_and_temperatures():
    found = planned(300, mix=MIX._replace(temperatures=[0.0, 0.8]))
    assert found == planned(300, mix=MIX._replace(temperatures=[0.0, 0.8]))
    assert found != planned(300, seed=1, mix=MIX._replace(temperatures=[0.0, 0.8]))
    for start in range(0, 300, 3):
        assert sorted(each.prompt for each in found[start : start + 3]) == sorted(MIX.prompts)
    lengths = {each.max_tokens for each in found}
    assert lengths == set(range(4, 13))
    assert np.mean([each.temperature == 0.8 for each in found]) == pytest.approx(0.5, abs=0.1)
    halved = load.at_rate(found, 0.5)
    assert [each.due_s for each in halved] == [2 * each.due_s for each in found]
    assert {each.max_tokens for each in planned(9, mix=MIX._replace(max_new_tokens=1))} == {1}


def test_other_prompts_take_over_in_the_middle():
    found = planned(7, mix=MIX._replace(then=[[9]]))
    assert [each.prompt == [9] for each in found] == [False] * 4 + [True] * 3


def test_requests_are_sent_when_they_are_due_whatever_the_server_does(server):
    server.first_s, server.gap_s = 1.0, 0.01
    plan = load.at_rate(planned(12), 200.0)
    found = asyncio.run(load.open_loop(server.port, plan))
    assert [each.due_s for each in found] == [each.due_s for each in plan]
    assert server.most == 12  # the last is sent before the first has its first token
    for asked, each in zip(plan, found, strict=True):
        assert each.error is None
        assert each.tokens == asked.max_tokens
        assert each.due_s <= each.sent_s < each.due_s + 0.9
        # Both from when it was sent: a busy machine may read an event late, and the next on time.
        assert each.first_s - each.sent_s > 0.99
        assert each.last_s - each.sent_s > 0.99 + 0.009 * (asked.max_tokens // 4)
    body = next(body for body in server.bodies if body["prompt"] == list(plan[0].prompt))
    assert body | {"stream": True, "ignore_eos": True, "model": "bench"} == body
    assert {body["max_tokens"] for body in server.bodies} == {each.max_tokens for each in plan}


def test_a_stream_may_come_in_any_pieces(server):
    server.split = 5
    found = asyncio.run(load.open_loop(server.port, load.at_rate(planned(3), 1e3)))
    assert [each.error for each in found] == [None] * 3
    assert all(each.due_s < each.first_s < each.last_s for each in found)


def test_what_does_not_complete_says_why(server):
    server.statuses = [429, 503]
    plan = load.at_rate(planned(3), 20.0)
    found = asyncio.run(load.open_loop(server.port, plan))
    assert [each.error for each in found] == ["status 429", "status 503", None]
    assert np.isnan(found[0].first_s)
    server.short = 2
    (short,) = asyncio.run(load.open_loop(server.port, plan[:1]))
    assert short.error == f"{plan[0].max_tokens - 2} tokens of {plan[0].max_tokens}"


def test_nobody_who_listens_is_an_error_of_each_request():
    with scripted() as gone:
        port = gone.port
    found = asyncio.run(load.open_loop(port, load.at_rate(planned(2), 100.0)))
    assert all("refused" in each.error or "111" in each.error for each in found)
    with pytest.raises(ConnectionError, match="the server did not answer"):
        asyncio.run(load.closed_loop(port, planned(2), 2, 9))


def test_as_many_clients_as_rows_measure_what_the_server_completes(server):
    server.gap_s = 0.01
    found = asyncio.run(load.closed_loop(server.port, planned(30), 3, 40))
    assert len(found) >= 40
    assert server.most == 3
    requests, tokens = load.completion_rate(found, 3)
    seconds = found[-1].last_s - found[2].last_s
    assert requests == pytest.approx((len(found) - 3) / seconds)
    assert tokens == pytest.approx(sum(each.tokens for each in found[3:]) / seconds)
    start = time.perf_counter()
    asyncio.run(load.closed_loop(server.port, planned(30), 1, 1, seconds=0.2))
    assert time.perf_counter() - start >= 0.2


def some_run(seed, errors=0, cpu=0.1):
    made = drawn(seed)
    due = np.cumsum(made.exponential(size=20))
    sent, first = due + 0.01, due + made.uniform(0.1, 0.5, 20)
    last, tokens = first + made.uniform(1, 2, 20), made.integers(1, 9, 20)
    told = ["status 429"] * errors + [None] * (20 - errors)
    numbers = (each.tolist() for each in (due, sent, first, last, tokens))
    answered = [Answered(*each) for each in zip(*numbers, told, strict=True)]
    counts = {"steps": 50, "drafted": 100, "accepted": 25, "generated": 75}
    return LoadRun(answered, cpu, counts, {"none": 3, "chain:1": 1})


def test_numbers_are_those_of_numpy():
    runs = [some_run(0, errors=2, cpu=0.1), some_run(1, cpu=0.3)]
    table = np.array([each[:5] for run in runs for each in run.answered], float)
    due, _, first, last, tokens = table[2:].T
    found = numbers_of(runs)
    assert (found.requests, found.errors) == (40, 2)
    seconds = (last[:18].max() - table[0, 0]) + (last[18:].max() - table[20, 0])
    assert found.seconds == pytest.approx(seconds)
    assert found.goodput_tokens_per_s == pytest.approx(tokens.sum() / seconds)
    assert found.mean_latency_s == pytest.approx(np.mean(last - due))
    assert found.p50_latency_s == pytest.approx(np.median(last - due))
    assert found.p99_latency_s == pytest.approx(np.quantile(last - due, 0.99))
    assert found.ttft_s_p50 == pytest.approx(np.median(first - due))
    several = tokens > 1
    assert found.tpot_s_p50 == pytest.approx(
        np.median((last - first)[several] / (tokens[several] - 1))
    )
    assert found.late_s_p99 == pytest.approx(0.01)
    assert found.client_cpu == pytest.approx(0.2)
    assert (found.tokens_per_step, found.drafted_per_step) == (1.5, 2.0)
    assert (found.acceptance, found.chosen) == (0.25, {"none": 0.75, "chain:1": 0.25})


def test_one_request_in_two_carries_a_latency_target():
    mix = MIX._replace(max_tpot_ms=2.5)
    plan, plain = planned(1000, mix=mix), planned(1000)
    with_target = [each.max_tpot_ms for each in plan if each.max_tpot_ms is not None]
    assert set(with_target) == {2.5}
    assert 430 < len(with_target) < 570
    assert [each._replace(max_tpot_ms=None) for each in plan] == plain
    assert json.loads(load._message(plan[0]).split(b"\r\n\r\n")[1])["max_tpot_ms"] in (2.5, None)


def test_the_share_of_targets_that_were_met_is_counted():
    run = some_run(3)
    assert np.isnan(numbers_of([run]).within_tpot_target)
    times = [each.tpot_s for each in run.answered[:8]]
    limit = 1000 * float(np.nanmedian(times))
    answered = [each._replace(max_tpot_ms=limit) for each in run.answered[:8]]
    answered[0] = answered[0]._replace(error="status 500")
    met = sum(1000 * each.tpot_s <= limit for each in answered[1:])
    found = numbers_of([run._replace(answered=[*answered, *run.answered[8:]])])
    assert 0 < found.within_tpot_target == met / 8 < 1


def test_a_run_in_which_nothing_completed_has_no_numbers():
    found = numbers_of([some_run(0, errors=20)])
    assert (found.requests, found.errors, found.tokens, found.seconds) == (20, 20, 0, 0.0)
    assert np.isnan([found.goodput_tokens_per_s, found.mean_latency_s, found.ttft_s_p50]).all()
    row, *_ = rows_of(1.0, 2.0, {"none": [some_run(0, errors=20)]})
    assert (row.over_best_goodput, row.over_plain_latency) == (None, None)


def run_of(latency, tokens):
    """Two requests a second apart, which take so long and give so many tokens each."""
    answered = [Answered(due, due, due + 0.1, due + float(latency), tokens) for due in (0.0, 1.0)]
    return LoadRun(answered, 0.0, {}, {})


def test_ratios_are_medians_of_those_within_turns():
    runs = {
        "none": [run_of(2, 30), run_of(4, 30), run_of(3, 30)],
        "chain:3": [run_of(1, 20), run_of(2, 20), run_of(9, 100)],
        "auto": [run_of(1, 20), run_of(1, 20), run_of(3, 40)],
        "specexec:7": [],
    }
    rows = {row.setting: row.report() for row in rows_of(0.5, 4.0, runs)}
    assert list(rows) == ["none", "chain:3", "auto"]
    assert all((row["rate"], row["rate_requests_per_s"]) == (0.5, 4.0) for row in rows.values())
    # goodput: none 20, 12, 15; chain 20, 40 / 3, 20; auto 20, 20, 20. Latency: chain is best, too.
    assert rows["none"]["over_best_goodput"] == pytest.approx(0.9)
    assert rows["chain:3"]["over_best_goodput"] == 1
    assert rows["auto"]["over_best_goodput"] == pytest.approx(1)
    assert rows["auto"]["over_plain_goodput"] == pytest.approx(4 / 3)
    assert rows["none"]["over_best_latency"] == 2
    assert rows["auto"]["over_best_latency"] == 0.5
    assert rows["auto"]["over_plain_latency"] == 0.5
    assert [turn["mean_latency_s"] for turn in rows["auto"]["turns"]] == [1, 1, 3]
    only = rows_of(0.5, 4.0, {"auto": runs["auto"]})[0]
    assert (only.over_best_goodput, only.over_plain_goodput) == (None, None)


def test_a_turn_that_is_not_over_is_compared_as_far_as_it_goes():
    runs = {"none": [run_of(2, 10), run_of(4, 10)], "auto": [run_of(1, 10)]}
    rows = {row.setting: row for row in rows_of(1.0, 1.0, runs)}
    assert rows["auto"].over_best_latency == 0.5
    assert len(rows["auto"].turns) == 1


def test_every_setting_is_first_in_turn():
    measured = bench_serve.measurement_of(
        BenchServe(rates="1,2", settings="none,chain:1,auto", turns=3)
    )
    order = list(measured.order())
    assert len(order) == len(set(order)) == 18
    firsts = [setting for _, _, setting in order[::3]]
    assert firsts == ["none", "chain:1", "chain:1", "auto", "auto", "none"]
    assert [each[:2] for each in order[:6]] == [(0, 1.0)] * 3 + [(0, 2.0)] * 3
    assert measured.plan(MIX, 1) == measured.plan(MIX, 1) != measured.plan(MIX, 0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--settings", "none,chain:x"), "the size of 'chain:x' is 'x'; it must be a number"),
        (("--settings", "none,nothing:3"), "no method 'nothing'; there are none, chain, "),
        (("--settings", "specexec:0"), "the size of 'specexec:0' is '0'"),
        (("--rates", "0.5,0"), "--rates has 0; a rate must be a number above 0"),
        (("--rates", "-1"), "--rates has -1"),
        (("--rates", "inf"), "--rates has inf"),
        (("--rates", "much"), "--rates is 'much'"),
        (("--requests", "0"), "--requests is 0"),
        (("--turns", "0"), "--turns is 0"),
        (("--rows", "0"), "--rows is 0"),
        (("--max-tpot-ms", "0"), "--max-tpot-ms is 0; it must be above 0, at most 1e+09"),
        (("--limit", "0"), "--limit is 0"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("--seed", "-1"), "--seed is -1"),
        (("--shape", "waves"), "no shape 'waves'; there are poisson, steps, ramp, bursts"),
        (("--temperature", "warm"), "--temperature is 'warm'; it must be mixed or a number"),
        (("--temperature", "0,1"), "--temperature is '0,1'"),
        (("--temperature", "-1"), "--temperature is '-1'"),
        (("--dtype", "float64"), "no dtype 'float64'"),
        (("--inflate", "big"), "--inflate is 'big'"),
        (("--prompts", "nowhere.jsonl"), "no prompt file at nowhere.jsonl"),
        (("--then", "nowhere.jsonl"), "no prompt file at nowhere.jsonl"),
        (("--json", "nowhere/out.json"), "in a folder that does not exist"),
        (("--png", "out.svg"), "its name must end in .png"),
        (("--model", "nowhere"), "nowhere"),
        (("--inflate", "1000"), "the model has 16480 weights; it cannot be inflated to 1000"),
        (("--max-new-tokens", "400"), "none of the"),
    ],
)
def test_wrong_options_are_one_sentence(flags, sentence, capsys, monkeypatch):
    monkeypatch.setattr(bench_serve, "_apart", bench_serve.prepare)
    assert main(["bench-serve", *pair_flags(), *flags]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "is left out" not in line]
    assert len(said) == 1
    assert sentence in said[0]


SHORT = ("--max-new-tokens", "8", "--requests", "6", "--limit", "3", "--rows", "2")


@pytest.fixture
def flow(server, monkeypatch):
    """The verb with a scripted server, and its target prepared in this process."""

    @contextlib.contextmanager
    def started(flags, log):
        server.flags = flags
        yield server

    monkeypatch.setattr(bench_serve, "serving", started)
    monkeypatch.setattr(bench_serve, "_apart", bench_serve.prepare)
    monkeypatch.setattr(bench_serve, "_LEAST_SECONDS", 0.0)
    server.gap_s = 0.002
    return lambda *flags: main(["bench-serve", *SHORT, *pair_flags(), *flags])


def test_settings_run_in_turns_with_the_same_requests(flow, server, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--settings", "chain:1,auto,none", "--rates", "0.5,2", "--turns", "2"]
    flags += ["--temperature", "mixed", "--json", str(out), "--png", str(tmp_path / "out.png")]
    assert flow(*flags) == 0
    printed = capsys.readouterr()
    assert "plain decoding completes" in printed.err
    assert "chain:1" in printed.out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    first, second = ["chain:1", "auto", "none"], ["auto", "none", "chain:1"]
    third = ["none", "chain:1", "auto"]
    warm = ["none", "chain:1", "auto", "none"]
    assert server.fixed == [*warm, *first, *second, *second, *third]
    asked = [(tuple(b["prompt"]), b["max_tokens"], b["temperature"]) for b in server.bodies[-72:]]
    runs = [sorted(asked[start : start + 6]) for start in range(0, 72, 6)]
    assert runs == [runs[0]] * 6 + [runs[6]] * 6
    assert runs[0] != runs[6]
    report = json.loads(out.read_text())
    assert report["complete"] is True
    assert [row["setting"] for row in report["rows"]] == first * 2
    assert all(row.keys() >= ROW and row["errors"] == 0 for row in report["rows"])
    assert [row["chosen"] for row in report["rows"][:2]] == [{}, {"none": 0.25, "chain:1": 0.75}]
    assert {row["tokens_per_step"] for row in report["rows"]} == {2.0}


def test_a_run_that_is_ended_leaves_what_it_has(flow, tmp_path, monkeypatch):
    def ended(sheet, *cell):
        add(sheet, *cell)
        if cell[:2] == (1.0, "auto"):
            raise KeyboardInterrupt

    add = LoadSheet.add
    monkeypatch.setattr(LoadSheet, "add", ended)
    out = tmp_path / "out.json"
    flags = ("--settings", "none,auto,chain:1", "--rates", "2,1", "--json", str(out))
    assert flow(*flags) == 130
    report = json.loads(out.read_text())
    assert report["complete"] is False
    assert [(row["rate"], row["setting"]) for row in report["rows"]] == [
        (1.0, "auto"), (2.0, "none"), (2.0, "auto"), (2.0, "chain:1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"--model": "target", "--draft": "one", "--settings": "all"}),
        (("--inflate", "48320"), {"--model": "specjax-"}),
        (("--settings", "none,chain:2"), {"--settings": "none,chain:2"}),
        (("--dtype", "bfloat16", "--rows", "3"), {"--dtype": "bfloat16", "--rows": "3"}),
    ],
)
def test_the_server_gets_what_was_asked_for(flow, server, flags, expected):
    assert flow("--rates", "9", "--turns", "1", *flags) == 0
    for flag, value in expected.items():
        assert value in server.flags[server.flags.index(flag) + 1]
    assert "--debug" in server.flags


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A script in the place of the interpreter that starts a server."""

    def stands(*lines):
        script = tmp_path / "python"
        script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path / "log"

    return stands


JOINED = 'echo "specjax: every setting has joined, after 3 s." >&2'
UP = 'echo "specjax: bench at http://127.0.0.1:1." >&2; echo "specjax: ready." >&2; ' + JOINED


def test_a_server_that_does_not_start_says_why(stand_in):
    log = stand_in('echo "specjax: the setting specexec:9 cannot be used." >&2', "exit 2")
    with pytest.raises(ValueError, match="did not start: the setting specexec:9 cannot be used"):
        serving([], log).__enter__()


def test_a_server_that_has_ended_is_a_sentence(stand_in):
    log = stand_in(UP, 'echo "specjax: the engine failed." >&2', "exit 1")
    with serving([], log) as found, pytest.raises(OSError, match="has ended: the engine failed"):
        found.fix("none")


def test_a_signal_ends_the_server_too(stand_in, monkeypatch):
    log = stand_in(UP, "exec sleep 60")
    prepared = bench_serve.Prepared([[1]], [], {})
    monkeypatch.setattr(bench_serve, "_apart", lambda *_: prepared)
    monkeypatch.setattr(bench_serve, "serving", lambda flags, _: serving(flags, log))
    processes, before = [], signal.getsignal(signal.SIGTERM)

    def told(server, *_):
        processes.append(server._process)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(bench_serve, "_measured", told)
    assert main(["bench-serve", *pair_flags()]) == 130
    assert processes[0].poll() is not None
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_server_of_its_own_is_measured(tmp_path, monkeypatch, capsys):
    """From the prepared target to the report, in real processes."""
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPECJAX_API_KEY", "not for this server")
    monkeypatch.setattr(bench_serve, "_LEAST_SECONDS", 0.0)
    out = tmp_path / "out.json"
    flags = [*SHORT, *pair_flags(), "--rows", "1", "--inflate", "48320", "--turns", "1"]
    flags += ["--settings", "none,chain:2", "--rates", "0.5", "--json", str(out)]
    assert main(["bench-serve", *flags]) == 0
    assert "chain:2" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["env"]["parameters"] > 25_000
    assert report["env"]["capacity_requests_per_s"] > 0
    plain, chain = report["rows"]
    assert (plain["setting"], chain["setting"]) == ("none", "chain:2")
    assert (plain["errors"], chain["errors"]) == (0, 0)
    assert plain["tokens"] == chain["tokens"] > 0
    assert (plain["tokens_per_step"], plain["drafted_per_step"]) == (1.0, 0.0)
    assert chain["tokens_per_step"] > 1.2  # the draft is the target before it was inflated
    assert 0 < chain["acceptance"] <= 1
