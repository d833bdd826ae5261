"""Which method to use: the one asked for, one that tune wrote down, or the fastest measured."""

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.platform import platform
from specjax.base.progress import working
from specjax.checkpoints.pair import Pair
from specjax.decoding.pass_times import (
    MOST_LEVELS,
    ExpertTimes,
    draft_seconds,
    expert_times,
    offload_times,
)
from specjax.methods import defaults, drafted, records
from specjax.methods.draftless import bundled, findings
from specjax.methods.evidence import Gain, evidence, fastest, gains
from specjax.methods.method import Setting, check_method
from specjax.methods.records import Run
from specjax.methods.registry import build, lacking, setting_of
from specjax.methods.tuned import pick, read
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of
from specjax.trees.widths import Widths, widest
from specjax.verify.rules import AUTO, RULES


class Asked(NamedTuple):
    """What a person asked for: a method or `auto`, perhaps with a tree or a budget of nodes.

    Or a file that tune wrote, and nothing else. `verify` is the rule that will verify the trees.
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


@working("choosing a method")
def choose(asked: Asked, pair: Pair, temperature: float, batch: int = 1) -> Choice:
    """The setting to use: that of the method named, or for `auto` the shipped one, or one that was
    measured here as faster than that.

    What was measured replaces the shipped default only if both ran side by side and the gain is
    above the noise (the rule is that of `methods.evidence`). `auto` takes no method that the pair
    lacks something for, and none whose trees the rule is not lossless for. Where several
    temperatures above 0 were measured, the nearest one counts.

    Raises:
      ValueError: there is no such method, or it does not take what is asked for.
    """
    method, widths, budget, config, verify = asked
    check_method(method, AUTO)
    if config is not None:
        return _written(asked, pair, temperature, batch)
    if method != AUTO:
        return Choice(
            setting_of(method, widths=widths, budget=budget, batch=batch, drafts=len(pair.drafts)),
            "it was asked for",
        )
    if widths is not None and budget is None:
        if not pair.drafts:
            raise ValueError(
                "a tree is named and there is no draft model; name one with --draft, or a method."
            )
        named = "pool" if len(pair.drafts) > 1 else "chain" if widest(widths) == 1 else "tree"
        return Choice(setting_of(named, widths=widths, budget=budget), "a tree was asked for")
    if budget is not None:
        # Chosen nodes win at temperature 0, drawn ones above it (see `defaults.SHIPPED`).
        named = ("tree", "specexec") if temperature > 0 else ("specexec", "tree")
        settings = [setting_of(n, budget=budget) for n in (named if pair.drafts else ("lookup",))]
        able = [one for one in settings if _able(one, pair, verify)]
        return Choice((able or settings)[0], "a budget of nodes was asked for")
    return _measured(asked, pair, temperature, batch)


def _able(setting: Setting, pair: Pair, verify: str) -> bool:
    """Whether the pair has what a setting needs, and the rule is lossless for its trees."""
    if setting.draft is not None and pair.files is not None and not pair.drafts:
        pair = pair._replace(drafts=[pair.target])  # in fewer bits it is made where it is taken
    if lacking(setting.method, pair) is not None:
        return False
    try:
        drafter = build(setting, pair, verify=verify)
    except ValueError:  # it names a second stage that this pair has not
        return False
    return verify == AUTO or RULES[verify].refusal(drafter.construction) is None


def _written(asked: Asked, pair: Pair, temperature: float, batch: int) -> Choice:
    """What tune wrote for such rows."""
    if (asked.method, asked.widths, asked.budget) != (AUTO, None, None):
        raise ValueError("--config names the method, tree and budget; leave them out beside it.")
    assert asked.config is not None
    found = pick(read(asked.config), temperature, batch)
    return Choice(found.setting, f"{asked.config} names it for temperature {found.temperature:g}")


def _measured(asked: Asked, pair: Pair, temperature: float, batch: int) -> Choice:
    """The shipped default, or what was measured as faster than it."""
    if jax.process_count() > 1:  # each host has measurements of its own, and all must run the same
        return shipped(pair, temperature, batch, asked.verify)
    kept = records.recall(records.setting(pair.target, pair.drafts, batch, temperature > 0))
    beside = compared_with(pair, temperature, batch, asked.verify)
    found = evidence(kept, beside)
    nearest = min((run.temperature for run in found), key=lambda one: abs(one - temperature),
                  default=0.0)  # fmt: skip
    alike = [run for run in found if run.temperature == nearest]
    able = [gain for gain in gains(alike, beside)
            if _able(gain.setting, pair, asked.verify)]  # fmt: skip
    if best := fastest(able):
        return Choice(best.setting, _told(best, beside))
    default = shipped(pair, temperature, batch, asked.verify)
    if not any(run.of(default.setting) for run in alike):
        return default._replace(reason=f"{default.reason}; run specjax bench to measure here")
    if beside != default.setting:
        return Choice(beside, _kept(alike))
    return default._replace(reason=f"{default.reason}; {_kept(alike)}")


def _told(best: Gain, default: Setting) -> str:
    """What was measured of a setting that replaces the default, when, and how surely."""
    last = best.last
    ran, plain = last.of(best.setting), last.of(Setting())
    assert ran is not None
    text = (
        f"bench measured {ran.tokens_per_second:.1f} tokens/s with it at temperature "
        f"{last.temperature:g} on this machine on {last.date[:10]}, {math.exp(best.mean):.2f} "
        f"times {_named(default)} (noise {math.expm1(best.noise):.0%}, "
        f"{_runs(best.runs)})"
    )
    if best.setting == Setting():
        return f"{text}, and no other method was faster"
    beside = "" if plain is None else f", and {plain.tokens_per_second:.1f} with plain decoding"
    return f"{text}{beside}"


def _named(default: Setting) -> str:
    return "plain decoding" if default == Setting() else f"the shipped default {default.label}"


def _kept(runs: Sequence[Run]) -> str:
    """Why the default stays though it was measured."""
    last = max(runs, key=lambda run: run.date)
    return (
        f"at temperature {last.temperature:g} bench measured none here that is faster by more than "
        f"the noise ({_runs(runs)}, the last on {last.date[:10]})"
    )


def _runs(runs: Sequence[Run]) -> str:
    prompts = sum(run.prompts for run in runs)
    return f"{prompts} prompts" if len(runs) == 1 else f"{prompts} prompts in {len(runs)} runs"


def _streamed(pair: Pair, target: Model, sampled: bool, verify: str) -> Choice:
    times, levels = offload_times(target), MOST_LEVELS
    reason = str(times)
    if pair.drafts:
        taken = draft_seconds(pair.drafts[0])
        levels = times.levels(taken)
        reason += f"; a token of the draft takes {taken:.3f} s, so it goes {levels} deep"
    # Drawn nodes win above temperature 0, as they do in memory (see `defaults.SHIPPED`).
    names = ("lookup",) if not pair.drafts else ("tree",) if sampled else ("specexec", "tree")
    settings = [no_deeper(setting_of(name, budget=times.budget), levels) for name in names]
    able = [one for one in settings if _able(one, pair, verify)]
    return Choice((able or [Setting()])[0], reason)


_chains: "weakref.WeakKeyDictionary[Model, dict[tuple[Model, float], tuple[float, ...]]]"
_chains = weakref.WeakKeyDictionary()
"""Tokens per step of chains of drafts, by temperature, for targets that are slow to ask."""


def _with_experts_elsewhere(pair: Pair, temperature: float, batch: int, verify: str) -> Choice:
    """The chain that gives most tokens a second: each node takes experts that are to be read."""
    if not pair.drafts:
        setting = setting_of("lookup", budget=ExpertTimes.budgets[0])
        reason = "no experts are read for what is not found"
        return Choice(setting if _able(setting, pair, verify) else Setting(), reason)
    target, draft, text = pair.target, pair.drafts[0], bundled(pair)
    levels = draft.config.block_levels
    longest = min(ExpertTimes.budgets[-1], levels or ExpertTimes.budgets[-1])
    known = _chains.setdefault(target, {})
    if (draft, temperature) not in known:
        known[draft, temperature] = drafted.of_chains(pair, [text], temperature, longest)
    tokens = (1.0, *known[draft, temperature])
    times, taken = expert_times(target, text.tokens), draft_seconds(draft)
    rates = [
        batch * own / (times.pass_seconds(batch * (n + 1)) + (min(n, 1) if levels else n) * taken)
        for n, own in enumerate(tokens)
    ]
    able = [n for n in range(len(rates)) if not n or _able(setting_of(f"chain:{n}"), pair, verify)]
    best = max(able, key=rates.__getitem__)
    likeliest = max(range(1, len(rates)), key=rates.__getitem__)
    reason = (
        f"{times}; a chain of {likeliest} gives {tokens[likeliest]:.2f} tokens along "
        f"{len(text.tokens)} of bundled prompts, {rates[likeliest]:.2f} a second "
        f"({rates[0]:.2f} plain)"
    )
    return Choice(setting_of(f"chain:{best}") if best else Setting(), reason)


def no_deeper(setting: Setting, levels: int) -> Setting:
    """A setting whose draft makes so many passes at most; of a static tree a chain is left then."""
    if levels == MOST_LEVELS or setting.method not in ("specexec", "tree"):
        return setting
    if setting.growth is None:
        return setting_of(f"chain:{levels}")
    return dataclasses.replace(
        setting, growth=dataclasses.replace(setting.growth, depth=min(levels, setting.growth.depth))
    )


def _is_weighed(pair: Pair) -> bool:
    """Whether it is measured what a draft gains before it is taken: it, or its target, is large."""
    target, draft = pair.target, pair.drafts[0]
    if target.is_offloaded or draft.is_stacked or _untimed(pair) is not None:
        return False
    size, own = target.config.num_active_parameters, draft.config.num_active_parameters
    return own >= defaults.LARGE_DRAFT * size or size >= defaults.LEAST_WEIGHED


def _if_it_pays(pair: Pair, temperature: float, batch: int) -> Choice:
    """A chain or nodes of an n-gram model, as many as pay (see `drafted`), or none."""
    found = drafted.findings(pair, temperature, batch)
    if not found.pays:
        return Choice(Setting(), f"drafting would not pay: {found}, at best")
    return Choice(found.setting, str(found))


def _draftless(pair: Pair, temperature: float, batch: int, verify: str) -> Choice:
    """What needs no draft model, if it surely pays, or plain decoding (see `draftless`)."""
    if (obstacle := _untimed(pair)) is not None:
        return Choice(Setting(), f"there is no draft model, and {obstacle}")
    known = findings(pair, temperature, batch)
    able = [one for one in known.found if _able(one.setting, pair, verify)]
    if known.found and not able:
        return Choice(Setting(), f"there is no draft model, and {verify} is for trees of one")
    best = known.best(able)
    if best is not None:
        return Choice(best.setting, f"there is no draft model: {known.described(best)}")
    nearest = max(able, key=known.gain, default=None)
    return Choice(
        Setting(),
        f"there is no draft model, and nothing else would surely pay: {known.described(nearest)}",
    )


def _untimed(pair: Pair) -> str | None:
    """Why passes of a target are not timed layer by layer, or None."""
    target = pair.target
    if jax.process_count() > 1 or mesh_of(target) is not None:
        return "passes on a mesh are not timed"
    if target.is_stacked:
        return "passes over a stack of layers are not timed"
    if target.config.num_parameters < defaults.LEAST_TIMED:
        return "passes of so small a model are not timed"
    return None


def compared_with(pair: Pair, temperature: float, batch: int, verify: str = AUTO) -> Setting:
    """What measurements must be faster than: the shipped default, or where that is what pays by
    an estimate (a large model or draft, or none) plain decoding.
    """
    if not (pair.target.is_offloaded or pair.drafts) or (pair.drafts and _is_weighed(pair)):
        return Setting()
    return shipped(pair, temperature, batch, verify).setting


def shipped(pair: Pair, temperature: float, batch: int, verify: str = AUTO) -> Choice:
    """What is taken where nothing is measured by `bench` or `tune`.

    Where the model or its draft is large, by what it costs and gives (see `drafted`), and so what
    needs none where there is none (see `_draftless`). Of a target whose layers are read in every
    pass, as many nodes as cost no time, and where single experts are the chain that gains most (see
    `specjax.decoding.pass_times`).
    """
    sampled = temperature > 0
    if pair.target.expert_cache is not None:
        return _with_experts_elsewhere(pair, temperature, batch, verify)
    if pair.target.is_offloaded:
        return _streamed(pair, pair.target, sampled, verify)
    if not pair.drafts:
        return _draftless(pair, temperature, batch, verify)
    if _is_weighed(pair):
        found = _if_it_pays(pair, temperature, batch)
        return found if _able(found.setting, pair, verify) else found._replace(setting=Setting())
    here, kind = platform(), "sampling" if sampled else "greedy"
    named = defaults.SHIPPED.get((here, kind, batch == 1), defaults.ELSEWHERE)
    setting = setting_of(named, batch=batch)
    if not _able(setting, pair, verify):
        setting = setting_of(defaults.ELSEWHERE, batch=batch)
    return Choice(setting, f"the shipped default for {here}, {kind}")
