"""The engine on the bundled pair under random arrivals: texts against plain decoding, compilations.

    python -m tests.engine_load --method chain --requests 200 --trace 1000

Requests ask for anything and arrive at random. Each text must be that of plain decoding; a greedy
one that is not is shown with the gap of the two largest logits where it first diverges, as rounding
may decide there. Then `--trace` further requests run under jax's transfer guard, with every
compilation counted.
"""

import asyncio
import dataclasses
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from specjax.checkpoints.pair import Pair, load_pair
from specjax.engine.engine import Engine
from specjax.engine.request import Request
from specjax.measure import prompts
from specjax.methods import registry
from specjax.models.transformer import forward
from tests.engines import alone, collected, ids_of, random_request

_BATCH = 25


@dataclasses.dataclass(frozen=True)
class Load:
    """What is sent to the engine."""

    method: str = "chain"
    """What drafts."""
    rows: int = 8
    """Rows of the engine."""
    requests: int = 200
    """Requests whose texts are compared."""
    trace: int = 1000
    """Further ones during which nothing may compile or be transferred unasked."""
    rate: Annotated[float, tyro.conf.arg(help="Arrivals a second, on average.")] = 20.0
    seed: int = 0
    """Names the requests."""


def requests_of(pair: Pair, count: int, seed: int) -> list[Request]:
    """Random requests about the bundled prompts."""
    noise = np.random.default_rng(seed)
    texts = [pair.tokenizer(text).input_ids for _, text in prompts.read(None)]
    found = []
    for _ in range(count):
        asked = random_request(noise, pair.target.config.vocab_size, 64)
        ids = texts[noise.integers(len(texts))]
        length = int(noise.integers(1, min(len(ids), 200) + 1))
        found.append(dataclasses.replace(asked, prompt=ids[:length]))
    return found


def sent(engine: Engine, requests: list[Request], rate: float, seed: int) -> list[list[int]]:
    """What requests get that arrive one after the other, at random times."""
    noise = np.random.default_rng(seed)

    async def all_of_them() -> list[list[int]]:
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(collected(engine.submit(request))))
            await asyncio.sleep(noise.exponential(1 / rate))
        return [ids_of(events) for events in await asyncio.gather(*tasks)]

    return asyncio.run(all_of_them())


def gap_at(pair: Pair, request: Request, text: list[int], at: int) -> float:
    """The gap of the two largest logits before token `at` of a continuation."""
    tokens = jnp.asarray([[*request.prompt, *text[:at]]], jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    logits = np.sort(np.asarray(forward(pair.target, tokens, positions, None, None)[0][0, -1]))
    return float(logits[-1] - logits[-2])


def main() -> None:
    """Runs the load and prints what came of it."""
    load = tyro.cli(Load, config=(tyro.conf.FlagCreatePairsOff,))
    pair = load_pair("bundled")
    drafter = registry.build(registry.setting_of(load.method, drafts=len(pair.drafts)), pair)
    engine = Engine(pair.target, drafter, rows=load.rows, max_model_len=512)
    engine.start()
    asked = requests_of(pair, load.requests, load.seed)
    start = time.perf_counter()
    texts = sent(engine, asked, load.rate, load.seed)
    print(f"{load.method}: {len(asked)} requests in {time.perf_counter() - start:.1f} s")
    expected: list[list[int]] = []
    for first in range(0, len(asked), _BATCH):
        expected += alone(pair.target, asked[first : first + _BATCH])
    for kind, own in (
        ("greedy", lambda request: request.seed is None),
        ("seeded", lambda request: request.seed is not None),
    ):
        rows = [row for row, request in enumerate(asked) if own(request)]
        other = [row for row in rows if texts[row] != expected[row]]
        print(f"  {kind}: {len(rows) - len(other)} of {len(rows)} equal")
        for row in other:
            pairs = zip(texts[row], expected[row], strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), -1)
            print(f"    diverges at {at}, gap {gap_at(pair, asked[row], expected[row], at):.2e}")
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    more = requests_of(pair, load.trace, load.seed + 1)
    jax.config.update("jax_transfer_guard", "disallow")
    sent(engine, more, 10 * load.rate, load.seed)
    jax.config.update("jax_transfer_guard", "allow")
    print(f"  {len(more)} more: {len(compiled)} compilations, failure: {engine.failure}")
    print(f"  {engine.statistics()}")
    engine.close()


if __name__ == "__main__":
    main()
