"""Which programs a choice of settings needs: for each number of rows few widths of the pass."""

from collections.abc import Sequence

from specjax.goodput.policy import DraftSetting, StepShape, columns_for, step_rows

_LEAST_NODES = 2
"""Nodes a row, the root included, from which on a narrower pass is worth a program."""


def shapes_of(
    settings: Sequence[DraftSetting], rows: int, row_factor: int | None, columns: int
) -> list[StepShape]:
    """Every program of a controller.

    A setting has for each number of rows the width of all rows' whole trees, and in the largest
    step, of four rows at least, also half of it, over which the likeliest nodes are spread: a
    program takes seconds to compile. No pass has more than `columns`, unless
    its rows need more for a node each below their roots; a setting that would have less than half
    its nodes then is left out, and so is one of drawn nodes other than a chain that would lack any:
    which of them are scored may not depend on the draw.

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
        for width in _widths(setting, size, columns, size == sizes[-1])
    )


def _widths(setting: DraftSetting, rows: int, columns: int, largest: bool) -> list[int]:
    each = setting.nodes + 1
    whole = columns_for(rows * each)
    if each == 1:
        return [whole]
    width = min(whole, max(columns_for(columns), columns_for(2 * rows)))
    if setting.drawn and not setting.is_chain:
        return [whole] if whole <= width else []
    if 2 * (width // rows - 1) < setting.nodes:
        return []
    half = columns_for(width // 2)
    narrower = largest and rows >= _FEW and half >= _LEAST_NODES * rows and half < width
    return [width, half] if narrower else [width]


_FEW = 4
"""Rows from which on it is worth while to give some more nodes than others."""
