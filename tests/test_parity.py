"""Logits equal to Hugging Face transformers' on checkpoints it wrote (golden/make.py)."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.pytree import replace
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import Pair
from specjax.draft.ngram import pack
from specjax.draft.retrieval import corpus_of
from specjax.measure import timing
from specjax.methods import registry
from specjax.methods.method import METHODS
from specjax.models import families
from specjax.models.kv_cache import empty_cache
from specjax.models.transformer import forward
from tests.cases import slow_but
from tests.pairs import alone, generate, near

GOLDEN = Path(__file__).parent / "golden"
LLAMAS = ["grouped_tied", "single_kv_untied", "plain"]
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
CUT = 9
compiled = jax.jit(forward)


def golden(case):
    """Tokens of two rows, the logits that transformers gave after each, and how near is equal."""
    with np.load(GOLDEN / f"{case}.npz") as held:
        tokens, logits = held["tokens"], held["logits"]
    # About ten chained reductions of up to 60 terms; the logits' own size, before they are capped,
    # sets the scale.
    size = np.abs(logits).max()
    config = json.loads((GOLDEN / case / "config.json").read_text("utf-8"))
    if cap := config.get("final_logit_softcapping"):
        size = cap * np.arctanh(size / cap)
    return tokens, logits, 40 * np.finfo(np.float32).eps * size


def loaded(case, mesh=None):
    return load_model(GOLDEN / case, mesh=mesh, positions={"phi3_long": 64}.get(case))


def columns(tokens, start):
    """Tokens of a sequence and their positions."""
    positions = np.broadcast_to(start + np.arange(tokens.shape[1]), tokens.shape)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32)


def plain_pass(model, tokens):
    """The logits, and the keys and values, of sequences by themselves."""
    return compiled(model, *columns(tokens, 0), None, None)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case):
    tokens, expected, tolerance = golden(case)
    logits, _ = plain_pass(loaded(case), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", slow_but(CASES, "gemma3", "qwen2_moe", "gpt_oss"))
def test_bfloat16_is_as_near_as_that_of_transformers(case):
    """By the median of tokens: a router's near ties may fall otherwise, in either."""
    tokens, expected, _ = golden(case)
    with np.load(GOLDEN / f"{case}.npz") as held:
        theirs = held["bfloat16"]
    model = load_model(GOLDEN / case, dtype="bfloat16", positions={"phi3_long": 64}.get(case))
    assert model.embedding.dtype == jnp.bfloat16
    ours, _ = plain_pass(model, tokens)
    own, other = (
        np.median(np.sqrt(np.square(np.asarray(each) - expected).mean(axis=2)))
        for each in (ours, theirs)
    )
    assert 0 < own <= 1.1 * other


@pytest.mark.parametrize(
    "case", slow_but(CASES, "gemma3", "phi3_long", "qwen3", "gpt2", "neox", "plain")
)
def test_decoding_and_trees_have_the_logits_of_transformers(case):
    tokens, expected, tolerance = golden(case)
    model = loaded(case)
    rows, whole = tokens.shape
    _, new = plain_pass(model, tokens[:, :CUT])
    cache = empty_cache(model.config, rows, whole, jnp.dtype("float32"))
    cache = cache.keep(new, None, jnp.full(rows, CUT))
    # One token by itself, then a tree: a path to the end, and beside each node one that is wrong.
    for start, stop, width in ((CUT, CUT + 1, 1), (CUT + 1, whole, 2)):
        path = np.arange(stop - start)
        nodes = np.repeat(tokens[:, start:stop], width, axis=1)
        wrong = np.arange(nodes.shape[1]) % width == 1
        nodes[:, wrong] = (nodes[:, wrong] + 7) % model.config.vocab_size
        depth = np.repeat(path, width)
        above = (depth[:, None] > depth) & ~wrong
        tree_mask = np.broadcast_to(above | np.eye(depth.size, dtype=bool), (rows, *above.shape))
        at = np.broadcast_to(start + depth, nodes.shape)
        made = [jnp.asarray(each, jnp.int32) for each in (nodes, at)]
        logits, new = compiled(model, *made, cache, jnp.asarray(tree_mask))
        np.testing.assert_allclose(
            logits[:, ::width], expected[:, start:stop], rtol=0, atol=tolerance
        )
        along = jnp.asarray(np.broadcast_to(width * path, (rows, path.size)), jnp.int32)
        cache = cache.keep(new, along, jnp.full(rows, path.size))


def pair_of(target):
    """A target with drafts near it, and what drafts for these."""
    drafts = [near(target, seed) for seed in (1, 2, 3)]
    if target.config.windows:  # shorter than a path, through which a draft cannot look back
        config = dataclasses.replace(target.config, windows=())
        drafts = [replace(draft, config=config) for draft in drafts]
    size = target.config.vocab_size
    top_tokens_of = np.argsort(np.random.default_rng(0).random((size, size)), axis=1)[:, :4]
    table = pack(np.zeros((0, 2), np.int32), top_tokens_of, np.log(np.full((size, 4), 0.25)))
    corpus = corpus_of([top_tokens_of[0].tolist()])
    return Pair(target, None, drafts[:2], table, drafts[2], corpus=corpus)


