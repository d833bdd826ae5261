"""A losslessness certificate for one pair of target and drafts."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.base.sampling import Sampling, fold, process
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.tokenizers import encode
from specjax.decoding.generate import Generation, generate
from specjax.draft import Drafter
from specjax.measure import distribution_tests
from specjax.measure.prompts import Prompt
from specjax.methods import registry
from specjax.methods.method import PLAIN, Setting
from specjax.models.transformer import Model
from specjax.verify.rules import AUTO, NAIVE, RULES, find_rule

_T = TypeVar("_T")
TOLERANCE = 1e-4
"""A gap, between two logits or a threshold and its uniform, that rounding may close: passes of
different numbers of tokens round differently."""
TEMPERATURE = 0.8
FAMILY_ERROR = 1e-6
"""Probability that a lossless pair fails the sampled part by chance."""
_PROMPT = "def add(first, second):\n    return"


@dataclasses.dataclass(frozen=True)
class Checks:
    """How much is checked: `max_new_tokens` of each prompt, `samples` texts for each rule.

    `rules` are names; "auto" is the rule that each method has when none is named.
    """

    max_new_tokens: int = 64
    samples: int = 4096
    rules: tuple[str, ...] = ("naive", "auto")
    seed: int = 0


class Divergence(NamedTuple):
    """Where a row first differs from plain decoding, and the gap that rounding had to close."""

    prompt: str
    position: int
    gap: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One method against plain decoding, token for token."""

    method: str
    rows: int
    equal_tokens: int
    tokens_per_step: float
    divergences: tuple[Divergence, ...]

    @property
    def passed(self) -> bool:
        """Whether every divergence is one of rounding."""
        return all(divergence.gap < TOLERANCE for divergence in self.divergences)

    def report(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "method": self.method,
            "passed": self.passed,
            "rows": self.rows,
            "equal_tokens": self.equal_tokens,
            "tokens_per_step": self.tokens_per_step,
            "divergences": [divergence._asdict() for divergence in self.divergences],
        }


@dataclasses.dataclass(frozen=True)
class Section:
    """Methods against plain decoding at one temperature, over `tokens` tokens each."""

    comparisons: tuple[Comparison, ...]
    tokens: int
    temperature: float

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(comparison.passed for comparison in self.comparisons)

    def report(self) -> dict[str, Any]:
        """The section as plain values; the temperature where it is not 0."""
        found = {
            "passed": self.passed,
            "tokens": self.tokens,
            "divergences": sum(len(comparison.divergences) for comparison in self.comparisons),
            "tolerance": TOLERANCE,
            "methods": [comparison.report() for comparison in self.comparisons],
        }
        return found | ({"temperature": self.temperature} if self.temperature else {})


class DistributionTest(NamedTuple):
    """A test of the tokens that a method draws under a rule."""

    method: str
    rule: str
    token: str
    test: distribution_tests.GTest


@dataclasses.dataclass(frozen=True)
class DistributionSection:
    """Tests of drawn texts, `samples` for each method and rule."""

    tests: tuple[DistributionTest, ...]
    samples: int

    @property
    def level(self) -> float:
        """The p-value below which a test fails: the family's error over the number of tests."""
        return FAMILY_ERROR / len(self.tests)

    @property
    def failed(self) -> tuple[DistributionTest, ...]:
        """The tests that failed."""
        return tuple(one for one in self.tests if not one.test.p_value >= self.level)

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return not self.failed

    def report(self) -> dict[str, Any]:
        """The section as plain values."""
        return {
            "passed": self.passed,
            "temperature": TEMPERATURE,
            "samples": self.samples,
            "family_error": FAMILY_ERROR,
            "level": self.level,
            "tests": [
                {"method": one.method, "rule": one.rule, "token": one.token} | one.test._asdict()
                for one in self.tests
            ],
        }


