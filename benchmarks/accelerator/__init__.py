"""Measurements that are owed on a GPU or TPU: `python -m benchmarks.accelerator FILE.json`.

The file holds `machine` (device and versions), `calls` (when, and how many seconds), and by the
name of a piece its state in `pieces` and what it found in `results`.
"""
