"""Which method to use: the one asked for, one that tune wrote down, or the fastest measured."""

from typing import NamedTuple

import jax

from specjax import records
from specjax.methods import AUTO, build, check_method, lacking, setting_of
from specjax.pair import Pair
from specjax.setting import Setting, from_json
from specjax.tuned import pick, read
from specjax.verify import RULES
from specjax.widths import Widths, widest

# By platform, kind and whether there is one row. 40 prompts of HumanEval, bundled pair at 100M,
# bfloat16, 2 CPU cores (Zen 5), jax 0.10.2, 2026-11-21: specexec of 15 nodes 4.06 times plain
# decoding at T = 0 and 1.41 at 0.8, a chain of 7 3.34 and 2.64.
_SHIPPED = {("cpu", "greedy", True): "specexec"}
_ELSEWHERE = "chain"


class Asked(NamedTuple):
    """What a person asked for: a method or `auto`, perhaps with a tree or a budget of nodes.

    Or a file that tune wrote, and nothing else. `verify` is the rule that will judge the trees.
    """

    method: str = AUTO
    widths: Widths | None = None
    budget: int | None = None
    config: str | None = None
    verify: str = AUTO


class Choice(NamedTuple):
    """A setting, and why it was taken."""

    setting: Setting
    reason: str


def choose(asked: Asked, pair: Pair, temperature: float, batch: int = 1) -> Choice:
    """The setting to use: that of the method named, or for `auto` the fastest measured here, or
    the shipped one.

    `auto` takes no method that was measured as slower than plain decoding, none that the pair lacks
    something for, and none whose trees the rule is not lossless for. Where several temperatures
    above 0 were measured, the nearest one counts.

    Raises:
      ValueError: there is no such method, or it does not take what is asked for.
    """
    method, widths, budget, config, verify = asked
    check_method(method, AUTO)
    if config is not None:
        return _written(asked, pair, temperature, batch)
    if method != AUTO:
        return Choice(
            setting_of(method, widths, budget, batch, len(pair.drafts)), "it was asked for"
        )
    if widths is not None and budget is None:
        if not pair.drafts:
            raise ValueError(
                "a tree is named and there is no draft model; name one with --draft, or a method."
            )
        named = "pool" if len(pair.drafts) > 1 else "chain" if widest(widths) == 1 else "tree"
        return Choice(setting_of(named, widths, budget), "a tree was asked for")
    if budget is not None:
        # Chosen nodes win at temperature 0, drawn ones above it (the figures at `_SHIPPED`).
        named = ("tree", "specexec") if temperature > 0 else ("specexec", "tree")
        settings = [setting_of(n, None, budget) for n in (named if pair.drafts else ("lookup",))]
        able = [one for one in settings if _able(one, pair, verify)]
        return Choice((able or settings)[0], "a budget of nodes was asked for")
    if measured := _measured(pair, temperature, batch, verify):
        return measured
    if not pair.drafts:
        return Choice(Setting(), "there is no draft model")
    return _shipped(pair, temperature > 0, batch, verify)


def _able(setting: Setting, pair: Pair, verify: str) -> bool:
    """Whether the pair has what a setting needs, and the rule is lossless for its trees."""
    if lacking(setting.method, pair) is not None:
        return False
    try:
        drafter = build(setting, pair, verify)
    except ValueError:  # it names a second stage that this pair has not
        return False
    return drafter is None or verify == AUTO or RULES[verify].refusal(drafter.construction) is None


def _written(asked: Asked, pair: Pair, temperature: float, batch: int) -> Choice:
    """What tune wrote for such rows."""
    if (asked.method, asked.widths, asked.budget) != (AUTO, None, None):
        raise ValueError("--config names the method, tree and budget; leave them out beside it.")
    assert asked.config is not None
    found = pick(read(asked.config), temperature, batch)
    return Choice(found.setting, f"{asked.config} names it for temperature {found.temperature:g}")


def _measured(pair: Pair, temperature: float, batch: int, verify: str) -> Choice | None:
    """The fastest setting of a measurement that included plain decoding, if there is one."""
    if jax.process_count() > 1:  # each host has measurements of its own, and all must run the same
        return None
    found = records.recall(records.setting(pair.target, pair.drafts, batch, temperature > 0))
    nearest = min((entry["temperature"] for entry in found), default=temperature,
                  key=lambda measured: abs(measured - temperature))  # fmt: skip
    entries = [
        (from_json(entry["setting"], "a measurement"), entry["tokens_per_second"])
        for entry in found
        if entry["temperature"] == nearest
    ]
    able = [(one, rate) for one, rate in entries if _able(one, pair, verify)]
    settings, rates = [one for one, _ in able], [rate for _, rate in able]
    plain = [rate for rate, one in zip(rates, settings, strict=True) if one.method == "none"]
    if not plain:
        return None
    best = max(range(len(rates)), key=rates.__getitem__)
    rate = f"{rates[best]:.1f} tokens/s with it at temperature {nearest:g}"
    reason = f"bench measured {rate} on this machine"
    if settings[best].method == "none":
        return Choice(Setting(), f"{reason}, and no other method was faster")
    return Choice(settings[best], f"{reason}, and {max(plain):.1f} with plain decoding")


def _shipped(pair: Pair, sampled: bool, batch: int, verify: str) -> Choice:
    platform, kind = jax.default_backend(), "sampling" if sampled else "greedy"
    setting = setting_of(_SHIPPED.get((platform, kind, batch == 1), _ELSEWHERE), batch=batch)
    if not _able(setting, pair, verify):
        setting = setting_of(_ELSEWHERE, batch=batch)
    reason = f"the shipped default for {platform}, {kind}; run specjax bench to measure here"
    return Choice(setting, reason)