@dataclasses.dataclass(frozen=True)
class Certificate:
    """That speculative decoding changes nothing but speed on a pair, or where it does."""

    greedy: Section
    naive: Section
    distribution: DistributionSection

    @property
    def passed(self) -> bool:
        """Whether every part holds."""
        return self.greedy.passed and self.naive.passed and self.distribution.passed

    def report(self) -> dict[str, Any]:
        """The certificate as plain values."""
        sampled = {
            "passed": self.naive.passed and self.distribution.passed,
            "naive": self.naive.report(),
            "law": self.distribution.report(),
        }
        greedy = self.greedy.report()
        return {"passed": self.passed, "dtype": "float32", "greedy": greedy, "sampled": sampled}


def compare(
    pair: Pair,
    setting: Setting,
    chosen: Sequence[Prompt],
    checks: Checks,
    temperature: float,
    plain: np.ndarray,
) -> Comparison:
    """A method's tokens against those of plain decoding with the same keys.

    At temperature 0 under the method's own rule; else under the naive one, which emits the very
    tokens of plain sampling.
    """
    drafter = registry.build(setting, pair, verify="naive" if temperature else "auto")
    made = tokens_of(pair.target, drafter, chosen, checks, temperature)
    pairs = zip(chosen, plain, made.tokens, range(len(chosen)), strict=True)
    divergences, equal = [], 0
    for prompt, expected, got, row in pairs:
        differing = np.flatnonzero(expected != got)
        equal += int(differing[0]) if differing.size else expected.size
        if differing.size:
            at = int(differing[0])
            gap = _gap(pair.target, [*prompt.tokens, *expected[:at].tolist()], temperature,
                       _row_key(checks, row), (int(expected[at]), int(got[at])))  # fmt: skip
            divergences.append(Divergence(prompt.name, at, gap))
    per_step = float(made.lengths.sum() / made.steps.sum())
    return Comparison(setting.label, len(chosen), equal, per_step, tuple(divergences))


def _row_key(checks: Checks, row: int) -> jax.Array:
    return fold(jax.random.key(checks.seed), row)


def tokens_of(
    target: Model,
    drafter: Drafter | None,
    chosen: Sequence[Prompt],
    checks: Checks,
    temperature: float,
) -> Generation:
    """All prompts' continuations as one batch, run past end tokens."""
    return generate(
        jax.random.key(checks.seed),
        target,
        drafter,
        [prompt.tokens for prompt in chosen],
        max_new_tokens=checks.max_new_tokens,
        sampling=Sampling(temperature),
        verify="naive" if temperature else "auto",
        stop_at_eos=False,
    )


def _gap(
    target: Model,
    prefix: list[int],
    temperature: float,
    key: jax.Array,
    tokens: tuple[int, int],
) -> float:
    """How far the decision between two tokens was from going the other way."""
    logits = distribution_tests.logits_after(target, [prefix])[0]
    if temperature == 0:
        best = np.sort(logits)[-2:]
        return float(best[1] - min(logits[tokens[0]], logits[tokens[1]], best[0]))
    return distribution_tests.threshold_gap(logits, temperature, key, len(prefix), tokens)


def greedy_part(
    pair: Pair, settings: Iterable[Setting], chosen: Sequence[Prompt], checks: Checks
) -> Section:
    """At temperature 0 every method gives the tokens of plain decoding."""
    return _section(pair, settings, chosen, checks, 0.0)


def naive_part(
    pair: Pair, settings: Iterable[Setting], chosen: Sequence[Prompt], checks: Checks
) -> Section:
    """With one seed the naive rule gives the tokens of plain sampling."""
    return _section(pair, settings, chosen, checks, TEMPERATURE)


def _section(
    pair: Pair,
    settings: Iterable[Setting],
    chosen: Sequence[Prompt],
    checks: Checks,
    temperature: float,
) -> Section:
    plain = tokens_of(pair.target, None, chosen, checks, temperature).tokens
    found = tuple(compare(pair, s, chosen, checks, temperature, plain) for s in settings)
    return Section(found, int(plain.size), temperature)


