"""Models whose layers are read in every pass: the same texts, in their memory, or a sentence."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.offload import memory, reading
from specjax.checkpoints.offload.disk import BUFFERS, DiskLayers
from specjax.checkpoints.offload.host import AHEAD, HostLayers
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.offload.memory import division
from specjax.checkpoints.offload.reading import READERS
from specjax.checkpoints.offload.spans import PAGE, expected_tensors, spans_of
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.decoding import pass_times, request
from specjax.decoding.pass_times import OffloadTimes, offload_times
from specjax.decoding.request import rule_of, visits
from specjax.draft import ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.measure.distribution_tests import logits_within
from specjax.measure.tune_streamed import budgets_for_reading
from specjax.methods import tuned
from specjax.methods.choice import Asked, choose
from specjax.methods.registry import build
from specjax.models.memory import Load
from specjax.models.placement import placement
from specjax.models.quantized import quantized_as
from tests.cases import slow_but
from tests.conftest import QUICKLY
from tests.folders import pair_folder, target_folder
from tests.pairs import NEW, PROMPTS, block_draft, generate, head, near, varied_model
from tests.quantized_files import rewrite
from tests.test_parity import GOLDEN

LAYERS = 4
METHODS = ("none", "chain", "pool", "specexec", "head", "block")
EVERYTHING = 10**9


@pytest.fixture(scope="module")
def target():
    return varied_model(num_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    made = tmp_path_factory.mktemp("streamed") / "target"
    save_model(target, made, dtype="float32")
    return made


def room_for(folder, resident, dtype="float32"):
    """The bytes that so many layers in memory take, beside the one that streaming does here."""
    config, _ = memory.read_config(folder)
    whole = division(find(folder), config, np.dtype(dtype), EVERYTHING)
    return whole.outer + whole.layers[0] * resident + 1


def streamed(folder, resident, **options):
    """The model with so many of its layers in memory."""
    room = room_for(folder, resident, options.get("dtype", "float32"))
    return load_offloaded(find(folder), memory_bytes=room, **options)


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
    """As if streaming took a byte: the models here have fewer layers than the ring."""
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)


def drafter_of(target, method):
    draft = near(target, 0)
    if method == "chain":
        return ExpansionDrafter.of([draft], (1, 1, 1))
    if method == "pool":
        return ExpansionDrafter.of([draft, near(target, 1)], (2, 1))
    if method == "specexec":
        return BestFirstDrafter(draft, jnp.ones(2), Growth(budget=11, beams=2, width=2))
    if method == "head":
        return ExpansionDrafter.of([head(target, 0, steps=1)], (2, 1))
    if method == "block":
        return ExpansionDrafter.of([block_draft(target, 0, steps=1)], (2, 1))
    return None


@pytest.fixture
def in_host_memory(monkeypatch):
    """As if layers that wait in the host's memory took nothing of the device's."""
    monkeypatch.setattr(memory, "BUFFERS", 0)


@pytest.mark.parametrize(("resident", "host"), [(0, False), (2, False), (1, True)])
@pytest.mark.parametrize(
    "method", slow_but(["none", "chain", "pool", "specexec", "head", "block"], "chain")
)
def test_texts_are_those_of_the_model_in_memory(
    method, resident, host, target, folder, in_host_memory
):
    model = streamed(folder, resident, offload="host" if host else "disk")
    assert isinstance(model.source, HostLayers if host else DiskLayers)
    assert model.is_offloaded
    assert len(model.layers) == resident
    drafter = drafter_of(target, method)
    whole = load_model(folder)
    hot = Sampling(temperature=np.asarray([0.0, 0.7, 1.0, 1.3], np.float32))
    for sampling in (Sampling(), hot):
        found = generate(model, drafter, sampling=sampling)
        expected = generate(whole, drafter, sampling=sampling)
        for name in ("tokens", "lengths", "steps", "nodes"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("specexec", "auto"),
        pytest.param("specexec", "one-hot", marks=pytest.mark.slow),
        pytest.param("pool", "multi-step", marks=pytest.mark.slow),
        ("chain", "auto"),
    ],
)
def test_of_large_trees_only_visited_nodes_are_unembedded(
    method, rule, target, folder, monkeypatch
):
    monkeypatch.setattr(request, "VISITED_FROM", 2)
    model, drafter = streamed(folder, 2), drafter_of(target, method)
    visiting = visits(model, drafter, rule_of(rule, drafter), False)
    assert visiting == (method != "chain")  # block verification needs all nodes
    assert not visits(load_model(folder), drafter, rule_of(rule, drafter), False)
    hot = Sampling(temperature=np.asarray([0.0, 0.7, 1.0, 1.3], np.float32))
    found = generate(model, drafter, sampling=hot, verify=rule)
    expected = generate(load_model(folder), drafter, sampling=hot, verify=rule)
    for name in ("tokens", "lengths", "steps", "nodes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.slow
def test_penalties_are_those_of_every_node(target, folder, monkeypatch):
    monkeypatch.setattr(request, "VISITED_FROM", 2)
    drafter = drafter_of(target, "specexec")
    sampling = Sampling(temperature=0.8, presence_penalty=1.5)
    found = generate(streamed(folder, 2), drafter, sampling=sampling)
    expected = generate(load_model(folder), drafter, sampling=sampling)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_layers_of_the_hosts_memory_move_ahead_and_round(folder, in_host_memory):
    model = streamed(folder, 1, offload="host")
    assert isinstance(model.source, HostLayers)
    whole = load_model(folder).layers
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(model.source._layers)}
    assert kinds <= {"pinned_host", "unpinned_host"}
    assert model.bytes_a_pass == sum(leaf.nbytes for leaf in jax.tree.leaves(whole[1:]))
    for number in (1, 2, 3, 1, 2, 1):  # a pass that was left, too
        jax.tree.map(np.testing.assert_array_equal, model.layer(number), whole[number])
        assert len(model.source._moving) == min(AHEAD, LAYERS - 2)
    assert offload_times(model).read_seconds > 0
    model.source.close()
    assert not model.source._moving


@pytest.mark.slow
def test_quantized_layers_wait_in_the_hosts_memory(folder, tmp_path, in_host_memory):
    quantize_folder(find(folder), tmp_path / "packed", 4, group=8)
    model = streamed(tmp_path / "packed", 1, offload="host")
    expected = generate(load_model(tmp_path / "packed"), None)
    np.testing.assert_array_equal(generate(model, None).tokens, expected.tokens)
    assert quantized_as(model) == "int4, a scale for each 8 inputs"
    assert model.embedding.dtype == model.layer(1).up.dtype == "float32"  # scales are bfloat16


@pytest.mark.parametrize(
    "case",
    slow_but(["gemma3", "phi3_short", "neox", "gpt2", "qwen2_windows", "opt"], "gemma3"),
)
def test_families_stream(case):
    whole = load_model(GOLDEN / case)
    prompts = [[5, 9, 2, 11], list(range(3, 12))]
    models = streamed(GOLDEN / case, 0), whole
    found, expected = (generate(each, None, prompts, max_new_tokens=9) for each in models)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(
    "layout",
    slow_but(["words of 4 bits", "gptq 4 bits", "blocks of fp8", "nf4"], "gptq 4 bits"),
)
def test_quantized_layers_stream(layout, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    rewrite(copy, layout)
    found = generate(streamed(copy, 1), None)
    np.testing.assert_array_equal(found.tokens, generate(load_model(copy), None).tokens)


@pytest.mark.slow
def test_a_sharded_bfloat16_folder_streams_in_its_own_dtype(target, tmp_path, monkeypatch):
    save_model(target, tmp_path / "model", dtype="bfloat16")
    monkeypatch.setattr("specjax.checkpoints.writing._SHARD", 20_000)
    quantize_folder(find(tmp_path / "model"), tmp_path / "made", 8)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 2
    for name in ("model", "made"):
        model = streamed(tmp_path / name, 0, dtype="bfloat16")
        assert load_offloaded(find(tmp_path / name)).embedding.dtype == "bfloat16"
        expected = generate(load_model(tmp_path / name, dtype="bfloat16"), None)
        np.testing.assert_array_equal(generate(model, None).tokens, expected.tokens)


def test_a_pass_that_was_left_harms_no_other(folder):
    model = streamed(folder, 0)
    expected = generate(load_model(folder), None)
    for _ in range(2):
        steps = specjax.stream(jax.random.key(0), model, None, PROMPTS, max_new_tokens=NEW)
        next(steps)
        next(steps)
        steps.close()
        with model.in_pass():
            model.layer(0)
            model.layer(1)  # as if an error came in the middle
        np.testing.assert_array_equal(generate(model, None).tokens, expected.tokens)


def test_two_threads_may_generate_at_once(folder):
    model, found = streamed(folder, 0), {}
    expected = generate(load_model(folder), None)

    def run(number):
        found[number] = generate(model, None).tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(3):
        np.testing.assert_array_equal(found[number], expected.tokens)


def test_what_is_read_are_the_layers_out_of_memory(folder):
    model = streamed(folder, 1)
    assert isinstance(model.source, DiskLayers)
    whole = load_model(folder).layers
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(whole[1:]))
    assert size <= model.source.bytes_a_pass <= size + 3 * 2 * PAGE
    for number in (1, 2, 3, 1):  # outside a pass, as nothing else takes any
        jax.tree.map(np.testing.assert_array_equal, model.layer(number), whole[number])


def test_a_model_that_is_let_go_reads_no_more(folder):
    model = streamed(folder, 0)
    generate(model, None)
    assert isinstance(model.source, DiskLayers)
    thread = model.source._thread
    assert thread is not None
    assert thread.is_alive()
    del model
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_closed_model_says_so(folder):
    model = streamed(folder, 0)
    generate(model, None)
    model.source.close()
    with pytest.raises(CheckpointError, match="is not read any more"):
        generate(model, None)


def test_a_file_cut_short_meanwhile_is_said_and_ends_nothing(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    model = streamed(copy, 0)
    expected = generate(model, None)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) // 2)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes; its weights go on to byte \d+"):
        generate(model, None)  # a layer or two may have been read ahead
    weights.write_bytes(whole)
    np.testing.assert_array_equal(generate(model, None).tokens, expected.tokens)


def test_tensors_that_are_not_what_the_index_says_are_refused(target, tmp_path, monkeypatch):
    save_model(target, tmp_path / "model")
    monkeypatch.setattr("specjax.checkpoints.writing._SHARD", 20_000)
    quantize_folder(find(tmp_path / "model"), tmp_path / "made", 8)
    index = tmp_path / "made" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    size = said["metadata"]["total_size"]
    said["metadata"]["total_size"] = size + 4
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"tensors are {size + 4} bytes; they are {size}"):
        streamed(tmp_path / "made", 1)
    del said["metadata"]
    index.write_text(json.dumps(said))
    assert streamed(tmp_path / "made", 1).layers


def test_a_disk_that_fails_is_said(folder, monkeypatch):
    model = streamed(folder, 0)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        generate(model, None)


def test_numbers_that_are_none_are_found_in_the_first_pass(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "model.safetensors"
    found = memory.extents(find(copy))
    place = next(each.start for each in found if each.name == "model.layers.2.mlp.up_proj.weight")
    with weights.open("r+b") as opened:
        opened.seek(place)
        opened.write(np.full(4, np.nan, np.float32).tobytes())
    model = streamed(copy, 0)
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.up_proj.weight .* NaN or infinity"):
        generate(model, None)


def test_where_direct_reads_are_refused_others_do(folder, monkeypatch):
    real, flags = os.open, []

    def without(file, flag, *more):
        flags.append(flag)
        if flag & reading._DIRECT:
            raise OSError(22, "Invalid argument")
        return real(file, flag, *more)

    monkeypatch.setattr(os, "open", without)
    expected = generate(load_model(folder), None)
    np.testing.assert_array_equal(generate(streamed(folder, 0), None).tokens, expected.tokens)
    assert os.O_RDONLY in flags


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_as_many_layers_stay_as_fit(count, folder):
    files = find(folder)
    config, _ = memory.read_config(folder)
    kind = np.dtype("float32")
    layer, whole = memory._unpacked_bytes(config, 0, kind), Load(placement(config, None), kind)
    outer = whole.weights - LAYERS * layer
    room = outer + count * layer + (count < LAYERS)
    found = division(files, config, kind, room)
    assert found[:4] == (outer, (layer,) * LAYERS, count, int(count < LAYERS))
    assert found.total == room
    assert found.bytes_a_pass == streamed(folder, count).bytes_a_pass
    if count < LAYERS:
        assert division(files, config, kind, room + layer - 2).resident == count


def test_the_ring_counts_what_layers_become(folder, monkeypatch):
    monkeypatch.undo()
    files = find(folder)
    config, family = memory.read_config(folder)
    spans = spans_of(files, family, expected_tensors(config, family), range(LAYERS)).values()
    layer = memory._unpacked_bytes(config, 0, np.dtype("float32"))
    single, double = (
        memory._ring_bytes(spans, np.dtype(kind), size)
        for kind, size in (("float32", layer), ("bfloat16", layer // 2))
    )
    assert BUFFERS * layer <= single <= BUFFERS * layer * 1.1 + READERS * 2 * layer
    assert double - single == BUFFERS * layer // 2  # rounded to bfloat16, beside what was read


def test_layers_are_used_where_they_were_read(folder):
    model = streamed(folder, 0)
    assert isinstance(model.source, DiskLayers)
    with model.in_pass():
        taken = model.layer(0)
        held = np.asarray(model.source._ring.used[0])
        begin = held.ctypes.data
        for leaf in jax.tree.leaves(taken):
            assert begin <= leaf.unsafe_buffer_pointer() < begin + held.nbytes


def test_the_ring_is_of_this_process_alone(folder):
    model = streamed(folder, 0)
    assert isinstance(model.source, DiskLayers)
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    place = model.source._ring.empty.get().ctypes.data
    spans = [line.split()[:2] for line in lines if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line)]
    (flags,) = (
        flags
        for span, flags in spans
        if int(span.split("-")[0], 16) <= place < int(span.split("-")[1], 16)
    )
    assert flags == "rw-p"


def test_what_a_pass_uses_is_not_read_over(folder):
    model = streamed(folder, 0)
    whole = load_model(folder).layers
    with model.in_pass():
        before = model.layer(0)
        for number in (1, 2, 3):
            taken = model.layer(number)
            time.sleep(0.05)  # readers fill what is empty
            for weights, at in ((before, number - 1), (taken, number)):
                jax.tree.map(np.testing.assert_array_equal, weights, whole[at])
            before = taken


def test_too_little_memory_is_said_with_both_numbers(folder):
    with pytest.raises(
        CheckpointError, match=r"takes \d+\.\d MiB, and streaming .*; there are 0\.0 MiB for both"
    ):
        load_offloaded(find(folder), memory_bytes=1000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "tape"}, "offload is 'tape'; it must be 'disk' or 'host'"),
        ({"memory": 100}, "offload is None; it must be 'disk' or 'host', which memory goes with"),
        ({"offload": "disk", "positions": 9}, "on one device, with all its positions"),
        ({"offload": "disk", "memory": 0}, "memory is 0; it must be at least 1 byte"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        specjax.load(pair_folder() / "target", **options)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A target of three layers that has the vocabulary of `pair_folder`'s drafts."""
    return target_folder(tmp_path_factory.mktemp("offloaded") / "target", 2, num_layers=3)


