"""EAGLE-3 heads: files of every dialect, what they compute, the trees over them, and texts."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints.feature_drafts import is_feature_draft, load_feature_draft
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.drafter import Seen
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.reading import catch_up, prefill, read_by
from specjax.draft.static import ExpansionDrafter
from specjax.methods import defaults
from specjax.methods.choice import shipped
from specjax.methods.registry import build, lacking, setting_of
from specjax.models.quantized import PackedWeight, packed
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, TOP_K
from tests.cases import slow_but
from tests.eagle_twin import DIALECTS, Dialect, Twin, head_of, write
from tests.engines import check_rows_that_share
from tests.folders import VOCABULARY, target_folder
from tests.grown import paths_of
from tests.hidden import check_close, hidden_of
from tests.pairs import NEW, PROMPTS, generate, varied_model

LAYERS = 7
TEXT = [5, 9, 2, 33, 33, 60, 1, 17]


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model(num_layers=LAYERS, hidden_size=32)


def loaded(target: Model, folder, dialect: Dialect, seed: int = 0) -> tuple[Model, Twin]:
    """A head, and its twin."""
    config = target.config
    tensors = head_of(dialect, config.vocab_size, config.hidden_size, seed)
    write(folder, dialect, tensors, config.vocab_size, config.hidden_size)
    files = Files(folder)
    assert is_feature_draft(files)
    head = load_feature_draft(files, target, dtype="float32")
    return head, Twin(dialect, tensors, np.asarray(target.embedding))


@pytest.mark.parametrize("name", DIALECTS)
def test_a_head_computes_what_its_definition_says(name, target, tmp_path):
    """After prompts of unequal lengths, and after what steps added to them."""
    dialect = DIALECTS[name]
    head, twin = loaded(target, tmp_path, dialect)
    layers = read_by([head])
    assert layers == dialect.layers
    hidden = hidden_of(target, TEXT, layers)
    lengths = [1, 2, 5]
    seen = jnp.broadcast_to(jnp.asarray(hidden[:5]), (3, 5, hidden.shape[1]))
    prompts = jnp.broadcast_to(jnp.asarray(TEXT[:5], jnp.int32), (3, 5))
    held = prefill(head, prompts, jnp.asarray(lengths), 32, seen, layers)
    assert held.cache.length.tolist() == [0, 1, 4]
    for row, length in enumerate(lengths[1:], 1):
        slots = twin.read(TEXT[:length], hidden)
        handed, likely = twin.run(slots, [list(range(n + 1)) for n in range(len(slots))])
        check_close(held.logits[row], likely[-1])
        assert held.features is not None
        np.testing.assert_allclose(held.features[row], handed[-1], rtol=1e-4, atol=1e-4)
    # Three tokens more, of which the first row takes none, the second one and the third three.
    tokens = jnp.asarray([TEXT[n : n + 3] for n in lengths], jnp.int32)
    before = jnp.asarray(np.stack([hidden[n - 1 : n + 2] for n in lengths]))
    later = catch_up(head, held, tokens, jnp.asarray([0, 1, 3]), before, layers)
    assert later.cache.length.tolist() == [0, 2, 7]
    np.testing.assert_array_equal(later.logits[0], held.logits[0])
    for row, length in ((1, 3), (2, 8)):
        slots = twin.read(TEXT[:length], hidden)
        _, likely = twin.run(slots, [list(range(n + 1)) for n in range(len(slots))])
        check_close(later.logits[row], likely[-1])


@pytest.mark.parametrize("name", ["EAGLE", "3.1", "speculators"])
def test_eagle2s_tree_is_that_of_the_published_algorithm(name, target, tmp_path):
    dialect = DIALECTS[name]
    head, twin = loaded(target, tmp_path, dialect)
    total, depth, width = 24, 4, 4
    # A tree's first level comes from the text; `depth` rounds follow.
    growth = Growth(
        budget=total - 1, beams=width, width=width, depth=depth + 1, decay=0.9999, by_level=True
    )
    drafter = BestFirstDrafter(head, jnp.ones(2), growth)
    hidden = hidden_of(target, TEXT, drafter.wants.hidden_layers)
    prompt, length = jnp.asarray([TEXT], jnp.int32), jnp.asarray([len(TEXT)])
    state = drafter.init(prompt, length, 64, Seen(jnp.zeros((1, len(TEXT), 0), jnp.int32),
                                                  jnp.asarray(hidden)[None]))  # fmt: skip
    asked = specjax.Sampling(0.0).rows(1)
    last = jnp.asarray([TEXT[-1]], jnp.int32)
    tree, _ = drafter.propose(jax.random.key(0)[None], length - 1, state, last, asked)
    assert set(paths_of(tree, 0)) - {()} == twin.eagle2(TEXT, hidden, total, depth, width)


def drafters(head: Model, other: Model, draft: Model) -> dict:
    grown = Growth(budget=7, beams=3, width=3)
    tree = BestFirstDrafter(head, jnp.ones(2), grown)
    return {
        "chain": ExpansionDrafter.of([head], (1, 1, 1)),
        "tree": ExpansionDrafter.of([head], (2, 2, 1)),
        "distinct": ExpansionDrafter.of([head], (3, 1), DISTINCT),
        "likeliest": ExpansionDrafter.of([head], (2, 1), TOP_K),
        "pool": ExpansionDrafter.of([head, other], (2, 1)),
        "head and draft": ExpansionDrafter.of([head, draft], (1, 1)),
        "specexec": tree,
        "eagle": BestFirstDrafter(head, jnp.ones(2), Growth(12, 3, 3, 4, 0.9999, by_level=True)),
        "hybrid": HybridDrafter(tree, jnp.asarray([0.0, 0.4, 0.6]), None),
    }


NAMES = ("chain", "tree", "distinct", "likeliest", "pool", "head and draft", "specexec", "eagle",
         "hybrid")  # fmt: skip


@pytest.fixture(scope="module")
def made(target, tmp_path_factory) -> dict:
    head, _ = loaded(target, tmp_path_factory.mktemp("one"), DIALECTS["SpecForge"])
    other, _ = loaded(target, tmp_path_factory.mktemp("two"), DIALECTS["speculators"], 1)
    draft = varied_model(1, hidden_size=32)
    return drafters(head, other, draft)


@pytest.mark.parametrize("name", slow_but(NAMES, "chain", "tree", "eagle"))
def test_greedy_texts_are_those_of_plain_decoding(name, target, made):
    """Longer than the head's context of 16 tokens, and from a lone token on."""
    found = generate(target, made[name])
    np.testing.assert_array_equal(found.tokens, generate(target, None).tokens)
    assert max(map(len, PROMPTS)) + NEW > 16


