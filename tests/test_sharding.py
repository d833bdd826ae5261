"""Meshes of virtual devices give the tokens of one, and exchange no more than they must."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.checkpoints.huggingface import save_model
from specjax.models.placement import placement
from specjax.parallel.mesh import make_mesh, with_all_axes
from tests import dflash_twin, eagle_twin
from tests.conftest import QUICKLY, tiny_config, tiny_model
from tests.hidden import DEPTH
from tests.on_mesh import ENGINES
from tests.pairs import alone, generate, near
from tests.test_eagle import changed

ROOT = Path(__file__).parent.parent
WIDE = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 64}


FIRST = ("data=2,draft=3/pool", "data=2,model=4/hidden", "programs")
"""Sections of `on_mesh` that `pytest` runs, and below those that `pytest -m slow` does."""
OTHERS = (
    *(
        "data=8/specexec",
        "model=8/none",
        "model=8/specexec",
        "data=2,model=4/hybrid",
        "data=2,model=4/chain",
        "data=2,model=4/chain/stack",
        "data=2,model=4/hidden/stack",
        *("data=2,model=4/head", "data=2,model=4/block"),
    ),
    *("draft=3/pool", "data=2,model=4/recycle", "families", "moved", "engine"),
    "grammars",
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return found_on_mesh(tmp_path_factory.mktemp("mesh"), FIRST)


@pytest.fixture(scope="module")
def other_facts(request, tmp_path_factory):
    """Of the sections that the tests of this run ask for: of a part of them, not of all."""
    asked = {
        section
        for item in request.session.items
        for mark in item.iter_markers("sections")
        for section in mark.args
    }
    return found_on_mesh(tmp_path_factory.mktemp("mesh"), [one for one in OTHERS if one in asked])


def found_on_mesh(folder, sections):
    """What `on_mesh` finds with eight devices, in a process of its own."""
    target = tiny_model(0, **WIDE)
    save_model(target, folder / "target", dtype="float32")
    for number in range(3):
        save_model(near(target, number), folder / "drafts" / str(number), dtype="float32")
    for layers in (2, 3):
        deep = tiny_model(0, num_layers=layers, **WIDE)
        save_model(deep, folder / f"layers{layers}", dtype="float32")
    sizes = target.config.vocab_size, target.config.hidden_size
    head = eagle_twin.Dialect((0, 1, 2), "outputs")
    eagle_twin.write(folder / "head", head, eagle_twin.head_of(head, *sizes), *sizes)
    block = dflash_twin.Dialect(targets=(0, 1))
    dflash_twin.write(folder / "block", block, dflash_twin.draft_of(block, *sizes), *sizes)
    changed(folder / "block", num_target_layers=None)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_mesh", str(folder), *sections],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | QUICKLY | {"XLA_FLAGS": flags},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("section", [one for one in FIRST if "/" in one])
def test_tokens_are_those_of_one_device(facts, section):
    check_tokens(facts, section)


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", [pytest.param(one, marks=pytest.mark.sections(one)) for one in OTHERS if "/" in one]
)
def test_tokens_on_other_meshes_are_those_of_one_device(other_facts, section):
    check_tokens(other_facts, section)


def test_hidden_states_on_a_mesh_are_those_of_a_pass(facts):
    """Its steps are as few as there can be (see `tests.hidden`)."""
    made = facts["data=2,model=4/hidden"]
    greedy = made["steps"][::2]
    assert set(greedy) == {-(-len(made["tokens"][0]) // (DEPTH + 1))}


@pytest.mark.slow
@pytest.mark.sections("engine")
def test_an_engine_on_a_mesh_gives_the_texts_of_plain_decoding(other_facts):
    found = other_facts["engine"]
    for section in ENGINES:
        assert found[section] == [found["alone"], True], section
    assert "data=8 does not divide 12 rows" in found["refused"]


@pytest.mark.slow
@pytest.mark.sections("grammars")
def test_texts_under_grammars_are_those_of_one_device(other_facts):
    found = other_facts["grammars"]
    assert len(found) == 5
    for name, tokens in found.items():
        assert tokens == found["alone"], name
    held = np.array(found["alone"])[::2]
    assert (held[:, 1:] % 2 != held[:, :-1] % 2).all()


def check_tokens(facts, section):
    alone, spread = facts["alone"][section.split("/")[1]], facts[section]
    assert spread["tokens"] == alone["tokens"]
    assert spread["steps"] == alone["steps"]


def test_streams_on_a_mesh_give_the_same(facts):
    made = facts["data=2,draft=3/pool"]
    assert made["streamed"] == made["tokens"]


def test_a_layer_sums_twice_and_no_weights_are_gathered(facts):
    config = tiny_config(**WIDE)
    for layers, found in facts["programs"].items():
        # A step: embeddings, and two a layer. The prompts' pass: of the last layer only keys and
        # values are used, which are each device's own.
        step, prompts = 1 + 2 * int(layers), 1 + 2 * (int(layers) - 1)
        assert found["sums"] == step + prompts
        assert found["gathered"] == [8 * config.vocab_size]  # the logits of a step
        assert not found["others"]


@pytest.mark.slow
@pytest.mark.sections("families")
def test_every_family_splits_over_two_devices(other_facts):
    found = other_facts["families"]
    split = {case for case in found if "share" in found[case]}
    assert all(found[case]["is_odd"] for case in set(found) - split)
    assert all("does not divide" in found[case]["refused"] for case in set(found) - split)
    assert {"olmo2", "gemma2", "gemma3", "phi3", "qwen2_windows", "qwen3", "mistral"} <= split
    assert {"mixtral", "qwen2_moe", "olmoe", "granitemoeshared", "gpt_oss", "granite"} <= split
    assert {"glm", "ministral3", "glm4_moe", "deepseek_v3", "deepseek_v2"} <= split
    assert "9 experts" in found["qwen3_moe"]["refused"]
    assert max(found[case]["share"] for case in split) <= 1


@pytest.mark.slow
@pytest.mark.sections("moved")
def test_a_model_is_restored_onto_another_mesh(other_facts):
    for name, devices in (("one", 1), ("model=8", 8), ("data=8", 1)):
        assert other_facts["moved"][name]["error"] < 1e-3, name
        assert other_facts["moved"][name]["up"] == [WIDE["intermediate_size"] // devices, 32]
        # Heads that the first mesh held twice were kept once.
        assert other_facts["moved"][name]["repeats"] == max(1, devices // WIDE["num_kv_heads"])
    assert other_facts["moved"]["written"]
    assert other_facts["moved"]["packed"]["error"] < 1e-3
    assert other_facts["moved"]["offsets"] == {"up": [4, 8], "down": [16, 2], "equal": True}
    assert other_facts["moved"]["packed"]["rows"] == [tiny_config().vocab_size // 8] * 8


def test_a_draft_that_is_split_is_refused():
    model = tiny_model()
    split = replace(near(model, 1), axis="model")
    with pytest.raises(ValueError, match="a draft is split over the mesh; load_drafts gives"):
        generate(model, alone(split))


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "model=4 does not divide the model's 6 heads"),
        ({"intermediate_size": 50}, 4, "model=4 does not divide the model's 50 features"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "2 and the model's 3 key/value heads"),
    ],
)
def test_what_a_mesh_cannot_split_is_refused(changes, devices, words, monkeypatch):
    monkeypatch.setattr("specjax.models.placement.size_of", lambda mesh, axis: devices)
    mesh = make_mesh()
    with pytest.raises(ValueError, match=words):
        placement(tiny_config(**changes), mesh)


def test_meshes_of_other_axes_or_too_many_devices_are_refused():
    with pytest.raises(ValueError, match="data=2,model=4 needs 8 devices; there are 1"):
        make_mesh(data=2, model=4)
    with pytest.raises(ValueError, match="axis model is 0"):
        make_mesh(model=0)
    odd = jax.make_mesh((1,), ("rows",))
    with pytest.raises(ValueError, match="not 'rows'"):
        with_all_axes(odd)
