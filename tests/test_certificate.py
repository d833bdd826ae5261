"""The certificate passes on a lossless pair, and fails on a rigged one."""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.base.pytree import replace
from specjax.base.sampling import Purpose, draw, fold
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli import verify
from specjax.cli.options import Verify
from specjax.cli.verify import checks_of, settings_of
from specjax.decoding import stepping
from specjax.draft import ExpansionDrafter
from specjax.measure import certificate, distribution_tests
from specjax.measure.distribution_tests import GTest
from specjax.measure.prompts import Prompt
from specjax.methods import registry
from specjax.verify import rules, token_wise
from tests.folders import answer, own_cache, pair_flags

__all__ = ["own_cache"]
pytestmark = pytest.mark.long_running
TRAVERSE = rules.traverse
MATCH = rules.match
SMALL = Verify(methods="tree", tree="2,1", prompts=2, max_new_tokens=8, samples=1024)


@pytest.fixture(scope="module")
def pair() -> Pair:
    flags = pair_flags()
    found = load_pair(flags[1], flags[3], dtype="float32")
    return found._replace(drafts=found.drafts[1:])


@pytest.fixture
def chosen(pair):
    texts = ("def add(a, b):", "return a")
    return [Prompt(text, pair.tokenizer(text).input_ids) for text in texts]


def drawn_by(pair, options):
    """The third part of the certificate that `specjax verify` would give."""
    checks = checks_of(options)
    drawn = certificate.with_rules(pair, settings_of(options, pair), checks)
    return certificate.distribution_part(pair, drawn, checks)


@pytest.fixture
def fresh_programs():
    """Programs that were compiled with what a test replaces are forgotten on both sides."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_lossless_pair_is_certified(capsys, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def counted(what):
        yield lambda count, of: seen.append((count, of))

    monkeypatch.setattr(verify, "counted", counted)
    flags = ["--methods", "pool", "--tree", "1", "--prompts", "2", "--max-new-tokens", "8"]
    flags += ["--samples", "300", "--verify", "naive,multi-step,traversal"]
    found = answer(capsys, "verify", *flags)
    assert found["passed"]
    assert found["greedy"]["passed"]
    assert found["sampled"]["passed"]
    assert found["greedy"]["methods"][0]["equal_tokens"] == found["greedy"]["tokens"] == 16
    assert found["sampled"]["naive"]["methods"][0]["method"] == "pool:1"
    tests = found["sampled"]["law"]["tests"]
    assert {test["rule"] for test in tests} == {"multi-step", "naive"}
    assert {test["token"].split()[0] for test in tests} == {"first", "second", "steps"}
    assert seen == [(count, 4) for count in range(5)]  # two parts, and two rules that are lossless


@pytest.mark.parametrize(
    ("verify", "sentence"),
    [
        ("greedy", "--verify has 'greedy'; rules that sample are auto, naive, one-hot,"),
        (
            "block,traversal",
            "of the rules block, traversal none is lossless for the trees of pool:1,1,1,1,1.",
        ),
    ],
)
def test_rules_that_cannot_be_tested_are_refused(capsys, verify, sentence):
    assert main(["verify", *pair_flags(), "--methods", "pool", "--verify", verify]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tree", "--budget"])
def test_a_size_beside_methods_that_all_have_one_is_refused(capsys, option):
    assert main(["verify", *pair_flags(), "--methods", "chain:3,tree:2,1", option, "4"]) == 2
    said = f"chain:3, tree:2,1: each has a size, and {option} 4 is named beside them"
    assert said in capsys.readouterr().err


def eager(probs_now, q, token):
    """A walk's trial that accepts too readily: lossy."""
    trial = token_wise.multi_step(probs_now, q, token)
    return token_wise.Trial(0.5 + 0.5 * trial.accept, trial.residual)


def eager_from_the_leaves(tree, of_node, accept, last, window):
    """A traversal whose noise accepts too readily: lossy."""
    return TRAVERSE(tree, of_node, accept / 16, last, window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lossy", "named", "wrong"),
    [
        ("walk", partial(rules.walk, rule=eager), "naive,multi-step", "multi-step"),
        ("traverse", eager_from_the_leaves, "naive,auto", "traversal"),
    ],
)
def test_a_biased_accept_probability_fails_the_distribution(
    name, lossy, named, wrong, pair, monkeypatch, fresh_programs
):
    options = dataclasses.replace(SMALL, verify=named)
    monkeypatch.setattr(rules, name, lossy)
    found = drawn_by(pair, options)
    assert not found.passed
    assert {one.rule for one in found.tests} == {"naive", wrong}
    assert {one.rule for one in found.failed} == {wrong}


def of_row_0(key, length):
    """Keys and lengths whose noise is that of row 0 at its position, a part of it for every row.

    So do rbg keys under `vmap`: each row draws apart, and as long as row 0 goes on, afresh.
    """
    rows = jnp.arange(key.shape[0])
    return jax.vmap(partial(fold, key[0]))(rows), jnp.broadcast_to(length[0], rows.shape)