@pytest.mark.parametrize("name", slow_but(["chain", "eagle", "pool"]))
def test_an_engine_gives_the_texts_of_plain_decoding(name, target, made):
    """In rows that come and go, and take over what others hold."""
    check_rows_that_share(target, made[name])


@pytest.mark.parametrize("name", DIALECTS)
def test_a_head_is_written_as_specforge_does_and_read_again(name, target, tmp_path):
    head, _ = loaded(target, tmp_path / "one", DIALECTS[name])
    save_model(head, tmp_path / "two", dtype="float32")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    ids = [layer - 1 for layer in DIALECTS[name].layers]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    again = load_feature_draft(Files(tmp_path / "two"), target, dtype="float32")
    assert again.config == head.config
    for one, other in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_head_of_a_quantized_target_is_written_without_its_tables(target, tmp_path):
    head, _ = loaded(target, tmp_path / "one", DIALECTS["EAGLE"])
    table = jax.tree.map(jnp.asarray, packed(np.asarray(target.embedding), 8))
    save_model(replace(head, embedding=table), tmp_path / "two", dtype="float32")
    again = load_feature_draft(Files(tmp_path / "two"), target, dtype="float32")
    for one, other in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def changed(folder: Path, **changes: object) -> Files:
    """A head's folder with other keys; None takes one out."""
    file = folder / "config.json"
    found = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return Files(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 65}, "for a target of 65 tokens; the model has 64"),
        ({"target_hidden_size": 48}, "hidden states of 48 numbers; the model's have 32"),
        ({"num_hidden_layers": 2}, "has one layer .* this one has 2 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}},
         "after 1, 4, 8 layers; the model has 7"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
         "cannot be told whether these are hidden states or layers' outputs"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must be a list of layers"),
        ({"draft_vocab_size": 41}, r"lm_head.weight .* has shape \(40, 32\).* asks for \(41, 32\)"),
    ],
)  # fmt: skip
def test_heads_of_other_targets_are_refused(changes, sentence, target, tmp_path):
    loaded(target, tmp_path, DIALECTS["SpecForge"])
    with pytest.raises((ValueError, CheckpointError), match=sentence):
        load_feature_draft(changed(tmp_path, **changes), target)


def test_a_head_is_no_model(target, tmp_path, capsys):
    loaded(target, tmp_path / "head", DIALECTS["SpecForge"])
    assert main(["generate", "def", "--model", str(tmp_path / "head")]) == 2
    assert "reads hidden states of a target: name it with --draft" in capsys.readouterr().err


def test_a_head_has_no_second_stage(target, made):
    growth = Growth(budget=7, beams=3, width=3)
    with pytest.raises(ValueError, match="reads hidden states takes no second stage"):
        BestFirstDrafter(made["specexec"].model, jnp.ones(2), growth, None, made["chain"])


