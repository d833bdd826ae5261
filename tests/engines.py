"""Engines of tiny models, and requests sent to them all at once."""

import asyncio
import contextlib
import time
from collections import abc
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.base.sampling import NUMBERS, Sampling, fold
from specjax.draft.drafter import Drafter
from specjax.engine import engine as engines
from specjax.engine import scheduler
from specjax.engine.device import Device
from specjax.engine.engine import Engine
from specjax.engine.request import Request, Tokens
from specjax.engine.sequence import Sequence
from specjax.goodput.chunks import PrefillBatch
from specjax.models.transformer import Model


@contextlib.contextmanager
def running(target, drafter, **options) -> Iterator[Engine]:
    """An engine that serves, and is closed in the end."""
    engine = Engine(target, drafter, **({"rows": 3, "max_model_len": 128} | options))
    engine.start()
    try:
        yield engine
        assert engine.failure is None
        end = time.monotonic() + 10  # its thread may not have seen yet that somebody left
        while engine.num_requests_running + engine.num_requests_waiting and time.monotonic() < end:
            time.sleep(0.01)
        assert (engine.num_requests_running, engine.num_requests_waiting) == (0, 0)
    finally:
        engine.close()


@contextlib.contextmanager
def mixing(prompts: PrefillBatch) -> Iterator[list[int]]:
    """Engines that start here read prompts in steps wherever they can; how many rows each read."""
    advance, found = Device.advance, []

    def counted(self, *given, prompts=(), **more):
        found.extend(map(len, prompts))
        return advance(self, *given, prompts=prompts, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "_CPU_MIXED", prompts)
        patch.setattr(engines, "_ROWS_A_PROMPT", 1)
        patch.setattr(engines, "_mixed_steps", lambda own: list(own.mixed_shapes.values()))
        patch.setattr(scheduler, "mixing_pays", lambda *_: True)
        patch.setattr(Device, "advance", counted)
        yield found


async def collected(sequence: Sequence) -> list[Tokens]:
    return [tokens async for tokens in sequence]


def ids_of(events: abc.Sequence[Tokens]) -> list[int]:
    return [token for event in events for token in event.ids]


def served(engine: Engine, requests: abc.Sequence[Request]) -> list[list[Tokens]]:
    """What every request got, all sent at once."""

    async def all_of_them() -> list[list[Tokens]]:
        return await asyncio.gather(*map(collected, engine.submit_all(requests)))

    return asyncio.run(all_of_them())


def alone(target, requests: abc.Sequence[Request]) -> list[list[int]]:
    """The texts of requests by plain decoding: of greedy ones, and of those that have a seed."""
    sampling = {name: np.asarray([getattr(each, name) for each in requests]) for name in NUMBERS}
    keys = [
        fold(jax.random.key(each.seed or 0, impl="threefry2x32"), each.choice) for each in requests
    ]
    most = max(each.max_new_tokens for each in requests)
    made = specjax.generate(
        jnp.stack(keys), target, None, [each.prompt for each in requests], max_new_tokens=most,
        sampling=Sampling(**sampling, logit_bias=[dict(each.logit_bias) for each in requests]),
        stop_at_eos=False,
    )  # fmt: skip
    found = []
    for each, text in zip(requests, made.tokens[:, :most].tolist(), strict=True):
        own = text[: each.max_new_tokens]
        ends = {*each.stop_token_ids, *(() if each.ignore_eos else target.config.eos_ids)}
        end = next((at for at, token in enumerate(own) if token in ends), len(own))
        found.append(own[: end + 1])
    return found


def random_request(drawn: np.random.Generator, vocabulary: int, most: int = 24) -> Request:
    """A greedy request, or a sampled one with a seed, that asks for anything `generate` has."""
    length = int(drawn.choice([1, 2, 5, 17, 40]))
    sampled = bool(drawn.integers(2))

    def some(name: str, *values: float) -> dict[str, float]:
        return {name: float(drawn.choice(values))} if drawn.integers(3) == 0 else {}

    bias = {int(drawn.integers(vocabulary)): float(drawn.normal(0, 3)) for _ in range(2)}
    return Request(
        prompt=drawn.integers(0, vocabulary, length).tolist(),
        max_new_tokens=int(drawn.integers(1, most)),
        temperature=float(drawn.choice([0.6, 1.0, 1.4])) if sampled else 0.0,
        top_k=int(drawn.choice([0, 3, 12])),
        seed=int(drawn.integers(2**32)) if sampled else None,
        ignore_eos=bool(drawn.integers(2)),
        logprobs=[None, 0, 4][drawn.integers(3)],
        logit_bias=bias if drawn.integers(4) == 0 else {},
        **some("top_p", 0.6, 0.9),
        **some("min_p", 0.05, 0.2),
        **some("presence_penalty", -0.5, 1.0),
        **some("frequency_penalty", -0.5, 1.0),
        **some("repetition_penalty", 0.8, 1.5),
    )


def check_rows_that_share(target: Model, drafter: Drafter) -> None:
    """Texts are those of plain decoding in rows that come and go, and take over what others hold,
    one after the other and all at once.
    """
    begun = np.random.default_rng(0).integers(0, target.config.vocab_size, 40).tolist()
    prompts = [begun, [*begun[:35], 3], [*begun[:20], 7, 9], [5]]
    asked = [Request(prompt=prompt, max_new_tokens=21, ignore_eos=True) for prompt in prompts]
    with running(target, drafter, rows=2) as engine:
        found = [served(engine, [each])[0] for each in asked] + served(engine, asked)
        assert engine.statistics().cached_tokens > 0
    assert list(map(ids_of, found)) == alone(target, asked) * 2
