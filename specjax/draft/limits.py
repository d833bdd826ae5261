"""What the numbers of a growing tree may be."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import ModelConfig
from specjax.trees.widths import check_count, is_number

_NEARLY_ONE = 0.9999  # a child's score must be below its parent's


def check_growth(values: Mapping[str, Any]) -> None:
    """Checks the fields of a `Growth`, which a file may have made anything.

    Raises:
      ValueError: one is not what it should be.
    """
    for name in ("budget", "beams", "width", "depth"):
        check_count(name, values[name])
    decay, gain, by_level = (values[name] for name in ("decay", "least_gain", "by_level"))
    if not is_number(decay) or not 0 < decay <= _NEARLY_ONE:
        raise ValueError(f"decay is {decay}; it must lie in (0, {_NEARLY_ONE}].")
    if not is_number(gain) or not gain >= 0:
        raise ValueError(f"least_gain is {gain}; it must be at least 0, and finite.")
    if not isinstance(by_level, bool):
        raise ValueError(f"by_level is {by_level!r}; it must be true or false.")


def check_depth(config: ModelConfig, levels: int) -> None:
    """Checks that a draft can grow trees of so many levels.

    In several passes a node sees its ancestors in the tree whatever the draft's sliding window is,
    so that the deepest node that is run, a level above the last, may not be deeper than the window.
    A block has an end.

    Raises:
      ValueError: it would be.
    """
    most = config.block_levels
    if most is not None and levels > most:
        raise ValueError(
            f"a draft with block_size {most + 1} predicts {most} tokens in its pass; a tree of "
            f"{levels} levels is deeper."
        )
    window = min((each for each in config.windows if each is not None), default=levels)
    if levels - 1 > window:
        raise ValueError(
            f"a draft with a sliding window of {window} tokens cannot grow trees of {levels} "
            f"levels; they may have {window + 1}."
        )
