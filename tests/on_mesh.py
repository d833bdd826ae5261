"""What test_sharding.py asks of eight virtual devices, as JSON; a process of its own.

The number of a CPU's devices is set once for a process, and one is right for all other tests:
  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.on_mesh FOLDER SECTION...
A section is a mesh with a method (`data=8/specexec`), `programs`, `families`, `moved` or `engine`;
with `/stack` the target's layers are a stack.
"""

import copy
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.base.grammars import num_words
from specjax.base.sampling import Sampling
from specjax.checkpoints import huggingface
from specjax.checkpoints.feature_drafts import load_feature_draft
from specjax.checkpoints.files import CheckpointError, Files, find
from specjax.checkpoints.load import load_drafts, load_model
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.decoding.generate import generate, generate_jit, stream
from specjax.decoding.request import prepare
from specjax.draft.static import ExpansionDrafter
from specjax.engine import engine as engines
from specjax.engine.request import Request
from specjax.goodput.chunks import PrefillBatch
from specjax.measure.distribution_tests import logits_after
from specjax.methods import registry
from specjax.methods.switch import switching
from specjax.models import stacking
from specjax.models.placement import placement
from specjax.models.quantized import packed_weight
from specjax.parallel.mesh import make_mesh
from tests.conftest import tiny_config
from tests.engines import alone as plain_texts
from tests.engines import ids_of, mixing, random_request, running, served
from tests.hidden import HiddenDrafter
from tests.test_parity import FAMILIES, golden, loaded

ROWS, NEW = 8, 16
PROMPTS = [[1 + row, 2, 3, row] for row in range(ROWS)]
MIXED = Sampling(temperature=np.resize(np.float32([0, 0.8]), ROWS))
MESHES = {
    "data=8": {"data": 8},
    "model=8": {"model": 8},
    "data=2,model=4": {"data": 2, "model": 4},
    "model=4": {"model": 4},
    "data=2": {"data": 2},
    "draft=3": {"draft": 3},
    "data=2,draft=3": {"data": 2, "draft": 3},
}

ENGINES = (
    "model=4/chain",
    "draft=3/pool",
    "data=2/switching",
    "data=2,model=4/chain/stack",
    "data=2,draft=3/pool",
)
"""Meshes of engines, and what drafts there."""


HEADS = ("head", "block")
"""Drafts that read hidden states, by their folders."""


