"""Processes that share a mesh: flags and environment, equal tokens, and failures that are told."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.parallel.processes import devices_for, patience, processes_of, sizes_of
from tests.conftest import QUICKLY
from tests.folders import pair_folder


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def command(*more):
    """`specjax generate` of the tiny pair, to be run by every process."""
    pair = ["--model", str(pair_folder() / "target"), "--draft", str(pair_folder() / "two")]
    wanted = ["--max-new-tokens", "12", "--method", "chain", "--json", *pair]
    return [sys.executable, "-m", "specjax", "generate", "def add(a, b):", *wanted, *more]


def begun(arguments, **environment):
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | QUICKLY | {"SPECJAX_PATIENCE": "90"} | environment,
    )  # fmt: skip


def test_two_processes_give_the_tokens_of_one(capsys):
    address = f"127.0.0.1:{free_port()}"
    by_flag = begun(command("--mesh", "model=2", "--distributed", f"{address},2,0"))
    by_environment = begun(
        command("--mesh", "model=2", "--distributed", "auto"),
        SPECJAX_COORDINATOR=address, SPECJAX_PROCESSES="2", SPECJAX_PROCESS="1",
    )  # fmt: skip
    assert main(command()[3:]) == 0
    expected = capsys.readouterr().out
    (first, said), (second, also) = (
        each.communicate(timeout=300) for each in (by_flag, by_environment)
    )
    assert by_flag.returncode == 0, said
    assert by_environment.returncode == 0, also
    assert json.loads(first)["token_ids"] == json.loads(expected)["token_ids"]
    assert json.loads(first)["target_steps"] == json.loads(expected)["target_steps"]
    assert second == ""


@pytest.mark.slow
def test_two_processes_with_rows_of_their_own_give_the_tokens_of_one():
    address = f"127.0.0.1:{free_port()}"
    script = [sys.executable, "-m", "tests.on_processes"]
    several = [begun([*script, address, str(own)], JAX_NUM_CPU_DEVICES="1") for own in (0, 1)]
    told = [each.communicate(timeout=300) for each in several]
    assert [each.returncode for each in several] == [0, 0], told
    found = [json.loads(printed.splitlines()[-1]) for printed, _ in told]
    assert found[0] == found[1]
    assert found[0]["made"] == found[0]["streamed"] == found[0]["alone"]


@pytest.mark.slow
def test_bench_measures_on_a_mesh_and_auto_tells_it_from_one_device(tmp_path):
    asked = ["--model", str(pair_folder() / "target"), "--draft", str(pair_folder() / "one")]
    small = ["--limit", "6", "--max-new-tokens", "8", "--temperatures", "0", "--methods", "chain"]
    flags = [*asked, *small, "--batch", "2", "--skip-phases"]
    bench = [sys.executable, "-m", "specjax", "bench", *flags]
    cache, steps = {"SPECJAX_CACHE": str(tmp_path / "cache")}, []
    for name, axes in {"one": [], "mesh": ["--mesh", "data=2,model=2"]}.items():
        file = tmp_path / f"{name}.json"
        told = begun([*bench, "--json", str(file), *axes], **cache)
        _, said = told.communicate(timeout=300)
        assert told.returncode == 0, said
        rows = json.loads(file.read_text())["rows"]
        steps.append([(row["label"], row["target_steps"], row["new_tokens"])
                      for row in rows if row["dtype"] == "float32"])  # fmt: skip
    assert len(steps[0]) == 2
    assert steps[0] == steps[1]
    names = json.loads((tmp_path / "cache" / "measured.json").read_text())
    assert sorted(name.endswith("greedy, data=2, model=2") for name in names) == [False, True]


@pytest.mark.slow
def test_two_processes_write_a_model_by_shards(tmp_path, capsys):
    source, out = pair_folder() / "target", tmp_path / "kept"
    shard = [sys.executable, "-m", "specjax", "shard", str(source), str(out), "--mesh", "model=2"]
    address = f"127.0.0.1:{free_port()}"
    several = [begun([*shard, "--distributed", f"{address},2,{own}"]) for own in (0, 1)]
    told = [each.communicate(timeout=300) for each in several]
    assert [each.returncode for each in several] == [0, 0], told
    assert told[0][0].startswith(f"wrote {out}: ")
    assert told[1][0] == ""
    jax.tree.map(np.testing.assert_array_equal, load_model(out), load_model(source))
    assert tokenizer_of(out)("def add(").input_ids == tokenizer_of(source)("def add(").input_ids
    assert main(["shard", str(source), str(out)]) == 2
    assert "exists already; name another folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (0, "process 0 of 2 timed out after 4 s of waiting for the other processes"),
        (1, "process 1 of 2 timed out after 4 s of waiting for the coordinator at 127.0.0.1"),
    ],
)
def test_a_process_that_waits_times_out_with_a_sentence(own, sentence):
    flags = ["--distributed", f"127.0.0.1:{free_port()},2,{own}", "--mesh", "model=2"]
    waiting = begun(command(*flags), SPECJAX_PATIENCE="4")
    printed, said = waiting.communicate(timeout=120)
    assert waiting.returncode == 2
    assert printed == ""
    assert sentence in said


@pytest.mark.parametrize(
    "text", ["host,2,0", "host:1,2", "host:1,2,2", "host:1,two,0", "host:1,2,-1", ""]
)
def test_what_names_no_processes_is_refused(text):
    with pytest.raises(ValueError, match="it must be HOST:PORT,PROCESSES,PROCESS"):
        processes_of(text, {})


def test_processes_are_named_by_flag_or_environment():
    assert processes_of("a:1,4,3", {}) == ("a:1", 4, 3)
    given = {"SPECJAX_COORDINATOR": "b:2", "SPECJAX_PROCESSES": "2", "SPECJAX_PROCESS": "1"}
    assert processes_of("auto", given) == ("b:2", 2, 1)
    assert processes_of("auto", {}) is None  # a cluster that jax knows
    with pytest.raises(ValueError, match="SPECJAX_PROCESS"):
        processes_of("auto", {"SPECJAX_COORDINATOR": "b:2"})


def test_processes_must_share_a_mesh_and_wait_for_a_while():
    with pytest.raises(ValueError, match="--distributed needs --mesh"):
        devices_for(None, "a:1,2,0")
    with pytest.raises(ValueError, match="SPECJAX_PATIENCE is 'long'"):
        patience({"SPECJAX_PATIENCE": "long"})


def test_meshes_are_named_by_their_axes():
    assert sizes_of("data=2, model=4") == {"data": 2, "model": 4}
    assert sizes_of(None) == {}
    for wrong in ("", "model", "model=0", "rows=2", "model=2,model=2", "model=x"):
        with pytest.raises(ValueError, match=r"--mesh is .*data=2,model=4"):
            sizes_of(wrong)
