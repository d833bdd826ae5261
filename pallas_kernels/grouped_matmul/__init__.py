"""Rows times the matrices of their groups, as mixtures of experts have them on accelerators."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.blocks import Blocks, blocks_of, sizes_of_blocks

__all__ = ["Blocks", "blocks_of", "grouped_matmul", "sizes_of_blocks"]
