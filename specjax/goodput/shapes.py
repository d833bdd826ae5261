"""Which programs a choice of settings needs: for each number of rows few widths of the pass."""

from collections.abc import Iterable, Mapping, Sequence

from specjax.goodput.policy import PLAIN, DraftSetting, StepShape, columns_for, step_rows

_LEAST_NODES = 2
"""Nodes a row, the root included, from which on a narrower pass is worth a program."""
_FEW = 4
"""Rows from which on it is worth while to give some more nodes than others."""
_WORTH = 1.25
"""Times the seconds of plain decoding from which on a step could gain from fewer columns."""


def shapes_of(
    settings: Sequence[DraftSetting], rows: int, row_factor: int | None, columns: int
) -> list[StepShape]:
    """Every program that a controller begins with: each takes seconds to compile.

    A setting has for each number of rows the width of all rows' whole trees. No pass has more than
    `columns`, unless its rows need more for a node each below their roots; a setting that would
    have less than half its nodes then is left out, and so is one of drawn nodes other than a chain
    that would lack any: which of them are scored may not depend on the draw.

    Args:
      settings: what a step may draft with.
      rows: how many there are.
      row_factor: see `step_rows`.
      columns: the most of a step.
    """
    sizes = sorted({step_rows(count, rows, row_factor) for count in range(1, rows + 1)})
    return sorted(
        StepShape(setting.name, size, width)
        for size in sizes
        for setting in settings
        if (width := _width(setting, size, columns)) is not None
    )


def narrower(
    settings: Iterable[DraftSetting], seconds: Mapping[StepShape, float]
) -> list[StepShape]:
    """The next programs of fewer columns from which a controller could gain, by what steps take.

    A setting's step of all rows, four at least, may be followed by one of half as many columns,
    over which the likeliest nodes are spread. That can take no less than plain decoding, so that it
    is worth compiling only if the step takes clearly longer. A third width is not: what is tried to
    know more of it cost a simulated load of 200 requests 2 % of its tokens.

    Args:
      settings: what a step may draft with.
      seconds: of every program that is there, while its rows hold little; those of plain decoding
        are.
    """
    rows, found = max(shape.rows for shape in seconds), []
    if rows < _FEW:
        return found
    plain = min(own for shape, own in seconds.items() if shape[:2] == (PLAIN, rows))
    for setting in settings:
        there = [shape for shape in seconds if shape[:2] == (setting.name, rows)]
        if len(there) != 1 or not setting.nodes or (setting.drawn and not setting.is_chain):
            continue
        (whole,) = there
        half = columns_for(whole.width // 2)
        if _LEAST_NODES * rows <= half < whole.width and seconds[whole] >= _WORTH * plain:
            found.append(whole._replace(width=half))
    return found


def _width(setting: DraftSetting, rows: int, columns: int) -> int | None:
    whole = columns_for(rows * (setting.nodes + 1))
    if not setting.nodes:
        return whole
    width = min(whole, max(columns_for(columns), columns_for(2 * rows)))
    if setting.drawn and not setting.is_chain:
        return whole if whole <= width else None
    return None if 2 * (width // rows - 1) < setting.nodes else width
