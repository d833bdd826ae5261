"""Heads in training: what they say at each level, what they learn from, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import load_pair
from specjax.decoding.generate import generate
from specjax.draft.reading import prefill, run
from specjax.draft.static import ExpansionDrafter
from specjax.models.kv_cache import NewKV
from specjax.models.transformer import Model, initialize, trunk, unembed
from tests.cases import slow_but
from tests.pairs import head, varied_model
from tests.rows import rows_of
from train import evaluate, heads
from train import run as train_run
from train.checks import check
from train.config import Head, Size, load_recipe
from train.heldout import estimates, hold_out, matched_run, view
from train.labels import Labelled, Texts
from train.loop import Log
from train.loss import LOSSES
from train.vocabulary import Rows

LEVELS, TEXT = 4, 9
LAYERS = (0, 3)
F32 = jnp.dtype("float32")


@pytest.fixture(scope="module")
def target() -> Model:
    return varied_model(num_layers=3, hidden_size=32)


@pytest.fixture(scope="module", params=slow_but([None, 20], 20))
def fitted(request, target) -> Model:
    """A head that knows all tokens, or some."""
    return head(target, 1, request.param, steps=1)


def by_token(logits: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(logits.T.reshape(*shape, -1))


def test_levels_say_what_a_chain_of_drafts_says(target, fitted):
    """Each level from each beginning, against the passes that drafting makes."""
    tokens = jax.random.randint(jax.random.key(3), (2, TEXT), 0, target.config.vocab_size)
    at = jnp.broadcast_to(jnp.arange(TEXT, dtype=jnp.int32), tokens.shape)
    layers = fitted.config.features.layers
    hidden = trunk(target, tokens, at, None, None, hidden_layers=layers).hidden
    seen = jnp.concatenate(hidden).T.reshape(*tokens.shape, -1)
    said = [
        jax.nn.log_softmax(by_token(each, tokens.shape))
        for each in heads.logits_after(fitted, tokens, target, LEVELS)
    ]
    for read in (2, 5, TEXT - 1):
        length = jnp.full(2, read, jnp.int32)
        state = prefill(fitted, tokens[:, :read], length, TEXT, seen[:, :read], layers)
        assert state.features is not None
        np.testing.assert_allclose(
            jax.nn.log_softmax(state.logits), said[0][:, read - 1], rtol=1e-4, atol=1e-4
        )
        features, block = state.features[:, None], None
        for level in range(1, min(LEVELS, TEXT - read + 1)):
            place = read + level - 1
            mask = jnp.ones((2, 1, level), bool)
            made = run(
                fitted, tokens[:, place : place + 1], jnp.full((2, 1), place - 1, jnp.int32),
                state.cache, mask, block, features,
            )  # fmt: skip
            found = jax.nn.log_softmax(unembed(fitted, made.x).T)
            np.testing.assert_allclose(found, said[level][:, place], rtol=1e-4, atol=1e-4)
            features = made.features
            block = made.new if block is None else joined(block, made.new)


def joined(block: NewKV, new: NewKV) -> NewKV:
    return jax.tree.map(lambda one, other: jnp.concatenate([one, other], axis=2), block, new)


def taught(target: Model, layers: tuple[int, ...], rng) -> Labelled:
    """Rows with the target's whole distributions, sorted, and its hidden states."""
    size = target.config.vocab_size
    tokens = rng.integers(0, size, (3, TEXT)).astype(np.int32)
    (logits,) = heads.logits_after(target, jnp.asarray(tokens), None, 1)
    log_p = jax.nn.log_softmax(by_token(logits, tokens.shape))
    ids = np.argsort(-np.asarray(log_p), axis=-1, kind="stable")
    hidden = np.asarray(heads._hidden(target, tokens, layers))
    weight = rng.uniform(0, 2, tokens.shape).astype(np.float32)
    return Labelled(tokens, ids, np.take_along_axis(np.asarray(log_p), ids, -1), weight, hidden)


