"""Kernels beside what XLA makes of the same operands."""
