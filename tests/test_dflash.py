"""DFlash: its files, what a block says, the trees over it, and texts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.__main__ import main
from specjax.checkpoints.feature_drafts import is_feature_draft, load_feature_draft
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.quantizing import quantize_folder
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.drafter import Seen
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.levels import logits_by_level
from specjax.draft.reading import ModelState, catch_up, prefill, read_by, ready
from specjax.draft.static import ExpansionDrafter
from specjax.methods.registry import build, lacking, setting_of
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model
from specjax.trees.construction import DISTINCT, TOP_K
from tests.cases import slow_but
from tests.dflash_twin import DIALECTS, TARGET_LAYERS, Dialect, Twin, draft_of, write
from tests.engines import check_rows_that_share
from tests.folders import VOCABULARY, target_folder
from tests.grown import paths_of
from tests.hidden import check_close, hidden_of
from tests.pairs import NEW, PROMPTS, block_draft, generate, varied_model
from tests.test_eagle import changed

SIZE = 32
TEXT = [5, 9, 2, 33, 33, 60, 1, 17]


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model(num_layers=TARGET_LAYERS, hidden_size=SIZE)


def loaded(target: Model, folder, dialect: Dialect, seed: int = 0) -> tuple[Model, Twin]:
    """A draft, and its twin."""
    vocabulary = target.config.vocab_size
    tensors = draft_of(dialect, vocabulary, SIZE, seed)
    files = Files(write(folder, dialect, tensors, vocabulary, SIZE))
    assert is_feature_draft(files)
    draft = load_feature_draft(files, target, dtype="float32")
    tables = np.asarray(target.embedding), np.asarray(target.unembedding)
    return draft, Twin(dialect, tensors, *tables)


@jax.jit
def said(draft: Model, held: ModelState, last: jax.Array) -> jax.Array:
    """Logits of every level below the last tokens of rows."""
    assert held.logits is None, "a state holds no logits of blocks"
    made = ready(draft, held, last)
    return jnp.concatenate([made.logits[:, None], made.ahead], axis=1)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_draft_says_what_its_definition_does(name, target, tmp_path):
    """After prompts of unequal lengths, and after what steps added to them."""
    dialect = DIALECTS[name]
    draft, twin = loaded(target, tmp_path, dialect)
    assert draft.embedding is target.embedding
    assert draft.unembedding is target.unembedding
    layers = read_by([draft])
    assert set(layers) == set(dialect.states)
    hidden, own = hidden_of(target, TEXT, layers), hidden_of(target, TEXT, dialect.states)
    lengths = [1, 2, 5]
    seen = jnp.broadcast_to(jnp.asarray(hidden[:5]), (3, 5, hidden.shape[1]))
    prompts = jnp.broadcast_to(jnp.asarray(TEXT[:5], jnp.int32), (3, 5))
    begin = jax.jit(prefill, static_argnames=("slots", "layers"))
    held = begin(draft, prompts, jnp.asarray(lengths), slots=32, hidden=seen, layers=layers)
    assert held.cache.length.tolist() == [0, 1, 4]
    first = said(draft, held, jnp.asarray([TEXT[n - 1] for n in lengths]))
    for row, length in enumerate(lengths):
        check_close(first[row], twin.block(TEXT[:length], own))
    # Three tokens more, of which the first row takes none, the second one and the third three.
    tokens = jnp.asarray([TEXT[n : n + 3] for n in lengths], jnp.int32)
    before = jnp.asarray(np.stack([hidden[n - 1 : n + 2] for n in lengths]))
    go_on = jax.jit(catch_up, static_argnames="layers")
    later = go_on(draft, held, tokens, jnp.asarray([0, 1, 3]), before, layers=layers)
    assert later.cache.length.tolist() == [0, 2, 7]
    after = said(draft, later, jnp.asarray([TEXT[n - 1] for n in (1, 3, 8)]))
    np.testing.assert_array_equal(after[0], first[0])
    for row, length in ((1, 3), (2, 8)):
        check_close(after[row], twin.block(TEXT[:length], own))


@pytest.mark.parametrize("name", ["plain", "nested", "short"])
def test_what_it_says_along_a_text_is_what_blocks_say(name, target, tmp_path):
    """At each level, from every token on, in several passes."""
    dialect = DIALECTS[name]
    draft, twin = loaded(target, tmp_path, dialect)
    text = (TEXT * 3)[:19]
    hidden = hidden_of(target, text, dialect.states)
    by_level = jax.jit(lambda *given: list(logits_by_level(*given, 3)))
    levels = by_level(draft, jnp.asarray([text], jnp.int32), jnp.asarray(hidden)[None])
    assert len(levels) == min(3, dialect.block - 1)
    blocks = [twin.block(text[: n + 1], hidden) for n in range(len(text))]
    for level, logits in enumerate(levels):
        for at in range(level, len(text)):
            check_close(np.asarray(logits)[:, at], blocks[at - level][level])


@pytest.mark.parametrize(("name", "total", "width"), [("plain", 12, 3), ("llama", 30, 4)])
def test_a_tree_has_the_likeliest_paths_of_a_block(name, total, width, target, tmp_path):
    dialect = DIALECTS[name]
    draft, twin = loaded(target, tmp_path, dialect)
    growth = Growth(total - 1, beams=total, width=width, depth=dialect.block - 1, decay=0.9999)
    drafter = BestFirstDrafter(draft, jnp.ones(2), growth)
    hidden = hidden_of(target, TEXT, drafter.wants.hidden_layers)
    prompt, length = jnp.asarray([TEXT], jnp.int32), jnp.asarray([len(TEXT)])
    nothing = jnp.zeros((1, len(TEXT), 0), jnp.int32)
    state = drafter.init(prompt, length, 64, Seen(nothing, jnp.asarray(hidden)[None]))
    last, asked = jnp.asarray([TEXT[-1]], jnp.int32), specjax.Sampling(0.0).rows(1)
    propose = jax.jit(BestFirstDrafter.propose)
    tree, _ = propose(drafter, jax.random.key(0)[None], length - 1, state, last, asked)
    own = hidden_of(target, TEXT, dialect.states)
    assert set(paths_of(tree, 0)) - {()} == twin.marginal_tree(TEXT, own, total, width)


def drafters(one: Model, other: Model, draft: Model) -> dict:
    tree = BestFirstDrafter(one, jnp.ones(2), Growth(budget=7, beams=3, width=3, depth=5))
    return {
        "chain": ExpansionDrafter.of([one], (1,) * 5),
        "tree": ExpansionDrafter.of([one], (2, 2, 1)),
        "distinct": ExpansionDrafter.of([one], (3, 1), DISTINCT),
        "likeliest": ExpansionDrafter.of([one], (2, 1), TOP_K),
        "pool": ExpansionDrafter.of([one, other], (2, 1)),
        "block and draft": ExpansionDrafter.of([one, draft], (1, 1)),
        "specexec": tree,
        "hybrid": HybridDrafter(tree, jnp.asarray([0.0, 0.4, 0.6]), None),
    }


NAMES = ("chain", "tree", "distinct", "likeliest", "pool", "block and draft", "specexec", "hybrid")


@pytest.fixture(scope="module")
def made(target, tmp_path_factory) -> dict:
    one, _ = loaded(target, tmp_path_factory.mktemp("one"), DIALECTS["plain"])
    other, _ = loaded(target, tmp_path_factory.mktemp("two"), DIALECTS["nested"], 1)
    return drafters(one, other, varied_model(1, hidden_size=SIZE))


@pytest.mark.parametrize("name", slow_but(NAMES, "chain", "tree", "specexec"))
def test_greedy_texts_are_those_of_plain_decoding(name, target, made):
    found = generate(target, made[name])
    np.testing.assert_array_equal(found.tokens, generate(target, None).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "specexec", "pool"])
def test_an_engine_gives_the_texts_of_plain_decoding(name, target, made):
    """In rows that come and go, and take over what others hold."""
    check_rows_that_share(target, made[name])


@pytest.mark.slow
def test_as_much_is_accepted_as_blocks_say(target):
    """What a fitted draft says along plain texts tells how many steps these take."""
    draft = block_draft(target, 1)
    plain, drafter = generate(target, None), ExpansionDrafter.of([draft], (1, 1, 1))
    by_level = jax.jit(lambda *given: list(logits_by_level(draft, *given, 3)))
    expected = []
    for prompt, tokens in zip(PROMPTS, plain.tokens.tolist(), strict=True):
        text = [*prompt, *tokens]
        hidden = jnp.asarray(hidden_of(target, text, drafter.wants.hidden_layers))[None]
        made = by_level(jnp.asarray([text], jnp.int32), hidden)
        said = [each.argmax(axis=0).tolist() for each in made]
        at, steps = len(prompt) - 1, 0
        while at < len(text) - 1:
            # A block that begins at a token says the next ones, one at each level.
            right = 0
            while right < 3 and text[at + right + 1 :][:1] == [said[right][at + right]]:
                right += 1
            at, steps = at + right + 1, steps + 1
        expected.append(steps)
    found = generate(target, drafter)
    assert found.steps.tolist() == expected
    assert sum(expected) < NEW * len(PROMPTS)  # some tokens are


@pytest.mark.parametrize("name", DIALECTS)
def test_a_draft_is_written_and_read_again(name, target, tmp_path):
    draft, _ = loaded(target, tmp_path / "one", DIALECTS[name])
    save_model(draft, tmp_path / "two", dtype="float32")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    ids = [layer - 1 for layer in DIALECTS[name].states]
    assert config["dflash_config"]["target_layer_ids"] == ids
    again = load_feature_draft(Files(tmp_path / "two"), target, dtype="float32")
    assert again.config == draft.config
    for one, other in zip(jax.tree.leaves(draft), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_target_layers": 8}, "for a target of 8 layers; the model has 7"),
        ({"vocab_size": 65}, "for a target of 65 tokens; the model has 64"),
        ({"hidden_size": 48}, "reads hidden states of 48 numbers; the model's have 32"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}},
         "after 1, 8 layers; the model has 7"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is None"),
        ({"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1, 3, 5]}},
         "mask_token_id is 64; vocab_size is 64"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "mask_token_id is None; it must be"),
        ({"block_size": 1}, "block_size is 1; it must lie from 2 to 256"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel.* only DFlashDraftModel is"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "of DFlash's only 'full_att"),
    ],
)  # fmt: skip
def test_drafts_of_other_targets_are_refused(changes, sentence, target, tmp_path):
    loaded(target, tmp_path, DIALECTS["plain"])
    with pytest.raises((ValueError, CheckpointError), match=sentence):
        load_feature_draft(changed(tmp_path, **changes), target)


def test_a_tree_is_no_deeper_than_a_block(target, made):
    model = made["specexec"].model
    with pytest.raises(ValueError, match="block_size 6 predicts 5 tokens in its pass; a tree of 6"):
        ExpansionDrafter.of([model], (1,) * 6)
    with pytest.raises(ValueError, match="predicts 5 tokens in its pass; a tree of 7 levels"):
        BestFirstDrafter(model, jnp.ones(2), Growth(budget=7, beams=3, width=3))


def test_a_pair_drafts_with_blocks(tmp_path, capsys):
    """By name, as every other draft; a method's own size is no deeper than a block."""
    folder = target_folder(tmp_path / "target", 3, num_layers=TARGET_LAYERS, hidden_size=SIZE)
    tensors = draft_of(DIALECTS["plain"], VOCABULARY, SIZE, 0)
    draft = write(tmp_path / "draft", DIALECTS["plain"], tensors, VOCABULARY, SIZE)
    pair = load_pair(str(folder), str(draft), dtype="float32")
    plain = generate(pair.target, None).tokens
    for name in ("chain:5", "specexec"):
        drafter = build(setting_of(name), pair)
        assert drafter is not None
        assert drafter.window <= 6
        np.testing.assert_array_equal(generate(pair.target, drafter).tokens, plain)
    assert lacking("staged", pair) == (
        "a draft that is a model of its own; the first one reads hidden states"
    )
    assert main(["check-pair", str(folder), str(draft), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["drafts"][0]
    findings = {each["what"]: each["said"] for each in found["findings"]}
    assert findings["block_size"] == "6: a pass predicts 5 tokens, a level each"
    assert findings["hidden states"] == "those after 2, 4, 6 layers, 32 numbers each"
    arguments = ["--model", str(folder), "--draft", str(draft), "--max-new-tokens", "9", "--json"]
    assert main(["generate", "def add", *arguments]) == 0


@pytest.mark.parametrize("way", [{"bits": 8}, {"bits": 4, "group": 16}])
def test_a_quantized_draft_is_the_draft_rounded(way, target, tmp_path):
    draft, _ = loaded(target, tmp_path / "one", DIALECTS["biases"])
    quantize_folder(Files(tmp_path / "one"), tmp_path / "packed", **way)
    found = load_feature_draft(Files(tmp_path / "packed"), target, dtype="float32")
    np.testing.assert_array_equal(found.feature_projection, draft.feature_projection)
    for packed, whole in zip(found.layers, draft.layers, strict=True):
        assert isinstance(packed.query, PackedWeight)
        off = np.asarray(packed.query.unpacked()) - np.asarray(whole.query)
        assert np.linalg.norm(off) < 0.15 * np.linalg.norm(np.asarray(whole.query))
