"""What tune measures, writes and says; and what the other verbs make of its file."""

import itertools
import json

import jax
import numpy as np
import pytest

from pallas_kernels import machine
from specjax.__main__ import main
from specjax.base.sampling import Sampling, process
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli import tune as verb
from specjax.cli.options import Tune
from specjax.measure import distribution_tests, tune
from specjax.measure.rows import BenchRow
from specjax.methods import acceptance, registry, tuned
from specjax.methods.method import Setting
from specjax.methods.setting import from_json
from specjax.methods.tuned import Entry
from specjax.verify import token_wise
from tests.folders import answer, own_cache, pair_flags
from tests.pairs import PROMPTS, head, near, varied_model

__all__ = ["own_cache"]
FLAGS = ("--limit", "2", "--max-new-tokens", "12", "--budgets", "3")
METHODS = ("--methods", "chain,tree,lookup")


@pytest.fixture(autouse=True)
def small_read(monkeypatch):
    monkeypatch.setitem(machine.READ_BYTES, "cpu", 2**20)


@pytest.mark.slow
def test_what_tune_writes_is_what_the_other_verbs_take(tmp_path, capsys):
    file = str(tmp_path / "tuned.json")
    assert main(["tune", file, *FLAGS, *METHODS, "--temperatures", "0,0.8", *pair_flags()]) == 0
    printed = capsys.readouterr().out
    entries = tuned.read(file)
    assert [(entry.temperature, entry.batch) for entry in entries] == [(0.0, 1), (0.8, 1)]
    held = json.loads((tmp_path / "tuned.json").read_text())
    for estimates in held["env"]["promises"]:
        widths = [str(one["setting"]["widths"]) for one in estimates
                  if one["setting"]["method"] in ("chain", "tree")]  # fmt: skip
        assert {"chain", "lookup"} <= {one["setting"]["method"] for one in estimates}
        assert len(widths) == len(set(widths)) >= 1  # a tree that is the chain is tried once
        rates = [one["tokens_per_step"] / one["seconds"] for one in estimates]
        assert rates == sorted(rates, reverse=True)
        left_out = [rate for rate, one in zip(rates, estimates, strict=True) if one["bound"]]
        assert max(left_out, default=0) < 0.7 * rates[0]  # what could win is measured
    for entry in entries:
        assert entry.setting.method in ("none", "chain", "tree", "lookup")
        assert entry.measured.keys() == {"tokens_per_step", "tokens_per_second", "speedup"}
        assert bool(entry.expected) == (entry.setting.method != "none")
        assert printed.count(f"temperature {entry.temperature:g}, batch 1") == 1
    assert printed.count("taken: ") == 2
    found = answer(capsys, "generate", "return a", "--max-new-tokens", "8", "--config", file)
    assert from_json(found["setting"], "here") == entries[0].setting


def test_without_a_draft_chains_of_the_model_itself_are_tried(monkeypatch):
    target = pair_flags()[1]
    alone = load_pair(target)

    def tried(methods: str, pair: Pair = alone, **options: str) -> list[tuple[str | None, str]]:
        return verb._drafts(Tune("out.json", methods=methods, **options), pair)

    monkeypatch.setattr("specjax.checkpoints.pair.unable_here", lambda columns: None)
    own = [("self:4bit", "chain"), ("self:8bit", "chain")]
    assert tried("all") == [(None, "lookup,recycle,lookahead"), *own]
    assert tried("chain") == own
    assert tried("lookup") == [(None, "lookup")]
    assert tried("all", inflate="1M") == [(None, "lookup,recycle,lookahead")]
    assert tried("all", load_pair(target, "none")) == [(None, "lookup,recycle,lookahead")]
    assert tried("chain", load_pair(*pair_flags()[1::2])) == [(None, "chain")]
    monkeypatch.setattr("specjax.checkpoints.pair.unable_here", lambda columns: "XLA's")
    assert tried("all") == [(None, "lookup,recycle,lookahead")]