def pair_on(folder: Path, mesh, stack: bool = False) -> Pair:
    drafts = load_drafts([folder / "drafts" / str(n) for n in range(3)], dtype="float32", mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        if stack:
            patch.setattr(stacking, "platform", lambda: "tpu")
        target = load_model(folder / "target", mesh=mesh)
    assert target.is_stacked == stack
    return Pair(target, None, drafts)


def drafter_of(folder: Path, pair: Pair, method: str, mesh):
    if method == "hidden":
        (whole,) = load_drafts([folder / "target"], dtype="float32", mesh=mesh)
        return HiddenDrafter(whole, (0, pair.target.config.num_layers))
    if method in HEADS:
        head = load_feature_draft(Files(folder / method), pair.target, dtype="float32", mesh=mesh)
        return ExpansionDrafter.of([head], (2, 1))
    return registry.build(registry.setting_of(method, batch=ROWS), pair)


def texts(pair: Pair, drafter, streams: bool) -> dict:
    """Tokens and steps of a mixed batch, and the same tokens as they are streamed."""
    key = jax.random.key(0)
    asked = {"max_new_tokens": NEW, "sampling": MIXED, "stop_at_eos": False}
    made = generate(key, pair.target, drafter, PROMPTS, **asked)
    streamed = [[] for _ in PROMPTS]
    if streams:
        for step in stream(key, pair.target, drafter, PROMPTS, **asked):
            for row, tokens in enumerate(streamed):
                tokens.extend(step.tokens[row, : step.count[row]].tolist())
    return {"tokens": made.tokens.tolist(), "steps": made.steps.tolist(), "streamed": streamed}


def programs(folder: Path) -> dict:
    """What devices exchange in the loop of a target split over all of them."""
    found = {}
    for layers in (2, 3):
        mesh = make_mesh(model=8)
        target = load_model(folder / f"layers{layers}", mesh=mesh)
        asked = prepare(
            jax.random.key(0), target, None, PROMPTS, max_new_tokens=NEW, sampling=MIXED,
            stop_at_eos=False,
        )  # fmt: skip
        text = generate_jit.lower(**asked._asdict()).compile().as_text()
        sums = len(re.findall(r" all-reduce(?:-start)?\(", text))
        shapes = re.findall(r"f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
        sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]
        others = re.findall(r" (all-to-all|collective-permute|reduce-scatter)", text)
        found[layers] = {"sums": sums, "gathered": sizes, "others": others}
    return found


def families() -> dict:
    """How far the logits of every family are from transformers', as a share of what is allowed."""
    found, mesh = {}, make_mesh(model=2)
    for case in FAMILIES:
        config = loaded(case).config
        experts = config.experts
        parts = [config.num_heads]
        parts += [] if experts is None else [experts.num_experts, experts.shared_size]
        own = {"is_odd": any(number % 2 for number in parts)}
        tokens, expected, tolerance = golden(case)
        try:
            model = loaded(case, mesh)
        except CheckpointError as error:
            found[case] = own | {"refused": str(error)}
            continue
        error = np.abs(logits_after(model, tokens.tolist()) - expected[:, -1]).max()
        found[case] = own | {"share": float(error / tolerance)}
    return found


def moved(folder: Path) -> dict:
    """Logits of a model that was kept from one mesh and restored onto others."""
    first = load_model(folder / "target", mesh=make_mesh(data=2, model=4))
    huggingface.save_sharded(first, folder / "kept")
    huggingface.save_model(first, folder / "written", dtype="float32")
    expected = logits_after(load_model(folder / "target"), PROMPTS)
    found = {}
    for name, sizes in {"one": None, "model=8": {"model": 8}, "data=8": {"data": 8}}.items():
        mesh = sizes and make_mesh(**sizes)
        model = load_model(folder / "kept", mesh=mesh)
        shards = {leaf.sharding.shard_shape(leaf.shape) for leaf in [model.layers[0].up]}
        error = float(np.abs(logits_after(model, PROMPTS) - expected).max())
        found[name] = {"error": error, "up": list(*shards), "repeats": model.repeats}
    quantize_folder(find(folder / "target"), folder / "packed", 8, table=8)
    one = load_model(folder / "packed")
    split = load_model(folder / "packed", mesh=make_mesh(model=8))
    error = np.abs(logits_after(split, PROMPTS) - logits_after(one, PROMPTS)).max()
    rows = [part.data.shape[0] for part in split.embedding.values.addressable_shards]
    found["packed"] = {"error": float(error), "rows": rows}
    codes = np.arange(16 * 128, dtype=np.uint32).astype(np.uint8).reshape(16, 128)
    part = np.linspace(-1, 1, 128, dtype=np.float16).reshape(16, 8)
    weight = packed_weight(codes, part, 4, offset=-part)
    on_mesh = placement(tiny_config(), make_mesh(model=4))
    shards = {leaf: on_mesh.put_packed(leaf, weight, "float32") for leaf in ("up", "down")}
    found["offsets"] = {leaf: list(own.offset.sharding.shard_shape((16, 8)))
                        for leaf, own in shards.items()}  # fmt: skip
    equal = [np.array_equal(own.unpacked(), weight.unpacked()) for own in shards.values()]
    found["offsets"]["equal"] = all(equal)
    written = load_model(folder / "written")
    whole = load_model(folder / "target")
    equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), written, whole)
    return found | {"written": written.config == whole.config and all(jax.tree.leaves(equal))}


