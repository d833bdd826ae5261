"""Clocks, benchmarks, tuning, and the losslessness certificate."""