def distribution_part(
    pair: Pair, drawn: Iterable[tuple[Setting, str]], checks: Checks
) -> DistributionSection:
    """Tokens of many continuations, `drawn` by a setting under a rule, follow the target's
    distribution, whatever the step before drew.
    """
    prompt = encode(pair.tokenizer, _PROMPT)
    tests = [
        test
        for setting, rule in drawn
        for test in _distribution_tests(pair, setting, rule, prompt, checks)
    ]
    return DistributionSection(tuple(tests), checks.samples)


def _distribution_tests(
    pair: Pair, setting: Setting, rule: str, prompt: list[int], checks: Checks
) -> list[DistributionTest]:
    """G-tests of the first token, of the second after the most frequent first ones, and of steps
    that follow each other.
    """
    drafter = registry.build(setting, pair, verify=rule)
    sampling = Sampling(TEMPERATURE)
    texts = distribution_tests.draw_texts(
        jax.random.key(checks.seed), pair.target, drafter, prompt, sampling, rule, checks.samples
    )
    drawn = texts.tokens
    common = np.argsort(np.bincount(drawn[:, 0]))[::-1][:3].tolist()
    prefixes = [prompt, *([*prompt, token] for token in common)]
    groups = [drawn[:, 0], *(drawn[drawn[:, 0] == token, 1] for token in common)]
    logits = distribution_tests.logits_after(pair.target, prefixes)
    rows = sampling.rows(len(prefixes))
    distributions = np.asarray(process(jnp.asarray(logits)[:, None], rows)[:, 0], np.float64)
    names = ["first", *(f"second after {token}" for token in common)]
    found = {
        name: distribution_tests.g_test(group, p)
        for name, group, p in zip(names, groups, distributions, strict=True)
        if group.size
    }
    found["steps"] = distribution_tests.independence(
        pair.target, prompt, texts, sampling, checks.seed
    )
    return [DistributionTest(setting.label, rule, name, test) for name, test in found.items()]


def with_rules(
    pair: Pair, settings: Sequence[Setting], checks: Checks
) -> list[tuple[Setting, str]]:
    """Settings with the rules that are lossless for the trees each makes for them.

    Raises:
      ValueError: there is none.
    """
    found = []
    for setting, rule in itertools.product(settings, checks.rules):
        trees = registry.build(setting, pair, verify=rule).construction
        if setting.method == PLAIN:
            found.append((setting, NAIVE.name if rule == AUTO else rule))
        elif rule == AUTO or RULES[rule].refusal(trees) is None:
            found.append((setting, find_rule(rule, trees).name))
    found = list(dict.fromkeys(found))
    if not found:
        labels = ", ".join(setting.label for setting in settings)
        rules = ", ".join(checks.rules)
        raise ValueError(f"of the rules {rules} none is lossless for the trees of {labels}.")
    return found


def certificate(
    pair: Pair,
    settings: Sequence[Setting],
    chosen: Sequence[Prompt],
    checks: Checks,
    progress: Callable[[int, int], None] = lambda count, of: None,
) -> Certificate:
    """The whole certificate.

    Args:
      pair: a float32 target and what drafts for it.
      settings: the settings that are checked.
      chosen: the prompts that the greedy and the naive part continue.
      checks: how much is checked.
      progress: is called with how many methods, a method counted once in each part and under each
        rule, of how many are checked.

    Returns:
      Its three parts; `passed` says whether every one holds.

    Raises:
      ValueError: no rule is lossless for the trees of the settings.
    """
    drawn = with_rules(pair, settings, checks)
    done, of = itertools.count(1), 2 * len(settings) + len(drawn)

    def each(things: Sequence[_T]) -> Iterator[_T]:
        for thing in things:
            yield thing
            progress(next(done), of)

    progress(0, of)
    return Certificate(
        greedy=greedy_part(pair, each(settings), chosen, checks),
        naive=naive_part(pair, each(settings), chosen, checks),
        distribution=distribution_part(pair, each(drawn), checks),
    )
