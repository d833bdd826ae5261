"""The bench of the kernels: its rows, what it leaves owed, and the table it writes."""

import json

import jax
import pytest

from pallas_kernels import bench, shapes
from pallas_kernels.tree_attention import autotune, measuring

SMALL = shapes.Shape("bundled", 1, 2, 512, "float32")


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    return bench.main()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "_SECONDS", 1e-4)
    monkeypatch.setattr(measuring, "ROTATED_BYTES", 2**21)


def test_rows_hold_what_was_measured():
    rows = []
    bench.measure(SMALL, 1e9, rows.append)
    (row,) = bench.compared(rows)
    assert row["implementation"] == "xla"  # the others need another platform
    assert row["seconds"] > 0
    assert row["gb_per_second"] == pytest.approx(SMALL.moved_bytes / row["seconds"] / 1e9)
    assert row["of_peak"] == pytest.approx(row["gb_per_second"])
    assert row["best_peer_over_it"] == 1


def test_bytes_are_those_of_the_operands():
    for shape in (SMALL, shapes.Shape("llama-3.2-1b", 8, 16, 512, bits=8)):
        prefix = shapes.abstract(shape).prefix
        assert prefix is not None
        cached = [prefix.keys, prefix.values, *(prefix.scales or ())]
        assert shape.cache_bytes == sum(x.size * x.dtype.itemsize for x in cached)
        assert shape.moved_bytes > shape.cache_bytes


def test_random_trees_have_roots_above_all():
    seen = shapes.make(SMALL._replace(nodes=40), jax.random.key(0)).tree_mask[0]
    assert bool(seen[:, 0].all())
    assert bool((seen == (seen & jax.numpy.tri(40, dtype=bool))).all())
    assert bool((seen @ seen == seen).all())  # an ancestor's ancestors are seen


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "rows.json")
    flags = ("--models", "bundled", "--batches", "1", "--nodes", "1,16", "--slots", "512",
             "--dtype", "bfloat16", "--json", file)  # fmt: skip
    assert run(monkeypatch, *flags, "--seconds", "1e-9") == 0
    assert "2 shapes are still owed" in capsys.readouterr().out
    assert run(monkeypatch, *flags) == 0
    first = json.loads((tmp_path / "rows.json").read_text())
    assert [row["nodes"] for row in first["rows"]] == [1, 16]
    assert first["owed"] == []
    monkeypatch.setattr(autotune, "FILE", tmp_path / "measured.json")
    autotune.FILE.write_text("{}")
    autotune.measured.cache_clear()
    assert run(monkeypatch, *flags, "--write") == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == first["rows"]
    autotune.measured.cache_clear()
    entries = autotune.measured()[autotune.device()]
    assert [entry["nodes"] for entry in entries] == [1, 16]
    assert {entry["fastest"] for entry in entries} == {"xla"}
    for entry in entries:  # so that it is seen which one is read: this one is the nearest
        entry["fastest"] = "reference" if entry["nodes"] == 1 else "xla"
    small = SMALL._replace(dtype="bfloat16")  # which "cpu" does not take
    assert autotune.choice(shapes.abstract(small)) == "reference"
    autotune.measured.cache_clear()


def test_a_kernel_that_hangs_is_noted_and_not_run_again(tmp_path, monkeypatch, capsys):
    ended = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.os, "_exit", ended.append)
        bench.measure(SMALL._replace(nodes=1), 1e9, ended.append, patience=0.0)
    hung, code, *_ = ended
    assert (hung["implementation"], hung["hangs"], code) == ("xla", True, 3)
    assert "it did not end in 0 seconds" in capsys.readouterr().err
    file = tmp_path / "rows.json"
    env = {"device": autotune.device(), "jax": jax.__version__}
    owed = [list(bench.shape_of(hung))]
    file.write_text(json.dumps({"env": env, "rows": [hung], "owed": owed}))
    flags = ("--models", "bundled", "--batches", "1", "--nodes", "1", "--slots", "512",
             "--dtype", "float32", "--json", str(file))  # fmt: skip
    assert run(monkeypatch, *flags) == 0
    found = json.loads(file.read_text())
    assert (found["rows"], found["owed"]) == ([hung], [])


def test_what_hung_at_two_shapes_is_not_tried_at_a_third(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    env = {"device": autotune.device(), "jax": jax.__version__}
    hung = [{**SMALL._replace(nodes=nodes)._asdict(), "implementation": "xla", "hangs": True,
             "error": "it did not end"} for nodes in (1, 16)]  # fmt: skip
    flags = ("--models", "bundled", "--batches", "1", "--nodes", "64", "--slots", "512",
             "--dtype", "float32", "--json", str(file))  # fmt: skip
    for rows, measured in ((hung, 0), (hung[:1], 1)):
        file.write_text(json.dumps({"env": env, "rows": rows, "owed": []}))
        assert run(monkeypatch, *flags) == 0
        assert len(json.loads(file.read_text())["rows"]) == len(rows) + measured
    assert not list(tmp_path.glob("*.part"))


def test_rows_of_another_device_are_written_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "FILE", tmp_path / "measured.json")
    autotune.FILE.write_text("{}")
    autotune.measured.cache_clear()
    row = {**SMALL._asdict(), "implementation": "triton", "seconds": 1.0}
    bench.write([row], "NVIDIA H100 80GB HBM3")
    bench.write([row | {"implementation": "xla", "nodes": 16}], "NVIDIA H100 80GB HBM3")
    (device,) = autotune.measured()
    assert device == "NVIDIA H100 80GB HBM3"
    assert [entry["fastest"] for entry in autotune.measured()[device]] == ["triton", "xla"]
    autotune.measured.cache_clear()


def test_a_failure_is_kept_and_tried_again_while_its_shape_is_owed(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    env = {"device": autotune.device(), "jax": jax.__version__}
    failed = {**SMALL._replace(nodes=1)._asdict(), "implementation": "xla", "error": "lost"}
    flags = ("--models", "bundled", "--batches", "1", "--nodes", "1", "--slots", "512",
             "--dtype", "float32", "--json", str(file))  # fmt: skip
    for owed, errors in (([], ["lost"]), ([list(bench.shape_of(failed))], [None])):
        file.write_text(json.dumps({"env": env, "rows": [failed], "owed": owed}))
        assert run(monkeypatch, *flags) == 0
        rows = json.loads(file.read_text())["rows"]
        assert [row.get("error") for row in rows] == errors


def test_rows_of_another_jax_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    env = {"device": autotune.device(), "jax": "0.1"}
    file.write_text(json.dumps({"env": env, "rows": [], "owed": []}))
    with pytest.raises(SystemExit, match=r"is of .*, jax 0\.1, and this is .*, jax 0\."):
        run(monkeypatch, "--models", "bundled", "--json", str(file))


def test_rows_are_held_against_the_best_peer_of_their_shape():
    times = {("xla", 1): 4.0, ("cudnn", 1): 2.0, ("tpu", 1): 1.0, ("tpu", 2): 1.0}
    rows = [
        {**SMALL._replace(nodes=nodes)._asdict(), "implementation": name, "seconds": seconds}
        for (name, nodes), seconds in times.items()
    ]
    found = [row.get("best_peer_over_it") for row in bench.compared(rows)]
    assert found == [0.5, 1.0, 2.0, None]


def test_an_unknown_model_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match=r"no model 'moon'; there are llama-3\.1-8b"):
        run(monkeypatch, "--models", "moon")
