"""What grouped products are of."""

from typing import NamedTuple

from jaxtyping import Array

from pallas_kernels.grouped_matmul.blocks import Blocks


class Operands(NamedTuple):
    """Matrices `[X, O, I]` and rows `[R, I]` in the order of the blocks."""

    weights: tuple[Array, ...]
    rows: Array
    blocks: Blocks
