"""Kernels of tree decoding: arrays in, arrays out. Imports jax only."""
