"""Mixtures of which experts are read as they are taken: the same texts, in their memory."""

import dataclasses
import gc
import os
import threading
import time
from bisect import bisect_left
from concurrent.futures import Future

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.base.sampling import Sampling
from specjax.checkpoints.files import CheckpointError, find
from specjax.checkpoints.huggingface import read_config, save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.offload import load, memory
from specjax.checkpoints.offload.experts import DiskExperts, expert_spans
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.offload.memory import division
from specjax.checkpoints.offload.spans import expected_tensors
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.decoding import pass_times
from specjax.decoding.pass_times import ExpertTimes, expert_times
from specjax.measure import timing
from specjax.measure.distribution_tests import logits_after
from specjax.measure.tune_streamed import budgets_for_reading
from specjax.methods import records, registry
from specjax.methods.choice import Asked, choose
from specjax.methods.replay import Text
from specjax.models import expert_cache
from tests.cases import slow_but
from tests.gguf_files import write_gguf
from tests.pairs import NEW, PROMPTS, block_draft, generate, near, varied_model
from tests.test_gguf import MIXED
from tests.test_mixtures import EXPERTS, as_mxfp4, mixture
from tests.test_parity import GOLDEN

SHAPES = {"experts": dataclasses.replace(EXPERTS, dense_layers=(1,)), "num_layers": 4}
TEXT = Text(tuple(range(1, 33)), 4)
HOT = Sampling(temperature=np.asarray([0.0, 0.7, 1.0, 1.3], np.float32))


@pytest.fixture(scope="module")
def target():
    return mixture(**SHAPES)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    made = tmp_path_factory.mktemp("elsewhere") / "target"
    save_model(target, made, dtype="float32")
    return made


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    """As if what is read took nothing meanwhile: the experts here are smaller than pages."""
    monkeypatch.setattr(memory, "buffers", lambda _: 0)
    monkeypatch.setattr(memory, "piece_bytes", lambda _: 0)


def split(folder, room, dtype="float32"):
    config, _ = read_config(folder)
    return division(find(folder), config, jnp.dtype(dtype), room)


def room_for(folder, slots, dtype="float32"):
    """Bytes with which every layer has so many experts in memory, and no layer one more."""
    rooms = range(split(folder, 1 << 40, dtype).total)
    least = bisect_left(rooms, True, key=lambda room: bool(_slots(folder, room, dtype)))
    each = split(folder, least, dtype).experts
    return least + (slots - 1) * sum(each.values())


def _slots(folder, room, dtype):
    try:
        return split(folder, room, dtype).slots
    except CheckpointError:
        return {}


def elsewhere(folder, slots, dtype="float32", **options):
    model = load_offloaded(
        find(folder), memory_bytes=room_for(folder, slots, dtype), dtype=dtype, **options
    )
    assert model.expert_cache is not None
    return model


@pytest.mark.parametrize("method", slow_but(
    ["none", "specexec:9", "chain:3", "tree:2,2", "lookup:7"], "chain:3"
))  # fmt: skip
@pytest.mark.parametrize("slots", slow_but([1, 2, 3], 1))
def test_texts_are_those_of_the_model_in_memory(slots, method, target, folder):
    """Whether or not the experts of a pass fit together."""
    model = elsewhere(folder, slots)
    assert model.is_offloaded
    assert len(model.layers) == 4
    pair = Pair(target, None, [near(target, 1)])
    setting = registry.setting_of(method, batch=len(PROMPTS))
    drafter = registry.build(setting, pair)
    for sampling in (Sampling(), HOT):
        found, expected = (
            generate(each, drafter, PROMPTS, sampling=sampling, max_new_tokens=NEW)
            for each in (model, target)
        )
        for name in ("tokens", "lengths", "steps", "nodes"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    reads = model.expert_cache.reads
    assert 0 < reads.read < reads.taken
    assert 0 < reads.guessed >= reads.right


@pytest.mark.parametrize("way", ["disk", "host"])
def test_logits_of_whole_texts_are_those_in_memory(way, target, folder):
    model = elsewhere(folder, 1, offload=way)
    np.testing.assert_array_equal(logits_after(model, PROMPTS), logits_after(target, PROMPTS))


@pytest.mark.parametrize("case", slow_but(
    ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "gpt_oss", "glm4_moe",
     "minimax_m2", "dots1", "ernie_moe", "deepseek_v3", "deepseek_v2"], "gpt_oss", "deepseek_v3"
))  # fmt: skip
def test_families_are_read_an_expert_at_a_time(case):
    """Stored one by one, or all of a layer in one tensor, side by side or turned, with biases."""
    model, whole = elsewhere(GOLDEN / case, 1), load_model(GOLDEN / case)
    prompts = [[5, 9, 2, 11], list(range(3, 12))]
    found, expected = (generate(each, None, prompts, max_new_tokens=9) for each in (model, whole))
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("way", ["disk", "host"])
@pytest.mark.parametrize("bits", slow_but([8, 4], 4))
def test_packed_experts_stay_packed(bits, way, folder, tmp_path):
    quantize_folder(find(folder), tmp_path / "made", bits, 8)
    whole = load_model(tmp_path / "made")
    model = elsewhere(tmp_path / "made", 2, offload=way)
    np.testing.assert_array_equal(logits_after(model, PROMPTS), logits_after(whole, PROMPTS))
    assert model.quantization == f"int{bits}, a scale for each 8 inputs"


