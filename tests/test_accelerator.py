"""What is run on an accelerator, in what order and for how long, what is kept, and the tables."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
import tyro

from benchmarks.accelerator import __main__ as command
from benchmarks.accelerator import kernels
from benchmarks.accelerator.operands import SHAPES, make
from benchmarks.accelerator.pieces import CALL_SECONDS, PIECES, Piece
from benchmarks.accelerator.running import (
    DONE,
    FAILED,
    OWED,
    RUNNING,
    SKIPPED,
    Place,
    machine,
    next_piece,
    order,
    work,
)
from benchmarks.accelerator.tables import attention, goals, tables
from benchmarks.offload import host
from benchmarks.programs import ahead
from pallas_kernels import bench
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_attention import autotune, reference
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from specjax.cli.main import _options
from tests.conftest import QUICKLY

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "benchmarks" / "accelerator" / "small.json"
MACHINE = {"platform": "cpu", "device": "cpu", "driver": None, "jax": "0", "jaxlib": "0"}
WORKS = "import json, sys; json.dump({'rows': [1]}, open(sys.argv[1], 'w'))"


class Pieces:
    """Pieces of work that are modules of a line or two, and a clock that only they move."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.all = folder, []
        self.place = self.begun({"machine": MACHINE, "calls": [], "pieces": {}, "results": {}})
        monkeypatch.setenv("PYTHONPATH", str(folder))
        (folder / "clock").write_text("")

    def begun(self, state):
        return Place(state, self.folder / "all.json", None, clock=self.clock)

    def clock(self):
        return float(sum(map(int, (self.folder / "clock").read_text().split())))

    def add(self, name, text=WORKS, takes=10, seconds=10.0, **more):
        module = f"piece_{name}"
        took = f"open({str(self.folder / 'clock')!r}, 'a').write('{takes} ')\n"
        (self.folder / f"{module}.py").write_text(took + text)
        more = {"most": 100.0, **more}
        self.all.append(Piece(name, (module, "{json}"), (module, "{json}"), seconds, **more))

    def call(self, seconds=540.0):
        """Another call over what the file holds; the names of what ran."""
        state, file = self.place.state, self.place.file
        if file.exists():
            state = command.read(file)
        self.place = self.begun(state)
        state["calls"].append({"date": "2026-11-26", "small": False})
        ran = len((self.folder / "clock").read_text().split())
        work(self.place, self.all, self.clock() + seconds)
        self.place.save()
        return len((self.folder / "clock").read_text().split()) - ran

    def held(self, name):
        return json.loads(self.place.file.read_text())["pieces"][name]


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    return Pieces(tmp_path, monkeypatch)


def test_a_call_ends_with_its_time_and_the_next_one_goes_on(pieces):
    for name in ("first", "second", "third"):
        pieces.add(name, takes=100, seconds=100.0)
    pieces.add("short", takes=30, seconds=30.0)
    assert pieces.call(250.0) == 3
    statuses = {name: each["status"] for name, each in pieces.place.state["pieces"].items()}
    assert statuses == {"first": DONE, "second": DONE, "short": DONE}  # what fits goes before
    assert pieces.call(250.0) == 1
    assert pieces.held("third")["seconds"] == 100
    assert pieces.call(250.0) == 0
    assert pieces.place.state["results"]["third"] == {"rows": [1]}


def test_a_record_says_what_ran_where(pieces):
    pieces.add("one")
    pieces.call()
    record = pieces.held("one")
    assert record["command"] == "python -m piece_one json.json"
    assert {"device", "driver", "jax", "jaxlib", "date", "seconds"} <= record.keys()


def test_what_fails_is_noted_and_tried_once_more_after_what_was_never_tried(pieces):
    pieces.add("wrong", "raise ValueError('so it is')", takes=60, seconds=60.0)
    pieces.add("right", takes=60, seconds=60.0)
    assert pieces.call(100.0) == 1
    record = pieces.held("wrong")
    assert (record["status"], record["error"]) == (FAILED, "ValueError: so it is")
    assert "Traceback" in record["stderr"]
    assert pieces.call(100.0) == 1  # the other
    assert pieces.held("right")["status"] == DONE
    assert pieces.call(100.0) == 1
    assert pieces.held("wrong")["tries"] == 2
    assert pieces.call(100.0) == 0


