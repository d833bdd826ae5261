"""The distribution of sampled texts through a running engine, beside others that come and go.

`python -m tests.test_engine_distribution [REQUESTS]` draws more and prints every p-value.
"""

import asyncio
import contextlib
import gc
import sys

import jax
import numpy as np
import pytest

from specjax.engine.request import Request
from specjax.goodput.chunks import PrefillBatch
from specjax.measure.distribution_tests import g_test
from specjax.trees.construction import DISTINCT, TOP_K
from tests import test_sampled_distribution as exact
from tests.engines import collected, ids_of, mixing, random_request, running
from tests.pairs import alone, near
from tests.switched import every_kind, running_at_random, switching_of

pytestmark = [pytest.mark.long_running, pytest.mark.slow]
DRAWN, LEVEL = 1000, 1e-7
AT_ONCE = 64

RULES = {
    "naive": ((2, 1), {}),
    "one-hot": ((2, 1), {"children": TOP_K}),
    "multi-step": ((2, 1), {}),
    "recursive": ((2, 1), {"children": DISTINCT}),
    "block": ((1, 1), {}),
    "traversal": ((2, 1), {"children": DISTINCT}),
}


async def _drawn(engine, count: int) -> tuple[list[tuple[int, ...]], float]:
    """Texts of requests without a seed, each beside mates that ask for other things or leave."""
    noise, room = np.random.default_rng(0), asyncio.Semaphore(AT_ONCE)
    asked = Request(
        prompt=exact.PROMPT, max_new_tokens=exact.TOKENS, temperature=1.3, top_k=exact.KEPT,
        ignore_eos=True,
    )  # fmt: skip
    steps = []

    async def one() -> tuple[int, ...]:
        async with room:
            stream = engine.submit(asked)
            found = tuple(ids_of(await collected(stream)))
            steps.append(stream.statistics.steps)
            return found

    async def mate(request: Request, leaves: bool) -> None:
        async with room:
            stream = engine.submit(request)
            if leaves:
                await stream.__anext__()
                stream.abort()
            await collected(stream)

    mates = [
        mate(random_request(noise, engine.vocab_size, 12), bool(noise.integers(2)))
        for _ in range(count // 6)
    ]
    found = await asyncio.gather(*(one() for _ in range(count)), *mates)
    return [text for text in found if text is not None], len(steps) * exact.TOKENS / sum(steps)


SETTINGS, KINDS, MIXED = "any setting", "any kind of setting", "mixed"
"""Every step with any of the settings that a server chooses from by default, or of any methods, by
the rule of each; and the former with prompts in the passes of steps, and pages that rows share, of
which there are fewer than rows could have."""


def engine_of(rule: str):
    """An engine whose trees are decided by a rule; or by any setting's own."""
    draft, options = near(exact.target(), 1, 0.3), {"max_model_len": 64}
    if rule == MIXED:
        options |= {"page_size": 64, "kv_cache_tokens": 448}
    if rule in (SETTINGS, MIXED):
        return running_at_random(exact.target(), switching_of(draft), 4, **options)
    if rule == KINDS:
        drafter = every_kind(draft, near(exact.target(), 2, 0.3))
        return running_at_random(exact.target(), drafter, 2, 48, **options)
    widths, children = RULES[rule]
    drafter = alone(draft, widths, **children)
    return running(exact.target(), drafter, rows=4, verify=rule, **options)


def p_value(rule: str, count: int) -> tuple[float, float]:
    """Of the G-test, and tokens per step; 0 if a text is not allowed.

    An engine of all programs of a few settings maps half as many pieces of memory as a process may
    (see `timing.MOST_MAPS`), so that it begins without those of the one before.
    """
    gc.collect()  # an engine is in cycles, and holds its programs
    jax.clear_caches()
    cells = {text: cell for cell, text in enumerate(exact.expected())}
    mixed = mixing(PrefillBatch(2, 8, 11)) if rule == MIXED else contextlib.nullcontext(())
    with mixed as read, engine_of(rule) as engine:
        texts, per_step = asyncio.run(_drawn(engine, count))
        assert engine.page_counts is not None
    assert bool(read) == (rule == MIXED)
    found = np.array([cells.get(text, -1) for text in texts])
    assert len(found) == count
    return (0.0 if found.min() < 0 else g_test(found, exact.distributions()).p_value), per_step


@pytest.mark.parametrize(
    "rule", ["naive", "multi-step", "block", "traversal", SETTINGS, KINDS, MIXED]
)
def test_the_distribution_through_an_engine_is_that_of_plain_decoding(rule):
    found, per_step = p_value(rule, DRAWN)
    assert found > LEVEL
    assert per_step > 1.1


def main() -> None:
    """Draws as many texts for every rule as the first argument says."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
    for rule in (*RULES, SETTINGS, KINDS, MIXED):
        found, per_step = p_value(rule, count)
        print(
            f"{rule}: p = {found:.4g} of {count} texts, {per_step:.2f} tokens per step", flush=True
        )


if __name__ == "__main__":
    main()