def test_mxfp4_is_read_as_it_is(tmp_path):
    _, coded = as_mxfp4(GOLDEN / "gpt_oss", tmp_path, np.random.default_rng(0))
    model, whole = elsewhere(coded, 2), load_model(coded)
    np.testing.assert_array_equal(logits_after(model, PROMPTS), logits_after(whole, PROMPTS))
    held = sum(leaf.nbytes for each in model.expert_cache._layers.values()
               for leaf in each.leaves.values())  # fmt: skip
    shared = split(coded, room_for(coded, 2))
    planned = sum(count * shared.experts[layer] for layer, count in shared.slots.items())
    assert held <= planned <= 1.05 * held  # of a table there is one for all slots


@pytest.mark.parametrize("kind", slow_but(["F32", "Q8_0", "Q4_K", "Q6_K"], "Q4_K"))
def test_experts_of_a_gguf_file_are_parts_of_its_tensors(kind, tmp_path):
    own = varied_model(family="qwen3_moe", hidden_size=256, **MIXED["qwen3_moe"])
    save_model(own, tmp_path / "folder", dtype="float32")
    file = write_gguf(tmp_path / "folder", tmp_path / "model.gguf", kind)
    model, whole = elsewhere(file, 2), load_model(file)
    np.testing.assert_array_equal(logits_after(model, PROMPTS), logits_after(whole, PROMPTS))


def test_no_expert_is_read_for_columns_that_do_not_count(target, folder):
    """Neither behind prompts nor for nodes that a tree has not."""
    model = elsewhere(folder, EXPERTS.num_experts - 1)
    generate(model, None, [PROMPTS[0][:1]], max_new_tokens=1)
    reads = model.expert_cache.reads
    layers = len(model.expert_cache.layers)
    assert reads.taken == layers * EXPERTS.experts_per_token * reads.passes


def test_experts_that_are_taken_most_stay(folder):
    model = elsewhere(folder, 2)
    cache = model.expert_cache
    layer = cache.layers[0]

    def read_for(*experts):
        before = dataclasses.replace(cache.reads)
        with cache.in_pass():
            slots = [each.slots for each in cache.rounds(layer, np.asarray(experts)[:, None])]
        np.testing.assert_array_equal(
            (np.stack(slots) >= 0).sum(axis=0)[:, 0], np.asarray(experts) >= 0
        )
        return cache.reads.since(before).read

    assert [read_for(0, 1), read_for(0, 1), read_for(0, 2), read_for(0, 3)] == [2, 0, 1, 1]
    assert read_for(0) == 0
    assert read_for(1, 2, 3) == 2
    assert read_for(-1) == 0


def test_what_was_guessed_is_read_ahead_and_counted(folder):
    cache = elsewhere(folder, 2).expert_cache
    layer = cache.layers[0]
    with cache.in_pass():
        right, wrong = np.asarray([[0], [1]]), np.asarray([[2], [3]])
        after = cache.layers[-1]
        assert after == cache.layers[-2] + 1
        for guess in (right, wrong):
            cache.judge(layer, guess, right)
            list(cache.rounds(after - 1, right, guess))
        assert len(list(cache.rounds(after, right))) == 1
        assert (cache.reads.guessed, cache.reads.right, cache.reads.read) == (4, 2, 4)
        cache.reads.guessed, cache.reads.right = 100, 69
        assert not cache.guesses
        cache.reads.right = 70
        assert cache.guesses
        for _ in range(50):  # no buffer is lost to what nobody took
            list(cache.rounds(after - 1, right, wrong))
            list(cache.rounds(after, right))


