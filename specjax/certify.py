"""`specjax verify`: a losslessness certificate for one pair of target and drafts."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, law, methods, prompts
from specjax.distributed import devices_for
from specjax.draft import Drafter
from specjax.model import Model
from specjax.options import Verify
from specjax.pair import Pair, load_pair
from specjax.prompts import Prompt
from specjax.sampling import Sampling, fold, process
from specjax.setting import Setting
from specjax.tuned import read
from specjax.values import at_least, check_seed, widths_of
from specjax.verify import GREEDY, NAIVE, RULES, find_rule
from specjax.widths import widest

TOLERANCE = 1e-4
"""A gap, between two logits or a threshold and its uniform, that rounding may close: passes of
different numbers of tokens round differently."""
TEMPERATURE = 0.8
FAMILY_ERROR = 1e-6
"""Probability that a lossless pair fails the sampled part by chance."""
_LAW_PROMPT = "def add(first, second):\n    return"


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


def compare(
    pair: Pair,
    setting: Setting,
    chosen: Sequence[Prompt],
    options: Verify,
    temperature: float,
    plain: np.ndarray,
) -> Comparison:
    """A method's tokens against those of plain decoding with the same keys.

    At temperature 0 under the method's own rule; else under the naive one, which emits the very
    tokens of plain sampling.
    """
    drafter = methods.build(setting, pair, "naive" if temperature else "auto")
    made = tokens_of(pair.target, drafter, chosen, options, temperature)
    pairs = zip(chosen, plain, made.tokens, range(len(chosen)), strict=True)
    divergences, equal = [], 0
    for prompt, expected, got, row in pairs:
        differing = np.flatnonzero(expected != got)
        equal += int(differing[0]) if differing.size else expected.size
        if differing.size:
            at = int(differing[0])
            gap = _gap(pair.target, [*prompt.tokens, *expected[:at].tolist()], temperature,
                       _row_key(options, row), (int(expected[at]), int(got[at])))  # fmt: skip
            divergences.append(Divergence(prompt.name, at, gap))
    per_step = float(made.lengths.sum() / made.steps.sum())
    return Comparison(setting.label, len(chosen), equal, per_step, tuple(divergences))


def _row_key(options: Verify, row: int) -> jax.Array:
    return fold(jax.random.key(options.seed), row)


def tokens_of(
    target: Model,
    drafter: Drafter | None,
    chosen: Sequence[Prompt],
    options: Verify,
    temperature: float,
) -> decode.Generation:
    """All prompts' continuations as one batch, run past end tokens."""
    return decode.generate(
        jax.random.key(options.seed),
        target,
        drafter,
        [prompt.tokens for prompt in chosen],
        max_new_tokens=options.max_new_tokens,
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
    logits = law.logits_after(target, [prefix])[0]
    if temperature == 0:
        best = np.sort(logits)[-2:]
        return float(best[1] - min(logits[tokens[0]], logits[tokens[1]], best[0]))
    return law.threshold_gap(logits, temperature, key, len(prefix), tokens)


def greedy_part(
    pair: Pair, settings: Sequence[Setting], chosen: Sequence[Prompt], options: Verify
) -> dict[str, Any]:
    """At temperature 0 every method gives the tokens of plain decoding."""
    plain = tokens_of(pair.target, None, chosen, options, 0.0).tokens
    found = [compare(pair, s, chosen, options, 0.0, plain) for s in settings]
    return section(found, plain)


def naive_part(
    pair: Pair, settings: Sequence[Setting], chosen: Sequence[Prompt], options: Verify
) -> dict[str, Any]:
    """With one seed the naive rule gives the tokens of plain sampling."""
    plain = tokens_of(pair.target, None, chosen, options, TEMPERATURE).tokens
    found = [compare(pair, s, chosen, options, TEMPERATURE, plain) for s in settings]
    return section(found, plain) | {"temperature": TEMPERATURE}


def section(found: Sequence[Comparison], plain: np.ndarray) -> dict[str, Any]:
    """The comparisons of one part as plain values; `plain` holds the tokens compared with."""
    return {
        "passed": all(comparison.passed for comparison in found),
        "tokens": int(plain.size),
        "divergences": sum(len(comparison.divergences) for comparison in found),
        "tolerance": TOLERANCE,
        "methods": [comparison.report() for comparison in found],
    }


def law_part(pair: Pair, settings: Sequence[Setting], options: Verify) -> dict[str, Any]:
    """Tokens of many continuations follow the target's law, whatever the step before drew."""
    prompt = pair.tokenizer(_LAW_PROMPT).input_ids
    tests = [
        test
        for setting, rule in _judged(pair, settings, options)
        for test in _law_tests(pair, setting, rule, prompt, options)
    ]
    level = FAMILY_ERROR / len(tests)
    return {
        "passed": all(test["p_value"] >= level for test in tests),
        "temperature": TEMPERATURE,
        "samples": options.samples,
        "family_error": FAMILY_ERROR,
        "level": level,
        "tests": tests,
    }


def _law_tests(
    pair: Pair, setting: Setting, rule: str, prompt: list[int], options: Verify
) -> list[dict[str, Any]]:
    """G-tests of the first token, of the second after the most frequent first ones, and of steps
    that follow each other.
    """
    drafter = methods.build(setting, pair, rule)
    sampling = Sampling(TEMPERATURE)
    texts = law.draw_texts(
        jax.random.key(options.seed), pair.target, drafter, prompt, sampling, rule, options.samples
    )
    drawn = texts.tokens
    common = np.argsort(np.bincount(drawn[:, 0]))[::-1][:3].tolist()
    prefixes = [prompt, *([*prompt, token] for token in common)]
    groups = [drawn[:, 0], *(drawn[drawn[:, 0] == token, 1] for token in common)]
    logits = law.logits_after(pair.target, prefixes)
    rows = sampling.rows(len(prefixes))
    laws = np.asarray(process(jnp.asarray(logits)[:, None], rows)[:, 0], np.float64)
    names = ["first", *(f"second after {token}" for token in common)]
    found = {
        name: law.g_test(group, p)
        for name, group, p in zip(names, groups, laws, strict=True)
        if group.size
    }
    found["steps"] = law.independence(pair.target, prompt, texts, sampling, options.seed)
    return [
        {"method": setting.label, "rule": rule, "token": name} | test._asdict()
        for name, test in found.items()
    ]


def _rules(options: Verify) -> list[str]:
    """The rules named, or all but the greedy one; "auto" is that of each setting's own.

    Raises:
      ValueError: there is no such rule, or it is not one that samples.
    """
    sampling = [name for name in RULES if name != GREEDY.name]
    if options.verify == "all":
        return sampling
    names = [name.strip() for name in options.verify.split(",")]
    for name in names:
        if name not in (methods.AUTO, *sampling):
            raise ValueError(
                f"--verify has {name!r}; rules that sample are auto, {', '.join(sampling)}, or all."
            )
    return names


def _judged(pair: Pair, settings: Sequence[Setting], options: Verify) -> list[tuple[Setting, str]]:
    """Settings with the rules that are lossless for the trees each makes for them.

    Raises:
      ValueError: there is none.
    """
    found = []
    for setting, rule in itertools.product(settings, _rules(options)):
        drafter = methods.build(setting, pair, rule)
        if drafter is None:
            found.append((setting, NAIVE.name if rule == methods.AUTO else rule))
        elif rule == methods.AUTO:
            found.append((setting, find_rule(rule, drafter.construction).name))
        elif RULES[rule].refusal(drafter.construction) is None:
            found.append((setting, rule))
    found = list(dict.fromkeys(found))
    if not found:
        raise ValueError(
            f"--verify is {options.verify}, which is lossless for no trees of "
            f"{options.config or options.methods}."
        )
    return found


def settings_of(options: Verify, pair: Pair | None) -> list[Setting]:
    """The settings that are checked: of methods, or of a file that tune wrote.

    A chain is left out where `--tree` is wider and others are there. "all" are the methods that
    the pair has everything for.

    Raises:
      ValueError: a method is unknown or does not take what is named, the file is none, or a tree
        or budget is named beside it.
    """
    if options.config is not None:
        if (options.tree, options.budget) != (None, None):
            raise ValueError("--config names the tree and budget; leave them out beside it.")
        return list(dict.fromkeys(entry.setting for entry in read(options.config)))
    names = methods.names_of(options.methods, pair)
    others = [name for name in names if name != "chain"]
    wide = widest(widths_of(options.tree) or (1,)) > 1
    drafts = 1 if pair is None else len(pair.drafts)
    return [_setting(name, options, drafts) for name in (others if wide and others else names)]


def _setting(method: str, options: Verify, drafts: int) -> Setting:
    """A method with `--tree` if its tree is static, else with `--budget`."""
    widths = widths_of(options.tree) if method in methods.STATIC else None
    budget = options.budget if method != "none" and widths is None else None
    return methods.setting_of(method, widths, budget, 1, drafts)


def certificate(
    pair: Pair, settings: Sequence[Setting], chosen: Sequence[Prompt], options: Verify
) -> dict[str, Any]:
    """The whole certificate; `passed` says whether every part holds."""
    greedy = greedy_part(pair, settings, chosen, options)
    naive = naive_part(pair, settings, chosen, options)
    drawn = law_part(pair, settings, options)
    sampled = {"passed": naive["passed"] and drawn["passed"], "naive": naive, "law": drawn}
    passed = greedy["passed"] and sampled["passed"]
    return {"passed": passed, "dtype": "float32", "greedy": greedy, "sampled": sampled}


def verify(options: Verify) -> int:
    """Runs `specjax verify`; gives the exit code, 1 if the certificate fails.

    Raises:
      ValueError: an option is wrong or the pair does not fit.
    """
    settings_of(options, None)
    for name in ("prompts", "max_new_tokens", "samples"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    widths_of(options.tree)
    _rules(options)
    check_seed(options.seed)
    mesh = devices_for(options.mesh, options.distributed)
    pair = load_pair(
        options.model, options.draft, "float32", options.stage, mesh, options.positions
    )
    settings = settings_of(options, pair)
    _judged(pair, settings, options)
    chosen, _ = prompts.fitting(
        prompts.read(None)[: options.prompts],
        pair.tokenizer,
        pair.target.config.max_positions,
        options.max_new_tokens,
    )
    found = certificate(pair, settings, chosen, options)
    print(json.dumps(found) if options.json else summary(found))
    return 0 if found["passed"] else 1


def summary(found: dict[str, Any]) -> str:
    """The certificate in a few lines."""
    greedy, naive, drawn = found["greedy"], found["sampled"]["naive"], found["sampled"]["law"]
    lines = [
        f"{_mark(part)} {title}: {one['method']}, {one['equal_tokens']} of {part['tokens']} tokens "
        f"equal, {len(one['divergences'])} divergences, {one['tokens_per_step']:.2f} tokens a step"
        for title, part in (("temperature 0", greedy), ("naive rule, same seed", naive))
        for one in part["methods"]
    ]
    lowest = min(test["p_value"] for test in drawn["tests"])
    lines.append(
        f"{_mark(drawn)} law of {drawn['samples']} samples: {len(drawn['tests'])} tests, lowest "
        f"p-value {lowest:.3g}, level {drawn['level']:.3g}"
    )
    return "\n".join([*lines, "lossless" if found["passed"] else "NOT LOSSLESS"])


def _mark(part: dict[str, Any]) -> str:
    return "passed" if part["passed"] else "FAILED"