def of_row_0_whole(key, length):
    """Every row has row 0's key."""
    return jnp.broadcast_to(key[0], key.shape), length


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "caught"), [(of_row_0, {"steps"}), (of_row_0_whole, {"first", "steps"})]
)
@pytest.mark.parametrize("named", ["naive", "multi-step"])
def test_noise_shared_by_rows_fails_the_distribution(
    shared, caught, named, pair, monkeypatch, fresh_programs
):
    judged, propose = stepping.verify_tree, ExpansionDrafter.propose

    def verify_tree(rule, state, *rest):
        key, length = shared(state.key, state.cache.length)
        alike = replace(state, key=key, cache=replace(state.cache, length=length))
        return judged(rule, alike, *rest)

    def proposed(drafter, key, position, held, *rest):
        return propose(drafter, *shared(key, position), held, *rest)

    monkeypatch.setattr(stepping, "verify_tree", verify_tree)
    monkeypatch.setattr(ExpansionDrafter, "propose", proposed)
    options = dataclasses.replace(SMALL, verify=named)
    found = drawn_by(pair, options)
    assert {one.token for one in found.failed} >= caught


def another(tree, choice, window):
    """A match that puts another token after every path: lossy."""
    accepted = MATCH(tree, choice, window)
    return replace(accepted, token=(accepted.token + 1) % 272)


@pytest.mark.slow
def test_another_token_fails_the_naive_part(pair, chosen, monkeypatch, fresh_programs):
    expected = certificate.tokens_of(pair.target, None, chosen, checks_of(SMALL), 0.8).tokens
    monkeypatch.setattr(rules, "match", another)
    jax.clear_caches()
    found = certificate.compare(
        pair, registry.setting_of("tree", widths=(2, 1)), chosen, checks_of(SMALL), 0.8, expected
    )
    assert not found.passed
    assert found.divergences[0].gap > certificate.TOLERANCE


def test_a_failed_certificate_has_code_1(monkeypatch, capsys):
    monkeypatch.setattr(verify, "certificate", lambda *_: failed_certificate())
    assert main(["verify", *pair_flags()]) == 1
    printed = capsys.readouterr().out
    assert "FAILED temperature 0: tree, 3 of 8 tokens equal" in printed
    assert printed.endswith("NOT LOSSLESS\n")


def failed_certificate() -> certificate.Certificate:
    far = certificate.Divergence("a", 3, 0.5)
    part = certificate.Section((certificate.Comparison("tree", 1, 3, 1.5, (far,)),), 8, 0.0)
    test = certificate.DistributionTest("tree", "naive", "first", GTest(0.5, 1.0, 2, 9))
    found = certificate.Certificate(part, part, certificate.DistributionSection((test,), 1))
    assert found.distribution.passed
    assert not found.passed
    return found


def test_only_gaps_of_rounding_are_excused():
    near, far = (certificate.Divergence("a", 0, gap) for gap in (1e-5, 1e-3))
    assert certificate.Comparison("tree", 1, 0, 1.0, (near,)).passed
    assert not certificate.Comparison("tree", 1, 0, 1.0, (near, far)).passed


def test_the_g_test_accepts_the_distribution_and_catches_a_planted_bias():
    random, p = np.random.default_rng(0), np.array([0.3, 0.3, 0.2, 0.1, 0.09, 0.01])
    moved = p + np.array([0.02, 0, 0, -0.02, 0, 0])  # total variation 0.02
    fair, biased = (random.choice(6, size=40_000, p=probs_of) for probs_of in (p, moved))
    assert distribution_tests.g_test(fair, p).p_value > 1e-3
    assert distribution_tests.g_test(biased, p).p_value < 1e-8


def test_small_cells_are_pooled_and_impossible_tokens_fail():
    p = np.array([0.5, 0.46, 0.02, 0.02, 0.0])
    found = distribution_tests.g_test(np.repeat([0, 1, 2, 3], [50, 46, 2, 2]), p)
    assert (found.cells, found.draws) == (2, 100)
    assert found.p_value > 0.5
    assert distribution_tests.g_test(np.array([4]), p).p_value == 0.0
    assert distribution_tests.g_test(np.array([0, 1]), p).p_value == 1.0


def test_a_threshold_gap_is_small_only_for_a_neighbour():
    logits = np.log(np.full(300, 1 / 300, np.float32))
    key = jax.random.key(4)
    uniform = jax.random.uniform(fold(key, 9, Purpose.TOKEN), (2,))
    token = int(draw(jax.nn.softmax(logits), uniform))
    sizes = (128, 128, 44)
    inside = token % 128
    near = [t for t in (token - 1, token + 1) if t // 128 == token // 128 and t >= 0]
    gaps = [distribution_tests.threshold_gap(logits, 1.0, key, 9, (token, other)) for other in near]
    assert min(gaps) <= 1 / sizes[token // 128]
    far = token - inside + (inside + 20) % sizes[token // 128]
    assert distribution_tests.threshold_gap(logits, 1.0, key, 9, (token, far)) > max(gaps)
