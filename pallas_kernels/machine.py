"""What the machine can do, measured: the floor that times are held against."""

import time

import jax
import jax.numpy as jnp

READ_BYTES = {"cpu": 2**29}
"""Bytes that are summed, by platform: far more than its caches hold, and on an accelerator enough
that starting the program is nothing beside it."""
_READ_BYTES = 2**33
_ROUNDS = 9


def read_bandwidth() -> float:
    """Bytes a second that a jitted float32 sum over 512 MiB (8 GiB off CPUs) reads: the best of 9.

    A device with less memory free sums a half of that.
    """
    size = READ_BYTES.get(jax.default_backend(), _READ_BYTES)
    memory = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in memory:
        size = min(size, (memory["bytes_limit"] - memory.get("bytes_in_use", 0)) // 2)
    ones = jnp.ones((512, size // 2048), jnp.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    total(ones).block_until_ready()
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        total(ones).block_until_ready()
        times.append(time.perf_counter() - begin)
    return ones.nbytes / min(times)
