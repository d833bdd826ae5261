"""What grouped products are of."""

from typing import NamedTuple

from jaxtyping import Array

from pallas_kernels.grouped_matmul.blocks import Blocks


class Operands(NamedTuple):
    """Matrices `[X, O, I]`, or `[L, X, O, I]` of which one `layer` counts, and rows `[R, I]` in the
    order of the blocks.
    """

    weights: tuple[Array, ...]
    rows: Array
    blocks: Blocks
    layer: Array | None = None

    def in_place(self) -> "Operands":
        """With the layers' matrices behind one another, as groups of one stack."""
        if self.layer is None:
            return self
        groups = self.weights[0].shape[1]
        blocks = self.blocks._replace(group=self.blocks.group + self.layer * groups)
        weights = tuple(each.reshape(-1, *each.shape[2:]) for each in self.weights)
        return self._replace(weights=weights, blocks=blocks, layer=None)

    def sliced(self) -> "Operands":
        """With the layer's matrices alone, which XLA reads in the stack, and no kernel does."""
        if self.layer is None:
            return self
        return self._replace(weights=tuple(each[self.layer] for each in self.weights), layer=None)