@pytest.mark.slow
def test_a_run_that_is_ended_leaves_what_it_found_beside_the_old_file(tmp_path, monkeypatch):
    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "tuned.json"
    file.write_text("from an earlier run")
    monkeypatch.setattr("specjax.cli.tune.fastest_of", ended)
    arguments = ["--methods", "chain", "--temperatures", "0", *pair_flags()]
    assert main(["tune", str(file), *FLAGS, *arguments]) == 130
    assert file.read_text() == "from an earlier run"
    held = json.loads((tmp_path / "tuned.json.partial").read_text())
    assert held["complete"] is False
    assert {one["setting"]["method"] for one in held["env"]["promises"][0]} == {"chain"}


def row(method: str, rate: float) -> BenchRow:
    """A row of two tokens per step, 10 tokens per second being those of plain decoding."""
    return BenchRow(
        registry.setting_of(method), 0, 0.0, 1, "float32", prompts=1, new_tokens=4, target_steps=2,
        tokens_per_step=2.0, mean_nodes=0.0, seconds=4 / rate, tokens_per_second=rate,
        plain_tokens_per_second=10.0, speedup=rate / 10, round_speedups=[rate / 10], spread=None,
        passes=2, repeated_8grams=0.0,
    )  # fmt: skip


def test_the_fastest_that_was_run_is_taken():
    rows = [row(name, rate) for name, rate in (("none", 10.0), ("chain", 30.0), ("lookup", 20.0))]
    estimates = [tune.Estimate(registry.setting_of(name), 3.0, 0.1) for name in ("lookup", "chain")]
    entry = tune.entry_of(rows, 10.0, estimates, 0.5, 1)
    assert entry.setting == registry.setting_of("chain")
    assert entry.measured == {"tokens_per_step": 2.0, "tokens_per_second": 30.0, "speedup": 3.0}
    assert entry.expected == pytest.approx(
        {"tokens_per_step": 3.0, "tokens_per_second": 30.0, "speedup": 3.0}
    )
    rows[0] = row("none", 50.0)
    assert tune.entry_of(rows, 50.0, estimates, 0.5, 1)[2:4] == (Setting(), {})


def test_the_nearest_entry_of_the_same_kind_is_picked():
    entries = [
        Entry(temperature, batch, registry.setting_of("chain", budget=number), {}, {})
        for number, (temperature, batch) in enumerate(((0, 1), (0.3, 1), (1.0, 1), (1.0, 8)), 1)
    ]
    asked = {(0.0, 1): 1, (0.0, 9): 1, (0.01, 1): 2, (0.9, 1): 3, (0.9, 6): 4, (5.0, 2): 3}
    for (temperature, batch), number in asked.items():
        assert tuned.pick(entries, temperature, batch) is entries[number - 1]
    assert tuned.pick(entries[:1], 0.7) is entries[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no settings; write one with tune"),
        ('{"settings": [{"batch": 1, "setting": {}}]}', "setting 0 has no temperature"),
        ('{"settings": [3]}', "setting 0 is 3; it must be an object"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"widhts": [1]}}]}',
         "has 'widhts'; the nearest name there is is 'widths'"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"growth": {"budged": 1}}}]}',
         "growth has 'budged'; the nearest name there is is 'budget'"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"growth": {"budget": 0}}}]}',
         "budget is 0; it must be at least 1"),
        ('{"settings": [{"temperature": null, "batch": 1, "setting": {}}]}',
         "setting 0 has the temperature None; it must be a number of at least 0"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"stage": "moon"}}]}',
         "no stage 'moon'; there are ngram and draft"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"method": "lookup"}}]}',
         "the method lookup needs growth; the setting names none"),
        ('{"settings": [{"temperature": 0, "batch": 1, "setting": {"method": "bush"}}]}',
         "no method 'bush'"),
    ],
)  # fmt: skip
def test_a_file_that_tune_did_not_write_is_refused(tmp_path, text, sentence, capsys):
    file = tmp_path / "tuned.json"
    file.write_text(text)
    assert main(["generate", "x", "--config", str(file), *pair_flags()]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "x", "--config", "nowhere.json"], "nowhere.json, which cannot be read"),
        (["tune", "nowhere/x.json"], "FILE is nowhere/x.json, in a folder that does not exist"),
        (["tune", "/proc/x.json"], "FILE is /proc/x.json, which cannot be written: No such file"),
        (["tune", "/dev/full"], "FILE is /dev/full, which cannot be written: No space left"),
        (["tune", "x.json", "--budgets", "0"], "--budgets is 0"),
        (["tune", "x.json", "--methods", "bush"], "no method 'bush'"),
        (["tune", "x.json", "--temperatures", "-1"], "--temperatures is '-1'"),
        (["tune", "x.json", "--dtype", "int4"], "no dtype 'int4'"),
    ],
)
def test_wrong_options_are_refused(arguments, sentence, capsys):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_certificate_of_a_file_takes_no_tree(tmp_path, capsys):
    file = tmp_path / "tuned.json"
    tuned.write(file, [Entry(0.0, 1, registry.setting_of("chain"), {}, {})], {})
    assert main(["verify", "--config", str(file), "--budget", "3", *pair_flags()]) == 2
    assert "--config names the tree and budget" in capsys.readouterr().err


