"""Which method to use: the one asked for, one that tune wrote down, or the fastest measured."""

from typing import NamedTuple

import jax

from specjax import records
from specjax.methods import AUTO, check_method, lacking, setting_of
from specjax.pair import Pair
from specjax.setting import Setting, from_json
from specjax.tuned import pick, read
from specjax.widths import Widths, widest

_SHIPPED = {("cpu", "greedy"): "specexec", ("cpu", "sampling"): "chain"}
_SHIPPED_ELSEWHERE = "chain"


class Asked(NamedTuple):
    """What a person asked for: a method or `auto`, perhaps with a tree or a budget of nodes.

    Or a file that tune wrote, and nothing else.
    """

    method: str = AUTO
    widths: Widths | None = None
    budget: int | None = None
    config: str | None = None


class Choice(NamedTuple):
    """A setting, and why it was taken."""

    setting: Setting
    reason: str


def choose(asked: Asked, pair: Pair, temperature: float, batch: int = 1) -> Choice:
    """The setting to use: that of the method named, or for `auto` the fastest measured here, or
    the shipped one.

    A method that was measured as slower than plain decoding is never taken by `auto`. Where
    several temperatures above 0 were measured, the nearest one counts.

    Raises:
      ValueError: there is no such method, or it does not take what is asked for.
    """
    method, widths, budget, config = asked
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
        named = "specexec" if pair.drafts else "lookup"
        return Choice(setting_of(named, None, budget), "a budget of nodes was asked for")
    if measured := _measured(pair, temperature, batch):
        return measured
    if not pair.drafts:
        return Choice(Setting(), "there is no draft model")
    return _shipped(temperature > 0, batch)


def _written(asked: Asked, pair: Pair, temperature: float, batch: int) -> Choice:
    """What tune wrote for such rows."""
    if (asked.method, asked.widths, asked.budget) != (AUTO, None, None):
        raise ValueError("--config names the method, tree and budget; leave them out beside it.")
    assert asked.config is not None
    found = pick(read(asked.config), temperature, batch)
    return Choice(found.setting, f"{asked.config} names it for temperature {found.temperature:g}")


def _measured(pair: Pair, temperature: float, batch: int) -> Choice | None:
    """The fastest setting of a measurement that included plain decoding, if there is one."""
    found = records.recall(records.setting(pair.target, pair.drafts, batch, temperature > 0))
    nearest = min((entry["temperature"] for entry in found), default=temperature,
                  key=lambda measured: abs(measured - temperature))  # fmt: skip
    entries = [
        (from_json(entry["setting"], "a measurement"), entry["tokens_per_second"])
        for entry in found
        if entry["temperature"] == nearest
    ]
    able = [(one, rate) for one, rate in entries if lacking(one.method, pair) is None]
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


def _shipped(sampled: bool, batch: int) -> Choice:
    platform, kind = jax.default_backend(), "sampling" if sampled else "greedy"
    method = _SHIPPED.get((platform, kind), _SHIPPED_ELSEWHERE) if batch == 1 else "chain"
    reason = f"the shipped default for {platform}, {kind}; run specjax bench to measure here"
    return Choice(setting_of(method, batch=batch), reason)
