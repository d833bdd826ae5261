"""A method of drafting as data: its record, a setting of it, and how both are spelled.

What drafts is written `METHOD` or `METHOD:SIZE` everywhere: `none`, `chain:7`, `tree:2,1,1`,
`specexec:15`. `Setting.name` writes it, `parsed` reads it.
"""

import dataclasses
import re
import reprlib
from collections.abc import Callable
from typing import NamedTuple

from specjax.checkpoints.pair import Pair
from specjax.draft.drafter import Drafter
from specjax.draft.growth import Growth
from specjax.draft.lookahead import Window
from specjax.goodput.policy import PLAIN as PLAIN
from specjax.trees.tree import TreeShape
from specjax.trees.widths import MOST_NODES, Widths, read, spelled

TABLE, DRAFT = "ngram", "draft"
"""What may draft for a staged draft: an n-gram table, or a smaller draft."""
NODES, LEVELS, WIDTHS, NO_SIZE = "nodes", "levels", "widths", ""
GROWTH, WINDOW = "nodes,levels,top-k", "columns,tokens,candidates"
"""What the SIZE of `METHOD:SIZE` is: the most nodes of a tree, the levels of a chain, the children
of each level (see `specjax.trees.widths`), nothing, or several numbers: nodes with perhaps levels
and top-k behind them, or a `specjax.draft.lookahead.Window`."""
_NAME, _COUNT = re.compile("[a-zA-Z][a-zA-Z0-9_-]*"), re.compile("[1-9][0-9]{0,8}")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method and what it takes; fields that it does not take are None.

    Attributes:
      method: a name in `METHODS`.
      widths: children per level of a static tree (chain, tree, pool, recycle).
      growth: how a tree that grows does (specexec, staged, hybrid, lookup, ngram).
      temperatures: of the draft's distribution where it scores nodes, for greedy rows and for
        sampled ones; None for those of its kind of draft.
      stage: what drafts for a staged draft, an "ngram" table or a smaller "draft".
      guess: the tree that the second stage drafts, below each of the `fan` likeliest nodes.
      fan: of how many nodes of a round.
      window: of lookahead decoding.
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
    window: Window | None = None

    @property
    def nodes(self) -> int:
        """The most nodes below the root of one draft's tree."""
        if self.growth is not None:
            return self.growth.budget
        if self.window is not None:
            return self.window.nodes
        return 0 if self.widths is None else TreeShape(self.widths).num_nodes

    @property
    def name(self) -> str:
        """`METHOD` or `METHOD:SIZE`, from which `specjax.setting_of` makes such a setting.

        It carries the method and its size alone: what else differs from what `setting_of` gives
        (temperatures, decay, another draft, a shape that a budget did not make) is in the fields.
        """
        method = METHODS.get(self.method)
        if self.window is not None:
            return f"{self.method}:{','.join(map(str, self.window))}"
        by_widths = self.growth is None and (method is None or method.size == WIDTHS)
        size = spelled(self.widths) if by_widths else str(self.nodes or "")
        if self.growth is not None and method is not None and method.size == GROWTH:
            whole = self.growth.depth, self.growth.width
            usual = method.setting(Size(budget=self.nodes)).growth
            assert usual is not None
            shown = 2 if usual.width != whole[1] else 1 if usual.depth != whole[0] else 0
            size = ",".join(map(str, (self.nodes, *whole[:shown])))
        return f"{self.method}:{size}" if size else self.method

    @property
    def label(self) -> str:
        """The name, and the draft where the setting brings one: `chain:7 of self:8bit`."""
        return self.name if self.draft is None else f"{self.name} of {self.draft}"


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a tree is asked for, checked.

    Attributes:
      widths: children per level, or None.
      budget: most nodes below the root, or None; never beside `widths`.
      batch: rows of a batch.
      drafts: drafts that share the budget.
      numbers: what else a SIZE of several numbers says.
    """

    widths: Widths | None = None
    budget: int | None = None
    batch: int = 1
    drafts: int = 1
    numbers: tuple[int, ...] = ()


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
      for_servers: whether only a server gives it anything that another method has not; "all" of
        `bench`, `tune` and `verify` leaves it out.
      size: what the SIZE of `METHOD:SIZE` is: `NODES`, `LEVELS`, `WIDTHS`, `GROWTH`, `WINDOW` or
        `NO_SIZE`.
    """

    name: str
    summary: str
    setting: Callable[[Size], Setting]
    build: Callable[[Setting, Pair, str], Drafter]
    lacks: Callable[[Pair], str | None] = lambda _: None
    source: str = ""
    takes_widths: bool = True
    takes_budget: bool = True
    for_servers: bool = False
    size: str = NODES