def test_a_file_and_a_method_are_too_much(tmp_path, capsys):
    file = tmp_path / "tuned.json"
    tuned.write(file, [Entry(0.0, 1, Setting(), {}, {})], {})
    flags = ["--config", str(file), "--method", "chain", *pair_flags()]
    assert main(["generate", "x", *flags]) == 2
    assert "--config names the method, tree and budget" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_positional_acceptance_is_that_of_plain_passes(temperature):
    target = varied_model(1)
    draft = near(target, 2, 0.5)
    texts = [[*prompt, 7, 3, 9, 11, 2, 40] for prompt in PROMPTS]
    starts = [len(prompt) for prompt in PROMPTS]
    found = acceptance.measured(target, draft, texts, starts, temperature, 3, ranks=4).by_rank
    prefixes = [text[:at] for text, start in zip(texts, starts, strict=True)
                for at in range(start, len(text))]  # fmt: skip
    of_target, of_draft = (
        distribution_tests.logits_after(target, prefixes),
        distribution_tests.logits_after(draft, prefixes),
    )
    slow = by_rank if temperature == 0 else by_trial
    expected = np.mean([slow(*pair, temperature) for pair in zip(of_target, of_draft, strict=True)],
                       axis=0)  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert 0.05 < found.sum() <= 1 + 1e-6


def test_survival_is_what_block_verification_keeps():
    """Along texts of p, the expectation of the least q/p is that of the rule's own weights under q.

    All texts of three tokens over distributions that depend on the text; the weights are those of
    Algorithm 2 of arXiv 2403.10444.
    """
    noise = np.random.default_rng(0)
    p, q = (noise.dirichlet(np.ones(3), size=1 + 3 + 9) for _ in range(2))
    found, expected = np.zeros(3), np.zeros(3)
    for text in itertools.product(range(3), repeat=3):
        nodes = [0, 1 + text[0], 4 + 3 * text[0] + text[1]]
        of_p, of_q = (np.array([probs[n, t] for n, t in zip(nodes, text, strict=True)])
                      for probs in (p, q))  # fmt: skip
        found += of_p.prod() * acceptance._survival([of_q / of_p], 3)[0]
        weight, weights = 1.0, []
        for ratio in of_p / of_q:
            weight = min(weight * ratio, 1)
            weights.append(weight)
        expected += of_q.prod() * np.array(weights)
    np.testing.assert_allclose(found, expected)
    assert (np.diff(found) < 0).all()
    tokenwise = np.minimum(p, q).sum(axis=1)[0]
    assert found[0] == pytest.approx(tokenwise)


def test_steps_begin_where_a_chain_ends():
    """At temperature 0 there is one way: 2 tokens kept, 1 given, 7 kept, 1 given, 0 kept, ..."""
    right = [1, 1, 0, *[1] * 9, 0, 0, 1]
    survival = acceptance._survival([np.array(right, float)], 8)
    begins = acceptance._begins(survival[:, :7])
    assert np.flatnonzero(begins > 0.5).tolist() == [0, 3, 11, 13, 14]
    assert np.isnan(survival[8, 7])
    assert survival[3, 6] == pytest.approx(1)
    assert survival[0, 2:].tolist() == [0] * 6  # a path that is dead stays so


