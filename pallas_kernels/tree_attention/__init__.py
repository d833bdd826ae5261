"""Attention of tree nodes to a cached prefix and to their own ancestors."""

from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.operands import Prefix, quantized

__all__ = ["Prefix", "quantized", "tree_attention"]