# Every family with some way of drafting, every way of drafting with some family.
# `python -m tests.test_parity` runs all checkpoints with all ways.
FAMILIES = ["llama_biased", "mistral", "mistral_layers", "qwen2_windows", "qwen3", "phi3",
            "phi3_long", "olmo2", "gemma2", "gemma3", "gpt2", "opt", "neox", "granite",
            "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared",
            "gpt_oss", "smollm3", "olmo3", "exaone4", "cohere", "cohere2", "starcoder2", "arcee",
            "nemotron", "seed_oss", "ernie", "internlm3", "glm", "glm4", "ministral3", "glm4_moe",
            "minimax_m2", "dots1", "ernie_moe", "deepseek_v3", "deepseek_v2",
            "glm4_moe_lite"]  # fmt: skip
QUICK = ("mistral", "gemma3", "qwen2_moe", "gpt_oss")


DRAFTING = [name for name in METHODS if name != "none"]


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, marks=() if case in QUICK else pytest.mark.slow)
        for case, method in zip(FAMILIES, itertools.cycle(DRAFTING))
    ],
)
def test_greedy_texts_are_those_of_transformers(case, method):
    with np.load(GOLDEN / f"{case}.npz") as held:
        prompts, expected = held["tokens"][:, :CUT].tolist(), held["greedy"]
    pair = pair_of(loaded(case))
    drafter = registry.build(registry.setting_of(method, batch=len(prompts)), pair)
    made = generate(pair.target, drafter, prompts, max_new_tokens=expected.shape[1])
    np.testing.assert_array_equal(made.tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["opt", "neox"])
def test_trees_at_the_end_of_a_context_are_cut_off_there(case):
    """A table of positions ends with the context; what lies past it is never NaN, nor taken."""
    model = loaded(case)
    limit = model.config.max_positions
    prompts = [[1, 2, 3], [4] * 40]
    many = {"max_new_tokens": limit - 40}
    plain = generate(model, None, prompts, **many)
    made = generate(model, alone(model, (1,) * 9), prompts, **many)
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert made.steps[1] == -(-many["max_new_tokens"] // 10)
    past = jnp.asarray([[limit - 1, limit, limit + 7]])
    logits = compiled(model, jnp.asarray([[1, 2, 3]]), past, None, None)[0]
    assert np.isfinite(logits).all()


@pytest.mark.slow
def test_a_draft_with_a_window_drafts_within_it():
    model = load_model(GOLDEN / "mistral")
    with np.load(GOLDEN / "mistral.npz") as held:
        prompts, expected = held["tokens"][:, :CUT].tolist(), held["greedy"]
    made = generate(model, alone(model, (1,) * 5), prompts, max_new_tokens=expected.shape[1])
    np.testing.assert_array_equal(made.tokens, expected)
    assert made.steps.tolist() == [-(-(expected.shape[1] - 1) // 6)] * len(prompts)
    with pytest.raises(ValueError, match=r"window of 5 tokens cannot grow trees of 7 levels; .* 6"):
        alone(model, (1,) * 7)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_written_here_reads_back_the_same(case, tmp_path):
    model = loaded(case)
    save_model(model, tmp_path, dtype="float32")
    again = load_model(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again, model)


def test_configurations_read_as_transformers_means_them():
    read = {
        c: families.read_config(json.loads((GOLDEN / c / "config.json").read_text()))
        for c in LLAMAS
    }
    grouped, single, plain = (read[case] for case in LLAMAS)
    assert (grouped.num_heads, grouped.num_kv_heads, grouped.head_dim) == (6, 2, 10)
    assert grouped.tie_embeddings
    assert grouped.norm_eps == 1e-5
    assert (single.rope_theta, single.eos_ids, single.num_kv_heads) == (500.0, (3, 7), 1)
    assert (plain.head_dim, plain.num_kv_heads, plain.tie_embeddings) == (8, 3, False)


@pytest.mark.parametrize("case", ["llama_biased", "llama_linear", "llama_yarn"])
def test_rotary_scaling_beside_its_base_reads_the_same(case):
    """As the files of LLaMA 3.1 to 3.2 and Qwen 2.5 spell it."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    rope = config.pop("rope_parameters")
    old = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    read = families.read_config(old)
    assert read == loaded(case).config
    assert read.rope_stretch is not None
    assert read.rope_stretch.factor == rope["factor"]


def test_layers_with_windows_are_the_last_where_they_are_not_named():
    config = json.loads((GOLDEN / "qwen2_windows" / "config.json").read_text())
    del config["layer_types"]
    assert families.read_config(config).windows == (None, 4, 4)
    assert families.read_config(config | {"max_window_layers": 3}).windows == ()
    assert families.read_config(config | {"use_sliding_window": False}).windows == ()


def test_mistral_has_a_window_unless_it_says_none():
    config = json.loads((GOLDEN / "mistral" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    assert families.read_config(config | {"sliding_window": None}).windows == ()
    named = {"layer_types": ["full_attention", "sliding_attention"]}
    assert families.read_config(config | named).windows == (None, 5)
    config.pop("layer_types", None)
    del config["sliding_window"]
    assert families.read_config(config).windows == ()  # wider than the whole context
    long = config | {"max_position_embeddings": 8192}
    assert families.read_config(long).windows == (4096,) * layers


def test_what_a_family_cannot_say_is_not_written():
    model = load_model(GOLDEN / "plain")
    config = dataclasses.replace(model.config, windows=(4, 4))
    with pytest.raises(ValueError, match="a llama model cannot say"):
        families.write_config(config)


if __name__ == "__main__":
    for each in itertools.product(sys.argv[1:] or CASES, METHODS):
        test_greedy_texts_are_those_of_transformers(*each)
        print("equal:", *each, flush=True)
        timing.forget_programs()
