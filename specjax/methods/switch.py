"""The settings that a server chooses from at each step: off, chains, trees, lookup."""

import re
from collections.abc import Sequence

from specjax.base.notices import notice
from specjax.checkpoints.pair import Pair
from specjax.draft.drafter import Drafter
from specjax.draft.switching import SwitchingDrafter
from specjax.goodput.policy import OFF
from specjax.methods.method import PLAIN, Setting
from specjax.methods.registry import build, lacking, setting_of
from specjax.verify.rules import AUTO, RULES

SETTINGS = (*(OFF, "chain:1", "chain:3", "chain:7", "tree:7", "tree:15", "tree:31", "lookup:7"),)
"""What is chosen from where nothing is named, as far as a pair has what it needs. An n-gram model
is chosen from where it is named: each setting takes programs for every number of rows."""

_METHODS = {"chain": "chain", "tree": "specexec", "lookup": "lookup", "ngram": "ngram"}
"""The method of each kind of setting: trees are best-first ones of chosen nodes."""
_MOST_NODES = 128
_IS_COUNT = re.compile("[1-9][0-9]{0,8}")


def switching(pair: Pair, names: Sequence[str] = (), verify: str = AUTO) -> SwitchingDrafter:
    """A drafter that holds the settings of these names; by default all that the pair can.

    Of those by default a notice names the ones that are too deep for the draft's sliding window.

    Args:
      pair: the target and what drafts for it.
      names: such as `chain:7`; `off` is always among them.
      verify: the name of the rule that will verify the trees, or "auto".

    Raises:
      ValueError: there is no such setting, the pair lacks what it needs, or the rule is not
        lossless for it.
    """
    wanted = [OFF, *(name for name in names or SETTINGS if name != OFF)]
    made: dict[str, Drafter] = {}
    for name in dict.fromkeys(wanted):
        setting = read(name)
        try:
            drafter = None if lacking(setting.method, pair) else build(setting, pair, verify=verify)
        except ValueError as error:
            if names:
                raise ValueError(f"the setting {name} cannot be used: {error}") from error
            notice(f"the setting {name} is left out: {error}")
            continue
        refusal = _refusal(setting, pair, drafter, verify)
        if refusal is None and drafter is not None:
            made[name] = drafter
        elif names:
            raise ValueError(f"the setting {name} cannot be used: {refusal}.")
    return SwitchingDrafter.of(made)


def _refusal(setting: Setting, pair: Pair, drafter: Drafter | None, verify: str) -> str | None:
    """Why a setting cannot be used with a pair and a rule, or None."""
    if drafter is None:
        return f"it needs {lacking(setting.method, pair)}"
    if verify == AUTO:
        return None
    reason = RULES[verify].refusal(drafter.construction)
    return None if reason is None else f"the {verify} rule is not lossless for it, as {reason}"


def read(name: str) -> Setting:
    """The setting of a name: `off`, `chain:K`, `tree:K`, `lookup:K` or `ngram:K`.

    Raises:
      ValueError: it is none of these, or K is not from 1 to 128.
    """
    if name == OFF:
        return setting_of(PLAIN)
    kind, _, count = name.partition(":")
    if kind not in _METHODS:
        raise ValueError(
            f"no setting {name!r}; there are {OFF} and {', '.join(f'{k}:K' for k in _METHODS)}, "
            "where K is a number of nodes."
        )
    if not (_IS_COUNT.fullmatch(count) and int(count) <= _MOST_NODES):
        raise ValueError(
            f"the setting {name!r} has {count or 'no'} nodes; it must have 1 to {_MOST_NODES}."
        )
    if kind == "chain":
        return setting_of("chain", widths=(1,) * int(count))
    return setting_of(_METHODS[kind], budget=int(count))