def test_a_pair_drafts_with_a_head(tmp_path):
    """By name, as every other draft; with the methods that take it."""
    folder = target_folder(tmp_path / "target", 3, num_layers=LAYERS)
    head = head_of(DIALECTS["EAGLE"], VOCABULARY, 32)
    write(tmp_path / "head", DIALECTS["EAGLE"], head, VOCABULARY, 32)
    pair = load_pair(str(folder), str(tmp_path / "head"), dtype="float32")
    assert pair.drafts[0].embedding is pair.target.embedding
    plain = generate(pair.target, None).tokens
    for name in ("chain:3", "specexec:7"):
        drafter = build(setting_of(name), pair)
        np.testing.assert_array_equal(generate(pair.target, drafter).tokens, plain)
    assert lacking("staged", pair) == (
        "a draft that is a model of its own; the first one reads hidden states"
    )
    assert shipped(pair, 0.8, 1).setting.method == "chain"


@pytest.mark.parametrize("method", ["specexec:7", "hybrid:7"])
def test_a_heads_nodes_are_scored_otherwise_than_a_drafts(method, target, tmp_path):
    head, _ = loaded(target, tmp_path, next(iter(DIALECTS.values())))
    setting = setting_of(method)
    assert setting.temperatures is None
    for own, usual in ((head, defaults.HEAD_TEMPERATURES), (target, defaults.TEMPERATURES)):
        for named, expected in ((None, usual), ((0.5, 2.0), (0.5, 2.0))):
            drafter = build(
                dataclasses.replace(setting, temperatures=named), Pair(target, None, [own])
            )
            grown = drafter if method.startswith("specexec") else drafter.draft
            np.testing.assert_allclose(grown.temperatures, expected)


def test_what_the_commands_say_of_a_head(tmp_path, capsys):
    """Before its weights are read: what it reads and knows, what it takes, whose it is."""
    folder = target_folder(tmp_path / "target", 3, num_layers=LAYERS)
    head = tmp_path / "head"
    write(head, DIALECTS["EAGLE"], head_of(DIALECTS["EAGLE"], VOCABULARY, 32), VOCABULARY, 32)
    pair = ["--model", str(folder), "--draft", str(head)]

    def said(*arguments: str) -> dict:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = said("check-pair", str(folder), str(head))
    findings = {each["what"]: each["said"] for each in found["drafts"][0]["findings"]}
    assert found["works"]
    assert findings["hidden states"] == "those after 2, 3, 4 layers, 32 numbers each"
    assert findings["vocabulary"] == "it knows 40 of 272 tokens; the embedding is the model's"
    assert said("info", *pair)["draft_weights_bytes"] > 0
    text = said("generate", "def add", *pair, "--max-new-tokens", "9")
    assert text["method"].startswith("specexec")
    smaller = target_folder(tmp_path / "smaller", 3, num_layers=2)
    assert main(["check-pair", str(smaller), str(head), "--json"]) == 1
    assert "after 2, 1, -1 layers; the model has 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("EAGLE", {"bits": 8, "table": 8}),
        ("SpecForge", {"bits": 4, "group": 16, "kept": 0.3, "table": 8}),
        ("speculators", {"bits": 8}),
        ("3.1", {"bits": 4, "group": 16}),
    ],
)
def test_a_quantized_head_is_the_head_rounded(name, way, target, tmp_path):
    """Its projection of hidden states stays as it is."""
    head, _ = loaded(target, tmp_path / "head", DIALECTS[name])
    quantize_folder(Files(tmp_path / "head"), tmp_path / "packed", **way)
    found = load_feature_draft(Files(tmp_path / "packed"), target, dtype="float32")
    about = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert about["ignore"] == ([] if "table" in way else ["lm_head"]) + ["fc"]
    np.testing.assert_array_equal(found.feature_projection, head.feature_projection)
    pairs = [(getattr(found.layers[0], each), getattr(head.layers[0], each))
             for each in ("query", "output", "gate", "down")]  # fmt: skip
    pairs += [(found.unembedding, head.unembedding)] if "table" in way else []
    for rounded, whole in pairs:
        assert isinstance(rounded, PackedWeight)
        off = np.asarray(rounded.unpacked()) - np.asarray(whole)
        assert np.linalg.norm(off) < 0.15 * np.linalg.norm(np.asarray(whole))


def test_a_head_is_not_calibrated(target, tmp_path):
    loaded(target, tmp_path / "head", DIALECTS["EAGLE"])
    with pytest.raises(ValueError, match="reads hidden states of a target, and without it"):
        quantize_folder(Files(tmp_path / "head"), tmp_path / "packed", texts=lambda: ["a"])