def test_two_threads_may_generate_at_once(target, folder):
    model, found = elsewhere(folder, 1), {}
    expected = generate(target, None, PROMPTS, max_new_tokens=6).tokens

    def run(number):
        found[number] = generate(model, None, PROMPTS, max_new_tokens=6).tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in found.values():
        np.testing.assert_array_equal(each, expected)


def test_a_file_cut_short_meanwhile_is_said_and_ends_nothing(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in folder.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    model = elsewhere(copy, 1)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) // 3)
    with pytest.raises(CheckpointError, match="its weights go on to byte"):
        generate(model, None, PROMPTS, max_new_tokens=4)
    weights.write_bytes(whole)
    expected = generate(load_model(folder), None, PROMPTS, max_new_tokens=4).tokens
    np.testing.assert_array_equal(generate(model, None, PROMPTS, max_new_tokens=4).tokens, expected)
    model.expert_cache.close()
    with pytest.raises(ValueError, match="it is closed"):
        generate(model, None, PROMPTS, max_new_tokens=4)


def test_a_model_that_is_let_go_reads_no_more(folder):
    def readers():
        return [each for each in threading.enumerate() if each.name.startswith("specjax-experts")]

    gc.collect()
    before = len(readers())
    model = elsewhere(folder, 1)
    generate(model, None, PROMPTS, max_new_tokens=2)
    assert len(readers()) > before
    del model
    gc.collect()
    deadline = time.monotonic() + 30
    while len(readers()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(readers()) == before


def test_memory_is_shared_by_layers_and_their_experts(folder, target):
    config, whole = target.config, split(folder, 10**9)
    assert not whole.slots
    each = 4 * 3 * config.hidden_size * EXPERTS.intermediate_size
    count = EXPERTS.num_experts
    parts = split(folder, room_for(folder, 2))
    assert parts.slots == dict.fromkeys((0, 2, 3), 2)
    assert set(parts.experts.values()) == {each}
    assert [a - b for a, b in zip(whole.layers, parts.layers, strict=True)] == [
        count * each, 0, count * each, count * each,
    ]  # fmt: skip
    assert parts.total == whole.total - 3 * (count - 2) * each
    more = split(folder, room_for(folder, 2) + 2 * each)
    assert [*more.slots.values()] == [3, 3, 2]
    assert more.bytes_a_pass < parts.bytes_a_pass


def test_passes_that_are_interrupted_leave_the_cache_whole(target, folder, monkeypatch):
    """While an expert is waited for, and after what was in the slots was given away."""
    model = elsewhere(folder, 2)
    expected = generate(target, None, PROMPTS, max_new_tokens=6).tokens
    cache, room = model.expert_cache, model.expert_cache._buffers.qsize()
    for where, name in ((expert_cache, "_in_slot"), (Future, "result")):
        real, calls = getattr(where, name), [0]

        def interrupted(*arguments, real=real, calls=calls):
            calls[0] += 1
            made = real(*arguments)
            if calls[0] == 3:
                raise KeyboardInterrupt
            return made

        with monkeypatch.context() as patched:
            patched.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                generate(model, None, PROMPTS, max_new_tokens=6)
        found = generate(model, None, PROMPTS, max_new_tokens=6).tokens
        np.testing.assert_array_equal(found, expected)
    deadline = time.monotonic() + 30
    while cache._buffers.qsize() < room and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cache._buffers.qsize() == room


def test_loading_reads_no_experts(folder, monkeypatch):
    real, seen = load.gathered, []

    def noted(found, *more):
        for stored, tensor in real(found, *more):
            seen.append(stored.name)
            yield stored, tensor

    monkeypatch.setattr(load, "gathered", noted)
    elsewhere(folder, 1)
    assert seen
    assert not [name for name in seen if ".experts." in name]


def test_a_mixture_without_any_layer_of_experts_streams_its_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)
    own = mixture(num_layers=3, experts=dataclasses.replace(EXPERTS, dense_layers=(0, 1, 2)))
    save_model(own, tmp_path, dtype="float32")
    shared = split(tmp_path, 1 << 40)
    model = load_offloaded(find(tmp_path), memory_bytes=shared.outer + shared.layers[0] + 1)
    assert model.expert_cache is None
    np.testing.assert_array_equal(logits_after(model, PROMPTS), logits_after(own, PROMPTS))


