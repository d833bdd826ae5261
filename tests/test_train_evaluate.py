"""The tables of `train.evaluate`, against plain runs and sets; and its command."""

import json
import shutil

import jax
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from specjax.checkpoints.huggingface import save_model
from specjax.decoding.generate import generate
from specjax.draft import ExpansionDrafter
from tests.pairs import near, varied_model
from train import evaluate, runs, tables
from train.corpus import train_tokenizer
from train.runs import Task
from train.tables import Pair

TASK = Task([[5, 9, 2], [7] * 6, [63, 1]], 12, 3, 0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A target, a draft that is nearly it, and two that are worse."""
    target = varied_model(eos_ids=())
    good, *others = (near(target, seed, noise) for seed, noise in ((1, 0.1), (2, 0.4), (3, 0.4)))
    return Pair(target, {"single": [good], "boosted": [others[0], good, others[1]]})


@pytest.mark.slow
def test_figures_are_those_of_plain_generations(pair):
    """Tokens per step, nodes and spread of a batch whose last row is not counted."""
    shape = ((2, 1), (1,))
    drafts = pair.pools["boosted"][:2]
    found = runs.measured(pair.target, drafts, shape, TASK, 0.8)
    steps, nodes, made = [], [], []
    for start in (0, 2):  # rows of three, one of them the longest prompt again
        rows = [*TASK.prompts[start : start + 2], *[TASK.prompts[1]] * (1 if start == 0 else 2)]
        result = generate(
            jax.random.fold_in(jax.random.key(0), start), pair.target,
            ExpansionDrafter.of(drafts, shape), rows, max_new_tokens=12,
            sampling=Sampling(temperature=0.8),
        )  # fmt: skip
        own = len(TASK.prompts[start : start + 2])
        steps += result.steps[:own].tolist()
        nodes += result.nodes[:own].tolist()
        made += result.lengths[:own].tolist()
    assert found["prompts"] == 3
    assert found["tokens_per_step"] == pytest.approx(sum(made) / sum(steps))
    assert found["mean_nodes"] == pytest.approx(sum(nodes) / sum(steps))
    left = np.array(made) - found["tokens_per_step"] * np.array(steps)
    assert found["spread"] == pytest.approx(np.sqrt(1.5 * np.sum(left**2)) / sum(steps))


def test_a_prompt_may_be_drawn_several_times(pair):
    """Its draws count as one prompt, of which greedy rows have one."""
    drafts, shape = pair.pools["single"], ((1, 1),)
    task = TASK._replace(draws=3)
    found = runs.measured(pair.target, drafts, shape, task, 0.8)
    one = runs.measured(pair.target, drafts, shape, TASK, 0.8)
    same = runs.measured(pair.target, drafts, shape, TASK._replace(prompts=TASK.prompts * 3), 0.8)
    assert (found["prompts"], found["draws"]) == (3, 3)
    assert found["tokens_per_step"] == same["tokens_per_step"] != one["tokens_per_step"]
    greedy = runs.measured(pair.target, drafts, shape, task, 0.0)
    assert greedy == runs.measured(pair.target, drafts, shape, TASK, 0.0)
    assert greedy["draws"] == 1


def test_coverage_is_counted_along_the_targets_text(pair):
    rows = tables.coverage(pair, TASK)
    for temperature in tables.TEMPERATURES:
        of = {(row["pool"], row["of"]): row for row in rows if row["temperature"] == temperature}
        union = of["boosted", "union"]
        for k in range(1, 6):
            members = [of["boosted", f"draft {n}"][f"top{k}"] for n in range(3)]
            assert max(members) <= union[f"top{k}"] <= min(1.0, sum(members) + 1e-9)
        assert of["single", "union"] | {"pool": 0, "of": 0} == (
            of["boosted", "draft 1"] | {"pool": 0, "of": 0}
        )
    perfect = Pair(pair.target, {"single": [pair.target]})
    assert all(row["top1"] == 1 for row in tables.coverage(perfect, TASK)
               if not row["temperature"])  # fmt: skip


def test_the_best_member_is_the_one_nearest_to_the_target(pair):
    assert tables.best_member(pair.target, pair.pools["boosted"], TASK) == 1


def small(monkeypatch) -> None:
    """Few and shallow trees: every one is a compilation."""
    shapes = {"one": (((1, 1),), ((2,),)), "pool": (((1, 1), (1,), (1,)),)}
    monkeypatch.setattr(tables, "SHAPES", shapes)
    monkeypatch.setattr(tables, "TIMED", {kind: some[:1] for kind, some in shapes.items()})
    monkeypatch.setattr(tables, "BUDGETS", (2, 5))
    monkeypatch.setattr(tables, "WIDE", 2)
    monkeypatch.setattr(tables, "BUSHY", ((2,),))  # as FLAT, which is measured already
    monkeypatch.setattr(tables, "FLAT", ((2,),))
    monkeypatch.setattr(tables, "CHAIN", ((1, 1),))
    monkeypatch.setattr(tables, "wide", lambda width: ((width, 1),))


@pytest.mark.slow
def test_every_pool_is_given_its_best_shape_within_a_budget(pair, monkeypatch):
    small(monkeypatch)
    rows = tables.equal_nodes(pair, TASK, TASK)
    assert {(row["pool"], row["nodes"]) for row in rows} >= {("single", 2), ("boosted", 5)}
    for row in rows:
        assert row["mean_nodes"] <= row["nodes"]  # measured on the prompts it was chosen on
        drafts = pair.pools[row["pool"]]
        tried = {
            tables.shown(other): runs.measured(pair.target, drafts, other, TASK, row["temperature"])
            for other in tables.SHAPES["one" if row["pool"] == "single" else "pool"]
        }
        fitting = [o["tokens_per_step"] for o in tried.values() if o["mean_nodes"] <= row["nodes"]]
        assert row["tokens_per_step"] == tried[row["shape"]]["tokens_per_step"] == max(fitting)


def test_trees_tried_differ_and_are_as_many_for_one_draft_as_for_a_pool():
    for shapes in (tables.SHAPES, tables.TIMED):
        one, pool = shapes.values()
        assert len(set(one)) == len(one) == len(pool) == len(set(pool))
        assert {len(shape) for shape in one} == {1}
        assert {len(shape) for shape in pool} == {3}
    assert len({tables.shown(shape) for shape in tables.SHAPES["pool"]}) == 10


def test_shapes_fit_pools_of_any_number():
    shape = ((1, 1, 1), (1, 1), (1,))
    assert tables.fitted(shape, 2) == ((1, 1, 1), (1, 1))
    assert tables.fitted(shape, 5) == ((1, 1, 1), (1, 1), (1,), (1,), (1,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pair):
    """The pair as `train.run` leaves it, and a pool trained alike beside it."""
    there = tmp_path_factory.mktemp("pair")
    tokenizer = train_tokenizer(["def f(x): return x\n" * 50], 300)
    target = varied_model(eos_ids=(), vocab_size=320)
    save_model(target, there / "export" / "target", tokenizer=tokenizer, dtype="float32")
    for pool, seeds in (("export", (1, 2, 3)), ("alike", (4, 5, 6))):
        for number, seed in enumerate(seeds):
            save_model(
                near(target, seed),
                there / pool / "drafts" / str(number),
                tokenizer=None,
                dtype="float32",
            )
    lines = [json.dumps({"id": str(n), "prompt": f"def f{n}(x):"}) for n in range(4)]
    (there / "prompts.jsonl").write_text("\n".join(lines))
    (there / "export" / "dev.jsonl").write_text("\n".join(lines[:2]))
    return there


@pytest.mark.slow
def test_the_command_writes_all_tables_and_a_picture(folder, monkeypatch, capsys):
    small(monkeypatch)
    file, picture = folder / "tables.json", folder / "tables.png"
    arguments = ["--model", str(folder), "--alike", str(folder / "alike"), "--max-new-tokens", "8",
                 "--prompts", str(folder / "prompts.jsonl"), "--limit", "3", "--rows", "2",
                 "--json", str(file), "--plot", str(picture)]  # fmt: skip
    assert evaluate.main(arguments) == 0
    found = json.loads(file.read_text())
    assert {"coverage", "width", "rules", "equal_nodes", "equal_time", "env"} == found.keys()
    assert {row["pool"] for row in found["equal_nodes"]} == {"single", "alike", "boosted"}
    assert all({"nodes", "temperature", "tokens_per_step"} <= row.keys()
               for row in found["equal_nodes"])  # fmt: skip
    assert {row["width"] for row in found["width"]} == {1, 2}
    kinds = {(row["rule"], row["children"]) for row in found["rules"] if row["shape"] != "1,1"}
    assert kinds == {
        *(("naive", each) for each in ("drawn", "distinct", "top-k")),
        *(("multi-step", "drawn"), ("recursive", "distinct"), ("traversal", "distinct")),
    }
    chains = {(row["rule"], row["children"])
              for row in found["rules"] if row["shape"] == "1,1"}  # fmt: skip
    drawn = {(name, "drawn") for name in ("naive", "multi-step", "block")}
    assert chains == drawn | {("naive", "top-k")}
    assert {row["pool"] for row in found["equal_time"]} == {"none", "single", "alike", "boosted"}
    assert all(row["tokens_per_second"] > 0 for row in found["equal_time"])
    assert found["env"]["count"] == 3
    assert (found["env"]["development"], found["env"]["development_count"]) == ("dev.jsonl", 2)
    capsys.readouterr()
    (folder / "first.json").write_text(file.read_text())
    del found["coverage"]
    found["width"][0]["tokens_per_step"] = -1.0  # what is there is not measured again
    file.write_text(json.dumps(found))
    assert evaluate.main([*arguments, "--tables", "coverage,width"]) == 0
    again = json.loads(file.read_text())
    assert again["coverage"]
    assert again["width"][0]["tokens_per_step"] == -1.0
    assert evaluate.main([*arguments, "--tables", "coverage", "--seed", "1"]) == 0
    assert json.loads(file.read_text()).keys() == {"env", "coverage"}
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "Equal nodes" in capsys.readouterr().out
    other = [*arguments[:-3], str(folder / "other.json"), "--tables", "equal_nodes"]
    monkeypatch.setattr(tables, "_best", None)  # nothing is chosen again
    assert evaluate.main([*other, "--shapes", str(folder / "first.json")]) == 0
    assert json.loads((folder / "other.json").read_text())["equal_nodes"] == found["equal_nodes"]
    alone = [argument for argument in other if "alike" not in argument]  # without that pool
    assert evaluate.main([*alone, "--shapes", str(folder / "first.json")]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--limit", "0"], "--limit is 0; it must be at least 1."),
        (["--draws", "0"], "--draws is 0; it must be at least 1."),
        (["--rows", "1"], "--rows is 1; it must be at least 2."),
        (["--tables", "covrage"], "there is no table 'covrage'; there are coverage,"),
        (["--json", "."], "--json is ., which is a folder."),
        (["--json", "no/where.json"], "--json is no/where.json, in a folder that does not exist."),
        (["--plot", "plot.pdf"], "--plot is plot.pdf; it must end in .png."),
        (["--prompts", "none.jsonl"], "no prompt file at none.jsonl"),
        (["--alike", "nowhere"], "there are no drafts in nowhere"),
        (["--alike", "bundled"], "there are no drafts in bundled"),
        (["--shapes", "none.json"], "--shapes is none.json, which holds no table of equal nodes"),
    ],
)
def test_wrong_input_gets_one_sentence(folder, capsys, arguments, sentence):
    given = [] if arguments[0] == "--model" else ["--model", str(folder)]
    assert evaluate.main(["--max-new-tokens", "8", *given, *arguments]) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("train.evaluate: ")
    assert sentence in printed


def test_an_unknown_option_gets_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["--shape", "x"])
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1
    assert printed[0].startswith("train.evaluate: Unrecognized options: --shape")


def test_trees_of_another_seed_must_be_tried_for_a_pool_of_that_size():
    named = {"single": "1,1,1,1,1,1,1,1", "boosted": "1,1,1/1,1,1"}
    rows = [{"pool": pool, "nodes": 8, "temperature": 0.0, "shape": shape}
            for pool, shape in named.items()]  # fmt: skip
    found = tables.known_shapes(rows, {"single": 1, "boosted": 2})
    assert found[tables.Cell("boosted", 8, 0.0)] == ((1, 1, 1), (1, 1, 1))
    assert tables.known_shapes(rows, {"single": 1}).keys() == {("single", 8, 0.0)}
    with pytest.raises(ValueError, match="pool 'boosted' has 3 drafts, for which no tree"):
        tables.known_shapes(rows, {"boosted": 3})


def test_drafts_of_another_vocabulary_are_refused(folder, tmp_path, capsys):
    save_model(varied_model(vocab_size=300), tmp_path / "0", tokenizer=None, dtype="float32")
    arguments = ["--model", str(folder), "--alike", str(tmp_path), "--tables", "coverage"]
    assert evaluate.main(arguments) == 2
    sentence = "draft 0 has a vocabulary of 300 tokens and the model one of 320"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"made_from": {}}'])
def test_a_damaged_pair_is_refused(folder, tmp_path, capsys, text):
    shutil.copytree(folder / "export" / "drafts", tmp_path / "drafts")
    (tmp_path / "pair.json").write_text(text)
    assert evaluate.main(["--model", str(tmp_path)]) == 2
    assert "has no target, and no pair.json names one" in capsys.readouterr().err


@pytest.mark.slow
def test_tables_are_kept_however_the_pair_is_spelled(folder, monkeypatch, tmp_path):
    small(monkeypatch)
    file = tmp_path / "tables.json"
    arguments = ["--max-new-tokens", "8", "--prompts", str(folder / "prompts.jsonl"),
                 "--tables", "width", "--json", str(file)]  # fmt: skip
    assert evaluate.main(["--model", str(folder), *arguments]) == 0
    found = json.loads(file.read_text())
    found["width"][0]["tokens_per_step"] = -1.0
    file.write_text(json.dumps(found))
    assert evaluate.main(["--model", str(folder / "export"), *arguments]) == 0
    assert json.loads(file.read_text()) == found
    monkeypatch.setattr(tables, "BUDGETS", (1,))
    assert evaluate.main(["--model", str(folder), *arguments]) == 0
    assert json.loads(file.read_text())["width"][0]["tokens_per_step"] > 0


def test_the_bundled_pair_is_evaluated_as_readme_says(tmp_path):
    file = tmp_path / "tables.json"
    arguments = ["--tables", "coverage", "--limit", "2", "--max-new-tokens", "16"]
    assert evaluate.main([*arguments, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["env"]["prompts"] == "heldout.jsonl"
    assert found["env"]["development"] == "dev.jsonl"
    assert {row["of"] for row in found["coverage"]} >= {"draft 0", "draft 1", "draft 2", "union"}