def test_a_piece_that_hangs_is_ended_with_what_it_started(pieces):
    pieces.add("hangs", """
import json, subprocess, sys, time
json.dump({"rows": [], "complete": False}, open(sys.argv[1], "w"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(__file__ + ".child", "w").write(str(child.pid))
time.sleep(600)
""", seconds=0.1, most=5.0)  # fmt: skip
    pieces.add("next")
    begin = time.monotonic()
    pieces.call()
    assert time.monotonic() - begin < 60
    record = pieces.held("hangs")
    assert (record["status"], record["error"]) == (FAILED, "it did not end in 5 seconds")
    assert pieces.place.state["results"]["hangs"] == {"rows": [], "complete": False}
    assert pieces.held("next")["status"] == DONE
    child = int((pieces.folder / "piece_hangs.py.child").read_text())
    with contextlib.suppress(FileNotFoundError):  # it may wait to be reaped by whoever has it now
        assert Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_what_is_ended_because_the_call_is_over_is_owed_and_not_tried(pieces):
    late = (
        "import time\nif not PATH.exists():\n    PATH.write_text('')\n    time.sleep(600)\n" + WORKS
    )
    place = pieces.folder / "was here"
    pieces.add(
        "late", f"from pathlib import Path\nPATH = Path({str(place)!r})\n{late}", seconds=1.0
    )
    pieces.call(5.0)
    record = pieces.held("late")
    assert (record["status"], record["tries"]) == (OWED, 0)
    assert record["error"] == "the time of the call was over"
    pieces.call()
    assert pieces.held("late")["status"] == DONE


GOES_ON = """
import json, os, sys
from pathlib import Path
file = Path(sys.argv[1])
rows = json.loads(file.read_text())["rows"] if file.exists() else []
rows.append(len(rows))
file.write_text(json.dumps({"rows": rows, "owed": list(range(len(rows), 3))}))
sys.exit(CODE)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_what_goes_on_has_its_own_rows_again(code, pieces):
    """Whether it stopped for its time, or ended itself because something in it hung."""
    pieces.add("long", GOES_ON.replace("CODE", str(code)), goes_on=True, result="shared")
    assert pieces.call() == 3
    assert pieces.place.state["results"]["shared"]["rows"] == [0, 1, 2]
    assert pieces.held("long")["status"] == (FAILED if code else DONE)  # nothing was owed any more


def test_what_goes_on_and_gets_nowhere_has_failed(pieces):
    pieces.add("stuck", "import sys; sys.exit('no memory')", goes_on=True)
    assert pieces.call() == 1
    record = pieces.held("stuck")
    assert (record["status"], record["error"]) == (FAILED, "no memory")


def test_what_goes_on_for_too_long_lets_the_others_go_first(pieces):
    pieces.add("long", GOES_ON.replace("CODE", "0").replace("3))", "9))"), takes=60, goes_on=True)
    pieces.add("other", takes=60)
    pieces.call(190.0)
    assert pieces.held("other")["status"] == DONE
    assert pieces.held("long")["status"] == OWED


def test_the_file_is_whole_while_a_piece_runs_and_names_it(pieces):
    pieces.add("first")
    pieces.add("reads", f"""
