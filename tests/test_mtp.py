"""A model's layer of multi-token prediction: its files, what it computes, and texts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.__main__ import main
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.load import load_model
from specjax.checkpoints.mtp_layers import mtp_draft
from specjax.checkpoints.pair import load_pair
from specjax.draft.levels import logits_by_level
from specjax.draft.reading import catch_up, prefill, read_by
from specjax.methods.registry import build, setting_of
from tests.folders import VOCABULARY, target_folder
from tests.hidden import check_close, hidden_of
from tests.mtp_twin import PREFIX, Shape, Twin, mtp_of
from tests.pairs import generate

SIZE, LAYERS = 32, 3
TEXT = [5, 9, 2, 33, 33, 60, 1, 17]
QWEN2 = {"family": "qwen2", "biases": ("query", "key", "value"), "tie_embeddings": False}


def shape_of(folder: Path) -> Shape:
    """The sizes that a target and its layer share."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"], features=config["intermediate_size"],
        epsilon=config["rms_norm_eps"], theta=config["rope_theta"],
    )  # fmt: skip


def copied(folder: Path, to: Path, changed: dict, *without: str) -> Files:
    """A folder's model with other tensors, without its tokenizer."""
    tensors = load_file(folder / "model.safetensors") | changed
    held = {name: each for name, each in tensors.items() if not name.startswith(without)}
    save_file(held, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return Files(to)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A MiMo: Qwen 2 with a layer more, under its own names."""
    made = tmp_path_factory.mktemp("mimo")
    target_folder(made, 3, num_layers=LAYERS, hidden_size=SIZE, **QWEN2)
    config = json.loads((made / "config.json").read_text())
    named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    more = named | {"num_nextn_predict_layers": 1}
    (made / "config.json").write_text(json.dumps(config | more))
    file = made / "model.safetensors"
    save_file(load_file(file) | mtp_of(VOCABULARY, SIZE, 5, shape_of(made)), file, {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def pair(folder):
    return load_pair(str(folder), "self:mtp", dtype="float32")


@pytest.fixture(scope="module")
def twin(folder):
    tensors = load_file(folder / "model.safetensors")
    outer = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return Twin(tensors, *(tensors[name] for name in outer), shape_of(folder))


def test_a_layer_computes_what_its_definition_says(folder, pair, twin):
    """After prompts of unequal lengths, after what steps added to them, and at further levels."""
    draft = mtp_draft(Files(folder), pair.target, dtype="float32")
    layers = read_by([draft])
    assert layers == (LAYERS,)
    hidden = hidden_of(pair.target, TEXT, layers)
    lengths = [2, 5]
    seen = jnp.broadcast_to(jnp.asarray(hidden[:5]), (2, 5, SIZE))
    prompts = jnp.broadcast_to(jnp.asarray(TEXT[:5], jnp.int32), (2, 5))
    begin = jax.jit(prefill, static_argnames=("slots", "layers"))
    held = begin(draft, prompts, jnp.asarray(lengths), slots=32, hidden=seen, layers=layers)
    for row, length in enumerate(lengths):
        check_close(held.logits[row], twin.after(TEXT[:length], hidden, []))
    tokens = jnp.asarray([TEXT[n : n + 3] for n in lengths], jnp.int32)
    before = jnp.asarray(np.stack([hidden[n - 1 : n + 2] for n in lengths]))
    go_on = jax.jit(catch_up, static_argnames="layers")
    later = go_on(draft, held, tokens, jnp.asarray([1, 3]), before, layers=layers)
    for row, length in enumerate((3, 8)):
        check_close(later.logits[row], twin.after(TEXT[:length], hidden, []))
    by_level = jax.jit(lambda *given: list(logits_by_level(*given, 3)))
    levels = by_level(draft, jnp.asarray([TEXT], jnp.int32), jnp.asarray(hidden)[None])
    for level, logits in enumerate(levels):
        for at in range(level + 1, len(TEXT)):
            text, own = TEXT[: at + 1 - level], TEXT[at + 1 - level : at + 1]
            check_close(np.asarray(logits)[:, at], twin.after(text, hidden, own))


def test_texts_are_those_of_plain_decoding_by_each_method(pair):
    """The layer is the model's own: what it shares is not held twice."""
    draft = pair.drafts[0]
    assert draft.embedding is pair.target.embedding
    assert draft.unembedding is pair.target.unembedding
    assert draft.feature_input_norm is pair.target.final_norm
    plain = generate(pair.target, None).tokens
    for name in ("chain:3", "specexec:7", "eagle:7,3,2"):
        drafter = build(setting_of(name), pair)
        np.testing.assert_array_equal(generate(pair.target, drafter).tokens, plain)


def test_the_target_is_a_qwen2_without_the_layer(folder, tmp_path):
    files = copied(folder, tmp_path, {}, PREFIX)
    with pytest.raises(CheckpointError, match=r"has no tensor model\.mtp_layers\.0"):
        mtp_draft(files, load_model(files))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    ours, theirs = load_model(folder), load_model(files)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="a qwen2 model has no layer of multi-token prediction"):
        mtp_draft(files, theirs)


def test_a_damaged_layer_is_refused(folder, tmp_path):
    name = f"{PREFIX}input_proj.weight"
    whole = load_file(folder / "model.safetensors")[name]
    for changed, sentence in (
        (whole[:, :-1].copy(), r"input_proj\.weight .* shape \(32, 63\)"),
        (whole * np.nan, r"input_proj\.weight"),
    ):
        files = copied(folder, tmp_path, {name: changed})
        with pytest.raises(CheckpointError, match=sentence):
            mtp_draft(files, load_model(files))


def test_the_commands_take_it_by_its_name(folder, capsys):
    pair = ["--model", str(folder), "--draft", "self:mtp", "--json"]
    assert main(["info", *pair]) == 0
    assert json.loads(capsys.readouterr().out)["draft_weights_bytes"] > 0
    assert main(["generate", "def add", *pair, "--max-new-tokens", "5"]) == 0