def offloading(folder, resident=1):
    """The flags that leave so many layers in memory."""
    return ["--offload", "disk", "--memory", str(room_for(folder, resident))]


def test_the_command_line_streams(with_tokenizer, capsys, monkeypatch):
    flags = ["--model", str(with_tokenizer), "--draft", f"{pair_folder()}/two"]
    texts, taken = [], []
    real = DiskLayers.take
    monkeypatch.setattr(
        DiskLayers, "take", lambda self, layer: taken.append(layer) or real(self, layer)
    )
    asked = ["generate", "def add(a", "--json", "--max-new-tokens", "8", "--method", "chain"]
    for more in ([], [*offloading(with_tokenizer), "--dtype", "float32"]):
        assert main([*asked, *flags, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert set(taken) == {1, 2}
    assert main(["generate", "x", *flags, "--offload", "disk", "--memory", "few"]) == 2
    assert "--memory is 'few'; it must be a size such as 2GiB" in capsys.readouterr().err


_ENDING = """
import sys
import jax, specjax
import jax.numpy as jnp
from specjax.checkpoints import files
from specjax.checkpoints.offload import disk, memory
from specjax.checkpoints.offload.load import load_offloaded
memory._ring_bytes = lambda *_: 1
real, count = disk.DiskLayers.arrays, [0]
def slow(reader, layer, buffer):  # within XLA as the interpreter ends
    count[0] += 1
    for _ in range(10 if count[0] > 5 else 0):
        jnp.linalg.inv(jnp.eye(1500)).block_until_ready()
    return real(reader, layer, buffer)
disk.DiskLayers.arrays = slow
model = load_offloaded(files.find(sys.argv[1]), memory_bytes=int(sys.argv[2]))
specjax.generate(jax.random.key(0), model, None, [[1, 2, 3]], max_new_tokens=1)
print("done")
"""


@pytest.mark.slow
def test_a_process_ends_while_layers_are_read(folder):
    ran = subprocess.run(
        [sys.executable, "-c", _ENDING, str(folder), str(room_for(folder, 0))],
        capture_output=True, text=True, check=False, env=os.environ | QUICKLY,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


def test_quantization_of_layers_elsewhere_is_named(folder, tmp_path):
    quantize_folder(find(folder), tmp_path / "packed", 8)
    name = quantized_as(load_model(tmp_path / "packed"))
    assert name is not None
    assert quantized_as(streamed(tmp_path / "packed", 0)) == name
    assert quantized_as(streamed(folder, 0)) is None


def test_logits_of_whole_texts_are_those_in_memory(target, folder):
    texts, columns = [[1, 2, 3, 4], [5, 6]], np.asarray([[1, 3], [0, 1]])
    expected = logits_within(target, texts, columns)
    found = logits_within(streamed(folder, 1), texts, columns)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long_running
def test_the_certificate_holds_for_a_streamed_quantized_target(with_tokenizer, tmp_path, capsys):
    packed = tmp_path / "packed"
    quantize_folder(find(with_tokenizer), packed, 8)
    flags = ["--model", str(packed), "--draft", f"{pair_folder()}/two", "--samples", "512"]
    asked = ["--methods", "chain", "--prompts", "2", "--max-new-tokens", "8", "--json"]
    assert main(["verify", *flags, *asked, *offloading(packed)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["quantization"].startswith("int8")


@pytest.mark.slow
def test_bench_measures_what_is_streamed(with_tokenizer, tmp_path, capsys):
    flags = [
        "--model",
        str(with_tokenizer),
        "--draft",
        f"{pair_folder()}/two",
        "--methods",
        "chain",
    ]
    few = ["--limit", "1", "--max-new-tokens", "8", "--temperatures", "0", "--batch", "1"]
    out = tmp_path / "out.json"
    assert main(["bench", *flags, *few, *offloading(with_tokenizer), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(row["method"], row["dtype"]) for row in report["rows"]] == [
        ("none", "float32"), ("chain", "float32")
    ]  # fmt: skip
    assert report["env"]["layers_in_memory"] == 1
    config, _ = memory.read_config(with_tokenizer)
    assert report["env"]["bytes_a_pass"] >= 2 * memory._unpacked_bytes(config, 0, np.dtype("f4"))
    capsys.readouterr()
    assert main(["bench", *flags, "--offload", "disk", "--inflate", "1M"]) == 2
    assert "specjax inflate writes one that can be offloaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "columns", "seconds", "budget"),
    [
        (1.0, (16, 64, 256), (0.2, 0.4, 2.0), 127),
        (0.39, (16, 64), (0.2, 0.4), 31),
        (0.1, (16,), (0.2,), 15),
        (99.0, (16, 64, 256, 1024), (0.1, 0.4, 1.6, 6.4), 2047),
    ],
)
def test_a_budget_is_what_is_computed_while_layers_are_read(read, columns, seconds, budget):
    times = OffloadTimes(10**9, read, columns, seconds)
    assert times.budget == budget
    assert f"at {1 / read:.2f} GB/s" in str(times)


@pytest.mark.slow
def test_auto_takes_the_budget_of_the_link(folder, target, monkeypatch):
    model = streamed(folder, 0)
    found = offload_times(model)
    assert found is offload_times(model)
    assert found.size == model.bytes_a_pass
    assert found.read_seconds > 0
    assert min(found.seconds) > 0
    slow = OffloadTimes(10**9, 1.0, (16, 64, 256), (0.2, 0.4, 2.0))
    monkeypatch.setitem(pass_times._measured, model, slow)
    pair = Pair(model, None, [near(target, 0)])
    for temperature, method in ((0.0, "specexec"), (0.8, "tree")):
        choice = choose(Asked(), pair, temperature)
        assert (choice.setting.method, choice.setting.nodes) == (method, 127)
        assert "reading 1.00 GB takes 1.00 s" in choice.reason
    assert choose(Asked(), Pair(model, None, []), 0.0).setting.method == "lookup"
    expected = generate(target, None)
    drafter = build(choose(Asked(), pair, 0.0).setting, pair)
    np.testing.assert_array_equal(generate(model, drafter).tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resident", "methods", "temperatures"),
    [
        (1, "specexec", (0.0,)),
        (EVERYTHING, "specexec,chain", (0.0, 0.8)),
    ],
)
def test_tune_chooses_for_what_is_streamed(
    resident, methods, temperatures, with_tokenizer, tmp_path, capsys
):
    flags = ["--model", str(with_tokenizer), "--draft", f"{pair_folder()}/two"]
    few = ["--limit", "1", "--max-new-tokens", "8", "--methods", methods,
           "--temperatures", ",".join(map(str, temperatures))]  # fmt: skip
    file = tmp_path / "tuned.json"
    where = offloading(with_tokenizer, 1)
    if resident > 1:
        where[-1] = str(resident)
    assert main(["tune", str(file), *flags, *few, *where]) == 0
    entries = tuned.read(str(file))
    assert tuple(each.temperature for each in entries) == temperatures
    report = json.loads(file.read_text())
    assert report["env"]["config"]["offload"] == "disk"
    promises = [each for own in report["env"]["promises"] for each in own]
    grown = [
        each["setting"]["growth"]["budget"] for each in promises if "growth" in each["setting"]
    ]
    assert min(grown) == 15
    assert len(set(grown)) > 1  # the others follow from how fast layers were read
    assert all(each["seconds"] > 0 and each["tokens_per_step"] >= 1 for each in promises)
    capsys.readouterr()
    assert main(["tune", str(file), *flags, *where, "--inflate", "1M"]) == 2
    assert "--inflate is for a model in memory" in capsys.readouterr().err
    assert tuned.read(str(file)) == entries


def test_budgets_to_tune_among_follow_from_the_link(folder, monkeypatch):
    model = streamed(folder, 2)
    at = OffloadTimes(10**9, 0.9, (16, 64, 256), (0.2, 0.8, 3.2))
    monkeypatch.setattr("specjax.measure.tune_streamed.offload_times", lambda _: at)
    assert budgets_for_reading(model) == (15, 63, 127)
    monkeypatch.setattr(
        "specjax.measure.tune_streamed.offload_times", lambda _: at._replace(read_seconds=1e9)
    )
    assert budgets_for_reading(model) == (15, 2047)
