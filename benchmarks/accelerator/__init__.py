"""Measurements that are owed on a GPU or TPU: `python -m benchmarks.accelerator FILE.json`."""
