"""Two replicas behind Ray Serve on this machine, each with an engine of a tiny model."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.ray_process import serving_with_ray
from tests.conftest import QUICKLY
from tests.folders import target_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

OPTIONS = {
    "num_replicas": 2, "rows": 2, "method": "none",
    "num_cpus": 1, "num_gpus": 0, "debug": True, "strict_fields": False, "draft": None,
}  # fmt: skip
BODY = {"prompt": "def add(a, b):", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
LONG = 3000
"""Tokens of a stream that takes seconds."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = target_folder(tmp_path_factory.mktemp("model"), 0, max_positions=8192, num_layers=1)
    with serving_with_ray(os.environ | QUICKLY, model=str(folder), **OPTIONS) as running:
        yield running


def complete(cluster, replica: str = "", **fields) -> httpx.Response:
    """A completion, from any replica or from one: a response that it keeps is named."""
    named = {"previous_response_id": f"resp_{replica}-0"} if replica else {}
    body = BODY | named | fields
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def events_of(cluster, replica: str, times: list[float], **fields) -> list[dict]:
    """The events of a stream, and in `times` when each came."""
    body = BODY | {"stream": True, "previous_response_id": f"resp_{replica}-0"} | fields
    events = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def joined(events: list[dict]) -> str:
    return "".join(choice["text"] for each in events for choice in each.get("choices", ()))


def by_replica(cluster, name: str) -> dict[str, float]:
    """A metric of each replica, all its other labels together."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0.0) + sample.value
    return found


def running(cluster) -> float:
    return sum(by_replica(cluster, "vllm:num_requests_running").values())


def until(holds, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_replicas_give_equal_texts_and_streams_stream(cluster):
    first, second = cluster.replicas()
    before = by_replica(cluster, "vllm:request_success_total")
    whole = [text_of(complete(cluster, name)) for name in (first, second)]
    after = by_replica(cluster, "vllm:request_success_total")
    assert all(after[name] == before.get(name, 0) + 1 for name in (first, second))
    assert whole[0] == whole[1] != ""
    drawn = [text_of(complete(cluster, name, temperature=0.8, seed=7)) for name in (first, second)]
    assert drawn[0] == drawn[1] != whole[0]
    times: list[float] = []
    events = events_of(cluster, first, times, max_tokens=2000)
    assert joined(events).startswith(whole[0])
    assert times[0] < times[len(times) // 2] < times[-1], "events come as they are made"
    assert times[-1] - times[0] > 20 * (times[1] - times[0])


def test_requests_that_begin_alike_go_to_one_replica(cluster):
    def groups(turn: int) -> None:
        for group in ("one", "two", "three", "four"):
            prompt = 40 * f"# group {group}\n" + f"x{turn} ="
            text_of(complete(cluster, prompt=prompt, max_tokens=4))

    before = by_replica(cluster, "vllm:request_success_total")
    for turn in range(4):
        groups(turn)
    after = by_replica(cluster, "vllm:request_success_total")
    done = {name: count - before.get(name, 0) for name, count in after.items()}
    assert sum(done.values()) == 16
    assert all(count % 4 == 0 for count in done.values()), "each group is at one replica"

    def reused() -> bool:
        groups(5)
        return sum(by_replica(cluster, "vllm:prefix_cache_hits_total").values()) > 1000

    until(reused)  # an engine that still measures forgets what its rows held


def test_a_client_that_goes_away_frees_its_row(cluster):
    body = BODY | {"stream": True, "max_tokens": LONG}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # which closes the connection when nobody holds it
        next(lines)
        assert running(cluster) == 1
    until(lambda: running(cluster) == 0, 2.0)


def test_a_killed_replica_loses_its_running_requests_alone_and_comes_back(cluster):
    first, second = cluster.replicas()
    expected = text_of(complete(cluster, second, max_tokens=LONG))
    begun = threading.Barrier(3, timeout=60)

    def watched(replica: str) -> list[dict]:
        times: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(events_of, cluster, replica, times, max_tokens=LONG)
            until(lambda: len(times) > 1 or stream.done())
            begun.wait()
            return stream.result()

    with ThreadPoolExecutor(2) as pool:
        lost, other = pool.submit(watched, first), pool.submit(watched, second)
        begun.wait()
        cluster.kill(first)
        meanwhile = [text_of(complete(cluster)) for _ in range(3)]
        events = lost.result()
        assert joined(events)
        assert events[-1]["error"]["code"] == "replica_lost"
        assert joined(other.result()) == expected
    assert set(meanwhile) == {text_of(complete(cluster, second))}

    def back() -> list[str]:
        return [name for name in by_replica(cluster, "vllm:num_requests_running") if name != second]

    until(lambda: back() not in ([], [first]))
    (new,) = back()
    assert text_of(complete(cluster, new)) == meanwhile[0]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("rows=0", "--rows is 0; it must be at least 1."),
        ("port=80", "port is Ray's: name it in its http_options."),
        ("num_replica=2", "Unrecognized options: --num-replica=2"),
    ],
)
def test_a_wrong_option_is_one_sentence(argument, sentence):
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "specjax.server.ray:app", argument]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