import json, sys
state = json.load(open({str(pieces.place.file)!r}))
found = {{name: each["status"] for name, each in state["pieces"].items()}}
json.dump(found, open(sys.argv[1], "w"))
""")  # fmt: skip
    pieces.call()
    assert pieces.place.state["results"]["reads"] == {"first": DONE, "reads": RUNNING}
    assert not list(pieces.folder.glob(".specjax-*"))


def test_a_piece_during_which_everything_ended_has_failed(pieces):
    pieces.add("deadly")
    state = pieces.place.state
    state["calls"].append({})
    state["pieces"]["deadly"] = {"status": RUNNING, "tries": 1, "call": 1, "seconds": 0.0}
    pieces.place.save()
    (found,) = command.read(pieces.place.file)["pieces"].values()
    assert (found["status"], found["error"]) == (FAILED, "everything was ended while it ran")
    assert pieces.call() == 1
    assert pieces.held("deadly")["status"] == DONE


def test_what_cannot_run_here_says_why(pieces):
    pieces.add("kernel", platforms=("gpu", "tpu"))
    pieces.add("package", needs=("json", "no_such_package"))
    pieces.add("free")
    assert pieces.call() == 1
    assert pieces.held("kernel") == {
        "status": SKIPPED, "error": "it needs gpu or tpu, and this is cpu"
    }  # fmt: skip
    assert pieces.held("package")["error"] == "no_such_package not installed"


def test_a_partial_result_does_not_replace_a_whole_one(pieces):
    pieces.add("again", "import json, sys; json.dump({'complete': False}, open(sys.argv[1], 'w'))")
    pieces.place.state["results"]["again"] = {"rows": [1]}
    pieces.call()
    assert pieces.held("again")["status"] == FAILED
    assert pieces.place.state["results"]["again"] == {"rows": [1]}


def test_the_order_is_what_is_owed_then_what_failed_in_earlier_calls():
    def record(status, tries=1, call=1, seconds=0.0):
        return {"status": status, "tries": tries, "call": call, "seconds": seconds}

    names = [piece.name for piece in PIECES]
    assert [piece.name for piece in order(PIECES, {}, 1)] == names
    records = {
        names[0]: record(FAILED), names[1]: record(FAILED, tries=2), names[2]: record(DONE),
        names[3]: record(FAILED, call=2), names[4]: record(OWED, seconds=1000.0),
        names[5]: record(OWED), names[6]: {"status": SKIPPED},
    }  # fmt: skip
    found = [piece.name for piece in order(PIECES, records, 2)]
    assert found == [*names[5:], names[0], names[4]]
    assert next_piece(PIECES, min(piece.fits_in for piece in PIECES) - 1) is None
    stops = [piece for piece in PIECES if piece.goes_on]
    assert next_piece(stops, 60.0) == stops[0]
    assert stops[0].seconds > 60


def test_every_piece_fits_into_a_call_and_can_be_named():
    for piece in PIECES:
        assert piece.seconds <= piece.most < CALL_SECONDS - 60
        assert command.chosen(piece.name) == [piece]
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    with pytest.raises(ValueError, match="no piece 'moon'; there are kernels-xla"):
        command.chosen("limits,moon")


@pytest.mark.parametrize("small", [False, True])
def test_every_command_is_one_that_is_understood(small, monkeypatch):
    """None of the larger ones can run here, but their flags are read."""
    names = {"json": "json.json", "prompts": "p", "seconds": "9"}
    for piece in PIECES:
        module, *flags = (
            part.format_map(names) for part in (piece.small if small else piece.command)
        )
        if module == "specjax":
            _options(flags)
        elif module == "pallas_kernels.bench":
            monkeypatch.setattr("sys.argv", ["bench", *flags])
            assert bench._wanted(bench._options())
        elif module in ("benchmarks.offload.host", "benchmarks.programs.ahead"):
            asked = host if "host" in module else ahead
            assert tyro.cli(asked.Asked, args=flags).json == "json.json"
        else:
            assert module in (
                "benchmarks.accelerator.kernels",
                "benchmarks.accelerator.packed",
                "benchmarks.accelerator.trace",
                "benchmarks.sampling_limits",
            )


def test_a_kernel_that_is_wrong_is_seen(monkeypatch):
    at = make(SHAPES["several tiles"], jnp.bfloat16)
    row = kernels.row_of("a case", at, "xla")
    assert row["passed"]
    assert row["error_over_tolerance"] < 1
    off = Implementation(lambda at: 1.05 * reference.tree_attention(at))
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", off)
    assert not kernels.row_of("a case", at, "xla")["passed"]
    assert "it needs gpu" in kernels.row_of("a case", at, "triton")["refused"]
    broken = Implementation(lambda at: 1 / 0)
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", broken)
    assert kernels.row_of("a case", at, "xla")["error"] == "ZeroDivisionError: division by zero"


def called(*arguments, **env):
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.accelerator", *map(str, arguments)], cwd=ROOT,
        env=os.environ | QUICKLY | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until_begun(process, name):
    for line in process.stdout:
        if line.startswith(f"{name}:"):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_leaves_the_piece_owed(sign, tmp_path):
    file = tmp_path / "all.json"
    with called(file, "--small", "--only", "limits", "--no-cache") as process:
        until_begun(process, "limits")
        process.send_signal(sign)
        process.wait(60)
    state = json.loads(file.read_text())
    record = state["pieces"]["limits"]
    assert (record["status"], record["tries"], record["error"]) == (OWED, 0, "it was interrupted")
    assert state["calls"][0]["seconds"] > 0


def test_a_piece_runs_and_is_listed(tmp_path):
    file = tmp_path / "all.json"
    with called(file, "--small", "--only", "limits") as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "done after" in lines["limits"]
    assert lines["shares"].endswith("owed")
    assert list((tmp_path / "all.cache").iterdir())  # compiled programs
    assert "| 1 x 1 x 4096 |" in tables(json.loads(file.read_text()))


def test_a_file_of_another_machine_is_refused(tmp_path, monkeypatch, capsys):
    state = json.loads(SMALL.read_text())
    state["machine"]["device"] = "NVIDIA H100 80GB HBM3"
    file = tmp_path / "all.json"
    file.write_text(json.dumps(state))
    monkeypatch.setattr("sys.argv", ["accelerator", str(file)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert command.main() == 2
    assert "is of device NVIDIA H100 80GB HBM3, and this is cpu." in capsys.readouterr().err
    assert json.loads(file.read_text()) == state


def test_a_machine_that_does_not_answer_is_a_sentence(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "moon")
    with pytest.raises(ValueError, match=r"no device answers: .*moon"):
        machine()


def test_the_dispatcher_takes_what_was_the_fastest(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "FILE", tmp_path / "measured.json")
    autotune.FILE.write_text("{}")
    autotune.measured.cache_clear()
    command.write(SMALL)
    (entries,) = autotune.measured().values()
    assert {entry["kind"] for entry in entries} == {"bfloat16 bfloat16 64", "bfloat16 int8 64"}
    autotune.measured.cache_clear()


# Tables


def test_tables_show_what_a_run_gave():
    """The run was of this very command, with small sizes on a CPU."""
    state = json.loads(SMALL.read_text())
    text = tables(state)
    assert text.startswith("cpu, Python 3.11")
    assert "Small sizes" in text
    titles = [
        "Kernels against the definition:", "Tree attention:", "Tree attention over caches of 8",
        "Passes and plain steps:", "The bundled pair", "Distributions and steps under limits:",
        "Shares of a step:", "Layers in the host's memory:", "Certificates:", "Programs compiled",
    ]  # fmt: skip
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    row = state["results"]["attention"]["rows"][0]
    assert f"| bundled | 1 | 1 | 512 | {row['seconds'] * 1e6:.1f} | xla | 1.00 |" in text
    step = state["results"]["passes-1b"]["rows"][-1]
    assert f"| plain step | 32 | {step['seconds'] * 1e3:.3f} |" in text
    assert "| kernels-hopper | skipped: it needs gpu, and this is cpu |" in text
    for line in text.splitlines():
        assert "None" not in line
    columns = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert min(columns) >= 3


def test_every_piece_of_the_run_is_done_or_says_why():
    state = json.loads(SMALL.read_text())
    assert list(state["pieces"]) != []
    for piece in PIECES:
        record = state["pieces"][piece.name]
        assert (record["status"] == DONE) == (not piece.platforms)
        assert piece.platforms or piece.key in state["results"]


def test_no_results_are_no_tables():
    state = {"machine": None, "calls": [], "pieces": {}, "results": {}}
    text = tables(state)
    assert text.startswith("Nothing is measured.")
    assert text.count("| owed |") == len(PIECES)


def attention_row(nodes, slots, name, seconds, over, batch=1, of_peak=0.5):
    return {"model": "bundled", "batch": batch, "nodes": nodes, "slots": slots,
            "implementation": name, "seconds": seconds, "best_peer_over_it": over,
            "of_peak": of_peak}  # fmt: skip


def test_a_table_has_a_column_for_every_implementation_and_says_what_failed():
    rows = [
        attention_row(16, 4096, "xla", 2e-6, 0.5), attention_row(16, 4096, "cudnn", 1e-6, 1.0),
        attention_row(16, 4096, "triton", 0.5e-6, 2.0, of_peak=0.75),
        attention_row(64, 4096, "xla", 4e-6, 1.0),
        {"model": "bundled", "batch": 1, "nodes": 64, "slots": 4096, "implementation": "hopper",
         "error": "it did not end in 90 seconds"},
    ]  # fmt: skip
    text = attention({"attention": {"rows": rows, "env": {"read_gb_per_second": 3000.0}}})
    assert text is not None
    header, _, *lines = text.splitlines()
    assert "| xla, µs | cudnn, µs | hopper, µs | triton, µs | fastest |" in header
    assert lines[0] == "| bundled | 1 | 16 | 4096 | 2.0 | 1.0 |  | 0.5 | triton | 2.00 | 75% |"
    assert "| 4.0 |  | (it did not end in 90 seconds) |  | xla | 1.00 | 50% |" in lines[1]
    assert lines[-1] == "The same run read 3,000 GB/s."


def test_goals_are_held_against_the_worst_of_the_fastest():
    shape = {"model": "llama-3.1-8b", "what": "pass", "nodes": 64, "over_the_first": 1.2,
             "over_floor": 1.3}  # fmt: skip
    step = {"model": "llama-3.1-8b", "what": "plain step", "over_floor": 1.1}
    text = {"model": "grown", "temperature": 0.0}
    results = {
        "attention": {"rows": [
            attention_row(1, 512, "xla", 2.0, 1.0), attention_row(1, 512, "triton", 1.0, 2.0),
            attention_row(16, 4096, "xla", 2.0, 0.9), attention_row(16, 4096, "cudnn", 1.8, 1.0),
            attention_row(64, 4096, "hopper", 1.0, 1.6, batch=8, of_peak=0.85),
            {"model": "bundled", "batch": 1, "nodes": 64, "slots": 512, "implementation": "hopper",
             "error": "lost"},
        ]},
        "passes-8b": {"rows": [{"what": "read bandwidth"}, shape, step]},
        "pair-1b-greedy": {"rows": [
            text | {"what": "none", "tokens_per_second": 100.0, "speedup": 1.0},
            text | {"what": "chain", "tokens_per_second": 300.0, "speedup": 3.0},
            text | {"what": "transformers, assisted", "tokens_per_second": 60.0, "speedup": 1.5},
        ]},
        "limits": {"rows": [{"what": "1 x 17 x 128256", "milliseconds":
                             {"sort": 8.0, "top-k 40": 2.0, "top-p 0.9": 4.0}}]},
    }  # fmt: skip
    found = [(measured, reached) for *_, measured, reached in goals(results)]
    assert found == [
        (0.9, False), (0.9, False), (0.85, True), (1.2, False), (1.1, True), (3.0, True),
        (5.0, True), (2.0, True),
    ]  # fmt: skip


@pytest.mark.slow
def test_what_needs_no_model_runs_here(tmp_path):
    """The others load models, and take minutes: `python -m benchmarks.accelerator FILE --small`."""
    file, names = tmp_path / "all.json", ("kernels-xla", "kernels-tpu", "attention-4096", "limits")
    with called(file, "--small", "--only", ",".join(names)) as process:
        out, error = process.communicate(timeout=900)
    assert process.returncode == 0, error
    state = json.loads(file.read_text())
    statuses = {name: each["status"] for name, each in state["pieces"].items()}
    assert statuses == dict.fromkeys(names, DONE) | {"kernels-tpu": SKIPPED}, out
    kept = json.loads(SMALL.read_text())
    assert state["results"].keys() == {"kernels-xla", "attention", "limits"}
    assert state["results"].keys() < kept["results"].keys()
