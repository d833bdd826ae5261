"""Kernels switch themselves on: what is fastest is measured once a bucket, checked and kept.

There is no accelerator here. This CPU plays one, with implementations and a clock that are made up.
"""

import contextlib
import json
import logging
import os
import pwd
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import dispatch, shapes
from pallas_kernels.dispatch import Implementation, ImplementationError
from pallas_kernels.platform import DEVICES, traced_for
from pallas_kernels.tree_attention import (
    autotune,
    kept,
    measuring,
    reference,
    tree_attention,
    xla,
)
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from specjax.__main__ import main
from specjax.parallel.mesh import make_mesh
from tests.cases import slow_among, slow_but
from tests.folders import own_cache, pair_flags
from tests.pairs import generate, near, varied_model
from tests.test_tree_attention import in_pages

__all__ = ["own_cache"]
ROOT = Path(__file__).parent.parent
SMALL = shapes.Shape("bundled", 1, 5, 64, "float32")


class Accelerator:
    """Implementations by name with the seconds that they take, and what was run of them."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.seconds = {"xla": 3e-6}
        self.timed, self.traced = [], []

    def add(self, name, seconds, run=xla.tree_attention, **more):
        def noted(at):
            self.traced.append(name)
            return run(at)

        self.seconds[name] = seconds
        self.monkeypatch.setitem(IMPLEMENTATIONS, name, Implementation(noted, **more))

    def clock(self, run, caches):
        """What `measuring.seconds` would measure."""
        self.traced.clear()
        jax.eval_shape(run, caches[0])
        name = self.traced[-1] if self.traced else "xla"
        self.timed.append(name)
        return self.seconds[name]

    def restart(self):
        """What a new process knows: nothing but the cache folder."""
        self.monkeypatch.setattr(autotune, "_process", autotune._Process())
        self.monkeypatch.setattr(kept, "_process", kept._Process())
        self.timed.clear()
        jax.clear_caches()

    @property
    def file(self):
        return Path(os.environ["SPECJAX_CACHE"]) / "kernels.json"

    def entries(self):
        """What the file holds of this device."""
        held = json.loads(self.file.read_text())
        return held[autotune.device()][kept.versions()]


@pytest.fixture
def accelerator(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pallas_kernels")
    monkeypatch.setattr(autotune, "platform", lambda: "gpu")
    made = Accelerator(monkeypatch)
    monkeypatch.setattr(measuring, "seconds", made.clock)
    monkeypatch.setattr(measuring, "ROTATED_BYTES", 1)
    made.restart()
    made.add("fast", 1e-6)
    made.add("slow", 9e-6)
    yield made
    jax.clear_caches()


def operands(shape=SMALL, seed=0):
    return shapes.make(shape, jax.random.key(seed))


def call(at):
    return tree_attention(*at[:5], first=at.first)


def choice(shape=SMALL, **changes):
    return autotune.choice(shapes.abstract(shape._replace(**changes)))


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "pallas_kernels"]


def in_a_loop(at):
    return lax.while_loop(lambda x: x[0] < 1, lambda x: (x[0] + 1, call(at)), (0, at.query))[1]


def under_scan(at):
    return lax.scan(lambda x, _: (call(at._replace(query=at.query + 0 * x)), None), at.query,
                    None, 2)[0]  # fmt: skip


def over_a_mesh(at):
    mesh = make_mesh(data=1)
    return jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                         check_vma=False)(at)  # fmt: skip


def under_vmap(at):
    return jax.vmap(call)(jax.tree.map(lambda x: x[None], at))[0]


@contextlib.contextmanager
def no_transfers():
    """Of any thread."""
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard", None)


PLACES = {
    "eager": call,
    "jit": jax.jit(call),
    "while_loop": jax.jit(in_a_loop),
    "scan": jax.jit(under_scan),
    "vmap": jax.jit(under_vmap),
    "vmap of jit": jax.vmap(jax.jit(call)),
    "shard_map": jax.jit(over_a_mesh),
    "no transfers": jax.jit(call),
}


@pytest.mark.parametrize("place", slow_among(PLACES, "eager", "vmap of jit"))
def test_the_fastest_is_measured_once_wherever_a_call_is_traced(place, accelerator, caplog):
    at = operands()
    expected = reference.tree_attention(at)
    asked = jax.tree.map(lambda x: x[None], at) if place == "vmap of jit" else at
    with no_transfers() if place == "no transfers" else contextlib.nullcontext():
        found = PLACES[place](asked)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)
    assert sorted(accelerator.timed) == ["fast", "slow", "xla"]
    assert accelerator.traced[-1] == "fast"
    (line,) = lines(caplog)
    assert line == (
        f"Tree attention on {autotune.device()}: fast (1 µs; xla 3, slow 9) for 1 row, 5 nodes, "
        f"64 slots; kept in {accelerator.file}."
    )
    (entry,) = accelerator.entries()
    assert entry["seconds"] == {"xla": 3e-6, "fast": 1e-6, "slow": 9e-6}
    PLACES[place](asked)
    assert len(accelerator.timed) == 3


def test_a_bucket_is_measured_once_and_near_ones_not_at_all(accelerator):
    for changes in ({}, {"nodes": 8}, {"nodes": 7}, {"slots": 40}, {"nodes": 16}, {"slots": 128}):
        assert choice(**changes) == "fast"
    assert len(accelerator.timed) == 3
    accelerator.seconds["fast"] = 8e-6
    for changes in ({"nodes": 64}, {"batch": 8}, {"slots": 512}, {"dtype": "bfloat16"}):
        timed = len(accelerator.timed)
        assert choice(**changes) == "xla"
        assert len(accelerator.timed) == timed + 3
    window = shapes.abstract(SMALL)._replace(first=jax.ShapeDtypeStruct((1, 5), "int32"))
    accelerator.seconds["slow"] = 2e-6
    assert autotune.choice(window) == "slow"  # a window is measured with one
    assert autotune.choice(window._replace(soft_cap=3.0)) == "slow"
    assert choice() == "fast"


def test_sizes_are_rounded_up_to_powers_of_two():
    at = shapes.abstract(SMALL._replace(batch=3, nodes=9, slots=65))
    bucket = autotune.bucket_of(at)
    assert bucket[1:5] == (4, 16, 128, 8)  # of five query heads a key/value head
    assert bucket == autotune.bucket_of(
        shapes.abstract(SMALL._replace(batch=4, nodes=16, slots=128))
    )
    assert autotune.bucket_of(at._replace(prefix=None)).slots == 0


def test_what_is_kept_is_not_measured_again_until_it_is_forgotten(accelerator):
    assert choice() == "fast"
    accelerator.restart()
    accelerator.seconds["slow"] = 5e-7
    assert choice() == "fast"
    assert accelerator.timed == []
    pallas_kernels.forget()
    assert accelerator.file.exists()
    assert autotune.device() not in json.loads(accelerator.file.read_text())
    assert choice() == "slow"
    assert sorted(accelerator.timed) == ["fast", "slow", "xla"]


NEARER = {"xla": 3.0, "fast": 2.0, "slow": 1.0}


def test_a_choice_stays_for_the_process_whatever_others_keep(accelerator):
    assert choice() == choice(nodes=16) == "fast"  # which is near
    nearer = accelerator.entries()[0] | {"nodes": 16, "seconds": dict(NEARER)}
    device, versions = autotune.device(), kept.versions()
    accelerator.file.write_text(json.dumps({device: {versions: [nearer]}}))
    assert choice() == choice(nodes=6) == choice(nodes=16) == "fast"
    accelerator.restart()
    assert choice(nodes=16) == "slow"
    assert accelerator.timed == []


def test_forgetting_reaches_programs_that_are_compiled(accelerator):
    program, at = jax.jit(call), operands()
    program(at)
    accelerator.seconds["slow"] = 5e-7
    pallas_kernels.forget()
    program(at)
    assert accelerator.traced[-1] == "slow"


def test_other_devices_and_versions_are_kept_beside(accelerator, monkeypatch):
    choice()
    monkeypatch.setattr(autotune, "device", lambda: "another card")
    monkeypatch.setattr(autotune, "_can_measure", lambda: True)
    choice()
    assert len(json.loads(accelerator.file.read_text())) == 2
    assert len(accelerator.timed) == 6
    monkeypatch.setattr(kept, "versions", lambda: "jax 99")
    accelerator.restart()
    choice()
    assert len(accelerator.timed) == 3
    assert len(json.loads(accelerator.file.read_text())["another card"]) == 2
    pallas_kernels.forget()
    assert list(json.loads(accelerator.file.read_text())) == [jax.devices()[0].device_kind]


def test_tune_forgets_what_is_kept(accelerator, tmp_path, monkeypatch, capsys):
    choice()

    def refuse(*_, **__):
        raise ValueError("the model is not read")

    monkeypatch.setattr("specjax.cli.tune.pair_of", refuse)
    assert main(["tune", str(tmp_path / "tuned.json"), "--limit", "0"]) == 2
    assert len(accelerator.entries()) == 1  # an option was wrong
    assert main(["tune", str(tmp_path / "tuned.json")]) == 2
    assert "the model is not read" in capsys.readouterr().err
    assert json.loads(accelerator.file.read_text()) == {}


def raising(at):
    raise NotImplementedError("no such tile\nand more")


WRONG = {
    "off by 3 %": (lambda at: 1.03 * xla.tree_attention(at), "ValueError: it differs from XLA's"),
    "NaN": (lambda at: jnp.nan * xla.tree_attention(at), "ValueError: it differs from XLA's"),
    "reads past lengths": (
        lambda at: xla.tree_attention(at._replace(prefix=at.prefix._replace(
            length=at.prefix.length + 9))), "ValueError: it differs from XLA's"),
    "raises": (raising, "NotImplementedError: no such tile"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_kept_with_its_error_and_not_tried_again(fault, accelerator, caplog):
    run, sentence = WRONG[fault]
    accelerator.add("broken", 1e-9, run)
    assert choice() == "fast"
    (entry,) = accelerator.entries()
    assert entry["errors"].keys() == {"broken"}
    assert entry["errors"]["broken"].startswith(sentence)
    assert "broken" not in accelerator.timed
    (line,) = lines(caplog)
    assert f"; not broken: {sentence}" in line
    assert "\n" not in line
    accelerator.restart()
    accelerator.traced.clear()
    assert choice() == "fast"
    assert accelerator.traced == []
    accelerator.add("broken", 1e-9)  # it was repaired, but nobody knows
    assert choice(nodes=6) == "fast"
    pallas_kernels.forget()
    assert choice() == "broken"


def test_a_difference_within_the_bound_is_none(accelerator):
    accelerator.add("rounded", 1e-9, lambda at: 1.01 * xla.tree_attention(at))
    assert choice() == "rounded"


def test_where_all_fail_it_is_xla(accelerator):
    for name in ("fast", "slow"):
        accelerator.add(name, 1e-9, raising)
    assert choice() == "xla"
    accelerator.restart()
    assert choice() == "xla"
    assert accelerator.timed == []


def test_what_does_not_end_is_left_and_not_tried_again(accelerator, monkeypatch, caplog):
    end = threading.Event()

    def endless(at):
        end.wait(60)
        return xla.tree_attention(at)

    monkeypatch.setattr(measuring, "PATIENCE", 10.0)
    accelerator.add("fast", 1e-9, endless)
    begin = time.monotonic()
    assert choice() == "xla"
    assert time.monotonic() - begin < 40
    assert "not fast: it did not end in 10 seconds" in lines(caplog)[-1]
    assert accelerator.timed == ["xla"]  # it may keep the device, so that others wait for it
    end.set()
    for thread in threading.enumerate():
        if thread.name == "specjax-kernels":
            thread.join(60)
    accelerator.restart()
    assert choice() == "xla"
    assert accelerator.timed == ["slow"]
    assert accelerator.entries()[0]["errors"] == {"fast": "it did not end in 10 seconds"}


KILLED = """
import os, sys
from pallas_kernels import dispatch, shapes
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_attention import measuring, autotune, xla
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS

