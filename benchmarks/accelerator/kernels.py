"""Whether an implementation of tree attention is right on the device at hand.

    python -m benchmarks.accelerator.kernels hopper --json hopper.json
    python -m benchmarks.accelerator.kernels prompts --json prompts.json

"prompts" is what attention of plain sequences takes there. The other cases are those of the
kernels' suite: NaN in every slot past a row's length, ragged rows, windows, capped scores, caches
of 8 bits. Each is held against the definition, computed on the CPU, with the suite's tolerance.
Nothing is interpreted.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.operands import SHAPES, make, tolerance
from pallas_kernels.dispatch import ImplementationError
from pallas_kernels.tree_attention import reference, sequence, tree_attention, xla
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS
from pallas_kernels.tree_attention.operands import Operands
from specjax.base.output import write_json

BOUNDED = ("several tiles", "earlier levels", "head of 256", "more nodes than a mask has words")
OF_8_BITS = ("several tiles", "one key/value head", "head of 96")
PROMPTS = "prompts"
OFF_OF_PROMPTS = 2e-2
"""The largest difference of an output of about 1: a few roundings to bfloat16."""
_AT_ONCE = 8
Sequences = tuple[jax.Array, jax.Array, jax.Array]
"""Queries, keys and values of plain sequences."""
LENGTHS = ([0, 0, 0], [64, 64, 64], [1, 63, 2])


def cases() -> Iterator[tuple[str, Operands]]:
    """A name and operands, a case after the other; the most usual ones come first."""
    for dtype in ("bfloat16", "float32"):
        for name, shape in SHAPES.items():
            yield f"{name}, {dtype}", make(shape, jnp.dtype(dtype))
    at = make(SHAPES["groups of five"], jnp.bfloat16, query_dtype=jnp.bfloat16)
    yield "bfloat16 queries", at
    for name in BOUNDED:
        at = make(SHAPES[name], jnp.bfloat16, first=True, soft_cap=3.0)
        yield f"{name}, windows and capped scores", at
    for lengths in LENGTHS:
        yield f"lengths {lengths}", make(SHAPES["equal heads"], jnp.bfloat16, lengths)
    yield "no cache", make(SHAPES["earlier levels"], jnp.bfloat16)._replace(prefix=None)
    for name in OF_8_BITS:
        for first in (False, True):
            at = make(SHAPES[name], jnp.float32, first=first, bits=8)
            yield f"{name}, 8 bits{', windows' if first else ''}", at


def error_over_tolerance(at: Operands, implementation: str) -> float:
    """The largest error as a share of what the suite allows.

    Raises:
      ImplementationError: it does not run here, or on such operands.
    """
    expected = np.asarray(reference.tree_attention(at), np.float32)
    soft_cap = at.soft_cap
    share = tolerance(at.block_keys.dtype, at.query.shape[-1], at.tree_mask.shape[-1] + at.slots)
    allowed = share * np.abs(expected).max() * (1 if soft_cap is None else 2)
    put = jax.device_put(at._replace(soft_cap=None), jax.devices()[0])
    with jax.default_device(jax.devices()[0]):  # Triton's lowering asks the default device
        found = jax.jit(
            lambda at: tree_attention(
                at.query, at.block_keys, at.block_values, at.tree_mask, at.prefix, first=at.first,
                soft_cap=soft_cap, implementation=implementation,
            )
        )(put)  # fmt: skip
    off = np.abs(np.asarray(found, np.float32) - expected)
    return float(off.max() / allowed) if np.isfinite(off).all() else float("inf")


def row_of(case: str, at: Operands, implementation: str) -> dict[str, Any]:
    """What came of a case: right, wrong, refused or an error."""
    row = {"case": case, "implementation": implementation}
    try:
        off = error_over_tolerance(at, implementation)
    except ImplementationError as refusal:
        return row | {"refused": str(refusal)}
    except Exception as error:  # whatever a compiler raises, the others go on
        return row | {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return row | {"passed": off <= 1, "error_over_tolerance": off}


def prompts() -> Iterator[tuple[str, Sequences, int | None]]:
    """A name, queries, keys and values of plain sequences, and a window or none."""
    for tokens, dim, window in ((96, 64, None), (384, 64, 37), (512, 128, None), (2048, 64, None)):
        keys = jax.random.split(jax.random.key(tokens), 3)
        query = jax.random.normal(keys[0], (2, 8, tokens, dim))
        past, values = (
            jax.random.normal(key, (2, 2, tokens, dim), jnp.bfloat16) for key in keys[1:]
        )
        yield f"{tokens} tokens, heads of {dim}, window {window}", (query, past, values), window


def row_of_prompt(case: str, at: Sequences, window: int | None) -> dict[str, Any]:
    """Whether attention of a plain sequence is right: within the rounding of 16 bits."""
    query, keys, values = at
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    expected = np.asarray(xla.causal(query, *wide, None, window))
    put = jax.device_put(at, jax.devices()[0])
    row = {"case": case, "implementation": PROMPTS}
    try:
        with jax.default_device(jax.devices()[0]):
            found = jax.jit(lambda q, k, v: sequence.causal(q, k, v, None, window))(*put)
    except Exception as error:  # whatever a compiler raises, the others go on
        return row | {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    off = float(np.abs(np.asarray(found) - expected).max() / OFF_OF_PROMPTS)
    return row | {"passed": off <= 1, "error_over_tolerance": off}


def rows_of(implementation: str, limit: int | None) -> Iterator[dict[str, Any]]:
    """What came of so many cases in their order; some are compiled at the same time."""
    if implementation == PROMPTS:
        for case in list(prompts())[:limit]:
            yield row_of_prompt(*case)
        return

    def each(case: tuple[str, Operands]) -> dict[str, Any]:
        with jax.default_device(jax.devices("cpu")[0]):  # of this thread
            return row_of(*case, implementation)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(each, list(cases())[:limit])


def main() -> None:
    """Prints a row a case, and writes all that are done after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator.kernels")
    parser.add_argument("implementation", choices=[*sorted(IMPLEMENTATIONS), PROMPTS])
    parser.add_argument("--json", required=True)
    parser.add_argument("--limit", type=int, help="so many cases")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with jax.default_device(jax.devices("cpu")[0]):
        for row in rows_of(options.implementation, options.limit):
            rows.append(row)
            print(rows[-1], flush=True)
            write_json(options.json, {"complete": False, "rows": rows})
    write_json(options.json, {"complete": True, "rows": rows})


if __name__ == "__main__":
    main()
