"""Weights times a few columns on a CPU: a product in C++, which XLA calls.

Weights of float32, bfloat16, 8 and 4 bits times up to 64 columns of float32. It is there where
`pip install` found a C++17 compiler; `status` says whether it is, and why not.
"""

from pallas_kernels.cpu.api import (
    cpu_experts,
    cpu_matmul,
    cpu_matmuls,
    multiplies_bfloat16,
    products,
    share_a_call,
    unable,
    unable_here,
)
from pallas_kernels.cpu.library import MOST_COLUMNS, select, status

__all__ = [
    "MOST_COLUMNS",
    "cpu_experts",
    "cpu_matmul",
    "cpu_matmuls",
    "multiplies_bfloat16",
    "products",
    "select",
    "share_a_call",
    "status",
    "unable",
    "unable_here",
]
