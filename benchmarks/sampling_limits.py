"""What the limits of a distribution cost, beside the softmax alone and a sort of its scores; and in
a step.

    python -m benchmarks.sampling_limits --json limits.json

Medians of milliseconds. The steps are those of tiny models with a large vocabulary, temperature
0.8, one row: what is not their sampling is small.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.base.output import write_json
from specjax.base.sampling import Sampling, process
from specjax.checkpoints.pair import Pair
from specjax.decoding.request import prepare
from specjax.measure.timing import clocked, environment, timed, warm_up
from specjax.methods import registry
from specjax.models.config import ModelConfig
from specjax.models.transformer import initialize

LARGE = 128_256
SMALL = ((1, 1, 4096), (1, 17, 4096))
SHAPES = (*SMALL, (1, 1, LARGE), (1, 17, LARGE), (8, 9, LARGE))
LIMITS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "both": {"top_k": 40, "top_p": 0.9},
}
METHODS = ("none", "chain", "tree")
ROUNDS = 15
NEW = 64


def milliseconds(function: Callable, *arguments) -> float:
    """The median of several calls of what is compiled."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    taken = [clocked(partial(compiled, *arguments))[1] for _ in range(ROUNDS)]
    return 1000 * statistics.median(taken)


def of_a_step(pair: Pair, method: str, limits: dict[str, Any]) -> float:
    """The median of several texts' milliseconds a step."""
    drafter = registry.build(registry.setting_of(method), pair)
    sampling = Sampling(temperature=0.8, **limits)
    request = prepare(
        jax.random.key(0), pair.target, drafter, [[1, 2, 3, 4]], max_new_tokens=NEW,
        sampling=sampling, stop_at_eos=False,
    )  # fmt: skip
    warm_up(request)
    made = [timed(request) for _ in range(5)]
    return 1000 * statistics.median(seconds / one.steps.sum() for one, seconds in made)


def tiny_pair(vocabulary: int) -> Pair:
    """A target of two small layers, and a draft that often agrees with it."""
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=512, eos_ids=(0,),
    )  # fmt: skip
    target = jax.tree.map(
        lambda leaf: leaf * (3 if leaf.ndim > 1 else 1), initialize(jax.random.key(0), config)
    )
    noise = np.random.default_rng(1)

    def near(leaf: jax.Array) -> jax.Array:
        own = np.asarray(leaf)
        return jnp.asarray(own + 0.1 * own.std() * noise.standard_normal(own.shape, own.dtype))

    no_tokenizer: Any = None
    return Pair(target, no_tokenizer, [jax.tree.map(near, target)])


def told(found: dict[str, float]) -> str:
    """The figures as text."""
    return "  ".join(f"{name} {taken:.2f}" for name, taken in found.items())


def main() -> None:
    """Prints a line a measurement, and writes all that are made after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_limits")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--small", action="store_true", help="4,096 tokens and plain steps alone")
    options = parser.parse_args()
    where = environment()
    print(", ".join(f"{name} {where[name]}" for name in ("cpu", "cpu_count", "jax", "date")))
    rows: list[dict[str, Any]] = []

    def keep(what: str, found: dict[str, float]) -> None:
        print(what, told(found), sep="  ", flush=True)
        rows.append({"what": what, "milliseconds": found})
        if options.json:
            write_json(options.json, {"env": where, "rows": rows})

    for shape in SMALL if options.small else SHAPES:
        logits = 3 * jax.random.normal(jax.random.key(0), shape)
        found = {"sort": milliseconds(partial(lax.sort, dimension=2), logits)}
        for name, limits in LIMITS.items():
            rows_of = Sampling(temperature=0.8, **limits).rows(shape[0])
            found[name] = milliseconds(process, logits, rows_of)
        keep(" x ".join(map(str, shape)), found)
    pair = tiny_pair(4096 if options.small else LARGE)
    for method in METHODS[: 1 if options.small else None]:
        found = {name: of_a_step(pair, method, limits) for name, limits in LIMITS.items()}
        keep(f"a step of {method}", found)


if __name__ == "__main__":
    main()
