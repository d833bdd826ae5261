"""A method of drafting with all it is built from, as plain values that a file can hold."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from specjax.draft.growth import Growth
from specjax.tree import TreeShape
from specjax.widths import Widths, canonical, of_json, spelled

METHODS = ("none", "chain", "tree", "pool", "specexec", "staged", "lookup", "ngram", "recycle",
           "hybrid")  # fmt: skip
TABLE, DRAFT = "ngram", "draft"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method and what it takes; fields that it does not take are None.

    `widths` is the static tree of chain, tree, pool and recycle; `growth` how the tree of specexec,
    staged, hybrid, lookup and ngram grows. `temperatures` sharpen the draft's law where it scores
    nodes, for greedy rows and for sampled ones. `stage` says who guesses for a staged draft, an
    "ngram" table or a smaller "draft"; `guess` is the tree of its guesses, below each of the `fan`
    likeliest nodes of a round.
    """

    method: str = "none"
    widths: Widths | None = None
    growth: Growth | None = None
    temperatures: tuple[float, float] | None = None
    stage: str | None = None
    guess: Widths | None = None
    fan: int | None = None

    @property
    def nodes(self) -> int:
        """The most nodes below the root of one draft's tree."""
        if self.growth is not None:
            return self.growth.budget
        return 0 if self.widths is None else TreeShape(self.widths).num_nodes

    @property
    def label(self) -> str:
        """The method with its shape or budget, such as `chain 1,1,1` or `specexec 15`."""
        if self.growth is not None or self.method == "recycle":
            return f"{self.method} {self.nodes}"
        return f"{self.method} {spelled(self.widths)}".strip()


def to_json(setting: Setting) -> dict[str, Any]:
    """The fields that the method takes."""
    found = dataclasses.asdict(setting)
    return {name: value for name, value in found.items() if value is not None}


def from_json(values: Mapping[str, Any], where: str) -> Setting:
    """The setting that a file holds.

    Raises:
      ValueError: a name is unknown, or a value is not what it should be; `where` is in the
        sentence.
    """
    _check_names(values, Setting, where)
    changed = dict(values)
    if changed.get("method", "none") not in METHODS:
        raise ValueError(
            f"{where}: no method {changed['method']!r}; there are {', '.join(METHODS)}."
        )
    if changed.get("stage") not in (None, TABLE, DRAFT):
        raise ValueError(f"{where}: no stage {changed['stage']!r}; there are {TABLE} and {DRAFT}.")
    try:
        for name in ("widths", "guess"):
            if name in changed:
                changed[name] = canonical(of_json(changed[name]))
        if "growth" in changed:
            _check_names(changed["growth"], Growth, f"{where}, growth")
            changed["growth"] = Growth(**changed["growth"])
        if "temperatures" in changed:
            greedy, sampled = (float(value) for value in changed["temperatures"])
            changed["temperatures"] = greedy, sampled
        return Setting(**changed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_names(values: Mapping[str, Any], kind: type, where: str) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}; it must be an object.")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)
            raise ValueError(f"{where} has {name!r}; the nearest name there is is {near[0]!r}.")