METHODS: dict[str, Method] = {}
"""Every method by its name, in the order of help; `register_method` adds one."""


def register_method(method: Method) -> None:
    """Makes a method known by its name in this process: to `setting_of`, `build`, and measuring.

    Raises:
      ValueError: there is one of that name, it is "auto" or "all", or it is not a letter with
        letters, digits, - and _ after it.
    """
    if method.name in METHODS or method.name in ("auto", "all"):
        raise ValueError(f"there is a method {method.name!r}; give this one another name.")
    if not _NAME.fullmatch(method.name):
        raise ValueError(
            f"the method's name is {method.name!r}; it must be a letter with letters, digits, - "
            "and _ after it."
        )
    METHODS[method.name] = method


class Named(NamedTuple):
    """What a text says of a setting: the method, and its size as widths, as a budget of nodes or as
    other numbers.
    """

    method: str
    widths: Widths | None = None
    budget: int | None = None
    numbers: tuple[int, ...] = ()


def parsed(text: str, *others: str) -> Named:
    """The method and size of a text, `METHOD` or `METHOD:SIZE`, as `Setting.name` writes it.

    Args:
      text: what is read.
      others: what else the caller takes, for the sentence about a method that is unknown.

    Raises:
      ValueError: there is no such method, or the size is none that it takes.
    """
    method, colon, size = text.partition(":")
    if method not in METHODS:
        known = ", ".join((*others, *METHODS))
        raise ValueError(f"no method {reprlib.repr(method)}; there are {known}.")
    kind = METHODS[method].size
    if not colon:
        return Named(method)
    if kind == NO_SIZE:
        raise ValueError(f"the method {method} takes no size, not {reprlib.repr(size)}.")
    if kind == WIDTHS:
        return Named(method, widths=read(size, f"the size of {reprlib.repr(text)}"))
    several = kind in (GROWTH, WINDOW)
    numbers = size.split(",") if several else [size]
    able = all(_COUNT.fullmatch(each) and int(each) <= MOST_NODES for each in numbers[:2])
    able &= all(_COUNT.fullmatch(each) or (kind, each) == (WINDOW, "0") for each in numbers[2:])
    few = kind == WINDOW and len(numbers) < kind.count(",") + 1
    if not able or few or len(numbers) > kind.count(",") + 1 or max(map(int, numbers)) > MOST_NODES:
        what = f"{kind}, each" if several else "a number of nodes,"
        raise ValueError(
            f"the size of {reprlib.repr(text)} is {reprlib.repr(size)}; it must be {what} 1 to "
            f"{MOST_NODES}."
        )
    found = tuple(map(int, numbers))
    if kind == LEVELS:
        return Named(method, widths=(1,) * found[0])
    if kind == WINDOW:
        return Named(method, numbers=found)
    return Named(method, budget=found[0], numbers=found[1:])


def listed(text: str) -> list[str]:
    """The texts of several settings with commas between them, such as `none,tree:2,1,chain:7`.

    A comma before a digit is one of widths.
    """
    return [each.strip() for each in re.split(r",(?!\s*[0-9])", text)]


def check_method(name: str, *others: str) -> None:
    """Checks that `name` is a method, perhaps with a size, or one of `others`.

    Raises:
      ValueError: it is not.
    """
    if name not in others:
        parsed(name, *others)