def test_survival_is_that_of_plain_passes():
    target = varied_model(1)
    draft = near(target, 2, 0.5)
    text, start = [*PROMPTS[0], 7, 3, 9, 11, 2, 40], len(PROMPTS[0])
    found = acceptance.measured(target, draft, [text], [start], 0.7, 4)
    prefixes = [text[:at] for at in range(start, len(text))]
    rows = Sampling(0.7).rows(len(prefixes))
    logits = [distribution_tests.logits_after(model, prefixes) for model in (target, draft)]
    distributions = [
        np.asarray(process(jax.numpy.asarray(own)[:, None], rows))[:, 0] for own in logits
    ]
    p, q = (own[np.arange(len(prefixes)), text[start:]] for own in distributions)
    least = np.insert(acceptance._survival([q / p], 4), 0, 1, axis=1)
    begins, expected = acceptance._begins(least[:, 1:]), 1.0
    for depth in range(1, 5):
        there = np.isfinite(least[:, depth])
        before, after = ((begins * least[:, d])[there].sum() for d in (depth - 1, depth))
        expected *= after / before
        assert found.survival[depth - 1] == pytest.approx(expected, rel=1e-3)
    rows = found.by_depth
    np.testing.assert_allclose(np.cumprod(rows[:, 0]), found.survival)
    assert (rows >= 0).all()
    assert (rows.sum(axis=1) <= 1 + 1e-6).all()


def test_survival_of_a_head_is_of_the_level_that_each_token_has():
    ratios = [np.array([1.0, 0.5, 1.0, 1.0]), np.array([0.0, 0.5, 0.25, 1.0])]
    found = acceptance._survival(ratios, 3)
    expected = [  # the third token is of the last level that there is
        [1, 0.5, 0.5 * 0.25], [0.5, 0.5 * 0.25, 0.5 * 0.25 * 1], [1, 1, np.nan],
        [1, np.nan, np.nan],
    ]  # fmt: skip
    np.testing.assert_allclose(found, expected)


def test_a_head_is_tuned_as_a_draft_is():
    """A head that is right about nothing but what it reads: survival falls with the level."""
    target = varied_model(1, num_layers=3, hidden_size=32)
    text, start = [*PROMPTS[0], 7, 3, 9, 11, 2, 40], len(PROMPTS[0])
    found = acceptance.measured(target, head(target, 1), [text], [start], 0.7, 4)
    assert 0 < found.survival[0] <= 1
    assert (np.diff(found.survival) <= 0).all()
    assert 0 < found.by_rank[0] <= 1


def test_depths_that_no_text_has_survive_never():
    target = varied_model(1)
    text = [*PROMPTS[0], 7, 3]
    found = acceptance.measured(target, near(target, 2, 0.5), [text], [len(text) - 2], 0.7, 4)
    assert (found.survival[:2] > 0).all()
    assert found.survival[2:].tolist() == [0, 0]
    assert (found.by_depth[2:, 0] == 0).all()


def by_rank(of_target, of_draft, _):
    order = np.argsort(-of_draft, kind="stable")
    return (order[:4] == np.argmax(of_target)).astype(float)


def by_trial(of_target, of_draft, temperature):
    """The shipped trial, its token averaged over."""
    distributions = [process(jax.numpy.asarray(x)[None, None], Sampling(temperature).rows(1))[0, 0]
            for x in (of_target, of_draft)]  # fmt: skip
    now, q, reached, found = distributions[0], distributions[1], 1.0, []
    for _ in range(4):
        trials = [token_wise.multi_step(now, q, jax.numpy.int32(x)) for x in range(q.shape[0])]
        accept = float(sum(q[x] * trial.accept for x, trial in enumerate(trials) if q[x] > 0))
        found.append(reached * accept)
        reached *= 1 - accept
        now = trials[0].residual
    return np.asarray(found)