def trained(model: Model) -> Model:
    """A head as it is in training, of the same weights."""
    config = heads.in_training(model.config)
    return replace(model, embedding=jnp.zeros((1, 32)), row_of=None, config=config)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_mean_over_levels_of_what_it_is_at_each(target, fitted, loss):
    rng = np.random.default_rng(5)
    part = taught(target, fitted.config.features.layers, rng)
    size, known = target.config.vocab_size, fitted.config.draft_vocab_size
    ids = np.arange(size) if known is None else np.asarray(fitted.row_of).argsort(kind="stable")
    ids = np.sort(ids[: known or size])
    rows = Rows(ids, size)
    fitted = replace(fitted, embedding=target.embedding)
    if known is not None:  # the head's own rows, in that order
        fitted = replace(fitted, row_of=jnp.asarray(rows.row_of))
    lesson = heads.one_hot(part) if loss == "cross_entropy" else part
    lesson = rows.labelled(lesson)
    np.testing.assert_array_equal(lesson.tokens, part.tokens)
    made = heads.loss_of(loss, "float32", Head(3, 0.5))
    found = made(trained(fitted), heads.Taught((lesson,), target.embedding))

    # `kept` has rounded hidden states, and probabilities of 16-bit ones differ by less than 0.01
    total = 0.0
    for level, logits in enumerate(heads.logits_after(fitted, jnp.asarray(part.tokens), target, 3)):
        q = by_token(logits, part.tokens.shape)[..., ids]
        q = np.asarray(jax.nn.softmax(q))
        p = np.zeros((*part.tokens.shape, size))
        if loss == "cross_entropy":
            np.put_along_axis(p, np.roll(part.tokens, -1, 1)[..., None], 1, -1)
        else:
            np.put_along_axis(p, np.asarray(part.ids), np.exp(part.log_p), -1)
        p = p[..., ids]
        share = p.sum(-1)
        p = p / np.maximum(share, 1e-9)[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = {
                "forward_kl": np.where(p > 0, p * np.log(p / q), 0).sum(-1),
                "cross_entropy": np.where(p > 0, p * np.log(p / q), 0).sum(-1),
                "reverse_kl": (q * np.log(q / np.maximum(p, 1e-30))).sum(-1),
                "total_variation": 0.5 * np.abs(p - q).sum(-1),
            }[loss]
        weight = part.weight * share
        if loss == "cross_entropy":
            weight[:, -1] = 0
        weight[:, : level + 1] = 0
        total += 0.5**level * (value * weight).sum()
    wanted = total / (1.75 * part.weight.size)
    assert found == pytest.approx(wanted, rel=0.05)


def test_hidden_states_are_kept_as_the_target_has_them(target, tmp_path):
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, target.config.vocab_size, (5, 70)).astype(np.int32)
    length = np.array([70, 3, 64, 65, 20])

    def texts(chunk: int) -> Texts:
        return Texts(tokens[chunk::2], length[chunk::2], np.ones(5, np.float32)[chunk::2])

    heads.keep_hidden(tmp_path / "h", target, texts, 2, LAYERS, 128, Log(tmp_path / "log.jsonl"))
    found = heads.load_hidden(tmp_path / "h", 2)
    order = [0, 2, 4, 1, 3]
    at = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32), tokens.shape)
    states = trunk(target, jnp.asarray(tokens[order]), at, None, None, hidden_layers=LAYERS).hidden
    wanted = np.asarray(jnp.concatenate(states).T.reshape(5, 70, -1))
    for row, place in enumerate(order):
        kept = found[np.array([row]), : length[place]][0].view(heads.HIDDEN).astype(np.float32)
        np.testing.assert_allclose(kept, wanted[row, : length[place]], rtol=0.02, atol=0.02)
    np.testing.assert_array_equal(found[np.array([4, 0])], np.stack([found[4:][0], found[:1][0]]))
    assert found[:0].shape == (0, 70, wanted.shape[2])
    (tmp_path / "h" / "00001.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"00001\.npz is truncated or damaged"):
        heads.load_hidden(tmp_path / "h", 2)


def test_figures_of_chains_are_of_the_level_that_each_token_has(target):
    fitted = head(target, 1)
    rows = rows_of(target, 6, np.array([0, 0.8] * 3, np.float32))
    own = view(fitted, rows, target, 3)
    assert len(own.deeper) == 2
    match = [each.top[..., 0] == rows.following for each in (own, *own.deeper)]
    assert match[1][:, 2:].mean() > 0.1  # its own outputs tell it something
    runs = matched_run(match)
    for row, start in np.ndindex(runs.shape):
        run = 0
        while run < 3 and start + run < runs.shape[1] and match[run][row, start + run]:
            run += 1
        assert runs[row, start] == run
    found = estimates(hold_out(target, rows), own, [], 3)
    for name in ("tokens_per_step", "sampled_tokens_per_step"):
        assert 1 < float(found[name]) <= 4
    alone = estimates(hold_out(target, rows), own._replace(deeper=()), [], 3)
    assert alone["agreement"] == found["agreement"]
    assert alone["tokens_per_step"] != found["tokens_per_step"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head.levels": "-1"}, "head.levels is -1; it must be at least 0"),
        ({"head.decay": "1.5"}, "head.decay is 1.5; it must be between 0 and 1"),
        ({"warm.steps": "30"}, "warm.steps is 30 and head.levels 3; a head learns nothing"),
        ({"head.layers": "1,9"}, r"head.layers are \(1, 9\); the target has 2 layers"),
    ],
)
def test_impossible_recipes_are_refused(changes, said):
    recipe = load_recipe("configs/boost/tiny.py", tuple(f"{k}={v}" for k, v in base(changes)))
    recipe = dataclasses.replace(recipe, draft=Size(64, 96, 1, 2, 1, 16))
    with pytest.raises(ValueError, match=said):
        check(recipe)


