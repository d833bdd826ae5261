"""`specjax verify`: what is certified, and what came of it."""

import json

from specjax.base.interrupts import if_interrupted
from specjax.base.progress import counted
from specjax.checkpoints.pair import Pair
from specjax.cli.kernels import check_kernels, use_kernels
from specjax.cli.loading import pair_of
from specjax.cli.options import Verify
from specjax.cli.values import at_least, check_seed, widths_of
from specjax.measure import prompts
from specjax.measure.certificate import (
    Certificate,
    Checks,
    DistributionSection,
    Section,
    certificate,
    with_rules,
)
from specjax.methods import registry
from specjax.methods.method import METHODS, Setting
from specjax.methods.tuned import read
from specjax.models.quantized import quantized_as
from specjax.parallel.processes import devices_for
from specjax.trees.widths import widest
from specjax.verify.rules import AUTO, RULES


def verify(options: Verify) -> int:
    """Runs `specjax verify`; gives the exit code, 1 if the certificate fails.

    Raises:
      ValueError: an option is wrong or the pair does not fit.
    """
    settings_of(options, None)
    for name in ("prompts", "max_new_tokens", "samples"):
        at_least(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    widths_of(options.tree)
    check_seed(options.seed)
    checks = checks_of(options)
    check_kernels(options.kernels)
    mesh = devices_for(options.mesh, options.distributed)
    use_kernels(options.kernels)
    pair = pair_of(options, "float32", mesh)
    settings = settings_of(options, pair)
    with_rules(pair, settings, checks)
    chosen, _ = prompts.fitting(
        prompts.read(None)[: options.prompts],
        pair.tokenizer,
        pair.target.config.max_positions,
        options.max_new_tokens,
    )
    if_interrupted(
        lambda: (
            "nothing is certified; the same command begins anew, and fewer --samples, --prompts "
            "or --methods take less"
        )
    )
    with counted("methods") as progress:
        found = certificate(pair, settings, chosen, checks, progress)
    name = quantized_as(pair.target)
    report = found.report() | {"quantization": name}
    print(json.dumps(report) if options.json else summary(found))
    if name is not None and not options.json:
        print(f"with respect to the model as it is, in {name}")
    return 0 if found.passed else 1


def summary(found: Certificate) -> str:
    """The certificate in a few lines."""
    parts = (("temperature 0", found.greedy), ("naive rule, same seed", found.naive))
    lines = [
        f"{_mark(part)} {title}: {one.method}, {one.equal_tokens} of {part.tokens} tokens "
        f"equal, {len(one.divergences)} divergences, {one.tokens_per_step:.2f} tokens a step"
        for title, part in parts
        for one in part.comparisons
    ]
    drawn = found.distribution
    lowest = min(one.test.p_value for one in drawn.tests)
    lines.append(
        f"{_mark(drawn)} distribution of {drawn.samples} samples: {len(drawn.tests)} tests, "
        f"lowest p-value {lowest:.3g}, level {drawn.level:.3g}"
    )
    return "\n".join([*lines, "lossless" if found.passed else "NOT LOSSLESS"])


def _mark(part: Section | DistributionSection) -> str:
    return "passed" if part.passed else "FAILED"


def checks_of(options: Verify) -> Checks:
    """How much is checked.

    Raises:
      ValueError: there is no rule of a name, or it is not one that samples.
    """
    rules = tuple(_rules(options))
    return Checks(options.max_new_tokens, options.samples, rules, options.seed)


def _rules(options: Verify) -> list[str]:
    """The rules that `--verify` names; "all" is all but the greedy one, "auto" each setting's own.

    Raises:
      ValueError: there is no such rule, or it is not one that samples.
    """
    sampling = [rule.name for rule in RULES.values() if not rule.greedy_only]
    if options.verify == "all":
        return sampling
    names = [name.strip() for name in options.verify.split(",")]
    for name in names:
        if name not in (AUTO, *sampling):
            raise ValueError(
                f"--verify has {name!r}; rules that sample are auto, {', '.join(sampling)}, or all."
            )
    return names


def settings_of(options: Verify, pair: Pair | None) -> list[Setting]:
    """The settings that are checked: of methods, or of a file that tune wrote.

    A chain is left out where `--tree` is wider and others are there. "all" are the methods that
    the pair has everything for. One with a size takes neither `--tree` nor `--budget`.

    Raises:
      ValueError: a method is unknown or does not take what is named, the file is none, or a tree
        or budget is named beside it.
    """
    if options.config is not None:
        if (options.tree, options.budget) != (None, None):
            raise ValueError("--config names the tree and budget; leave them out beside it.")
        return list(dict.fromkeys(entry.setting for entry in read(options.config)))
    names = registry.names_of(options.methods, pair)
    registry.check_sizes(names, {"--tree": options.tree, "--budget": options.budget})
    others = [name for name in names if name != "chain"]
    wide = widest(widths_of(options.tree) or (1,)) > 1
    drafts = 1 if pair is None else len(pair.drafts)
    return [_setting(name, options, drafts) for name in (others if wide and others else names)]


def _setting(method: str, options: Verify, drafts: int) -> Setting:
    """A method with `--tree` if its tree is static, else with `--budget`; or with its own size."""
    if method not in METHODS:
        return registry.setting_of(method, drafts=drafts)
    widths = widths_of(options.tree) if METHODS[method].takes_widths else None
    budget = options.budget if METHODS[method].takes_budget and widths is None else None
    return registry.setting_of(method, widths=widths, budget=budget, drafts=drafts)
