"""What `specjax info` and `check-pair` say, and drafts whose tables are padded otherwise."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, process
from specjax.checkpoints import tokenizers
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.decoding.generate import generate
from specjax.decoding.request import prepare
from specjax.draft import ExpansionDrafter
from specjax.measure.distribution_tests import draw_texts, g_test, logits_after
from specjax.models import memory
from specjax.models.transformer import initialize, unembed
from specjax.trees.construction import DISTINCT, DRAWN
from tests.conftest import tiny_config
from tests.folders import VOCABULARY, pair_folder


@pytest.fixture
def folders(tmp_path):
    """A target, and drafts: as it is, with a padded table, with a cut one, with other tokens."""
    model = load_model(pair_folder() / "target")
    tokenizer = tokenizer_of(pair_folder() / "target")
    save_model(model, tmp_path / "target", tokenizer=tokenizer, dtype="float32")
    save_model(model, tmp_path / "same", tokenizer=tokenizer, dtype="float32")
    table = jnp.pad(model.embedding, ((0, 16), (0, 0)), constant_values=9.0)
    config = dataclasses.replace(model.config, vocab_size=VOCABULARY + 16)
    padded = replace(model, embedding=table, config=config)
    save_model(padded, tmp_path / "padded", tokenizer=tokenizer, dtype="float32")
    small = replace(
        model,
        embedding=model.embedding[:250],
        config=dataclasses.replace(model.config, vocab_size=250),
    )
    save_model(small, tmp_path / "small", tokenizer=tokenizer, dtype="float32")
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    told = json.loads(file.read_text())
    vocab = told["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[5:7]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(told))
    return tmp_path


def checked(capsys, *names):
    code = main(["check-pair", *map(str, names), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_check_pair_tells_padding_from_other_tokens(folders, capsys):
    drafts = [folders / name for name in ("same", "padded", "other")]
    code, report = checked(capsys, folders / "target", *drafts)
    assert code == 1
    assert not report["works"]
    assert [one["works"] for one in report["drafts"]] == [True, True, False]
    said = [one["findings"][0]["said"] for one in report["drafts"]]
    assert said[0] == f"the same {VOCABULARY} tokens"
    assert said[1] == f"the same {VOCABULARY} tokens; tables of 272 and 288 rows"
    assert said[2].startswith(f"2 of {VOCABULARY} tokens differ, such as 5 is ")
    code, report = checked(capsys, folders / "target", folders / "same", folders / "padded")
    assert (code, report["works"]) == (0, True)


def test_check_pair_reads_no_weights(folders, capsys):
    for name in ("target", "same"):
        (folders / name / "model.safetensors").unlink()
    assert main(["check-pair", str(folders / "target"), str(folders / "same")]) == 0
    printed = capsys.readouterr().out
    assert "  can draft for the model" in printed
    for what in ("vocabulary", "end tokens", "context", "memory"):
        assert f"  {what}: " in printed


def test_check_pair_names_tables_too_small_and_contexts_too_short(folders, capsys):
    file = folders / "same" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 9}))
    _, report = checked(capsys, folders / "target", folders / "small", folders / "same")
    small, short = report["drafts"]
    assert small["works"]
    assert small["findings"][0]["said"] == "the same 272 tokens; tables of 272 and 250 rows"
    assert short["works"]
    assert "9 positions for 256: past them" in short["findings"][2]["said"]


def test_tokens_are_compared_whatever_file_they_are_in(folders, capsys):
    """As OPT's are: `vocab.json` and `merges.txt`, and nothing that the library writes today."""
    for name in ("target", "same", "other"):
        told = json.loads((folders / name / "tokenizer.json").read_text())["model"]
        (folders / name / "tokenizer.json").unlink()
        (folders / name / "vocab.json").write_text(json.dumps(told["vocab"]))
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in told["merges"])
        (folders / name / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        config = {"tokenizer_class": "GPT2Tokenizer"}
        (folders / name / "tokenizer_config.json").write_text(json.dumps(config))
    code, report = checked(capsys, folders / "target", folders / "same", folders / "other")
    assert code == 1
    same, other = (one["findings"][0]["said"] for one in report["drafts"])
    assert same.startswith(f"the same {VOCABULARY} tokens")
    assert other.startswith(f"2 of {VOCABULARY} tokens differ, such as 5 is ")


def test_check_pair_says_whether_there_is_memory_for_it(folders, capsys, monkeypatch):
    needed = checked(capsys, folders / "target", folders / "same", "--dtype", "bfloat16")[1]
    assert "in bfloat16" in needed["target"]
    for spare, works, words in (
        (1 << 10, False, "here are 0.0 MiB to spare, and the weights take 0.1 MiB"),
        (1 << 19, True, "here are 0.5 MiB to spare, for "),
        (1 << 30, True, "here are 1.00 GiB to spare"),
    ):
        monkeypatch.setattr(memory, "available", lambda mesh, spare=spare: spare)
        code, report = checked(capsys, folders / "target", folders / "same")
        assert (code, report["works"]) == (1 - works, works)
        assert words in report["drafts"][0]["findings"][-1]["said"]


def test_the_bundled_pool_may_be_one_of_several(capsys):
    code, report = checked(capsys, "bundled", "bundled", "bundled/0")
    assert code == 0
    assert [one["draft"].partition(":")[0].rsplit("/", 1)[1] for one in report["drafts"]] == [
        "0", "1", "2", "0",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_draft_with_rows_for_some_tokens_only_changes_no_text(folders):
    pair = load_pair(str(folders / "target"), str(folders / "small"), dtype="float32")
    assert pair.drafts[0].config.num_known == 250
    drafter = ExpansionDrafter.of(pair.drafts, (1, 1, 1))
    prompts = [[3, 4, 5], [260, 271]]  # of which it has none
    asked = {"max_new_tokens": 12, "stop_at_eos": False}
    plain = generate(jax.random.key(0), pair.target, None, prompts, **asked)
    made = generate(jax.random.key(0), pair.target, drafter, prompts, **asked)
    np.testing.assert_array_equal(made.tokens, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "children"), [((1, 1), DRAWN), ((2, 1), DISTINCT)])
def test_a_draft_with_rows_for_some_tokens_only_changes_no_distribution(folders, shape, children):
    """Tokens that it cannot propose are likely here, and come as often as the target has them."""
    pair = load_pair(str(folders / "target"), str(folders / "small"), dtype="float32")
    table = pair.target.embedding.at[250:260].mul(3)
    target = replace(pair.target, embedding=table)
    drafter = ExpansionDrafter.of(pair.drafts, shape, children)
    sampling = Sampling(temperature=1.0)
    logits = logits_after(target, [[3, 4, 5]])
    p = np.asarray(process(jnp.asarray(logits)[None], sampling.rows(1)))[0, 0]
    assert 0.1 < p[250:].sum() < 0.9
    texts = draw_texts(jax.random.key(1), target, drafter, [3, 4, 5], sampling, "auto", 4096)
    assert g_test(texts.tokens[:, 0], p).p_value > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same", "padded"])
def test_padded_tables_draft_as_well_as_others(folders, name):
    pair = load_pair(str(folders / "target"), str(folders / name), dtype="float32")
    drafter = ExpansionDrafter.of(pair.drafts, (1, 1, 1))
    prompts = [[3, 4, 5], [9, 9]]
    asked = {"max_new_tokens": 12, "stop_at_eos": False}
    plain = generate(jax.random.key(0), pair.target, None, prompts, **asked)
    made = generate(jax.random.key(0), pair.target, drafter, prompts, **asked)
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert made.steps.tolist() == [3, 3]  # the draft is the target: all is accepted


def test_tokens_that_only_pad_are_never_likely():
    model = initialize(jax.random.key(0), load_model(pair_folder() / "target").config)
    draft = tokenizers.fitted(model, 300, 270)
    logits = unembed(draft, jnp.full((model.config.hidden_size, 1), -50.0))[:, 0]
    assert logits.shape == (300,)
    np.testing.assert_array_equal(logits[:270], unembed(model, jnp.full((32, 1), -50.0))[:270, 0])
    assert float(jax.nn.softmax(logits)[270:].sum()) == 0
    assert tokenizers.fitted(model, 260, 250).embedding.shape[0] == 260


def test_a_draft_of_other_tokens_is_refused_when_it_is_loaded(folders):
    words = r"other\) has another vocabulary than the model: 2 of 272"
    with pytest.raises(ValueError, match=words):
        load_pair(str(folders / "target"), str(folders / "other"))


def test_a_tokenizer_that_cannot_be_read_is_named(folders, capsys):
    (folders / "other" / "tokenizer.json").write_text("{")
    assert main(["check-pair", str(folders / "target"), str(folders / "other")]) == 2
    assert "other/tokenizer.json is not valid JSON" in capsys.readouterr().err


def test_special_tokens_count():
    found = tokenizers.vocabulary_of(Files(pair_folder() / "target"), tiny_config())
    assert sorted(found.contents.values()) == list(range(VOCABULARY))
    assert tokenizers.vocabulary_of(Files(pair_folder()), tiny_config()).contents is None


def test_info_tells_the_plan_and_refuses_before_it_loads(capsys, monkeypatch):
    model = str(pair_folder() / "target")
    monkeypatch.setattr(memory, "available", lambda mesh: 1 << 20)
    assert main(["info", "--model", model, "--batch", "512", "--json"]) == 2
    printed = capsys.readouterr()
    assert "which has 1.0 MiB to spare" in printed.err
    assert json.loads(printed.out)["available_bytes"] == 1 << 20
    assert main(["info", "--model", model, "--batch", "512"]) == 2
    printed = capsys.readouterr().out
    assert "caches: 20.0 MiB of each device" in printed  # 128 + 128 + 16 tokens, to 320 slots
    assert "available: 1.0 MiB of each device" in printed
    assert "longest text: 0" in printed
    assert "method" not in printed


def test_info_says_how_long_a_text_may_be(capsys, monkeypatch):
    flags = ["info", "--model", str(pair_folder() / "target"), "--batch", "16", "--json"]
    assert main(flags) == 0
    most = json.loads(capsys.readouterr().out)["total_bytes"] * 9 // 10
    monkeypatch.setattr(memory, "available", lambda mesh: most)
    assert main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    longest = found["longest_text"]
    assert 1 < longest < found["length"] == 256
    assert found["total_bytes"] > found["available_bytes"]
    assert "method_greedy" in found
    assert main([*flags, "--length", str(longest)]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] <= most
    target, key = load_model(pair_folder() / "target"), jax.random.key(0)
    new = min(128, longest - 1)
    prompts = [[1] * (longest - new)] * 16
    prepare(key, target, None, prompts, max_new_tokens=new)  # which it takes
    assert main([*flags, "--length", str(longest + 1)]) == 2
    assert f"texts of {longest + 1} tokens and the weights would take" in capsys.readouterr().err


def test_generate_refuses_with_numbers_what_cannot_fit(monkeypatch):
    target = load_model(pair_folder() / "target")
    monkeypatch.setattr(memory, "available", lambda mesh: 1 << 20)
    words = r"64 texts of 128 tokens in trees of 1 nodes would take .* MiB .* 1.0 MiB to spare"
    with pytest.raises(ValueError, match=words):
        prepare(jax.random.key(0), target, None, [[1, 2]] * 64, max_new_tokens=20)


def test_a_plan_is_near_what_the_compiler_takes():
    """Temporaries and results of the whole program, at sizes where arrays outweigh the rest."""
    from specjax.decoding.generate import generate_jit

    target = load_model(pair_folder() / "target")
    prompts = [[1, 2, 3]] * 16
    request = prepare(jax.random.key(0), target, None, prompts, max_new_tokens=200)
    compiled = generate_jit.lower(**request._asdict()).compile().memory_analysis()
    taken = compiled.temp_size_in_bytes + compiled.output_size_in_bytes
    rows, width = request.rows.prompt.shape
    planned = memory.plan(memory.load_of(target), [], rows, width, request.slots, 1).beside_weights
    assert 0.5 < planned / taken < 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["v7"], "'v7' is no known hardware; there are v5e, v6e, h100."),
        (["v5e:2by2"], "'v5e:2by2' is not a kind and a size such as v5e:2x2."),
        (["v5e"], "v5e needs libtpu, which is not installed: pip install 'specjax[tpu]'."),
        (["h100"], "needs jax_cuda13_plugin, which is not installed: pip install 'specjax[cuda]'."),
        (["here", "--mesh", "model=99"], "the mesh needs 99 devices; here has"),
        (["here", "--offload", "disk"], "leave out --offload, --memory."),
        (["here", "--length", "1"], "--length is 1; it must be at least 2."),
        (["here", "--rows", "3"], "--rows is of a server's steps; add --serve."),
        (["here", "--settings", "none"], "--settings is of a server's steps; add --serve."),
        (["here", "--serve", "--rows", "0"], "--rows is 0; it must be at least 1."),
        (["here", "--serve", "--settings", "tre"], "'tre'"),
        (["here", "--serve", "--batch", "4"], "--batch is 4, of texts that start together"),
    ],
)
def test_what_cannot_be_compiled_for_is_said_in_a_sentence(options, words, capsys, monkeypatch):
    find = importlib.util.find_spec
    absent = ("libtpu", "jax_cuda13_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in absent else find(n))
    assert main(["info", "--compile-for", *options]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out
    assert len(said.err.splitlines()) == 1


def test_quantized_models_are_not_compiled_ahead(folders, capsys):
    target, packed = str(folders / "target"), str(folders / "packed")
    assert main(["quantize", target, packed, "--bits", "8"]) == 0
    capsys.readouterr()
    assert main(["info", "--model", packed, "--compile-for", "here"]) == 2
    words = "--compile-for compiles models in float32 or bfloat16; " + packed + " is quantized."
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_plain_decoding_is_compiled_once_for_several_drafts(folders, capsys):
    drafts = [str(folders / name) for name in ("other", "same", "small")]
    options = ["--compile-for", "here", "--dtype", "float32", "--json"]
    assert main(["check-pair", str(folders / "target"), *drafts, *options]) == 1
    report = json.loads(capsys.readouterr().out)
    found = [
        [each["what"] for each in one["findings"] if each["what"].startswith("here")]
        for one in report["drafts"]
    ]
    assert found[0] == []  # of another vocabulary
    assert [what.split(", ")[1].split(" ")[0] for what in found[1]] == [
        "plain",
        "specexec:15",
        "chain:7",
    ]
    assert [what.split(", ")[1].split(" ")[0] for what in found[2]] == ["specexec:15", "chain:7"]


def test_programs_are_compiled_for_what_is_here_too(folders, capsys):
    names = ["--model", str(folders / "target"), "--draft", str(folders / "same")]
    code = main(["info", *names, "--compile-for", "here", "--length", "40", "--dtype", "float32"])
    said = capsys.readouterr()
    assert code == 0
    title, *lines = said.out.splitlines()
    assert "in float32 for 1 device of here, " in title
    assert title.endswith("GiB each; 1 x 40 tokens")
    assert [line.split(": ")[0] for line in lines] == [
        "plain", "specexec:15 at temperature 0", "chain:7 at temperature 0.8",
    ]  # fmt: skip
    assert all("weights and arguments" in line for line in lines)


SERVED = ("--serve", "--rows", "1", "--length", "40", "--dtype", "float32", "--compile-for", "here")


def test_the_steps_of_a_server_are_compiled_for_what_is_here(folders, capsys):
    names = ["--model", str(folders / "target"), "--draft", str(folders / "same")]
    assert main(["info", *names, *SERVED, "--settings", "chain:1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["length"], report["devices"]) == (1, 40, 1)
    sizes = [(each["setting"], each["rows"], each["columns"]) for each in report["programs"]]
    assert sizes == [("chain:1", 1, 2), ("none", 1, 1)]
    chain, plain = report["programs"]
    assert chain["fits"]
    assert chain["seconds"] > 0
    assert chain["aliased_bytes"] == plain["aliased_bytes"] > 0  # the state, given away


@pytest.mark.slow
def test_without_settings_they_are_those_of_the_method_that_auto_takes(folders, capsys):
    names = ["--model", str(folders / "target"), "--draft", str(folders / "same")]
    assert main(["info", *names, *SERVED]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith("each; 1 x 40 tokens")
    assert [line.split(": ")[0] for line in lines] == ["chain:7, rows 1, columns 8"]


def test_steps_of_a_server_need_hardware(capsys):
    assert main(["info", "--serve"]) == 2
    assert "name the hardware too, such as --compile-for h100, or here." in capsys.readouterr().err