def base(changes: dict[str, str]) -> list[tuple[str, str]]:
    own = {"head.levels": "3", "head.layers": "0,1,2", "warm.steps": "0"}
    own |= {"warm.warmup_steps": "0", "warm.decay_steps": "0"}
    return list((own | changes).items())


def test_a_head_of_another_width_than_the_targets_is_refused():
    recipe = load_recipe("configs/boost/tiny.py", tuple(f"{k}={v}" for k, v in base({})))
    with pytest.raises(ValueError, match=r"draft.hidden_size is 32; .* hidden size is 64"):
        check(recipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished run of a tiny pool of two heads, which know a part of their target's tokens."""
    made = tmp_path_factory.mktemp("run")
    assert run_recipe(*OVERRIDES, "--folder", str(made)) == 0
    return made


OVERRIDES = (
    *(f"{name}={value}" for name, value in base({})),
    *("draft.hidden_size=64", "vocabulary.size=200", "boost.drafts=2", "pretrain.steps=150"),
    *(
        "pretrain.decay_steps=50",
        "schedule.steps=60",
        "trigrams.contexts=0",
        "distil.corpus_rows=1",
    ),
    "evaluation.tables=",
)


def run_recipe(*arguments: str) -> int:
    return train_run.main(["configs/boost/tiny.py", *arguments])


def test_a_pool_of_heads_is_trained_and_exported_as_others_write_them(folder):
    target = load_model(folder / "export" / "target")
    drafts = [folder / "export" / "drafts" / str(number) for number in range(2)]
    for draft in drafts:
        config = json.loads((draft / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]
        assert (config["draft_vocab_size"], config["vocab_size"]) == (200, 512)
        tensors = load_file(draft / "model.safetensors")
        assert tensors["d2t"].shape == (200,)
        assert tensors["fc.weight"].shape == (64, 192)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 128
        assert "embed_tokens.weight" not in tensors
    pair = load_pair(str(folder / "export" / "target"), ",".join(map(str, drafts)))
    prompts = [[1, 2, 3, 40], [50, 60, 7]]
    options = {"max_new_tokens": 24, "stop_at_eos": False}
    plain = generate(jax.random.key(0), target, None, prompts, **options)
    pool = ExpansionDrafter.of(pair.drafts, (1, 1))
    drafted = generate(jax.random.key(0), pair.target, pool, prompts, **options)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert (drafted.steps < plain.steps).any()
    found = evaluate.drafts_in(folder / "export", pair.target)
    assert [head.config for head in found] == [head.config for head in pair.drafts]
    jax.tree.map(np.testing.assert_array_equal, found, list(pair.drafts))


@pytest.mark.slow
def test_tables_are_measured_of_a_pool_of_heads(folder, tmp_path):
    """Beside heads trained alike, here the same ones."""
    file, export = tmp_path / "tables.json", str(folder / "export")
    arguments = ["--model", export, "--alike", export, "--tables", "coverage", "--limit", "4"]
    assert evaluate.main([*arguments, "--max-new-tokens", "8", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["coverage"]
    of = {(row["pool"], row["of"]): row for row in found if row["temperature"]}
    assert of["boosted", "union"]["top2"] >= of["boosted", "draft 0"]["top2"] > 0
    assert of["alike", "union"] | {"pool": "boosted"} == of["boosted", "union"]


def test_a_head_learns_on_from_its_files(folder, tmp_path):
    """Packed ones too, with their shape, layers and tokens, whatever the recipe says."""
    target, first = folder / "export" / "target", folder / "export" / "drafts" / "0"
    pair = load_pair(str(target), str(first))
    (whole,) = pair.drafts
    packed = tmp_path / "packed"
    assert main(["quantize", str(first), str(packed), "--bits", "8"]) == 0
    own = dict(each.split("=") for each in OVERRIDES) | {
        "head.start": str(packed), "head.layers": "", "vocabulary.size": "0", "boost.drafts": "1",
        "draft.intermediate_size": "8", "schedule.steps": "1", "schedule.warmup_steps": "0",
        "schedule.decay_steps": "0", "schedule.matrix_rate": "0", "schedule.other_rate": "0",
    }  # fmt: skip
    arguments = [f"{name}={value}" for name, value in own.items()]
    out = tmp_path / "out"
    assert run_recipe(*arguments, "--folder", str(folder), "--out", str(out)) == 0
    (found,) = load_pair(str(target), str(out / "drafts" / "0")).drafts
    assert found.config == whole.config
    np.testing.assert_array_equal(found.row_of, whole.row_of)
    for own_leaf, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(own_leaf, leaf, rtol=0.05, atol=0.01)


def test_the_log_says_what_chains_of_a_head_are_worth(folder):
    report = json.loads((folder / "export" / "report.json").read_text())
    first, second = report["drafts"]
    assert 1.2 < first["tokens_per_step"] < 5
    assert second["pool_tokens_per_step"] > second["tokens_per_step"]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "draft 0"]
    assert steps[-1]["agreement"] == pytest.approx(first["agreement"], abs=0.03)  # rounded weights
    assert 0 < steps[-1]["matmul_share"] < 2


def test_a_finished_run_makes_nothing_again(folder):
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.npz")}
    assert len(before) > 4
    assert run_recipe(*OVERRIDES, "--folder", str(folder)) == 0
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.npz")} == before


@pytest.mark.parametrize("known", [None, np.array([3, 5, 8, 20])])
def test_a_head_begins_as_what_of_its_target_has_its_shapes(target, known):
    own = target.config
    size = Size(
        own.hidden_size, own.intermediate_size, 1, own.num_heads, own.num_kv_heads, own.head_dim
    )
    whole = size.reading(own, LAYERS, 0 if known is None else len(known))
    assert whole.rope_theta == own.rope_theta
    first = initialize(jax.random.key(0), heads.in_training(whole))
    begun, last, width = heads.begun(first, target, known), target.layers[-1], own.hidden_size
    table = target.embedding if target.unembedding is None else target.unembedding
    rows = slice(None) if known is None else known
    np.testing.assert_array_equal(begun.unembedding, np.asarray(table)[rows])
    np.testing.assert_array_equal(begun.final_norm, target.final_norm)
    np.testing.assert_array_equal(begun.feature_projection[:, -width:], np.eye(width))
    np.testing.assert_array_equal(begun.layers[0].query[:, width:], last.query)
    np.testing.assert_array_equal(
        begun.layers[0].query[:, :width], first.layers[0].query[:, :width]
    )
    np.testing.assert_array_equal(begun.layers[0].down, last.down)
    # A layer of another shape stays; the rest does not depend on it.
    other = dataclasses.replace(size, intermediate_size=size.intermediate_size + 8)
    config = heads.in_training(other.reading(own, LAYERS, 0 if known is None else len(known)))
    first = initialize(jax.random.key(0), config)
    begun = heads.begun(first, target, known)
    np.testing.assert_array_equal(begun.layers[0].query, first.layers[0].query)
    np.testing.assert_array_equal(begun.unembedding, np.asarray(table)[rows])
