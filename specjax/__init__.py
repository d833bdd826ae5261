"""Lossless speculative decoding with token trees, in JAX."""