def run(at):
    print("tried", flush=True)
    DO
    return xla.tree_attention(at)

autotune.platform = lambda: "gpu"
measuring.seconds = lambda run, caches: 1.0
IMPLEMENTATIONS["deadly"] = Implementation(run)
shape = shapes.Shape("bundled", 1, 5, 64, "float32")
print(autotune.choice(shapes.abstract(shape)))
"""


def started(do):
    script = KILLED.replace("DO", do)
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.parametrize(
    "end", [pytest.param("os._exit(7)", marks=pytest.mark.slow), "os.kill(os.getpid(), 9)"]
)
def test_what_ended_a_process_is_skipped_at_the_next_start(end):
    killed = started(end)
    out, _ = killed.communicate(timeout=60)
    assert (out, killed.returncode != 0) == ("tried\n", True)
    again = started("pass")
    out, err = again.communicate(timeout=60)
    assert (out, again.returncode) == ("xla\n", 0)
    assert "the process that tried deadly ended, for up to 1 row, 8 nodes, 64 slots" in err
    assert "specjax tune or pallas_kernels.forget()" in err
    third = started("pass")
    assert third.communicate(timeout=60) == ("xla\n", "")


def test_processes_at_once_measure_one_after_the_other():
    """The second finds what the first has kept."""
    both = [started("import time; time.sleep(2)") for _ in range(2)]
    gave = sorted(each.communicate(timeout=90)[0].count("tried") for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert gave[0] == 0 < gave[1]


KEEPER = """
import sys, time
from pathlib import Path
from pallas_kernels.tree_attention import kept
number, go = sys.argv[1:]
Path(go + number).touch()
while not Path(go).exists():
    time.sleep(0.001)
