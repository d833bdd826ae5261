"""`benchmarks.report`: kept cells, comparisons, the page, and models for other programs."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cells, llama, page, peers, report, texts
from benchmarks.cells import Cells
from benchmarks.export import expanded, write_gguf
from benchmarks.papers import static
from benchmarks.rounds import Rounds, Run, Sampled, figures, size_of
from benchmarks.speed import Measuring, rules_of
from benchmarks.texts import Text
from specjax.base.pytree import replace
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import load_pair
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.methods import registry
from specjax.models.pruning import pruned
from specjax.models.transformer import unembed
from specjax.verify.rules import RULES
from tests.conftest import tiny_model
from tests.folders import pair_folder
from tests.pairs import generate
from tests.test_parity import plain_pass

IDS = np.array([40, 3, 7, 63, 0, 12, 21, 5, 30])
OTHERS = np.setdiff1d(np.arange(272), IDS)
GREEDY = Sampled(0.0)


class Clocked:
    """A contestant whose runs take what they are said to."""

    def __init__(self, name: str, seconds: float, steps: int):
        self.name, self.key, self.seconds, self.steps = name, {"name": name}, seconds, steps
        self.ran: list[str] = []

    def warm(self, text: Text, sampled: Sampled) -> None:
        pass

    def run(self, text: Text, sampled: Sampled) -> Run:
        self.ran.append(text.name)
        return Run([1, 2, 3, 4][: text.new_tokens], self.seconds, self.steps, 2)


def lengths(*sizes: int) -> list[Text]:
    return [Text(str(n), "g", tuple(range(size)), False, 4, 4) for n, size in enumerate(sizes)]


def test_a_run_that_is_killed_at_any_cell_goes_on_with_those_that_are_missing(
    tmp_path, monkeypatch
):
    prompts, write = lengths(3, 40, 5), cells.write_json
    for killed in range(6):
        plain, other = Clocked("plain", 4.0, 4), Clocked("other", 2.0, 2)
        kept = Cells(tmp_path / str(killed), {"weights": "a"})
        rounds = Rounds(kept, "speed", plain)
        left = iter(range(killed))

        def dying(file, value, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(file, value)

        monkeypatch.setattr(cells, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            rounds.run({GREEDY: [plain, other]}, prompts)
        monkeypatch.setattr(cells, "write_json", write)
        before = {file.name: file.read_text() for file in kept.folder.glob("*")}
        assert len(before) == killed
        found = rounds.run({GREEDY: [plain, other]}, prompts)
        after = {file.name: file.read_text() for file in kept.folder.glob("*")}
        assert len(after) == 6
        assert before.items() <= after.items()
        own = figures(list(found[GREEDY, "other"].values()))
        assert own["speedup"] == 2
        assert own["tokens_per_step"] == 2
        runs = len(other.ran)
        rounds.run({GREEDY: [plain, other]}, prompts)
        assert len(other.ran) == runs


def test_cells_depend_on_what_they_are_named_by(tmp_path):
    one, other = Cells(tmp_path, {"weights": "a"}), Cells(tmp_path, {"weights": "b"})
    one.keep("speed", {"prompt": [1]}, {"seconds": 1.5})
    assert one.held("speed", {"prompt": [1]}) == {"seconds": 1.5}
    assert other.held("speed", {"prompt": [1]}) is None
    assert one.held("peers", {"prompt": [1]}) is None
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-9])
    assert one.held("speed", {"prompt": [1]}) is None


def test_the_speed_up_is_that_of_a_texts_own_round():
    """A slow minute makes both slow; the median of ratios does not see it."""
    held = [
        {"tokens": 8, "seconds": s, "steps": 4, "nodes": 8, "repeated": 0.5, "same_as_plain": 8,
         "plain_tokens": 8, "plain_seconds": 2 * s} for s in (1.0, 50.0, 1.0)
    ]  # fmt: skip
    found = figures(held)
    assert found["speedup"] == 2
    assert found["tokens_per_second"] == pytest.approx(24 / 52)
    assert (found["nodes"], found["same"], found["repeated"]) == (2, 1, 0.5)
    others = figures([each | {"nodes": None} for each in held])  # peers tell no nodes
    assert (others["nodes"], others["tokens_per_step"]) == (None, 2)
    others = figures([each | {"nodes": None, "steps": None} for each in held])
    assert (others["nodes"], others["tokens_per_step"], others["speedup"]) == (None, None, 2)


def test_texts_of_one_compiled_size_run_together(tmp_path):
    plain = Clocked("plain", 1.0, 4)
    Rounds(Cells(tmp_path, {}), "speed", plain).run({GREEDY: [plain]}, lengths(40, 3, 50, 5))
    assert [size_of(lengths(3)[0]), size_of(lengths(40)[0])] == [(32, 32), (64, 32)]
    assert plain.ran == ["1", "3", "0", "2"]


def written(folder, lines, name="chats.jsonl") -> str:
    file = folder / name
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return str(file)


def test_prompts_are_grouped_and_only_chats_go_through_the_template(tmp_path):
    tokenizer = tokenizer_of(pair_folder() / "target")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    chats = written(tmp_path, [
        {"id": 1, "category": "writing", "turns": ["Hi", "More"]},
        {"id": 2, "category": "stem", "turns": ["Hi"]},
        {"id": 3, "category": "qa", "turns": ["Hi"]},
        {"id": 4, "category": "qa", "turns": ["Hi " * 50]},
        {"id": 5, "category": "qa", "turns": ["Ho"]},
    ])  # fmt: skip
    plain = written(tmp_path, [{"id": "HumanEval/0", "prompt": "def f():"}], "code.jsonl")
    found = texts.read([chats, plain], tokenizer, 40)
    assert [(t.group, t.chat, tokenizer.decode(t.tokens)) for t in found] == [
        ("mt_bench", True, "<Hi>"), ("mt_bench", True, "<Hi>"), ("qa", True, "<Hi>"),
        ("qa", True, "<Ho>"), ("code", False, "def f():"),
    ]  # fmt: skip
    assert len({text.name for text in found}) == 5
    assert [text.group for text in texts.read([chats, plain], tokenizer, 40, 1)] == [
        "mt_bench", "qa", "code",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r'line 1 of .* has neither "id" and "prompt" nor'):
        texts.read([written(tmp_path, [{"id": 1}], "odd.jsonl")], tokenizer, 40)
    with pytest.raises(ValueError, match="has at most 1 tokens"):
        texts.read([plain], tokenizer, 1)


def test_every_rule_that_trees_allow_is_compared_and_no_other():
    pair = load_pair(f"{pair_folder()}/target", f"{pair_folder()}/one,{pair_folder()}/two")
    measuring = Measuring(Cells(pair_folder() / "cells", {}), pair, [])
    wanted = {
        "chain": {"auto", "naive", "one-hot", "multi-step", "recursive", "traversal"},
        "tree": {"auto", "naive", "one-hot", "multi-step", "recursive"},
        "pool": {"auto", "naive", "one-hot"},
        "specexec": {"auto", "one-hot"},
        "lookup": {"auto", "one-hot"},
    }
    for name, rules in wanted.items():
        setting = registry.setting_of(name, drafts=2)
        found = rules_of(pair, setting)
        assert len(found) == len(set(found))
        assert set(found) >= rules
        for rule in found:  # generation refuses what is not lossless
            assert measuring.ours(setting, rule).name
    drawn = static(measuring, ((1, 2),), "multi-step", "drawn", "2")
    top = static(measuring, ((1, 2),), "naive", "top-k", "2")
    assert drawn.key != top.key
    assert RULES["multi-step"].refusal(top.drafter.construction)


def tables_in(text: str) -> list[list[dict[str, str]]]:
    """The tables of a page, with as many cells in every row as in its heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in block.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}, block
        assert all(re.fullmatch("---|--:", cell) for cell in rows[1])
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def test_the_command_writes_a_page_and_goes_on_where_it_was_ended(tmp_path, monkeypatch, capsys):
    folder = pair_folder()
    file = written(tmp_path, [
        {"id": "a", "category": "qa", "turns": ["def add(a, b):"]},
        {"id": "b", "prompt": "return a + b"},
    ])  # fmt: skip
    arguments = [
        "--model", f"{folder}/target", "--draft", f"{folder}/one", "--prompts", file,
        "--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--max-new-tokens", "20",
        "--tables", "coverage,speed,staged", "--methods", "chain", "--budgets", "2",
        "--temperatures", "0,1", "--no-rules",
    ]  # fmt: skip
    write, left = cells.write_json, iter(range(4))

    def dying(name, value):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(name, value)

    monkeypatch.setattr(cells, "write_json", dying)
    assert report.main(arguments) == 130
    said = capsys.readouterr().err
    assert "interrupted; the same command goes on with what is missing in" in said
    monkeypatch.setattr(cells, "write_json", write)
    before = {each.name: each.read_text() for each in (tmp_path / "run").iterdir()}
    assert len(before) == 4
    assert report.main(arguments) == 2  # staged is left out
    assert "staged: The table is left out: the method staged needs a second stage" in (
        capsys.readouterr().err
    )
    after = {each.name: each.read_text() for each in (tmp_path / "run").iterdir()}
    assert before.items() <= after.items()
    made = (tmp_path / "out" / "target.md").read_text()
    covered, overall, groups = tables_in(made)
    assert covered[0]["draft"] == "draft 0"
    assert covered[0]["top 1"] == "1.000"
    assert [row["T"] for row in covered if row["draft"] == "published"] == ["0", "stochastic"]
    assert [(row["T"], row["method, rule"]) for row in overall] == [
        ("0", "plain"), ("0", "chain:2, block"), ("1", "plain"), ("1", "chain:2, block"),
    ]  # fmt: skip
    assert [row["tokens per step"] for row in overall[::2]] == ["1.00", "1.00"]
    assert float(overall[1]["tokens per step"]) > 2.5  # the draft is the target
    assert all(set(row) >= {"qa", "chats"} for row in groups)
    assert "Prompts: 2, of up to" in made
    assert jax.__version__ in made
    assert str(tmp_path) not in made
    monkeypatch.setattr(cells, "write_json", None)  # nothing is measured again
    assert report.main(arguments) == 2
    assert (tmp_path / "out" / "target.md").read_text() == made


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--tables", "speeds"], "there is no table 'speeds'; there are speed, coverage,"),
        (["--limit", "0"], "--limit is 0"),
        (["--curve", "7,0"], "--curve is 0"),
        (["--methods", "chains"], "no method 'chains'"),
        ([], "no prompt file at missing.jsonl"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, capsys, given, sentence):
    folders = ["--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    model = ["--model", f"{pair_folder()}/target", "--prompts", "missing.jsonl"]
    assert report.main([*model, *folders, *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_page_has_the_command_without_folders_and_escapes_what_ends_a_cell():
    assert page.command_of(["--model", "/somewhere/smol.gguf", "--tables", "speed"]) == (
        "python -m benchmarks.report --model smol.gguf --tables speed"
    )
    found = page.table({"a": "A", "b": "B"}, [{"a": "x|y", "b": 1234.5}, {"a": None, "b": 0.1234}])
    assert found == "| A | B |\n| --- | --: |\n| x\\|y | 1,234 |\n|  | 0.12 |"


def of_tables(tied: bool):
    """A tiny model with the tokenizer's vocabulary, which knows nine of its tokens."""
    model = tiny_model(2, vocab_size=272, tie_embeddings=tied, num_layers=1)
    return pruned(model, IDS)


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_of_all_tokens_never_says_those_that_it_does_not_know(tied):
    small = of_tables(tied)
    whole = expanded(small)
    tokens = np.array([[40, 3, 200, 7, 12]])
    found, wanted = (np.asarray(plain_pass(model, tokens)[0]) for model in (whole, small))
    np.testing.assert_allclose(found[..., IDS], wanted[..., IDS], rtol=1e-5, atol=1e-5)
    # Hidden states that give every known token a logit below 0, where a row of zeros would win.
    rows = np.asarray(whole.unembedding, np.float64)
    hidden = np.linalg.lstsq(rows[IDS], -np.arange(1.0, 10.0), rcond=None)[0]
    states = np.stack([hidden, *np.random.default_rng(0).standard_normal((200, 32))], axis=1)
    logits = np.asarray(unembed(whole, jnp.asarray(states, jnp.float32)))
    assert (logits[IDS, 0] < -0.5).all()
    assert np.isin(logits.argmax(axis=0), IDS).all()
    assert (logits[OTHERS].max(axis=0) < logits[IDS].max(axis=0)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_is_the_same_from_the_gguf_file_that_is_written(tmp_path, tied):
    pytest.importorskip("gguf")
    small, file = of_tables(tied), tmp_path / "draft.gguf"
    write_gguf(small, tokenizer_of(pair_folder() / "target"), file)
    read = load_model(file, dtype="float32")
    assert (read.config.vocab_size, read.config.draft_vocab_size) == (272, None)
    tokens = np.array([[40, 3, 200, 7, 12]])
    found, wanted = (np.asarray(plain_pass(model, tokens)[0]) for model in (read, small))
    np.testing.assert_allclose(found[..., IDS], wanted[..., IDS], rtol=1e-4, atol=1e-4)
    assert np.isin(found.argmax(axis=-1), IDS).all()


def test_what_cannot_be_written_as_gguf_is_refused(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = tokenizer_of(pair_folder() / "target")
    model = tiny_model(vocab_size=272)
    other = replace(model, config=tiny_model(vocab_size=272, biases=("query",)).config)
    with pytest.raises(ValueError, match="only LLaMA's form"):
        write_gguf(other, tokenizer, tmp_path / "a.gguf")


def test_llama_cpp_continues_a_written_model_as_we_do(tmp_path):
    pytest.importorskip("llama_cpp")
    folder = pair_folder()
    tokenizer = tokenizer_of(folder / "target")
    target, draft = load_model(folder / "target"), of_tables(tied=False)
    for name, model in {"t": target, "d": draft}.items():
        write_gguf(model, tokenizer, tmp_path / f"{name}.gguf")
    session = llama.Session(tmp_path / "t.gguf", 256)
    drafts = [
        llama.ModelDrafts(llama.Session(tmp_path / f"{name}.gguf", 256)) for name in ("t", "d")
    ]
    text = Text("a", "g", tuple(tokenizer("def add(a, b):").input_ids), False, 24, 24)
    wanted = generate(target, None, [list(text.tokens)], max_new_tokens=24).tokens[0].tolist()
    runs = [
        llama.Theirs("plain", session).run(text, GREEDY),
        llama.Theirs("lookup", session, llama.lookup_drafts, 10).run(text, GREEDY),
        llama.Theirs("itself", session, drafts[0], 5).run(text, GREEDY),
        llama.Theirs("other", session, drafts[1], 5).run(text, GREEDY),
    ]
    assert [run.tokens for run in runs] == [wanted] * 4
    assert runs[0].steps == 24
    assert runs[2].steps == 4  # six tokens a pass


def test_peers_continue_as_we_do_or_a_sentence_says_why_not(tmp_path):
    """With a draft of some tokens; which peers there are depends on what is installed."""
    folder = pair_folder()
    pair = load_pair(f"{folder}/target")._replace(drafts=[of_tables(tied=False)])
    tokens = pair.tokenizer("def add(a, b):").input_ids
    text = Text("a", "g", tuple(tokens), False, 12, 12)
    wanted = generate(pair.target, None, [tokens], max_new_tokens=12).tokens[0].tolist()
    with peers.contestants(pair, None, tmp_path) as (theirs, missing):
        assert len(theirs) == 4 * llama.available() + 2 * peers.available()
        assert [each.run(text, GREEDY).tokens for each in theirs] == [wanted] * len(theirs)
    absent = {"llama.cpp": llama.available(), "transformers": peers.available()}
    for name in (name for name, there in absent.items() if not there):
        assert any(each.startswith(f"{name} is left out: ") for each in missing)
    assert bool(peers.versions(theirs)) == any(absent.values())