def served_on(folder: Path) -> dict:
    """Texts of an engine on meshes, and by plain decoding on one device."""
    drawn = np.random.default_rng(0)
    requests = [random_request(drawn, tiny_config().vocab_size, most=12) for _ in range(8)]
    requests.append(Request(prompt=[*range(1, 40)], max_new_tokens=5, prompt_logprobs=2))
    found = {"alone": plain_texts(pair_on(folder, None).target, requests)}
    engines.CHUNKS = (16,)
    for section in ENGINES:
        name, method, *stack = section.split("/")
        pair = pair_on(folder, make_mesh(**MESHES[name]), bool(stack))
        if method == "switching":
            drafter = switching(pair, ("none", "chain:3", "specexec:7"))
        else:
            drafter = registry.build(registry.setting_of(method, batch=2), pair)
        with (
            mixing(PrefillBatch(1, 8, 8)) as read,
            running(pair.target, drafter, rows=4, max_model_len=64) as engine,
        ):
            texts = list(map(ids_of, served(engine, requests)))
        found[section] = texts, bool(read)
    try:
        target = pair_on(folder, make_mesh(data=8)).target
        engines.Engine(target, None, rows=12)
    except ValueError as error:
        found["refused"] = str(error)
    return found


class Odd:
    """A grammar by which no token is followed by one that is as odd as it is."""

    def __init__(self, words: int) -> None:
        self._words, self._text = words, [0]

    def matcher(self) -> "Odd":
        return Odd(self._words)

    def words(self) -> np.ndarray:
        bits = 0x55555555 if self._text[-1] % 2 else 0xAAAAAAAA
        return np.full(self._words, bits, np.uint32).view(np.int32)

    def consume(self, tokens) -> int:
        for number, token in enumerate(tokens):
            if token % 2 == self._text[-1] % 2:
                return number
            self._text.append(token)
        return len(tokens)

    def copy(self) -> "Odd":
        return copy.deepcopy(self)

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def reset(self) -> None:
        self._text = [0]

    def forced(self) -> list[int]:
        """What may come, and is not all that may: expecting it changes no text."""
        return [4, 3] if self._text[-1] % 2 else [3]

    def is_end(self, token: int) -> bool:
        return False

    def error(self) -> str:
        return ""


def within_grammars(folder: Path) -> dict:
    """Texts under grammars, and those of one device; devices ask for the same masks at once."""
    found = {}
    for name, method in (("alone", "none"), ("model=4", "chain"), ("data=2,model=4", "specexec"),
                         ("data=2,draft=3", "pool"), ("data=2", "lookup")):  # fmt: skip
        mesh = make_mesh(**MESHES[name]) if name != "alone" else None
        pair = pair_on(folder, mesh)
        grammar = Odd(num_words(pair.target.config.vocab_size))
        made = generate(
            jax.random.key(0), pair.target, drafter_of(folder, pair, method, mesh), PROMPTS,
            max_new_tokens=NEW, grammar=[grammar, None] * (ROWS // 2), stop_at_eos=False,
        )  # fmt: skip
        found[name] = made.tokens.tolist()
    return found


if __name__ == "__main__":
    at = Path(sys.argv[1])
    others = {
        "programs": lambda: programs(at),
        "families": families,
        "moved": lambda: moved(at),
        "engine": lambda: served_on(at),
        "grammars": lambda: within_grammars(at),
    }
    alone = pair_on(at, None)
    made = {"alone": {}}
    for section in sys.argv[2:]:
        if section in others:
            made[section] = others[section]()
            continue
        name, method, *stack = section.split("/")
        if method not in made["alone"]:
            made["alone"][method] = texts(alone, drafter_of(at, alone, method, None), False)
        mesh = make_mesh(**MESHES[name])
        pair = pair_on(at, mesh, bool(stack))
        streams = name == "data=2,draft=3"  # of all states the one with an axis before its rows
        made[section] = texts(pair, drafter_of(at, pair, method, mesh), streams)
    json.dump(made, sys.stdout)