for nodes in range(10):
    bucket = kept.Bucket(f"kind {number}", 1, nodes, 64, 1, ("xla",))
    kept.keep("card", kept.Entry(bucket, {"xla": 1.0}, {}))
"""


def test_processes_that_keep_at_once_lose_nothing(tmp_path):
    go = tmp_path / "go"
    writers = [
        subprocess.Popen([sys.executable, "-c", KEEPER, str(number), str(go)], cwd=ROOT)
        for number in range(3)
    ]
    while not all(Path(f"{go}{number}").exists() for number in range(3)):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    go.touch()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(kept.entries("card")) == 30
    assert sorted(os.listdir(os.environ["SPECJAX_CACHE"])) == ["kernels.json", "kernels.lock"]


def test_another_process_that_measures_for_too_long_is_not_waited_for(
    accelerator, monkeypatch, caplog
):
    accelerator.file.parent.mkdir()
    monkeypatch.setattr(measuring, "PATIENCE", 0.3)
    with kept.turn(1.0) as noted:
        assert noted
        assert choice() == "xla"
    assert accelerator.timed == []
    assert "is held by another process" in lines(caplog)[-1]
    assert choice() == "xla"  # as it was chosen once


def test_a_person_who_interrupts_is_no_fault_of_a_kernel(accelerator, monkeypatch):
    apart = measuring.apart

    def interrupted(work, patience):
        if work.func is measuring.timed:
            assert kept._file().with_name("kernels.trying.json").exists()
            raise KeyboardInterrupt
        return apart(work, patience)

    monkeypatch.setattr(measuring, "apart", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choice()
    monkeypatch.setattr(measuring, "apart", apart)
    assert choice() == "fast"
    assert accelerator.entries()[0]["errors"] == {}


def test_without_locks_nothing_is_noted_and_nobody_blamed(accelerator, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    accelerator.file.parent.mkdir()
    note = accelerator.file.with_name("kernels.trying.json")
    bucket = autotune.bucket_of(shapes.abstract(SMALL))
    blamed = {**kept._written(kept.Entry(bucket, {}, {})), "name": "fast"}
    held = json.dumps({"device": autotune.device(), "versions": kept.versions(), **blamed})
    note.write_text(held)
    assert choice() == "fast"
    assert note.read_text() == held


DAMAGED = {
    "no JSON": "{", "not UTF-8": b"\xff", "a list": "[]", "nested": "[" * 100_000,
    "another device": '{"card": 3}',
}  # fmt: skip


@pytest.mark.parametrize("content", slow_among(DAMAGED, "not UTF-8", "a list", "nested"))
def test_a_damaged_file_is_a_warning_and_replaced(content, accelerator, caplog):
    accelerator.file.parent.mkdir()
    held = DAMAGED[content]
    accelerator.file.write_bytes(held if isinstance(held, bytes) else held.encode())
    assert choice() == choice(nodes=64) == "fast"
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (content != "another device")
    accelerator.restart()
    assert choice() == "fast"
    assert accelerator.timed == []


OTHER_VALUES = [{"seconds": {"fast": "1"}}, {"seconds": {"fast": -1.0}}, {"seconds": [1.0]},
         {"nodes": "5"}, {"seconds": {"fast": float("nan")}}, {"errors": {"fast": 3}},
         {"candidates": 3}]  # fmt: skip


@pytest.mark.parametrize("wrong", slow_but(OTHER_VALUES, OTHER_VALUES[0]))
def test_an_entry_of_other_values_counts_as_none(wrong, accelerator):
    choice()
    accelerator.file.write_text(
        json.dumps({autotune.device(): {kept.versions(): [accelerator.entries()[0] | wrong, 7]}})
    )
    accelerator.restart()
    assert choice() == "fast"
    assert sorted(accelerator.timed) == ["fast", "slow", "xla"]


def test_a_folder_that_refuses_is_a_warning(accelerator, monkeypatch, caplog):
    monkeypatch.setenv("SPECJAX_CACHE", "/proc/nope")
    assert choice() == choice(nodes=64) == choice() == "fast"
    assert len(accelerator.timed) == 6
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "/proc/nope/kernels.json cannot be written (" in warned[0].getMessage()
    assert all("; kept in memory alone." in line for line in lines(caplog) if "µs" in line)
    assert choice(nodes=8) == "fast"
    assert len(accelerator.timed) == 6


def test_without_a_home_it_is_kept_in_memory(accelerator, monkeypatch, caplog):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "SPECJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert choice() == choice(nodes=16) == "fast"
    assert len(accelerator.timed) == 3
    assert lines(caplog)[-1].endswith("; kept in memory alone.")
    pallas_kernels.forget()
    assert choice() == "fast"
    assert len(accelerator.timed) == 6


def shipped(monkeypatch, at, name, **changes):
    entry = {"kind": autotune.kind_of(at), **autotune.sizes_of(at), "fastest": name} | changes
    monkeypatch.setattr(autotune, "measured", lambda: {autotune.device(): [entry]})


def test_a_shipped_measurement_that_is_near_counts(accelerator, monkeypatch):
    at = shapes.abstract(SMALL._replace(nodes=8))
    shipped(monkeypatch, at, "slow")
    assert choice() == "slow"
    assert accelerator.timed == []
    shipped(monkeypatch, at, "slow", slots=512)  # too far
    assert choice(nodes=64) == "fast"
    assert len(accelerator.timed) == 3
    accelerator.restart()
    shipped(monkeypatch, at, "unknown")
    pallas_kernels.forget()
    assert choice() == "fast"  # what cannot run here does not count


def test_what_is_traced_for_another_device_is_never_measured(accelerator, monkeypatch):
    at = shapes.abstract(SMALL)
    h100 = DEVICES["h100"]
    with traced_for(h100):
        assert autotune.choice(at) == "xla"
        bucket = autotune.bucket_of(at)
    far = bucket._replace(slots=2**15)
    times = dict.fromkeys(bucket.candidates, 3.0) | {"slow": 2.0}
    kept.keep(h100.device_kind, kept.Entry(far, times, {}))
    accelerator.restart()
    with traced_for(h100):
        assert autotune.choice(at) == "slow"  # the nearest that is kept
    assert accelerator.timed == []


def test_processes_that_share_a_program_go_by_what_is_shipped(accelerator, monkeypatch):
    choice()
    accelerator.restart()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choice() == "xla"  # what one of them has kept the others may lack
    accelerator.restart()
    shipped(monkeypatch, shapes.abstract(SMALL), "slow", slots=2**15)
    assert choice() == "slow"
    assert accelerator.timed == []


def test_devices_of_several_kinds_run_xla(accelerator, monkeypatch):
    class Other:
        device_kind = "another card"

    choice()
    accelerator.restart()
    monkeypatch.setattr(jax, "local_devices", lambda: [*jax.devices(), Other()])
    assert choice() == "xla"
    assert accelerator.timed == []


def test_what_runs_on_another_platform_by_default_runs_xla(accelerator):
    with jax.default_device(jax.devices("cpu")[0]):
        assert choice() == "xla"
    assert accelerator.timed == []
    assert choice() == "fast"


def test_too_little_memory_is_a_line_and_xla(accelerator, monkeypatch, caplog):
    monkeypatch.setattr(measuring, "_spare_bytes", lambda: 2**16)
    assert choice() == "xla"
    (line,) = lines(caplog)
    assert "could not be measured for 1 row, 5 nodes, 64 slots: MemoryError: it takes" in line
    assert not accelerator.file.exists()
    monkeypatch.setattr(measuring, "_spare_bytes", lambda: 2**30)
    assert choice() == "xla"  # as it was chosen once
    accelerator.restart()
    assert choice() == "fast"


def test_memory_that_runs_out_is_no_fault_of_a_kernel(accelerator):
    def full(at):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    accelerator.add("fast", 1e-9, full)
    assert choice() == "xla"
    accelerator.restart()
    accelerator.add("fast", 1e-9)
    assert choice() == "fast"
    assert accelerator.timed == ["fast"]


def test_few_caches_take_turns_where_memory_is_short(monkeypatch):
    at = measuring.shapes_of(shapes.abstract(SMALL))
    assert len(measuring.prepared(at).caches) == measuring._MOST_COPIES
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(at))
    monkeypatch.setattr(measuring, "_spare_bytes", lambda: 5 * size)
    assert 1 <= len(measuring.prepared(at).caches) <= 3


def test_on_a_cpu_nothing_is_measured(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "pallas_kernels")
    made = Accelerator(monkeypatch)
    made.restart()
    made.add("fast", 1e-9)

    def refuse(*_, **__):
        raise AssertionError("it is measured")

    for module, name in ((measuring, "apart"), (kept, "entries"), (autotune, "bucket_of")):
        monkeypatch.setattr(module, name, refuse)
    jax.jit(call)(operands())
    pallas_kernels.forget()
    assert made.traced == []
    assert lines(caplog) == []
    assert not made.file.parent.exists()


def test_a_changed_choice_reaches_programs_that_are_compiled(accelerator):
    program, at = jax.jit(call), operands()
    program(at)
    assert accelerator.traced[-1] == "fast"
    try:
        for name in ("slow", "xla", "fast"):
            accelerator.traced.clear()
            pallas_kernels.use(name)
            program(at)
            assert accelerator.traced == ([] if name == "xla" else [name])
        accelerator.seconds["slow"] = 1e-9
        pallas_kernels.use("auto")
        program(at)
        assert accelerator.traced[-1] == "fast"  # nothing was forgotten
    finally:
        pallas_kernels.use("auto")


def test_a_choice_that_cannot_be_is_refused():
    with pytest.raises(ImplementationError, match=r"no implementation 'abacus'; there are .*xla"):
        pallas_kernels.use("abacus")
    with pytest.raises(ImplementationError, match="'hopper' here: it needs gpu, and this is cpu"):
        pallas_kernels.use("hopper")
    assert dispatch.named() is None


def test_a_named_kernel_that_cannot_take_a_call_says_why(accelerator):
    accelerator.add("picky", 1e-9, unable=lambda at: "the moon is full")
    assert choice() == "fast"  # it was never a candidate
    try:
        pallas_kernels.use("picky")
        with pytest.raises(ImplementationError, match="as 'picky' here: the moon is full"):
            call(operands())
    finally:
        pallas_kernels.use("auto")


def test_a_command_whose_model_a_named_kernel_cannot_take_ends_with_its_reason(accelerator, capsys):
    accelerator.add("picky", 1e-9, unable=lambda at: "a head has 8 features")
    flags = ["--kernels", "picky", "--method", "none", *pair_flags()]
    assert main(["generate", "def f", *flags]) == 2
    assert capsys.readouterr().err.endswith(
        "specjax: tree_attention cannot run as 'picky' here: a head has 8 features.\n"
    )
    pallas_kernels.use("auto")


def test_what_cannot_be_asked_is_no_candidate(accelerator):
    def missing(at):
        raise ModuleNotFoundError("no module named 'mosaic'")

    accelerator.add("absent", 1e-9, unable=missing)
    assert choice() == "fast"


def test_xla_by_name_is_xla_for_prompts_too():
    bf16 = jnp.dtype("bfloat16")
    at = jax.ShapeDtypeStruct((1, 2, 128, 64), bf16)

    def lowered():
        with traced_for(DEVICES["v5e"]):
            traced = jax.jit(lambda q, k, v: tree_attention(q, k, v, None)).trace(at, at, at)
            return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in lowered()
    pallas_kernels.use("xla")
    try:
        assert "tpu_custom_call" not in lowered()
    finally:
        pallas_kernels.use("auto")


def test_rows_under_vmap_are_rows_of_one_call(accelerator):
    sizes = []

    def run(at):
        sizes.append(at.query.shape[0])
        assert not isinstance(at.query, jax.core.Tracer) or at.query.ndim == 4
        return xla.tree_attention(at)

    accelerator.add("fast", 1e-6, run, platforms=("cpu",))
    batch = [operands(SMALL._replace(batch=2), seed) for seed in range(3)]
    ats = jax.tree.map(lambda *x: jnp.stack(x), *batch)
    shared = ats._replace(tree_mask=ats.tree_mask[0])
    axes = jax.tree.map(lambda _: 0, ats)._replace(tree_mask=None)
    for found in (jax.vmap(call)(ats), jax.jit(jax.vmap(call, (axes,)))(shared)):
        for one, at in zip(found, batch, strict=True):
            np.testing.assert_allclose(one, reference.tree_attention(at), atol=1e-5)
        assert sizes[-1] == 6


@pytest.mark.parametrize("bits", [8, 16])
def test_a_kernel_is_not_batched(bits):
    batch = [operands(SMALL._replace(batch=2, bits=bits), seed) for seed in range(2)]
    ats = jax.tree.map(lambda *x: jnp.stack(x), *batch)
    run = partial(tree_attention, implementation="triton", interpret=True)
    found = jax.jit(jax.vmap(lambda at: run(*at[:5])))(ats)
    for one, at in zip(found, batch, strict=True):
        np.testing.assert_allclose(one, reference.tree_attention(at), atol=1e-5)


def test_a_kernel_is_traced_once_for_all_layers(monkeypatch):
    traces = []

    def run(at):
        traces.append(at.soft_cap)
        return xla.tree_attention(at)

    from pallas_kernels.tree_attention.implementations import traced_once

    kernel = Implementation(traced_once(run, "counted"), platforms=("cpu",))
    monkeypatch.setitem(IMPLEMENTATIONS, "counted", kernel)

    def layers(at, cap):
        x = at.query
        for _ in range(16):
            x = tree_attention(x, *at[1:5], soft_cap=cap, implementation="counted")
        return x

    at = operands()
    lowered = jax.jit(layers, static_argnums=1).lower(at, None)
    assert traces == [None]
    assert lowered.as_text().count("func.func private @counted") == 1
    jax.jit(layers, static_argnums=1)(at, 3.0)
    assert traces == [None, 3.0]


def test_work_apart_has_the_callers_device_and_width():
    def state():
        assert threading.current_thread() is not threading.main_thread()
        return jax.config.jax_enable_x64, jnp.zeros(1).dtype, measuring.device()

    device = jax.devices()[0]
    assert measuring.apart(state, 10.0) == (False, jnp.dtype("float32"), device)
    with jax.enable_x64(True), jax.default_device(device):
        assert measuring.apart(state, 10.0) == (True, jnp.dtype("float64"), device)

    def traced(x):
        found = measuring.apart(lambda: float(jnp.ones(3).sum()), 10.0)
        return x + found

    assert float(jax.jit(traced)(1.0)) == 4.0
    with pytest.raises(ZeroDivisionError):
        measuring.apart(lambda: 1 // 0, 10.0)
    with pytest.raises(TimeoutError, match=r"it did not end in 0\.1 seconds"):
        measuring.apart(lambda: time.sleep(1), 0.1)


def test_the_clock_tells_ten_times_the_work(monkeypatch, caplog):
    """With the real one."""
    caplog.set_level(logging.INFO, "pallas_kernels")
    monkeypatch.setattr(autotune, "platform", lambda: "gpu")
    monkeypatch.setattr(measuring, "ROTATED_BYTES", 1)
    made = Accelerator(monkeypatch)
    made.restart()

    def tenfold(at):
        def more(_, x):
            return at.query + 1e-9 * xla.tree_attention(at._replace(query=x))

        return xla.tree_attention(at._replace(query=lax.fori_loop(0, 9, more, at.query)))

    made.add("tenfold", 0.0, tenfold)
    assert choice(slots=512) == "xla"
    (entry,) = made.entries()
    assert entry["seconds"]["tenfold"] > 4 * entry["seconds"]["xla"] > 0


def test_windows_caps_and_8_bits_are_measured_on_their_own_operands(accelerator):
    seen = []

    def run(at):
        assert at.prefix.scales is not None
        seen.append((at.soft_cap, at.first.shape, at.tree_mask.shape, at.prefix.keys.dtype))
        return xla.tree_attention(at)

    accelerator.add("fast", 1e-6, run)
    at = operands(SMALL._replace(bits=8))
    wide = jnp.concatenate([at.block_keys] * 2, axis=2)
    mask = jnp.concatenate([jnp.zeros_like(at.tree_mask), at.tree_mask], axis=2)
    at = at._replace(block_keys=wide, block_values=wide, tree_mask=mask,
                     first=jnp.zeros((1, 5), jnp.int32))  # fmt: skip
    found = jax.jit(lambda at: tree_attention(*at[:5], first=at.first, soft_cap=2.0))(at)
    expected = reference.tree_attention(at._replace(soft_cap=2.0))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert set(seen) == {(2.0, (1, 5), (1, 5, 10), jnp.dtype("int8"))}
    assert accelerator.entries()[0]["errors"] == {}


def test_rows_of_a_larger_cache_are_measured_alone(accelerator):
    at = operands(SMALL._replace(batch=4))
    rows = jnp.asarray([[2], [0]], jnp.int32)
    few = jax.tree.map(lambda x: x[:2], at)
    prefix = at.prefix._replace(pages=rows, length=at.prefix.length[:2])
    found = jax.jit(call)(few._replace(prefix=prefix))
    taken = few._replace(prefix=prefix.taken())
    np.testing.assert_allclose(found, reference.tree_attention(taken), atol=1e-5)
    assert accelerator.entries()[0]["batch"] == 2


def test_rows_of_several_pages_are_not_measured(accelerator):
    """No kernel that reads pages runs here."""
    paged, whole = in_pages(operands(SMALL._replace(batch=2, slots=128)), 32)
    np.testing.assert_allclose(jax.jit(call)(paged), reference.tree_attention(whole), atol=1e-5)
    assert autotune.choice(paged) == "xla"
    assert accelerator.timed == []


@pytest.mark.slow
def test_texts_are_those_of_xla_and_every_bucket_is_measured_once(accelerator, caplog):
    target = varied_model()
    from specjax.draft import ExpansionDrafter

    drafter = ExpansionDrafter.of([near(target, 1)], (2, 1))
    pallas_kernels.use("xla")
    expected = generate(target, drafter)
    assert accelerator.timed == []
    pallas_kernels.use("auto")
    found = generate(target, drafter)
    assert "fast" in accelerator.traced
    for name in ("tokens", "lengths", "steps"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    measured = accelerator.entries()
    assert len(accelerator.timed) == 3 * len(measured) > 0
    assert len(lines(caplog)) == len(measured)


@pytest.mark.parametrize("command", ["generate", "bench", "serve", "verify", "roofline", "tune",
                                     "bench-serve"])  # fmt: skip
def test_a_kernel_that_is_not_there_is_a_sentence(command, tmp_path, capsys):
    more = {"generate": ["text"], "tune": [str(tmp_path / "tuned.json")]}.get(command, [])
    assert main([command, *more, "--kernels", "abacus"]) == 2
    assert capsys.readouterr().err == (
        "specjax: --kernels is 'abacus'; it must be auto or one of cpu, hopper, reference, tpu, "
        "triton, xla.\n"
    )
    if command != "bench-serve":  # whose server says it
        assert main([command, *more, "--kernels", "hopper"]) == 2
        assert capsys.readouterr().err == (
            "specjax: tree_attention cannot run as 'hopper' here: it needs gpu, and this is cpu.\n"
        )


def test_what_kernels_say_is_a_line_of_the_command(accelerator, capsys):
    from specjax.cli.kernels import use_kernels

    for _ in range(2):
        use_kernels("auto")
    choice()
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("specjax: Tree attention on ")


def test_a_server_is_told_which_kernels_run(tmp_path):
    from specjax.cli.bench_serve import flags_of, measurement_of
    from specjax.cli.options import BenchServe

    flags = flags_of(measurement_of(BenchServe(kernels="xla")), tmp_path)
    assert flags[flags.index("--kernels") + 1] == "xla"
