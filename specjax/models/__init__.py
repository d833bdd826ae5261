"""The decoder: configuration, layers, KV cache, and the families of published models."""
