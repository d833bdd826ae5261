"""The settings that a server chooses from at each step, of any methods."""

from collections.abc import Sequence

from specjax.base.notices import notice
from specjax.checkpoints.pair import Pair
from specjax.draft.drafter import Drafter
from specjax.draft.switching import SwitchingDrafter
from specjax.methods.method import PLAIN, Setting
from specjax.methods.registry import build, lacking, setting_of
from specjax.verify.rules import AUTO, RULES

SETTINGS = (
    *(PLAIN, "chain:1", "chain:3", "chain:7", "specexec:7", "specexec:15", "specexec:31"),
    "lookup:7",
)
"""What is chosen from where nothing is named, as far as a pair has what it needs. Others are chosen
from where they are named: each setting takes programs for every number of rows."""

_MOST_NODES = 128


def switching(pair: Pair, names: Sequence[str] = (), verify: str = AUTO) -> SwitchingDrafter:
    """A drafter that holds the settings of these names; by default all that the pair can.

    Of those by default a notice names the ones that are too deep for the draft's sliding window.

    Args:
      pair: the target and what drafts for it.
      names: such as "chain:7" (see `specjax.setting_of`); "none" is always among them.
      verify: the name of the rule that will verify the trees, or "auto".

    Raises:
      ValueError: there is no such setting, the pair lacks what it needs, or the rule is not
        lossless for it.
    """
    made: dict[str, Drafter] = {}
    for setting in dict.fromkeys(map(read, (PLAIN, *(names or SETTINGS)))):
        name = setting.name
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
    """The setting of a name, `METHOD` or `METHOD:SIZE`, for a step of a server.

    Raises:
      ValueError: there is no such setting, or it has more than 128 nodes.
    """
    setting = setting_of(name)
    if setting.nodes > _MOST_NODES:
        raise ValueError(
            f"the setting {name!r} has {setting.nodes} nodes; a server's has {_MOST_NODES} at most."
        )
    return setting