def test_an_expert_that_is_missing_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_ring_bytes", lambda *_: 1)
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    kept = {name: each for name, each in tensors.items() if "layers.2.mlp.experts.3." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor .*layers\.2\.mlp\.experts\.3\.down"):
        load_offloaded(find(tmp_path), memory_bytes=room_for(folder, 2))


def test_bytes_of_a_pass_do_not_depend_on_what_is_in_memory(folder, target):
    found = [timing.weight_bytes(elsewhere(folder, slots)) for slots in (1, 3)]
    assert found[0] == found[1]
    assert found[0] >= timing.weight_bytes(target)  # whole pages are read


def test_too_little_memory_is_said_with_what_experts_by_themselves_need(folder):
    least = room_for(folder, 1)
    with pytest.raises(CheckpointError) as found:
        split(folder, least - 1)
    outer = split(folder, least).outer
    assert memory.memory.readable(least - outer) in str(found.value)
    assert memory.memory.readable(outer) in str(found.value)


def test_what_an_expert_takes_is_what_is_planned(folder):
    files, kind = find(folder), np.dtype("float32")
    config, family = read_config(folder)
    spans = expert_spans(files, family, config, expected_tensors(config, family))
    reader = DiskExperts(files, config, family, spans, kind)
    leaves = reader.read(2, 3, reader.buffer())
    planned = split(folder, room_for(folder, 1)).experts
    assert sum(leaf.nbytes for leaf in leaves.values()) == planned[2]
    whole = load_model(folder).layers[2]
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf[0], getattr(whole, name)[3])
    reader.close()


def test_auto_weighs_what_nodes_read(folder, target, monkeypatch):
    pair = Pair(elsewhere(folder, 2), None, [near(target, 1)])
    monkeypatch.setattr(records, "recall", lambda _: [])
    monkeypatch.setattr("specjax.methods.drafted.bundled", lambda _: TEXT)
    measured = expert_times(pair.target, TEXT.tokens)
    assert measured is expert_times(pair.target, TEXT.tokens)
    assert list(measured.taken) == sorted(measured.taken)
    assert measured.taken[0] == EXPERTS.experts_per_token
    for seconds, method in (((1.0, 1.0, 1.0), "chain"), ((1.0, 90.0, 900.0), "none")):
        times = measured._replace(seconds=seconds)
        monkeypatch.setitem(pass_times._of_experts, pair.target, times)
        found = choose(Asked(), pair, 0.0)
        assert found.setting.method == method
        assert "of a layer's 4 experts" in found.reason
    calls = []
    monkeypatch.setattr("specjax.methods.drafted.of_chains", lambda *given: calls.append(given))
    choose(Asked(), pair, 0.0)
    assert not calls, "along a text that is known"
    monkeypatch.undo()
    monkeypatch.setattr(records, "recall", lambda _: [])
    monkeypatch.setattr("specjax.methods.drafted.bundled", lambda _: TEXT)
    blocks = choose(Asked(), pair._replace(drafts=[block_draft(target, 0, steps=1)]), 0.0)
    assert blocks.setting.method in ("chain", "none")
    alone = choose(Asked(), pair._replace(drafts=[]), 0.0)
    assert alone.setting.method == "lookup"
    assert budgets_for_reading(pair.target) == ExpertTimes.budgets


def test_passes_between_and_past_what_was_measured():
    times = ExpertTimes(8, (1, 4, 16), (2, 4, 8), (1e9, 2e9, 4e9), (1.0, 2.0, 5.0))
    assert [times.pass_seconds(n) for n in (1, 4, 10, 16, 20)] == [1, 2, 3.5, 5, 6]
    assert "a pass over 1, 4, 16 nodes takes 2.0, 4.0, 8.0 of a layer's 8 experts" in str(times)
