"""Methods by name: what a pair lacks for one, its setting of a size, and its drafter."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jax.sharding import Mesh

from specjax.checkpoints.load import load_drafts
from specjax.checkpoints.pair import Pair, with_own_draft
from specjax.draft import Drafter
from specjax.methods import defaults
from specjax.methods.builtin import expansion
from specjax.methods.method import METHODS, PLAIN, Setting, Size, check_method, listed, parsed
from specjax.parallel.mesh import mesh_of, settled
from specjax.trees.widths import MOST_NODES, Widths, canonical, spelled
from specjax.verify.rules import AUTO

ALL = "all"


def lacking(method: str, pair: Pair) -> str | None:
    """What a method needs and the pair has not, or None.

    Raises:
      ValueError: there is no such method.
    """
    check_method(method)
    return METHODS[method].lacks(pair)


def names_of(text: str, pair: Pair | None) -> list[str]:
    """The methods that a text names, separated by commas, some perhaps with a size.

    All that `pair` can do for "all", but for methods that are for servers alone.

    Raises:
      ValueError: one is unknown, or its size is none.
    """
    if text.strip() == ALL:
        able = (n for n in METHODS if pair is None or lacking(n, pair) is None)
        return [name for name in able if name != PLAIN and not METHODS[name].for_servers]
    names = listed(text)
    for name in names:
        check_method(name)
    return names


def check_sizes(names: Sequence[str], options: Mapping[str, object]) -> None:
    """Checks that options which size methods have one to size, among the names of methods.

    Raises:
      ValueError: all of them have a size, and an option is named (it is not None) beside them.
    """
    named = [option for option, value in options.items() if value is not None]
    if named and names and not any(name in METHODS for name in names):
        raise ValueError(
            f"{', '.join(names)}: each has a size, and {named[0]} {options[named[0]]} is named "
            "beside them; leave one out."
        )


def setting_of(
    method: str,
    *,
    widths: Widths | None = None,
    budget: int | None = None,
    batch: int = 1,
    drafts: int = 1,
) -> Setting:
    """The setting of a method, with a size, a tree or a budget of nodes if one is named.

    Args:
      method: a name in `METHODS`, perhaps with a size, as `Setting.name` spells it: "chain:7",
        "tree:2,1,1", "specexec:15", "eagle:60,8,10". What the size is, the method's record says.
      widths: children per level of a static tree (see `TreeShape`).
      budget: most nodes of a tree below its root.
      batch: rows of a batch; smaller trees are the default for several.
      drafts: how many drafts share the budget of a pool.

    Returns:
      The setting, from which `build` makes a drafter.

    Raises:
      ValueError: there is no such method, or it does not take what is named, or a size is named
        twice.
    """
    named = parsed(method)
    if named[1:] != (None, None, ()) and (widths, budget) != (None, None):
        other = f"a tree ({spelled(widths)})" if budget is None else f"a budget ({budget})"
        raise ValueError(f"{method} has a size, and {other} is named beside it; name one.")
    method, widths, budget = named.method, named.widths or widths, named.budget or budget
    found = METHODS[method]
    if not (found.takes_widths or found.takes_budget) and (widths, budget) != (None, None):
        raise ValueError(f"the method {method} drafts nothing; it takes no tree and no budget.")
    if widths is not None and budget is not None:
        raise ValueError(
            f"a tree ({spelled(widths)}) and a budget ({budget}) are named; name one of them."
        )
    if budget is not None and budget < 1:
        raise ValueError(f"the budget is {budget}; it must be at least 1 node.")
    if budget is not None and budget > MOST_NODES:
        raise ValueError(f"the budget is {budget}; a tree has {MOST_NODES} nodes at most.")
    if widths is not None and not found.takes_widths:
        raise ValueError(
            f"the method {method} grows trees of its own, not {spelled(widths)}; bound their nodes "
            "with a budget."
        )
    if budget is not None and not found.takes_budget:
        raise ValueError(f"the method {method} takes no budget of nodes, and {budget} is named.")
    widths = None if widths is None else canonical(widths)
    return found.setting(Size(widths, budget, batch, drafts, named.numbers))


def build(setting: Setting, pair: Pair, *, verify: str = AUTO) -> Drafter:
    """The drafter that a setting names.

    Args:
      setting: a method and what it takes, such as `setting_of("chain")`.
      pair: the target and what drafts for it.
      verify: the name of the rule that will verify its trees. Every rule gets the children of which
        it accepts most (`Rule.children`); for "auto" those that traversal wants of one draft, and
        those that multi-step wants of several (`find_rule` then takes the rule).

    Returns:
      The drafter, on the target's mesh if it is on one.

    Raises:
      ValueError: there is no such method, or the pair lacks what it needs.
    """
    if setting.draft is not None:
        pair = with_own_draft(pair, setting.draft)
    if missing := lacking(setting.method, pair):
        raise ValueError(f"the method {setting.method} needs {missing}.")
    return settled(METHODS[setting.method].build(setting, pair, verify), mesh_of(pair.target))


def table() -> str:
    """The methods as the Markdown table of README and docs/methods.md."""
    rows = [
        f"| `{each.name}` | `{setting_of(each.name).name}` | {each.summary} | {each.source} |"
        for each in METHODS.values()
    ]
    return "\n".join(["| method | default size | its tree | source |", "|---|---|---|---|", *rows])


def load_drafter(
    names: str | Path | Sequence[str | Path] = "bundled",
    *,
    widths: Widths | None = None,
    verify: str = AUTO,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Drafter:
    """A pool of drafts from files.

    Args:
      names: a folder of one draft, several folders, or "bundled" for all bundled ones.
      widths: children per level of each draft's tree (see `TreeShape`).
      verify: the rule that will verify the trees, which says how children are made (see `build`).
      dtype: "float32" or "bfloat16"; None as `load_drafts` does.
      mesh: the target's; its `draft` axis shares the pool.

    Returns:
      The drafter.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: the drafts have different vocabularies.
    """
    drafts = load_drafts(names, dtype=dtype, mesh=mesh)
    return expansion(drafts, widths or defaults.WIDTHS["pool"], verify)
