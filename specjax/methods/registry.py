"""Named ways to draft, what each takes when nothing is said, and how it is built."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.checkpoints import huggingface
from specjax.checkpoints.pair import Pair
from specjax.draft import Drafter, ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.staged import TableStage
from specjax.draft.token_recycling import RecycleDrafter
from specjax.methods.acceptance import Measured
from specjax.methods.sequoia import most_tokens
from specjax.methods.setting import DRAFT, METHODS, TABLE, Setting
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of, settled
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K
from specjax.trees.tree import TreeShape
from specjax.trees.widths import MOST_NODES, Widths, canonical, spelled, widest
from specjax.verify.rules import NAIVE, ONE_HOT, RECURSIVE, RULES, TRAVERSAL

STATIC = ("chain", "tree", "pool", "recycle")
GROWN = ("specexec", "staged", "lookup", "ngram", "hybrid")
MODEL_FREE = ("lookup", "ngram", "recycle")
AUTO, ALL = "auto", "all"

# Widths where none are named: for one row, and for several. Chosen with `specjax bench` on its own
# prompts, bundled pair, 2 CPU cores (Zen 5), jax 0.10.2, 2026-11-21. A pass of 8 columns is where
# a chain's length stops paying: at temperature 0 chains of 3 / 5 / 7 / 10 gave 1.75 / 1.68 / 1.98 /
# 1.71 times plain decoding, at 0.8 1.29 / 1.11 / 1.28 / 1.02; grown to 100M in bfloat16, 7 was the
# best of 3 / 5 / 7 at 0.8 (2.14), and at 0 chains of 6 / 8 / 13 gave 3.05 / 3.29 / 3.43. For 8 rows
# chains of 1 / 2 / 3 / 5 gave 1.55 / 1.35 / 1.63 / 1.31. No tree or pool was faster than a chain.
_WIDTHS = {"chain": (1,) * 7, "tree": (2, 1, 1, 1, 1, 1, 1), "pool": (1,) * 5}
_WIDTHS_OF_MANY = {"chain": (1,) * 3, "tree": (2, 1), "pool": (1,)}
_BUDGET, _BUDGET_OF_MANY = 15, 7
_LONGEST = 32  # levels are unrolled, and nothing was ever accepted as deep

# Temperatures of a draft's distribution where it scores nodes, and the decay: tokens per step of
# best-first trees on the bundled prompts, bundled pair, naive rule, 2026-11-21. Greedy rows, 0.25 /
# 0.35 / 0.45 / 0.55: 6.87 / 7.03 / 6.83 / 6.41 with 15 nodes (decay 0.9: 7.00 / 7.09 / 6.63 / 6.11)
# and 7.98 / 8.28 / 8.11 / 7.49 with 31. Temperature 0.8, 0.6 / 0.8 / 1 / 1.25: 2.15 / 2.17 / 2.16 /
# 2.14 and 2.27 / 2.32 / 2.31 / 2.28. Beams and width of 8 instead of 4, 31 nodes: 8.28 again, 2.43.
# Seconds with 1 beam over those with 4, 15 nodes, 8 prompts x 128 tokens each of HumanEval and of
# Spec-Bench at T = 0 and 0.8, 2026-11-22: specexec 0.935, 0.934, 0.945, 0.936 and hybrid 0.897,
# 0.975, 0.939, 0.906 with tokens per step within 1 %; 8 rows, 7 nodes: 0.875, 0.929. Staged 0.974,
# 1.017 on HumanEval. With 31 nodes 0.981, 0.981, 1.083 (Spec-Bench at 0).
_TEMPERATURES = (0.35, 0.8)
_DECAY = 0.999
_GUESS, _FAN, _STAGED_BEAMS = (1, 1), 2, 4  # a pass of 8 columns, which is fast on a CPU
_DRAFT_GUESS = (1,) * 6
# Measured along 24 x 128 of the target's tokens after the bundled prompts, 2026-11-21: how often
# the most weighty follower of matches of 0 to 8 tokens is right at T = 0 (at 0.8: 0, 0.19, 0.32,
# 0.46, 0.62, 0.66, 0.58, 0.87, 0.56), acceptance of the draft at 0.8 (at 0: 0.88, 0.07, 0.02, 0.01
# by rank; 0.83, 0.69, 0.59, ... 0.36 survive), and how often the successor of each rank in the
# recycling table is right, mean of both.
_TRUST = (0.0, 0.36, 0.59, 0.82, 0.83, 0.83, 0.86, 0.89, 0.96)
_ACCEPTANCE = Measured(
    np.array((0.733, 0.078, 0.037, 0.022)),
    np.array((0.715, 0.544, 0.446, 0.369, 0.31, 0.267, 0.231, 0.195, 0.166, 0.141, 0.125, 0.111,
              0.098, 0.086, 0.077, 0.069)),
).by_depth  # fmt: skip
_RECYCLED = (0.44, 0.047, 0.02, 0.015, 0.013, 0.008, 0.008, 0.006)
_LEAST = {"lookup": 1, "ngram": 2, "hybrid": 2}
_FOLLOWERS = {"lookup": 3, "ngram": 3, "hybrid": 2}

_CHILDREN = {
    NAIVE.name: TOP_K,
    ONE_HOT.name: TOP_K,
    RECURSIVE.name: DISTINCT,
    TRAVERSAL.name: DISTINCT,
}


def check_method(name: str, *others: str) -> None:
    """Checks that `name` is a method, or one of `others`.

    Raises:
      ValueError: it is not.
    """
    if name not in (*others, *METHODS):
        raise ValueError(f"no method {name!r}; there are {', '.join((*others, *METHODS))}.")


def check_rule(name: str) -> None:
    """Checks that `name` is a verification rule.

    Raises:
      ValueError: it is not.
    """
    if name not in (AUTO, *RULES):
        raise ValueError(f"no verification rule {name!r}; there are auto, {', '.join(RULES)}.")


def lacking(method: str, pair: Pair) -> str | None:
    """What a method needs and the pair has not, or None."""
    if method != "none" and method not in MODEL_FREE and not pair.drafts:
        return "a draft model; name one with --draft"
    if method == "ngram" and pair.table is None:
        return "an n-gram model; name its folder with --stage"
    if method == "staged" and pair.table is None and pair.smaller is None:
        return "a second stage; name an n-gram or model folder with --stage"
    return None


def names_of(text: str, pair: Pair | None) -> list[str]:
    """The methods that a text names, separated by commas; all that `pair` can do for "all".

    Raises:
      ValueError: one is unknown.
    """
    if text.strip() == ALL:
        return [name for name in METHODS[1:] if pair is None or lacking(name, pair) is None]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_method(name)
    return names


def setting_of(
    method: str,
    widths: Widths | None = None,
    budget: int | None = None,
    batch: int = 1,
    drafts: int = 1,
) -> Setting:
    """The setting of a method for `batch` rows, with a tree or a budget of nodes if one is named.

    `drafts` is how many share the budget of a pool.

    Raises:
      ValueError: there is no such method, or it does not take what is named.
    """
    check_method(method)
    if method == "none" and (widths is not None or budget is not None):
        raise ValueError("the method none drafts nothing; it takes no tree and no budget.")
    if widths is not None and budget is not None:
        raise ValueError(
            f"a tree ({spelled(widths)}) and a budget ({budget}) are named; name one of them."
        )
    if budget is not None and budget < 1:
        raise ValueError(f"the budget is {budget}; it must be at least 1 node.")
    if budget is not None and budget > MOST_NODES:
        raise ValueError(f"the budget is {budget}; a tree has {MOST_NODES} nodes at most.")
    if method in GROWN:
        return _grown(method, widths, budget or (_BUDGET if batch == 1 else _BUDGET_OF_MANY))
    if method == "none":
        return Setting()
    if method == "chain" and widths is not None and widest(widths) > 1:
        raise ValueError(f"a chain has widths of 1, not {spelled(widths)}; use the method tree.")
    return Setting(method, canonical(widths or _static(method, budget, batch, drafts)))


def _static(method: str, budget: int | None, batch: int, drafts: int) -> Widths:
    """The widths of a method with a static tree."""
    if method == "recycle":
        nodes = budget or (_BUDGET if batch == 1 else _BUDGET_OF_MANY)
        return most_tokens(_RECYCLED, nodes, min(nodes, 12)).shape.widths
    if budget is None:
        return (_WIDTHS if batch == 1 else _WIDTHS_OF_MANY)[method]
    if method == "tree":
        return most_tokens(_ACCEPTANCE, budget, min(budget, 16)).shape.widths
    return (1,) * min(_LONGEST, budget if method == "chain" else max(1, budget // max(1, drafts)))


def _grown(method: str, widths: Widths | None, budget: int) -> Setting:
    """The setting of a method whose trees grow."""
    if widths is not None:
        raise ValueError(
            f"the method {method} grows trees of its own, not {spelled(widths)}; bound their nodes "
            "with a budget."
        )
    growth = growth_of(budget)
    if method in MODEL_FREE:
        return Setting(method, growth=growth)
    if method != "staged":
        return Setting(method, growth=growth, temperatures=_TEMPERATURES)
    growth = dataclasses.replace(growth, beams=max(growth.beams, _STAGED_BEAMS))
    return Setting(method, None, growth, _TEMPERATURES, TABLE, _GUESS, _FAN)


def growth_of(budget: int) -> Growth:
    """How trees of so many nodes grow."""
    sizes = ((16, 1, 4, 16), (32, 4, 4, 16), (64, 8, 8, 16), (128, 16, 8, 24), (512, 32, 16, 24))
    found = next((size[1:] for size in sizes if budget <= size[0]), (128, 32, 32))
    return Growth(budget, *found, _DECAY)


def build(setting: Setting, pair: Pair, verify: str = AUTO) -> Drafter | None:
    """The drafter that a setting names; None for plain decoding.

    Every rule gets the children of which it accepts most: naive and one-hot the most likely ones,
    recursive and traversal draws without replacement, the others independent draws. The rule
    "auto" of one draft's trees is traversal, that of several drafts' multi-step.

    Raises:
      ValueError: the pair lacks what the method needs.
    """
    check_method(setting.method)
    if missing := lacking(setting.method, pair):
        raise ValueError(f"the method {setting.method} needs {missing}.")
    return settled(_built(setting, pair, verify), mesh_of(pair.target))


def _built(setting: Setting, pair: Pair, verify: str) -> Drafter | None:
    if setting.method == "none":
        return None
    if setting.method == "recycle":
        return _recycling(setting, pair)
    if setting.method in GROWN:
        growth = _needed(setting, "growth")
        text = setting.method in MODEL_FREE
        return _of_text(setting, pair, growth) if text else _best_first(setting, pair, growth)
    drafts = pair.drafts if setting.method == "pool" else pair.drafts[:1]
    return _expansion(drafts, _needed(setting, "widths"), verify)


def _expansion(drafts: Sequence[Model], widths: Widths, verify: str) -> ExpansionDrafter:
    """Static trees with the children of which a rule accepts most."""
    judged = TRAVERSAL.name if verify == AUTO and len(drafts) == 1 else verify
    return ExpansionDrafter.of(drafts, widths, _CHILDREN.get(judged, DRAWN))


def _needed(setting: Setting, name: str) -> Any:
    value = getattr(setting, name)
    if value is None:
        raise ValueError(f"the method {setting.method} needs {name}; the setting names none.")
    return value


def _recycling(setting: Setting, pair: Pair) -> RecycleDrafter:
    shape = TreeShape(_needed(setting, "widths"))
    chance = (
        jnp.zeros(shape.widest).at[: len(_RECYCLED)].set(jnp.asarray(_RECYCLED[: shape.widest]))
    )
    return RecycleDrafter(chance, shape, pair.target.config.vocab_size)


def _of_text(setting: Setting, pair: Pair, growth: Growth) -> TextDrafter:
    return TextDrafter(
        trust=jnp.asarray(_TRUST, jnp.float32),
        table=pair.table if setting.method == "ngram" else None,
        growth=growth,
        vocabulary=pair.target.config.vocab_size,
        least=_LEAST[setting.method],
        followers=_FOLLOWERS[setting.method],
    )


def _best_first(setting: Setting, pair: Pair, growth: Growth) -> Drafter:
    temperatures = jnp.asarray(setting.temperatures or _TEMPERATURES, jnp.float32)
    table, second = None, None
    if setting.method == "staged":
        table, second = _stages(setting, pair)
    drafter = BestFirstDrafter(pair.drafts[0], temperatures, growth, table, second)
    if setting.method != "hybrid":
        return drafter
    trust = jnp.asarray(_TRUST, jnp.float32)
    return HybridDrafter(drafter, trust, None, _LEAST["hybrid"], _FOLLOWERS["hybrid"])


def _stages(setting: Setting, pair: Pair) -> tuple[TableStage | None, Drafter | None]:
    """The second stage: a table, or a smaller draft where that is asked for or all there is."""
    if setting.stage == DRAFT and pair.smaller is None:
        raise ValueError("the setting asks for a smaller draft; name its folder with --stage.")
    if pair.table is None or setting.stage == DRAFT:
        assert pair.smaller is not None
        guess = setting.guess if setting.stage == DRAFT else None
        return None, ExpansionDrafter.of([pair.smaller], guess or _DRAFT_GUESS, TOP_K)
    shape = TreeShape(setting.guess or _GUESS)
    return TableStage(pair.table, shape, setting.fan or _FAN), None


def load_drafter(
    names: str | Path | Sequence[str | Path] = "bundled",
    widths: Widths | None = None,
    verify: str = AUTO,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Drafter:
    """A pool of the drafts in a folder or several, or of all bundled ones.

    `widths` are those of each draft's tree (see `TreeShape`); `verify` is the rule that will judge
    them, which names how children are made (see `build`). Drafts stay float32 on a CPU, where
    small bfloat16 products are slow. On a `mesh`, the target's, a `draft` axis shares the pool.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: the drafts have different vocabularies.
    """
    drafts = huggingface.load_drafts(names, dtype, mesh)
    return _expansion(drafts, widths or _WIDTHS["pool"], verify)
