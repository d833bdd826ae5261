"""A method of drafting as data: its record, and a setting of it."""

import dataclasses
from collections.abc import Callable

from specjax.checkpoints.pair import Pair
from specjax.draft.drafter import Drafter
from specjax.draft.growth import Growth
from specjax.trees.tree import TreeShape
from specjax.trees.widths import Widths, spelled

TABLE, DRAFT = "ngram", "draft"
"""What may draft for a staged draft: an n-gram table, or a smaller draft."""
PLAIN = "none"
"""The name of plain decoding."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method and what it takes; fields that it does not take are None.

    Attributes:
      method: a name in `METHODS`.
      widths: children per level of a static tree (chain, tree, pool, recycle).
      growth: how a tree that grows does (specexec, staged, hybrid, lookup, ngram).
      temperatures: of the draft's distribution where it scores nodes, for greedy rows and for
        sampled ones.
      stage: what drafts for a staged draft, an "ngram" table or a smaller "draft".
      guess: the tree that the second stage drafts, below each of the `fan` likeliest nodes.
      fan: of how many nodes of a round.
      draft: the model itself in fewer bits, such as "self:8bit", where a pair has no draft.
    """

    method: str = PLAIN
    widths: Widths | None = None
    growth: Growth | None = None
    temperatures: tuple[float, float] | None = None
    stage: str | None = None
    guess: Widths | None = None
    fan: int | None = None
    draft: str | None = None

    @property
    def nodes(self) -> int:
        """The most nodes below the root of one draft's tree."""
        if self.growth is not None:
            return self.growth.budget
        return 0 if self.widths is None else TreeShape(self.widths).num_nodes

    @property
    def label(self) -> str:
        """The method with its shape or budget, such as `chain 1,1,1` or `specexec 15`."""
        method = METHODS.get(self.method)
        own = "" if self.draft is None else f" of {self.draft}"
        if self.growth is not None or (method is not None and method.shaped_by_budget):
            return f"{self.method} {self.nodes}{own}"
        return f"{self.method} {spelled(self.widths)}".strip() + own


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a tree is asked for, checked.

    Attributes:
      widths: children per level, or None.
      budget: most nodes below the root, or None; never beside `widths`.
      batch: rows of a batch.
      drafts: drafts that share the budget.
    """

    widths: Widths | None = None
    budget: int | None = None
    batch: int = 1
    drafts: int = 1


@dataclasses.dataclass(frozen=True)
class Method:
    """A named way to draft.

    Attributes:
      name: what `--method` calls it.
      summary: its tree in one line, for help and for the table of methods.
      source: the paper and its arXiv number, or an empty text.
      setting: gives the setting of a size; it raises ValueError for one that it does not take.
      build: gives the drafter of a setting, a pair and the name of a rule (perhaps "auto").
      lacks: what the method needs and the pair has not, as the end of a sentence, or None.
      takes_widths: whether a tree may be named level by level.
      takes_budget: whether its nodes may be bounded.
      shaped_by_budget: whether its label names its nodes, not its widths.
    """

    name: str
    summary: str
    setting: Callable[[Size], Setting]
    build: Callable[[Setting, Pair, str], Drafter]
    lacks: Callable[[Pair], str | None] = lambda _: None
    source: str = ""
    takes_widths: bool = True
    takes_budget: bool = True
    shaped_by_budget: bool = False


METHODS: dict[str, Method] = {}
"""Every method by its name, in the order of help; `register_method` adds one."""


def register_method(method: Method) -> None:
    """Makes a method known by its name in this process: to `setting_of`, `build`, and measuring.

    Raises:
      ValueError: there is one of that name, or it is "auto" or "all".
    """
    if method.name in METHODS or method.name in ("auto", "all"):
        raise ValueError(f"there is a method {method.name!r}; give this one another name.")
    METHODS[method.name] = method


def check_method(name: str, *others: str) -> None:
    """Checks that `name` is a method, or one of `others`.

    Raises:
      ValueError: it is not.
    """
    if name not in (*others, *METHODS):
        raise ValueError(f"no method {name!r}; there are {', '.join((*others, *METHODS))}.")
