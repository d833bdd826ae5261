"""What the limits of a law cost: milliseconds, beside the softmax alone and a sort of its scores.

python -m tests.limits
"""

import statistics
import time
from collections.abc import Callable

import jax
from jax import lax

from specjax.measure import environment
from specjax.sampling import Sampling, process

SHAPES = ((1, 1, 4096), (1, 17, 4096), (1, 1, 128256), (1, 17, 128256), (8, 9, 128256))
LIMITS = {
    "softmax": {},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "both": {"top_k": 40, "top_p": 0.9},
}
ROUNDS = 15


def milliseconds(function: Callable, *arguments) -> float:
    """The median of several calls of what is compiled."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


if __name__ == "__main__":
    where = environment()
    print(", ".join(f"{name} {where[name]}" for name in ("cpu", "cpu_count", "jax", "date")))
    for shape in SHAPES:
        logits = 3 * jax.random.normal(jax.random.key(0), shape)
        found = {"sort": milliseconds(lambda x: lax.sort(x, dimension=2), logits)}
        for name, limits in LIMITS.items():
            rows = Sampling(temperature=0.8, **limits).rows(shape[0])
            found[name] = milliseconds(process, logits, rows)
        print(*shape, *(f"{name} {taken:.2f}" for name, taken in found.items()), sep="  ")
